"""llama-cpp-python, loaded when first needed; its log goes to the logger ``lazyweights.llama``."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from lazyweights.errors import BackendUnavailableError

PINNED_VERSION = "0.3.36"
"""What the structures in `lazyweights.llama` are declared for."""

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # ggml_log_level

log = logging.getLogger("lazyweights.llama")
log.addHandler(logging.NullHandler())  # a program that sets up no logging sees nothing, warnings neither

_last_errors: list[str] = []


@functools.cache
def package() -> ModuleType:
    """Return the module ``llama_cpp``, as it is when somebody else imports it.

    Raises
    ------
    BackendUnavailableError
        If llama-cpp-python is not installed, or not in the version that this package is made for.
    """
    try:
        import llama_cpp
    except ImportError as error:
        raise BackendUnavailableError(
            "this needs llama.cpp: pip install 'lazyweights[llama]' (it is compiled, which takes some minutes)"
        ) from error
    if llama_cpp.__version__ != PINNED_VERSION:
        raise BackendUnavailableError(
            "this needs another version of llama-cpp-python: pip install 'lazyweights[llama]'",
            expected=PINNED_VERSION, found=llama_cpp.__version__,
        )
    return llama_cpp


@functools.cache
def load() -> ModuleType:
    """Return the module ``llama_cpp.llama_cpp`` (the plain bindings), with llama.cpp's backend started and its log redirected.

    Raises
    ------
    BackendUnavailableError
        As `package`.
    """
    bindings: ModuleType = package().llama_cpp
    bindings.llama_log_set(_log_callback(bindings), ctypes.c_void_p(0))
    bindings.llama_backend_init()
    return bindings


@functools.cache
def _log_callback(bindings: ModuleType) -> Any:
    """The log callback; the cache keeps it alive, which llama.cpp does not."""

    @bindings.llama_log_callback
    def write(level: int, text: bytes, _: Any) -> None:
        message = text.decode("utf-8", "replace").rstrip("\n")
        number = _LEVELS.get(level, logging.DEBUG)  # 5: what continues the line before
        if number >= logging.ERROR:
            _last_errors.append(message)
            del _last_errors[:-8]
            number = logging.INFO  # what fails raises an error that quotes it
        if message.strip(". "):
            log.log(number, "%s", message)

    return write


@contextmanager
def unlogged() -> Iterator[None]:
    """Drop llama.cpp's log while the body runs, errors too, unless somebody listens to the logger.

    Loading a model logs a thousand lines, and each takes Python's lock, for which it waits where other threads decode.
    """
    bindings = load()
    if log.isEnabledFor(logging.INFO):
        yield
        return
    # Any C function without arguments and effects will do: whoever calls passes arguments in registers and clears up itself.
    nothing = ctypes.cast(bindings._lib.llama_max_devices, bindings.llama_log_callback)
    bindings.llama_log_set(nothing, ctypes.c_void_p(0))
    try:
        yield
    finally:
        bindings.llama_log_set(_log_callback(bindings), ctypes.c_void_p(0))


def take_last_errors() -> str:
    """Return what llama.cpp logged as errors since the last call, in one line, "" where it did not."""
    text = "; ".join(_last_errors)
    _last_errors.clear()
    return text


def build_text() -> str:
    """Return which llama.cpp this is, for reports: ``llama-cpp-python 0.3.36 (ggml 0.25.3)``."""
    bindings = load()
    library = bindings._lib
    library.ggml_version.restype = ctypes.c_char_p
    library.ggml_commit.restype = ctypes.c_char_p
    version = library.ggml_version().decode()
    commit = library.ggml_commit().decode()
    known = f"ggml {version}" if commit in ("", "unknown") else f"ggml {version}, {commit}"
    return f"llama-cpp-python {PINNED_VERSION} ({known})"
