"""A coded file's GGUF in an anonymous memory file: other code opens it by a path, and no file on disk ever holds it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lazyweights.container.decoder import iter_decoded
from lazyweights.container.gguf_values import CODED_MAGIC
from lazyweights.container.jobs import ProgressCallback
from lazyweights.errors import BackendUnavailableError, LazyWeightsError


@dataclass(frozen=True)
class ModelPath:
    """A path at which a GGUF can be read.

    Attributes
    ----------
    path : str
        Of the file itself, or of the memory file, valid for this process and others of the same user.
    source : str
        The file that was given.
    is_coded : bool
        Whether `source` is a coded file.
    n_bytes : int
        Bytes of the GGUF.
    seconds : float
        Time to decode it, 0 where nothing was decoded.
    fd : int
        Descriptor of the memory file, -1 where there is none.
    """

    path: str
    source: str
    is_coded: bool
    n_bytes: int
    seconds: float = 0.0
    fd: int = -1


def is_coded_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file starts with the magic of coded files.

    Raises
    ------
    LazyWeightsError
        If it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(len(CODED_MAGIC)) == CODED_MAGIC
    except OSError as error:
        raise LazyWeightsError(f"cannot read: {error.strerror}", path=os.fspath(path)) from error


@contextmanager
def model_path(
    source: str | os.PathLike[str], *, threads: int = 0, progress: ProgressCallback | None = None
) -> Iterator[ModelPath]:
    """Yield a path at which the GGUF of `source`, a GGUF or a coded file, can be read while the body runs.

    What has opened or mapped the path by then can go on using it.

    Raises
    ------
    FormatError, CodecError
        If a coded file is damaged.
    BackendUnavailableError
        If the system has no anonymous memory files (only Linux has them).
    """
    name = os.fspath(source)
    if not is_coded_file(name):
        yield ModelPath(name, name, False, os.stat(name).st_size)
        return
    if not hasattr(os, "memfd_create"):
        raise BackendUnavailableError("this system has no anonymous memory files: decode the file first", path=name)
    started = time.monotonic()
    fd = os.memfd_create("lazyweights", os.MFD_CLOEXEC)
    try:
        n_bytes = 0
        for part in iter_decoded(name, threads=threads, progress=progress):
            left = part
            while left:
                left = left[os.write(fd, left) :]
            n_bytes += len(part)
        yield ModelPath(f"/proc/{os.getpid()}/fd/{fd}", name, True, n_bytes, time.monotonic() - started, fd)
    except OSError as error:
        raise LazyWeightsError(f"no memory for the decoded model: {error.strerror}", path=name) from error
    finally:
        os.close(fd)
