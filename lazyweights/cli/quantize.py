"""``lazyweights quantize``: the tuned quantizer, to a step, a size or a budget of perplexity."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Callable
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
    from lazyweights.quant.rate_control import StepSearch
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

    def run(self) -> None:
        from lazyweights.container.atomic import CODED_SUFFIX, check_output
        from lazyweights.quant.tuned import TunedQuantizer

        args = self.args
        is_coded = args.output.endswith(CODED_SUFFIX)
        check_output(args.output, args.force, args.model)
        if args.save_hessians is not None:
            check_output(args.save_hessians, args.force, args.model)
        os.makedirs(self.work, exist_ok=True)
        with TunedQuantizer(
            args.model, self._hessians(), threads=args.threads, allow_requantize=args.allow_requantize, container=args.container,
            rate_weight=args.rate_weight, quantize_embedding=not args.leave_output_tensor,
        ) as quantizer:  # fmt: skip
            self._search(quantizer)
        assert self.made is not None
        if is_coded:
            if not self.coded_bytes:
                self._encode()
            os.replace(self._coded_path, args.output)
        else:
            os.replace(self.made.path, args.output)
        shutil.rmtree(self.work, ignore_errors=True)
        self._report(self.made.result, is_coded)

    def leave(self) -> None:
        """Remove the work folder if there is nothing to go on from; otherwise say what it is."""
        for folder in (os.path.join(self.work, "tensors"), self.work):
            with suppress(OSError):
                os.rmdir(folder)
        if os.path.isdir(self.work):
            say(f"{self.work}: kept; the same command goes on from there. Delete it to start anew")

    def _hessians(self) -> str:
        """Return the file with what is known of the inputs, measured now where it is not there."""
        args = self.args
        if args.hessians is not None:
            return str(args.hessians)
        from lazyweights.quant.knowledge_file import measure_inputs

        path = args.save_hessians
        if path is None:
            seen = [identity(args.model), identity(args.calibration), args.ctx_size, args.chunks, args.seed]
            key = hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]
            path = os.path.join(self.work, f"inputs-{key}.safetensors")
            if os.path.exists(path):
                return str(path)
        with step_bar(f"{os.path.basename(args.model)}: calibrate", show_progress(args)) as bar:
            found = measure_inputs(
                args.model, args.calibration, path, n_ctx=args.ctx_size, n_chunks=args.chunks, seed=args.seed,
                threads=args.threads, force=True, allow_requantize=args.allow_requantize, progress=bar,
            )  # fmt: skip
        if found.kind != "curvature":
            say_warning(f"{found.reason}: steps go by the kind of tensor, which costs size")
        return str(path)

    def _search(self, quantizer: TunedQuantizer) -> None:
        """Leave the model of the best step in `made`."""
        from lazyweights.quant.rate_control import largest_step_within_loss, smallest_step_within_size

        args = self.args
        found: StepSearch
        if args.budget_ppl is not None:
            found = largest_step_within_loss(self._loss(quantizer), args.budget_ppl)
            what = f"perplexity within {100 * args.budget_ppl:g} %"
        elif args.bpw is not None or args.target_size is not None:
            limit = args.target_size if args.target_size is not None else args.bpw
            found = smallest_step_within_size(lambda step: self._size(quantizer, step, args.bpw is not None), limit)
            what = f"{size_text(args.target_size)}" if args.target_size is not None else f"{args.bpw:g} bits per weight"
        else:
            self._make(quantizer, args.step or 1.0)
            return
        if found.best is None:
            raise LazyWeightsError(f"no step that was tried gives {what}; tried were " + _listed(found))
        self._make(quantizer, found.best.step)
        if not args.quiet:
            say(f"step {found.best.step:.4g} for {what}; tried were {_listed(found)}")

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

    def _size(self, quantizer: TunedQuantizer, step: float, as_bpw: bool) -> float:
        made = self._make(quantizer, step)
        self._encode()
        return 8 * self.coded_bytes / made.result.n_weights if as_bpw else float(self.coded_bytes)

    def _loss(self, quantizer: TunedQuantizer) -> Callable[[float], float]:
        """Return what measures how far perplexity rises above that of the source."""
        from lazyweights.llama.chunks import read_text
        from lazyweights.llama.perplexity import perplexity

        args = self.args
        text = read_text(args.evaluation)

        def measured(path: str, what: str) -> float:
            with step_bar(f"{os.path.basename(args.model)}: {what}", show_progress(args)) as bar:
                total = 0

                def started(evaluation: Any) -> None:
                    nonlocal total
                    total = evaluation.n_chunks

                return perplexity(
                    path, text, n_ctx=args.ctx_size, n_chunks=args.evaluation_chunks, threads=args.threads, started=started,
                    chunk_done=None if bar is None else lambda done, _: bar(done, total, "perplexity, chunks"),
                ).ppl.value  # fmt: skip

        base = measured(args.model, "source")
        return lambda step: measured(self._make(quantizer, step).path, f"step {step:.4g}") / base - 1

    def _report(self, result: TunedResult, is_coded: bool) -> None:
        args = self.args
        lost = [report for report in result.tensors if report["fallback"] is not None or report["damp_frac"] > 0.05]
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


def _listed(found: StepSearch) -> str:
    return ", ".join(f"{trial.step:.4g} ({trial.value:.4g})" for trial in found.trials)
