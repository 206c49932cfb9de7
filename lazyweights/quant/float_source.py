"""The weights of a GGUF file as float32 arrays, any rows of them at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lazyweights.container.gguf_scan import Scan, TensorInfo
from lazyweights.container.gguf_values import read_metadata
from lazyweights.errors import BackendUnavailableError, QuantizationError

F32, F16, BF16 = 0, 1, 30
FLOATS = (F32, F16, BF16)


class FloatSource:
    """A mapped GGUF file.

    Parameters
    ----------
    view : memoryview
        The file.
    scan : Scan
    allow_requantize : bool
        Take tensors that are quantized already too.

    Attributes
    ----------
    metadata : dict
    tensors : dict of str to TensorInfo
    """

    def __init__(self, view: memoryview, scan: Scan, allow_requantize: bool = False) -> None:
        self._view = view
        self._may_dequantize = allow_requantize
        self.metadata = read_metadata(view, max_array=256)
        self.tensors: dict[str, TensorInfo] = {tensor.name: tensor for tensor in scan.tensors}

    def shape(self, name: str) -> tuple[int, int]:
        """Return rows and columns of a tensor; what has more dimensions counts as rows."""
        shape = self.tensors[name].shape
        return math.prod(shape[1:]), shape[0]

    def is_matrix(self, name: str) -> bool:
        """Whether a tensor has two dimensions or more."""
        return len(self.tensors[name].shape) > 1

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows of a tensor, float32 (rows, columns).

        Raises
        ------
        QuantizationError
            If the tensor is quantized and that is not allowed.
        BackendUnavailableError
            If it is quantized and the gguf package is missing.
        """
        info = self.tensors[name]
        n_rows, columns = self.shape(name)
        stop = n_rows if stop is None else min(stop, n_rows)
        row_bytes = info.n_bytes // n_rows
        data = self._view[info.offset + start * row_bytes : info.offset + stop * row_bytes]
        if info.type_id == F32:
            return np.frombuffer(data, "<f4").reshape(-1, columns).astype(np.float32)
        if info.type_id == F16:
            return np.frombuffer(data, "<f2").reshape(-1, columns).astype(np.float32)
        if info.type_id == BF16:
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(-1, columns)
        return self._dequantized(info, data, columns)

    def vector(self, name: str) -> np.ndarray:
        """Return a tensor of one dimension, float32."""
        return self.rows(name).reshape(-1)

    def _dequantized(self, info: TensorInfo, data: memoryview, columns: int) -> np.ndarray:
        if not self._may_dequantize:
            raise QuantizationError(
                "this tensor is quantized already: start from the F16, BF16 or F32 model, or pass --allow-requantize",
                tensor=info.name,
            )
        try:
            import gguf
        except ImportError as error:
            raise BackendUnavailableError("quantized sources need the gguf package: pip install gguf") from error
        packed = np.frombuffer(data, np.uint8)
        values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(info.type_id))
        return np.asarray(values, np.float32).reshape(-1, columns)

    def layer_weights(self, prefix: str) -> dict[str, np.ndarray]:
        """Return all tensors whose names start with a prefix, matrices as (rows, columns), the others flat."""
        return {name: self.rows(name) if self.is_matrix(name) else self.vector(name) for name in self._names(prefix)}

    def _names(self, prefix: str) -> Iterator[str]:
        return (name for name in self.tensors if name.startswith(prefix))
