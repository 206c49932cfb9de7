"""Output files that appear whole or not at all.

`AtomicFile` writes a temporary file beside the output and gives it the final name as its last step. What surprises:

- The temporary name is ``.{name}.{random}.part``: whatever kills the process, no file with a name that a loader would
  pick up is ever incomplete.
- Without `force` the last step is a hard link, not a rename: a rename would replace a file that appeared while this
  one was being written.
- With `force` an output that is a symbolic link is replaced itself; the file it points to is left alone.
- Only failures of the output become `LazyWeightsError`. What the body of the ``with`` raises passes through.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from contextlib import suppress
from types import TracebackType
from typing import Any, BinaryIO, cast

from lazyweights.errors import LazyWeightsError, OutputExistsError

CODED_SUFFIX = ".lw"
"""Appended to the whole name of the source, so that a coded file never ends in ``.gguf``."""

PART_SUFFIX = ".part"

BUFFER_BYTES = 1 << 20
_MAX_NAME_BYTES = 200  # of the output in the temporary name; file systems allow 255 for all of it
_NO_LINK_ERRNOS = {
    errno.EPERM,
    errno.EMLINK,
    errno.ENOSYS,
    errno.EINVAL,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
}

_unfinished: set[str] = set()


def coded_name(source: str | os.PathLike[str]) -> str:
    """Name of the coded file of a source.

    >>> coded_name("m.gguf")
    'm.gguf.lw'
    """
    return os.fspath(source) + CODED_SUFFIX


def source_name(coded: str | os.PathLike[str]) -> str:
    """Name of the file that a coded file decodes to.

    Raises
    ------
    LazyWeightsError
        If the name does not end in ``.lw``, so that no name follows from it.

    Examples
    --------
    >>> source_name("m.gguf.lw")
    'm.gguf'
    """
    name = os.fspath(coded)
    stem = os.path.basename(name).removesuffix(CODED_SUFFIX)
    if not name.endswith(CODED_SUFFIX) or not stem:
        raise LazyWeightsError(f"the name does not end in {CODED_SUFFIX}, so the output has to be named", path=name)
    return name.removesuffix(CODED_SUFFIX)


class _OutputFile(io.FileIO):
    """A raw file that says which output could not be written."""

    def __init__(self, fd: int, output: str) -> None:
        super().__init__(fd, "r+")
        self._output = output

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _cannot_write(self._output, error) from error


class AtomicFile:
    """Context manager: a binary file, open for writing and reading, that gets its name only on success.

    Leaving the ``with`` normally flushes the data to the disk, names the file and flushes the directory. Leaving it
    by any exception, KeyboardInterrupt and SystemExit included, deletes what was written.

    Parameters
    ----------
    path : str or os.PathLike
        The output. Its mode follows the umask.
    force : bool
        Replace a file that is there already.
    source : str or os.PathLike, optional
        The file being read; the output must be another one, even with `force`.

    Raises
    ------
    OutputExistsError
        On entry, if the output exists and `force` is not given, is the source (under whatever name), a directory or
        not a regular file; on exit, if it appeared meanwhile and `force` is not given.
    LazyWeightsError
        If the file cannot be created, written or named: a full disk, no permission, no such directory.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> name = os.path.join(folder.name, "out.bin")
    >>> with AtomicFile(name) as file:
    ...     _ = file.write(b"data")
    ...     os.path.exists(name)
    False
    >>> os.listdir(folder.name)
    ['out.bin']
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        force: bool = False,
        source: str | os.PathLike[str] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.force = force
        self.source = source
        self._part: str | None = None
        self._file: io.BufferedRandom | None = None

    @property
    def part_path(self) -> str:
        """Path of the temporary file, for code that writes a file by its path; only inside the ``with``."""
        if self._part is None:
            raise ValueError("the file is not open")
        return self._part

    def __enter__(self) -> BinaryIO:
        check_output(self.path, self.force, self.source)
        folder, name = os.path.split(self.path)
        short = os.fsdecode(os.fsencode(name)[:_MAX_NAME_BYTES])
        part = os.path.join(folder, f".{short}.{secrets.token_hex(6)}{PART_SUFFIX}")
        self._part = part
        _unfinished.add(part)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:
            fd = os.open(part, flags, 0o666)
            self._file = io.BufferedRandom(_OutputFile(fd, self.path), BUFFER_BYTES)
        except OSError as error:
            self._discard()
            raise _cannot_write(self.path, error) from error
        except BaseException:
            self._discard()
            raise
        return cast(BinaryIO, self._file)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._commit()
        except OSError as failure:
            raise _cannot_write(self.path, failure) from failure
        finally:
            self._discard()

    def _commit(self) -> None:
        assert self._file is not None
        assert self._part is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self.force:
            check_output(self.path, True, self.source)
            os.replace(self._part, self.path)
        else:
            _name_without_replacing(self._part, self.path)
        _sync_directory(os.path.dirname(self.path) or ".")

    def _discard(self) -> None:
        """Close and delete the temporary file; after a commit there is nothing left to delete."""
        if self._file is not None:
            # Closing flushes, which may fail as it did before; the descriptor is closed all the same.
            with suppress(OSError, LazyWeightsError):
                self._file.close()
            self._file = None
        if self._part is not None:
            _unlink(self._part)
            self._part = None


def check_output(
    path: str | os.PathLike[str], force: bool = False, source: str | os.PathLike[str] | None = None
) -> None:
    """Check that a file may be written here, before the work starts.

    Raises
    ------
    OutputExistsError
        As for `AtomicFile`.
    """
    path = os.fspath(path)
    try:
        found = os.stat(path)
    except OSError:
        found = None  # nothing there, a dangling link, or a directory in between that creating the file will name
    if found is not None:
        if stat.S_ISDIR(found.st_mode):
            raise OutputExistsError("the output is a directory", path=path)
        if source is not None and _is_file(source, found):
            raise OutputExistsError("the output is the input itself", path=path)
        if not stat.S_ISREG(found.st_mode):
            raise OutputExistsError("the output is not a regular file", path=path)
    if not force and os.path.lexists(path):
        raise _exists(path)


def remove_unfinished() -> None:
    """Delete the temporary files of this process: the last step of a program that is being stopped.

    Leaving the ``with`` of an `AtomicFile` does the same; this covers a signal that arrives on the way in or out.
    """
    for part in list(_unfinished):
        _unlink(part)


def _unlink(part: str) -> None:
    with suppress(OSError):
        os.unlink(part)
    _unfinished.discard(part)


def _is_file(source: str | os.PathLike[str], found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(source), found)
    except OSError:
        return False


def _name_without_replacing(part: str, path: str) -> None:
    try:
        os.link(part, path, follow_symlinks=False)
    except FileExistsError as error:
        raise _exists(path) from error
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LINK_ERRNOS:
            raise
        if os.path.lexists(path):
            raise _exists(path) from error
        os.rename(part, path)
    else:
        os.unlink(part)


def _sync_directory(folder: str) -> None:
    # Some file systems cannot flush a directory; the file itself is on the disk by now.
    try:
        fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def _exists(path: str) -> OutputExistsError:
    return OutputExistsError("the output exists already; use -f (force=True) to replace it", path=path)


def _cannot_write(path: str, error: OSError) -> LazyWeightsError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = {
        errno.ENOENT: f"the directory {os.path.dirname(path) or '.'} does not exist",
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file is larger than this system or a limit of the process allows",
    }.get(error.errno or 0)
    return LazyWeightsError(f"cannot write: {reason}" + (f" ({hint})" if hint else ""), path=path)
