"""The decode unit in plain Python, cycle by cycle: the reference that `engine_kernels` must equal to the cycle.

The rules of a cycle are those of `unit_config`. It decodes while it counts.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from lazyweights.codecs import MAX_CODE_LENGTH, N_LANES
from lazyweights.errors import CodecError
from lazyweights.hardware.unit_config import STEP_BYTES, TOKENS_PER_BYTE, Layout, Loss, TensorStream, UnitConfig, UnitRun

_STEP_TOKENS = STEP_BYTES * TOKENS_PER_BYTE


class _Lane:
    """Shift register, FIFO and place of one lane in a tile."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.places = [(row, column) for row in rows for column in range(len(row))]  # where its symbols go, last first
        self.places.reverse()
        self.n_symbols = len(self.places)
        self.bits: deque[int] = deque()
        self.fifo: deque[int] = deque()

    @property
    def done(self) -> bool:
        return not self.places

    def take(self, word: int) -> None:
        self.bits.extend(word >> (31 - k) & 1 for k in range(32))

    def window(self) -> int:
        value = 0
        for k in range(11):
            value = value << 1 | (self.bits[k] if k < len(self.bits) else 0)
        return value

    def emit(self, entry: int) -> None:
        for _ in range(min(entry >> 16 & 15, len(self.bits))):
            self.bits.popleft()
        for k in range(min(entry >> 20, len(self.places))):
            row, column = self.places.pop()
            row[column] = entry >> 8 * k & 255


class _Tile:
    """A tile that an engine works on."""

    def __init__(self, stream: TensorStream, number: int) -> None:
        self.out = [[0] * int(stream.columns[number]) for _ in range(int(stream.rows[number]))]
        self.lanes = [_Lane(self.out[2 * k : 2 * k + 2]) for k in range(N_LANES)]
        begin, end = (N_LANES * int(s) for s in stream.starts[number : number + 2])
        words = stream.words[begin:end].tolist()
        self.steps = deque(words[k : k + N_LANES] for k in range(0, len(words), N_LANES))
        self.pool: deque[int] = deque()  # demand layout
        self.blocked = False  # in the last cycle a lane had a full FIFO
        self.cause = Loss.HANDOVER  # why a lane that starves does so

    @property
    def done(self) -> bool:
        return not self.steps and all(lane.done for lane in self.lanes)


class _Engine:
    """One engine: its tiles, the steps it asked for, its output buffer."""

    def __init__(self, stream: TensorStream, config: UnitConfig, number: int) -> None:
        self.stream, self.config = stream, config
        self.todo = deque(range(number, len(stream.rows), config.n_engines))
        # What the fetcher reads for this engine, in order: True for a step of words, False for uncoded planes.
        self.requests: deque[bool] = deque()
        for t in self.todo:
            self.requests.extend([True] * int(stream.starts[t + 1] - stream.starts[t]))
            self.requests.extend([False] * int(stream.side_steps[t]))
        self.queued = self.in_flight = 0
        self.has_arrived = False
        self.held_output = 0
        self.wait = 0
        self.tile: _Tile | None = None
        self.finished: dict[int, list[list[int]]] = {}
        self.most_output = N_LANES * max(int(e) >> 20 for e in stream.table)
        self.number = -1
        self._next_tile(0)

    def _next_tile(self, wait: int) -> None:
        self.tile = None
        if self.todo:
            self.number = self.todo.popleft()
            self.tile = _Tile(self.stream, self.number)
            self.wait = wait

    def _note_cause(self, tile: _Tile) -> None:
        """Keep what last held up the words of a tile: what follows it, until words reach the lanes, is its doing."""
        if tile.steps and not self.queued:
            words_left = True in self.requests
            has_credit = self.in_flight < self.config.queue_steps
            tile.cause = Loss.BANDWIDTH if self.has_arrived and has_credit and words_left else Loss.LATENCY
        elif tile.steps and tile.blocked:
            tile.cause = Loss.IMBALANCE

    def cycle(self, table_waits: bool, lost: dict[Loss, int]) -> None:
        """One cycle, stages 1 to 5."""
        tile = self.tile
        if tile is None:
            lost[Loss.DRAIN] += N_LANES
        elif table_waits:
            lost[Loss.TABLE] += N_LANES
        elif self.wait:
            self.wait -= 1
            lost[Loss.HANDOVER] += N_LANES
        elif self.stream.layout == Layout.DEMAND:
            self._demand(tile, lost)
        else:
            self._lockstep(tile, lost)
        self.held_output = max(0, self.held_output - self.config.output_symbols)
        if tile is not None and tile.done:
            self.finished[self.number] = tile.out
            self._next_tile(self.config.handover_cycles)

    def _is_output_full(self) -> bool:
        return self.held_output + self.most_output > self.config.output_buffer

    def _done_or_idle(self, tile: _Tile, lane: _Lane) -> Loss:
        return Loss.IDLE if lane.n_symbols < tile.lanes[0].n_symbols else Loss.IMBALANCE

    def _emit(self, lane: _Lane, entry: int, lost: dict[Loss, int]) -> None:
        before = len(lane.places)
        lane.emit(entry)
        self.held_output += before - len(lane.places)
        lost[Loss.DECODE] += 1

    def _lockstep(self, tile: _Tile, lost: dict[Loss, int]) -> None:
        depth = self.config.fifo_words
        self._note_cause(tile)
        if self._is_output_full():
            lost[Loss.OUTPUT] += N_LANES
        else:
            for lane in tile.lanes:
                if lane.done:
                    lost[self._done_or_idle(tile, lane)] += 1
                    continue
                entry = int(self.stream.table[lane.window()])
                has_all = not tile.steps and not lane.fifo
                if (entry >> 16 & 15) <= len(lane.bits) or (has_all and lane.bits):
                    self._emit(lane, entry, lost)
                elif has_all:
                    raise CodecError("a tile ends before its symbols")
                else:
                    lost[tile.cause] += 1
        for lane in tile.lanes:
            if not lane.done and len(lane.bits) <= 32 and lane.fifo:
                lane.take(lane.fifo.popleft())
        tile.blocked = any(not lane.done and len(lane.fifo) == depth for lane in tile.lanes)
        if self.queued and tile.steps and not tile.blocked:
            self.queued -= 1
            for lane, word in zip(tile.lanes, tile.steps.popleft(), strict=True):
                if not lane.done:
                    lane.fifo.append(word)

    def _demand(self, tile: _Tile, lost: dict[Loss, int]) -> None:
        self._note_cause(tile)
        takers = [lane for lane in tile.lanes if not lane.done and len(lane.bits) < MAX_CODE_LENGTH]
        if self._is_output_full():
            lost[Loss.OUTPUT] += N_LANES
        elif len(tile.pool) < len(takers):
            if not tile.steps:
                raise CodecError("a tile ends before its symbols")
            for lane in tile.lanes:
                lost[self._done_or_idle(tile, lane) if lane.done else tile.cause] += 1
        else:
            for lane in takers:
                lane.take(tile.pool.popleft())
            for lane in tile.lanes:
                if lane.done:
                    lost[self._done_or_idle(tile, lane)] += 1
                else:
                    self._emit(lane, int(self.stream.table[lane.window()]), lost)
        if self.queued and tile.steps and len(tile.pool) + N_LANES <= N_LANES * max(2, self.config.fifo_words):
            self.queued -= 1
            tile.pool.extend(tile.steps.popleft())


