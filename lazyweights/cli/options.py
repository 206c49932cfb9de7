"""Options that several verbs share."""

from __future__ import annotations

import argparse


def thread_count(text: str) -> int:
    """Parse the argument of ``-T``."""
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads (0 = all cores)")
    return count


def add_parser(verbs: argparse._SubParsersAction, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    """Add the parser of a verb."""
    parser: argparse.ArgumentParser = verbs.add_parser(
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
