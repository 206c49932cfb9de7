"""Compile kernels before the first run, and say so meanwhile."""

from __future__ import annotations

import argparse

from lazyweights.cli.files import STDIO, show_progress

TEXT = "compiling kernels, in this first run only: about a minute"


def compile_first(args: argparse.Namespace, work: str, path: str) -> None:
    """Have the kernels compiled that ``"encode"`` or ``"decode"`` needs for a file, before numba is loaded here."""
    from lazyweights.container import first_run

    if first_run.is_compiled(work):
        return
    source = None if path == STDIO else path
    if not show_progress(args):
        first_run.compile_kernels(work, source)
        return

    from rich.console import Console

    n_compiled = 0
    with Console(stderr=True).status(TEXT) as status:

        def update(kernel: str) -> None:
            nonlocal n_compiled
            n_compiled += 1
            status.update(f"{TEXT} ({n_compiled}: {kernel})")

        first_run.compile_kernels(work, source, update)
