"""(b) Which kernel takes most GPU time in forward, in backward and in both."""

from __future__ import annotations

from nsys_analyzer.analysis.summary.complete import BOTH
from nsys_analyzer.analysis.summary.statistics import KernelRow, Leader
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import FEW, NOTHING_MEASURED, Evidence
from nsys_analyzer.report.model import Answer, Block, Section, Table
from nsys_analyzer.report.sections.sweep import over_sweep
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import counted, percent
from nsys_analyzer.text import joined, phrase

#: A capture, a part of it, and the kernel that leads there.
_Led = tuple[str, str, KernelRow]


def answer(evidence: Evidence) -> Section:
    """The top kernel of forward, backward and both, and whether it is the same one."""
    known = [(capture, found) for capture in evidence.measured if (found := capture.top_kernels)]
    title = f"Launches of the top {evidence.kernel}"
    blocks: list[Block] = [*over_sweep(evidence, _launches, "count", title, "top-launches")]
    if len(evidence.captures) > FEW and known:
        phase, name, _, launches, _, share = _fields(evidence)
        capture_field: Field[_Led] = Field("capture", "text", lambda row: row[0])
        rows = [(capture.title, found[-1].scope, found[-1].kernel) for capture, found in known]
        caption = f"The top {evidence.kernel} of forward and backward together, or of the longest part captured:"
        blocks.append(table((capture_field, phase, name, launches, share), rows, caption))
    for capture, found in known:
        blocks += [_answer(capture, found, evidence), _table(capture, found, evidence)]
    time = "GPU time" if evidence.kernel == "kernel" else "time"
    title = f"(b) Which {evidence.kernel} takes the most {time}?"
    return Section("top_kernel", title, tuple(blocks) or (NOTHING_MEASURED,), f"top {evidence.kernel}")


def _fields(evidence: Evidence) -> tuple[Field[_Led], ...]:
    return (
        Field("phase", "text", lambda row: row[1]),
        Field(f"{evidence.kernel} with the most time", "code", lambda row: evidence.labels[row[2].name]),
        Field("class", "text", lambda row: row[2].kernel_class),
        Field("launches", "count", lambda row: row[2].launches_per_instance),
        Field("ms", "ms", lambda row: row[2].ms_per_instance),
        Field("share", "percent", lambda row: row[2].share),
    )


def _table(capture: CaptureSummary, found: tuple[Leader, ...], evidence: Evidence) -> Table:
    """The leaders of each part, that of communication in a row of its own."""
    rows = [(capture.title, one.scope, one.kernel) for one in found]
    rows += [(capture.title, f"{one.scope}, communication", one.collective) for one in found if one.collective]
    caption = f"The {evidence.kernel} with the most time, and its share of the phase's total {evidence.kernel} time."
    return table(_fields(evidence), rows, caption, capture=capture.title)


def _launches(capture: CaptureSummary) -> float | None:
    """Launches of the kernel that leads over the most that was seen of a capture."""
    found = capture.top_kernels
    return found[-1].kernel.launches_per_instance if found else None


def _answer(capture: CaptureSummary, found: tuple[Leader, ...], evidence: Evidence) -> Answer:
    """The leader of each part, its launches and share, and whether forward and backward have the same one."""
    parts, short_parts = [], []
    for one in found:
        label, share = evidence.labels[one.kernel.name], percent(one.kernel.share)
        launches = counted(one.kernel.launches_per_instance, "launch")
        short_parts.append(phrase("{} `{}` {}", one.scope, label, share))
        parts.append(phrase("{} `{}`, {}, {}", one.scope, label, launches, share))
    names = {one.scope: one.kernel.name for one in found}
    verdict = f" {_verdict(names, evidence.kernel)}" if BOTH in names else ""
    return Answer(capture.title, phrase("{}.{}", joined("; ", parts), verdict), joined("; ", short_parts))


def _verdict(leaders: dict[str, str], kernel: str) -> str:
    """Whether forward, backward and both together have one leader."""
    of_forward, of_backward, of_both = leaders["forward"], leaders["backward"], leaders[BOTH]
    if of_forward == of_backward == of_both:
        return f"The same {kernel} leads in forward, in backward and in both together."
    if of_forward == of_backward:
        return f"The same {kernel} leads in forward and in backward, another one in both together."
    if of_both in (of_forward, of_backward):
        phase = "forward" if of_both == of_forward else "backward"
        return f"Forward and backward have different top {kernel}s; that of {phase} leads in both together."
    return f"Forward, backward and both together have three different top {kernel}s."
