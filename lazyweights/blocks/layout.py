"""How one block is described: its planes, and the two functions that map block bytes to planes and back.

A plane holds a fixed number of values per block, so the planes of ``n`` blocks are ``(n, per_block)`` arrays and
the blocks themselves an ``(n, block_bytes)`` uint8 array. All functions here work on such a run of blocks; rows and
outer dimensions are the business of `planes`.

Planes come in the order in which a decoder wants them: scales and mins first, because their values select the
table with which the codes behind them are decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PlaneDict = dict[str, np.ndarray]


@dataclass(frozen=True)
class PlaneSpec:
    """What one plane of a type holds.

    Attributes
    ----------
    name : str
        Key in `Planes.planes`.
    dtype : numpy.dtype
        Unsigned integer type of the values.
    per_block : int
        Values in one block.
    bits : int
        Every value is below ``1 << bits``.
    """

    name: str
    dtype: np.dtype
    per_block: int
    bits: int

    @property
    def is_full(self) -> bool:
        """Whether every value of `dtype` is allowed."""
        return self.bits == 8 * self.dtype.itemsize


@dataclass(frozen=True)
class BlockLayout:
    """The planes of one type and the way to and from its bytes.

    Attributes
    ----------
    type_id : int
        A key of `types.GGML_TYPES`.
    specs : tuple of PlaneSpec
        The planes in documented order.
    split_blocks : callable
        ``split_blocks(blocks, out)``: read ``(n, block_bytes)`` uint8, fill every plane of the dict `out`.
    join_blocks : callable
        ``join_blocks(planes, blocks)``: the inverse; every byte of `blocks` is written. Values are in range.
    """

    type_id: int
    specs: tuple[PlaneSpec, ...]
    split_blocks: Callable[[np.ndarray, PlaneDict], None]
    join_blocks: Callable[[PlaneDict, np.ndarray], None]


def plane(name: str, per_block: int, bits: int) -> PlaneSpec:
    """Return the spec of a plane in the narrowest unsigned type that holds `bits` bits.

    >>> plane("sub_scale", 8, 6)
    PlaneSpec(name='sub_scale', dtype=dtype('uint8'), per_block=8, bits=6)
    """
    return PlaneSpec(name, np.min_scalar_type((1 << bits) - 1), per_block, bits)


def kernel_layout(type_id: int, specs: tuple[PlaneSpec, ...], stem: str) -> BlockLayout:
    """Return a layout served by ``kernels.split_<stem>(blocks, *planes)`` and ``kernels.join_<stem>``.

    The kernels take the planes as positional arguments in the order of `specs`. They are looked up at the first
    call, which loads numba.
    """

    def split_blocks(blocks: np.ndarray, out: PlaneDict) -> None:
        from . import kernels

        getattr(kernels, f"split_{stem}")(blocks, *(out[spec.name] for spec in specs))

    def join_blocks(planes: PlaneDict, blocks: np.ndarray) -> None:
        from . import kernels

        getattr(kernels, f"join_{stem}")(blocks, *(planes[spec.name] for spec in specs))

    return BlockLayout(type_id, specs, split_blocks, join_blocks)
