"""The structure ``ggml_tensor`` of the pinned llama.cpp, checked against the library before anything is read through it.

llama.cpp hands the evaluation callback the address of a tensor of its graph, and exports accessors for only some of the
fields. `Tensors` declares the structure, builds a few tensors whose every field is known, and compares what it reads with
what the accessors say. Where they differ it raises: a wrong layout would read, and believe, other memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from lazyweights.errors import BackendUnavailableError, LazyWeightsError
from lazyweights.llama import library

F32, F16, I32, BF16 = 0, 1, 26, 30
"""Types (``enum ggml_type``); the numbers are those of GGUF files."""

MAX_DIMS, MAX_SOURCES, MAX_NAME, OP_PARAMS_BYTES = 4, 10, 64, 64
OBJECT_BYTES = 32
"""Size of ``ggml_object``, which ``ggml_tensor_overhead`` counts too."""


class GgmlTensor(ctypes.Structure):
    """``struct ggml_tensor`` of ggml 0.25 (ggml/include/ggml.h)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * MAX_DIMS),  # elements of each dimension, columns first
        ("nb", ctypes.c_size_t * MAX_DIMS),  # bytes from one element of a dimension to the next
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * (OP_PARAMS_BYTES // 4)),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * MAX_SOURCES),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * MAX_NAME),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


_NUMPY: dict[int, np.dtype[Any]] = {F32: np.dtype(np.float32), F16: np.dtype(np.float16), I32: np.dtype(np.int32)}
_DTYPE_NAMES = "F32, F16 and I32"


class Tensors:
    """Reads tensors of the library by their address.

    Parameters
    ----------
    structure : type
        The declaration to check and use.

    Attributes
    ----------
    mul_mat, mul_mat_id : int
        Numbers of these operations.

    Raises
    ------
    BackendUnavailableError
        If the library is missing, or its structure is laid out otherwise.
    """

    def __init__(self, structure: type[Any] = GgmlTensor) -> None:
        lib = library.load()._lib
        self._structure = structure

        def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            # A prototype of its own: the attributes of lib.name would be shared with llama_cpp.
            try:
                return ctypes.CFUNCTYPE(result, *arguments)((name, lib))
            except AttributeError as error:
                raise BackendUnavailableError(f"this build of llama.cpp does not export {name}") from error

        pointer, i64, size_t = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
        self._overhead = function("ggml_tensor_overhead", size_t)
        self._init = function("ggml_init", pointer, _InitParams)
        self._free = function("ggml_free", None, pointer)
        self._new = function("ggml_new_tensor_4d", pointer, pointer, ctypes.c_int, i64, i64, i64, i64)
        self._view = function("ggml_view_2d", pointer, pointer, pointer, i64, i64, size_t, size_t)
        self._mul_mat = function("ggml_mul_mat", pointer, pointer, pointer, pointer)
        self._mul_mat_id = function("ggml_mul_mat_id", pointer, pointer, pointer, pointer, pointer)
        self._set_name = function("ggml_set_name", pointer, pointer, ctypes.c_char_p)
        self._get_name = function("ggml_get_name", ctypes.c_char_p, pointer)
        self._get_data = function("ggml_get_data", pointer, pointer)
        self._nbytes = function("ggml_nbytes", size_t, pointer)
        self._n_dims = function("ggml_n_dims", ctypes.c_int, pointer)
        self._type_name = function("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
        self._op_name = function("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
        self._is_host = function("ggml_backend_buffer_is_host", ctypes.c_bool, pointer)
        self.mul_mat = self.mul_mat_id = -1
        self._check_size()
        self._check_fields()

    def at(self, address: int) -> Any:
        """Return the tensor at an address, a `GgmlTensor` on the library's own memory."""
        return self._structure.from_address(address)

    def values(self, tensor: Any) -> np.ndarray:
        """Return the elements of a tensor in host memory, dimensions in numpy's order (columns last), with its strides.

        A view of the library's memory, valid only while the tensor is: in the callback that was given it.

        Raises
        ------
        LazyWeightsError
            If the tensor is not in host memory, or of another type than F32, F16 and I32.
        """
        name = tensor.name.decode("utf-8", "replace")
        dtype = _NUMPY.get(tensor.type)
        if dtype is None:
            found = self._type_name(tensor.type).decode()
            raise LazyWeightsError("activations of this type cannot be read", tensor=name, expected=_DTYPE_NAMES, found=found)
        buffer = tensor.buffer
        if not buffer and tensor.view_src:
            buffer = self.at(tensor.view_src).buffer
        if not tensor.data or not buffer or not self._is_host(buffer):
            raise LazyWeightsError("the activations are not in host memory: run the model on the CPU", tensor=name)
        shape = tuple(tensor.ne)[::-1]
        if 0 in shape:
            return np.empty(shape, dtype)
        strides = tuple(tensor.nb)[::-1]
        span = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * span).from_address(tensor.data)
        return np.ndarray(shape, dtype, memory, 0, strides)

    def _check_size(self) -> None:
        """Nothing may be read before this: it bounds what the check of the fields reads."""
        declared, found = ctypes.sizeof(self._structure), self._overhead() - OBJECT_BYTES
        if declared != found:
            raise _mismatch("size of the structure", declared, found)

    def _check_fields(self) -> None:
        context = self._init(_InitParams(1 << 16, None, False))
        if not context:
            raise BackendUnavailableError("llama.cpp cannot make a ggml context to check its structures with")
        try:
            weight = self._new(context, F16, 32, 6, 1, 1)
            experts = self._new(context, F32, 32, 6, 4, 1)
            rows = self._new(context, F32, 32, 5, 1, 1)
            routed = self._new(context, F32, 32, 2, 5, 1)
            ids = self._new(context, I32, 2, 5, 1, 1)
            view = self._view(context, rows, 16, 3, 128, 64)
            product = self._mul_mat(context, weight, rows)
            routed_product = self._mul_mat_id(context, experts, routed, ids)
            for address, name in ((weight, b"blk.0.attn_q.weight"), (rows, b"x" * (MAX_NAME - 1)), (product, b"")):
                self._set_name(address, name)
            shapes = {
                weight: (F16, (32, 6, 1, 1)), experts: (F32, (32, 6, 4, 1)), rows: (F32, (32, 5, 1, 1)),
                routed: (F32, (32, 2, 5, 1)), ids: (I32, (2, 5, 1, 1)), view: (F32, (16, 3, 1, 1)),
                product: (F32, (6, 5, 1, 1)), routed_product: (F32, (6, 2, 5, 1)),
            }  # fmt: skip
            for address, (type_id, shape) in shapes.items():
                self._check_tensor(address, type_id, shape)
            _compare("nb of a view", tuple(self.at(view).nb), (4, 128, 384, 384))
            _compare("view_src", self.at(view).view_src, rows)
            _compare("data of a view", self.at(view).data, self._get_data(rows) + 64)
            self._check_product(product, "MUL_MAT", (weight, rows))
            self._check_product(routed_product, "MUL_MAT_ID", (experts, routed, ids))
            self.mul_mat, self.mul_mat_id = self.at(product).op, self.at(routed_product).op
        finally:
            self._free(context)

    def _check_tensor(self, address: int, type_id: int, shape: tuple[int, ...]) -> None:
        tensor = self.at(address)
        _compare("type", tensor.type, type_id)
        _compare("type name", self._type_name(tensor.type), {F32: b"f32", F16: b"f16", I32: b"i32"}[type_id])
        _compare("ne", tuple(tensor.ne), shape)
        item = _NUMPY[type_id].itemsize
        if not tensor.view_src:
            _compare("nb", tuple(tensor.nb), tuple(item * int(np.prod(shape[:i], dtype=np.int64)) for i in range(MAX_DIMS)))
        last = sum((n - 1) * step for n, step in zip(tensor.ne, tensor.nb, strict=True))
        _compare("ggml_nbytes", last + item, self._nbytes(address))
        n_dims = max((i + 1 for i in range(MAX_DIMS) if tensor.ne[i] > 1), default=1)
        _compare("ggml_n_dims", n_dims, self._n_dims(address))
        _compare("name", tensor.name, self._get_name(address))
        _compare("data", tensor.data, self._get_data(address))
        _compare("buffer", tensor.buffer, None)

    def _check_product(self, address: int, op_name: str, sources: tuple[int, ...]) -> None:
        tensor = self.at(address)
        op = tensor.op
        known = self._op_name(op) if 0 <= op < 256 else None
        _compare("op", known and known.decode(), op_name)
        _compare("src", tuple(tensor.src)[: len(sources) + 1], (*sources, None))


def _compare(what: str, read: object, known: object) -> None:
    if read != known:
        raise _mismatch(what, known, read)


def _mismatch(what: str, expected: object, found: object) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"the tensors of this llama.cpp are laid out otherwise than llama-cpp-python {library.PINNED_VERSION} has them "
        f"({what}), so activations cannot be read: pip install 'lazyweights[llama]'",
        expected=expected, found=found,
    )  # fmt: skip
