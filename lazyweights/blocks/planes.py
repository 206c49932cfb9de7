"""A packed tensor as planes: `split` and `join`, inverse bijections on all byte strings.

Every plane is a 3-D array of unsigned integers, ``(outer, rows, values per row)``, so an expert of a 3-D tensor is
``plane[e]`` and a row group ``plane[e, a:b]``. The values are the stored ones: ``scale`` of a `Q4_K` tensor holds the
raw 16 bits of the fp16 number, ``codes`` of a `Q8_0` tensor the raw byte of the int8.

Surprise: the work runs over short runs of blocks, so that one run of packed bytes and its planes stay in the
processor's cache while they are checked, read and written.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import numpy as np

from ..errors import BlockLayoutError
from .codebook import CODEBOOK_LAYOUTS
from .floats import FLOAT_LAYOUTS
from .fp4 import FP4_LAYOUTS
from .k_quants import K_QUANT_LAYOUTS
from .layout import BlockLayout, PlaneDict, PlaneSpec
from .plain import PLAIN_LAYOUTS
from .simple import SIMPLE_LAYOUTS
from .ternary import TERNARY_LAYOUTS
from .types import GGML_TYPES, type_name

MAX_DIMS = 4
"""The most dimensions a GGUF tensor has."""

RUN_BYTES = 1 << 17
"""Packed bytes handled at a time: a run and its planes fit a per-core cache."""

_LAYOUTS: dict[int, BlockLayout] = {
    layout.type_id: layout
    for layout in (
        *SIMPLE_LAYOUTS,
        *K_QUANT_LAYOUTS,
        *TERNARY_LAYOUTS,
        *FLOAT_LAYOUTS,
        *PLAIN_LAYOUTS,
        *FP4_LAYOUTS,
        *CODEBOOK_LAYOUTS,
    )
}


@dataclass(frozen=True)
class Planes:
    """The planes of one tensor.

    Attributes
    ----------
    type_id : int
        GGML type the planes came from.
    shape : tuple of int
        ``(outer, rows, columns)``: outer is the product of ``ne[2:]``, rows ``ne[1]``, columns ``ne[0]``.
    planes : dict of str to numpy.ndarray
        In the order of `plane_names`; each ``(outer, rows, values per row)`` in the dtype of its `PlaneSpec`.
    """

    type_id: int
    shape: tuple[int, int, int]
    planes: dict[str, np.ndarray]


def plane_specs(type_id: int) -> tuple[PlaneSpec, ...]:
    """Return what the planes of a type hold, in their documented order.

    Raises
    ------
    BlockLayoutError
        The type is removed or unknown.
    """
    return _layout(type_id).specs


def plane_names(type_id: int) -> tuple[str, ...]:
    """Return the names of the planes of a type, in their documented order.

    Raises
    ------
    BlockLayoutError
        The type is removed or unknown.

    Examples
    --------
    >>> plane_names(12)
    ('scale', 'min_scale', 'sub_scale', 'sub_min', 'codes')
    """
    return tuple(spec.name for spec in plane_specs(type_id))


def split(type_id: int, data: np.ndarray | bytes | memoryview, shape: tuple[int, ...]) -> Planes:
    """Split the packed bytes of a tensor into its planes.

    Parameters
    ----------
    type_id : int
        GGML type id, a key of `types.GGML_TYPES`.
    data : array or buffer
        The packed bytes, whole; an array of any dtype counts as its bytes. Never written to, never kept.
    shape : tuple of int
        GGUF order, ``ne[0]`` (columns) first, at most four; missing dimensions are 1.

    Returns
    -------
    Planes
        New arrays; `join` gives `data` back byte for byte.

    Raises
    ------
    BlockLayoutError
        The type is removed or unknown (its bytes stay raw); a dimension is negative or there are more than four;
        the columns are no multiple of the block size; the byte count is not the one of the shape.

    Examples
    --------
    >>> packed = bytes([0x00, 0x3C]) + bytes(range(0x10, 0x20))  # one Q4_0 block: d = 1.0, sixteen nibble pairs
    >>> planes = split(2, packed, (32,))
    >>> hex(planes.planes["scale"][0, 0, 0]), planes.planes["codes"][0, 0, 14:18].tolist()
    ('0x3c00', [14, 15, 1, 1])
    >>> join(planes).tobytes() == packed
    True
    """
    layout = _layout(type_id)
    outer, rows, columns = _plane_shape(shape)
    n_blocks = _block_count(type_id, outer, rows, columns)
    packed = _as_bytes(data)
    block_bytes = GGML_TYPES[type_id].block_bytes
    if packed.size != n_blocks * block_bytes:
        raise BlockLayoutError(
            f"a {type_name(type_id)} tensor of {outer} x {rows} x {columns} elements has another byte count",
            expected=n_blocks * block_bytes,
            found=packed.size,
        )
    blocks = packed.reshape(n_blocks, block_bytes)
    flat = {spec.name: np.empty((n_blocks, spec.per_block), spec.dtype) for spec in layout.specs}
    run = max(1, RUN_BYTES // block_bytes)
    for start in range(0, n_blocks, run):
        part = slice(start, start + run)
        layout.split_blocks(_read_only(blocks[part]), {name: array[part] for name, array in flat.items()})
    return Planes(
        type_id,
        (outer, rows, columns),
        {spec.name: flat[spec.name].reshape(_shape_of(spec, type_id, (outer, rows, columns))) for spec in layout.specs},
    )


def join(planes: Planes) -> np.ndarray:
    """Pack planes into the bytes they came from.

    Parameters
    ----------
    planes : Planes
        As `split` returns it; the arrays may be read-only, or strided views.

    Returns
    -------
    numpy.ndarray
        1-D uint8, byte-equal to what was split.

    Raises
    ------
    BlockLayoutError
        The type is removed or unknown; a plane is missing, extra, or has another dtype or shape than its
        `PlaneSpec`; a value needs more bits than the format stores.
    """
    layout = _layout(planes.type_id)
    outer, rows, columns = _three_dims(planes.shape)
    n_blocks = _block_count(planes.type_id, outer, rows, columns)
    flat = _checked_planes(layout, planes, n_blocks)
    block_bytes = GGML_TYPES[planes.type_id].block_bytes
    blocks = np.empty((n_blocks, block_bytes), np.uint8)
    run = max(1, RUN_BYTES // block_bytes)
    for start in range(0, n_blocks, run):
        part = slice(start, start + run)
        views = {name: _read_only(array[part]) for name, array in flat.items()}
        _check_values(layout, views)
        layout.join_blocks(views, blocks[part])
    return blocks.reshape(-1)


def _layout(type_id: int) -> BlockLayout:
    layout = _LAYOUTS.get(type_id)
    if layout is None:
        raise BlockLayoutError(
            f"type {type_id} is removed or unknown, so its blocks cannot be split: the tensor stays raw",
            expected="a GGML type of the type table",
            found=type_id,
        )
    return layout


def _plane_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) > MAX_DIMS:
        raise BlockLayoutError(
            "a GGUF tensor has too many dimensions", expected=f"at most {MAX_DIMS}", found=len(shape)
        )
    ne = tuple(_dimension(size) for size in shape) + (1,) * (MAX_DIMS - len(shape))
    return math.prod(ne[2:]), ne[1], ne[0]


def _three_dims(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise BlockLayoutError(
            "planes need the shape (outer, rows, columns)", expected="3 dimensions", found=f"{len(shape)} dimensions"
        )
    outer, rows, columns = (_dimension(size) for size in shape)
    return outer, rows, columns


def _dimension(size: int) -> int:
    try:
        exact = operator.index(size)
    except TypeError:
        exact = -1
    if exact < 0:
        raise BlockLayoutError("a tensor dimension is not a size", expected="an integer >= 0", found=size)
    return exact


def _block_count(type_id: int, outer: int, rows: int, columns: int) -> int:
    block_size = GGML_TYPES[type_id].block_size
    if columns % block_size:
        raise BlockLayoutError(
            f"the columns of a {type_name(type_id)} tensor do not fill whole blocks",
            expected=f"a multiple of {block_size}",
            found=columns,
        )
    return outer * rows * (columns // block_size)


def _shape_of(spec: PlaneSpec, type_id: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    outer, rows, columns = shape
    return outer, rows, columns // GGML_TYPES[type_id].block_size * spec.per_block


def _as_bytes(data: np.ndarray | bytes | memoryview) -> np.ndarray:
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    view = memoryview(data)
    return np.frombuffer(view if view.c_contiguous else view.tobytes(), np.uint8)


def _read_only(array: np.ndarray) -> np.ndarray:
    # One numba signature per kernel: a mapped file is read-only, a fresh array is not, and each compiles anew.
    view = array.view()
    view.flags.writeable = False
    return view


def _checked_planes(layout: BlockLayout, planes: Planes, n_blocks: int) -> PlaneDict:
    names = [spec.name for spec in layout.specs]
    if set(planes.planes) != set(names):
        raise BlockLayoutError(
            f"these are not the planes of {type_name(layout.type_id)}", expected=names, found=list(planes.planes)
        )
    flat = {}
    for spec in layout.specs:
        array = planes.planes[spec.name]
        if array.dtype != spec.dtype:
            raise BlockLayoutError(
                f"plane {spec.name!r} has the wrong dtype", expected=str(spec.dtype), found=str(array.dtype)
            )
        shape = _shape_of(spec, layout.type_id, planes.shape)
        if array.shape != shape:
            raise BlockLayoutError(f"plane {spec.name!r} has the wrong shape", expected=shape, found=array.shape)
        flat[spec.name] = np.require(array, requirements=["C", "A"]).reshape(n_blocks, spec.per_block)
    return flat


def _check_values(layout: BlockLayout, views: PlaneDict) -> None:
    for spec in layout.specs:
        if spec.is_full:
            continue
        largest = int(views[spec.name].max())
        if largest >> spec.bits:
            raise BlockLayoutError(
                f"plane {spec.name!r} of {type_name(layout.type_id)} holds a value its {spec.bits} bits cannot store",
                expected=f"below {1 << spec.bits}",
                found=largest,
            )
