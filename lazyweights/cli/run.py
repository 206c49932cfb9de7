"""``lazyweights run``: text from a model, straight from its coded file."""

from __future__ import annotations

import argparse
import codecs
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lazyweights.cli.files import is_terminal, kind_of, show_progress
from lazyweights.cli.messages import (
    FAILED,
    INTERRUPTED,
    OK,
    PROGRAM,
    UsageError,
    describe_error,
    printable,
    rate_text,
    say,
    say_error,
    seconds_text,
    size_text,
)
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.options import add_verbosity, thread_count
from lazyweights.cli.progress import progress_bar
from lazyweights.errors import FormatError, LazyWeightsError

if TYPE_CHECKING:
    from lazyweights.llama.generation import Generation
    from lazyweights.llama.model import Model

EXAMPLES = """\
  lazyweights run model.gguf.lw -p "Once upon a time"
  lazyweights run model.gguf.lw -f prompt.txt -n -1 --temp 0
  echo "2 + 2 =" | lazyweights run model.gguf.lw -p - -n 8 --seed 1
  lazyweights run model.gguf.lw -p "Hello" --seed 1 --compare model.gguf

The tensors are decoded into memory, never to a file. Options have llama-cli's names and defaults. Needs the extra
`llama`: pip install 'lazyweights[llama]'."""

