"""The one exception hierarchy: every error a caller can meet derives from `LazyWeightsError`."""

from __future__ import annotations

from typing import Any


class LazyWeightsError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    message : str
        What went wrong and what to do about it, in one sentence.
    path, tensor, row_group, offset, expected, found
        Where it happened and what was compared; None where it does not apply.
        They are attributes too, so that a program need not parse the message.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        tensor: str | None = None,
        row_group: int | None = None,
        offset: int | None = None,
        expected: Any = None,
        found: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.tensor = tensor
        self.row_group = row_group
        self.offset = offset
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        where = []
        if self.path is not None:
            where.append(str(self.path))
        if self.tensor is not None:
            where.append(f"tensor {self.tensor!r}")
        if self.row_group is not None:
            where.append(f"row group {self.row_group}")
        if self.offset is not None:
            where.append(f"offset {self.offset}")
        text = f"{': '.join(where)}: {self.message}" if where else self.message
        if self.expected is not None or self.found is not None:
            text += f" (expected {self.expected}, found {self.found})"
        return text


class FormatError(LazyWeightsError):
    """The bytes of a file do not follow its format."""


class NotCodedError(FormatError):
    """The file does not start with the magic of a coded file."""


class VersionError(FormatError):
    """The coded file has a version this build cannot read."""


class TruncatedError(FormatError):
    """The file ends before what it declares."""


class LimitError(FormatError):
    """A declared count or size is larger than the file or the format allows."""


class OffsetError(FormatError):
    """A declared extent overlaps another or leaves the file."""


class ChecksumError(FormatError):
    """A checksum differs: the bytes are damaged."""


class CodecError(LazyWeightsError):
    """A code stream or table cannot be decoded."""


class BlockLayoutError(LazyWeightsError):
    """The bytes, shape or type of a tensor do not fit together."""


class QuantizationError(LazyWeightsError):
    """A quantizer could not do what it was asked."""


class BackendUnavailableError(LazyWeightsError):
    """An optional part is not installed or not usable here."""


class OutputExistsError(LazyWeightsError):
    """The output is there already, or is the input itself."""
