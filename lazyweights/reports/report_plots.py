"""The plots of a report, each in a wide and a narrow version, as inline SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lazyweights.reports import inline_svg as svg
from lazyweights.reports.comparison import envelope
from lazyweights.reports.points import SOURCE, STOCK, TUNED
from lazyweights.reports.report_data import split_name
from lazyweights.reports.report_tables import increase, megabytes, number, percent, with_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = (8.8, 4.9), (4.1, 4.4)
MAX_HISTOGRAMS = 12
LABEL_SIZE = 8.0

Paint = Callable[["Figure", bool], None]


@dataclass(frozen=True)
class Plot:
    """Both versions of a plot."""

    wide: str
    narrow: str


def _both(
    paint: Paint, name: str, label: str, titles: Mapping[str, str], wide: tuple[float, float] = WIDE,
    narrow: tuple[float, float] = NARROW,
) -> Plot:  # fmt: skip
    return Plot(
        svg.draw(lambda figure: paint(figure, False), wide, f"{name}-w", label, titles),
        svg.draw(lambda figure: paint(figure, True), narrow, f"{name}-n", label, titles),
    )


def point_titles(document: Mapping[str, Any]) -> dict[str, str]:
    """What is said of a file that is pointed at, by ``ID:gguf`` and ``ID:coded``."""
    titles = {}
    for point in document["points"]:
        quality = f"perplexity {number(point['ppl']['value'], 3)}"
        if point["kind"] != SOURCE:
            quality += f" ({increase(point)}), KLD {with_error(point['kld'], 5)}"
        for part, name, size, bpw in (
            ("gguf", "GGUF", point["gguf_bytes"], point["bpw"]), ("coded", "coded", point["coded_bytes"], point["coded_bpw"])
        ):  # fmt: skip
            titles[f"{point['id']}:{part}"] = f"{point['name']}, {name}: {megabytes(size)}, {number(bpw, 3)} bpw; {quality}"
    return titles


def perplexity_plot(document: Mapping[str, Any]) -> Plot | None:
    """Bits per weight against what perplexity is over that of the source, in percent."""

    def loss(point: Mapping[str, Any]) -> tuple[float | None, float]:
        ratio = point["ratio"]
        return None if ratio["value"] is None else 100 * (ratio["value"] - 1), 100 * (ratio["error"] or 0)

    budgets = [choice["percent"] for choice in document["budgets"]]
    return _loss_plot(document, loss, "ppl", "perplexity over the source, %", budgets)


def kld_plot(document: Mapping[str, Any]) -> Plot | None:
    """Bits per weight against KL divergence."""

    def loss(point: Mapping[str, Any]) -> tuple[float | None, float]:
        kld = point["kld"]
        return (None, 0.0) if kld is None else (kld["value"], kld["error"] or 0)

    return _loss_plot(document, loss, "kld", "mean KL divergence, nats", [])


def _loss_plot(
    document: Mapping[str, Any], loss: Callable[[Mapping[str, Any]], tuple[float | None, float]], name: str, label: str,
    limits: Sequence[float],
) -> Plot | None:  # fmt: skip
    points = [point for point in document["points"] if point["kind"] in (STOCK, TUNED)]
    heights = [value for point in points if (value := loss(point)[0]) is not None and value > 0]
    if not heights:
        return None
    lowest, highest = min(heights), max(heights)
    floor = lowest / 1.6

    def paint(figure: Figure, is_narrow: bool) -> None:
        axes = figure.subplots()
        axes.set_yscale("log")
        axes.set_ylim(floor, highest * 1.6)
        labels = _Labels(axes)
        for limit in limits:
            if floor < limit < highest * 1.6:
                axes.axhline(limit, color=svg.MUTED, linewidth=0.7, linestyle=(0, (1, 3)), zorder=1)
        edges = ((STOCK, "bpw", svg.STOCK, "--"), (STOCK, "coded_bpw", svg.CODED, "-"), (TUNED, "coded_bpw", svg.TUNED, "-"))
        for kind, key, colour, style in edges:
            line = envelope((p[key], value) for p in points if p["kind"] == kind and (value := loss(p)[0]) is not None)
            axes.plot([x for x, _ in line], [y for _, y in line], style, color=colour, linewidth=1.1, zorder=2)
        for point in points:
            value, error = loss(point)
            if value is None:
                continue
            height = max(value, floor * 1.08)  # a loss below 0 is noise; it stands at the edge
            if point["kind"] == STOCK:
                axes.plot([point["coded_bpw"], point["bpw"]], [height] * 2, color=svg.GRID, linewidth=1.2, zorder=1.5)
                _mark(axes, point, "gguf", height, error, svg.STOCK, "o", hollow=True)
                _mark(axes, point, "coded", height, error, svg.CODED, "o")
                labels.add(point["bpw"], height, point["name"])
            else:
                _mark(axes, point, "coded", height, error, svg.TUNED, "D")
                labels.add(point["coded_bpw"], height, "", size=5)
            labels.block(point["coded_bpw"], height)
        axes.set_xlabel("bits per weight, whole file")
        axes.set_ylabel(label)
        _plain_log_ticks(axes)
        handles = [_handle(svg.STOCK, "o", "stock GGUF", hollow=True), _handle(svg.CODED, "o", "stock, coded losslessly")]
        if any(point["kind"] == TUNED for point in points):
            handles.append(_handle(svg.TUNED, "D", "tuned, coded"))
        figure.legend(handles=handles, loc="outside upper left", ncols=1 if is_narrow else 3, handletextpad=0.3)
        figure.draw_without_rendering()
        labels.place(figure, is_narrow)

    what = f"Scatter plot: bits per weight against {label}, for stock formats, their coded files and tuned files."
    return _both(paint, name, what, point_titles(document))


def _mark(
    axes: Axes, point: Mapping[str, Any], part: str, height: float, error: float, colour: str, shape: str, *, hollow: bool = False
) -> None:  # fmt: skip
    x = point["bpw"] if part == "gguf" else point["coded_bpw"]
    if error and not hollow:
        low = max(height - error, axes.get_ylim()[0])
        axes.plot([x, x], [low, height + error], color=colour, linewidth=0.8, alpha=0.7, zorder=2.5)
    face = svg.PAPER if hollow else colour
    gid = svg.mark_gid(point["id"], part)
    axes.plot([x], [height], shape, markersize=5.5 if shape == "o" else 5, markerfacecolor=face, markeredgecolor=colour,
              markeredgewidth=1.2, zorder=3, gid=gid)  # fmt: skip


def _handle(colour: str, shape: str, label: str, *, hollow: bool = False) -> Any:
    from matplotlib.lines import Line2D

    face = svg.PAPER if hollow else colour
    return Line2D([], [], color=colour, marker=shape, markersize=5, markerfacecolor=face, linestyle="none", label=label)


def _plain_log_ticks(axes: Axes) -> None:
    """Ticks at 1, 2, 5 of each decade, written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    steps = (1.0, 2.0, 5.0) if math.log10(high / low) < 4 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10f}".rstrip("0").rstrip(".")))
    axes.yaxis.set_minor_formatter(NullFormatter())


