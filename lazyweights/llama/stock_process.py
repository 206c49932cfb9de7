"""The process that calls ``llama_model_quantize``: one order as JSON on stdin, what happens as JSON lines on stdout.

Lines are ``{"log": text}``, and at last ``{"done": imatrix entries}`` or ``{"error": reason}``. It ends at once when stdin is
closed: then whoever asked is gone, and nobody would name the file.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from types import ModuleType
from typing import Any

from lazyweights.errors import LazyWeightsError

MAX_OVERRIDE_BYTES = 127
_STRING, _INTEGER = 3, 0  # enum llama_model_kv_override_type

_callbacks: list[Any] = []
"""Kept: llama.cpp holds only pointers, and may log until the process ends."""


def main() -> int:
    """Carry out the order; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C the one who asked decides
    order = json.loads(_read_line())
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        _say({"done": quantize(order)})
        return 0
    except (LazyWeightsError, OSError, MemoryError) as error:
        _say({"error": str(error)})
        return 1


def _read_line() -> bytes:
    # Not through sys.stdin: a thread that waits in its buffer would be in the way when the interpreter ends.
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            break
        line += part
    return line


def _end_with_caller() -> None:
    while os.read(0, 1 << 16):
        pass
    os._exit(1)


def _say(line: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    except OSError:
        os._exit(1)


def quantize(order: dict[str, Any]) -> int:
    """Call llama.cpp; return the number of imatrix entries.

    Raises
    ------
    LazyWeightsError
        If it fails.
    """
    from lazyweights.llama import library

    lib = library.load()
    errors: list[str] = []

    @lib.llama_log_callback
    def log(level: int, text: bytes, _: Any) -> None:
        message = text.decode("utf-8", "replace").strip()
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            errors.append(message)
        _say({"log": message})

    lib.llama_log_set(log, ctypes.c_void_p(0))
    _callbacks.append(log)
    params = lib.llama_model_quantize_default_params()
    params.nthread = order["threads"]
    params.ftype = order["file_type"]
    params.pure = order["pure"]
    params.allow_requantize = order["allow_requantize"]
    kept: list[Any] = []  # what the parameters point to
    n_entries = 0
    if order["imatrix"] is not None:
        n_entries = _set_imatrix(lib, params, order["imatrix"], kept)
    status = lib.llama_model_quantize(os.fsencode(order["source"]), os.fsencode(order["output"]), ctypes.byref(params))
    if status != 0:
        raise LazyWeightsError("; ".join(errors) or f"status {status}")
    return n_entries


def _set_imatrix(lib: ModuleType, params: Any, path: str, kept: list[Any]) -> int:
    """Point the parameters to an imatrix, and to the keys that llama-quantize writes about it."""
    from lazyweights.llama.hessians import Hessians
    from lazyweights.llama.imatrix import imatrix_entries, mean_squares

    hessians = Hessians.load(path)
    if hessians.info.kind == "samples":
        raise LazyWeightsError("samples are no imatrix: capture the diagonal or Hessians", path=path)
    entries = imatrix_entries(hessians, process_output=False)  # what llama-imatrix leaves out
    rows = (lib.llama_model_imatrix_data * (len(entries) + 1))()  # ends with an entry without a name
    for row, entry in zip(rows, entries, strict=False):
        values, name = mean_squares(entry), entry.name.encode("utf-8", "surrogateescape")
        kept += [values, name]
        row.name, row.size = name, values.size
        row.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    overrides = (lib.llama_model_kv_override * 5)()  # ends with an empty key
    facts: list[tuple[bytes, str | int]] = [
        (b"quantize.imatrix.file", os.path.basename(path)),
        (b"quantize.imatrix.dataset", hessians.info.text),
        (b"quantize.imatrix.entries_count", len(entries)),
        (b"quantize.imatrix.chunks_count", hessians.info.n_chunks),
    ]
    for override, (key, value) in zip(overrides, facts, strict=False):
        override.key = key
        if isinstance(value, int):
            override.tag, override.value.val_i64 = _INTEGER, value
        else:
            override.tag, override.value.val_str = _STRING, value.encode()[:MAX_OVERRIDE_BYTES]
    params.imatrix, params.kv_overrides = rows, overrides
    kept += [rows, overrides]
    return len(entries)


if __name__ == "__main__":
    sys.exit(main())
