"""(c) Which other kernels and classes matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from nsys_analyzer.analysis.kernels.class_rules import CLASSES
from nsys_analyzer.analysis.summary.complete import (
    compared_phases,
    parts_and_enclosing,
)
from nsys_analyzer.analysis.summary.statistics import MATMUL, ClassShares, merge_kernels
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.evidence import FEW, NOTHING_MEASURED, Evidence, figures_of, kernel_word
from nsys_analyzer.report.model import Answer, Bars, Block, Section, Table
from nsys_analyzer.report.sections.sweep import over_sweep
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import counted, milliseconds, percent

_SHOWN = 12
_MEMORY = {"memcpy": "copies of memory", "memset": "fills of memory"}
_MATTERS = 0.03
#: Letters of the longest word in a column of kernels.
_WORD = 16
_Known = tuple[str, ClassShares]


#: The name and class of a kernel; the kind and "memory" of copies and fills.
_Key = tuple[str, str]


def answer(evidence: Evidence) -> Section:
    """The kernels with the most time, phase by phase, and the classes beside matmul."""
    known = [
        (capture.title, shares) for capture in evidence.measured if (shares := capture.matmul and capture.matmul.of_all)
    ]
    blocks: list[Block] = list(_of_sweep(evidence, known)) if len(evidence.captures) > FEW else []
    for capture in evidence.measured:
        blocks += [_answer(capture)] if compared_phases(capture) else []
        blocks += [_table(capture, phases, evidence.labels) for phases in parts_and_enclosing(capture) if phases]
    blocks += figures_of(evidence, lambda capture: _figure(capture, evidence.labels))
    title = f"(c) Which other {evidence.kernel}s and classes matter?"
    return Section("other_kernels", title, tuple(blocks) or (NOTHING_MEASURED,), "others")


def _of_sweep(evidence: Evidence, known: Sequence[_Known]) -> Iterator[Block]:
    """The share of the heaviest class beside matmul, then of all classes that take a share worth naming of any."""
    heaviest = {name: max((shares.of(name) for _, shares in known), default=0.0) for name in CLASSES}
    named = sorted((name for name in CLASSES if heaviest[name] >= _MATTERS), key=lambda name: -heaviest[name])
    of = f"of the total {evidence.kernel} time of a step, or of a forward pass alone"
    for name in [name for name in named if name != MATMUL][:1]:
        share = partial(_share_in_capture, name)
        yield from over_sweep(evidence, share, "percent", f"Share of {name} {evidence.kernel}s", "other-class")
    fields: tuple[Field[_Known], ...] = (Field("capture", "text", lambda row: row[0]), *map(_share_of, named))
    yield table(fields, known, f"Shares {of}:")


def _share_in_capture(name: str, capture: CaptureSummary) -> float | None:
    shares = capture.matmul.of_all if capture.matmul else None
    return shares.of(name) if shares else None


def _share_of(name: str) -> Field[_Known]:
    return Field(name, "percent", lambda row: row[1].of(name) or None)


def _answer(capture: CaptureSummary) -> Answer:
    """The classes beside matmul that take a share worth naming."""
    parts = []
    for phase in compared_phases(capture):
        others = [row for row in phase.classes if row.kernel_class != MATMUL and row.share >= _MATTERS]
        named = ", ".join(f"{row.kernel_class} {percent(row.share)}" for row in others)
        parts.append(f"{phase.phase}: {named or 'nothing above 3 %'}")
    text = "; ".join(parts)
    return Answer(capture.title, f"besides matmul, {text}.", text)


def _table(capture: CaptureSummary, phases: tuple[PhaseSummary, ...], labels: dict[str, str]) -> Table:
    """The ms and the share of each kernel in each phase, and the ms of copies and fills, which have no share."""
    every, kernel = merge_kernels(*(phase.kernels for phase in phases)), kernel_word(capture)
    keys = [row.key for row in every[:_SHOWN]]
    copies = [(kind, "memory") for kind in _MEMORY if any(row.kind == kind for p in phases for row in p.memory)]
    fields: tuple[Field[_Key], ...] = (
        Field(kernel, "code", lambda key: _MEMORY[key[0]] if key in copies else _narrow(labels[key[0]])),
        Field("class", "text", lambda key: key[1]),
        *(field for phase in phases for field in _in_phase(phase)),
    )
    sums = ", ".join(
        f"{p.phase} {milliseconds(p.kernel_time_ms.mean)}" for p in phases if p.kernel_time_ms.mean is not None
    )
    caption = (
        f"The {counted(len(keys), kernel)} with the most time, of {len(every)}. "
        f"Shares are of the phase's total {kernel} time: {sums}."
    )
    return table(fields, [*keys, *copies], caption, capture=capture.title, names=2)


def _narrow(label: str) -> str:
    """A label whose words leave room for the columns beside it; a line breaks between words alone."""
    words = label.split(" ")
    return " ".join(word if len(word) <= _WORD else f"{word[: _WORD // 2]}…{word[1 - _WORD // 2 :]}" for word in words)


def _in_phase(phase: PhaseSummary) -> tuple[Field[_Key], ...]:
    rows = {row.key: row for row in phase.kernels}
    ms = {key: row.ms_per_instance for key, row in rows.items()}
    ms |= {(row.kind, "memory"): row.ms_per_instance for row in phase.memory}
    return (
        Field(f"{phase.phase} ms", "ms", ms.get),
        Field("share", "percent", lambda key: rows[key].share if key in rows else None),
    )


def _figure(capture: CaptureSummary, labels: dict[str, str]) -> Bars:
    parts, enclosing = parts_and_enclosing(capture)
    phases = parts or enclosing[-1:]
    shown = merge_kernels(*(phase.kernels for phase in phases))[:_SHOWN]
    return Bars(
        f"{capture.title}-top-kernels",
        f"{capture.title}: {kernel_word(capture)}s with the most time in {' + '.join(p.phase for p in phases)}",
        tuple(labels[row.name] for row in shown),
        (("ms", tuple(row.ms_per_instance for row in shown)),),
        "ms per instance",
        "horizontal",
        tuple(row.kernel_class for row in shown),
    )
