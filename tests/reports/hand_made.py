"""Points with known values, for tests of what is computed from them."""

from __future__ import annotations

from lazyweights.llama.divergence import Estimate
from lazyweights.reports.points import STOCK, Point
from lazyweights.reports.tensor_facts import TensorFacts

N_WEIGHTS = 1_000_000


def tensor(name: str, *, kind: str = "Q8_0", counts: list[int] | None = None, error: float | None = 0.001) -> TensorFacts:
    """A tensor whose codes are those counted."""
    counts = [1, 2, 1] if counts is None else counts
    return TensorFacts(name, kind, sum(counts) or 4, 40, 30, 1.5, -1, counts, error, "hessian")


def point(
    name: str, gguf_bytes: int, coded_bytes: int, increase: float, kld: float | None = 0.01, *, kind: str = STOCK,
    tensors: tuple[TensorFacts, ...] = (),
) -> Point:  # fmt: skip
    """A point; `increase` is a fraction."""
    divergence = None if kld is None else Estimate(kld, kld / 20)
    top = None if kld is None else Estimate(0.9, 0.003)
    quantiles = {} if kld is None else {"99.0%": 5 * kld, "99.9%": 20 * kld}
    return Point(
        kind, name, f"key-{name}", {"step": 1.0} if kind == "tuned" else {}, gguf_bytes, coded_bytes, N_WEIGHTS,
        Estimate(20 * (1 + increase), 0.4), Estimate(1 + increase, 0.002), divergence, top, quantiles, tensors, {"evaluate": 1.0},
    )  # fmt: skip
