"""``lazyweights import-gptq``: GPTQ checkpoints to GGUF files or coded files with the same weights."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from lazyweights.cli.files import show_progress
from lazyweights.cli.messages import (
    FAILED,
    OK,
    UsageError,
    bpw_text,
    describe_error,
    say,
    say_error,
    seconds_text,
    size_text,
)
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.options import add_threads, add_verbosity
from lazyweights.cli.progress import progress_bar
from lazyweights.cli.step_progress import step_bar
from lazyweights.errors import LazyWeightsError

EXAMPLES = """\
  lazyweights import-gptq Model-GPTQ/ --base model-f16.gguf -o model-gptq.gguf
  lazyweights import-gptq Model-GPTQ/ --base model-q8_0.gguf -o model-gptq.gguf.lw    coded at once
  lazyweights import-gptq Model-GPTQ/ --base vocabulary.gguf -o model-gptq.gguf

The weights are exactly those of the checkpoint; what GGUF cannot hold exactly is refused. Metadata and tokenizer are those of
the base: any GGUF of the same model, or one without tensors, which llama.cpp makes of the checkpoint's own folder:
  convert_hf_to_gguf.py --vocab-only --outfile vocabulary.gguf Model-GPTQ/"""

NO_BASE = (
    "import-gptq takes metadata and tokenizer from a GGUF of the same model: give one with --base. Any type will do, also one "
    "without tensors: convert_hf_to_gguf.py --vocab-only (of llama.cpp) makes it of the checkpoint's folder"
)


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    parser = add_verb_parser(verbs, "import-gptq", "write a GPTQ checkpoint as a GGUF file with the same weights", EXAMPLES)
    parser.add_argument("folder", metavar="DIR", help="folder with config.json and safetensors files")
    parser.add_argument("--base", metavar="MODEL.gguf", help="GGUF file of the same model: its metadata and tokenizer are copied")
    parser.add_argument(
        "-o", "--output", metavar="OUT", required=True, help="file to write: a coded file if its name ends in .lw, else a GGUF"
    )
    parser.add_argument(
        "--float-fallback", action="store_true", help="store as F32 the layers that no quantized type holds exactly"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an output that exists already")
    add_threads(parser)
    add_verbosity(parser, "print errors only", "print the types of the tensors too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Import; return the exit code."""
    if args.base is None:
        raise UsageError(NO_BASE)
    try:
        _import(args)
    except (LazyWeightsError, OSError, MemoryError) as error:
        say_error(describe_error(error, args.folder))
        return FAILED
    return OK


def _import(args: argparse.Namespace) -> None:
    from lazyweights.container.atomic import CODED_SUFFIX, check_output
    from lazyweights.container.encoder import encode_file
    from lazyweights.quant.gptq_import import import_gptq

    is_coded = args.output.endswith(CODED_SUFFIX)
    check_output(args.output, args.force, args.base)
    with _plain_path(args.output, is_coded) as plain:
        with step_bar(os.path.basename(os.path.normpath(args.folder)), show_progress(args)) as progress:
            result = import_gptq(
                args.folder, args.base, plain, float_fallback=args.float_fallback, force=args.force, progress=progress
            )
        n_bytes, seconds = result.output_bytes, result.seconds
        if is_coded:
            with progress_bar(os.path.basename(args.output), show_progress(args)) as encode_progress:
                coded = encode_file(plain, args.output, threads=args.threads, force=args.force, progress=encode_progress)
            n_bytes, seconds = coded.coded_bytes, seconds + coded.seconds
    if args.quiet:
        return
    sizes = size_text(n_bytes) if not is_coded else f"{size_text(result.output_bytes)} -> {size_text(n_bytes)}"
    bpw = bpw_text(n_bytes, result.n_weights)
    layers = f"{result.n_quantized} quantized and {result.n_other} other tensors"
    say(f"{args.output}: {layers}, {sizes}, {bpw} bits per weight, {seconds_text(seconds)}")
    if args.verbose:
        say(", ".join(f"{name}: {count}" for name, count in sorted(result.types.items())))


@contextmanager
def _plain_path(output: str, is_coded: bool) -> Iterator[str]:
    """Yield where to write the GGUF: at its place, or in a folder beside it that goes away."""
    if not is_coded:
        yield output
        return
    folder = os.path.dirname(output) or "."
    if not os.path.isdir(folder):
        raise LazyWeightsError(f"cannot write: the directory {folder} does not exist", path=output)
    with tempfile.TemporaryDirectory(prefix=".lazyweights-", dir=folder) as temporary:
        yield os.path.join(temporary, "plain.part")