def simulate_reference(stream: TensorStream, config: UnitConfig) -> UnitRun:
    """Run a tensor through a unit.

    Parameters
    ----------
    stream : TensorStream
    config : UnitConfig

    Returns
    -------
    UnitRun

    Raises
    ------
    CodecError
        If a tile ends before its symbols.
    """
    engines = [_Engine(stream, config, e) for e in range(config.n_engines)]
    lost = dict.fromkeys(Loss, 0)
    arrivals: deque[tuple[int, _Engine | None, bool]] = deque()
    table_to_ask = table_to_come = -(-config.table_bytes // STEP_BYTES)
    tokens = cycle = n_reads = first = 0
    while any(e.tile is not None or e.requests for e in engines) or arrivals:
        for engine in engines:
            engine.cycle(table_to_come > 0, lost)
        while arrivals and arrivals[0][0] <= cycle:
            _, owner, is_words = arrivals.popleft()
            if owner is None:
                table_to_come -= 1
            elif is_words:
                owner.in_flight -= 1
                owner.queued += 1
                owner.has_arrived = True
        tokens = min(tokens + config.tokens_per_cycle, config.bucket_tokens)
        due = cycle + config.latency_cycles
        while table_to_ask and tokens >= _STEP_TOKENS:
            table_to_ask -= 1
            tokens -= _STEP_TOKENS
            n_reads += 1
            arrivals.append((due, None, False))
        if not table_to_ask:
            for k in range(config.n_engines):
                engine = engines[(first + k) % config.n_engines]
                if tokens < _STEP_TOKENS:
                    first = (first + k) % config.n_engines
                    break
                if not engine.requests:
                    continue
                is_words = engine.requests[0]
                if is_words and engine.queued + engine.in_flight >= config.queue_steps:
                    continue
                engine.requests.popleft()
                tokens -= _STEP_TOKENS
                n_reads += 1
                engine.in_flight += int(is_words)
                arrivals.append((due, engine, is_words))
        cycle += 1
    finished = {number: out for engine in engines for number, out in engine.finished.items()}
    symbols = [symbol for t in range(len(stream.rows)) for row in finished[t] for symbol in row]
    lane_cycles = np.array([lost[loss] for loss in Loss], np.int64)
    return UnitRun(cycle, lane_cycles, STEP_BYTES * n_reads, np.array(symbols, np.uint8))
