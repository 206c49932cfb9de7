"""Lane streams: the reference, the scalar kernels and the vector kernels give the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyweights.codecs import canonical, lane_encode, lane_kernels, lanes, package_merge, vector_kernels
from lazyweights.errors import CodecError

BACKENDS = ["scalar"] + (["vector"] if vector_kernels.AVAILABLE else [])


def make_pool(rng: np.random.Generator, n_tables: int, alphabet: int) -> np.ndarray:
    """Code lengths of `n_tables` random tables; the last one has a single symbol."""
    lengths = np.zeros((n_tables, 256), np.uint8)
    for t in range(n_tables):
        counts = np.zeros(256, np.int64)
        counts[:alphabet] = (1e6 * rng.random(alphabet) ** (1 + 3 * t)).astype(np.int64) + 1
        lengths[t] = package_merge.code_lengths(counts)
    lengths[-1] = 0
    lengths[-1, 3] = 1
    return lengths


def random_tile(rng, lengths, n_rows, n_cells, cell_length):
    """Symbols (64, cells, cell_length) and table numbers (2, cells, 32) that can encode them."""
    tables = rng.integers(0, len(lengths), (2, n_cells, 32)).astype(np.uint8)
    symbols = np.zeros((64, n_cells, cell_length), np.uint8)
    for row in range(n_rows):
        for cell in range(n_cells):
            table = lengths[tables[row % 2, cell, row // 2]]
            symbols[row, cell] = rng.choice(np.flatnonzero(table), cell_length)
    return symbols, tables


class Encoder:
    """A stream of one tile, made by the fastest kernels."""

    def __init__(self, n_words: int, n_rows: int) -> None:
        self.words = np.zeros(n_words, np.uint32)
        self.state, self.pos = lane_encode.new_encoder()
        self.n_rows = n_rows
        lane_encode.start_lanes(n_rows, self.state, self.pos)

    def plane(self, symbols, tables, entries, last_table: int = -1) -> int:
        _, n_cells, cell_length = symbols.shape
        width = n_cells * cell_length
        return lane_encode.encode_cells(
            symbols.ravel(), (width, cell_length, 1, 2 * width), tables.astype(np.int32), offsets_of(entries),
            lane_encode.encode_entries(entries), cell_length - (last_table >= 0), 256 * last_table, self.n_rows, self.words,
            self.state, self.pos,
        )

    def finish(self, tail: np.ndarray, n_bits: int) -> int:
        n_tail = min(lane_encode.left_over(self.state), n_bits)
        lane_encode.finish_lanes(self.words, self.state, np.concatenate([tail, np.zeros(8, np.uint8)]), 0, n_tail)
        return n_tail


def offsets_of(entries: np.ndarray) -> np.ndarray:
    """Context k has table k."""
    return np.arange(0, entries.size, 256, dtype=np.int32)


def decode_plane(backend, words, limit, flat, tables, cell_length, n_rows, state):
    module = lane_kernels if backend == "scalar" else vector_kernels
    decode = lane_kernels._decode_cells_scalar if backend == "scalar" else module.decode_cells_phase
    n_cells = tables.shape[1]
    quads = (cell_length + 3) // 4
    out = np.zeros((64, n_cells, cell_length), np.uint8)
    for phase in range(2):
        n_lanes = (n_rows + 1 - phase) // 2
        offsets = tables[phase].astype(np.int32) * 2048
        offsets[:, n_lanes:] = 0
        packed = np.zeros((n_cells, quads, 32), np.uint32)
        decode(words, limit, flat, offsets, cell_length, -1, n_lanes, packed, *state)
        for position in range(cell_length):
            out[phase::2, :, position] = (packed[:, position // 4] >> np.uint32(8 * (position % 4)) & 255).T
    out[n_rows:] = 0
    return out


def entries_of(lengths: np.ndarray) -> np.ndarray:
    return np.stack([canonical.codewords(row) for row in lengths])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("n_rows", "n_cells", "cell_length"),
    [(64, 5, 31), (64, 3, 16), (63, 4, 15), (33, 2, 30), (32, 2, 8), (2, 1, 1), (1, 7, 2), (31, 1, 33)],
)
def test_kernels_equal_reference(backend, n_rows, n_cells, cell_length):
    rng = np.random.default_rng(n_rows * 100 + cell_length)
    lengths = make_pool(rng, 4, 256)
    flat = canonical.decode_tables(lengths)
    entries = entries_of(lengths)
    symbols, tables = random_tile(rng, lengths, n_rows, n_cells, cell_length)
    tail_bits = rng.integers(0, 2, 300).astype(np.uint8)

    rows = [symbols[r].tolist() for r in range(n_rows)]
    row_tables = [tables[r % 2, :, r // 2].tolist() for r in range(n_rows)]
    want, n_tail = lanes.encode_lanes_reference(rows, row_tables, entries.tolist(), "demand", tail_bits.tolist())

    encoder = Encoder(symbols.size + 4096, n_rows)
    assert encoder.plane(symbols, tables, entries) == lane_encode.OK
    assert encoder.finish(np.packbits(tail_bits), 300) == n_tail
    n_words = int(encoder.pos[0])
    assert encoder.words[:n_words].tolist() == want

    back, left_over, used = lanes.decode_lanes_reference(want, [cell_length] * n_cells, row_tables, flat.tolist(), "demand")
    assert back == rows
    assert used == n_words
    assert left_over[:n_tail] == tail_bits[:n_tail].tolist()

    state = lane_kernels.new_state()
    words = np.concatenate([encoder.words[:n_words], np.zeros(64, np.uint32)])
    got = decode_plane(backend, words, words.size, flat, tables, cell_length, n_rows, state)
    np.testing.assert_array_equal(got, symbols)
    assert state[2][0] == n_words
    out = np.zeros(len(left_over) // 8 + 32, np.uint8)
    assert lane_kernels.left_over_bits(state[0], state[1], out, 3) == len(left_over)
    assert np.unpackbits(out)[3 : 3 + len(left_over)].tolist() == left_over


@pytest.mark.parametrize("backend", BACKENDS)
def test_planes_share_one_stream(backend):
    """A row group's planes follow each other without a flush."""
    rng = np.random.default_rng(5)
    lengths = make_pool(rng, 3, 256)
    flat, entries = canonical.decode_tables(lengths), entries_of(lengths)
    encoder = Encoder(200000, 50)
    planes = []
    for n_cells, cell_length in ((18, 1), (18, 15), (3, 32)):
        symbols, tables = random_tile(rng, lengths, 50, n_cells, cell_length)
        assert encoder.plane(symbols, tables, entries) == lane_encode.OK
        planes.append((symbols, tables, cell_length))
    encoder.finish(np.zeros(1, np.uint8), 0)
    n_words = int(encoder.pos[0])
    state = lane_kernels.new_state()
    for symbols, tables, cell_length in planes:
        got = decode_plane(backend, encoder.words, n_words + 64, flat, tables, cell_length, 50, state)
        np.testing.assert_array_equal(got, symbols)
    assert state[2][0] == n_words


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [lane_kernels.NO_CONTEXT, lane_kernels.RUNNING_MEAN, lane_kernels.OTHER_PLANE])
@pytest.mark.parametrize("n_rows", [64, 37])
def test_side_planes(backend, kind, n_rows):
    rng = np.random.default_rng(kind)
    lengths = make_pool(rng, 5, 256)
    lengths[-1] = lengths[0]
    flat, entries = canonical.decode_tables(lengths), entries_of(lengths)
    n_columns, base = 19, 90
    symbols = np.clip(100 + 5 * rng.standard_normal((2, n_columns, 32)).cumsum(1), 0, 255).astype(np.uint8)
    other = rng.integers(0, 256, symbols.shape).astype(np.uint8)
    contexts = np.zeros(symbols.shape, np.uint8)
    lane_encode.side_contexts(symbols, kind, base, other, contexts)
    assert (np.unique(contexts).size > 3) == (kind != lane_kernels.NO_CONTEXT)
    table_of = rng.integers(0, 5, 32).astype(np.uint8)
    encoder = Encoder(100000, n_rows)
    status = lane_encode.encode_side(
        symbols.ravel(), contexts, table_of.astype(np.int32) << 8, lane_encode.encode_entries(entries), n_rows, encoder.words,
        encoder.state, encoder.pos,
    )
    assert status == lane_encode.OK
    encoder.finish(np.zeros(1, np.uint8), 0)
    decode = lane_kernels._decode_side_scalar if backend == "scalar" else vector_kernels.decode_side_phase
    state = lane_kernels.new_state()
    for phase in range(2):
        n_lanes = (n_rows + 1 - phase) // 2
        out = np.zeros((n_columns, 32), np.uint8)
        decode(
            encoder.words, int(encoder.pos[0]) + 64, flat, table_of.astype(np.int32) * 2048, kind, base, other[phase],
            n_lanes, out, *state,
        )
        np.testing.assert_array_equal(out[:, :n_lanes], symbols[phase, :, :n_lanes])
    assert state[2][0] == encoder.pos[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_damaged_streams_stay_in_bounds(backend):
    """Random words and short limits: no exception, no read past the limit, the position tells."""
    rng = np.random.default_rng(1)
    lengths = make_pool(rng, 3, 256)
    flat = canonical.decode_tables(lengths)
    tables = rng.integers(0, 3, (2, 9, 32)).astype(np.uint8)
    for n_words in (32, 33, 60, 200, 2000):
        words = rng.integers(0, 2**32, n_words, dtype=np.uint32)
        state = lane_kernels.new_state()
        decode_plane(backend, words, n_words, flat, tables, 31, 64, state)
        assert state[2][0] >= min(n_words - 16, 500)


def test_symbol_without_codeword_is_refused():
    lengths = np.zeros((1, 256), np.uint8)
    lengths[0, :2] = 1
    for n_rows in (64, 20):
        encoder = Encoder(1000, n_rows)
        symbols = np.zeros((64, 1, 4), np.uint8)
        symbols[19, 0, 2] = 7
        status = encoder.plane(symbols, np.zeros((2, 1, 32), np.uint8), entries_of(lengths))
        assert status == lane_encode.NO_CODEWORD
    with pytest.raises(CodecError, match="no codeword"):
        lanes.encode_lanes_reference([[[7]]], [[0]], entries_of(lengths).tolist(), "demand")


def test_full_output_is_reported():
    lengths = canonical.flat_lengths()[None]
    symbols = np.zeros((64, 4, 4), np.uint8)
    for n_words in (3, 250):
        encoder = Encoder(n_words, 64)
        tables = np.zeros((2, 4, 32), np.uint8)
        assert encoder.plane(symbols, tables, entries_of(lengths)) == lane_encode.OUTPUT_FULL


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 70), st.integers(1, 256), st.integers(0, 2**32 - 1))
def test_lockstep_equals_reference(n_rows, n_columns, alphabet, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 1000, alphabet) ** 2
    lengths = np.zeros(256, np.uint8)
    lengths[:alphabet] = package_merge.code_lengths(counts)
    symbols = rng.integers(0, alphabet, (n_rows, n_columns)).astype(np.uint8)
    entries = canonical.codewords(lengths)
    words = np.zeros(32 * (n_columns + 1), np.uint32)
    longest = lane_kernels.encode_lockstep(symbols, entries, words)
    rows = [[row.tolist()] for row in symbols]
    want, _ = lanes.encode_lanes_reference(rows, [[0]] * n_rows, [entries.tolist()], "lockstep")
    assert words[: 32 * longest].tolist() == want
    flat = canonical.decode_tables(lengths[None])
    out = np.zeros_like(symbols)
    lane_kernels.decode_lockstep(words[: 32 * longest], flat, out)
    np.testing.assert_array_equal(out, symbols)
    back, _, _ = lanes.decode_lanes_reference(want, [n_columns], [[0]] * n_rows, flat.tolist(), "lockstep")
    assert back == rows


