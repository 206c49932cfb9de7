"""Figures of matplotlib as SVG inside a page: text stays text, colours follow the page's theme, ids do not clash.

Figures are drawn in the stand-in colours below. The page defines what they are, in light and in dark.
What has a gid made by `mark_gid` becomes an element that the page can find, with a title for those who point at it.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lazyweights.errors import BackendUnavailableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER, STOCK, TUNED, SOURCE, CODED = (f"#0000f{i:x}" for i in range(8))
SERIES = tuple(f"#0001{i:02x}" for i in range(12))
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", STOCK: "stock", TUNED: "tuned", SOURCE: "source",
              CODED: "coded"} | {colour: f"series-{i}" for i, colour in enumerate(SERIES)}  # fmt: skip

_MARK = re.compile(r'<g id="mark:([^:"]*):([^"]*)">')
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_STYLE: Any = {  # of its type matplotlib keeps a list of all keys
    "svg.fonttype": "none", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9,
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.titlecolor": INK, "axes.facecolor": "none", "axes.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9.5, "axes.titlelocation": "left",
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6, "xtick.color": MUTED,
    "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "text.color": INK, "legend.frameon": False, "legend.fontsize": 8.5, "figure.facecolor": "none", "lines.linewidth": 1.4,
}  # fmt: skip


def mark_gid(name: str, part: str = "") -> str:
    """Return the gid of something that belongs to a point, or to another named thing."""
    return f"mark:{name}:{part}"


def draw(
    paint: Callable[[Figure], None], size: tuple[float, float], name: str, label: str, titles: Mapping[str, str] | None = None
) -> str:
    """Paint a figure; return it as an ``<svg>`` element.

    Parameters
    ----------
    paint : callable
        Fills the figure.
    size : (float, float)
        Inches.
    name : str
        Different for each figure of a page: what its ids start with.
    label : str
        What the figure shows, for those who do not see it.
    titles : mapping, optional
        Of marks, by ``NAME:PART``.

    Raises
    ------
    BackendUnavailableError
        If matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendUnavailableError("plots need matplotlib: pip install 'lazyweights[report]'") from error
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    return _inline(buffer.getvalue(), name, label, titles or {})


def _inline(text: str, name: str, label: str, titles: Mapping[str, str]) -> str:
    body = text[text.index("<svg") :]
    view_box = re.search(r'viewBox="([^"]+)"', body)
    assert view_box is not None
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>\s*", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    used = set(re.findall(r'href="#([^"]+)"', body)) | set(re.findall(r"url\(#([^)]+)\)", body))

    def mark(found: re.Match[str]) -> str:
        point, part = found[1], found[2]
        title = titles.get(f"{point}:{part}", "")
        shown = f"<title>{html.escape(title)}</title>" if title else ""
        return f'<g class="mark" data-point="{html.escape(point)}" data-part="{html.escape(part)}">{shown}'

    body = _MARK.sub(mark, body)
    body = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", body)
    body = re.sub(r'href="#', f'href="#{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    body = re.sub(r"#000[01f][0-9a-f]{2}\b", lambda found: f"var(--{_VARIABLES[found[0]]})", body)
    body = re.sub(r"font: (?:(bold|\d+) )?([\d.]+)px [^;\"]*", _font, body)
    body = re.sub(r" ?font-family: [^;\"]*;?", "", body)
    body = re.sub(r' (?:d|x|y|transform|style|width|height)="[^"]*"', _rounded, body)
    body = re.sub(r"\s+", " ", body).replace("> <", "><")
    return f'<svg viewBox="{view_box[1]}" role="img" aria-label="{html.escape(label)}">{body}'.strip()


def _rounded(found: re.Match[str]) -> str:
    return re.sub(r"(\d\.\d\d)\d+", r"\1", found[0])  # hundredths of a point are enough


def _font(found: re.Match[str]) -> str:
    weight = f"; font-weight: {found[1]}" if found[1] else ""
    return f"font-size: {found[2]}px{weight}"
