"""``lazyweights exec``: run another program on decoded models that are in memory only."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

from lazyweights.cli.files import kind_of, show_progress
from lazyweights.cli.messages import FAILED, UsageError, describe_error, say, say_error
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.options import add_threads, add_verbosity
from lazyweights.cli.progress import progress_bar
from lazyweights.errors import FormatError, LazyWeightsError

EXAMPLES = """\
  lazyweights exec model.gguf.lw -- llama-cli -m {} -p "Hello"
  lazyweights exec model.gguf.lw -- python script.py --model={}
  lazyweights exec model.gguf.lw draft.gguf.lw -- llama-server -m {1} -md {2}

Each {} becomes the path of the decoded model, which is there as long as the program runs; it is in memory, no file on
disk is written. The exit code is the program's: 128 + N if signal N ended it, 127 if it is not found, 126 if it cannot
be executed."""

CANNOT_EXECUTE, NOT_FOUND = 126, 127
PLACE = re.compile(r"\{(\d*)\}")


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    parser = add_verb_parser(verbs, "exec", "run a program on decoded models that are in memory only", EXAMPLES)
    parser.takes_program = True
    parser.usage = f"{parser.prog} [options] FILE [FILE ...] -- PROGRAM [ARGUMENT ...]"
    parser.add_argument("files", nargs="+", metavar="FILE", help="coded file, or GGUF file, which is used as it is")
    add_threads(parser)
    add_verbosity(parser, "draw no progress bar", "say what is run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Decode the files into memory and run the program; return its exit code."""
    command: list[str] | None = args.program
    if not command:
        raise UsageError("the program is missing: lazyweights exec FILE -- PROGRAM ARGUMENTS, with {} for the model")
    _check_places(command, len(args.files))
    with ExitStack() as stack:
        try:
            paths = _model_paths(args, stack)
        except Exception as error:
            if args.verbose and not isinstance(error, LazyWeightsError | OSError | MemoryError):
                import traceback

                traceback.print_exc()
            say_error(describe_error(error))
            return FAILED
        command = _substitute(command, paths)
        if args.verbose:
            say(shlex.join(command))
        return _run_program(command)


def _check_places(command: Sequence[str], n_files: int) -> None:
    numbers = {number for argument in command for number in PLACE.findall(argument)}
    if n_files > 1 and "" in numbers:
        raise UsageError(f"with {n_files} files write {{1}} to {{{n_files}}} instead of {{}}")
    if not numbers & {"", *map(str, range(1, n_files + 1))}:
        raise UsageError("no argument of the program has {}, which stands for the path of the decoded model")


def _substitute(command: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Put the paths in their places.

    >>> _substitute(["p", "-m", "{}", "--draft={1}", "a{2}"], ["/m.gguf"])
    ['p', '-m', '/m.gguf', '--draft=/m.gguf', 'a{2}']
    """

    def path(match: re.Match[str]) -> str:
        number = int(match[1] or 1)
        return paths[number - 1] if 1 <= number <= len(paths) else match[0]

    return [PLACE.sub(path, argument) for argument in command]


def _model_paths(args: argparse.Namespace, stack: ExitStack) -> list[str]:
    """Return a path of each model with a name that ends in .gguf; it is valid as long as the stack."""
    from lazyweights.llama.memory_file import model_path

    paths: list[str] = []
    folder = ""
    for source in args.files:
        kind, description = kind_of(source)
        if kind == "other":
            raise FormatError(f"neither a GGUF file nor a coded file: it looks like {description}", path=source)
        with progress_bar(os.path.basename(source), show_progress(args) and kind == "coded") as progress:
            found = stack.enter_context(model_path(source, threads=args.threads, progress=progress))
        if not found.is_coded:
            paths.append(found.path)
            continue
        folder = folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="lazyweights-"))
        name = os.path.basename(source).removesuffix(".lw").removesuffix(".gguf")
        link = os.path.join(folder, f"{name}.gguf")
        if os.path.lexists(link):
            link = os.path.join(folder, f"{name}-{len(paths) + 1}.gguf")
        os.symlink(found.path, link)
        paths.append(link)
    return paths


def _run_program(command: list[str]) -> int:
    with _forwarded_signals() as forwarder:
        try:
            process = subprocess.Popen(command)
        except OSError as error:
            say_error(describe_error(error, command[0]))
            return NOT_FOUND if isinstance(error, FileNotFoundError | NotADirectoryError) else CANNOT_EXECUTE
        forwarder.start(process)
        code = process.wait()
    return 128 - code if code < 0 else code


class _Forwarder:
    """A signal handler that passes signals on to a process, those too that come before it has started."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def start(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        for number in self._early:
            process.send_signal(number)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGINT, getattr(signal, "SIGQUIT", None)) and _terminal_has_sent_it_to_all():
            return
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


@contextmanager
def _forwarded_signals() -> Iterator[_Forwarder]:
    forwarder = _Forwarder()
    if threading.current_thread() is not threading.main_thread():
        yield forwarder
        return
    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup: the program ignores it too
            before[number] = signal.signal(number, forwarder)
    try:
        yield forwarder
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminal_has_sent_it_to_all() -> bool:
    """Whether a terminal's Ctrl-C reaches the program without help: it goes to all processes in the foreground."""
    if sys.platform == "win32":
        return True
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
