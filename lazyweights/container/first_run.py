"""Compile kernels before a first run needs them, in processes that end and give back the memory that compiling takes.

Numba compiles a kernel when it is first called and stores it on disk, but what it needed for that it keeps as long as the process
lives: three times the memory that encoding needs. So the process that encodes or decodes starts others that compile
(`compile_process`), one after the other, each until it has used `MAX_BYTES`, and then loads what they stored. Where that cannot
be done it compiles as it goes.

What surprises:

- Nothing here loads numba, or the caller would hold its memory meanwhile. So a file beside the compiled kernels says what
  has been compiled, for which versions, processor and settings. Where it is missing or wrong, the processes find the kernels on
  disk and end at once, or the caller compiles what it needs.
- A process runs ``python -c``, not a copy of the caller: no ``if __name__ == "__main__"`` is needed. It gets the caller's
  `sys.path`, so that it imports the same package.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

ENCODE, DECODE = "encode", "decode"
MAX_BYTES = 300_000_000
"""A process compiles no further kernel once so much of its memory is resident. It starts with half of it."""

MAX_PROCESSES = 24
BAD_FILE, MORE = 3, 4
"""Exit codes of a process: the file is not one that can be encoded or decoded; memory is used up, and kernels are left."""

RECORD = "lazyweights-compiled.txt"
MAX_LINES = 32

_ROOMS = ("codecs", "blocks", "container")
_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from {} import main; main()"
_PROCESS = "lazyweights.container.compile_process"

_log = logging.getLogger(__name__)
_tried: set[str] = set()


def is_compiled(work: str) -> bool:
    """Return whether the kernels for `work`, `ENCODE` or `DECODE`, have been compiled, or this process has tried already.

    Takes less than a millisecond.
    """
    if work in _tried:
        return True
    line = f"{_build()} {work}"
    return any(line in _read_record(folder) for folder in _folders())


def compile_kernels(
    work: str, path: str | os.PathLike[str] | None, progress: Callable[[str], None] | None = None
) -> None:
    """Have the kernels compiled that `work` on a file needs; return at once where that has been done.

    Parameters
    ----------
    work : str
        `ENCODE` or `DECODE`.
    path : str, os.PathLike or None
        The file to encode or decode; None: one that cannot be looked at before, such as a pipe.
    progress : callable, optional
        Called with the name of each kernel that has been compiled.
    """
    if is_compiled(work):
        return
    _tried.add(work)
    python = _python()
    if python is None:
        return
    import tempfile

    _log.info("compiling kernels, in this first run only, for about a minute")
    try:
        with tempfile.TemporaryDirectory(prefix="lazyweights-") as folder:
            code = MORE
            for _ in range(MAX_PROCESSES):
                code = _run(python, work if path is not None else ENCODE, path, folder, progress)
                if code != MORE:
                    break
    except OSError as error:
        _log.info("no process to compile kernels in (%s): they are compiled where they are needed", error)
        return
    if code not in (0, BAD_FILE):
        _log.info("a process that compiles kernels ended with code %d: they are compiled where they are needed", code)
    if code != BAD_FILE:
        _write_record([ENCODE, DECODE] if work == ENCODE or path is None else [DECODE])


def compile_here() -> None:
    """Let this process compile what it needs itself."""
    _tried.update((ENCODE, DECODE))


def _python() -> str | None:
    """The interpreter to start, None where what runs here is not a plain one (a frozen application, an embedded Python)."""
    name = os.path.basename(sys.executable or "").lower()
    return sys.executable if name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False) else None


def _run(
    python: str, work: str, path: str | os.PathLike[str] | None, folder: str, progress: Callable[[str], None] | None
) -> int:
    """Run a process to its end and return its exit code. Whatever interrupts this also kills the process."""
    import subprocess

    file = "" if path is None else os.path.abspath(path)
    command = [python, "-c", _START.format(_PROCESS), json.dumps(sys.path), work, file, folder, str(MAX_BYTES)]
    with (
        open(os.path.join(folder, "errors"), "w+b") as errors,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if progress:
                    progress(line.strip())
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        if code not in (0, MORE):
            errors.seek(0)
            _log.info("compiling: %s", errors.read().decode("utf-8", "replace").strip())
    return code


def _build() -> str:
    """A short text that changes where compiled kernels may not be valid any more: code, numba, Python, processor, settings."""
    import importlib.util

    parts = [sys.implementation.cache_tag or sys.version, *_processor()]
    parts += sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("NUMBA_"))
    with suppress(ImportError, OSError, ValueError):
        numba = importlib.util.find_spec("numba")
        if numba is not None and numba.origin is not None:
            parts.append(_stamp(os.stat(os.path.join(os.path.dirname(numba.origin), "_version.py"))))
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for room in _ROOMS:
        with suppress(OSError), os.scandir(os.path.join(package, room)) as entries:
            parts += sorted(f"{entry.name} {_stamp(entry.stat())}" for entry in entries if entry.name.endswith(".py"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns}"


def _processor() -> Iterator[str]:
    """What tells processors apart that numba compiles for in different ways; nothing where the system does not tell."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file.read(8192).splitlines():  # the first of them
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                yield line
            elif not line:
                break


def _folders() -> Iterator[str]:
    """Where numba keeps compiled kernels, the first choice first."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        yield os.environ["NUMBA_CACHE_DIR"]
        return
    yield os.path.join(os.path.dirname(os.path.abspath(__file__)), "__pycache__")
    yield os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "numba")


def _read_record(folder: str) -> list[str]:
    try:
        with open(os.path.join(folder, RECORD), encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _write_record(works: list[str]) -> None:
    """Note that kernels have been compiled; where no folder can be written that is found out again the next time."""
    build = _build()
    for folder in _folders():
        lines = [line for line in _read_record(folder) if line not in {f"{build} {work}" for work in works}]
        lines += [f"{build} {work}" for work in works]
        path = os.path.join(folder, RECORD)
        try:
            os.makedirs(folder, exist_ok=True)
            with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines[-MAX_LINES:]))
            os.replace(file.name, path)
            return
        except OSError:
            continue
