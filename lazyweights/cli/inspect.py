"""``lazyweights inspect``: say what GGUF files and coded files hold."""

from __future__ import annotations

import argparse
import os
from typing import Any

from lazyweights.cli.files import STDIO, kind_of, show_progress, work_through
from lazyweights.cli.messages import UsageError
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.options import add_threads, add_verbosity
from lazyweights.cli.progress import progress_bar
from lazyweights.errors import FormatError

EXAMPLES = """\
  lazyweights inspect model.gguf                      sizes and bits per weight, by tensor type
  lazyweights inspect --estimate model.gguf           what coding would save, without writing anything
  lazyweights inspect --tensors model.gguf.lw         the same for each tensor
  lazyweights inspect --json model.gguf.lw | jq .saving
  diff <(lazyweights inspect --hash model.gguf) <(lazyweights inspect --hash model.gguf.lw)

entropy: order-0 entropy of the codes in bits per weight, a bound for a coder with one table; (sample): of the first
rows of each tensor, all rows with --estimate. payload bpw: the coded codes alone. bpw: everything counted (codes,
scales, tables, index, padding). (other): what belongs to no tensor (header, metadata, tables, gaps).
--json prints one document for a file, and one line for each of several files."""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    parser = add_verb_parser(verbs, "inspect", "say what GGUF files and coded files hold", EXAMPLES)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="GGUF file, coded file, or directory to search for both"
    )
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="print JSON")
    style.add_argument("--markdown", action="store_true", help="print Markdown")
    style.add_argument("--hash", action="store_true", help="print SHA-256 lines of tensors and file (reads all of it)")
    style.add_argument("--data-offset", action="store_true", help="print only where the tensor data starts")
    style.add_argument("--data-alignment", action="store_true", help="print only the alignment of the tensor data")
    parser.add_argument("--json-array", action="store_true", help="JSON with long metadata arrays in full")
    parser.add_argument(
        "--tensors",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="list each tensor (default: in JSON only)",
    )
    parser.add_argument("--estimate", action="store_true", help="say what coding a GGUF file would save; write nothing")
    add_threads(parser)
    add_verbosity(parser, "draw no progress bar", "print all metadata")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Inspect the files; return the exit code."""
    if STDIO in args.files:
        raise UsageError("inspect reads a file, not standard input")
    if args.json_array and (args.markdown or args.hash or args.data_offset or args.data_alignment):
        raise UsageError("--json-array belongs to --json")
    args.json = args.json or args.json_array
    args.several = len(args.files) > 1 or os.path.isdir(args.files[0])
    return work_through(args, (".gguf", ".lw"), lambda path: _inspect(args, path))


def _inspect(args: argparse.Namespace, path: str) -> None:
    from lazyweights.container.inspect import inspect_file

    kind, description = kind_of(path)
    if kind == "other":
        raise FormatError(f"neither a GGUF file nor a coded file: it looks like {description}", path=path)
    if args.hash:
        from lazyweights.cli.hashes import print_hashes

        print_hashes(path, kind)
        return
    estimate = args.estimate and kind == "gguf"
    options: dict[str, Any] = {"max_array": None} if args.json_array else {}
    with progress_bar(os.path.basename(path), estimate and show_progress(args)) as progress:
        report = inspect_file(path, estimate=estimate, threads=args.threads, progress=progress, **options)
    if args.data_offset or args.data_alignment:
        print(report.data_offset if args.data_offset else report.alignment)
    elif args.json:
        from lazyweights.cli.report_json import report_json

        print(report_json(report, tensors=args.tensors is not False, indent=None if args.several else 2))
    else:
        from lazyweights.cli.report_text import print_report

        print_report(report, tensors=bool(args.tensors), all_metadata=args.verbose, markdown=args.markdown)
