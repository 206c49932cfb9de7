"""The tables of a report, from its document: what Markdown and the page print alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lazyweights.reports.points import SOURCE, TUNED

MISSING = "–"


@dataclass(frozen=True)
class Column:
    """A column: heading, whether its cells are text (left) or numbers (right), and what it means."""

    heading: str
    is_text: bool = False
    meaning: str = ""


@dataclass(frozen=True)
class Cell:
    """What is printed, the number to sort by (None: the text), and what is added in smaller letters or in brackets."""

    text: str
    value: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """Cells, one for each column; the id of the point that the row is about, and whether it is its coded file."""

    cells: tuple[Cell, ...]
    point: str = ""
    kind: str = ""
    is_coded: bool = False


@dataclass(frozen=True)
class Table:
    """Columns and rows."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


def megabytes(n_bytes: float | None) -> str:
    """Write a size in 10^6 bytes; below one MB in 10^3.

    >>> megabytes(98_362_432), megabytes(2_312_928), megabytes(12_345), megabytes(None)
    ('98.36 MB', '2.31 MB', '12.3 kB', '–')
    """
    if n_bytes is None:
        return MISSING
    return f"{n_bytes / 1e6:.2f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.1f} kB"


def percent(share: float | None, digits: int = 1, sign: bool = False) -> str:
    """Write a share in percent.

    >>> percent(0.1234), percent(0.0037, 2, sign=True), percent(-0.01), percent(None)
    ('12.3 %', '+0.37 %', '−1.0 %', '–')
    """
    if share is None:
        return MISSING
    return f"{100 * share:{'+' if sign else ''}.{digits}f} %".replace("-", "−")


def number(value: float | None, digits: int) -> str:
    """Write a number.

    >>> number(5.8499, 3), number(None, 3)
    ('5.850', '–')
    """
    return MISSING if value is None else f"{value:.{digits}f}".replace("-", "−")


def with_error(estimate: Mapping[str, float | None] | None, digits: int) -> str:
    """Write a value and its standard error.

    >>> with_error({"value": 23.2491, "error": 0.412}, 3), with_error({"value": 1.0, "error": None}, 1)
    ('23.249 ± 0.412', '1.0')
    """
    if estimate is None or estimate["value"] is None:
        return MISSING
    error = "" if not estimate["error"] else f" ± {number(estimate['error'], digits)}"
    return number(estimate["value"], digits) + error


def increase(point: Mapping[str, Any]) -> str:
    """Write what perplexity is over that of the source, with its error.

    >>> increase({"kind": "stock", "ratio": {"value": 1.0037, "error": 0.0012}})
    '+0.37 ± 0.12 %'
    """
    ratio = point["ratio"]
    if point["kind"] == SOURCE or ratio["value"] is None:
        return MISSING
    error = "" if not ratio["error"] else f" ± {100 * ratio['error']:.2f}"
    return f"{100 * (ratio['value'] - 1):+.2f}{error} %".replace("-", "−")


def same_top(point: Mapping[str, Any]) -> str:
    """Write the share of positions with the same most likely token."""
    found = point["same_top"]
    if found is None:
        return MISSING
    return with_error({key: None if share is None else 100 * share for key, share in found.items()}, 1) + " %"


