"""``lazyweights quantize``: the tuned quantizer, to a step, a size or a budget of perplexity."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lazyweights.cli.capture import byte_count, positive
from lazyweights.cli.files import identity, show_progress
from lazyweights.cli.messages import (
    FAILED,
    OK,
    UsageError,
    bpw_text,
    describe_error,
    say,
    say_error,
    say_warning,
    seconds_text,
    size_text,
)
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.options import add_threads, add_verbosity
from lazyweights.cli.progress import progress_bar
from lazyweights.cli.step_progress import step_bar
from lazyweights.errors import LazyWeightsError

if TYPE_CHECKING:
    from lazyweights.quant.rate_control import StepSearch, Trial
    from lazyweights.quant.tuned import TunedQuantizer, TunedResult

EXAMPLES = """\
  lazyweights quantize model-f16.gguf -o small.gguf.lw --calibration wiki.train.raw
  lazyweights quantize model-f16.gguf -o small.gguf.lw --hessians model.curvature --bpw 4.0
  lazyweights quantize model-f16.gguf -o small.gguf.lw --hessians model.curvature --target-size 80M
  lazyweights quantize model-f16.gguf -o small.gguf.lw --hessians model.curvature --budget-ppl 1% --evaluation wiki.valid.raw

The output is a GGUF that llama.cpp runs, or its coded file if the name ends in .lw. Sizes and bits per weight are those of the
whole coded file. Without a target the step is 1. A run that was stopped goes on where it was if it is started again.
Calibrating and evaluating need llama.cpp: pip install 'lazyweights[llama]'."""

DEFAULT_CHUNKS, EVALUATION_CHUNKS = 64, 40

MARKER = "lazyweights-work"
"""In the work folder, to tell it from a folder of somebody else's."""


def percentage(text: str) -> float:
    """Parse the argument of ``--budget-ppl``; returns a fraction.

    >>> percentage("1%"), percentage("2.5")
    (0.01, 0.025)
    """
    try:
        found = float(text.strip().removesuffix("%")) / 100
        if not 0 < found < 100:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage above 0: 1%") from None
    return found