class _Labels:
    """Puts names beside points where there is room, in an order that does not depend on chance."""

    _PLACES = ((1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, -1), (1, 2), (1, -2), (-1, 2), (-1, -2))

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self._wanted: list[tuple[float, float, str]] = []
        self._blocked: list[tuple[float, float, float]] = []

    def add(self, x: float, y: float, text: str, size: float = 5.5) -> None:
        """Ask for a label beside a marker."""
        if text:
            self._wanted.append((x, y, text))
        self._blocked.append((x, y, size))

    def block(self, x: float, y: float, size: float = 5.5) -> None:
        """Keep labels off a marker."""
        self._blocked.append((x, y, size))

    def place(self, figure: Figure, is_narrow: bool) -> None:
        """Draw the labels that have room; call when the axes have their final place."""
        scale = figure.dpi / 72
        edge = self._axes.get_window_extent()
        boxes = []
        for x, y, size in self._blocked:
            px, py = self._axes.transData.transform((x, y))
            half = scale * size / 2 + 1
            boxes.append((px - half, py - half, px + half, py + half))
        for x, y, text in sorted(self._wanted):
            px, py = self._axes.transData.transform((x, y))
            width, height = scale * LABEL_SIZE * 0.64 * len(text), scale * LABEL_SIZE
            for horizontal, vertical in self._PLACES:
                centre_x = px + horizontal * (width / 2 + scale * 5)
                centre_y = py + vertical * (height / 2 + scale * (5 if horizontal == 0 else 2))
                box = (centre_x - width / 2, centre_y - height / 2, centre_x + width / 2, centre_y + height / 2)
                inside = box[0] > edge.x0 and box[2] < edge.x1 + 4 and box[1] > edge.y0 and box[3] < edge.y1
                if inside and not any(_overlap(box, other) for other in boxes):
                    boxes.append(box)
                    at = self._axes.transData.inverted().transform((centre_x, centre_y))
                    self._axes.text(at[0], at[1], text, fontsize=LABEL_SIZE - is_narrow, ha="center", va="center", color=svg.INK)
                    break


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def budget_plot(document: Mapping[str, Any]) -> Plot | None:
    """What the smallest files take and save, for each budget."""
    points = {point["id"]: point for point in document["points"]}
    choices = [choice for choice in document["budgets"] if choice["stock"]]
    if not choices:
        return None

    def paint(figure: Figure, is_narrow: bool) -> None:
        axes = figure.subplots()
        roles = [("stock", "gguf_bytes", svg.STOCK, "smallest stock GGUF"),
                 ("coded_stock", "coded_bytes", svg.CODED, "smallest coded stock file"),
                 ("tuned", "coded_bytes", svg.TUNED, "smallest tuned file")]  # fmt: skip
        roles = [role for role in roles if any(choice[role[0]] for choice in choices)]
        height = 0.8 / len(roles)
        longest = max(points[choice[role]][key] for choice in choices for role, key, _, _ in roles if choice[role])
        for row, choice in enumerate(choices):
            stock_bytes = points[choice["stock"]]["gguf_bytes"]
            for k, (role, key, colour, _) in enumerate(roles):
                point = points.get(choice[role])
                if point is None:
                    continue
                at = row + (k - (len(roles) - 1) / 2) * height
                size = point[key]
                gid = svg.mark_gid(point["id"], "gguf" if key == "gguf_bytes" else "coded")
                axes.barh([at], [size / 1e6], height * 0.9, color=colour, gid=None, alpha=0.9)
                axes.patches[-1].set_gid(gid)
                saved = "" if role == "stock" else f"  {percent((size - stock_bytes) / stock_bytes, sign=True)}"
                text = point["name"] + saved
                axes.text(size / 1e6 + longest / 1e8, at, text, va="center", fontsize=LABEL_SIZE)
        axes.set_yticks(range(len(choices)), [f"{choice['percent']:g} %" for choice in choices])
        axes.invert_yaxis()
        axes.set_xlim(0, longest / 1e6 * (1.55 if is_narrow else 1.25))
        axes.grid(False, axis="y")
        axes.set_xlabel("MB")
        axes.set_ylabel("budget of perplexity")
        from matplotlib.patches import Patch

        handles = [Patch(color=colour, label=label) for _, _, colour, label in roles]
        figure.legend(handles=handles, loc="outside upper left", ncols=1 if is_narrow else 3, handlelength=1)

    tall = 0.9 + 0.72 * len(choices)
    label = "Bar chart: for each budget the size of the smallest stock file, coded stock file and tuned file."
    return _both(paint, "budgets", label, point_titles(document), (8.8, tall), (4.1, tall + 0.5))


