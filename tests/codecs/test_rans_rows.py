"""Rows whose tables follow from column classes and row levels: the kernels equal the reference."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.codecs import rans, vector_kernels

BACKENDS = ["scalar", *(["vector"] if vector_kernels.AVAILABLE else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n_streams", "n_rows"), [(1, 64), (2, 64), (1, 63), (1, 1), (1, 2), (1, 33)])
@pytest.mark.parametrize("cell_symbols", [4, 8, 16, 32])
@pytest.mark.parametrize("n_left_out", [0, 1])
def test_kernels_equal_reference(backend: str, n_streams: int, n_rows: int, cell_symbols: int, n_left_out: int) -> None:
    rng = np.random.default_rng([n_streams, n_rows, cell_symbols])
    n_symbols = 96
    n_cells = n_symbols // cell_symbols
    n_coded = n_symbols - n_left_out
    freqs = np.stack([rans.normalized_freqs((1e6 * rng.random(256) ** (1 + 2 * t)).astype(np.int64)) for t in range(5)])
    table_of = rng.integers(0, 5, (32, 16))
    columns = rng.integers(0, 32, n_symbols).astype(np.uint8)
    levels = rng.integers(0, 16, (2, n_streams, n_cells, 32)).astype(np.int32)  # phase, stream
    flat = rans.rans_tables(freqs)
    stride = cell_symbols + 2 if cell_symbols >= 16 else cell_symbols
    row_bytes = n_cells * stride + 3
    expected = np.zeros((n_streams, n_rows, n_coded), np.uint8)
    parts: list[np.ndarray] = []
    starts, ends, states = [], [], np.zeros((n_streams, 32), np.uint32)
    for s in range(n_streams):
        row_tables = [
            [int(table_of[columns[c], levels[r % 2, s, c // cell_symbols, r // 2]]) for c in range(n_coded)]
            for r in range(n_rows)
        ]
        for r in range(n_rows):
            for c in range(n_coded):
                expected[s, r, c] = rng.choice(256, p=freqs[row_tables[r][c]] / rans.PROB_SCALE)
        rows = [[[int(v)] for v in row] for row in expected[s]]
        found, words, _ = rans.encode_rans_reference(rows, row_tables, freqs.tolist())
        states[s, : len(found)] = found
        starts.append(sum(p.size for p in parts))
        parts.append(np.array(words, np.uint16))
        ends.append(starts[-1] + len(words))
    stream = np.concatenate([*parts, np.zeros(64, np.uint16)])
    out = np.zeros((n_streams, n_rows, row_bytes), np.uint8)
    pos = np.array(starts, np.int64)
    decode = rans.decode_rows_scalar if backend == "scalar" else rans.decode_rows_phase
    offsets = (table_of.ravel() * rans.PROB_SCALE).astype(np.int32)
    for phase in range(2):
        n_lanes = (n_rows + 1 - phase) // 2
        if n_lanes:
            bases = np.array([(s * n_rows + phase) * row_bytes for s in range(n_streams)], np.int64)
            decode(
                stream, stream.size, flat, offsets, columns, levels[phase], cell_symbols, n_coded, n_lanes, out.reshape(-1),
                bases, np.array([2 * row_bytes, stride], np.int64), states, pos,
            )  # fmt: skip
    places = np.arange(n_coded) // cell_symbols * stride + np.arange(n_coded) % cell_symbols
    np.testing.assert_array_equal(out[:, :, places], expected)
    assert pos.tolist() == ends
    assert (states[:, : (n_rows + 1) // 2] == rans.STATE_LOW).all()


def test_empty_tables_are_zeros() -> None:
    freqs = np.zeros((3, 256), np.uint16)
    freqs[1, 7], freqs[1, 255] = 4095, 1
    flat = rans.rans_tables(freqs)
    assert not flat[:4096].any()
    assert not flat[8192:].any()
    assert flat[4096 : 4096 + 4095].tolist() == [7 | 4094 << 8 | k << 20 for k in range(4095)]
    assert int(flat[8191]) == 255
