"""``lazyweights decode``: write back the GGUF files that coded files hold."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, BinaryIO

from lazyweights.cli.compiling import compile_first
from lazyweights.cli.files import (
    STDIO,
    identity,
    is_terminal,
    remove_input,
    require_coded,
    show_progress,
    work_through,
)
from lazyweights.cli.messages import UsageError, rate_text, say, seconds_text, size_text
from lazyweights.cli.options import add_output, add_threads, add_verbosity
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.progress import progress_bar
from lazyweights.errors import LazyWeightsError

if TYPE_CHECKING:
    from lazyweights.container.decoder import DecodeResult
    from lazyweights.container.encoder import Progress

BUFFER_BYTES = 1 << 20

EXAMPLES = """\
  lazyweights decode model.gguf.lw                          write model.gguf
  lazyweights decode model.gguf.lw -o copy.gguf             choose the name
  lazyweights decode -c model.gguf.lw | sha256sum           write to standard output
  curl -L URL/model.gguf.lw | lazyweights decode - -o model.gguf

The checksum of every row group is checked; a damaged file leaves no output. With -c the bytes before the damage are
out by the time it is found, and the exit code is 1."""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    parser = add_verb_parser(verbs, "decode", "write the GGUF files that coded files hold", EXAMPLES)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="coded file, directory to search for *.lw, or - for standard input"
    )
    add_output(parser, "FILE without .lw", "it has been decoded")
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
    from_stdin = path == STDIO
    label = "standard input" if from_stdin else path
    if not from_stdin:
        require_coded(path)
    seen = None if from_stdin else identity(path)
    to_stdout = args.stdout or (from_stdin and args.output is None)
    compile_first(args, "decode", path)
    with (
        _standard_output() if to_stdout else nullcontext() as sink,
        progress_bar(os.path.basename(label), show_progress(args)) as progress,
    ):
        result = _decode_to(args, path, sink, progress)
    if not args.quiet:
        rate = f" ({rate_text(result.source_bytes, result.seconds)})" if args.verbose else ""
        sizes = f"{size_text(result.coded_bytes)} -> {size_text(result.source_bytes)}"
        say(f"{label}: {sizes}, {seconds_text(result.seconds)}{rate}")
    if args.rm and seen is not None:
        remove_input(path, seen)


def _decode_to(
    args: argparse.Namespace, path: str, sink: BinaryIO | None, progress: Callable[[Progress], None] | None
) -> DecodeResult:
    """Decode to `sink`, or to a file where it is None."""
    from lazyweights.container.atomic import AtomicFile, source_name
    from lazyweights.container.decoder import decode_file, decode_stream

    if path == STDIO:
        source = _standard_input()
        if sink is not None:
            return decode_stream(source, sink, progress=progress)
        with AtomicFile(args.output, args.force) as file:
            return decode_stream(source, file, progress=progress)
    if sink is not None:
        with open(path, "rb") as source:
            return decode_stream(source, sink, progress=progress)
    output = source_name(path) if args.output is None else args.output
    return decode_file(path, output, threads=args.threads, force=args.force, progress=progress)


@contextmanager
def _standard_output() -> Iterator[BinaryIO]:
    """Standard output with a buffer of its own, so that what could not be written is not tried again at exit."""
    if sys.stdout is None:
        raise LazyWeightsError("standard output is closed")
    if is_terminal(sys.stdout):
        raise LazyWeightsError("standard output is a terminal: name a file with -o, or pipe it on")
    sink = io.BufferedWriter(io.FileIO(sys.stdout.fileno(), "w", closefd=False), BUFFER_BYTES)
    try:
        yield sink
        sink.flush()
    finally:
        with suppress(OSError):
            sink.close()


def _standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise LazyWeightsError("standard input is closed")
    if is_terminal(sys.stdin):
        raise LazyWeightsError("standard input is a terminal: pipe a coded file in, or name one")
    return sys.stdin.buffer
