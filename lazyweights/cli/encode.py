"""``lazyweights encode``: write coded files."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from lazyweights.cli.compiling import compile_first
from lazyweights.cli.files import STDIO, identity, remove_input, require_gguf, show_progress, work_through
from lazyweights.cli.messages import (
    UsageError,
    bpw_text,
    rate_text,
    saving_text,
    say,
    say_warning,
    seconds_text,
    size_text,
)
from lazyweights.cli.options import add_output, add_threads, add_verbosity
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.progress import progress_bar

if TYPE_CHECKING:
    from lazyweights.container.encoder import EncodeResult

EXAMPLES = """\
  lazyweights encode model.gguf                 write model.gguf.lw
  lazyweights encode model.gguf -o small.lw     choose the name
  lazyweights encode models/                    every *.gguf below models/, shard by shard
  lazyweights encode --preset unit model.gguf   streams for the hardware decode unit
  lazyweights encode --rm -T 4 *.gguf           four threads; delete each source once its coded file is verified

The coded file holds every byte of its source. It is decoded and compared as it is written, and it gets its name
only when that has succeeded."""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    parser = add_verb_parser(verbs, "encode", "write the coded file of GGUF files", EXAMPLES)
    parser.add_argument("files", nargs="+", metavar="FILE", help="GGUF file, or directory to search for *.gguf")
    add_output(parser, "FILE.lw", "its coded file has been verified")
    parser.add_argument(
        "--preset",
        choices=("dense", "unit"),
        default="dense",
        help="dense: smallest file; unit: what the hardware decode unit reads (default: dense)",
    )
    add_threads(parser)
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="do not decode and compare what was coded",
    )
    add_verbosity(parser, "print errors only", "print the table of tensor types too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Encode the files; return the exit code."""
    if STDIO in args.files:
        raise UsageError("encode reads a file more than once, so it cannot read standard input")
    if args.output == STDIO:
        raise UsageError("encode writes a file, not standard output")
    if args.rm and args.no_verify:
        raise UsageError("--rm deletes only what has been verified: leave out --no-verify")
    return work_through(args, (".gguf",), lambda path: _encode(args, path))


def _encode(args: argparse.Namespace, path: str) -> None:
    from lazyweights.container.atomic import check_output, coded_name

    require_gguf(path)
    seen = identity(path)
    output = coded_name(path) if args.output is None else args.output
    check_output(output, args.force, path)
    compile_first(args, "encode", path)

    from lazyweights.container.encoder import encode_file

    with progress_bar(os.path.basename(path), show_progress(args)) as progress:
        result = encode_file(
            path,
            output,
            preset=args.preset,
            threads=args.threads,
            verify=not args.no_verify,
            force=args.force,
            progress=progress,
        )
    if not args.quiet:
        if result.problem:
            say_warning(f"{path}: {result.problem}; such bytes are kept as they are")
        say(f"{path}: {_summary(result)}")
    if args.verbose:
        from lazyweights.cli.report_text import print_type_table
        from lazyweights.container.inspect import inspect_file

        say(f"{output}: preset {args.preset}, {rate_text(result.source_bytes, result.seconds)}")
        print_type_table(inspect_file(output), to_stderr=True)
    if args.rm:
        remove_input(path, seen)


def _summary(result: EncodeResult) -> str:
    before, after, n_weights = result.source_bytes, result.coded_bytes, result.n_weights
    parts = [f"{size_text(before)} -> {size_text(after)} ({saving_text(before, after)})"]
    if n_weights:
        parts.append(f"{bpw_text(before, n_weights)} -> {bpw_text(after, n_weights)} bits per weight")
    return ", ".join([*parts, seconds_text(result.seconds)])
