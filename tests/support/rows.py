"""Builds rows of experiments from flat figures, and the sections that are made from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from nsys_analyzer.experiments.model import AnyRow, Bench, Results
from nsys_analyzer.experiments.section import make_section
from nsys_analyzer.inputs.rows import CaseTarget, Row, convert_row
from nsys_analyzer.report.model import Bars, Lines, Report, Table, unfold_details
from nsys_analyzer.report.renderers.markdown import render

C = TypeVar("C")
F = TypeVar("F")
H200 = {"gpu": "NVIDIA H200", "torch": "2.11.0"}


def unpadded(page: str) -> str:
    """A page with plain spaces and minus signs, and without the spaces that align the cells of its tables."""
    return re.sub(" {2,}", " ", page.replace("\N{NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-"))


def page(bench: Bench, rows: Sequence[AnyRow]) -> str:
    """The section of rows as markdown."""
    report = Report("x", (make_section(bench, Results(tuple(rows))),))
    return unpadded(render(report, {figure.key: figure.key for figure in report.figures}))


def check(text: str, says: Sequence[str], says_not: Sequence[str] = ()) -> None:
    """Checks what a page says, and what it does not."""
    assert [phrase for phrase in says if phrase not in text] == []
    assert [phrase for phrase in says_not if phrase in text] == []


def table(bench: Bench, rows: Sequence[AnyRow], caption: str = "") -> Table:
    """The first table of a section whose caption begins so."""
    blocks = unfold_details(make_section(bench, Results(tuple(rows))).blocks)
    return next(block for block in blocks if isinstance(block, Table) and str(block.caption).startswith(caption))


def cells(bench: Bench, rows: Sequence[AnyRow], caption: str = "") -> list[dict[str, Any]]:
    """The cells of each row of that table, by the titles of its columns."""
    found = table(bench, rows, caption)
    return [dict(zip([column.title for column in found.columns], line, strict=True)) for line in found.rows]


def figures(bench: Bench, rows: Sequence[AnyRow]) -> dict[str, Any]:
    """The figures of a section by their keys."""
    blocks = unfold_details(make_section(bench, Results(tuple(rows))).blocks)
    return {block.key: block for block in blocks if isinstance(block, Bars | Lines)}


def typed_row(
    target: CaseTarget[C, F], case: Mapping[str, Any], figures: Mapping[str, Any], status: str = "ok",
    message: str = "", machine: Mapping[str, Any] = H200,
) -> Row[C, F]:  # fmt: skip
    """A row whose case and figures are given as the file of rows has them; counts may be floats."""
    counts = {k: int(v) for k, v in figures.items() if isinstance(v, float) and k.endswith(("bytes", "flops"))}
    row = Row(target.module, dict(case), status, message, {**figures, **counts}, machine)
    return convert_row(row, target)


def default_settings(bench: Bench, device: str = "cuda", **changes: Any) -> dict[str, Any]:
    """What a bench is asked for where the command line says nothing, but for the changes."""
    return {"device": device, **{one.name: one.default_on(device) for one in bench.options}, **changes}
