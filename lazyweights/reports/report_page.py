"""A report as one page of HTML that loads nothing: styles, plots and scripts are inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lazyweights.errors import BackendUnavailableError
from lazyweights.reports import report_plots, report_tables
from lazyweights.reports.points import TUNED
from lazyweights.reports.report_data import split_name
from lazyweights.reports.report_tables import increase, megabytes, number
from lazyweights.reports.tensor_facts import DIAGONAL, HESSIAN

TEMPLATE = "report.html.j2"

ERROR_NOTES = {
    HESSIAN: "The error is the squared change of a tensor's outputs, relative to these, on the inputs of the calibration text.",
    DIAGONAL: "The error is the squared change of a tensor's outputs, relative to these, by the sums of squares of its inputs.",
}
PLAIN_NOTE = "The error is the squared change of the weights, relative to these."


def check_extras() -> None:
    """See that matplotlib and jinja2 are there, before anything is measured.

    Raises
    ------
    BackendUnavailableError
        If one of them is not installed.
    """
    from importlib.util import find_spec

    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise BackendUnavailableError(f"a report needs {' and '.join(missing)}: pip install 'lazyweights[report]'")


def document_page(document: Mapping[str, Any]) -> str:
    """Write a document as a page.

    Raises
    ------
    BackendUnavailableError
        If matplotlib or jinja2 is not installed.
    """
    check_extras()
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lazyweights.reports", "templates"), autoescape=lambda name: name == TEMPLATE,
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip

    def safe(plot: report_plots.Plot | None) -> report_plots.Plot | None:
        return None if plot is None else report_plots.Plot(Markup(plot.wide), Markup(plot.narrow))

    points = report_tables.points_by_id(document)
    evaluation = document["evaluation"]
    return environment.get_template(TEMPLATE).render(
        title=document["model"]["name"],
        subtitle=f"Stock formats of llama.cpp, their coded files{tuned_words(document)}, judged by llama.cpp on "
        f"{evaluation.get('n_chunks', 0)} chunks of {evaluation.get('n_ctx', 0)} tokens of {evaluation['text']}",
        headline=report_tables.headline(document),
        has_tuned=any(point["kind"] == TUNED for point in document["points"]),
        budgets=report_tables.budget_table(document),
        files=report_tables.file_table(document),
        equal_kld=report_tables.equal_kld_table(document),
        budget_plot=safe(report_plots.budget_plot(document)),
        perplexity_plot=safe(report_plots.perplexity_plot(document)),
        kld_plot=safe(report_plots.kld_plot(document)),
        error_note=error_note(document),
        parts=[
            {
                "name": point["name"], "about": about(point), "outside": outside_layers(point),
                "layers": safe(report_plots.layer_plot(point, f"layers-{k}")),
                "histograms": safe(report_plots.histogram_plot(point, f"codes-{k}")),
                "kinds": report_tables.kind_table(point), "tensors": report_tables.tensor_table(point),
            }
            for k, point in enumerate(points[name] for name in document["shown"])
        ],
        provenance=report_tables.provenance(document),
        left_out=document["left_out"],
        version=document["versions"]["lazyweights"],
    )  # fmt: skip


def tuned_words(document: Mapping[str, Any]) -> str:
    """Say in the subtitle whether there are tuned files."""
    return " and tuned files" if any(point["kind"] == TUNED for point in document["points"]) else ""


def about(point: Mapping[str, Any]) -> str:
    """Say in a line what a point is."""
    sizes = f"{megabytes(point['gguf_bytes'])}, coded {megabytes(point['coded_bytes'])} ({number(point['coded_bpw'], 3)} bpw)"
    return f"{sizes}, perplexity {increase(point)}"


def outside_layers(point: Mapping[str, Any]) -> str:
    """Say what the large tensors outside layers take: they are not in the plot."""
    found = [tensor for tensor in point["tensors"] if split_name(tensor["name"])[0] is None]
    total = sum(tensor["n_weights"] for tensor in point["tensors"])
    parts = [
        f"{split_name(tensor['name'])[1]} ({tensor['type']}) {megabytes(tensor['coded_bytes'])}"
        for tensor in found
        if 100 * tensor["n_weights"] > total
    ]
    return f"Outside layers, coded: {', '.join(parts)}." if parts else ""


def error_note(document: Mapping[str, Any]) -> str:
    """Say what the errors are."""
    kinds = {tensor["error_kind"] for point in document["points"] for tensor in point["tensors"] if tensor["error"] is not None}
    for kind in (HESSIAN, DIAGONAL):
        if kind in kinds:
            return ERROR_NOTES[kind]
    return PLAIN_NOTE if kinds else "Errors are not known: that needs the package gguf."
