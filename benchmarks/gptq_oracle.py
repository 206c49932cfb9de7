"""GPTQModel as the oracle of `lazyweights.quant.gptq`: same Hessian, same damping, same grid, whose error is smaller?

Usage: python benchmarks/gptq_oracle.py [--quick]

Needs GPTQModel (`pip install gptqmodel`, which brings PyTorch and transformers); without it the benchmark says that it is skipped
and writes nothing. GPTQModel's own GPTQ class quantizes linear layers of random weights on the CPU, symmetric and in the order of
the columns; its scales are rounded to float16 while it works, as its checkpoints have them. `quantize_rows` then gets exactly
that grid, row by row, and the Hessian of the same inputs. So does a plain GPTQ in float64, which shows what float32 costs either
side, and rounding to nearest. Errors are tr(E H E^T) in float64.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from common import console, finish, parse_arguments

from lazyweights.quant.containers import CONTAINERS, Container
from lazyweights.quant.factors import factorize
from lazyweights.quant.gptq import RUN, quantize_rows

BLOCK = 32
N_BATCHES = 4
SEEDS = (1, 2)
TOLERANCE = 1e-3
"""How much larger an error may be, as a share: float32 breaks ties, and one code that differs changes those after it."""


@dataclass(frozen=True)
class Layer:
    """A linear layer and how many inputs it sees."""

    rows: int
    columns: int
    n_inputs: int


LAYERS = (Layer(256, 256, 2048), Layer(512, 1024, 4096), Layer(512, 1024, 512))
"""The last sees fewer inputs than it has columns: only the damping makes its Hessian positive definite."""
DAMP_FRAC = 0.05
GRIDS = ((4, 32), (4, -1), (8, 32), (8, -1))
"""Bits and group size."""


@dataclass(frozen=True)
class Grid:
    """Codes from `lowest` to `highest`, and the step of each weight, float64 (rows, columns)."""

    steps: np.ndarray
    lowest: int
    highest: int

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Round to nearest."""
        return np.clip(np.rint(values / self.steps), self.lowest, self.highest)


