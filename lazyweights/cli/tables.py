"""Tables of text: for a terminal (with rich) or in Markdown."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from lazyweights.cli.messages import printable


@dataclass(frozen=True)
class Column:
    """Heading of a column, and whether its cells are text (left) or numbers (right)."""

    heading: str
    is_text: bool = False


def print_table(
    columns: list[Column],
    rows: list[list[str]],
    total: list[str] | None = None,
    *,
    markdown: bool = False,
    to_stderr: bool = False,
) -> None:
    """Print a table; a column whose cells are all empty is left out.

    Parameters
    ----------
    columns : list of Column
    rows : list of list of str
        Cells, one for each column. Control characters in them are escaped.
    total : list of str, optional
        A last row, set apart.
    markdown : bool
        Print Markdown source.
    to_stderr : bool
        Print on stderr.
    """
    body = [*rows, total] if total is not None else rows
    kept = [index for index in range(len(columns)) if any(row[index] for row in body)]
    columns = [columns[index] for index in kept]
    rows = [[printable(row[index]) for index in kept] for row in rows]
    total = None if total is None else [printable(total[index]) for index in kept]
    if markdown:
        print("\n".join(_markdown(columns, rows, total)), file=sys.stderr if to_stderr else sys.stdout)
        return

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=to_stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=to_stderr, highlight=False, width=10_000)  # files and pipes have no edge
    table = Table(box=box.SIMPLE_HEAD, show_footer=total is not None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(
            Text(column.heading),
            Text("" if total is None else total[index]),
            justify="left" if column.is_text else "right",
            overflow="fold",
            no_wrap=not column.is_text,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _markdown(columns: list[Column], rows: list[list[str]], total: list[str] | None) -> list[str]:
    lines = [
        [column.heading for column in columns],
        ["---" if column.is_text else "---:" for column in columns],
        *rows,
    ]
    if total is not None:
        lines.append([f"**{cell}**" if cell else "" for cell in total])
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