def layer_plot(point: Mapping[str, Any], name: str) -> Plot | None:
    """Three panels over the layers: coded bytes by kind, order-0 entropy, relative error."""
    layers, kinds = _by_layer(point)
    if not layers:
        return None
    colours = dict(zip(kinds, itertools.cycle(svg.SERIES), strict=False))

    def paint(figure: Figure, is_narrow: bool) -> None:
        sizes, entropies, errors = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1.1, 1.1))
        edges = [layer - 0.5 for layer in range(layers[0], layers[-1] + 2)]
        below = [0.0] * (len(edges) - 1)
        for kind in kinds:
            members = kinds[kind]
            xs = sorted(members)
            above = below.copy()
            for x in xs:
                above[x - layers[0]] += members[x]["coded_bytes"] / 1e6
            sizes.stairs(above, edges, baseline=below, fill=True, facecolor=colours[kind], edgecolor=svg.PAPER, linewidth=0.4)
            below = above
            for axes, key in ((entropies, "entropy_bits"), (errors, "error")):
                shown = [x for x in xs if members[x][key] and (key != "entropy_bits" or members[x]["type"] != "F32")]
                axes.plot(shown, [members[x][key] for x in shown], "-o", markersize=2.6, linewidth=1, color=colours[kind])
        sizes.set_title("coded size, MB")
        entropies.set_title("order-0 entropy of the codes, bits per weight")
        errors.set_title("error: squared change of the outputs, relative")
        if any(member["error"] for members in kinds.values() for member in members.values()):
            errors.set_yscale("log")
            _few_log_ticks(errors)
        errors.set_xlabel("layer")
        from matplotlib.ticker import MaxNLocator

        errors.xaxis.set_major_locator(MaxNLocator(integer=True))
        from matplotlib.patches import Patch

        handles = [Patch(color=colours[kind], label=kind) for kind in kinds]
        figure.legend(handles=handles, loc="outside upper left", ncols=3 if is_narrow else 7, handlelength=0.9,
                      columnspacing=1, fontsize=LABEL_SIZE)  # fmt: skip

    label = f"Three panels over the layers of {point['name']}: coded size, entropy and error of each kind of tensor."
    return _both(paint, name, label, {}, (8.8, 6.2), (4.1, 6.6))


