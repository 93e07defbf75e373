"""(c) Which other kernels and classes matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.classes import CLASSES
from nsys_analyzer.analysis.statistics import KernelRow, merge_kernels
from nsys_analyzer.analysis.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.questions.evidence import (
    FEW,
    Evidence,
    compared_phases,
    figures_of,
    kernel_word,
    nothing_measured,
    parts_and_enclosing,
)
from nsys_analyzer.questions.matmul_share import classes_of_all
from nsys_analyzer.report.model import Answer, Bars, Block, Cell, Column, Section, Table
from nsys_analyzer.report.units import counted, milliseconds, percent

_SHOWN = 12
_MEMORY = {"memcpy": "copies of memory", "memset": "fills of memory"}
_MATTERS = 0.03


def answer(evidence: Evidence) -> Section:
    """The kernels with the most time, phase by phase, and what is left beside the products."""
    blocks: list[Block] = [_answer(capture) for capture in evidence.measured if compared_phases(capture)]
    blocks += [_grid(evidence)] if len(evidence.measured) > FEW else []
    blocks += [table for capture in evidence.measured for table in _tables(capture, evidence.labels)]
    blocks += figures_of(evidence, lambda c: _figure(c, evidence.figure_key(c, "top-kernels"), evidence.labels))
    return Section(
        "other_kernels",
        f"(c) Which other {evidence.kernel}s and classes matter?",
        tuple(blocks) or (nothing_measured(),),
        "others",
    )


def _grid(evidence: Evidence) -> Table:
    """One row for each capture: the classes that take a share worth naming of any of them."""
    classes = {c.title: {row.kernel_class: row.share for row in classes_of_all(c) or ()} for c in evidence.measured}
    heaviest = {name: max(shares.get(name, 0.0) for shares in classes.values()) for name in CLASSES}
    named = sorted((name for name in CLASSES if heaviest[name] >= _MATTERS), key=lambda name: -heaviest[name])
    rows = tuple((title, *(shares.get(name) for name in named)) for title, shares in classes.items() if shares)
    columns = (Column("capture"), *(Column(name, "percent") for name in named))
    return Table(columns, rows, f"Shares of the {evidence.kernel} sum of a step, or of a forward pass alone:")


def _answer(capture: CaptureSummary) -> Answer:
    """The classes beside the products that take a share worth naming."""
    parts = []
    for phase in compared_phases(capture):
        others = [row for row in phase.classes if row.kernel_class != "matmul" and row.share >= _MATTERS]
        named = ", ".join(f"{row.kernel_class} {percent(row.share)}" for row in others)
        parts.append(f"{phase.phase}: {named or 'nothing above 3 %'}")
    text = "; ".join(parts)
    return Answer(capture.title, f"besides matmul, {text}.", text)


def _tables(capture: CaptureSummary, labels: dict[str, str]) -> Iterator[Table]:
    """The kernels of the phases; those of the step and of the whole capture in a table of their own."""
    return (_table(capture, phases, labels) for phases in parts_and_enclosing(capture) if phases)


def _table(capture: CaptureSummary, phases: tuple[PhaseSummary, ...], labels: dict[str, str]) -> Table:
    shown = _most_important(phases)
    kernel = kernel_word(capture)
    columns = [Column(kernel, "code"), Column("class")]
    keys = {row.key for row in shown}
    filled = [phase for phase in phases if any(row.key in keys for row in phase.kernels)]
    for phase in filled:
        columns += [Column(f"{phase.phase} ms", "ms"), Column("share", "percent")]
    tables = [{row.key: row for row in phase.kernels} for phase in filled]
    rows = [(labels[row.name], row.kernel_class, *_cells(row, tables)) for row in shown]
    rows += [(_MEMORY[kind], "memset/memcpy", *_memory_cells(kind, filled)) for kind in _memory_kinds(filled)]
    total = len(merge_kernels(*(phase.kernels for phase in phases)))
    sums = ", ".join(
        f"{p.phase} {milliseconds(p.kernel_sum_ms.mean)}" for p in phases if p.kernel_sum_ms.mean is not None
    )
    apart = " Copies and fills are GPU operations but no kernels: they have no share." if len(rows) > len(shown) else ""
    caption = (
        f"the {counted(len(shown), kernel)} with the most time, of {total}. "
        f"Shares are of the phase's total {kernel} time: {sums}.{apart}"
    )
    return Table(tuple(columns), tuple(rows), caption, capture.title)


def _memory_kinds(phases: Sequence[PhaseSummary]) -> list[str]:
    """The kinds of copies and fills that any of the phases has."""
    return [kind for kind in _MEMORY if any(row.kind == kind for phase in phases for row in phase.memory)]


def _memory_cells(kind: str, phases: Sequence[PhaseSummary]) -> tuple[Cell, ...]:
    """Time of the copies or fills of each phase, and no share."""
    cells: list[Cell] = []
    for phase in phases:
        cells += [next((row.ms_per_instance for row in phase.memory if row.kind == kind), None), None]
    return tuple(cells)


def _most_important(phases: tuple[PhaseSummary, ...]) -> tuple[KernelRow, ...]:
    return merge_kernels(*(phase.kernels for phase in phases))[:_SHOWN]


def _cells(row: KernelRow, tables: list[dict[tuple[str, str], KernelRow]]) -> tuple[Cell, ...]:
    cells: list[Cell] = []
    for table in tables:
        found = table.get(row.key)
        cells += [found.ms_per_instance, found.share] if found else [None, None]
    return tuple(cells)


def _figure(capture: CaptureSummary, key: str, labels: dict[str, str]) -> Bars:
    parts, enclosing = parts_and_enclosing(capture)
    phases = parts or enclosing[-1:]
    shown = _most_important(phases)
    return Bars(
        key,
        f"{capture.title}: {kernel_word(capture)}s with the most time in {' + '.join(p.phase for p in phases)}",
        tuple(labels[row.name] for row in shown),
        (("ms", tuple(row.ms_per_instance for row in shown)),),
        "ms per instance",
        "horizontal",
    )