def above_zero(text: str) -> float:
    """Parse a number above 0."""
    try:
        found = float(text)
        if not 0 < found < float("inf"):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0") from None
    return found


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    parser = add_verb_parser(verbs, "quantize", "quantize a model so that its codes compress", EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="GGUF file of floats, or its coded file")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="GGUF file to write, or coded file (.lw)")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--budget-ppl", type=percentage, metavar="P%", help="the smallest file whose perplexity rises by no more than this"
    )
    target.add_argument("--bpw", type=above_zero, metavar="X", help="bits per weight of the coded file")
    target.add_argument("--target-size", type=byte_count, metavar="SIZE", help="size of the coded file: 80M")
    target.add_argument(
        "--step", type=above_zero, metavar="X",
        help="global step; twice the step saves about a bit per weight and costs four times the divergence (default: 1)",
    )  # fmt: skip
    known = parser.add_mutually_exclusive_group(required=True)
    known.add_argument("--calibration", metavar="TEXT", help="text on which to measure what each weight matters")
    known.add_argument("--hessians", metavar="FILE", help="instead: what capture wrote (curvature or Hessians), or an imatrix")
    parser.add_argument("-c", "--ctx-size", type=positive, default=512, metavar="N", help="tokens of a chunk (default: 512)")
    parser.add_argument(
        "--chunks", type=positive, default=DEFAULT_CHUNKS, metavar="N",
        help=f"chunks of the calibration text at most (default: {DEFAULT_CHUNKS})",
    )  # fmt: skip
    parser.add_argument("--save-hessians", metavar="FILE", help="keep what --calibration measured, for --hessians")
    parser.add_argument("--evaluation", metavar="TEXT", help="text on which --budget-ppl is measured")
    parser.add_argument(
        "--evaluation-chunks", type=positive, default=EVALUATION_CHUNKS, metavar="N",
        help=f"chunks of it at most (default: {EVALUATION_CHUNKS})",
    )  # fmt: skip
    parser.add_argument(
        "--container", default="auto", metavar="TYPE",
        help="format of the codes: auto, Q8_0, Q6_K, Q5_K, Q4_K, Q3_K, Q2_K, Q5_0, Q5_1, Q4_0, Q4_1 (default: auto)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the calibration (default: 0)")
    parser.add_argument(
        "--allow-requantize", action="store_true", help="take a model that is quantized already; quality suffers"
    )
    parser.add_argument("--leave-output-tensor", action="store_true", help="leave token embedding and output matrix as they are")
    parser.add_argument(
        "--rate-weight", type=float, default=0.0, metavar="X",
        help="what a bit costs when rounding, in squared steps (default: 0)",
    )  # fmt: skip
    parser.add_argument("-f", "--force", action="store_true", help="replace an output that exists already")
    add_threads(parser)
    add_verbosity(parser, "print errors only", "print what became of each tensor too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Quantize; return the exit code."""
    if args.budget_ppl is not None and args.evaluation is None:
        raise UsageError("--budget-ppl is measured on a text: name it with --evaluation (not the one you report on)")
    if args.ctx_size < 4 or args.ctx_size % 2:
        raise UsageError(f"-c {args.ctx_size}: the context has to be even and at least 4, such as -c 512")
    command = _Command(args)
    try:
        command.run()
    except (LazyWeightsError, OSError, MemoryError) as error:
        say_error(describe_error(error, args.model))
        return FAILED
    finally:
        command.leave()
    return OK


@dataclass(frozen=True)
class _Made:
    """A quantized model in the work folder."""

    step: float
    path: str
    result: TunedResult


class _Command:
    """One run of the verb. Its work folder lies beside the output and outlives an interruption."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = args.output + ".work"
        self.made: _Made | None = None
        self.coded_bytes = 0
        self.measured: str | None = None
        self.text = b""
        self.is_ours = False

    def run(self) -> None:
        from lazyweights.container.atomic import CODED_SUFFIX
        from lazyweights.llama.chunks import read_text
        from lazyweights.quant.containers import find_container
        from lazyweights.quant.tuned import TunedQuantizer

        args = self.args
        is_coded = args.output.endswith(CODED_SUFFIX)
        self._check_outputs()
        if args.container != "auto":
            find_container(args.container)
        if args.evaluation is not None:
            self.text = read_text(args.evaluation)
        self._make_work_folder()
        with TunedQuantizer(
            args.model, self._hessians(), threads=args.threads, allow_requantize=args.allow_requantize, container=args.container,
            rate_weight=args.rate_weight, quantize_embedding=not args.leave_output_tensor,
        ) as quantizer:  # fmt: skip
            if quantizer.left_out:
                shown = ", ".join(quantizer.left_out[:3]) + (" ..." if len(quantizer.left_out) > 3 else "")
                say_warning(f"{len(quantizer.left_out)} matrices stay as they are, nothing being known of their inputs: {shown}")
            self._search(quantizer)
        assert self.made is not None
        if is_coded and not self.coded_bytes:
            self._encode()
        self._check_outputs()  # hours may have passed
        os.replace(self._coded_path if is_coded else self.made.path, args.output)
        if args.save_hessians is not None and self.measured is not None:
            shutil.move(self.measured, args.save_hessians)
        shutil.rmtree(self.work, ignore_errors=True)
        self._report(self.made.result, is_coded)

    def _check_outputs(self) -> None:
        """See that outputs may be written, and that none is an input or the other output."""
        from lazyweights.container.atomic import check_output

        args = self.args
        outputs = [path for path in (args.output, args.save_hessians) if path is not None]
        for output in outputs:
            for source in (args.model, args.hessians, args.calibration, args.evaluation):
                if source is not None:
                    check_output(output, args.force, source)
        if len({os.path.abspath(path) for path in outputs}) < len(outputs):
            raise UsageError("-o and --save-hessians name the same file")

    def _make_work_folder(self) -> None:
        """Make the work folder, or go on in one that this verb has made."""
        marker = os.path.join(self.work, MARKER)
        try:
            os.mkdir(self.work)
        except FileExistsError:
            if not os.path.exists(marker):
                raise LazyWeightsError("this is in the way: work goes here until it is done", path=self.work) from None
        with open(marker, "a"):
            pass
        self.is_ours = True

    def leave(self) -> None:
        """Remove the work folder if there is nothing to go on from; otherwise say what it is."""
        if not self.is_ours or not os.path.isdir(self.work):
            return
        tensors = os.path.join(self.work, "tensors")
        with suppress(OSError):
            os.rmdir(tensors)
        kept = set(os.listdir(self.work))
        if kept <= {MARKER, "model.gguf", "model.gguf.lw"}:
            shutil.rmtree(self.work, ignore_errors=True)
        else:
            say(f"{self.work}: kept; the same command goes on from there. Delete it to start anew")

    def _hessians(self) -> str:
        """Return the file with what is known of the inputs, measured now where it is not there."""
        args = self.args
        if args.hessians is not None:
            return str(args.hessians)
        from lazyweights.quant.knowledge_file import measure_inputs

        seen = [identity(args.model), identity(args.calibration), args.ctx_size, args.chunks, args.seed]
        self.measured = os.path.join(self.work, f"inputs-{_key(seen)}.safetensors")
        if os.path.exists(self.measured):
            return self.measured
        with step_bar(f"{os.path.basename(args.model)}: calibrate", show_progress(args)) as bar:
            found = measure_inputs(
                args.model, args.calibration, self.measured, n_ctx=args.ctx_size, n_chunks=args.chunks, seed=args.seed,
                threads=args.threads, allow_requantize=args.allow_requantize, progress=bar,
            )  # fmt: skip
        if found.kind != "curvature":
            say_warning(f"{found.reason}: steps go by the kind of tensor, which costs size")
        return self.measured

    def _search(self, quantizer: TunedQuantizer) -> None:
        """Leave the model of the best step in `made`."""
        from lazyweights.quant.rate_control import largest_step_within_loss, smallest_step_within_size

        args = self.args
        found: StepSearch
        if args.budget_ppl is not None:
            what = f"perplexity within {100 * args.budget_ppl:g} %"
            trials = self._trials("loss")
            loss = self._loss(quantizer, trials)
            found = largest_step_within_loss(trials.measured(loss), args.budget_ppl, known=trials.known())
        elif args.bpw is not None or args.target_size is not None:
            limit = args.target_size if args.target_size is not None else args.bpw
            what = f"{size_text(args.target_size)}" if args.target_size is not None else f"{args.bpw:g} bits per weight"
            trials = self._trials("bpw" if args.bpw is not None else "bytes")
            size = functools.partial(self._size, quantizer, as_bpw=args.bpw is not None)
            found = smallest_step_within_size(trials.measured(size), limit, known=trials.known())
        else:
            self._make(quantizer, args.step or 1.0)
            return
        tried = ", ".join(f"{trial.step:.4g} ({trial.value:.4g})" for trial in trials.known())
        if found.best is None:
            shutil.rmtree(self.work, ignore_errors=True)
            raise LazyWeightsError(f"no step that was tried gives {what}; tried were {tried}")
        self._make(quantizer, found.best.step)
        if not args.quiet:
            say(f"step {found.best.step:.4g} for {what}; tried were {tried}")

    def _trials(self, kind: str) -> _Trials:
        """Return what an interrupted run has measured with the same inputs and settings."""
        args = self.args
        known = args.hessians or self.measured
        assert known is not None
        seen = [
            kind, identity(args.model), identity(known), args.container, args.rate_weight, args.leave_output_tensor,
            args.evaluation and identity(args.evaluation), args.ctx_size, args.evaluation_chunks,
        ]  # fmt: skip
        return _Trials(os.path.join(self.work, f"trials-{_key(seen)}.json"))

    def _make(self, quantizer: TunedQuantizer, step: float) -> _Made:
        if self.made is not None and self.made.step == step:
            return self.made
        path = os.path.join(self.work, "model.gguf")
        self.made, self.coded_bytes = None, 0
        with step_bar(f"{os.path.basename(self.args.model)}: step {step:.4g}", show_progress(self.args)) as bar:
            result = quantizer.quantize(path, step, progress=bar, force=True, parts=os.path.join(self.work, "tensors"))
        self.made = _Made(step, path, result)
        return self.made

    @property
    def _coded_path(self) -> str:
        return os.path.join(self.work, "model.gguf.lw")

    def _encode(self) -> None:
        from lazyweights.container.encoder import encode_file

        assert self.made is not None
        with progress_bar(os.path.basename(self.args.output), show_progress(self.args)) as bar:
            found = encode_file(self.made.path, self._coded_path, threads=self.args.threads, force=True, progress=bar)
        self.coded_bytes = found.coded_bytes

    def _size(self, quantizer: TunedQuantizer, step: float, *, as_bpw: bool) -> float:
        made = self._make(quantizer, step)
        self._encode()
        return 8 * self.coded_bytes / made.result.n_weights if as_bpw else float(self.coded_bytes)

    def _loss(self, quantizer: TunedQuantizer, trials: _Trials) -> Callable[[float], float]:
        """Return what measures how far perplexity rises above that of the source."""
        from lazyweights.llama.perplexity import perplexity

        args = self.args

        def measured(path: str, what: str) -> float:
            with step_bar(f"{os.path.basename(args.model)}: {what}", show_progress(args)) as bar:
                total = 0

                def started(evaluation: Any) -> None:
                    nonlocal total
                    total = evaluation.n_chunks

                return perplexity(
                    path, self.text, n_ctx=args.ctx_size, n_chunks=args.evaluation_chunks, threads=args.threads, started=started,
                    chunk_done=None if bar is None else lambda done, _: bar(done, total, "perplexity, chunks"),
                ).ppl.value  # fmt: skip

        if trials.base is None:
            trials.base = measured(args.model, "source")
        base = trials.base
        return lambda step: measured(self._make(quantizer, step).path, f"step {step:.4g}") / base - 1

    def _report(self, result: TunedResult, is_coded: bool) -> None:
        args = self.args
        damp_frac = result.settings["damp_frac"]
        lost = [report for report in result.tensors if report["fallback"] is not None or report["damp_frac"] > damp_frac]
        for report in lost:
            how = f"{report['fallback']} in place of the Hessian" if report["fallback"] else f"damping {report['damp_frac']:g}"
            say_warning(f"{report['name']}: {how}")
        dropped = max(report["n_dropped"] for report in result.tensors)
        if dropped:
            say_warning(f"up to {dropped} tokens of the calibration were left out: not finite")
        if args.quiet:
            return
        if args.verbose:
            for report in result.tensors:
                say(
                    f"  {report['name']}: {report['type']}, {report['entropy_bits']:.3f} bits a weight, "
                    f"{100 * report['widened']:.2f} % of the sub-blocks widened"
                )
        bits = sum(report["entropy_bits"] * report["n_weights"] for report in result.tensors)
        n = sum(report["n_weights"] for report in result.tensors)
        sizes = size_text(result.output_bytes)
        bpw = bpw_text(result.output_bytes, result.n_weights)
        if is_coded:
            sizes += f" -> {size_text(self.coded_bytes)}"
            bpw += f" -> {bpw_text(self.coded_bytes, result.n_weights)}"
        reused = f", {result.n_reused} tensors from before" if result.n_reused else ""
        predicted = f", divergence {result.predicted_kld:.4f} predicted" if result.predicted_kld else ""
        say(
            f"{args.output}: step {result.settings['step']:.4g}, {sizes}, {bpw} bits per weight, codes {bits / n:.3f} bits a "
            f"weight{predicted}, {seconds_text(result.seconds)}{reused}"
        )


class _Trials:
    """Steps and what was measured with them, in a file, so that an interrupted search goes on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.base: float | None = None
        self._values: list[tuple[float, float]] = []
        with suppress(OSError, ValueError, KeyError, TypeError):
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
            self.base, self._values = found["base"], [(float(step), float(value)) for step, value in found["values"]]

    def known(self) -> list[Trial]:
        """Return all that was measured so far."""
        from lazyweights.quant.rate_control import Trial

        return [Trial(step, value) for step, value in self._values]

    def measured(self, measure: Callable[[float], float]) -> Callable[[float], float]:
        """Return a function that measures and keeps the result."""

        def call(step: float) -> float:
            value = measure(step)
            self._values.append((step, value))
            with open(self._path + ".writing", "w", encoding="utf-8") as file:
                json.dump({"base": self.base, "values": self._values}, file)
            os.replace(self._path + ".writing", self._path)
            return value

        return call


def _key(seen: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]
