"""zstd frames whose size is known beforehand: nothing is allocated on the word of the frame."""

from __future__ import annotations

import threading

import zstandard

from lazyweights.errors import FormatError

VERBATIM_LEVEL = 3
"""zstd level of verbatim bytes outside the GGUF header, which are mostly incompressible."""


class _PerThread(threading.local):
    """A compressor of the level of verbatim bytes: making one takes longer than compressing a few kilobytes."""

    def __init__(self) -> None:
        self.quick = zstandard.ZstdCompressor(level=VERBATIM_LEVEL, write_checksum=False)


_per_thread = _PerThread()


def compress(data: bytes, level: int) -> bytes:
    """Return one frame, without a checksum of its own: everything in a coded file has one already."""
    if level == VERBATIM_LEVEL:
        return _per_thread.quick.compress(data)
    return zstandard.ZstdCompressor(level=level, write_checksum=False).compress(data)


def decompress(frame: bytes | memoryview, n_bytes: int, what: str) -> bytes:
    """Return the `n_bytes` bytes that a frame holds.

    Parameters
    ----------
    frame : the frame; bytes behind it are not looked at
    n_bytes : the size that the file's structure gives
    what : for the error message

    Raises
    ------
    FormatError
        If the frame is damaged or holds another number of bytes.
    """
    try:
        # The library allocates what a frame declares, whatever limit it is given: compare first.
        declared = zstandard.frame_content_size(frame)
        if declared not in (-1, n_bytes):
            raise FormatError(f"{what} has another size", expected=n_bytes, found=declared)
        data = _decompressor().decompress(frame, max_output_size=n_bytes)
    except zstandard.ZstdError as error:
        raise FormatError(f"{what} does not decompress: {error}") from error
    if len(data) != n_bytes:
        raise FormatError(f"{what} has another size", expected=n_bytes, found=len(data))
    return data


_of_thread = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's decompressor: one takes longer to make than a small frame to decode."""
    found: zstandard.ZstdDecompressor | None = getattr(_of_thread, "decompressor", None)
    if found is None:
        found = _of_thread.decompressor = zstandard.ZstdDecompressor()
    return found
