"""Compiled joins of rows against `TensorCoder.join`, which goes by the planes of `blocks`."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.blocks import TYPE_BY_NAME
from lazyweights.container import row_join
from lazyweights.container.tensor_coder import tensor_coder

JOINED = sorted(name for name, join in row_join.JOIN_OF_TYPE.items() if join > row_join.DIRECT)


@pytest.mark.parametrize("n_rows", [1, 67])
@pytest.mark.parametrize("name", JOINED)
def test_any_bytes_come_back(name, n_rows):
    coder = tensor_coder(TYPE_BY_NAME[name].type_id, 512)
    packed = np.random.default_rng(n_rows).integers(0, 256, (n_rows, coder.row_bytes), dtype=np.uint8)
    arrays = coder.split(packed)
    width = arrays.symbols.shape[1]
    symbols = np.full((n_rows + 3, (width + 7) // 8 * 8 + 64), 0xA5, np.uint8)
    symbols[:n_rows, :width] = arrays.symbols
    out = np.zeros_like(packed)
    row_join.join_rows(
        row_join.JOIN_OF_TYPE[name], n_rows, coder.n_blocks, arrays.half_values, arrays.byte_values, symbols, arrays.raw_values,
        out,
    )
    np.testing.assert_array_equal(out, packed)


def test_direct_types_are_those_whose_symbols_are_bytes_of_the_block():
    direct = {name for name, join in row_join.JOIN_OF_TYPE.items() if join == row_join.DIRECT}
    assert direct == {name for name, known in TYPE_BY_NAME.items() if _direct_offset(known.type_id, known.block_size) is not None}


def _direct_offset(type_id: int, block_size: int) -> int | None:
    from lazyweights.container.stream_layout import STREAM_LAYOUTS

    return tensor_coder(type_id, block_size).direct_offset if type_id in STREAM_LAYOUTS else None
