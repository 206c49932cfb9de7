"""The decode unit in numba: `engine_reference` to the cycle and to the counter, fast enough for whole models."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from lazyweights.codecs import N_LANES
from lazyweights.errors import CodecError
from lazyweights.hardware.unit_config import STEP_BYTES, TOKENS_PER_BYTE, Layout, TensorStream, UnitConfig, UnitRun

_STEP_TOKENS = STEP_BYTES * TOKENS_PER_BYTE

_N_LOSSES = 9
_DECODE, _BANDWIDTH, _LATENCY, _IMBALANCE, _TABLE, _HANDOVER, _OUTPUT, _IDLE, _DRAIN = range(_N_LOSSES)

# Fields of an engine's state, int64.
_TILE, _WAIT, _STEP, _QUEUED, _FLYING, _ARRIVED, _HELD_OUTPUT, _ASK_TILE, _ASK_STEP, _ASK_SIDE, _WORDS_LEFT = range(11)
_POOL_HEAD, _POOL_COUNT, _LIVE, _CAUSE, _BLOCKED = range(11, 16)
_N_FIELDS = 16

TRUNCATED = -1
"""Returned instead of the cycles where a tile ends before its symbols."""


@njit(cache=True, nogil=True)
def _start_tile(
    e: int, state: np.ndarray, number: int, rows: np.ndarray, columns: np.ndarray, first_symbol: np.ndarray, left: np.ndarray,
    place: np.ndarray, held: np.ndarray, bits: np.ndarray, counts: np.ndarray, heads: np.ndarray,
) -> None:  # fmt: skip
    """Give an engine its next tile: empty lanes, and where their symbols go."""
    state[e, _TILE] = number
    state[e, _STEP] = 0
    state[e, _POOL_HEAD] = 0
    state[e, _POOL_COUNT] = 0
    state[e, _LIVE] = 0
    state[e, _CAUSE] = _HANDOVER
    state[e, _BLOCKED] = 0
    for lane in range(32):
        left[e, lane] = 0
        held[e, lane] = 0
        bits[e, lane] = uint64(0)
        counts[e, lane] = 0
        heads[e, lane] = 0
        if number < len(rows) and 2 * lane < rows[number]:
            left[e, lane] = columns[number] * min(2, rows[number] - 2 * lane)
            place[e, lane] = first_symbol[number] + columns[number] * 2 * lane
            state[e, _LIVE] += 1


@njit(inline="always")
def _cause(e: int, state: np.ndarray, queue_steps: int) -> int:
    """Why there is no step to distribute: `_Engine._note_cause`."""
    has_credit = state[e, _QUEUED] + state[e, _FLYING] < queue_steps
    return _BANDWIDTH if state[e, _ARRIVED] and has_credit and state[e, _WORDS_LEFT] > 0 else _LATENCY


@njit(cache=True, nogil=True)
def _lockstep_cycle(
    number: int, state: np.ndarray, first_word: int, n_steps: int, full_lane: int, config: np.ndarray, words: np.ndarray,
    table: np.ndarray, most: int, left: np.ndarray, place: np.ndarray, held: np.ndarray, bits: np.ndarray,
    fifo: np.ndarray, counts: np.ndarray, heads: np.ndarray, lost: np.ndarray, out: np.ndarray, row_symbols: int, n_rows: int,
) -> bool:  # fmt: skip
    """One cycle of an engine in the lockstep layout; False where the tile is truncated."""
    e = uint64(number)
    depth = uint64(config[4])
    fifo_mask = uint64(fifo.shape[2] - 1)
    queued = state[e, _QUEUED]
    no_steps = state[e, _STEP] == n_steps
    if not no_steps:
        if queued == 0:
            state[e, _CAUSE] = _cause(e, state, config[3])
        elif state[e, _BLOCKED]:
            state[e, _CAUSE] = _IMBALANCE
    is_full = state[e, _HELD_OUTPUT] + most > config[7]
    if is_full:
        lost[_OUTPUT] += 32
    emitted = uint64(0)
    decoding = 0
    starved = 0
    has_room = True
    # Decode and refill in one pass: a lane's refill depends on its own decoding only. Unsigned: no look at negative indices.
    for lane in range(uint64(32)):
        n_left = left[e, lane]
        if n_left == 0:
            if not is_full:
                symbols = row_symbols * min(2, max(0, n_rows - 2 * np.int64(lane)))
                lost[_IDLE if symbols < full_lane else _IMBALANCE] += 1
            continue
        b = bits[e, lane]
        n = held[e, lane]
        count = counts[e, lane]
        if not is_full:
            entry = uint64(table[b >> uint64(53)])
            length = (entry >> uint64(16)) & uint64(15)
            has_all = no_steps and count == 0
            if length <= n or (has_all and n > 0):
                b <<= length
                n = n - length if n > length else uint64(0)
                at = place[e, lane]
                out[at] = entry & uint64(255)
                n_emitted = uint64(1)
                if entry >> uint64(21) and n_left > 1:
                    out[at + uint64(1)] = (entry >> uint64(8)) & uint64(255)
                    n_emitted = uint64(2)
                place[e, lane] = at + n_emitted
                n_left -= n_emitted
                left[e, lane] = n_left
                emitted += n_emitted
                decoding += 1
                if n_left == 0:
                    state[e, _LIVE] -= 1
            elif has_all:
                return False
            else:
                starved += 1
        if n_left > 0:
            if n <= uint64(32) and count > 0:
                head = heads[e, lane]
                b |= uint64(fifo[e, lane, head & fifo_mask]) << (uint64(32) - n)
                n += uint64(32)
                heads[e, lane] = head + uint64(1)
                count -= uint64(1)
                counts[e, lane] = count
            has_room &= count < depth
        bits[e, lane] = b
        held[e, lane] = n
    lost[_DECODE] += decoding
    lost[state[e, _CAUSE]] += starved
    state[e, _HELD_OUTPUT] += np.int64(emitted)
    state[e, _BLOCKED] = 0 if has_room else 1
    if queued > 0 and state[e, _STEP] < n_steps and has_room:
        at = uint64(first_word + 32 * state[e, _STEP])
        state[e, _QUEUED] -= 1
        state[e, _STEP] += 1
        for lane in range(uint64(32)):
            if left[e, lane] > 0:
                fifo[e, lane, (heads[e, lane] + counts[e, lane]) & fifo_mask] = words[at + lane]
                counts[e, lane] += uint64(1)
    return True


@njit(cache=True, nogil=True)
def _demand_cycle(
    number: int, state: np.ndarray, first_word: int, n_steps: int, full_lane: int, config: np.ndarray, words: np.ndarray,
    table: np.ndarray, most: int, left: np.ndarray, place: np.ndarray, held: np.ndarray, bits: np.ndarray,
    lost: np.ndarray, out: np.ndarray, row_symbols: int, n_rows: int,
) -> bool:  # fmt: skip
    """One cycle of an engine in the demand layout; False where the tile is truncated."""
    e = uint64(number)
    if state[e, _STEP] < n_steps and state[e, _QUEUED] == 0:
        state[e, _CAUSE] = _cause(e, state, config[3])
    needed = 0
    for lane in range(uint64(32)):
        if left[e, lane] > 0 and held[e, lane] < 11:
            needed += 1
    if state[e, _HELD_OUTPUT] + most > config[7]:
        lost[_OUTPUT] += 32
    else:
        decodes = state[e, _POOL_COUNT] >= needed
        if not decodes and state[e, _STEP] == n_steps:
            return False
        cause = _DECODE if decodes else state[e, _CAUSE]
        word_at = uint64(first_word + state[e, _POOL_HEAD])
        emitted = uint64(0)
        for lane in range(uint64(32)):
            n_left = left[e, lane]
            if n_left == 0:
                symbols = row_symbols * min(2, max(0, n_rows - 2 * np.int64(lane)))
                lost[_IDLE if symbols < full_lane else _IMBALANCE] += 1
                continue
            lost[cause] += 1
            if decodes:
                b = bits[e, lane]
                n = held[e, lane]
                if n < 11:
                    b |= uint64(words[word_at]) << (uint64(32) - n)
                    n += uint64(32)
                    word_at += uint64(1)
                entry = uint64(table[b >> uint64(53)])
                length = (entry >> uint64(16)) & uint64(15)
                bits[e, lane] = b << length
                held[e, lane] = n - length
                at = place[e, lane]
                out[at] = entry & uint64(255)
                n_emitted = uint64(1)
                if entry >> uint64(21) and n_left > 1:
                    out[at + uint64(1)] = (entry >> uint64(8)) & uint64(255)
                    n_emitted = uint64(2)
                place[e, lane] = at + n_emitted
                left[e, lane] = n_left - n_emitted
                emitted += n_emitted
                if n_left == n_emitted:
                    state[e, _LIVE] -= 1
        state[e, _HELD_OUTPUT] += np.int64(emitted)
        if decodes:
            state[e, _POOL_HEAD] += needed
            state[e, _POOL_COUNT] -= needed
    if state[e, _QUEUED] > 0 and state[e, _STEP] < n_steps and state[e, _POOL_COUNT] + 32 <= 32 * max(2, config[4]):
        state[e, _QUEUED] -= 1
        state[e, _STEP] += 1
        state[e, _POOL_COUNT] += 32
    return True


@njit(cache=True, nogil=True)
def _simulate(
    words: np.ndarray, starts: np.ndarray, rows: np.ndarray, columns: np.ndarray, side_steps: np.ndarray, table: np.ndarray,
    is_demand: bool, config: np.ndarray, lost: np.ndarray, out: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """Run a tensor; return (cycles or TRUNCATED, reads).

    `config` is int64: engines, tokens a cycle, latency, queue, FIFO, hand-over, output symbols, output buffer, steps of the
    table, bucket.
    """
    n_engines, tokens_per_cycle, latency, queue_steps = config[0], config[1], config[2], config[3]
    n_tiles = len(rows)
    first_symbol = np.zeros(n_tiles + 1, np.int64)
    for t in range(n_tiles):
        first_symbol[t + 1] = first_symbol[t] + np.int64(rows[t]) * columns[t]
    most = 32
    for entry in table:
        if entry >> 20 == 2:
            most = 64
    slots = 1
    while slots < config[4]:
        slots *= 2
    state = np.zeros((n_engines, _N_FIELDS), np.int64)
    left = np.zeros((n_engines, 32), np.uint64)
    place = np.zeros((n_engines, 32), np.uint64)
    held = np.zeros((n_engines, 32), np.uint64)
    bits = np.zeros((n_engines, 32), np.uint64)
    fifo = np.zeros((n_engines, 32, slots), np.uint32)
    counts = np.zeros((n_engines, 32), np.uint64)
    heads = np.zeros((n_engines, 32), np.uint64)
    due_words = np.zeros((latency + 1, n_engines), np.int64)
    due_table = np.zeros(latency + 1, np.int64)
    for e in range(n_engines):
        state[e, _ASK_TILE] = e
        for t in range(e, n_tiles, n_engines):
            state[e, _WORDS_LEFT] += starts[t + 1] - starts[t]
        _start_tile(e, state, e, rows, columns, first_symbol, left, place, held, bits, counts, heads)
        # The reference forms the list of requests without looking at empty entries: skip tiles that ask for nothing.
        while state[e, _ASK_TILE] < n_tiles and (
            starts[state[e, _ASK_TILE] + 1] == starts[state[e, _ASK_TILE]] and side_steps[state[e, _ASK_TILE]] == 0
        ):
            state[e, _ASK_TILE] += n_engines
    table_to_ask = config[8]
    table_to_come = config[8]
    tokens = 0
    cycle = 0
    n_reads = 0
    first = 0
    last_due = -1
    n_active = n_engines
    while True:
        n_active = 0
        for e in range(n_engines):
            if state[e, _TILE] < n_tiles or state[e, _ASK_TILE] < n_tiles:
                n_active += 1
        if n_active == 0 and last_due < cycle and table_to_come == 0:
            break
        for e in range(n_engines):
            t = state[e, _TILE]
            if t >= n_tiles:
                lost[_DRAIN] += 32
            elif table_to_come > 0:
                lost[_TABLE] += 32
            elif state[e, _WAIT] > 0:
                state[e, _WAIT] -= 1
                lost[_HANDOVER] += 32
            else:
                n_steps = starts[t + 1] - starts[t]
                full_lane = columns[t] * min(2, rows[t])
                if is_demand:
                    fine = _demand_cycle(
                        e, state, 32 * starts[t], n_steps, full_lane, config, words, table, most, left, place, held,
                        bits, lost, out, columns[t], rows[t],
                    )  # fmt: skip
                else:
                    fine = _lockstep_cycle(
                        e, state, 32 * starts[t], n_steps, full_lane, config, words, table, most, left, place, held,
                        bits, fifo, counts, heads, lost, out, columns[t], rows[t],
                    )  # fmt: skip
                if not fine:
                    return TRUNCATED, n_reads
            state[e, _HELD_OUTPUT] = max(0, state[e, _HELD_OUTPUT] - config[6])
            if t < n_tiles and state[e, _LIVE] == 0 and state[e, _STEP] == starts[t + 1] - starts[t]:
                state[e, _WAIT] = config[5]
                _start_tile(
                    e, state, t + n_engines, rows, columns, first_symbol, left, place, held, bits, counts,
                    heads,
                )  # fmt: skip
        slot = cycle % (latency + 1)
        table_to_come -= due_table[slot]
        due_table[slot] = 0
        for e in range(n_engines):
            n = due_words[slot, e]
            if n > 0:
                state[e, _FLYING] -= n
                state[e, _QUEUED] += n
                state[e, _ARRIVED] = 1
                due_words[slot, e] = 0
        tokens = min(tokens + tokens_per_cycle, config[9])
        due = (cycle + latency) % (latency + 1)
        while table_to_ask > 0 and tokens >= _STEP_TOKENS:
            table_to_ask -= 1
            tokens -= _STEP_TOKENS
            n_reads += 1
            due_table[due] += 1
            last_due = cycle + latency
        if table_to_ask == 0:
            for k in range(n_engines):
                e = (first + k) % n_engines
                if tokens < _STEP_TOKENS:
                    first = e
                    break
                t = state[e, _ASK_TILE]
                if t >= n_tiles:
                    continue
                n_steps = starts[t + 1] - starts[t]
                if state[e, _ASK_STEP] < n_steps:
                    if state[e, _QUEUED] + state[e, _FLYING] >= queue_steps:
                        continue
                    state[e, _ASK_STEP] += 1
                    state[e, _FLYING] += 1
                    state[e, _WORDS_LEFT] -= 1
                    due_words[due, e] += 1
                else:
                    state[e, _ASK_SIDE] += 1
                tokens -= _STEP_TOKENS
                n_reads += 1
                last_due = cycle + latency
                while t < n_tiles and state[e, _ASK_STEP] == starts[t + 1] - starts[t] and state[e, _ASK_SIDE] == side_steps[t]:
                    t += n_engines
                    state[e, _ASK_TILE] = t
                    state[e, _ASK_STEP] = 0
                    state[e, _ASK_SIDE] = 0
        cycle += 1
    return cycle, n_reads


def simulate_unit(stream: TensorStream, config: UnitConfig) -> UnitRun:
    """Run a tensor through a unit; same arguments, result and error as `engine_reference.simulate_reference`."""
    numbers = [
        config.n_engines, config.tokens_per_cycle, config.latency_cycles, config.queue_steps, config.fifo_words,
        config.handover_cycles, config.output_symbols, config.output_buffer, -(-config.table_bytes // STEP_BYTES),
        config.bucket_tokens,
    ]  # fmt: skip
    lost = np.zeros(_N_LOSSES, np.int64)
    out = np.zeros(stream.n_symbols, np.uint8)
    cycles, n_reads = _simulate(
        np.ascontiguousarray(stream.words, np.uint32), np.ascontiguousarray(stream.starts, np.int64),
        np.ascontiguousarray(stream.rows, np.int64), np.ascontiguousarray(stream.columns, np.int64),
        np.ascontiguousarray(stream.side_steps, np.int64), np.ascontiguousarray(stream.table, np.uint32),
        stream.layout == Layout.DEMAND, np.array(numbers, np.int64), lost, out,
    )  # fmt: skip
    if cycles == TRUNCATED:
        raise CodecError("a tile ends before its symbols")
    assert int(lost.sum()) == N_LANES * config.n_engines * cycles
    return UnitRun(int(cycles), lost, STEP_BYTES * int(n_reads), out)
