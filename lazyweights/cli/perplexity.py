"""``lazyweights perplexity``: perplexity and KL divergence of a model, as llama-perplexity computes them."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from lazyweights.cli.files import STDIO, kind_of, work_through
from lazyweights.cli.messages import UsageError, say, seconds_text
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.options import add_verbosity, thread_count
from lazyweights.cli.perplexity_report import RunningEstimate, print_divergence, result_json
from lazyweights.errors import FormatError, OutputExistsError

if TYPE_CHECKING:
    from lazyweights.llama.perplexity import DivergenceResult, PerplexityResult

EXAMPLES = """\
  lazyweights perplexity model.gguf.lw -f wiki.test.raw                 all of the text, in chunks of 512 tokens
  lazyweights perplexity model.gguf -f wiki.test.raw -c 2048 --chunks 20
  lazyweights perplexity big.gguf -f wiki.test.raw --chunks 40 --kl-divergence-base big.logits
  lazyweights perplexity small.gguf --kl-divergence-base big.logits --kl-divergence
  lazyweights perplexity model.gguf -f wiki.test.raw --json | jq .ppl.value

The numbers are those of llama.cpp's llama-perplexity with the same options, and a coded file gives exactly the number of its
source. The base logits file is the one llama-perplexity writes and reads; it takes 2 bytes for each scored token (half of
them) times the size of the vocabulary."""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    summary = "measure perplexity and KL divergence on a text, with llama.cpp"
    parser = add_verb_parser(verbs, "perplexity", summary, EXAMPLES)
    parser.add_argument("model", metavar="FILE", help="GGUF file or coded file")
    parser.add_argument("-f", "--file", metavar="TEXT", help="text file; with --kl-divergence it is only compared")
    parser.add_argument(
        "-c", "--ctx-size", type=_positive, metavar="N",
        help="tokens of a chunk, even (default: 512; with --kl-divergence: that of the base)",
    )  # fmt: skip
    parser.add_argument("--chunks", type=_positive, metavar="N", help="chunks to evaluate (default: all)")
    parser.add_argument(
        "-b", "--batch-size", type=_positive, default=2048, metavar="N", help="tokens to evaluate together (default: 2048)"
    )
    parser.add_argument("--kl-divergence-base", metavar="BASE", help="base logits file to write, or with --kl-divergence to read")
    parser.add_argument("--kl-divergence", action="store_true", help="compare with the base")
    parser.add_argument("--force", action="store_true", help="replace a base logits file that exists already")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "-t", "-T", "--threads", type=thread_count, default=0, metavar="N", help="threads, 0 = all cores (default: 0)"
    )
    add_verbosity(parser, "print the result only", "print what llama.cpp logs too")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return number


def run(args: argparse.Namespace) -> int:
    """Evaluate the model; return the exit code."""
    if args.model == STDIO or os.path.isdir(args.model):
        raise UsageError("perplexity evaluates one model file, neither standard input nor a directory")
    if args.kl_divergence and args.kl_divergence_base is None:
        raise UsageError("--kl-divergence needs --kl-divergence-base BASE, the base logits file to compare with")
    if args.file is None and not args.kl_divergence:
        raise UsageError("-f TEXT is missing: the text to evaluate")
    if args.ctx_size is not None and (args.ctx_size < 4 or args.ctx_size % 2) and not args.kl_divergence:
        raise UsageError(f"-c {args.ctx_size}: the context has to be even and at least 4, such as -c 512")
    args.files = [args.model]
    return work_through(args, (".gguf", ".lw"), lambda path: _evaluate(args, path))


def _evaluate(args: argparse.Namespace, path: str) -> None:
    from lazyweights.llama import library
    from lazyweights.llama.chunks import read_text
    from lazyweights.llama.perplexity import DEFAULT_CONTEXT, kl_divergence, perplexity

    library.load()
    kind, description = kind_of(path)
    if kind == "other":
        raise FormatError(f"neither a GGUF file nor a coded file: it looks like {description}", path=path)
    base = args.kl_divergence_base
    writes_base = base is not None and not args.kl_divergence
    if writes_base and os.path.lexists(base) and not args.force:
        raise OutputExistsError("the base logits exist already: read them with --kl-divergence, or replace them with --force",
                                path=base)  # fmt: skip
    text = None if args.file is None else read_text(args.file)
    with RunningEstimate(path, args, base if writes_base else None) as shown:
        options: dict[str, Any] = {
            "n_chunks": args.chunks, "n_batch": args.batch_size, "threads": args.threads, "started": shown.start,
            "progress": shown.decoding_bar(kind == "coded"),
        }  # fmt: skip
        if args.kl_divergence:
            compared = kl_divergence(path, base, text=text, n_ctx=args.ctx_size, chunk_done=shown.compared, **options)
        else:
            measured = perplexity(
                path, text or b"", n_ctx=args.ctx_size or DEFAULT_CONTEXT, base_file=base, force=args.force,
                chunk_done=shown.measured, **options,
            )  # fmt: skip
    result: DivergenceResult | PerplexityResult = compared if args.kl_divergence else measured
    if args.json:
        print(result_json(result))
    elif args.kl_divergence:
        print_divergence(compared.statistics)
    else:
        print(f"Final estimate: PPL = {measured.ppl.value:.4f} +/- {measured.ppl.error:.5f}")
    if not args.quiet:
        say(f"{path}: {seconds_text(result.seconds)}, and {seconds_text(result.load_seconds)} to load the model")
