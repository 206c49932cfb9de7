"""A report in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lazyweights.reports.report_tables import (
    Table,
    budget_table,
    equal_kld_table,
    file_table,
    headline,
    kind_table,
    points_by_id,
    provenance,
)


def document_markdown(document: Mapping[str, Any]) -> str:
    """Write a document as Markdown."""
    parts = [f"# {escape(document['model']['name'])}: bits and quality", escape(headline(document))]
    parts += ["## Within a budget of perplexity", markdown_table(budget_table(document))]
    parts += ["## All files", markdown_table(file_table(document))]
    if document["equal_kld"]:
        parts += [
            "## At equal KL divergence",
            "Stock sizes lie on the envelope of the stock formats, by a straight line in the logarithm of the divergence between "
            "neighbours; there are none outside its range.",
            markdown_table(equal_kld_table(document)),
        ]
    points = points_by_id(document)
    parts.append("## Tensors")
    for name in document["shown"]:
        parts += [f"### {escape(points[name]['name'])}", markdown_table(kind_table(points[name]))]
    if document["left_out"]:
        parts.append("## Left out")
        parts.append("\n".join(f"- {escape(row['name'])}: {escape(row['reason'])}" for row in document["left_out"]))
    parts.append("## How it was measured")
    parts.append("\n".join(f"- {key}: {escape(text)}" for key, text in provenance(document)))
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """Write a table as Markdown."""
    lines = [
        [column.heading for column in table.columns],
        [":--" if column.is_text else "--:" for column in table.columns],
        *([cell.text + (f" ({cell.note})" if cell.note else "") for cell in row.cells] for row in table.rows),
    ]
    return "\n".join("| " + " | ".join(escape(cell) for cell in line) + " |" for line in lines)


def escape(text: str) -> str:
    r"""Escape what Markdown would take for markup.

    >>> escape("a|b <i> Q4_K_M")
    'a\\|b &lt;i> Q4_K_M'
    """
    one_line = " ".join(text.split())
    return one_line.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
