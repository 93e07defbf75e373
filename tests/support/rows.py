"""Rows of experiments as their targets write them, from flat figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from nsys_analyzer.experiments.model import AnyRow, Bench, Results, Row, Settings
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.runs.rows import CaseTarget, typed

C = TypeVar("C")
F = TypeVar("F")
H200 = {"gpu": "NVIDIA H200", "torch": "2.11.0"}


def unpadded(page: str) -> str:
    """A page with plain spaces, and without those that align the cells of its tables."""
    return re.sub(" {2,}", " ", page.replace("\N{NO-BREAK SPACE}", " "))


def page(bench: Bench, rows: Sequence[AnyRow], **more: Any) -> str:
    """The section of rows as markdown; ``more`` is what else the results hold."""
    return unpadded(render(Report("x", (bench.section(Results(tuple(rows), **more)),)), {}))


def typed_row(
    target: CaseTarget[C, F], case: Mapping[str, Any], figures: Mapping[str, Any], status: str = "ok",
    message: str = "", machine: Mapping[str, Any] = H200, environment: Mapping[str, str] | None = None,
) -> Row[C, F]:  # fmt: skip
    """A row whose case and figures are given as the file of rows has them; counts may be floats."""
    counts = {k: int(v) for k, v in figures.items() if isinstance(v, float) and k.endswith(("bytes", "flops"))}
    row = Row(target.module, dict(case), status, message, {**figures, **counts}, machine, environment or {})
    return typed(row, target)


def default_settings(bench: Bench, device: str = "cuda", **changes: Any) -> Settings:
    """What a bench is asked for where the command line says nothing, but for the changes."""
    return Settings(device, {**{one.name: one.default_on(device) for one in bench.options}, **changes})
