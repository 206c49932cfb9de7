"""``lazyweights verify``: decode coded files without writing, and check every checksum."""

from __future__ import annotations

import argparse
import os

from lazyweights.cli.compiling import compile_first
from lazyweights.cli.files import STDIO, require_coded, show_progress, work_through
from lazyweights.cli.messages import UsageError, rate_text, say, seconds_text, size_text
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.options import add_threads, add_verbosity
from lazyweights.cli.progress import progress_bar

EXAMPLES = """\
  lazyweights verify model.gguf.lw                          every checksum, and that of the whole source
  lazyweights verify model.gguf.lw --against model.gguf     byte for byte against the source
  lazyweights verify models/ -q && echo all good"""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    parser = add_verb_parser(verbs, "verify", "decode coded files without writing and check every checksum", EXAMPLES)
    parser.add_argument("files", nargs="+", metavar="FILE", help="coded file, or directory to search for *.lw")
    parser.add_argument("--against", metavar="SOURCE", help="compare with this file too, with one input only")
    add_threads(parser)
    add_verbosity(parser, "print errors only", "print the SHA-256 of the source and the rate too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify the files; return the exit code."""
    if STDIO in args.files:
        raise UsageError("verify reads a file: to check a stream, use decode -c - >/dev/null")
    if args.against is not None and (len(args.files) > 1 or os.path.isdir(args.files[0])):
        raise UsageError("--against names one source, so there can be one input only")
    return work_through(args, (".lw",), lambda path: _verify(args, path))


def _verify(args: argparse.Namespace, path: str) -> None:
    require_coded(path)
    if args.against is not None:
        os.stat(args.against)
    compile_first(args, "decode", path)

    from lazyweights.container.decoder import verify_file

    with progress_bar(os.path.basename(path), show_progress(args)) as progress:
        result = verify_file(path, against=args.against, threads=args.threads, progress=progress)
    if args.quiet:
        return
    equal = f", equal to {args.against}" if args.against is not None else ""
    rate = f" ({rate_text(result.source_bytes, result.seconds)})" if args.verbose else ""
    counts = f"{result.n_tensors} tensors in {result.n_row_groups} row groups"
    say(f"{path}: OK{equal}, {counts}, {size_text(result.source_bytes)}, {seconds_text(result.seconds)}{rate}")
    if args.verbose:
        say(f"{path}: SHA-256 of the source {result.sha256}")
