"""(b) Which kernel takes most GPU time in forward, in backward and in both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nsys_analyzer.analysis.classes import COMMUNICATION
from nsys_analyzer.analysis.statistics import KernelRow, merge_kernels
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import FEW, Evidence, nothing_measured, parts_and_enclosing
from nsys_analyzer.report.model import Answer, Block, Details, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import counted, milliseconds, percent
from nsys_analyzer.text import code

BOTH = "forward+backward"
_Tops = tuple[tuple[str, tuple[KernelRow, ...]], ...]


@dataclass(frozen=True)
class _Led:
    """A kernel that leads in a part of a capture: of each it is said, and of many captures of the whole alone."""

    capture: str
    scope: str
    kernel: KernelRow


def answer(evidence: Evidence) -> Section:
    """The top kernel of forward, backward and both, and whether it is the same one."""
    tops = {capture.title: tuple(_tops(capture)) for capture in evidence.measured}
    answers = tuple(
        Answer(title, _sentence(found, evidence), _short(found, evidence.labels))
        for title, found in tops.items()
        if found
    )
    rows = [
        _Led(title, f"{scope}{of}", row)
        for title, found in tops.items()
        for scope, kernels in found
        for of, row in (("", _leader(kernels)), (", communication", _beside(kernels)))
        if row
    ]
    blocks: tuple[Block, ...] = (*answers, *_tables(rows, evidence)) if answers else (nothing_measured(),)
    time = "GPU time" if evidence.kernel == "kernel" else "time"
    title = f"(b) Which {evidence.kernel} takes the most {time}?"
    return Section("top_kernel", title, blocks, f"top {evidence.kernel}")


def _tables(rows: list[_Led], evidence: Evidence) -> tuple[Block, ...]:
    """Of many captures the leader over all that was seen of each, the phases apart folded."""
    # The last one of a capture is over all of it, but for a collective's row behind it.
    of_all = {row.capture: row for row in sorted(rows, key=lambda row: row.kernel.kernel_class != COMMUNICATION)}
    if len(of_all) <= FEW:
        return (table(_fields(evidence, few=True), rows),)
    fields = _fields(evidence, few=False)
    parts = [row for row in rows if row is not of_all[row.capture]]
    folded = (Details(f"The phases apart: {len(parts)} rows", (table(fields, parts),)),) if parts else ()
    return table(fields, of_all.values()), *folded


def _fields(evidence: Evidence, *, few: bool) -> tuple[Field[_Led], ...]:
    """Of many captures the names and shares alone: theirs are long names, and the rest stands in their answers."""
    figures: tuple[Field[_Led], ...] = (
        Field("class", "text", lambda row: row.kernel.kernel_class),
        Field("launches", "count", lambda row: row.kernel.launches_per_instance),
        Field("ms", "ms", lambda row: row.kernel.ms_per_instance),
    )
    return (
        Field("capture", "text", lambda row: row.capture),
        Field("in one", "text", lambda row: row.scope),
        Field(f"{evidence.kernel} with the most time", "code", lambda row: evidence.labels[row.kernel.name]),
        *(figures if few else ()),
        Field("share", "percent", lambda row: row.kernel.share),
    )


def _tops(capture: CaptureSummary) -> Iterator[tuple[str, tuple[KernelRow, ...]]]:
    """Each scope with its kernels: forward, backward and both, or whatever else there is, then step and whole."""
    parts, enclosing = parts_and_enclosing(capture)
    phases = {phase.phase: phase for phase in parts}
    forward, backward = phases.get("forward"), phases.get("backward")
    passes = [phase for phase in (forward, backward) if phase]
    for phase in passes or parts[:1]:
        yield phase.phase, phase.kernels
    if forward and backward:
        yield BOTH, merge_kernels(forward.kernels, backward.kernels)
    yield from ((phase.phase, phase.kernels) for phase in enclosing)


def _leader(kernels: tuple[KernelRow, ...]) -> KernelRow:
    """The kernel with the most time; a collective only where nothing computes: its time is mostly waiting."""
    return next((row for row in kernels if row.kernel_class != COMMUNICATION), kernels[0])


def _beside(kernels: tuple[KernelRow, ...]) -> KernelRow | None:
    """The collective with the most time, where there is one beside a kernel that computes."""
    collective = next((row for row in kernels if row.kernel_class == COMMUNICATION), None)
    return None if collective is _leader(kernels) else collective


def _short(tops: _Tops, labels: dict[str, str]) -> str:
    leaders = ((scope, _leader(kernels)) for scope, kernels in tops)
    return "; ".join(f"{scope} {code(labels[row.name])} {percent(row.share)}" for scope, row in leaders)


def _sentence(tops: _Tops, evidence: Evidence) -> str:
    leaders = {scope: _leader(kernels).name for scope, kernels in tops}
    said = {scope: f"in {scope} {_named(kernels, evidence)}" for scope, kernels in tops}
    if BOTH in said:
        said[BOTH] += f" ({_verdict(leaders, evidence.kernel)})"
    return f"{'; '.join(said.values())}."


def _named(kernels: tuple[KernelRow, ...], evidence: Evidence) -> str:
    text, beside = _figures(_leader(kernels), evidence), _beside(kernels)
    return f"{text}, with communication beside it, {_figures(beside, evidence)}" if beside else text


def _figures(row: KernelRow, evidence: Evidence) -> str:
    launches = counted(row.launches_per_instance, "launch")
    return f"{code(evidence.labels[row.name])} ({launches}, {milliseconds(row.ms_per_instance)}, {percent(row.share)})"


def _verdict(leaders: dict[str, str], kernel: str) -> str:
    """Whether forward, backward and both together have one leader."""
    of_forward, of_backward, of_both = leaders["forward"], leaders["backward"], leaders[BOTH]
    if of_forward == of_backward == of_both:
        return f"the same {kernel} in all three"
    if of_forward == of_backward:
        return f"forward and backward have the same {kernel} in front, both together another"
    one = (
        "that of forward" if of_both == of_forward else "that of backward" if of_both == of_backward else "a third one"
    )
    return f"{one}; forward and backward differ"