def _few_log_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e−")))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _by_layer(point: Mapping[str, Any]) -> tuple[list[int], dict[str, dict[int, Any]]]:
    """Return the layers, and the tensors of each kind by layer, without those of few weights (norms)."""
    found: dict[str, dict[int, Any]] = {}
    for tensor in point["tensors"]:
        layer, kind = split_name(tensor["name"])
        if layer is not None:
            found.setdefault(kind, {})[layer] = tensor
    total = sum(tensor["n_weights"] for members in found.values() for tensor in members.values())
    kinds = {
        kind: members for kind, members in found.items() if 200 * sum(t["n_weights"] for t in members.values()) > total
    }
    return sorted({layer for members in kinds.values() for layer in members}), kinds


def histogram_plot(point: Mapping[str, Any], name: str) -> Plot | None:
    """Small histograms of the codes, one for each kind and type of tensor, the largest ones."""
    rows = [row for row in point["kinds"] if len(row["counts"]) > 1]
    largest = sorted(rows, key=lambda row: -row["n_weights"])[:MAX_HISTOGRAMS]
    rows = [row for row in rows if row in largest]
    if not rows:
        return None
    total = sum(row["n_weights"] for row in rows)

    def paint(figure: Figure, is_narrow: bool) -> None:
        n_columns = min(2 if is_narrow else 4, len(rows))
        n_lines = -(-len(rows) // n_columns)
        grid = figure.subplots(n_lines, n_columns, squeeze=False)
        for axes in grid.flat[len(rows) :]:
            axes.set_visible(False)
        for axes, row in zip(grid.flat, rows, strict=False):
            first, counts = _without_tails(row["first_code"], row["counts"])
            n = sum(row["counts"])
            codes = [first - 0.5 + k for k in range(len(counts) + 1)]
            axes.stairs([100 * count / n for count in counts], codes, fill=True, color=svg.SERIES[0], alpha=0.85)
            axes.set_title(f"{row['kind']}, {row['type']}", fontsize=LABEL_SIZE + 0.5)
            said = f"{row['entropy_bits']:.2f} bits\n{percent(row['n_weights'] / total, 0)}"
            axes.text(0.98, 0.95, said, fontsize=LABEL_SIZE - 0.5, ha="right", va="top", transform=axes.transAxes,
                      color=svg.MUTED)  # fmt: skip
            axes.set_ylim(0, 140 * max(row["counts"]) / n)
            axes.tick_params(labelsize=LABEL_SIZE - 1)
            axes.grid(False, axis="x")
        figure.supxlabel("code", fontsize=LABEL_SIZE + 0.5)
        figure.supylabel("% of codes", fontsize=LABEL_SIZE + 0.5)

    label = f"Histograms of the codes of {point['name']}, one for each kind of tensor."
    n = len(rows)
    wide, narrow = (8.8, 0.5 + 1.65 * -(-n // 4)), (4.1, 0.5 + 1.5 * -(-n // 2))
    return _both(paint, name, label, {}, wide, narrow)


def _without_tails(first: int, counts: Sequence[int]) -> tuple[int, list[int]]:
    """Leave out the codes at both ends that are too rare to be seen, a thousandth of the most frequent one."""
    seen = [k for k, count in enumerate(counts) if 1000 * count >= max(counts)]
    return first + seen[0], list(counts[seen[0] : seen[-1] + 1])