_SAMPLING = {
    "--temp": (float, 0.8, "temperature; 0: the most probable token"),
    "--top-k": (int, 40, "choose among this many tokens; 0: all"),
    "--top-p": (float, 0.95, "choose among the tokens with this probability together; 1: all"),
    "--min-p": (float, 0.05, "leave out what is less probable than this share of the first; 0: nothing"),
    "--repeat-penalty": (float, 1.0, "against tokens seen lately; 1: none"),
    "--repeat-last-n": (int, 64, "what lately is, in tokens; -1: the whole context"),
}
MAX_SEED = 2**32 - 2


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    parser = add_verb_parser(verbs, "run", "generate text from a coded file or a GGUF file, with llama.cpp", EXAMPLES)
    parser.add_argument("file", metavar="FILE", help="coded file or GGUF file")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="what to go on from; - reads standard input")
    prompt.add_argument("-f", "--file", dest="prompt_file", metavar="PATH", help="file with the prompt")
    parser.add_argument(
        "-n", "--n-predict", type=int, default=128, metavar="N",
        help="tokens to generate at most, -1: until the model ends the text or the context is full (default: 128)",
    )
    parser.add_argument("-s", "--seed", type=int, default=-1, metavar="N", help="-1: a random one (default: -1)")
    for name, (kind, default, text) in _SAMPLING.items():
        parser.add_argument(name, type=kind, default=default, metavar="X" if kind is float else "N",
                            help=f"{text} (default: {default})")  # fmt: skip
    parser.add_argument(
        "-c", "--ctx-size", type=int, default=None, metavar="N",
        help="context in tokens, 0: what the model was trained with (default: what prompt and -n need)",
    )
    parser.add_argument(
        "-T", "--threads", type=thread_count, default=0, metavar="N",
        help="threads to decode and to compute with, 0 = all cores (default: 0)",
    )
    parser.add_argument(
        "--compare", metavar="GGUF", help="generate from this file too, in another process, and compare tokens and times"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the text as it comes")
    add_verbosity(parser, "print no measures", "print llama.cpp's log too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate; return the exit code."""
    if not -1 <= args.seed <= MAX_SEED:
        raise UsageError(f"--seed takes 0 to {MAX_SEED}, or -1 for a random one")
    if args.ctx_size is not None and args.ctx_size < 0:
        raise UsageError("-c takes a number of tokens")
    if args.repeat_penalty <= 0:
        raise UsageError("--repeat-penalty takes a number above 0")
    if args.seed < 0:
        args.seed = secrets.randbelow(MAX_SEED + 1)
    try:
        return _run(args)
    except (BrokenPipeError, UsageError):
        raise
    except Exception as error:
        if args.verbose and not isinstance(error, LazyWeightsError | OSError | MemoryError):
            import traceback

            traceback.print_exc()
        say_error(describe_error(error, args.file))
        return FAILED


def _run(args: argparse.Namespace) -> int:
    for path in filter(None, (args.file, args.compare)):
        kind, description = kind_of(path)
        if kind == "other":
            raise FormatError(f"neither a GGUF file nor a coded file: it looks like {description}", path=path)
    prompt = _read_prompt(args)
    report = _generate(args, prompt)
    if args.json:
        print(json.dumps(report, indent=1))
    interrupted = report["stop"] == "interrupted"
    reports = [report]
    code = INTERRUPTED if interrupted else OK
    if args.compare is not None and not interrupted:
        other = _generate_elsewhere(args, prompt)
        reports.append(other)
        if other["tokens"] != report["tokens"] or other["stop"] != report["stop"]:
            code = FAILED
    if not args.quiet and not args.json:
        _say_measures(reports)
    if code == FAILED:
        ours, theirs = report["tokens"], reports[1]["tokens"]
        equal = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
                     min(len(ours), len(theirs)))  # fmt: skip
        say_error(f"{args.compare}: the tokens differ after the first {equal}")
    return code


def _read_prompt(args: argparse.Namespace) -> bytes:
    if args.prompt_file is not None:
        with open(args.prompt_file, "rb") as file:
            return file.read().removesuffix(b"\n")  # as llama-cli does
    if args.prompt != "-":
        return os.fsencode(args.prompt)
    if sys.stdin is None:
        raise LazyWeightsError("standard input is closed")
    return sys.stdin.buffer.read().removesuffix(b"\n")


def _generate(args: argparse.Namespace, prompt: bytes) -> dict[str, Any]:
    """Load and generate, printing the text as it comes; return what came out and what it took."""
    from lazyweights.llama import library
    from lazyweights.llama.generation import Generation, context_size, prompt_tokens
    from lazyweights.llama.memory_file import prepare
    from lazyweights.llama.memory_use import memory_use
    from lazyweights.llama.model import Context, Model
    from lazyweights.llama.sampler import Sampling

    names = [option.lstrip("-").replace("-", "_") for option in _SAMPLING]
    sampling = Sampling(args.seed, **{name: getattr(args, name) for name in names})
    with progress_bar(os.path.basename(args.file), show_progress(args)) as progress:
        started = time.perf_counter()
        library.load()
        prepare(args.file)
        loading = time.perf_counter()
        model = Model(args.file, threads=args.threads, progress=progress)
        loaded = time.perf_counter()
    with model:
        tokens = prompt_tokens(model, prompt)
        n_ctx = context_size(model, tokens.size, args.n_predict, args.ctx_size)
        with Context(model, n_ctx=n_ctx, threads=args.threads) as context:
            generation = Generation(context, tokens, sampling, args.n_predict)
            text, stop = _print_text(model, generation, None if args.json else _writer())
            memory = memory_use()
        source = model.source
    return {
        "file": args.file,
        "is_coded": source.is_coded,
        "seed": args.seed,
        "n_prompt": int(tokens.size),
        "tokens": generation.tokens,
        "text": text,
        "stop": stop,
        "start_seconds": loading - started,
        "load_seconds": loaded - loading,
        "decode_seconds": source.seconds if source.is_coded else None,
        "model_bytes": source.n_bytes,
        "prompt_rate": generation.prompt_rate,
        "token_rate": generation.token_rate,
        "peak_bytes": memory and memory.peak,
        "anonymous_bytes": memory and memory.anonymous,
        "file_bytes": memory and memory.file,
        "shared_bytes": memory and memory.shared,
    }


def _print_text(model: Model, generation: Generation, write: Callable[[str], None] | None) -> tuple[str, str]:
    """Print the text as it comes; return it, and why it ended. Ctrl-C ends it too."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span tokens
    parts = []

    def add(text: str) -> None:
        parts.append(text)
        if write is not None and text:
            write(text)

    try:
        for token in generation:
            add(decoder.decode(model.piece(token)))
        stop = generation.stop
    except KeyboardInterrupt:
        stop = "interrupted"
    add(decoder.decode(b"", final=True))
    if write is not None:
        write("\n")
    return "".join(parts), stop


def _writer() -> Callable[[str], None]:
    if sys.stdout is None:
        raise LazyWeightsError("standard output is closed")
    stream = sys.stdout
    to_terminal = is_terminal(stream)

    def write(text: str) -> None:
        if to_terminal:  # a model may write anything: no escape sequences
            text = "".join(char if char in "\n\t" else printable(char) for char in text)
        stream.write(text)
        stream.flush()

    return write


def _generate_elsewhere(args: argparse.Namespace, prompt: bytes) -> dict[str, Any]:
    """Generate from the file to compare with, in a process of its own, so that its memory is its own."""
    options = [f"{option}={getattr(args, option.lstrip('-').replace('-', '_'))}" for option in _SAMPLING]
    if args.ctx_size is not None:
        options.append(f"--ctx-size={args.ctx_size}")
    command = [
        sys.executable, "-m", "lazyweights", "run", "--json", "--prompt=-", f"--n-predict={args.n_predict}",
        f"--seed={args.seed}", f"--threads={args.threads}", *options, "--", args.compare,
    ]  # fmt: skip
    done = subprocess.run(command, input=prompt + b"\n", stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise LazyWeightsError("cannot generate from this file to compare with", path=args.compare)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _say_measures(reports: list[dict[str, Any]]) -> None:
    from lazyweights.cli.tables import Column, print_table

    report, *others = reports
    columns = [Column("", is_text=True), *(Column("coded file" if r["is_coded"] else "GGUF file") for r in reports)]
    rows = [
        [name, *map(show, reports)]
        for name, show in {
            "start (imports, kernels)": lambda r: _precise(r["start_seconds"]),
            "load": lambda r: _precise(r["load_seconds"]),
            "of it decoding": _decoding,
            "prompt": lambda r: f"{r['n_prompt']} tokens, {_rate(r['prompt_rate'])}",
            "generation": lambda r: f"{len(r['tokens'])} tokens, {_rate(r['token_rate'])}",
            "peak memory": lambda r: _size(r["peak_bytes"]),
            "model, mapped": lambda r: size_text(r["model_bytes"]),
        }.items()
    ]
    if others:
        other = others[0]
        columns.append(Column("ratio"))
        for row, key in zip(
            rows,
            ("start_seconds", "load_seconds", "", "prompt_rate", "token_rate", "peak_bytes", ""),
            strict=True,
        ):
            both = report.get(key) and other.get(key)
            row.append(f"{report[key] / other[key]:.2f}" if both else "")
    print_table(columns, rows, to_stderr=True)
    endings = {"end": "the model ended the text", "length": "-n reached", "context": "the context is full"}
    say(f"{PROGRAM}: seed {report['seed']}; {endings.get(report['stop'], report['stop'])}")
    if others and others[0]["tokens"] == report["tokens"]:
        say(f"{PROGRAM}: the same {len(report['tokens'])} tokens from both files")


def _precise(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 10 else seconds_text(seconds)


def _decoding(report: dict[str, Any]) -> str:
    seconds = report["decode_seconds"]
    return "" if seconds is None else f"{_precise(seconds)}, {rate_text(report['model_bytes'], seconds)}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}/s"


def _size(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else size_text(n_bytes)
