"""``lazyweights stock-quantize``: llama.cpp's own quantizer."""

from __future__ import annotations

import argparse
import os

from lazyweights.cli.files import show_progress
from lazyweights.cli.messages import FAILED, OK, bpw_text, describe_error, say, say_error, seconds_text, size_text
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.options import add_threads, add_verbosity
from lazyweights.cli.step_progress import step_bar
from lazyweights.errors import LazyWeightsError

EXAMPLES = """\
  lazyweights stock-quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M
  lazyweights stock-quantize model-f16.gguf.lw small.gguf iq3_xxs --imatrix imatrix.gguf
  lazyweights stock-quantize --pure model-f16.gguf pure.gguf Q4_0

Types are those of llama-quantize, in any case: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0, Q2_K Q2_K_S Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M
Q5_K_S Q5_K_M Q6_K, IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ3_XXS IQ3_XS IQ3_S IQ3_M IQ4_XS IQ4_NL, TQ1_0 TQ2_0, F16 BF16 F32.
The work is llama.cpp's: pip install 'lazyweights[llama]'."""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    parser = add_verb_parser(verbs, "stock-quantize", "quantize a model with llama.cpp's own quantizer", EXAMPLES)
    parser.add_argument("source", metavar="IN", help="GGUF file of floats, or its coded file")
    parser.add_argument("output", metavar="OUT", help="GGUF file to write")
    parser.add_argument("type", metavar="TYPE", help="type or mix, in llama-quantize's words")
    parser.add_argument("--imatrix", metavar="F", help="imatrix file (GGUF or .dat), or what capture wrote")
    parser.add_argument("--pure", action="store_true", help="the same type for all matrices")
    parser.add_argument(
        "--allow-requantize", action="store_true", help="take a source that is quantized already; quality suffers"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an output that exists already")
    add_threads(parser)
    add_verbosity(parser, "print errors only", "print what llama.cpp says too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Quantize; return the exit code."""
    try:
        _quantize(args)
    except (LazyWeightsError, OSError, MemoryError) as error:
        say_error(describe_error(error, args.source))
        return FAILED
    return OK


def _quantize(args: argparse.Namespace) -> None:
    from lazyweights.llama.stock import stock_quantize

    with step_bar(os.path.basename(args.source), show_progress(args)) as progress:
        result = stock_quantize(
            args.source, args.output, args.type, imatrix=args.imatrix, pure=args.pure, threads=args.threads,
            allow_requantize=args.allow_requantize, force=args.force, progress=progress,
        )  # fmt: skip
    if not args.quiet:
        imatrix = f", imatrix of {result.n_imatrix} weights" if args.imatrix is not None else ""
        sizes = f"{size_text(result.source_bytes)} -> {size_text(result.output_bytes)}"
        bpw = f"{bpw_text(result.source_bytes, result.n_weights)} -> {bpw_text(result.output_bytes, result.n_weights)}"
        say(f"{args.output}: {result.file_type}, {sizes}, {bpw} bits per weight{imatrix}, {seconds_text(result.seconds)}")
