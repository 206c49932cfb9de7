"""The files a command works on: find them, look at their first bytes, work through them one by one."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Callable

from lazyweights.cli.messages import FAILED, OK, UsageError, describe_error, say_error
from lazyweights.errors import FormatError, LazyWeightsError, NotCodedError

STDIO = "-"

_HEAD_BYTES = 4096


def work_through(args: argparse.Namespace, suffixes: tuple[str, ...], work: Callable[[str], None]) -> int:
    """Call `work` for each input file; report what fails and carry on with the others.

    Parameters
    ----------
    args : argparse.Namespace
        With `files`: files, directories (searched for `suffixes`, in sorted order) or ``-``.
    suffixes : tuple of str
        What to look for in a directory.
    work : callable
        Does one file; raises what goes wrong.

    Returns
    -------
    int
        Exit code: 1 if anything failed.
    """
    paths, code = _find_files(args.files, suffixes)
    if getattr(args, "output", None) is not None and len(paths) > 1:
        raise UsageError(f"-o names one output, but there are {len(paths)} inputs")
    for path in paths:
        try:
            work(path)
        except (BrokenPipeError, UsageError):
            raise
        except Exception as error:
            if args.verbose and not isinstance(error, LazyWeightsError | OSError | MemoryError):
                import traceback

                traceback.print_exc()
            say_error(describe_error(error, path))
            code = FAILED
    return code


def _find_files(names: list[str], suffixes: tuple[str, ...]) -> tuple[list[str], int]:
    paths: list[str] = []
    code = OK

    def fail(error: OSError) -> None:
        nonlocal code
        say_error(describe_error(error))
        code = FAILED

    for name in names:
        if name == STDIO or not os.path.isdir(name):
            paths.append(name)
            continue
        found = [
            os.path.join(folder, file)
            for folder, _, files in os.walk(name, onerror=fail)
            for file in files
            if file.endswith(suffixes)
        ]
        if not found and code == OK:
            wanted = " or ".join(f"*{suffix}" for suffix in suffixes)
            say_error(f"{name}: no {wanted} file in this directory")
            code = FAILED
        paths += sorted(found)
    return paths, code


def kind_of(path: str) -> tuple[str, str]:
    """Look at the first bytes of a file.

    Returns
    -------
    kind : str
        ``gguf``, ``coded`` or ``other``.
    description : str
        What it looks like, a noun phrase.
    """
    from lazyweights.container.gguf_scan import describe_bytes
    from lazyweights.container.gguf_values import CODED_MAGIC, GGUF_MAGIC

    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
        raise LazyWeightsError("not a regular file", path=path)
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    kind = "gguf" if head.startswith(GGUF_MAGIC) else "coded" if head.startswith(CODED_MAGIC) else "other"
    return kind, describe_bytes(head)


def require_gguf(path: str) -> None:
    """Raise `FormatError` unless the file starts as a GGUF file."""
    kind, description = kind_of(path)
    if kind == "coded":
        raise FormatError("this file is coded already; it would gain nothing", path=path)
    if kind != "gguf":
        raise FormatError(f"not a GGUF file: it looks like {description}", path=path)


def require_coded(path: str) -> None:
    """Raise `NotCodedError` unless the file starts as a coded file."""
    kind, description = kind_of(path)
    if kind == "gguf":
        raise NotCodedError("not a coded file: it is a GGUF file as it is", path=path)
    if kind != "coded":
        raise NotCodedError(f"not a coded file: it looks like {description}", path=path)


def identity(path: str) -> tuple[int, int, int, int]:
    """What tells whether a file is still the one that was read."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def remove_input(path: str, seen: tuple[int, int, int, int]) -> None:
    """Delete an input for ``--rm``, unless it changed since it was `seen`."""
    if identity(path) != seen:
        raise LazyWeightsError("the file changed while it was read, so it is kept", path=path)
    os.unlink(path)


def is_terminal(stream: object) -> bool:
    """Whether a standard stream is open and is a terminal."""
    try:
        return bool(stream is not None and stream.isatty())  # type: ignore[attr-defined]
    except ValueError:
        return False


def show_progress(args: argparse.Namespace) -> bool:
    """Whether this command is to draw a progress bar."""
    return not args.no_progress and not args.quiet and is_terminal(sys.stderr)
