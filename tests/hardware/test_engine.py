"""The cycle model: numba equals the reference to the cycle and to the counter, and both decode."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lazyweights.codecs import canonical, lane_kernels, package_merge
from lazyweights.errors import CodecError
from lazyweights.hardware.engine_kernels import simulate_unit
from lazyweights.hardware.engine_reference import simulate_reference
from lazyweights.hardware.stream_variants import StreamVariant, WrittenStream, restore_symbols, write_stream
from lazyweights.hardware.unit_config import LOSS_TEXT, Layout, Loss, TensorStream, UnitConfig, table_entries

AMPLE = UnitConfig(n_engines=1, bytes_per_cycle=128)

CONFIGS = {
    "default": UnitConfig(),
    "one engine, ample": AMPLE,
    "slow bus": UnitConfig(n_engines=3, bytes_per_cycle=7.3, latency_cycles=5, queue_steps=4),
    "far memory": UnitConfig(n_engines=2, bytes_per_cycle=300, latency_cycles=333, queue_steps=2),
    "shallow": UnitConfig(n_engines=2, bytes_per_cycle=64, latency_cycles=1, queue_steps=1, fifo_words=1, handover_cycles=0),
    "deep": UnitConfig(n_engines=1, bytes_per_cycle=200, latency_cycles=20, fifo_words=7, handover_cycles=9),
    "narrow output": UnitConfig(n_engines=2, output_symbols=11, output_buffer=64),
    "many engines": UnitConfig(n_engines=7, bytes_per_cycle=900, latency_cycles=30, table_bytes=0),
}

KINDS = {
    # rows, columns, symbols of the alphabet, bits of a symbol, codes of a symbol, two symbols a look-up
    "pairs": (64, 70, 256, 8, 2, False),
    "bytes, few rows": (37, 60, 256, 8, 1, False),
    "five bits": (128, 50, 32, 5, 1, False),
    "five bits, two a look-up": (130, 67, 32, 5, 1, True),
    "three bits, two a look-up": (65, 41, 8, 3, 1, True),
    "one row": (1, 33, 256, 8, 1, False),
    "one column": (64, 1, 16, 5, 1, True),
    "one symbol": (64, 20, 1, 8, 1, False),
}


def make_stream(
    n_rows: int, n_columns: int, alphabet: int, symbol_bits: int, per_symbol: int, pairs: bool, *,
    variant: StreamVariant | None = None, seed: int = 0, side_bytes: int = 700,
) -> tuple[np.ndarray, WrittenStream, np.ndarray]:  # fmt: skip
    """Return symbols, their stream and the decode table."""
    rng = np.random.default_rng(seed)
    weights = rng.random(alphabet) ** 4 + 1e-3
    symbols = rng.choice(alphabet, (n_rows, n_columns), p=weights / weights.sum()).astype(np.uint8)
    symbols[: n_rows // 3] = np.minimum(symbols[: n_rows // 3], 3)  # rows of different lengths
    lengths = package_merge.code_lengths(np.bincount(symbols.ravel(), minlength=256))
    decode_table = canonical.decode_tables(lengths[None])
    table = table_entries(decode_table, symbol_bits, pairs)
    variant = variant or StreamVariant(tile_codes=32 * per_symbol)
    written = write_stream(symbols, canonical.codewords(lengths), table, per_symbol, side_bytes, variant)
    return symbols, written, decode_table


def check_equal(symbols: np.ndarray, written: WrittenStream, config: UnitConfig) -> None:
    want = simulate_reference(written.stream, config)
    got = simulate_unit(written.stream, config)
    assert got.cycles == want.cycles
    assert got.lane_cycles.tolist() == want.lane_cycles.tolist()
    assert got.bus_bytes == want.bus_bytes
    np.testing.assert_array_equal(got.symbols, want.symbols)
    np.testing.assert_array_equal(restore_symbols(written, got.symbols, len(symbols)), symbols)
    assert int(got.lane_cycles.sum()) == 32 * config.n_engines * got.cycles
    table_bytes = -(-config.table_bytes // 128) * 128
    assert got.bus_bytes == written.stream.stream_bytes + written.stream.side_bytes + table_bytes


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kernel_equals_reference(kind, config):
    symbols, written, _ = make_stream(*kind)
    check_equal(symbols, written, config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "variant",
    [StreamVariant(32, Layout.DEMAND), StreamVariant(32, balanced=True), StreamVariant(64, Layout.DEMAND, True)],
    ids=["demand", "balanced", "demand, balanced"],
)
def test_kernel_equals_reference_on_variants(variant, config):
    for name in ("pairs", "bytes, few rows", "five bits, two a look-up", "one symbol"):
        rows, columns, alphabet, bits, per_symbol, pairs = KINDS[name]
        symbols, written, _ = make_stream(rows, columns, alphabet, bits, per_symbol, pairs, variant=variant)
        check_equal(symbols, written, config)


@pytest.mark.parametrize("seed", range(12))
def test_kernel_equals_reference_on_random_units(seed):
    rng = np.random.default_rng(seed)
    config = UnitConfig(
        n_engines=int(rng.integers(1, 5)), bytes_per_cycle=float(rng.uniform(3, 300)), latency_cycles=int(rng.integers(1, 60)),
        queue_steps=int(rng.integers(1, 9)), fifo_words=int(rng.integers(1, 5)), handover_cycles=int(rng.integers(0, 5)),
        output_symbols=int(rng.integers(5, 70)), output_buffer=int(rng.integers(64, 200)),
    )  # fmt: skip
    pairs = bool(rng.integers(2))
    variant = StreamVariant(int(rng.integers(8, 70)), Layout(int(rng.integers(2))), bool(rng.integers(2)))
    shape = int(rng.integers(1, 140)), int(rng.integers(1, 90))
    symbols, written, _ = make_stream(*shape, int(rng.integers(2, 33)), 5, 1, pairs, variant=variant, seed=seed, side_bytes=900)
    check_equal(symbols, written, config)


def test_symbols_are_those_of_the_decoder():
    _, written, decode_table = make_stream(*KINDS["pairs"])
    stream = written.stream
    out = []
    for t in range(len(stream.rows)):
        tile = np.empty((stream.rows[t], stream.columns[t]), np.uint8)
        words = np.ascontiguousarray(stream.words[32 * stream.starts[t] : 32 * stream.starts[t + 1]])
        lane_kernels.decode_lockstep(words, decode_table[:2064], tile)
        out.append(tile.ravel())
    np.testing.assert_array_equal(simulate_unit(stream, UnitConfig()).symbols, np.concatenate(out))


@pytest.mark.parametrize("simulate", [simulate_reference, simulate_unit])
@pytest.mark.parametrize("layout", list(Layout))
def test_truncated_tile_is_an_error(simulate, layout):
    _, written, _ = make_stream(*KINDS["pairs"], variant=StreamVariant(128, layout))
    stream = written.stream
    starts = stream.starts.copy()
    starts[-1] -= 2
    with pytest.raises(CodecError, match="ends before its symbols"):
        simulate(dataclasses.replace(stream, starts=starts), UnitConfig())


def test_damaged_arrays_are_errors():
    _, written, _ = make_stream(*KINDS["pairs"])
    stream = written.stream
    for change in (
        {"starts": stream.starts[:-1]}, {"starts": stream.starts + 100000}, {"rows": stream.rows + 64},
        {"table": stream.table[:5]}, {"columns": stream.columns * 0},
    ):  # fmt: skip
        with pytest.raises(CodecError):
            dataclasses.replace(stream, **change)
    with pytest.raises(ValueError, match="fifo_words"):
        UnitConfig(fifo_words=0)
    with pytest.raises(ValueError, match="bytes_per_cycle"):
        UnitConfig(bytes_per_cycle=0)


def shares(config: UnitConfig, kind: str = "pairs", **options: object) -> dict[Loss, float]:
    _, written, _ = make_stream(*KINDS[kind], **options)  # type: ignore[arg-type]
    run = simulate_unit(written.stream, config)
    return {loss: run.share(loss) for loss in Loss}


def test_losses_show_what_was_made_scarce():
    base = shares(UnitConfig(n_engines=1, bytes_per_cycle=128))
    slow = shares(UnitConfig(n_engines=1, bytes_per_cycle=4, latency_cycles=5, table_bytes=0))
    assert slow[Loss.BANDWIDTH] > 0.4 > 0.1 > base[Loss.BANDWIDTH]
    assert shares(UnitConfig(n_engines=1, latency_cycles=900, queue_steps=1))[Loss.LATENCY] > 0.6
    assert shares(UnitConfig(n_engines=1, output_symbols=3, output_buffer=64))[Loss.OUTPUT] > 0.7
    assert shares(UnitConfig(n_engines=1, bytes_per_cycle=128, handover_cycles=500))[Loss.HANDOVER] > 0.5
    assert shares(UnitConfig(n_engines=64, bytes_per_cycle=128))[Loss.DRAIN] > 0.9
    assert shares(AMPLE, "one row")[Loss.IDLE] > 0.1
    assert base[Loss.IMBALANCE] > 0
    assert set(LOSS_TEXT) == set(Loss)


def test_a_lane_decodes_one_symbol_a_cycle_where_nothing_is_in_its_way():
    """64 rows of equal symbols of 8 bits: every lane works alike, so a tile takes its symbols and the fill of the pipeline."""
    lengths = np.full(256, 8, np.uint8)
    table = table_entries(canonical.decode_tables(lengths[None]))
    symbols = np.full((64, 256), 170, np.uint8)
    written = write_stream(symbols, canonical.codewords(lengths), table, 1)
    run = simulate_unit(written.stream, AMPLE)
    assert run.lane_cycles[Loss.DECODE] == 32 * 512
    assert run.lane_cycles[Loss.IMBALANCE] == 0
    assert run.share(Loss.DECODE) == 512 / run.cycles
    # 32 reads of the table a cycle apart, the latency, and the same for the first words
    assert 512 + 32 + 100 <= run.cycles <= 512 + 32 + 100 + 8
    assert simulate_unit(dataclasses.replace(written.stream), AMPLE).cycles == run.cycles


def test_two_symbols_a_look_up_need_fewer_cycles():
    for kind in ("five bits", "three bits, two a look-up"):
        rows, columns, alphabet, bits, per_symbol, _ = KINDS[kind]
        one = simulate_unit(make_stream(rows, columns, alphabet, bits, per_symbol, False)[1].stream, AMPLE)
        two = simulate_unit(make_stream(rows, columns, alphabet, bits, per_symbol, True)[1].stream, AMPLE)
        assert two.lane_cycles[Loss.DECODE] < 0.7 * one.lane_cycles[Loss.DECODE]
        np.testing.assert_array_equal(one.symbols, two.symbols)


def test_a_window_of_ten_bits_decodes_codes_of_ten_bits():
    rng = np.random.default_rng(3)
    symbols = np.clip(rng.normal(16, 5, (64, 90)), 0, 31).astype(np.uint8)
    lengths = package_merge.code_lengths(np.bincount(symbols.ravel(), minlength=256), 10)
    table = table_entries(canonical.decode_tables(lengths[None]), 5, True, 10)
    assert ((table >> 16 & 15) <= 10).all()
    assert (table.reshape(-1, 2)[:, 0] == table.reshape(-1, 2)[:, 1]).all()  # the unit keeps every second entry
    written = write_stream(symbols, canonical.codewords(lengths), table, 1)
    check_equal(symbols, written, AMPLE)


def test_demand_layout_has_less_padding_and_no_imbalance():
    rows, columns, *rest = KINDS["pairs"]
    lockstep = make_stream(rows, columns, *rest, variant=StreamVariant(140))[1]
    demand = make_stream(rows, columns, *rest, variant=StreamVariant(140, Layout.DEMAND))[1]
    assert demand.padding < lockstep.padding
    assert simulate_unit(demand.stream, AMPLE).lane_cycles[Loss.IMBALANCE] == 0


def test_empty_stream():
    empty = TensorStream(
        np.zeros(0, np.uint32), np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32),
        np.full(2048, 1 << 20, np.uint32),
    )  # fmt: skip
    config = UnitConfig(table_bytes=0)
    assert simulate_unit(empty, config).cycles == simulate_reference(empty, config).cycles == 0
