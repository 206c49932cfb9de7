"""Pictures of what the model of the decode unit says; needs matplotlib (extra ``report``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lazyweights.errors import BackendUnavailableError
from lazyweights.hardware import placement
from lazyweights.hardware.unit_config import Loss

if TYPE_CHECKING:
    from lazyweights.reports.unit_simulation import UnitReport

BITS = np.linspace(2.5, 9.0, 200)


def plot_report(report: UnitReport, path: str) -> None:
    """Write three panels: engines needed by bits per weight, losses by type, milliseconds a token by context.

    Parameters
    ----------
    report : UnitReport
    path : str
        PNG, SVG or PDF by its suffix.

    Raises
    ------
    BackendUnavailableError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendUnavailableError("plots need matplotlib: pip install 'lazyweights[report]'") from error
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    needed, losses, times = figure.subplots(1, 3)

    for per_symbol, label in ((1, "one weight a symbol"), (2, "pair symbols")):
        peak = 32.0 * per_symbol
        bandwidth, clock_hz = report.device.bandwidth, report.clock_hz
        needed.step(BITS, [placement.engines_needed(bandwidth, bits, peak, clock_hz) for bits in BITS], label=label)
    needed.axhline(report.n_engines, color="gray", linestyle=":", label=f"{report.n_engines} engines")
    needed.axvline(report.coded_bpw, color="gray", linestyle="--", label="this file")
    needed.set(xlabel="coded bits per weight", ylabel="engines", title=f"Engines that keep pace with {report.device.label}")
    needed.legend()

    names = [row.type_name for row in report.types]
    bottom = np.zeros(len(names))
    for loss in Loss:
        share = np.array([100 * row.losses[loss.name.lower()] for row in report.types])
        losses.bar(names, share, bottom=bottom, label=loss.name.lower())
        bottom += share
    losses.set(ylabel="% of lane cycles", title="What lanes do")
    losses.set_ylim(0, 140)  # room for the legend
    losses.legend(fontsize="small", ncols=3, loc="upper center")

    contexts = [tokens for tokens, _ in report.by_context]
    for k, cost in enumerate(report.places):
        times.plot(contexts, [ms[k] for _, ms in report.by_context], label=cost.place.value)
    times.set(xlabel="tokens of context", ylabel="ms per token", title="Time of a token")
    times.set_xscale("symlog", linthresh=512)
    times.legend()
    figure.suptitle(f"{report.device.label}, {report.n_engines} engines at {report.clock_hz / 1e9:g} GHz (modelled)")
    figure.savefig(path)