def points_by_id(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The points of a document by their ids."""
    return {point["id"]: point for point in document["points"]}


def budget_table(document: Mapping[str, Any]) -> Table:
    """Return, for each budget, the smallest files within it, and what ours saves."""
    points = points_by_id(document)
    has_tuned = any(point["kind"] == TUNED for point in document["points"])
    columns = [
        Column("budget", meaning="perplexity over that of the source, at most"),
        Column("smallest stock GGUF", True), Column("size"), Column("smallest coded stock file", True), Column("size"),
        Column("saved", meaning="of the smallest stock GGUF, by lossless coding alone"),
    ]  # fmt: skip
    if has_tuned:
        columns += [
            Column("smallest tuned file", True), Column("size"),
            Column("saved over stock", meaning="of the smallest stock GGUF"),
            Column("saved over coded stock", meaning="of the smallest coded stock file"),
        ]  # fmt: skip
    rows = []
    for choice in document["budgets"]:
        cells = [Cell(f"{choice['percent']:g} %", choice["percent"])]
        for role, size in (("stock", "gguf_bytes"), ("coded_stock", "coded_bytes"), ("tuned", "coded_bytes")):
            if role == "tuned" and not has_tuned:
                break
            point = points.get(choice[role])
            cells.append(Cell(point["name"], note=increase(point)) if point else Cell("none"))
            n_bytes = point[size] if point else None
            cells.append(Cell(megabytes(n_bytes), n_bytes))
            if role == "coded_stock":
                cells.append(Cell(percent(choice["saving_by_coding"]), choice["saving_by_coding"]))
        if has_tuned:
            cells += [Cell(percent(choice[key]), choice[key]) for key in ("saving", "saving_over_coded")]
        rows.append(Row(tuple(cells)))
    return Table(tuple(columns), tuple(rows))


def file_table(document: Mapping[str, Any]) -> Table:
    """Return one row for each file: the GGUF and the coded file of each point."""
    columns = (
        Column("model", True), Column("file", True), Column("size"),
        Column("bpw", meaning="bits per weight, the whole file counted"),
        Column("coding saves", meaning="of the GGUF, losslessly"),
        Column("perplexity"), Column("over source", meaning="perplexity over that of the source; error of paired positions"),
        Column("KLD", meaning="mean KL divergence from the source, nats"),
        Column("KLD 99 %", meaning="quantile of the divergence"), Column("KLD 99.9 %", meaning="quantile of the divergence"),
        Column("same top", meaning="positions at which both find the same token most likely"),
    )  # fmt: skip
    rows = []
    for point in document["points"]:
        for coded in (False, True):
            size, bpw = (point["coded_bytes"], point["coded_bpw"]) if coded else (point["gguf_bytes"], point["bpw"])
            saved = 1 - size / point["gguf_bytes"] if coded else None
            kld, quantiles = point["kld"], point["kld_quantiles"]
            rows.append(Row((
                Cell(point["name"]), Cell("coded" if coded else "GGUF"), Cell(megabytes(size), size), Cell(number(bpw, 3), bpw),
                Cell(percent(saved) if coded else "", saved), Cell(with_error(point["ppl"], 3), point["ppl"]["value"]),
                Cell(increase(point), point["ratio"]["value"]), Cell(with_error(kld, 5), kld and kld["value"]),
                *(Cell(number(quantiles.get(key), 3), quantiles.get(key)) for key in ("99.0%", "99.9%")),
                Cell(same_top(point), point["same_top"] and point["same_top"]["value"]),
            ), point["id"], point["kind"], coded))  # fmt: skip
    return Table(columns, tuple(rows))


def equal_kld_table(document: Mapping[str, Any]) -> Table:
    """Return what each tuned file saves at its KL divergence."""
    points = points_by_id(document)
    columns = (
        Column("tuned", True), Column("KLD"), Column("coded size"), Column("stock GGUF", meaning="on the envelope, interpolated"),
        Column("saved"), Column("coded stock", meaning="on the envelope, interpolated"), Column("saved over coded"),
    )  # fmt: skip
    rows = [
        Row((
            Cell(points[row["point"]]["name"]), Cell(number(row["kld"], 5), row["kld"]),
            Cell(megabytes(row["coded_bytes"]), row["coded_bytes"]), Cell(megabytes(row["stock_bytes"]), row["stock_bytes"]),
            Cell(percent(row["saving"]), row["saving"]), Cell(megabytes(row["coded_stock_bytes"]), row["coded_stock_bytes"]),
            Cell(percent(row["saving_over_coded"]), row["saving_over_coded"]),
        ), row["point"], TUNED, True)
        for row in document["equal_kld"]
    ]  # fmt: skip
    return Table(columns, tuple(rows))


def kind_table(point: Mapping[str, Any]) -> Table:
    """Return one row for each kind and type of tensor of a point."""
    columns = (
        Column("tensors", True), Column("type", True), Column("number"), Column("weights"), Column("size"), Column("coded size"),
        Column("bpw"), Column("coded bpw"), Column("entropy", meaning="order-0 entropy of the codes of each tensor, bits"),
    )  # fmt: skip
    rows = []
    for kind in point["kinds"]:
        n = kind["n_weights"]
        bpw, coded_bpw = 8 * kind["packed_bytes"] / n, 8 * kind["coded_bytes"] / n
        rows.append(Row((
            Cell(kind["kind"]), Cell(kind["type"]), Cell(str(kind["n_tensors"]), kind["n_tensors"]), Cell(f"{n:,}", n),
            Cell(megabytes(kind["packed_bytes"]), kind["packed_bytes"]),
            Cell(megabytes(kind["coded_bytes"]), kind["coded_bytes"]), Cell(number(bpw, 3), bpw),
            Cell(number(coded_bpw, 3), coded_bpw), Cell(number(kind["entropy_bits"], 3), kind["entropy_bits"]),
        )))  # fmt: skip
    return Table(columns, tuple(rows))


def tensor_table(point: Mapping[str, Any]) -> Table:
    """Return one row for each tensor of a point."""
    columns = (
        Column("tensor", True), Column("type", True), Column("weights"), Column("bpw"),
        Column("entropy", meaning="order-0 entropy of the codes, bits"), Column("coded bpw"),
        Column("error", meaning="squared change of the outputs, relative"),
    )  # fmt: skip
    rows = []
    for tensor in point["tensors"]:
        n = tensor["n_weights"]
        bpw, coded_bpw = 8 * tensor["packed_bytes"] / n, 8 * tensor["coded_bytes"] / n
        error = tensor["error"]
        rows.append(Row((
            Cell(tensor["name"]), Cell(tensor["type"]), Cell(f"{n:,}", n), Cell(number(bpw, 3), bpw),
            Cell(number(tensor["entropy_bits"], 3), tensor["entropy_bits"]), Cell(number(coded_bpw, 3), coded_bpw),
            Cell(MISSING if error is None else f"{error:.1e}".replace("-", "−"), error),
        )))  # fmt: skip
    return Table(columns, tuple(rows))


def provenance(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was measured and how, as pairs of a heading and a sentence."""
    evaluation, calibration, machine = document["evaluation"], document["calibration"], document["machine"]
    n_chunks, n_ctx, n_scored = (evaluation.get(key, 0) for key in ("n_chunks", "n_ctx", "n_scored"))
    pairs = [
        ("model", f"{document['model']['file']}, {evaluation.get('description', '')}".rstrip(", ")),
        (
            "text",
            f"{evaluation['text']}: {n_chunks} chunks of {n_ctx} tokens, of which {n_scored:,} are scored, "
            f"{'with' if evaluation.get('adds_bos') else 'without'} BOS",
        ),
    ]  # fmt: skip
    if calibration:
        pairs.append(("calibration", f"{_calibration_words(calibration)}; stock formats get their diagonal as imatrix"))
    else:
        pairs.append(("calibration", "none: stock formats are made without an imatrix"))
    if document["tuned_calibration"]:
        pairs.append(("tuned quantizer", _calibration_words(document["tuned_calibration"])))
    pairs.append(("judge", "llama.cpp, by the rules of llama-perplexity; errors are standard errors over the scored tokens"))
    versions = document["versions"]
    pairs.append(("versions", f"lazyweights {versions['lazyweights']}, {versions['llama_cpp']}, numpy {versions['numpy']}"))
    pairs.append(
        ("machine", f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}")
    )
    return pairs


def _calibration_words(facts: Mapping[str, Any]) -> str:
    what = {"hessian": "Hessians", "curvature": "curvature"}.get(facts["kind"], "sums of squares")
    text = facts["text"] or "an unnamed text"
    return f"{what} of the inputs of weights on up to {facts['n_chunks']} chunks of {facts['n_ctx']} tokens of {text}"


def headline(document: Mapping[str, Any]) -> str:
    """Return the main finding in one or two sentences: the middle budget that both stock and ours meet, or coding alone."""
    points = points_by_id(document)
    met = [choice for choice in document["budgets"] if choice["stock"]]
    tuned = [choice for choice in met if choice["tuned"]]
    if not met:
        return "No stock format keeps any of the budgets."
    choice = (tuned or met)[(len(tuned or met) - 1) // 2]
    stock, coded = points[choice["stock"]], points[choice["coded_stock"]]
    text = (
        f"Within {choice['percent']:g} % of the perplexity of the source, the smallest stock file is {stock['name']} with "
        f"{megabytes(stock['gguf_bytes'])}; coded losslessly, {coded['name']} takes {megabytes(coded['coded_bytes'])}, "
        f"{percent(choice['saving_by_coding'])} less."
    )
    if not tuned:
        return text
    ours = points[choice["tuned"]]
    change = "less" if choice["saving"] >= 0 else "more"
    return (
        f"{text} The tuned file takes {megabytes(ours['coded_bytes'])}, {percent(abs(choice['saving']))} {change} than the stock "
        f"file and {percent(abs(choice['saving_over_coded']))} {'less' if choice['saving_over_coded'] >= 0 else 'more'} than the "
        "coded one."
    )