def make_layer(layer: Layer, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and inputs, float32: inputs of a spectrum that falls like 1 / j, in channels of unequal size."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((layer.rows, layer.columns)) * 0.02 * np.exp(0.3 * rng.standard_normal((layer.rows, 1)))
    basis, _ = np.linalg.qr(rng.standard_normal((layer.columns, layer.columns)))
    spectrum = 1 / np.sqrt(1 + np.arange(layer.columns))
    sizes = np.exp(0.5 * rng.standard_normal(layer.columns))
    inputs = (rng.standard_normal((layer.n_inputs, layer.columns)) * spectrum) @ basis * sizes
    return weights.astype(np.float32), inputs.astype(np.float32)


def quantize_theirs(
    weights: np.ndarray, inputs: np.ndarray, bits: int, group_size: int, *, reorders: bool = False
) -> tuple[np.ndarray, Grid]:
    """Return GPTQModel's codes, signed, and its grid; it may walk in its own order, groups with large inputs first."""
    import torch
    from gptqmodel import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ
    from gptqmodel.quantization.quantizer import Quantizer

    class HalfQuantizer(Quantizer):
        def find_params(self, x: Any, weight: bool = False) -> None:
            super().find_params(x, weight=weight)
            self.scale = self.scale.to(torch.float16).to(torch.float32)

    class HalfGPTQ(GPTQ):
        def create_quantizer(self, name: str) -> Quantizer:
            return HalfQuantizer(qcfg=self.qcfg, name=name)

    linear = torch.nn.Linear(weights.shape[1], weights.shape[0], bias=False)
    linear.weight.data = torch.from_numpy(weights.copy())
    config = QuantizeConfig(
        bits=bits, group_size=group_size, sym=True, desc_act=False, act_group_aware=reorders, damp_percent=DAMP_FRAC
    )
    task = HalfGPTQ(linear, config)
    task.quantizer.configure(perchannel=True)
    for batch in np.split(inputs, N_BATCHES):
        task.add_batch(torch.from_numpy(batch.copy()), None)
    values, scales, zeros, _, _, _, damp, _ = task.quantize()
    if damp != DAMP_FRAC or not bool((zeros == 2 ** (bits - 1)).all()):
        raise SystemExit(f"GPTQModel damped by {damp} or chose other zero points than the middle: the grids are not the same")
    steps = np.repeat(scales.numpy().astype(np.float64), weights.shape[1] // scales.shape[1], axis=1)
    grid = Grid(steps, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    found = values.detach().numpy().astype(np.float64)
    codes = grid.codes(found)
    if (codes * steps != found).any():
        raise SystemExit("GPTQModel's values are not on its grid")
    return codes, grid


def quantize_ours(weights: np.ndarray, hessian: np.ndarray, grid: Grid, container: Container) -> np.ndarray:
    """Return the codes of `quantize_rows` on a grid, which must have one step for each block."""
    factor = factorize(hessian, DAMP_FRAC)
    if factor.damp_frac != DAMP_FRAC:
        raise SystemExit(f"lazyweights damped by {factor.damp_frac}")
    scales = grid.steps[:, ::BLOCK]
    sub_scales, row_factors = np.ones(scales.shape[1], np.int32), np.ones(1)
    codes = np.empty(weights.shape)
    for row in range(len(weights)):
        found = quantize_rows(weights[row : row + 1], factor, container, scales[row], sub_scales, row_factors, widen=False)
        if (found.scales != scales[row]).any():
            raise SystemExit("the scales are not float16: the grids are not the same")
        codes[row] = found.codes[0]
    return codes


def quantize_exactly(
    weights: np.ndarray, damped: np.ndarray, grid: Grid, forced: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of plain GPTQ in float64, or those it is forced to, and in steps what was rounded to them."""
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    work = weights.astype(np.float64)
    codes = np.empty(weights.shape) if forced is None else forced
    for start in range(0, weights.shape[1], RUN):
        stop = start + RUN
        errors = np.empty((len(weights), RUN))
        for column in range(start, stop):
            step = grid.steps[:, column]
            if forced is None:
                codes[:, column] = np.clip(np.rint(work[:, column] / step), grid.lowest, grid.highest)
            error = (work[:, column] - codes[:, column] * step) / upper[column, column]
            work[:, column + 1 : stop] -= error[:, None] * upper[column, column + 1 : stop]
            errors[:, column - start] = error
        work[:, stop:] -= errors @ upper[start:stop, stop:]
    return codes, work / grid.steps


def first_differences(
    weights: np.ndarray, damped: np.ndarray, grid: Grid, ours: np.ndarray, theirs: np.ndarray
) -> list[dict[str, Any]]:
    """Return, for each row with codes that differ, how far from a tie the first was in float64, and with whom float64 sides."""
    rows = np.flatnonzero(np.any(ours != theirs, axis=1))
    _, values = quantize_exactly(weights[rows], damped, Grid(grid.steps[rows], grid.lowest, grid.highest), theirs[rows])
    columns = np.argmax(ours[rows] != theirs[rows], axis=1)
    found = []
    for row, column, value in zip(rows, columns, values[np.arange(len(rows)), columns], strict=True):
        pair = ours[row, column], theirs[row, column]
        is_ours = abs(value - pair[0]) < abs(value - pair[1])
        found.append({"row": int(row), "column": int(column), "from_tie": abs(value - sum(pair) / 2), "is_ours": bool(is_ours)})
    return found


def row_errors(weights: np.ndarray, codes: np.ndarray, grid: Grid, hessian: np.ndarray) -> np.ndarray:
    """Return error' H error of each row, float64."""
    error = weights.astype(np.float64) - codes * grid.steps
    return np.einsum("ij,ij->i", error @ hessian, error)


def measure(layer: Layer, seed: int, bits: int, group_size: int) -> dict[str, Any]:
    weights, inputs = make_layer(layer, seed)
    wide = inputs.astype(np.float64)
    hessian = wide.T @ wide / len(wide)
    damped = hessian + DAMP_FRAC * hessian.diagonal().mean() * np.eye(layer.columns)
    theirs, grid = quantize_theirs(weights, inputs, bits, group_size)
    container = CONTAINERS["Q4_0" if bits == 4 else "Q8_0"]
    same_range = replace(container, lowest=grid.lowest)  # Q8_0 does without -128, GPTQModel does not
    codes = {
        "theirs": theirs,
        "ours": quantize_ours(weights, hessian, grid, same_range),
        "exact": quantize_exactly(weights, damped, grid)[0],
        "nearest": grid.codes(weights.astype(np.float64)),
    }
    if container != same_range:
        codes["ours_without_lowest"] = quantize_ours(weights, hessian, grid, container)
    by_row = {name: row_errors(weights, found, grid, hessian) for name, found in codes.items()}
    equal = np.all(codes["ours"] == theirs, axis=1)
    differences = by_row["ours"] / by_row["theirs"] - 1
    row = {
        "rows": layer.rows, "columns": layer.columns, "n_inputs": layer.n_inputs, "seed": seed, "bits": bits,
        "group_size": group_size, "damp_frac": DAMP_FRAC,
        "error": {name: float(found.sum()) for name, found in by_row.items()},
        "damped_error": {name: float(row_errors(weights, found, grid, damped).sum()) for name, found in codes.items()},
        "n_weights": weights.size,
        "n_different": {name: int(np.sum(found != theirs)) for name, found in codes.items() if name != "theirs"},
        "n_ours_not_exact": int(np.sum(codes["ours"] != codes["exact"])),
        "n_at_lowest": int(np.sum(theirs == grid.lowest)),
        "rows_equal": int(equal.sum()),
        "rows_better": int(np.sum(~equal & (differences < 0))),
        "rows_worse": int(np.sum(~equal & (differences > 0))),
        "first_differences": first_differences(weights, damped, grid, codes["ours"], theirs),
        "worst_row": float(differences.max()),
        "best_row": float(differences.min()),
    }  # fmt: skip
    if group_size > 0:
        reordered, other_grid = quantize_theirs(weights, inputs, bits, group_size, reorders=True)
        on_it = quantize_ours(weights, hessian, other_grid, replace(container, lowest=grid.lowest))
        row["reordered_error"] = {
            "theirs": float(row_errors(weights, reordered, other_grid, hessian).sum()),
            "ours_in_order": float(row_errors(weights, on_it, other_grid, hessian).sum()),
        }
    shown = ", ".join(f"{name} {value:.6f}" for name, value in ratios(row).items())
    console.print(f"{layer}, seed {seed}, {bits} bits, groups of {group_size}: {shown}", soft_wrap=True)
    return row


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """Errors by GPTQModel's."""
    return {name: value / row["error"]["theirs"] for name, value in row["error"].items() if name != "theirs"}


def main() -> None:
    args = parse_arguments(__doc__)
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its pool asks for two even where it finds fewer cores
    try:
        import gptqmodel
    except ImportError as error:
        console.print(f"[yellow]gptq_oracle is skipped: GPTQModel cannot be imported ({error}); nothing was compared")
        return
    rows = [
        measure(layer, seed, bits, group_size)
        for layer in (LAYERS[:1] if args.quick else LAYERS)
        for bits, group_size in GRIDS
        for seed in (SEEDS[:1] if args.quick else SEEDS)
    ]
    worse = [row for row in rows if ratios(row)["ours"] > 1 + TOLERANCE]
    finish("gptq_oracle", args, {"gptqmodel": gptqmodel.__version__, "tolerance": TOLERANCE, "rows": rows})
    if worse:
        raise SystemExit(f"{len(worse)} of {len(rows)} errors are larger than GPTQModel's by more than {TOLERANCE:.1%}")


if __name__ == "__main__":
    main()
