"""Where each entropy coder wins: Huffman and rANS on the code planes of real models, by exact size, and their speed.

Usage: python benchmarks/coders.py [--quick] [--models NAME ...]

Counts are those of the encoder's first pass (contexts, forced codes taken out). For each GGML type of each model: order-0
entropy, entropy given the contexts, bits with the pool's Huffman codes and bits with rANS in 12 bits with the same pool,
all per code symbol. The speed of both decoders is taken on one tile of symbols drawn from the most used table.
"""

from __future__ import annotations

import time
from typing import Any

import common
import numpy as np

from lazyweights.codecs import canonical, lane_encode, lane_kernels, rans
from lazyweights.codecs.package_merge import code_lengths
from lazyweights.codecs.table_pool import coded_bits, effective_lengths, sum_rows
from lazyweights.container import encoder, planning

DEFAULT = ("smollm2", "gemma", "reference-f16", "reference-bf16")
CELLS, CELL_LENGTH = 18, 32


def entropy_bits(counts: np.ndarray) -> float:
    """Sum over rows of count times -log2 of its share of the row."""
    wide = counts.astype(np.float64)
    total = wide.sum(axis=1, keepdims=True)
    share = np.divide(wide, total, out=np.ones_like(wide), where=wide > 0)
    return float(-(wide * np.log2(share)).sum())


def count_model(path: str) -> list[planning.Counted]:
    """First pass over a model: counts of all tensors."""
    with open(path, "rb") as file:
        source = encoder.open_source(path, file.fileno())
        scan = encoder.scan_source(source)
        spans = encoder.scan_spans(scan)
        counted = []
        counts = None
        todo = [run for run in encoder.runs(spans, encoder.COUNT_RUN_BYTES) if run.rows]
        for k, run in enumerate(todo):
            span = spans[run.span]
            coder = span.coder
            packed = np.frombuffer(source.read(run.offset, run.n_bytes), np.uint8).reshape(run.rows, -1)
            if counts is None:
                counts = coder.new_counts(coder.context_bases(coder.split(packed[:64])))
            coder.count(packed, counts)
            if k + 1 == len(todo) or todo[k + 1].span != run.span:
                counted.append(planning.reduce_counts(run.span, coder, counts, span.n_rows * span.outer, 1, False))
                counts = None
    return counted


def type_rows(counted: list[planning.Counted]) -> list[dict[str, Any]]:
    """One row a type."""
    lengths, tables = planning._tables(counted, False)
    effective = effective_lengths(lengths)
    rows: dict[str, dict[str, Any]] = {}
    start = 0
    for c in counted:
        mine = tables[start : start + len(c.contexts)]
        start += len(c.contexts)
        cells = c.contexts >= 32 * c.n_sides
        row = rows.setdefault(c.coder.layout.type_name, {"counts": [], "tables": [], "symbols": 0, "order0": 0.0, "given": 0.0})
        row["counts"].append(c.counts[cells])
        row["tables"].append(mine[cells])
        row["symbols"] += int(c.counts[cells].sum())
        row["order0"] += entropy_bits(c.counts[cells].sum(axis=0, keepdims=True))
        row["given"] += entropy_bits(c.counts[cells])
    every = np.concatenate([np.concatenate(r["counts"]) for r in rows.values()])
    every_table = np.concatenate([np.concatenate(r["tables"]) for r in rows.values()])
    sums = sum_rows(every, every_table, len(lengths))
    freqs = np.stack([rans.normalized_freqs(s) if s.any() else np.zeros(256, np.uint16) for s in sums])
    out = []
    for name, row in rows.items():
        counts, table_of = np.concatenate(row["counts"]), np.concatenate(row["tables"])
        n = row["symbols"]
        out.append(
            {
                "type": name,
                "symbols": n,
                "order0_bits": row["order0"] / n,
                "context_entropy_bits": row["given"] / n,
                "huffman_bits": int(coded_bits(counts, table_of, effective).sum()) / n,
                "rans_bits": planning.rans_bits(counts, table_of, freqs) / n,
            }
        )
    return out


