"""The ``lazyweights`` command: choose the verb, map what it raises to exit codes, leave nothing behind.

Exit codes: 0 all done; 1 a file failed or differs; 2 the arguments make no sense; 130 and 143 stopped by Ctrl-C and by
SIGTERM. A signal unwinds the stack like an exception, so that temporary files are deleted on the way.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import lazyweights
from lazyweights.cli import (
    capture,
    decode,
    encode,
    execute,
    import_gptq,
    inspect,
    perplexity,
    quantize,
    report,
    run,
    simulate,
    stock_quantize,
    verify,
)
from lazyweights.cli.messages import FAILED, INTERRUPTED, PROGRAM, USAGE, UsageError, describe_error, say, say_error
from lazyweights.cli.options import VerbParser

_SHORT_VERBS = {"-d": "decode", "-t": "verify", "-l": "inspect"}

_EPILOG = """\
examples:
  lazyweights encode model.gguf        write model.gguf.lw
  lazyweights decode model.gguf.lw     write model.gguf, byte for byte what it was
  lazyweights inspect model.gguf.lw    sizes and bits per weight, by tensor type
  lazyweights run model.gguf.lw -p "Once upon a time"
  lazyweights exec model.gguf.lw -- llama-cli -m {}

-d, -t and -l as the first argument stand for decode, verify and inspect, as in zstd.
Exit codes: 0 ok, 1 failed or mismatch, 2 usage, 130 interrupted, 143 terminated."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Lossless entropy coding of GGUF model files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {lazyweights.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=VerbParser)
    for module in (
        encode, decode, verify, inspect, perplexity, run, execute, capture, stock_quantize, quantize, import_gptq, report,
        simulate,
    ):  # fmt: skip
        module.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; those of the process if it is not given.

    Returns
    -------
    int
        Exit code. Errors in the arguments and ``--help`` end in SystemExit, as argparse does it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _SHORT_VERBS:
        arguments[0] = _SHORT_VERBS[arguments[0]]
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may not fit the locale's encoding
    args = build_parser().parse_args(arguments)
    # A full collection of what numba loads takes some 30 ms, and a command has few cycles to collect.
    gc.set_threshold(100_000, 20, 20)
    if args.verbose:
        import logging

        logging.basicConfig(level=logging.INFO, format=f"{PROGRAM}: %(message)s")
    try:
        with _signals_unwind():
            code = int(args.run(args))
            if sys.stdout is not None:
                sys.stdout.flush()
        return code
    except UsageError as error:
        say_error(str(error))
        return USAGE
    except KeyboardInterrupt:
        say(f"{PROGRAM}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return FAILED
    except OSError as error:
        _drop_stdout()
        say_error(describe_error(error, "standard output"))
        return FAILED
    finally:
        _remove_unfinished()


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit while the body runs."""

    def stop(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP: keep that
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _drop_stdout() -> None:
    """Let the interpreter flush what is left of stdout into nothing instead of failing again."""
    try:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
    except (OSError, ValueError, AttributeError):
        pass


def _remove_unfinished() -> None:
    atomic = sys.modules.get("lazyweights.container.atomic")
    if atomic is not None:
        atomic.remove_unfinished()


if __name__ == "__main__":
    sys.exit(main())
