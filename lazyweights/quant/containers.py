"""Containers: llama.cpp's integer formats, used with steps that are shared instead of fitted to each block.

In every container a weight is ``step * code`` with a signed code around 0, and 0 is one fixed stored code:

========= ======= ========= ============ ===========================================================
container block   sub-block codes        how a step is stored
========= ======= ========= ============ ===========================================================
Q8_0      32      32        -127 to 127  d = step
Q5_0      32      32        -16 to 15    d = step
Q4_0      32      32        -8 to 7      d = step
Q5_1      32      32        -16 to 15    d = step, m = -16 d
Q4_1      32      32        -8 to 7      d = step, m = -8 d
Q6_K      256     16        -32 to 31    d * sub-scale = step
Q5_K      256     32        -16 to 15    d * sub-scale = step, dmin = 16 d, sub-min = sub-scale
Q4_K      256     32        -8 to 7      d * sub-scale = step, dmin = 8 d, sub-min = sub-scale
Q3_K      256     16        -4 to 3      d * (sub-scale - 32) = step
Q2_K      256     16        -2 to 1      d * sub-scale = step, dmin = 2 d, sub-min = sub-scale
========= ======= ========= ============ ===========================================================

A sub-block in which a weight is out of reach gets a wider step: by quarters of octaves, in K-quants 2, 4, 8 ... times as wide.
K-quants leave half of the range of their sub-scales for that, and double d for what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lazyweights.blocks.planes import Planes, join
from lazyweights.errors import QuantizationError


@dataclass(frozen=True)
class Container:
    """An integer format.

    Attributes
    ----------
    name : str
    type_id : int
        GGML type.
    block_columns, sub_columns : int
        Columns that share d, and columns that share a step.
    zero_code : int
        What is stored for 0.
    lowest, highest : int
        Range of the signed codes that are used.
    max_sub_scale : int
        Largest multiple of d; 1 where there are no sub-scales.
    sub_scale_offset : int
        Stored for a multiple of 0.
    has_min : bool
        Whether 0 is put at its code by a min.
    """

    name: str
    type_id: int
    block_columns: int
    sub_columns: int
    zero_code: int
    lowest: int
    highest: int
    max_sub_scale: int = 1
    sub_scale_offset: int = 0
    has_min: bool = False

    @property
    def may_trellis(self) -> bool:
        """Whether a coded file can make use of codes that obey a trellis: it codes narrower ones in pairs."""
        return self.bits >= 5

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (self.highest - self.lowest).bit_length()


CONTAINERS = {
    container.name: container
    for container in (
        Container("Q2_K", 10, 256, 16, 2, -2, 1, 15, 0, True),
        Container("Q3_K", 11, 256, 16, 4, -4, 3, 31, 32),
        Container("Q4_0", 2, 32, 32, 8, -8, 7),
        Container("Q4_1", 3, 32, 32, 8, -8, 7, has_min=True),
        Container("Q4_K", 12, 256, 32, 8, -8, 7, 63, 0, True),
        Container("Q5_0", 6, 32, 32, 16, -16, 15),
        Container("Q5_1", 7, 32, 32, 16, -16, 15, has_min=True),
        Container("Q5_K", 13, 256, 32, 16, -16, 15, 63, 0, True),
        Container("Q6_K", 14, 256, 16, 32, -32, 31, 127),
        Container("Q8_0", 8, 32, 32, 0, -127, 127),
    )
}
"""By name, from few bits to many."""


def find_container(name: str) -> Container:
    """Return a container by its name, in any case.

    Raises
    ------
    QuantizationError
        If there is none of that name.
    """
    found = CONTAINERS.get(name.upper())
    if found is None:
        raise QuantizationError(f"there is no container {name!r}; there are {', '.join(CONTAINERS)}")
    return found


def split_steps(container: Container, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose d and sub-scales for wanted steps of a row.

    Parameters
    ----------
    container : Container
    steps : numpy.ndarray
        float64 (n / sub_columns,), above 0.

    Returns
    -------
    scales : numpy.ndarray
        float64 (n / block_columns,), d with three bits behind the leading one, so that many are equal.
    sub_scales : numpy.ndarray
        int32 (n / sub_columns,), all 1 where the container has none.
    """
    if container.max_sub_scale == 1:
        return snap(steps), np.ones(len(steps), np.int32)
    blocks = steps.reshape(-1, container.block_columns // container.sub_columns)
    most = container.max_sub_scale // 2
    scales = snap(blocks.max(axis=1) / most * (1 + 1 / 31))  # rounding down still leaves room
    sub_scales = np.clip(np.rint(blocks / scales[:, None]), 1, most)
    return scales, sub_scales.astype(np.int32).reshape(-1)


def snap(values: np.ndarray) -> np.ndarray:
    """Round positive numbers to four significant bits.

    Examples
    --------
    >>> snap(np.array([1.0, 1.06, 1.07, 0.3]))
    array([1.    , 1.    , 1.125 , 0.3125])
    """
    fraction, exponent = np.frexp(np.asarray(values, np.float64))
    return np.ldexp(np.rint(fraction * 16) / 16, exponent)


def pack(
    container: Container, shape: tuple[int, int], codes: np.ndarray, scales: np.ndarray, sub_scales: np.ndarray
) -> np.ndarray:
    """Return the packed bytes of rows.

    Parameters
    ----------
    container : Container
    shape : tuple of int
        (rows, columns).
    codes : numpy.ndarray
        int8 (rows, columns), signed codes.
    scales : numpy.ndarray
        float32 (rows, columns / block_columns), d, each a number of half precision.
    sub_scales : numpy.ndarray
        uint8 (rows, columns / sub_columns).

    Returns
    -------
    numpy.ndarray
        uint8, flat.
    """
    rows, columns = shape
    halves = scales.astype(np.float16)
    planes: dict[str, np.ndarray] = {"scale": halves.view(np.uint16)[None]}
    if container.has_min:
        zero = container.zero_code if container.max_sub_scale > 1 else -container.zero_code
        with np.errstate(over="ignore"):
            mins = (scales * np.float32(zero)).astype(np.float16)
        if not np.isfinite(mins).all():
            raise QuantizationError(f"steps are too large for {container.name}: choose another container")
        planes["min_scale" if container.max_sub_scale > 1 else "min"] = mins.view(np.uint16)[None]
    if container.max_sub_scale > 1:
        planes["sub_scale"] = (sub_scales + np.uint8(container.sub_scale_offset))[None]
        if container.has_min:
            planes["sub_min"] = sub_scales[None]
    planes["codes"] = (codes.view(np.uint8) + np.uint8(container.zero_code))[None]
    return join(Planes(container.type_id, (1, rows, columns), planes))
