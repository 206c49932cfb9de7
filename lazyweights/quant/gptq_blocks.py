"""GPTQ layers as GGML blocks: the same products, scale times integer, in the smallest type that holds the integers.

A weight of GPTQ is ``scale * (code - zero)``, one of Q4_0, Q5_0 and Q8_0 is ``scale * integer`` with a float16 scale for each
32 neighbours of a row. So zero points disappear into the integers, scales are copied bit by bit, and a layer is held exactly if

- each 32 neighbouring inputs have equal scales: they are of one group, or of groups with the same scale for every output;
- all differences ``code - zero`` fit the type.

Every product has at most 11 + 9 significant bits, so it is exact in float32. A kernel that multiplies in float16 rounds it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lazyweights.blocks import TYPE_BY_NAME, Planes, join
from lazyweights.errors import QuantizationError
from lazyweights.quant.gptq_checkpoint import GptqLayer

BLOCK = 32
SLAB_WEIGHTS = 1 << 21
"""Weights unpacked at a time."""

F32 = TYPE_BY_NAME["F32"].type_id
_OFFSETS = {TYPE_BY_NAME["Q4_0"].type_id: 8, TYPE_BY_NAME["Q5_0"].type_id: 16, TYPE_BY_NAME["Q8_0"].type_id: 128}
"""The types that may be chosen, smallest first; each holds the integers from ``-offset`` to ``offset - 1``."""


def block_groups(layer: GptqLayer) -> np.ndarray:
    """Return, for each 32 inputs, a group whose scales are those of all of them.

    Parameters
    ----------
    layer : GptqLayer

    Returns
    -------
    numpy.ndarray
        int64 ``(n_inputs / 32,)``.

    Raises
    ------
    QuantizationError
        If there is none somewhere; says why, and what would work.
    """
    if layer.n_inputs % BLOCK:
        raise QuantizationError(f"{layer.n_inputs} inputs are not a multiple of the {BLOCK} of a block", tensor=layer.name)
    rows = layer.groups.reshape(-1, BLOCK)
    first = rows[:, :1]
    mixed = rows != first
    pairs = np.unique(np.stack([rows[mixed], np.broadcast_to(first, rows.shape)[mixed]], axis=1), axis=0)
    for a, b in pairs:
        if not np.array_equal(layer.scales[a], layer.scales[b]):
            raise QuantizationError(_why_mixed(layer, int(mixed.any(axis=1).sum())), tensor=layer.name)
    return first[:, 0]


def _why_mixed(layer: GptqLayer, n_mixed: int) -> str:
    where = f"in {n_mixed} of {layer.n_inputs // BLOCK} blocks the {BLOCK} neighbouring inputs have scales of several groups"
    if np.any(np.diff(layer.groups) < 0):
        return (
            f"{where} (act-order, desc_act): GGUF has one scale a block. What works: a checkpoint made with desc_act=False, "
            "or with group_size=-1"
        )
    return f"{where}: GGUF has one scale a block. What works: a group size that is a multiple of {BLOCK}, or -1"


def smallest_type(layer: GptqLayer) -> int:
    """Return the smallest type that holds every ``code - zero`` of a layer.

    Looks at codes only where the zero points leave it open, and only until they settle it.

    Raises
    ------
    QuantizationError
        If none does.
    """
    low, high = -int(layer.zeros.max()), (1 << layer.bits) - 1 - int(layer.zeros.min())
    certain = _holding(low, high)
    best = next(iter(_OFFSETS))
    low = high = 0
    for outputs in slabs(layer):
        if best == certain:
            break
        integers = layer_integers(layer, outputs)
        low, high = min(low, int(integers.min())), max(high, int(integers.max()))
        found = _holding(low, high)
        if found is None:
            raise QuantizationError(
                f"codes minus zero points reach from {low} to {high} at least, and Q8_0 holds -128 to 127. What works: a "
                "symmetric checkpoint (sym=True), or fewer bits",
                tensor=layer.name,
            )  # fmt: skip
        best = found
    return best


def _holding(low: int, high: int) -> int | None:
    return next((type_id for type_id, offset in _OFFSETS.items() if -offset <= low and high < offset), None)


def slabs(layer: GptqLayer) -> Iterator[slice]:
    """Yield runs of outputs that together have `SLAB_WEIGHTS` weights or fewer, but at least one output."""
    step = max(1, SLAB_WEIGHTS // layer.n_inputs)
    for start in range(0, layer.n_outputs, step):
        yield slice(start, min(start + step, layer.n_outputs))


def layer_integers(layer: GptqLayer, outputs: slice | np.ndarray) -> np.ndarray:
    """Return ``code - zero`` of some outputs: int16 ``(outputs, n_inputs)``."""
    zeros = layer.zeros[:, outputs].T[:, layer.groups]
    return layer.codes(outputs).astype(np.int16) - zeros


def pack_layer(layer: GptqLayer, type_id: int, order: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Pack a layer, some outputs at a time.

    Parameters
    ----------
    layer : GptqLayer
    type_id : int
        As `smallest_type` returns it or larger, or F32, which holds every layer.
    order : numpy.ndarray, optional
        The outputs in the order in which they become rows; as they are if it is not given.

    Yields
    ------
    numpy.ndarray
        Packed rows.
    """
    groups = block_groups(layer) if type_id != F32 else None
    for rows in slabs(layer):
        outputs = rows if order is None else order[rows]
        integers = layer_integers(layer, outputs)
        scales = layer.scales[:, outputs].T
        if groups is None:
            yield scales.view(np.float16).astype(np.float32)[:, layer.groups] * integers
        else:
            planes = {"scale": scales[:, groups][None], "codes": _stored_codes(integers, type_id)[None]}
            yield join(Planes(type_id, (1, *integers.shape), planes))


def _stored_codes(integers: np.ndarray, type_id: int) -> np.ndarray:
    if type_id == TYPE_BY_NAME["Q8_0"].type_id:
        return integers.astype(np.int8).view(np.uint8)
    return (integers + np.int16(_OFFSETS[type_id])).astype(np.uint8)


