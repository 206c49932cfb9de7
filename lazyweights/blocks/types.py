"""The GGML tensor types: id, name, and how many elements and bytes one block holds.

Source: the public type list of GGUF (ggml-common.h). Removed ids and ids of forks are not in the
table: `GGML_TYPES.get(type_id)` is None for them, and their bytes stay raw.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GGMLType:
    """One GGML type.

    Attributes
    ----------
    type_id : int
        The id in a GGUF tensor description.
    name : str
        The name llama.cpp prints, for example ``Q4_K``.
    block_size : int
        Elements in one block.
    block_bytes : int
        Bytes of one block.
    """

    type_id: int
    name: str
    block_size: int
    block_bytes: int

    @property
    def bpw(self) -> float:
        """Bits per weight of the packed form."""
        return 8.0 * self.block_bytes / self.block_size


_ROWS = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
)

GGML_TYPES: dict[int, GGMLType] = {row[0]: GGMLType(*row) for row in _ROWS}
TYPE_BY_NAME: dict[str, GGMLType] = {t.name: t for t in GGML_TYPES.values()}


def type_name(type_id: int) -> str:
    """Return the name of a type, or ``type<id>`` for a removed or unknown id.

    >>> type_name(12), type_name(4)
    ('Q4_K', 'type4')
    """
    known = GGML_TYPES.get(type_id)
    return known.name if known else f"type{type_id}"
