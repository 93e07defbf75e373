"""One step of a capture as a figure: its ranges, the calls that block, each stream's kernels, and the idle time."""

from __future__ import annotations

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import Strip, Timeline
from nsys_analyzer.report.units import format_number


def timeline_of(capture: CaptureSummary) -> Timeline | None:
    """A step of median duration as it passed; None where the capture has no steps."""
    lanes = capture.step.lanes if capture.step else ()
    if not lanes:
        return None
    strips = tuple(
        Strip(lane.title, lane.kind, tuple((block.name, block.start_ms, block.end_ms) for block in lane.blocks))
        for lane in lanes
    )
    # The GPU works or idles at every moment of a step, so that the last block ends with it.
    duration = max(end for strip in strips for _, _, end in strip.blocks)
    which = "the step nearest the median" if capture.step and capture.step.instances > 1 else "the step"
    title = f"{capture.title}: {which}, {format_number(duration, 'ms')} ms"
    ahead = capture.step is not None and capture.step.on_gpu
    said = ". The CPU runs ahead: its ranges belong to later GPU work" if ahead else ""
    return Timeline(f"{capture.title}-step", title + said, strips, cpu_ahead=ahead)
