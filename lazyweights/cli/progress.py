"""A progress bar on stderr: bytes, rate, time left, and what coding saves so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lazyweights.cli.messages import printable

if TYPE_CHECKING:
    from lazyweights.container.encoder import Progress

MAX_NAME_CHARS = 32


@contextmanager
def progress_bar(name: str, enabled: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Draw a bar while the body runs.

    Parameters
    ----------
    name : str
        Name of the file, shown before the bar.
    enabled : bool
        If it is not set, nothing is drawn, nothing is imported, and the callback is None.

    Yields
    ------
    callable or None
        Takes a `Progress`; may be called from any thread.
    """
    if not enabled:
        yield None
        return

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    shown = printable(name)
    if len(shown) > MAX_NAME_CHARS:
        shown = "..." + shown[3 - MAX_NAME_CHARS :]
    bar = Bar(
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[stage]}", style="dim", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[saving]}", style="green", markup=False),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
    from lazyweights.container.compiled import needs_compiling

    stage = "compiling, in this first run only: about a minute" if needs_compiling() else ""
    task = bar.add_task(shown, total=None, stage=stage, saving="")
    last_stage = ""

    def update(progress: Progress) -> None:
        nonlocal last_stage
        if progress.stage != last_stage and progress.n_bytes < bar.tasks[0].completed:
            bar.reset(task, total=progress.total_bytes)  # the next stage starts over: so do rate and time left
        last_stage = progress.stage
        saving = ""
        if progress.stage in ("encode", "verify") and progress.coded_bytes and progress.n_bytes:
            saving = f"{100 * (1 - progress.coded_bytes / progress.n_bytes):.1f} % saved"
        bar.update(
            task,
            completed=progress.n_bytes,
            total=progress.total_bytes,
            stage=progress.stage,
            saving=saving,
        )

    with bar:
        yield update
