"""``lazyweights report``: stock formats and tuned files of a model, coded and uncoded, judged by llama.cpp."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from lazyweights.cli.capture import positive
from lazyweights.cli.files import show_progress
from lazyweights.cli.messages import (
    FAILED,
    OK,
    UsageError,
    describe_error,
    say,
    say_error,
    say_warning,
    seconds_text,
    size_text,
)
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.options import add_threads, add_verbosity
from lazyweights.cli.step_progress import StepCallback, step_bar
from lazyweights.errors import LazyWeightsError

if TYPE_CHECKING:
    from lazyweights.reports.points import Point

EXAMPLES = """\
  lazyweights report model-f16.gguf -f wiki.test.raw --chunks 40 --calibration wiki.train.raw -o report
  lazyweights report model-f16.gguf -f wiki.test.raw --hessians model.hessians -o report --budgets 1,2,5
  lazyweights report model-f16.gguf -f wiki.test.raw -o report --formats Q8_0,Q4_K_M --no-tuned

It writes report.json, report.md and report.html. What it measured stays in the folder, so that a second run only measures what is
new. Models are written beside it one at a time, and deleted; the base logits take 2 bytes for each scored token (half of them)
times the size of the vocabulary while it runs. This needs the extras llama and report: pip install 'lazyweights[llama,report]'"""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    summary = "compare stock formats and tuned files of a model: sizes, coded sizes, quality"
    parser = add_verb_parser(verbs, "report", summary, EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="GGUF file of floats, or its coded file")
    parser.add_argument("-f", "--file", required=True, metavar="TEXT", help="text to judge the models on")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder of the report, made if it is not there")
    parser.add_argument(
        "--formats", type=format_list, metavar="LIST", help="stock formats, with commas between (default: 16 from Q8_0 to Q2_K)"
    )
    parser.add_argument(
        "--budgets", type=budget_list, metavar="LIST",
        help="percent of perplexity over that of the source, with commas between (default: 1,2,5,10)",
    )  # fmt: skip
    parser.add_argument("-c", "--ctx-size", type=positive, default=512, metavar="N", help="tokens of a chunk (default: 512)")
    parser.add_argument("--chunks", type=positive, metavar="N", help="how many chunks at most (default: all of the text)")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--calibration", metavar="TEXT", help="text on which to measure the inputs of weights, for the quantizers")
    given.add_argument("--hessians", metavar="FILE", help="instead: Hessians that capture wrote, or an imatrix file")
    parser.add_argument("--curvature", metavar="FILE", help="for tuned files: what quantize --save-hessians wrote")
    parser.add_argument(
        "--calibration-chunks", type=positive, default=64, metavar="N", help="chunks of --calibration at most (default: 64)"
    )
    parser.add_argument("--no-tuned", action="store_true", help="stock formats only")
    parser.add_argument("--keep", action="store_true", help="keep the base logits and what was measured on --calibration")
    parser.add_argument("--keep-models", action="store_true", help="keep the models and their coded files, in DIR/models")
    add_threads(parser)
    add_verbosity(parser, "print errors only", "print what llama.cpp says too")
    parser.set_defaults(run=run)


def format_list(text: str) -> tuple[str, ...]:
    """Parse the argument of ``--formats``.

    >>> format_list("q8_0, Q4_K_M")
    ('q8_0', 'Q4_K_M')
    """
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of formats: Q8_0,Q4_K_M")
    return found


def budget_list(text: str) -> tuple[float, ...]:
    """Parse the argument of ``--budgets``.

    >>> budget_list("1,2.5")
    (1.0, 2.5)
    """
    try:
        found = tuple(float(part.removesuffix("%")) for part in text.replace(" ", "").split(","))
        if not all(0 < budget < math.inf for budget in found):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of budgets above 0, in percent: 1,2,5") from None
    return tuple(dict.fromkeys(found))


def run(args: argparse.Namespace) -> int:
    """Make the report; return the exit code."""
    if args.ctx_size < 4 or args.ctx_size % 2:
        raise UsageError(f"-c {args.ctx_size}: the context has to be even and at least 4, such as -c 512")
    try:
        return _report(args)
    except (LazyWeightsError, OSError, MemoryError) as error:
        say_error(describe_error(error, args.model))
        return FAILED


def _report(args: argparse.Namespace) -> int:
    from lazyweights.reports.model_report import DEFAULT_BUDGETS, DEFAULT_FORMATS, ReportOptions
    from lazyweights.reports.report_files import make_report
    from lazyweights.reports.report_tables import headline

    options = ReportOptions(
        formats=args.formats or DEFAULT_FORMATS, budgets=args.budgets or DEFAULT_BUDGETS, n_ctx=args.ctx_size,
        n_chunks=args.chunks, calibration_chunks=args.calibration_chunks, threads=args.threads, tuned=not args.no_tuned,
        keep=args.keep, keep_models=args.keep_models,
    )  # fmt: skip
    with step_bar(args.model, show_progress(args)) as bar:
        shown = _Shown(bar, args.quiet)
        report = make_report(
            args.model, args.file, args.output, hessians=args.hessians, curvature=args.curvature, calibration=args.calibration,
            options=options, watcher=shown,
        )  # fmt: skip
    if not args.quiet:
        say(headline(report.document))
        found = report.measurements
        say(f"{', '.join(report.paths)}: {found.n_measured} points measured, {found.n_reused} taken from {args.output}")
    return FAILED if shown.n_failed else OK


class _Shown:
    """Prints a line for each point, and moves the bar."""

    def __init__(self, bar: StepCallback | None, quiet: bool) -> None:
        self._bar, self._quiet = bar, quiet
        self.n_failed = 0

    def stage(self, what: str, done: int, total: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar(done, total, what)

    def point(self, point: Point, reused: bool) -> None:
        """Print what was found."""
        if self._quiet:
            return
        sizes = f"{size_text(point.gguf_bytes)}, coded {size_text(point.coded_bytes)}"
        quality = f"PPL {point.ppl.value:.4f}"
        if point.kld is not None:
            quality += f" ({100 * point.increase:+.2f} %), KLD {point.kld.value:.5f}"
        how = "taken from the folder" if reused else seconds_text(sum(point.seconds.values()))
        say(f"{point.name}: {sizes}, {quality}; {how}")

    def left_out(self, name: str, reason: str) -> None:
        """Print why something is missing; a format that failed makes the command fail, a missing quantizer does not."""
        if name == "tuned":
            if not self._quiet:
                say_warning(f"tuned files are left out: {reason}")
        else:
            say_error(f"{name} is left out: {reason}")
            self.n_failed += 1
