"""Options that several verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb; where `takes_program` is set, what follows ``--`` goes to `program`, as it is."""

    takes_program = False

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if not self.takes_program or args is None:
            return super().parse_known_args(args, namespace)
        before = list(args)
        program: list[str] = []
        if "--" in before:
            at = before.index("--")
            before, program = before[:at], before[at + 1 :]
        found, extras = super().parse_known_args(before, namespace)
        found.program = program
        return found, extras


def thread_count(text: str) -> int:
    """Parse the argument of ``-T``."""
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads (0 = all cores)")
    return count


def add_parser(verbs: argparse._SubParsersAction, name: str, summary: str, examples: str) -> VerbParser:
    """Add the parser of a verb."""
    parser: VerbParser = verbs.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add ``-T``."""
    parser.add_argument(
        "-T",
        "--threads",
        type=thread_count,
        default=0,
        metavar="N",
        help="worker threads, 0 = all cores (default: 0); the result does not depend on it",
    )


def add_output(parser: argparse.ArgumentParser, default: str, removes: str) -> None:
    """Add ``-o``, ``-f`` and ``--rm``."""
    parser.add_argument("-o", "--output", metavar="OUT", help=f"output file, with one input only (default: {default})")
    parser.add_argument("-f", "--force", action="store_true", help="replace an output that exists already")
    parser.add_argument("--rm", action="store_true", help=f"delete the input after {removes}; it is kept by default")


def add_verbosity(parser: argparse.ArgumentParser, quiet: str, verbose: str) -> None:
    """Add ``-q``, ``-v`` and ``--no-progress``."""
    parser.add_argument("-q", "--quiet", action="store_true", help=quiet)
    parser.add_argument("-v", "--verbose", action="store_true", help=verbose)
    parser.add_argument("--no-progress", action="store_true", help="draw no progress bar")
