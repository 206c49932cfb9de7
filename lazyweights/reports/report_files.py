"""The files of a report: measure, put together, write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from lazyweights.container.atomic import AtomicFile
from lazyweights.llama import library
from lazyweights.reports.model_report import Measurements, ReportOptions, Watcher, measure_model
from lazyweights.reports.report_data import build_document, document_json
from lazyweights.reports.report_markdown import document_markdown
from lazyweights.reports.report_page import check_extras, document_page

JSON_NAME, MARKDOWN_NAME, PAGE_NAME = "report.json", "report.md", "report.html"


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes
    ----------
    document : dict
        What `report.json` holds.
    measurements : Measurements
    paths : tuple of str
        JSON, Markdown, page.
    """

    document: dict[str, Any]
    measurements: Measurements
    paths: tuple[str, str, str]


def make_report(
    source: str | os.PathLike[str], text: str | os.PathLike[str], folder: str | os.PathLike[str], *,
    hessians: str | os.PathLike[str] | None = None, curvature: str | os.PathLike[str] | None = None,
    calibration: str | os.PathLike[str] | None = None, options: ReportOptions | None = None, watcher: Watcher | None = None,
) -> Report:  # fmt: skip
    """Measure a model (`measure_model` has the parameters) and write ``report.json``, ``report.md`` and ``report.html``.

    The files of an earlier report in the folder are replaced.

    Raises
    ------
    BackendUnavailableError
        If llama.cpp, matplotlib or jinja2 is not installed.
    LazyWeightsError, ValueError
        As `measure_model`.
    """
    check_extras()
    library.load()
    options = options or ReportOptions()
    measured = measure_model(
        source, text, folder, hessians=hessians, curvature=curvature, calibration=calibration, options=options, watcher=watcher
    )
    document = build_document(measured, source, text, options)
    written = {
        JSON_NAME: document_json(document), MARKDOWN_NAME: document_markdown(document), PAGE_NAME: document_page(document)
    }
    paths = [os.path.join(os.fspath(folder), name) for name in written]
    for path, content in zip(paths, written.values(), strict=True):
        with AtomicFile(path, force=True) as file:
            file.write(content.encode("utf-8", "replace"))
    return Report(document, measured, (paths[0], paths[1], paths[2]))
