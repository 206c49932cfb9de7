"""A progress bar on stderr for work that comes in steps: chunks of a text, tensors of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lazyweights.cli.messages import printable

StepCallback = Callable[[int, int, str], None]
"""Takes steps done, steps in all, and what is at work."""


@contextmanager
def step_bar(name: str, enabled: bool) -> Iterator[StepCallback | None]:
    """Draw a bar while the body runs; None where `enabled` is not set, and then nothing is imported."""
    if not enabled:
        yield None
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[stage]}", style="dim", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left", style="dim"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
    task = bar.add_task(printable(name), total=None, stage="")

    def update(n_done: int, n_total: int, stage: str) -> None:
        bar.update(task, completed=n_done, total=n_total, stage=printable(stage))

    with bar:
        yield update
