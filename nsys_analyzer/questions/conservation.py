"""Whether every kernel is accounted for, once."""

from __future__ import annotations

from nsys_analyzer.analysis.summary import Coverage
from nsys_analyzer.questions.evidence import FEW, Evidence
from nsys_analyzer.report.model import Block, Cell, Column, Details, Paragraph, Section, Table, Unit
from nsys_analyzer.text import marked

_COUNTS = ("kernels", "same thread", "other thread", "graph", "no range", "attributed ms", "no range ms")
_ALWAYS = ("kernels", "same thread", "other thread", "no range")
_PHASES = ("in phases", "warm-up", "dropped")
_TEXT = marked(
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
    whole = sum(not figures["no range"] for _, figures in covered)
    # Of many captures a sentence says that no kernel lies outside every range.
    always = _ALWAYS[:-1] if len(covered) > FEW else _ALWAYS
    blocks: list[Block] = [_table(_COUNTS, always, covered, evidence.kernel)]
    if any(figures["warm-up"] or figures["dropped"] for _, figures in covered):
        blocks.append(_table(_PHASES, _PHASES, covered, evidence.kernel))
    if len(covered) > FEW:
        sentence = (
            f"In {whole} of {len(covered)} captures every {evidence.kernel} belongs to a range, and is counted once."
        )
        blocks = [Paragraph(sentence), Details(f"Capture by capture: {len(covered)} rows", tuple(blocks))]
    return Section("conservation", "Conservation", (*blocks, Paragraph(_TEXT.replace("kernel", evidence.kernel))))


def _table(
    titles: tuple[str, ...], always: tuple[str, ...], covered: list[tuple[str, dict[str, float]]], kernel: str
) -> Table:
    """The figures of each capture under these titles; one that is 0 everywhere is shown only where it must be."""
    shown = [title for title in titles if title in always or any(figures[title] for _, figures in covered)]
    units: list[Unit] = ["ms" if title.endswith("ms") else "count" for title in shown]
    titled = (Column(title.replace("kernel", kernel), unit) for title, unit in zip(shown, units, strict=True))
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, *(figures[t] for t in shown)) for name, figures in covered)
    return Table((Column("capture"), *titled), rows)


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