def decode_speed(runs: int) -> dict[str, Any]:
    """Million symbols a second of both decoders on the same tile, in one thread."""
    rng = np.random.default_rng(0)
    x = np.arange(256) - 128
    counts = (1e6 * np.exp(-0.5 * (x / 40) ** 2)).astype(np.int64) + 1
    symbols = rng.choice(256, (64, CELLS, CELL_LENGTH), p=counts / counts.sum()).astype(np.uint8)
    tables = np.zeros((2, CELLS, 32), np.uint8)
    width = CELLS * CELL_LENGTH
    strides = (width, CELL_LENGTH, 1, 2 * width)
    lengths = code_lengths(counts)[None]
    # Huffman: two copies of the tile, as row groups are decoded in pairs.
    entries = lane_encode.encode_entries(np.stack([canonical.codewords(row) for row in lengths]))
    words = np.zeros(64 * width, np.uint32)
    state, pos = lane_encode.new_encoder()
    lane_encode.start_lanes(64, state, pos)
    lane_encode.encode_cells(
        symbols.ravel(), strides, tables.astype(np.int32), np.zeros(1, np.int32), entries, CELL_LENGTH, -1, 64, words, state,
        pos,
    )
    lane_encode.finish_lanes(words, state, np.zeros(16, np.uint8), 0, 0)
    flat = canonical.decode_tables(lengths)
    offsets = np.zeros((2, CELLS, 32), np.int32)
    out = np.zeros(2 * 64 * width, np.uint8)
    positions = np.zeros(CELLS * 32, np.int32)

    def huffman() -> None:
        state, held, pos = np.zeros((2, 32), np.uint64), np.zeros((2, 32), np.int32), np.zeros(2, np.int64)
        for phase in range(2):
            bases = np.array([phase * width, (64 + phase) * width, 0, 0, 0, 0], np.int64)
            lane_kernels.decode_cells_pair(
                words, words.size, flat, offsets, CELL_LENGTH, -1, out, bases, np.array([2 * width, CELL_LENGTH]),
                lane_kernels.PLAIN_CELLS, positions, state, held, pos,
            )

    freqs = rans.normalized_freqs(counts)[None]
    states = np.full(32, rans.STATE_LOW, np.uint32)
    scratch = np.zeros(64 * width, np.uint16)
    n = rans.encode_rans(symbols.ravel(), strides, tables, rans.freq_entries(freqs), CELL_LENGTH, 64, states, scratch)
    stream = np.concatenate([scratch[scratch.size - n :], np.zeros(64, np.uint16)])
    rans_flat = rans.rans_tables(freqs)
    packed = np.zeros((CELLS, CELL_LENGTH // 4, 32), np.uint32)

    def by_rans() -> None:
        lanes, pos = states.copy(), np.zeros(1, np.int64)
        for _ in range(2):
            rans.decode_rans_phase(stream, stream.size, rans_flat, offsets[0], CELL_LENGTH, 32, packed, lanes, pos)

    huffman()
    if not (out.reshape(2, 64, CELLS, CELL_LENGTH) == symbols).all():
        raise SystemExit("the Huffman decoder gives other symbols")
    by_rans()
    return {
        "huffman_msymbols": _rates(huffman, 2 * symbols.size, runs),
        "rans_msymbols": _rates(by_rans, symbols.size, runs),
        "note": "symbol decoders alone, one table, one thread",
    }


def _rates(function: Any, n_symbols: int, runs: int) -> list[float]:
    rates = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        for _ in range(200):
            function()
        rates.append(200 * n_symbols / (time.perf_counter() - started) / 1e6)
    return sorted(rates[1:])


def main() -> None:
    """Run the benchmark."""
    args = common.parse_arguments(__doc__, DEFAULT)
    found, missing = common.load_models(args.models)
    models = {}
    for model in found:
        rows = type_rows(count_model(str(model.path)))
        models[model.key] = {**model.report(), "types": rows}
        for row in rows:
            common.console.print(
                f"{model.label:20} {row['type']:5} order 0 {row['order0_bits']:.4f}  given contexts "
                f"{row['context_entropy_bits']:.4f}  Huffman {row['huffman_bits']:.4f}  rANS {row['rans_bits']:.4f}"
            )
    speed = decode_speed(args.runs)
    common.console.print(speed)
    common.finish("coders", args, {"models": models, "speed": speed, "skipped": missing})


if __name__ == "__main__":
    main()
