"""A coded file's GGUF in an anonymous memory file: other code opens it by a path, and no file on disk ever holds it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from lazyweights.container.decoder import iter_placed, load_kernels
from lazyweights.container.gguf_values import CODED_MAGIC
from lazyweights.container.jobs import ProgressCallback
from lazyweights.errors import BackendUnavailableError, LazyWeightsError


@dataclass
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
        Time to decode it; 0 where nothing was decoded, or as long as it goes on.
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


def prepare(source: str | os.PathLike[str]) -> None:
    """Load what decoding `source` will need (compiled kernels), for those who measure times; nothing where it is a GGUF.

    Raises
    ------
    FormatError, CodecError
        If a coded file is damaged where this looks at it.
    """
    if is_coded_file(source):
        load_kernels(source)


@contextmanager
def model_path(
    source: str | os.PathLike[str], *, threads: int = 0, progress: ProgressCallback | None = None, whole: bool = True
) -> Iterator[ModelPath]:
    """Yield a path at which the GGUF of `source`, a GGUF or a coded file, can be read while the body runs.

    What has opened or mapped the path by then can go on using it.

    Parameters
    ----------
    source : str or os.PathLike
    threads : int
        To decode with; 0: all cores.
    progress : callable, optional
        Told how far decoding is, from another thread.
    whole : bool
        False: run the body as soon as the GGUF header is there, checked. The tensors follow in the background, and are all
        there, checked, when this context has been left without an error; until then they may read as zeros. For a reader that
        maps the file and does not look at the tensors yet.

    Raises
    ------
    FormatError, CodecError
        If a coded file is damaged.
    BackendUnavailableError
        If the system has no anonymous memory files (only Linux has them).
    LazyWeightsError
        If a file cannot be read, or memory is short.
    """
    name = os.fspath(source)
    if not is_coded_file(name):
        yield ModelPath(name, name, False, os.stat(name).st_size)
        return
    if not hasattr(os, "memfd_create"):
        raise BackendUnavailableError(
            "this system has no anonymous memory files (only Linux has): decode the file with `lazyweights decode`, and use "
            "what that writes", path=name
        )
    try:
        fd = os.memfd_create("lazyweights", os.MFD_CLOEXEC)
    except OSError as error:
        raise LazyWeightsError(f"no memory for the decoded model: {error.strerror}", path=name) from error
    try:
        os.fchmod(fd, 0o400)  # what opens the path reads; this descriptor writes all the same
        filler = _Filler(name, fd, threads, progress)
        try:
            filler.wait_for_header()
            found = ModelPath(f"/proc/{os.getpid()}/fd/{fd}", name, True, filler.n_bytes, 0.0, fd)
            if whole:
                found.seconds = filler.wait()
            yield found
            found.seconds = filler.wait()
        finally:
            filler.stop()
    finally:
        os.close(fd)


class _Filler:
    """Decodes a coded file into a memory file in a thread of its own.

    Attributes
    ----------
    n_bytes : int
        Size of the GGUF, known once the header is there.
    """

    def __init__(self, source: str, fd: int, threads: int, progress: ProgressCallback | None) -> None:
        self.n_bytes = 0
        self._seconds = 0.0
        self._error: BaseException | None = None
        self._has_header = False
        self._header_or_end = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._fill, args=(source, fd, threads, progress), name="lazyweights-fill")
        self._thread.start()

    def _fill(self, source: str, fd: int, threads: int, progress: ProgressCallback | None) -> None:
        started = time.monotonic()
        try:
            with closing(iter_placed(source, fd, threads=threads, progress=progress)) as parts:
                for placed in parts:
                    if placed.n_bytes == 0:
                        self.n_bytes = placed.source_bytes
                        os.ftruncate(fd, placed.source_bytes)
                    elif placed.n_bytes >= placed.header_bytes:
                        self._has_header = True
                        self._header_or_end.set()
                    if self._stopping:
                        return
        except BaseException as error:  # of this thread: `wait` raises it in the one that asks
            self._error = error
        finally:
            self._seconds = time.monotonic() - started
            self._header_or_end.set()

    def wait_for_header(self) -> None:
        """Wait until the GGUF header is in the memory file; raise what went wrong before that."""
        self._header_or_end.wait()
        if self._error is not None and not self._has_header:
            raise self._error

    def wait(self) -> float:
        """Wait until all is in the memory file; return the seconds it took, or raise what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._seconds

    def stop(self) -> None:
        """Decode no further, and wait for the thread to end."""
        self._stopping = True
        self._thread.join()
