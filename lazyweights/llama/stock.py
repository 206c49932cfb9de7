"""Stock formats: llama.cpp's own quantizer, ``llama_model_quantize``, with the types of llama-quantize.

It runs in a process of its own (`lazyweights.llama.stock_process`): the call cannot be interrupted, so Ctrl-C ends that
process instead, and an assertion that fails inside llama.cpp ends with an error here, not with the caller.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from lazyweights.container.atomic import AtomicFile, check_output
from lazyweights.container.gguf_scan import scan_gguf
from lazyweights.container.jobs import ProgressCallback, thread_count
from lazyweights.errors import LazyWeightsError, QuantizationError
from lazyweights.llama import library
from lazyweights.llama.memory_file import model_path

FILE_TYPES = {
    "Q1_0": 40, "Q2_0": 41, "Q4_0": 2, "Q4_1": 3, "MXFP4_MOE": 38, "Q5_0": 8, "Q5_1": 9, "IQ2_XXS": 19, "IQ2_XS": 20,
    "IQ2_S": 28, "IQ2_M": 29, "IQ1_S": 24, "IQ1_M": 31, "TQ1_0": 36, "TQ2_0": 37, "Q2_K": 10, "Q2_K_S": 21, "IQ3_XXS": 23,
    "IQ3_S": 26, "IQ3_M": 27, "Q3_K": 12, "IQ3_XS": 22, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "IQ4_NL": 25, "IQ4_XS": 30,
    "Q4_K": 15, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K": 17, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "Q8_0": 7, "F16": 1,
    "BF16": 32, "F32": 0,
}  # fmt: skip
"""Names as llama-quantize has them, and their numbers in ``enum llama_ftype``."""

NEED_IMATRIX = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K_S")
"""What llama-quantize refuses without an imatrix."""

_TENSOR_LINE = re.compile(r"\[ *(\d+)/ *(\d+)\] +(\S+)")


@dataclass(frozen=True)
class StockResult:
    """What was written.

    Attributes
    ----------
    file_type : str
        Name of the type, as in `FILE_TYPES`.
    source_bytes, output_bytes, n_weights : int
    n_imatrix : int
        Entries of the imatrix that was used, 0 without.
    seconds : float
    """

    file_type: str
    source_bytes: int
    output_bytes: int
    n_weights: int
    n_imatrix: int
    seconds: float

    @property
    def bpw(self) -> float:
        """Bits per weight, the whole file counted."""
        return 8 * self.output_bytes / self.n_weights if self.n_weights else 0.0


def file_type_name(name: str) -> str:
    """Return the name of a type as llama.cpp spells it; case does not matter.

    Raises
    ------
    QuantizationError
        If there is no such type; lists those there are.

    Examples
    --------
    >>> file_type_name("q4_k_m")
    'Q4_K_M'
    """
    found = name.upper()
    if found not in FILE_TYPES:
        raise QuantizationError(f"there is no type {name!r}; there are {', '.join(sorted(FILE_TYPES))}")
    return found


def stock_quantize(
    source: str | os.PathLike[str], output: str | os.PathLike[str], type_name: str, *,
    imatrix: str | os.PathLike[str] | None = None, pure: bool = False, allow_requantize: bool = False, threads: int = 0,
    force: bool = False, decode_progress: ProgressCallback | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> StockResult:  # fmt: skip
    """Quantize a model with llama.cpp's quantizer.

    Parameters
    ----------
    source : str or os.PathLike
        A GGUF of floats, or its coded file.
    output : str or os.PathLike
        The GGUF to write, whole or not at all.
    type_name : str
        A key of `FILE_TYPES`, in any case. What one tensor gets is llama.cpp's choice, unless `pure`.
    imatrix : str or os.PathLike, optional
        An imatrix file of either format, or Hessians.
    pure : bool
        The same type for all matrices (llama.cpp still takes another one where rows are not whole blocks).
    allow_requantize : bool
        Take sources that are quantized already.
    threads : int
        0: all cores.
    force : bool
        Replace an output that exists.
    decode_progress : callable, optional
        Told how far decoding a coded source is.
    progress : callable, optional
        Told tensors done, tensors in all, and the name of the tensor at work.

    Returns
    -------
    StockResult

    Raises
    ------
    QuantizationError
        If there is no such type, it needs an imatrix, or llama.cpp fails; the message has its reason.
    BackendUnavailableError
        If llama.cpp is not installed.
    LazyWeightsError
        If a file cannot be read or written.
    """
    name = file_type_name(type_name)
    if imatrix is None and name in NEED_IMATRIX:
        raise QuantizationError(f"{name} needs an imatrix: capture one, and give it with --imatrix", path=os.fspath(source))
    check_output(output, force, source)
    library.load()
    started = time.monotonic()
    target = AtomicFile(output, force, source)
    with model_path(source, threads=threads, progress=decode_progress) as plain, target:
        order = {
            "source": plain.path, "output": target.part_path, "file_type": FILE_TYPES[name], "pure": pure,
            "allow_requantize": allow_requantize, "threads": thread_count(threads),
            "imatrix": None if imatrix is None else os.fspath(imatrix),
        }  # fmt: skip
        n_imatrix = _run(order, progress, os.fspath(source))
        n_bytes, n_weights = _measure(target.part_path, os.fspath(output))
        source_bytes = plain.n_bytes
    return StockResult(name, source_bytes, n_bytes, n_weights, n_imatrix, time.monotonic() - started)


def _run(order: dict[str, object], progress: Callable[[int, int, str], None] | None, source: str) -> int:
    """Run the process to its end, or end it; return the number of imatrix entries it used."""
    package_folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [package_folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "lazyweights.llama.stock_process"]
    reply: dict[str, object] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()  # stays open: the process ends itself when this one is gone
            for line in process.stdout:
                reply = json.loads(line)
                message = str(reply.get("log", ""))
                if message.strip(". "):
                    library.log.info("%s", message)
                found = _TENSOR_LINE.search(message)
                if found and progress is not None:
                    progress(int(found[1]) - 1, int(found[2]), found[3])
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
    if "done" in reply:
        return int(str(reply["done"]))
    reason = reply.get("error") or f"its process ended with {process.returncode}"
    raise QuantizationError(f"llama.cpp cannot quantize this model: {reason}", path=source)


def _measure(part: str, output: str) -> tuple[int, int]:
    """Return bytes and weights of what was written, after looking that it is whole."""
    with open(part, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        scan = scan_gguf(data)
        if scan.problem is not None:
            raise LazyWeightsError(f"llama.cpp wrote a damaged file: {scan.problem}", path=output)
        return len(data), sum(math.prod(tensor.shape) for tensor in scan.tensors)
