"""One step of a capture as a figure: its ranges, the calls that block, each stream's kernels, and the idle time."""

from __future__ import annotations

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import Strip, Timeline


def timeline_of(capture: CaptureSummary) -> Timeline | None:
    """A step of median duration as it passed; None where the capture has no steps."""
    step = capture.step
    if step is None or not capture.lanes:
        return None
    lanes = capture.lanes
    strips = tuple(
        Strip(lane.title, lane.kind, tuple((block.name, block.start_ms, block.end_ms) for block in lane.blocks))
        for lane in lanes
    )
    which = "the whole capture" if step.is_pass else "the step nearest the median" if step.instances > 1 else "the step"
    title, ahead = f"{capture.title}: {which}", step.on_gpu_timeline
    said = ". The CPU runs ahead: its ranges belong to later GPU work" if ahead else ""
    return Timeline(f"{capture.title}-step", title + said, strips, cpu_ahead=ahead)
