"""Points against each other: the smallest file within each budget, and our files against stock files of equal KL divergence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lazyweights.reports.points import STOCK, TUNED, Point


@dataclass(frozen=True)
class BudgetChoice:
    """The smallest files whose perplexity stays within a budget; each None where no point does.

    Attributes
    ----------
    budget : float
        Percent of perplexity over that of the source.
    stock : Point or None
        The stock format with the smallest GGUF: what llama.cpp ships.
    coded_stock : Point or None
        The stock format with the smallest coded file. It may be another one.
    tuned : Point or None
        The tuned point with the smallest coded file.
    """

    budget: float
    stock: Point | None
    coded_stock: Point | None
    tuned: Point | None

    @property
    def saving(self) -> float | None:
        """Share of the bytes of the best stock file that the tuned coded file saves."""
        return saving(_size(self.stock, gguf_size), _size(self.tuned, coded_size))

    @property
    def saving_over_coded(self) -> float | None:
        """Share of the bytes of the best coded stock file that the tuned coded file saves."""
        return saving(_size(self.coded_stock, coded_size), _size(self.tuned, coded_size))

    @property
    def saving_by_coding(self) -> float | None:
        """Share of the bytes of the best stock file that the best coded stock file saves: lossless coding alone."""
        return saving(_size(self.stock, gguf_size), _size(self.coded_stock, coded_size))


@dataclass(frozen=True)
class EqualKld:
    """A tuned point and what stock formats would take at its KL divergence.

    Attributes
    ----------
    point : Point
    stock_bytes, coded_stock_bytes : float or None
        On the envelope of GGUFs and of coded files; None outside their range.
    """

    point: Point
    stock_bytes: float | None
    coded_stock_bytes: float | None

    @property
    def saving(self) -> float | None:
        """Share of the bytes of GGUFs that the coded file of the point saves."""
        return saving(self.stock_bytes, self.point.coded_bytes)

    @property
    def saving_over_coded(self) -> float | None:
        """The same, of coded stock files."""
        return saving(self.coded_stock_bytes, self.point.coded_bytes)


def saving(before: float | None, after: float | None) -> float | None:
    """Return the share of bytes saved, None where one of the sizes is not known.

    >>> saving(100, 80), saving(None, 80)
    (0.2, None)
    """
    if before is None or after is None or not before:
        return None
    return (before - after) / before


def choose(points: Iterable[Point], budgets: Iterable[float]) -> list[BudgetChoice]:
    """Choose the smallest files within each budget, in the order of the budgets; of equal sizes the better one."""
    known = list(points)
    stock = [point for point in known if point.kind == STOCK]
    tuned = [point for point in known if point.kind == TUNED]
    found = []
    for budget in budgets:
        limit = budget / 100

        def best(among: list[Point], size: Callable[[Point], int], limit: float = limit) -> Point | None:
            within = [point for point in among if point.increase <= limit]
            return min(within, key=lambda point: (size(point), point.increase, point.name), default=None)

        found.append(BudgetChoice(budget, best(stock, gguf_size), best(stock, coded_size), best(tuned, coded_size)))
    return found


def gguf_size(point: Point) -> int:
    """Bytes of the GGUF."""
    return point.gguf_bytes


def coded_size(point: Point) -> int:
    """Bytes of the coded file."""
    return point.coded_bytes


def _size(point: Point | None, size: Callable[[Point], int]) -> int | None:
    return None if point is None else size(point)


def envelope(sizes_and_losses: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (size, loss) pairs that no other one beats in both, from the smallest size on: losses fall.

    Losses that are not above 0 or not finite are left out: there is no logarithm of them.

    >>> envelope([(100, 0.01), (80, 0.04), (90, 0.05), (120, 0.01), (70, float("nan"))])
    [(80, 0.04), (100, 0.01)]
    """
    kept: list[tuple[float, float]] = []
    for size, loss in sorted(sizes_and_losses):
        if loss > 0 and math.isfinite(loss) and (not kept or loss < kept[-1][1]):
            kept.append((size, loss))
    return kept


def size_at(frontier: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return the size at which an envelope has a loss: a straight line in ln(loss) between neighbours, None outside.

    >>> size_at([(80, 0.04), (100, 0.01)], 0.02)
    90.0
    """
    if not loss > 0:
        return None
    for (size, above), (next_size, below) in itertools.pairwise(frontier):
        if below <= loss <= above:
            return size + (next_size - size) * math.log(above / loss) / math.log(above / below)
    return None


def at_equal_kld(points: Iterable[Point]) -> list[EqualKld]:
    """Compare each tuned point with the envelopes of the stock points, in the order of coded size."""
    known = list(points)
    stock = [point for point in known if point.kind == STOCK and point.kld is not None]
    plain = envelope((point.gguf_bytes, kld_of(point)) for point in stock)
    coded = envelope((point.coded_bytes, kld_of(point)) for point in stock)
    tuned = sorted((p for p in known if p.kind == TUNED and p.kld is not None), key=lambda p: (p.coded_bytes, p.name))
    return [EqualKld(point, size_at(plain, kld_of(point)), size_at(coded, kld_of(point))) for point in tuned]


def kld_of(point: Point) -> float:
    """Mean KL divergence of a point, NaN of the source."""
    return math.nan if point.kld is None else point.kld.value
