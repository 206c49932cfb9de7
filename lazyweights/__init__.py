"""Weights of local language models that stay entropy-coded until the last moment.

A GGUF file and its coded file hold the same bytes: ``decode(encode(f)) == f`` for every file.

>>> import lazyweights
>>> lazyweights.encode("model.gguf")  # doctest: +SKIP
>>> with lazyweights.open("model.gguf.lw") as file:  # doctest: +SKIP
...     weights = file.get_tensor("output_norm.weight")

Importing this package loads no other module; each function loads what it needs when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    import llama_cpp

    from lazyweights.container.decoder import DecodeResult, VerifyResult
    from lazyweights.container.encoder import EncodeResult
    from lazyweights.container.reader import CodedFile

__all__ = ["__version__", "decode", "encode", "load_llama", "open", "verify"]

__version__ = "0.1.0"


def open(path: str | os.PathLike[str]) -> CodedFile:
    """Open a coded file to read single tensors, rows and experts of it.

    Parameters
    ----------
    path : str or os.PathLike
        A coded file (``.gguf.lw``).

    Returns
    -------
    CodedFile
        A context manager. It maps the file and decodes only the row groups that a call touches.

    Raises
    ------
    FormatError
        If the file is not a coded file (`NotCodedError`) or its header or index is damaged.
    """
    from lazyweights.container.reader import CodedFile

    return CodedFile(path)


def encode(path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, **options: Any) -> EncodeResult:
    """Write the coded file of a GGUF file.

    Parameters
    ----------
    path : str or os.PathLike
        A GGUF file.
    output : str or os.PathLike, optional
        The coded file; ``.lw`` is appended to `path` if it is not given.
    **options
        Keyword arguments of `lazyweights.container.encoder.encode_file`: `preset`, `threads`, `verify`, `force`,
        `progress`.

    Returns
    -------
    EncodeResult

    Raises
    ------
    FormatError
        If the file does not start with ``GGUF``.
    LazyWeightsError
        If the output is there already and ``force=True`` is not given, or cannot be written.
    """
    from lazyweights.container.first_run import compile_kernels

    compile_kernels("encode", path)  # before numba is loaded here

    from lazyweights.container.atomic import coded_name
    from lazyweights.container.encoder import encode_file

    return encode_file(path, coded_name(path) if output is None else output, **options)


def decode(path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, **options: Any) -> DecodeResult:
    """Write the GGUF file that a coded file holds.

    Parameters
    ----------
    path : str or os.PathLike
        A coded file.
    output : str or os.PathLike, optional
        The GGUF file; `path` without its ``.lw`` if it is not given.
    **options
        Keyword arguments of `lazyweights.container.decoder.decode_file`: `threads`, `force`, `progress`.

    Returns
    -------
    DecodeResult

    Raises
    ------
    FormatError
        If the file is not a coded file (`NotCodedError`) or is damaged; no output is left.
    LazyWeightsError
        If the output is there already and ``force=True`` is not given, or cannot be written.
    """
    from lazyweights.container.first_run import compile_kernels

    compile_kernels("decode", path)

    from lazyweights.container.atomic import source_name
    from lazyweights.container.decoder import decode_file

    return decode_file(path, source_name(path) if output is None else output, **options)


def verify(path: str | os.PathLike[str], **options: Any) -> VerifyResult:
    """Decode a coded file without writing anything, and check every checksum.

    Parameters
    ----------
    path : str or os.PathLike
        A coded file.
    **options
        Keyword arguments of `lazyweights.container.decoder.verify_file`: `against` (a source to compare with),
        `threads`, `progress`.

    Returns
    -------
    VerifyResult

    Raises
    ------
    FormatError
        If the file is damaged (mostly `ChecksumError`) or does not decode to `against`.
    """
    from lazyweights.container.first_run import compile_kernels

    compile_kernels("decode", path)

    from lazyweights.container.decoder import verify_file

    return verify_file(path, **options)


def load_llama(path: str | os.PathLike[str], *, use_extra_bufts: bool = False, **options: Any) -> llama_cpp.Llama:
    """Load a model into llama-cpp-python (``pip install 'lazyweights[llama]'``).

    Parameters
    ----------
    path : str or os.PathLike
        A GGUF or a coded file. The latter is decoded into memory, never to a file; the memory is the model's own afterwards and
        is freed with it.
    use_extra_bufts : bool
        Let llama.cpp repack weights for this CPU, as `llama_cpp.Llama` does: quicker on some CPUs, but it takes a copy of them.
        Else they stay where they have been decoded, or in the mapped GGUF.
    **options
        Keyword arguments of `llama_cpp.Llama` other than `model_path`, such as `n_ctx` and `verbose`.

    Returns
    -------
    llama_cpp.Llama

    Raises
    ------
    BackendUnavailableError
        If llama-cpp-python is not installed, or `path` is a coded file and the system has no anonymous memory files.
    FormatError, CodecError
        If a coded file is damaged.
    ValueError
        If llama.cpp cannot load the model (llama-cpp-python raises it).
    """
    from lazyweights.llama import python_model

    return python_model.load_llama(path, use_extra_bufts=use_extra_bufts, **options)
