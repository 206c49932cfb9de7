"""GPTQ checkpoints as AutoGPTQ and GPTQModel save them: a folder of safetensors files and JSON.

A quantized linear layer ``m`` is the arrays

================  ==============================================================================================
``m.qweight``     int32 ``(inputs * bits / 32, outputs)``: codes, packed down the inputs
``m.qzeros``      int32 ``(groups, outputs * bits / 32)``: zero points, packed along the outputs
``m.scales``      ``(groups, outputs)``
``m.g_idx``       int32 ``(inputs,)``: the group of each input; absent means that groups follow each other
``m.bias``        ``(outputs,)``; old versions save zeros for layers that have none
================  ==============================================================================================

and a weight is ``scale * (code - zero)``. What surprises:

- The codes of a column (of a row, for zero points) are one stream of bits, the lowest first, cut into 32-bit words: a 3-bit
  code may lie in two words.
- The format ``gptq`` (version 1) stores zero points minus one, modulo ``2 ** bits``; ``gptq_v2`` stores them as they are.
- Numbers of bits and the group size come from the shapes of the arrays; the configuration only settles what they leave open,
  because it may have exceptions for single layers.
- Everything is mapped, not read; an array is paged in where it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lazyweights.errors import FormatError, QuantizationError
from lazyweights.llama.safetensors_file import ArrayEntry, read_header, view_array

BITS = (2, 3, 4, 8)
WORD_BITS = 32
MAX_JSON_BYTES = 1 << 27

PARTS = ("qweight", "qzeros", "scales", "g_idx")
_FLOATS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}
_ZEROS_MINUS_ONE = {"gptq": True, "gptq_v2": False}


@dataclass(frozen=True)
class QuantizationConfig:
    """What the configuration says of quantization.

    Attributes
    ----------
    bits, group_size : int
        As for most layers; -1: one group for all inputs.
    is_symmetric : bool
        Whether all zero points are said to be ``2 ** (bits - 1)``.
    zeros_minus_one : bool
        Whether zero points are stored minus one.
    """

    bits: int
    group_size: int
    is_symmetric: bool
    zeros_minus_one: bool


@dataclass(frozen=True)
class FloatArray:
    """An array that is not quantized.

    Attributes
    ----------
    name : str
    dtype : str
        ``F16``, ``BF16`` or ``F32``.
    values : numpy.ndarray
        Mapped; BF16 as its raw 16 bits.
    """

    name: str
    dtype: str
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """In the order of numpy: outputs first."""
        return self.values.shape

    def as_float32(self) -> np.ndarray:
        """Return the values as float32, exactly."""
        return to_float32(self.values)


@dataclass(frozen=True)
class GptqLayer:
    """A quantized linear layer, checked: the parts fit together and every group index is in range.

    Attributes
    ----------
    name : str
        Of the module, without ``.qweight``.
    bits, n_inputs, n_outputs, n_groups : int
    qweight : numpy.ndarray
        uint32 ``(words, n_outputs)``, mapped.
    scales : numpy.ndarray
        uint16 ``(n_groups, n_outputs)``: the raw bits of float16.
    zeros : numpy.ndarray
        uint8 ``(n_groups, n_outputs)``: the zero points themselves, whatever the format stores.
    groups : numpy.ndarray
        int64 ``(n_inputs,)``: the group of each input.
    """

    name: str
    bits: int
    n_inputs: int
    n_outputs: int
    n_groups: int
    qweight: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    def codes(self, outputs: slice | np.ndarray) -> np.ndarray:
        """Unpack the codes of some outputs: uint8 ``(outputs, n_inputs)``."""
        return unpack_bits(self.qweight[:, outputs], self.bits, self.n_inputs).T


class GptqCheckpoint:
    """An opened folder.

    Parameters
    ----------
    folder : str or os.PathLike

    Attributes
    ----------
    folder : str
    config : dict
        ``config.json``.
    quantization : QuantizationConfig
    layers : tuple of str
        Names of the quantized modules.
    floats : tuple of str
        Names of the other arrays, the biases of quantized modules among them.

    Raises
    ------
    QuantizationError
        If this is no GPTQ checkpoint, or of a kind that is not read; says which.
    FormatError
        If a file is missing or damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        if not os.path.isdir(self.folder):
            raise FormatError("not a folder; give the folder that holds config.json", path=self.folder)
        self.config = read_json(os.path.join(self.folder, "config.json"))
        self.quantization = _read_quantization(self.folder, self.config)
        self._places = _find_arrays(self.folder)
        self._mapped: dict[str, np.ndarray] = {}
        modules = {name.rpartition(".")[0] for name in self._places if name.rpartition(".")[2] in PARTS}
        self.layers = tuple(sorted(modules))
        self.floats = tuple(sorted(name for name in self._places if name.rpartition(".")[2] not in PARTS))
        if not modules:
            raise QuantizationError("no array is named qweight: nothing here is quantized by GPTQ", path=self.folder)

    def float_array(self, name: str) -> FloatArray:
        """Return an array that is not quantized, mapped.

        Raises
        ------
        QuantizationError
            If it holds no floats of 16 or 32 bits.
        """
        entry = self._places[name][1]
        if entry.dtype not in _FLOATS:
            raise QuantizationError(f"arrays of {entry.dtype} are not imported", path=self.folder, tensor=name)
        return FloatArray(name, entry.dtype, self._array(name, _FLOATS[entry.dtype]))

    def float_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array, in the order of numpy."""
        return self._places[name][1].shape

    def layer(self, name: str) -> GptqLayer:
        """Return a quantized layer; codes stay mapped, scales and zero points are read.

        Raises
        ------
        FormatError
            If parts are missing or do not fit together.
        QuantizationError
            If scales are not float16 and cannot be represented so, or the layer is packed in a way that is not read.
        """
        qweight, qzeros = self._words(name, "qweight"), self._words(name, "qzeros")
        scales = self._scales(name)
        n_groups, n_outputs = scales.shape
        bits, n_inputs = self._count_bits(name, qweight.shape, qzeros.shape, scales.shape)
        zeros = unpack_bits(qzeros.T, bits, n_outputs).T
        if self.quantization.zeros_minus_one:
            zeros = (zeros + np.uint8(1)) & np.uint8(2**bits - 1)
        self._check_symmetry(name, zeros, bits)
        groups = self._groups(name, n_inputs, n_groups)
        return GptqLayer(name, bits, n_inputs, n_outputs, n_groups, qweight, scales, zeros, groups)

    def _array(self, name: str, dtype: str) -> np.ndarray:
        file, entry = self._places[name]
        if file not in self._mapped:
            self._mapped[file] = np.memmap(file, np.uint8, "r")
        return view_array(self._mapped[file], entry, dtype)

    def _words(self, name: str, part: str) -> np.ndarray:
        full = f"{name}.{part}"
        if full not in self._places:
            raise FormatError(f"the layer has no {part}", path=self.folder, tensor=name)
        entry = self._places[full][1]
        if entry.dtype not in ("I32", "U32"):
            raise QuantizationError(
                f"words of {entry.dtype} are not read, only of I32", path=self.folder, tensor=full
            )  # fmt: skip
        if len(entry.shape) != 2 or 0 in entry.shape:
            raise FormatError("the array needs two dimensions", path=self.folder, tensor=full, found=entry.shape)
        return self._array(full, "<u4")

    def _scales(self, name: str) -> np.ndarray:
        full = f"{name}.scales"
        if full not in self._places:
            raise FormatError("the layer has no scales", path=self.folder, tensor=name)
        array = self.float_array(full)
        if len(array.shape) != 2 or 0 in array.shape:
            raise FormatError("the array needs two dimensions", path=self.folder, tensor=full, found=array.shape)
        bits = np.ascontiguousarray(array.values).view(np.uint16) if array.dtype == "F16" else _as_float16(array, self.folder)
        if np.any(bits & 0x7C00 == 0x7C00):
            raise FormatError("a scale is infinite or not a number", path=self.folder, tensor=full)
        return bits

    def _count_bits(
        self, name: str, qweight: tuple[int, ...], qzeros: tuple[int, ...], scales: tuple[int, ...]
    ) -> tuple[int, int]:
        """Return bits and inputs, from the shapes of the parts."""
        if qweight[1] != scales[1] or qzeros[0] != scales[0]:
            shapes = f"qweight {qweight}, qzeros {qzeros}, scales {scales}"
            raise FormatError(f"the parts do not fit together: {shapes}", path=self.folder, tensor=name)
        fitting = [bits for bits in BITS if -(-scales[1] * bits // WORD_BITS) == qzeros[1]]
        if self.quantization.bits in fitting:
            fitting = [self.quantization.bits]
        if len(fitting) != 1:
            raise QuantizationError(
                f"the shapes of qzeros {qzeros} and scales {scales} belong to none of 2, 3, 4 and 8 bits",
                path=self.folder, tensor=name,
            )  # fmt: skip
        n_bits = qweight[0] * WORD_BITS
        n_inputs = n_bits // fitting[0]
        if f"{name}.g_idx" in self._places:  # the last word may be filled up
            (n_listed,) = self._places[f"{name}.g_idx"][1].shape[:1] or (0,)
            if -(-n_listed * fitting[0] // WORD_BITS) == qweight[0]:
                n_inputs = n_listed
        return fitting[0], n_inputs

    def _groups(self, name: str, n_inputs: int, n_groups: int) -> np.ndarray:
        full = f"{name}.g_idx"
        if full not in self._places:
            size = self.quantization.group_size
            if size < 1 or -(-n_inputs // size) != n_groups:
                size = -(-n_inputs // n_groups)
                if -(-n_inputs // size) != n_groups or n_inputs % size:
                    raise FormatError(
                        f"{n_inputs} inputs are not {n_groups} groups of one size, and there is no g_idx",
                        path=self.folder, tensor=name,
                    )  # fmt: skip
            return np.arange(n_inputs) // size
        entry = self._places[full][1]
        if entry.dtype not in ("I32", "I64") or entry.shape != (n_inputs,):
            raise FormatError(
                f"g_idx is {entry.dtype} {entry.shape}, not I32 ({n_inputs},)", path=self.folder, tensor=name
            )  # fmt: skip
        groups = self._array(full, "<i4" if entry.dtype == "I32" else "<i8").astype(np.int64)
        if groups.min() < 0 or groups.max() >= n_groups:
            raise FormatError(
                f"g_idx names groups from {groups.min()} to {groups.max()}, but there are {n_groups}",
                path=self.folder, tensor=name,
            )  # fmt: skip
        return groups

    def _check_symmetry(self, name: str, zeros: np.ndarray, bits: int) -> None:
        """Refuse zero points that are all off by one: they are of the other version than the configuration says."""
        middle = 1 << (bits - 1)
        wrong = middle + 1 if self.quantization.zeros_minus_one else middle - 1
        if self.quantization.is_symmetric and bool(np.all(zeros == wrong)):
            raise QuantizationError(
                f"all zero points are {wrong}, but the configuration says symmetric, which means {middle}: its "
                'checkpoint_format must be wrong ("gptq" stores zero points minus one, "gptq_v2" as they are); correct it',
                path=self.folder, tensor=name,
            )  # fmt: skip


def unpack_bits(words: np.ndarray, bits: int, n_values: int) -> np.ndarray:
    """Unpack streams of codes that run down the columns of an array of words.

    Parameters
    ----------
    words : numpy.ndarray
        uint32 ``(n_words, columns)``, each column a stream with its lowest bit first.
    bits : int
        Of a code: 1 to 8.
    n_values : int
        Codes in a column.

    Returns
    -------
    numpy.ndarray
        uint8 ``(n_values, columns)``.

    Examples
    --------
    >>> unpack_bits(np.array([[0x76543210], [0xFEDCBA98]], np.uint32), 4, 10)[:, 0].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> unpack_bits(np.array([[3 << 30], [1]], np.uint32), 3, 11)[10].tolist()
    [7]
    """
    out = np.empty((n_values, words.shape[1]), np.uint8)
    period = bits if WORD_BITS % bits else 1  # words after which codes start at the same bits again
    step = period * WORD_BITS // bits
    for first in range(min(step, n_values)):
        word, shift = divmod(first * bits, WORD_BITS)
        rows = out[first::step]
        codes = words[word::period][: len(rows)] >> np.uint32(shift)
        if shift + bits > WORD_BITS:
            codes = codes | words[word + 1 :: period][: len(rows)] << np.uint32(WORD_BITS - shift)
        rows[:] = codes & np.uint32((1 << bits) - 1)
    return out


def to_float32(values: np.ndarray) -> np.ndarray:
    """Return float16, float32 or the raw bits of bfloat16 as float32, exactly.

    >>> to_float32(np.array([0x3F80], np.uint16)).tolist()
    [1.0]
    """
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def read_json(path: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    FormatError
        If the file is missing, too long, or holds something else.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError as error:
        raise FormatError("the file is missing", path=path) from error
    if len(text) > MAX_JSON_BYTES:
        raise FormatError("the file is too long", path=path, expected=MAX_JSON_BYTES)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not a JSON text: {error}", path=path) from error
    if not isinstance(found, dict):
        raise FormatError("the JSON text is not an object", path=path)
    return found


def _read_quantization(folder: str, config: Mapping[str, Any]) -> QuantizationConfig:
    found = config.get("quantization_config")
    path = os.path.join(folder, "config.json")
    if found is None:
        path = os.path.join(folder, "quantize_config.json")
        if not os.path.exists(path):
            raise QuantizationError(
                "neither a quantization_config in config.json nor a quantize_config.json: not a GPTQ checkpoint", path=folder
            )
        found = read_json(path)
    if not isinstance(found, dict):
        raise FormatError("quantization_config is not an object", path=path)
    method = str(found.get("quant_method", found.get("method", "gptq"))).lower()
    if method != "gptq":
        raise QuantizationError(f"quantized by {method}, not by GPTQ", path=path)
    layout = str(found.get("checkpoint_format", found.get("format", "gptq"))).lower()
    if found.get("is_marlin_format"):
        layout = "marlin"
    if layout not in _ZEROS_MINUS_ONE:
        raise QuantizationError(f"the checkpoint format {layout} is not read, only gptq and gptq_v2", path=path)
    bits, group_size = found.get("bits"), found.get("group_size", -1)
    if type(bits) is not int or type(group_size) is not int:
        raise FormatError("bits and group_size must be numbers", path=path, found=(bits, group_size))
    if bits not in BITS:
        raise QuantizationError(f"{bits} bits are not read, only 2, 3, 4 and 8", path=path)
    if str(found.get("pack_dtype", "int32")).removeprefix("torch.") != "int32":
        raise QuantizationError(f"words of {found['pack_dtype']} are not read, only of int32", path=path)
    return QuantizationConfig(bits, group_size, found.get("sym") is True, _ZEROS_MINUS_ONE[layout])


def _find_arrays(folder: str) -> dict[str, tuple[str, ArrayEntry]]:
    """Return file and place of each array of all shards."""
    names = sorted(os.listdir(folder))
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    weight_map: dict[str, Any] = {}
    if indexes:
        path = os.path.join(folder, indexes[0])
        weight_map = read_json(path).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(_is_file_name(file) for file in weight_map.values()):
            raise FormatError("weight_map does not map names to files of this folder", path=path)
        files = sorted(set(weight_map.values()))
    else:
        files = [name for name in names if name.endswith(".safetensors")]
    if not files:
        others = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        hint = f"; save {others[0]} as safetensors first" if others else ""
        raise FormatError(f"the folder holds no .safetensors file{hint}", path=folder)
    places: dict[str, tuple[str, ArrayEntry]] = {}
    for file in files:
        path = os.path.join(folder, file)
        if not os.path.exists(path):
            raise FormatError("the index names this shard, but it is missing", path=path)
        for name, entry in read_header(path)[0].items():
            if weight_map.get(name, file) != file:
                continue
            if name in places:
                raise FormatError(f"the array is in {os.path.basename(places[name][0])} too", path=path, tensor=name)
            places[name] = path, entry
    for name, file in weight_map.items():
        if name not in places:
            said = "the index names an array that its shard does not have"
            raise FormatError(said, path=os.path.join(folder, file), tensor=name)
    return places


def _is_file_name(file: Any) -> bool:
    return isinstance(file, str) and file == os.path.basename(file) and file not in ("", ".", "..")


def _as_float16(array: FloatArray, folder: str) -> np.ndarray:
    """Return the raw bits of float16 scales that equal wider ones exactly."""
    wide = array.as_float32()
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float16)
    different = narrow.astype(np.float32) != wide
    if different.any():
        at = tuple(int(i) for i in np.argwhere(different)[0])
        raise QuantizationError(
            f"{int(different.sum())} of {wide.size} scales are {array.dtype} numbers that float16, GGUF's type for scales, does "
            f"not have: the first is {float(wide[at])!r}",
            path=folder, tensor=array.name,
        )  # fmt: skip
    return narrow.view(np.uint16)
