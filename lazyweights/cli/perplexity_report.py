"""What ``lazyweights perplexity`` shows: the running estimate on stderr, the result on stdout."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lazyweights.cli.files import show_progress
from lazyweights.cli.messages import say, say_warning, size_text
from lazyweights.cli.progress import progress_bar

if TYPE_CHECKING:
    from lazyweights.container.jobs import Progress
    from lazyweights.llama.divergence import DivergenceStatistics, Estimate
    from lazyweights.llama.perplexity import DivergenceResult, Evaluation, PerplexityResult


class RunningEstimate:
    """What is evaluated, then the estimate after each chunk: a bar on a terminal, else text. A context manager.

    Parameters
    ----------
    path : str
        The model.
    args : argparse.Namespace
        With `quiet` and `no_progress`.
    base : str or None
        Base logits file that is going to be written.
    """

    def __init__(self, path: str, args: argparse.Namespace, base: str | None) -> None:
        self._path = path
        self._base = base
        self._quiet = args.quiet
        self._draws = show_progress(args)
        self._stack = ExitStack()
        self._update: Callable[[int, str], None] | None = None
        self._in_line = False

    def __enter__(self) -> RunningEstimate:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        self._end_line()

    def _end_line(self) -> None:
        if self._in_line:
            self._in_line = False
            say("")

    def decoding_bar(self, is_coded: bool) -> Callable[[Progress], None] | None:
        """Draw a bar of decoding until `start`; return what takes its progress."""
        return self._stack.enter_context(progress_bar(os.path.basename(self._path), self._draws and is_coded))

    def start(self, evaluation: Evaluation) -> None:
        """Say what is going to be evaluated."""
        self._stack.close()
        if not self._quiet:
            self._describe(evaluation)
        if evaluation.n_ctx > evaluation.n_ctx_train > 0:
            say_warning(
                f"{self._path}: the model was trained with a context of {evaluation.n_ctx_train} tokens, not {evaluation.n_ctx}"
            )
        if self._draws:
            self._update = self._stack.enter_context(_ChunkBar(os.path.basename(self._path), evaluation.n_chunks))

    def _describe(self, evaluation: Evaluation) -> None:
        together = f", {evaluation.n_seq} chunks at a time" if evaluation.n_seq > 1 else ""
        bos = "BOS starts each chunk" if evaluation.adds_bos else "no BOS is added"
        say(f"{self._path}: {evaluation.description}, vocabulary of {evaluation.n_vocab:,} tokens; {evaluation.build}")
        chunks = f"{evaluation.n_chunks} chunk{'s' * (evaluation.n_chunks > 1)}"
        say(
            f"{self._path}: {evaluation.n_tokens:,} tokens, {chunks}, n_ctx = {evaluation.n_ctx}, {bos}; "
            f"{evaluation.n_scored:,} tokens are scored; batches of {evaluation.n_batch}{together}"
        )
        if self._base is not None:
            from lazyweights.llama.logits_file import file_bytes

            n_bytes = file_bytes(evaluation.n_ctx, evaluation.n_vocab, evaluation.n_chunks)
            say(f"{self._base}: the base logits will take {size_text(n_bytes)}")

    def measured(self, n_chunks: int, ppl: float) -> None:
        """Show the perplexity of the first chunks."""
        if self._update is not None:
            self._update(n_chunks, f"PPL {ppl:.4f}")
        elif not self._quiet:
            with suppress(OSError, ValueError, AttributeError):  # stderr is closed or full
                sys.stderr.write(f"[{n_chunks}]{ppl:.4f},")
                sys.stderr.flush()
                self._in_line = True

    def compared(self, n_chunks: int, so_far: DivergenceStatistics) -> None:
        """Show how the first chunks compare."""
        if self._update is not None:
            self._update(n_chunks, f"KLD {so_far.kld.value:.5f}")
        elif not self._quiet:
            if n_chunks == 1:
                say("chunk  PPL(Q)                     ln(PPL(Q)/PPL(base))       KLD                        same top p")
            same = Percent.of(so_far.same_top_p)
            cells = (so_far.ppl, so_far.ln_ratio, so_far.kld, same)
            say(f"{n_chunks:5}  " + "  ".join(f"{cell!s:25}" for cell in cells).rstrip())


class _ChunkBar:
    """A bar that counts chunks; a context manager that gives what moves it."""

    def __init__(self, name: str, n_chunks: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("chunks"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[estimate]}", style="green", markup=False),
            console=Console(stderr=True), transient=True, expand=True,
        )  # fmt: skip
        self._task = self._bar.add_task(name, total=n_chunks, estimate="")

    def __enter__(self) -> Callable[[int, str], None]:
        self._bar.start()
        return lambda n_chunks, estimate: self._bar.update(self._task, completed=n_chunks, estimate=estimate)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()


@dataclasses.dataclass(frozen=True)
class Percent:
    """An estimate of a fraction, written in percent."""

    value: float
    error: float

    @classmethod
    def of(cls, estimate: Estimate) -> Percent:
        """Write this estimate in percent."""
        return cls(100 * estimate.value, 100 * estimate.error)

    def __str__(self) -> str:
        return f"{self.value:.3f} +/- {self.error:.3f} %"


def print_divergence(found: DivergenceStatistics) -> None:
    """Print the statistics, in the order and the words of llama-perplexity."""
    lines: list[tuple[str, object]] = [
        ("Mean PPL(Q)", found.ppl),
        ("Mean PPL(base)", found.ppl_base),
        ("Cor(ln(PPL(Q)), ln(PPL(base)))", f"{100 * found.correlation:.2f} %"),
        ("Mean ln(PPL(Q)/PPL(base))", found.ln_ratio),
        ("Mean PPL(Q)/PPL(base)", found.ratio),
        ("Mean PPL(Q)-PPL(base)", found.difference),
    ]
    _print_lines("Perplexity", lines)
    lines = [("Mean KLD", found.kld)]
    lines += [(f"{_titled(name)} KLD", f"{value:.6f}") for name, value in found.kld_quantiles.items()]
    _print_lines("KL divergence", lines)
    lines = [("Mean delta p", Percent.of(found.delta_p))]
    lines += [(f"{_titled(name)} delta p", f"{100 * value:.3f} %") for name, value in found.delta_p_quantiles.items()]
    lines += [("RMS delta p", Percent.of(found.rms_delta_p)), ("Same top p", Percent.of(found.same_top_p))]
    _print_lines("Token probability", lines)


def _titled(name: str) -> str:
    return name[:1].upper() + name[1:]


def _print_lines(title: str, lines: list[tuple[str, object]]) -> None:
    print(f"====== {title} statistics ======")
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:{width}} : {value}")


def result_json(result: PerplexityResult | DivergenceResult) -> str:
    """Write a result as JSON: its fields and those of their fields; a number that is not finite becomes null."""
    return json.dumps(_plain(dataclasses.asdict(result)), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
