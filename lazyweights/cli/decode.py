"""``lazyweights decode``: write back the GGUF files that coded files hold."""

from __future__ import annotations

import argparse
import os
import sys
from typing import BinaryIO

from lazyweights.cli.files import (
    STDIO,
    identity,
    is_terminal,
    remove_input,
    require_coded,
    show_progress,
    work_through,
)
from lazyweights.cli.messages import UsageError, rate_text, say, seconds_text
from lazyweights.cli.messages import size_text as size
from lazyweights.cli.options import add_output, add_threads, add_verbosity
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.progress import progress_bar
from lazyweights.errors import LazyWeightsError

EXAMPLES = """\
  lazyweights decode model.gguf.lw                          write model.gguf
  lazyweights decode model.gguf.lw -o copy.gguf             choose the name
  lazyweights decode -c model.gguf.lw | sha256sum           write to standard output
  curl -L URL/model.gguf.lw | lazyweights decode - -o model.gguf

Every checksum is checked; a damaged file leaves no output. With -c the bytes before the damage have been written by
the time it is found, and the exit code is 1."""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    parser = add_verb_parser(verbs, "decode", "write the GGUF files that coded files hold", EXAMPLES)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="coded file, directory to search for *.lw, or - for standard input"
    )
    add_output(parser, "FILE without .lw", "it has been decoded and its checksum compared")
    parser.add_argument(
        "-c", "--stdout", action="store_true", help="write to standard output; the default when reading from it"
    )
    add_threads(parser)
    add_verbosity(parser, "print errors only", "print the rate too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Decode the files; return the exit code."""
    if args.output == STDIO:
        args.output, args.stdout = None, True
    if args.stdout and args.output is not None:
        raise UsageError("-c and -o name two outputs")
    if args.rm and (args.stdout or STDIO in args.files):
        raise UsageError("--rm needs a file as input and as output")
    return work_through(args, (".lw",), lambda path: _decode(args, path))


def _decode(args: argparse.Namespace, path: str) -> None:
    from lazyweights.container.atomic import AtomicFile, source_name
    from lazyweights.container.decoder import decode_file, decode_stream

    to_stdout = args.stdout or (path == STDIO and args.output is None)
    label = "standard input" if path == STDIO else path
    sink = _standard_output() if to_stdout else None
    if path != STDIO:
        require_coded(path)
    # The bar and data on the same terminal would overwrite each other; a refusal above leaves only pipes and files.
    with progress_bar(os.path.basename(label), show_progress(args)) as progress:
        if path == STDIO:
            source = _standard_input()
            if sink is not None:
                result = decode_stream(source, sink, progress=progress)
            else:
                with AtomicFile(args.output, args.force) as file:
                    result = decode_stream(source, file, progress=progress)
        elif sink is not None:
            with open(path, "rb") as source:
                result = decode_stream(source, sink, progress=progress)
        else:
            seen = identity(path)
            output = source_name(path) if args.output is None else args.output
            result = decode_file(path, output, threads=args.threads, force=args.force, progress=progress)
        if sink is not None:
            sink.flush()
    if not args.quiet:
        rate = f" ({rate_text(result.source_bytes, result.seconds)})" if args.verbose else ""
        sizes = f"{size(result.coded_bytes)} -> {size(result.source_bytes)}"
        say(f"{label}: {sizes}, {seconds_text(result.seconds)}{rate}")
    if args.rm:
        remove_input(path, seen)


def _standard_output() -> BinaryIO:
    if sys.stdout is None:
        raise LazyWeightsError("standard output is closed")
    if is_terminal(sys.stdout):
        raise LazyWeightsError("standard output is a terminal: name a file with -o, or pipe it on")
    return sys.stdout.buffer


def _standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise LazyWeightsError("standard input is closed")
    if is_terminal(sys.stdin):
        raise LazyWeightsError("standard input is a terminal: pipe a coded file in, or name one")
    return sys.stdin.buffer
