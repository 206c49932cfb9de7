"""``lazyweights capture``: what a model's weights are multiplied with, over a text."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from lazyweights.cli.files import show_progress
from lazyweights.cli.messages import (
    FAILED,
    OK,
    UsageError,
    describe_error,
    say,
    say_error,
    say_warning,
    seconds_text,
    size_text,
)
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.options import add_threads, add_verbosity
from lazyweights.cli.step_progress import step_bar
from lazyweights.errors import LazyWeightsError

if TYPE_CHECKING:
    from lazyweights.llama.passes import CaptureProgress, CaptureResult

EXAMPLES = """\
  lazyweights capture model.gguf -f text.txt -o model.hessians --chunks 32
  lazyweights capture model.gguf.lw -f text.txt -o model.hessians --max-memory 1G
  lazyweights capture model.gguf -f text.txt -o imatrix.gguf      an imatrix file, for llama-quantize too
  lazyweights capture model.gguf -f text.txt -o rows.samples --kind samples --samples 256

hessian: X^T X of the inputs X of each weight, float64. diagonal: sums of squares. samples: some inputs as they are.
An OUT that ends in .gguf or .dat is an imatrix file of llama.cpp, of the kind diagonal.
The model is run by llama.cpp: pip install 'lazyweights[llama]'."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def byte_count(text: str) -> int:
    """Parse the argument of ``--max-memory``.

    >>> byte_count("4G"), byte_count("1.5m"), byte_count("200MB")
    (4000000000, 1500000, 200000000)
    """
    plain = text.strip().upper().removesuffix("B")
    unit = plain[-1:] if plain[-1:] in _UNITS else ""
    try:
        count = float(plain.removesuffix(unit)) * _UNITS[unit]
        if not 1 <= count < 1e18:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: 500M, 4G") from None
    return round(count)


def positive(text: str) -> int:
    """Parse a number of things, at least one."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    parser = add_verb_parser(verbs, "capture", "capture the inputs of a model's weights: Hessians, imatrix, samples", EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="GGUF file or coded file")
    parser.add_argument("-f", "--file", required=True, metavar="TEXT", help="text to run the model on")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="file to write")
    parser.add_argument(
        "--kind", choices=("hessian", "diagonal", "samples"),
        help="what to keep (default: hessian; of an imatrix file: diagonal)",
    )  # fmt: skip
    parser.add_argument("-c", "--ctx-size", type=positive, default=512, metavar="N", help="tokens of a chunk (default: 512)")
    parser.add_argument("--chunks", type=positive, metavar="N", help="how many chunks at most (default: all of the text)")
    parser.add_argument(
        "--max-memory", type=byte_count, default=4 * 10**9, metavar="SIZE",
        help="memory for what is kept; where that is too little the text is run several times (default: 4G)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("f64", "f32"), default="f64", help="how Hessians are stored (default: f64)")
    parser.add_argument("--samples", type=positive, default=1024, metavar="N", help="rows of a sample (default: 1024)")
    parser.add_argument(
        "--imatrix-format", choices=("gguf", "dat"), help="write an imatrix file (default: if OUT ends so)"
    )
    parser.add_argument(
        "--process-output", action="store_true", help="put the output matrix into the imatrix file too"
    )
    parser.add_argument("--force", action="store_true", help="replace an output that exists already")
    add_threads(parser)
    add_verbosity(parser, "print errors only", "print what llama.cpp says too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Capture; return the exit code."""
    suffix = os.path.splitext(args.output)[1].lower()
    if args.imatrix_format is None and suffix in (".gguf", ".dat"):
        args.imatrix_format = suffix[1:]
    if args.imatrix_format is not None and args.kind not in (None, "diagonal"):
        raise UsageError("an imatrix file (.gguf, .dat) has the diagonal only: leave out --kind, or name another OUT")
    if args.process_output and args.imatrix_format is None:
        raise UsageError("--process-output belongs to imatrix files; others always have the output matrix")
    args.kind = args.kind or ("diagonal" if args.imatrix_format else "hessian")
    try:
        _capture(args)
    except (LazyWeightsError, OSError, MemoryError) as error:
        say_error(describe_error(error, args.model))
        return FAILED
    return OK


def _capture(args: argparse.Namespace) -> None:
    from lazyweights.llama.passes import capture

    with step_bar(os.path.basename(args.model), show_progress(args)) as bar:

        def update(progress: CaptureProgress) -> None:
            if bar is not None:
                bar(progress.n_done, progress.n_total, f"pass {progress.pass_number} of {progress.n_passes}, chunks")

        result = capture(
            args.model, args.file, args.output, kind=args.kind, n_ctx=args.ctx_size, n_chunks=args.chunks,
            max_memory=args.max_memory, n_samples=args.samples, dtype={"f64": "float64", "f32": "float32"}[args.dtype],
            imatrix_format=args.imatrix_format, process_output=args.process_output, threads=args.threads, force=args.force,
            progress=update,
        )  # fmt: skip
    if not args.quiet:
        _report(args, result)


def _report(args: argparse.Namespace, result: CaptureResult) -> None:
    groups = [g for g in result.groups if not (args.imatrix_format and g.is_output and not args.process_output)]
    n_weights = sum(len(group.weights) for group in groups)
    what = {"hessian": "Hessians", "diagonal": "sums of squares", "samples": "samples"}[args.kind]
    if args.imatrix_format:
        what = f"imatrix ({args.imatrix_format})"
    info = result.info
    chunks = "1 chunk" if info.n_chunks == 1 else f"{info.n_chunks} chunks"
    bos = "with BOS" if info.adds_bos else "no BOS"
    say(f"{args.output}: {what} of {n_weights} weights with {len(groups)} inputs, {size_text(result.output_bytes)}")
    say(f"{info.n_tokens:,} tokens ({chunks} of {info.n_ctx}, {bos}); {info.llama_cpp}")
    passes = "1 pass" if result.n_passes == 1 else f"{result.n_passes} passes"
    memory = f"{size_text(result.accumulator_bytes)} of sums"
    peak = peak_resident_bytes()
    most = f", peak resident set {size_text(peak)}" if peak else ""
    say(f"{passes}, {memory}{most}, {seconds_text(result.seconds)}; {result.n_dropped} rows dropped (not finite)")
    if result.n_unseen:
        say_warning(f"{result.n_unseen} matrices of experts saw no token: use a longer text")


def peak_resident_bytes() -> int:
    """Return the largest resident set of this process so far, 0 where the system does not say."""
    try:
        import resource
        import sys
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
