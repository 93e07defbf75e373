"""Whether every kernel is accounted for, once."""

from __future__ import annotations

from nsys_analyzer.analysis.summary import Coverage
from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Cell, Column, Paragraph, Section, Table

_TITLES = (
    "kernels", "same thread", "other thread", "graph", "no range", "attributed ms", "no range ms", "in phases",
    "warm-up", "dropped",
)  # fmt: skip
_ALWAYS = ("kernels", "same thread", "other thread", "no range")
_TEXT = (
    "Same thread + other thread + graph + no range = kernels, each kernel once, and so in time. *Same thread*: a range "
    "was open on the thread that launched it; *other thread*: it inherited the ranges of the thread that waits for it; "
    "*graph*: launched by the replay of a CUDA graph inside a range; *no range*: unattributed, launched outside every "
    "range. *In phases* counts those in a phase or step, *warm-up* those of them that are left out as warm-up, "
    "*dropped* the launches whose kernel the capture lacks. A column that is 0 everywhere is left out."
)


def answer(evidence: Evidence) -> Section:
    """Attributed + unattributed = all, in count and in time."""
    covered = [(capture.title, _figures(capture.coverage)) for capture in evidence.captures if capture.coverage]
    titles = dict.fromkeys(title for _, figures in covered for title, value in figures.items() if value)
    shown = [title for title in _TITLES if title in titles or title in _ALWAYS]
    columns = (Column("capture"), *(Column(t, "ms" if t.endswith("ms") else "count") for t in shown))
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, *(figures[t] for t in shown)) for name, figures in covered)
    return Section("conservation", "Conservation", (Table(columns, rows), Paragraph(_TEXT)))


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
    return dict(zip(_TITLES, values, strict=True))
