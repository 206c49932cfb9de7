"""What a process runs that compiles kernels, in bounded memory, for the process that started it (`first_run`).

It encodes a sample of the file, or decodes the start of it, so it compiles the kernels that the file needs, for the types
of arguments that they will be called with. Each one is stored on disk. When it has used its memory it ends, before the next
kernel, with exit code `MORE`: another process then loads what is stored and goes on.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from numba.core import event

from lazyweights.container import first_run
from lazyweights.errors import LazyWeightsError

_PACKAGE = "lazyweights."


def resident_bytes() -> int:
    """Memory of this process that is resident now; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class MemoryGuard(event.Listener):
    """Prints the name of each kernel that has been compiled; ends the process where memory is used up when one is to be compiled.

    It lets one be compiled in any case, so that there is always progress.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._n_compiled = 0

    def on_start(self, event: Any) -> None:
        """A kernel is going to be compiled; all that have been are on disk."""
        if self._n_compiled and resident_bytes() > self._max_bytes:
            os._exit(first_run.MORE)

    def on_end(self, event: Any) -> None:
        """A kernel has been compiled."""
        kernel = event.data["dispatcher"].py_func
        if kernel.__module__.startswith(_PACKAGE):
            self._n_compiled += 1
            print(f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}", flush=True)


def main() -> None:
    """Do the work. Arguments: `ENCODE` or `DECODE` of `first_run`, the file ("" for any), a folder for a sample, the limit."""
    work, path, folder, max_bytes = sys.argv[1:]
    first_run.compile_here()
    event.register("numba:compile", MemoryGuard(int(max_bytes)))
    try:
        if work == first_run.ENCODE:
            _encode_sample(path, folder)
        else:
            from lazyweights.container.decoder import load_kernels

            load_kernels(path)
    except LazyWeightsError:
        sys.exit(first_run.BAD_FILE)


def _encode_sample(path: str, folder: str) -> None:
    from lazyweights.container.encoder import encode_file
    from lazyweights.container.gguf_sample import sample_common_types, sample_file, write_sample

    sample = os.path.join(folder, "sample.gguf")
    write_sample(sample_file(path) if path else sample_common_types(), sample)
    encode_file(sample, sample + ".lw", threads=1, force=True)
