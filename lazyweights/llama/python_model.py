"""``llama_cpp.Llama`` from a coded file."""

from __future__ import annotations

import functools
import os
from typing import Any

from lazyweights.llama import library
from lazyweights.llama.memory_file import model_path


def load_llama(path: str | os.PathLike[str], *, use_extra_bufts: bool = False, **options: Any) -> Any:
    """See `lazyweights.load_llama`."""
    llama_cpp = library.package()
    make = llama_cpp.Llama if use_extra_bufts else _without_extra_buffers()
    given = os.fspath(path)
    # Whole: with some options llama.cpp copies the tensors while it loads.
    with model_path(given) as source:
        llama = make(model_path=source.path, **options)
    llama.model_path = given  # its answers name it
    return llama


@functools.cache
def _without_extra_buffers() -> type:
    """Return `llama_cpp.Llama` with the parameter changed that its constructor has no argument for."""
    llama_cpp = library.package()

    class Llama(llama_cpp.Llama):  # type: ignore[name-defined]
        @property
        def model_params(self) -> Any:
            return self._model_params

        @model_params.setter
        def model_params(self, params: Any) -> None:
            params.use_extra_bufts = False
            self._model_params = params

    Llama.__qualname__ = "Llama"
    return Llama