def test_sizes_stay_near_the_ideal_code_length():
    """Demand within 1.0 % of the Huffman code's ideal length, lockstep within 4 % (Gaussian 4-bit pairs)."""
    rng = np.random.default_rng(11)
    codes = np.clip(np.round(rng.standard_normal((64, 4096)) * 2.7 + 7.5), 0, 15).astype(np.uint8)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    lengths = package_merge.code_lengths(np.bincount(pairs.ravel(), minlength=256))
    ideal_bits = int(lengths[pairs].astype(np.int64).sum())
    encoder = Encoder(100000, 64)
    assert encoder.plane(pairs[:, None, :], np.zeros((2, 1, 32), np.uint8), canonical.codewords(lengths)[None]) == 0
    encoder.finish(np.zeros(1, np.uint8), 0)
    assert int(encoder.pos[0]) * 32 <= 1.01 * ideal_bits
    lockstep_bits = 0
    for column in range(0, 2048, 128):
        words = np.zeros(32 * 129, np.uint32)
        tile = np.ascontiguousarray(pairs[:, column : column + 128])
        lockstep_bits += 32 * 32 * lane_kernels.encode_lockstep(tile, canonical.codewords(lengths), words)
    assert lockstep_bits <= 1.04 * ideal_bits


@pytest.mark.skipif(not vector_kernels.AVAILABLE, reason="this CPU has no AVX-512 VBMI2")
@pytest.mark.parametrize(
    ("cell_length", "kind"),
    [
        (31, lane_kernels.PLAIN_CELLS),
        (30, lane_kernels.PLAIN_CELLS),
        (16, lane_kernels.PLAIN_CELLS),
        (64, lane_kernels.PLAIN_CELLS),
        (15, lane_kernels.FORCED_NIBBLES),
        (16, lane_kernels.SPLIT_1),
        (16, lane_kernels.SPLIT_4),
    ],
)
@pytest.mark.parametrize("last_table", [-1, 2])
def test_pair_kernels_equal_scalar(cell_length, kind, last_table):
    """Two row groups at a time: vector and scalar kernels write the same rows, forced nibbles put back, split codes joined."""
    if last_table >= 0 and cell_length != 16:
        pytest.skip("only cells of 16 symbols have a last one with a table of its own")
    rng = np.random.default_rng(cell_length)
    lengths = make_pool(rng, 4, 256)
    flat, entries = canonical.decode_tables(lengths), entries_of(lengths)
    n_cells = 5
    low_bits = {lane_kernels.SPLIT_1: 1, lane_kernels.SPLIT_4: 4}.get(kind, 0)
    streams, tiles, tables = [], [], []
    for _ in range(2):
        symbols, table = random_tile(rng, lengths, 64, n_cells, cell_length)
        if last_table >= 0:
            symbols[..., -1] = rng.choice(np.flatnonzero(lengths[last_table]), (64, n_cells))
        encoder = Encoder(60000, 64)
        assert encoder.plane(symbols, table, entries, last_table) == lane_encode.OK
        encoder.finish(np.zeros(1, np.uint8), 0)
        streams.append(encoder.words[: encoder.pos[0]])
        tiles.append(symbols)
        tables.append(table)
    low = rng.integers(0, 1 << 32, (2, 2, n_cells, 32, low_bits), np.uint32)  # of each stream and phase
    words = np.concatenate([*streams, low.ravel(), np.zeros(64, np.uint32)])
    low_at = sum(s.size for s in streams)
    stride = 32 if low_bits else -(-cell_length // 16) * 16
    row_bytes = n_cells * stride
    positions = rng.integers(0, 1024, (2, 2, n_cells, 32)).astype(np.int32)
    results = []
    for decode in (lane_kernels._decode_cells_pair_scalar, vector_kernels.decode_cells_pair):
        out = np.zeros(2 * 64 * row_bytes, np.uint8)
        buf, held = np.zeros((2, 32), np.uint64), np.zeros((2, 32), np.int32)
        pos = np.array([0, streams[0].size], np.int64)
        for phase in range(2):
            offsets = np.stack([t[phase] for t in tables]).astype(np.int32) * 2048
            at = positions[0].size * phase
            lows = [low_at + low[0].size * s + low[0, 0].size * phase for s in range(2)]
            bases = np.array([phase * row_bytes, (64 + phase) * row_bytes, at, at + 32 * n_cells, *lows], np.int64)
            strides = np.array([2 * row_bytes, stride], np.int64)
            decode(
                words, words.size, flat, offsets, cell_length - (last_table >= 0), 2048 * last_table, out, bases, strides, kind,
                positions.ravel(), buf, held, pos,
            )
        assert (pos - [0, streams[0].size]).tolist() == [s.size for s in streams]
        results.append(out.reshape(2, 64, n_cells, stride))
    keep = 16 if kind == lane_kernels.FORCED_NIBBLES else 32 if low_bits else cell_length
    np.testing.assert_array_equal(results[0][..., :keep], results[1][..., :keep])
    symbols = np.stack(tiles)
    if kind == lane_kernels.PLAIN_CELLS:
        np.testing.assert_array_equal(results[0][..., :cell_length], symbols)
    if low_bits:
        codes = results[0]
        high = codes >> low_bits
        np.testing.assert_array_equal(high[..., :16] | high[..., 16:] << 4, symbols)
        for s, row, cell in np.ndindex(2, 64, n_cells):
            number = int.from_bytes(low[s, row % 2, cell, row // 2].tobytes(), "little")
            want = [number >> (2 * low_bits * (i % 16) + low_bits * (i // 16)) & (1 << low_bits) - 1 for i in range(32)]
            assert (codes[s, row, cell] & (1 << low_bits) - 1).tolist() == want
