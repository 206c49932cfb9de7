"""What the commands say: on stderr, one line each, and how they write sizes, counts and rates."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from lazyweights.errors import LazyWeightsError

PROGRAM = "lazyweights"
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")


class UsageError(Exception):
    """The arguments do not go together."""


def printable(text: object) -> str:
    """Make text from a file fit for a terminal: one line, no control characters, no lone surrogates.

    >>> printable("a\\x1b[31mb\\n\\udcff")
    'a\\\\x1b[31mb\\\\n\\\\udcff'
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


def say(text: str) -> None:
    """Print a line on stderr."""
    with suppress(OSError, ValueError):  # stderr is closed or full: nobody is left to tell
        print(printable(text), file=sys.stderr, flush=True)


def say_error(text: str) -> None:
    """Print an error on stderr."""
    say(f"{PROGRAM}: ERROR {text}")


def say_warning(text: str) -> None:
    """Print a warning on stderr."""
    say(f"{PROGRAM}: WARNING {text}")


def describe_error(error: BaseException, path: str | None = None) -> str:
    """Say in one line what went wrong and with which file.

    >>> describe_error(FileNotFoundError(2, "No such file or directory", "m.gguf"))
    'm.gguf: No such file or directory'
    """
    if isinstance(error, LazyWeightsError):
        return str(error) if error.path is not None or path is None else f"{path}: {error}"
    prefix = "" if path is None else f"{path}: "
    if isinstance(error, OSError) and error.strerror:
        if error.filename is not None:
            prefix = f"{os.fsdecode(error.filename)}: "
        return prefix + error.strerror
    if isinstance(error, MemoryError):
        return prefix + "out of memory"
    return f"{prefix}internal error: {type(error).__name__}: {error} (-v shows where; please report it)"


def size_text(n_bytes: int) -> str:
    """Write a size with four digits, in decimal units as file managers and hubs do.

    >>> size_text(999), size_text(98_362_432), size_text(999_999), size_text(5 * 10**9)
    ('999 B', '98.36 MB', '1.000 MB', '5.000 GB')
    """
    if n_bytes < 1000:
        return f"{n_bytes} B"
    value = float(n_bytes)
    for unit in _UNITS:
        value /= 1000
        if value < 999.95 or unit == _UNITS[-1]:
            break
    return f"{value:.{3 if value < 9.9995 else 2 if value < 99.995 else 1}f} {unit}"


def count_text(count: int) -> str:
    """Write a count of weights as model names do.

    >>> count_text(35136), count_text(134_515_008), count_text(7_241_732_096)
    ('35,136', '134.5 M', '7.242 B')
    """
    if count < 1_000_000:
        return f"{count:,}"
    value, unit = (count / 1e6, "M") if count < 999_950_000 else (count / 1e9, "B")
    return f"{value:.{3 if value < 9.9995 else 2 if value < 99.995 else 1}f} {unit}"


def saving_text(source_bytes: int, coded_bytes: int) -> str:
    """Write what coding saved, or cost.

    >>> saving_text(1000, 878), saving_text(1000, 1001), saving_text(1000, 1000)
    ('12.20 % saved', '0.10 % larger', '0.00 % saved')
    """
    if not source_bytes:
        return "nothing saved"
    change = 100 * (coded_bytes - source_bytes) / source_bytes
    return f"{change:.2f} % larger" if change > 0 else f"{abs(change):.2f} % saved"


def bpw_text(n_bytes: int, n_weights: int) -> str:
    """Write bits per weight.

    >>> bpw_text(98_362_432, 134_515_008), bpw_text(10, 0)
    ('5.850', '-')
    """
    return f"{8 * n_bytes / n_weights:.3f}" if n_weights else "-"


def seconds_text(seconds: float) -> str:
    """Write a duration.

    >>> seconds_text(0.0123), seconds_text(1.24), seconds_text(75.3)
    ('0.01 s', '1.2 s', '75 s')
    """
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 10 else 0}f} s"


def rate_text(n_bytes: int, seconds: float) -> str:
    """Write a data rate.

    >>> rate_text(98_362_432, 0.5), rate_text(1, 0.0)
    ('196.7 MB/s', '-')
    """
    return f"{size_text(round(n_bytes / seconds))}/s" if seconds > 0 else "-"
