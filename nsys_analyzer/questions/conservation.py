"""Whether every kernel is accounted for, once."""

from __future__ import annotations

from nsys_analyzer.analysis.summary import Coverage
from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Block, Cell, Column, Paragraph, Section, Table

_COUNTS = ("kernels", "same thread", "other thread", "graph", "no range", "attributed ms", "no range ms")
_ALWAYS = ("kernels", "same thread", "other thread", "no range")
_PHASES = ("in phases", "warm-up", "dropped")
_TEXT = (
    "Same thread + other thread + graph + no range = kernels, each kernel once, and so in time. *Same thread*: a range "
    "was open on the thread that launched it; *other thread*: it inherited the ranges of the thread that waits for it; "
    "*graph*: launched by the replay of a CUDA graph inside a range; *no range*: unattributed, launched outside every "
    "range. Where there is any, a second table says how many kernels lie in phases, how many of these are left out as "
    "*warm-up*, and how many launches were *dropped*: their kernel is not in the capture."
)


def answer(evidence: Evidence) -> Section:
    """Attributed + unattributed = all, in count and in time."""
    covered = [(capture.title, _figures(capture.coverage)) for capture in evidence.captures if capture.coverage]
    if not covered:
        return Section("conservation", "Conservation", ())
    blocks: list[Block] = [_table(_COUNTS, _ALWAYS, covered), Paragraph(_TEXT)]
    if any(figures["warm-up"] or figures["dropped"] for _, figures in covered):
        blocks.append(_table(_PHASES, _PHASES, covered))
    return Section("conservation", "Conservation", tuple(blocks))


def _table(titles: tuple[str, ...], always: tuple[str, ...], covered: list[tuple[str, dict[str, float]]]) -> Table:
    """The figures of each capture under these titles; one that is 0 everywhere is shown only where it must be."""
    shown = [title for title in titles if title in always or any(figures[title] for _, figures in covered)]
    columns = (Column("capture"), *(Column(title, "ms" if title.endswith("ms") else "count") for title in shown))
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, *(figures[t] for t in shown)) for name, figures in covered)
    return Table(columns, rows)


def _figures(coverage: Coverage) -> dict[str, float]:
    values = (
        coverage.kernels,
        coverage.how["same thread"],
        coverage.how["other thread"],
        coverage.how["graph"],
        coverage.unattributed,
        coverage.attributed_ms,
        coverage.unattributed_ms,
        coverage.in_phases,
        coverage.in_warmup,
        coverage.lost_launches,
    )
    return dict(zip((*_COUNTS, *_PHASES), values, strict=True))
