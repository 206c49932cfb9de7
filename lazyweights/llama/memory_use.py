"""How much memory this process has used."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryUse:
    """Resident memory in bytes.

    Attributes
    ----------
    peak : int
        The most there has been, since the process started.
    anonymous, file, shared : int or None
        Now: of the process alone; mapped from files; of memory files. None where the system does not tell (not Linux).
    """

    peak: int
    anonymous: int | None = None
    file: int | None = None
    shared: int | None = None


def memory_use() -> MemoryUse | None:
    """Return the memory of this process, None where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            lines = dict(line.split(":", 1) for line in status if ":" in line)
        kib = {name: int(lines[name].split()[0]) for name in ("VmHWM", "RssAnon", "RssFile", "RssShmem")}
    except (OSError, KeyError, ValueError):
        return _from_resource()
    return MemoryUse(*(1024 * n for n in kib.values()))


def _from_resource() -> MemoryUse | None:
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return MemoryUse(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
