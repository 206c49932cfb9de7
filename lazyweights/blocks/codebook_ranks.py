"""Ranks of the indices of vector codebooks: indices of grid points of about the same length stand side by side.

A quantizer takes short grid points more often than long ones, whatever their place in the codebook. An index of more than eight
bits is coded by its high bits, the others are stored raw; so what shares the high bits should occur equally often. The *rank* of
an index is its place when the points of ggml's grid are sorted by the sum of their squares, the smaller index first.
"""

from __future__ import annotations

import base64
import functools
import zlib

import numpy as np

_LENGTHS = {
    "IQ1_S": (
        "c-nnc3wFaW2wRI#bN>_1e2vp=?W;>L#vlZ_E?yV)S|7EK3%1Z7W0fuTzG)bS?9*lm7Z8U;A@UXpACTD6GG<EC>-oSw_I3LbID%zGiXE-"
        ")DBxjaAZgHkHEw~eYmu@ot^GuICMK=#>%A1Ag#S!Nq9AC$y7bF&_~N`)cBF+K@*<?02$rJ~rbr~%P>e_SSy0=#&r#y@$<u4MAw~qFWL|8)pC*xC1>2M<Z>"
        "+e!xus_=l^aSO`Pcrsb9!c&rWtgYIb2md|CjeFk_o13WP>I90;_sf985LXC^kcuCU=)Dk_{NK&$I@x6-"
        ";y9h~UwSHs69!QjC&8LK#ltfHO5bU;|dkW@xEK1$$7ou3O9N=T&0v;KWS<C$|&WIs|$14B3KOS-"
        "lZLX3wgV_XoR03zCP_&9R>lJ55A^0xYlp0J~+*nUd+wW^-*=?bdAMq9WP-xzRWUW{#w0W11%^f_Si&5xLj{W6qqL(K$&fLGzQ24bI7Bjm~ZwKDAAyy~o_&"
        "({oSGo@NE{7hMZj)?lBnf$jAiSN~6M9!+~cCfF1|`b>`@o$L<+U<{=_aSPQukCF)JJ_L8SOH3%p39I5^I*X3x(>+{wVQ*Es;l(b6kzuJnd>)D@8jP1$&yF"
        "4_WR=TiG4vqKLk;pBGECay7e~t`2m"
    ),
    "IQ2_XS": (
        "c-"
        "m!9339|R2x}5*sJUFy{{O25vYTELXE28(<d=Qh$F>3N13GSSz?A{eU7;%+eS38C01o{IT@wiRHP4j_5EW=9st9PzRdtdv)&EiC{7(u%hSH_Ggh_imJJ~`3"
        "G>)f4)+%O)hqh7@A{%+6-eg@as%xFUg{cVtC`)g7TkBf6It&Ec8<setJ-"
        "4Id!oKD>M$aO0{cP5gma8;U#6jGF5#Nl$+~V=H+7@)RZ{#tjRsw{z4Vt78@f?t)E6!qL0%7w~V9Srg%nLY|vPBY{y2#!m5oujK&X4%~0_v9y!~"
    ),
    "IQ2_S": (
        "c-nna3zozn2-~()B5LRUw_U(*x80dHPX!`@V1M>)58Fnx2l9QRgNOjLi2~wu+Ik$!#4rdCP_zrg3SQxW?eH7m3c>1R-"
        "wr<65n#(}DDpFUen2yO#5mPJZu}jnt{5}YLOzOxXZ=HsCwBu8bBF#{<aF42+M$(fcT4ZIp~pdklGK!2R~8JhcSNZ4>avCqa~{Htd>CY679{wFe3_AR%2yW"
        "xO^G=Lx^)MB8Np53ubMrjkQuX1#8kzt`ZbDsEsy+Pm6q2*w9{EFS&9)`lvK(r>b)jObDW+<r1?=&Y2yoBDO3O1X0opVHB@8E{3e|}h=e{spI<8Z>iO20`_"
        "CmSYrVBVZObziJvg<!9(xg@Pbgpdx5t5$G_Hmyhq|uMFUUd~w*"
    ),
    "IQ3_S": (
        "c-ke8>2jkm0E4#;yPPK27$4wpxi&`<D2dJS{x7z4`cu-3^y$yX<tjctose7{6a|3mB+J-"
        "M??2w>1v)|Pk&LSPj4LPLZsw<n7*bZL$RmCPP?KkDlS=@*n5H<-"
        "HR34iioCbSGEyPBm#B2rn*MHoJ3UxBt_MY~XniVr0sp)hKwQ2Z4>v9ZF>bl^p!DKU1BxmM^D9A=jrkXZ6cb)^X-"
        "8YivT0uD%*F9fHaF&O)cR4J3Y3{jO^*9FYyuKuh~1<Ou2Bz*MLzt9g;$bfguUY-"
        "A*5xGU0`NJH?hKqb()$@&6Do|BF}q8nm<S*Pldt+3cdRvLYx6WlkASDc#RW5n$T9wgz&B$j&0GhSN#^?7|<cjxQ;u3AgqgGh|~B6Io;KeBbpMbFm2Xy>Fs"
        "UNv+35yx}qe{&VS8eA*nFtGr|RXc5ESLP{)=_(eCX!y_d-@R4CDmgj*|mwSJpIS8AEJuhATbdG9A})o$9Fx*DHrJ=9jJS>3m-v(LdUyV>{uN#HoG"
    ),
}
"""By type: the place of each point's sum of squares among those that occur, a byte each, compressed (zlib, base 85)."""

_SAME_GRID = {"IQ1_M": "IQ1_S"}


@functools.cache
def indices_by_rank(type_name: str) -> np.ndarray:
    """Return the index of each rank, uint16 (codebook size,); not to be changed.

    >>> indices_by_rank("IQ1_S").shape
    (2048,)
    """
    packed = _LENGTHS[_SAME_GRID.get(type_name, type_name)]
    lengths = np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8)
    return np.argsort(lengths, kind="stable").astype(np.uint16)


@functools.cache
def ranks_of_indices(type_name: str) -> np.ndarray:
    """Return the rank of each index, uint16 (codebook size,); not to be changed."""
    order = indices_by_rank(type_name)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order), dtype=np.uint16)
    return ranks
