"""How far each capture is from the limits of its hardware: MFU, and rates by class."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.summary import CaptureSummary, ClassRate, Limits, PhaseRate
from nsys_analyzer.report.model import Answer, Block, Field, Listing, Paragraph, make_table
from nsys_analyzer.report.units import format_ms, format_number, format_percent
from nsys_analyzer.text import StrOrText, Text, join_names, join_texts, phrase

#: What a time is.
_TIMES = {
    "unprofiled": "without the profiler",
    "estimated": "estimated without the profiler",
    "gpu_busy": "of GPU work, idle time left out",
    "wall": "under the profiler",
}
#: The option that gives what MFU needs.
OPTIONS = {"model": "--model", "context length": "--context-length", "batch size": "--batch-size"}


def answer_limits(capture: CaptureSummary) -> Iterator[Block]:
    """MFU of step and phases, and rates of classes."""
    limits = capture.limits
    if limits is None:
        return
    yield Answer(_sentence(limits), capture.title)
    of_peak = f"MFU, of {_precisions(limits)}" if limits.precision else "MFU"
    is_pass = capture.step is not None and capture.step.is_pass
    phases: tuple[Field[PhaseRate], ...] = (
        Field("phase", "text", lambda one: one.phase),
        Field("ms", "ms", lambda one: one.ms),
        Field("time", "text", lambda one: _TIMES[one.time_of]),
        Field("model FLOPs", "flop", lambda one: one.model_flops),
        Field("achieved", "flop/s", lambda one: one.flops_per_s),
        Field(of_peak, "percent", lambda one: one.mfu),
    )
    classes: tuple[Field[ClassRate], ...] = (
        Field("class", "text", lambda one: one.kernel_class),
        Field("phase", "text", lambda one: "capture" if is_pass and one.phase == STEP else one.phase),
        Field("ms", "ms", lambda one: one.ms),
        Field("FLOP/s", "flop/s", lambda one: one.flops_per_s),
        Field("of peak", "percent", lambda one: one.share_of_peak),
        Field("B/s", "bytes/s", lambda one: one.bytes_per_s),
        Field("of peak bandwidth", "percent", lambda one: _of_bandwidth(one, limits)),
        Field("FLOP per byte", "count", lambda one: one.intensity),
    )
    if limits.phases:
        yield make_table(phases, limits.phases, capture=capture.title)
    if limits.notes:
        yield Listing(limits.notes, capture=capture.title)
    rates = make_table(classes, limits.classes, "While kernels of a class run:", capture=capture.title, names=2)
    if rates.rows:
        yield rates
        if limits.source:
            yield Paragraph(_peaks(limits), capture.title)


def mfu_of_step(capture: CaptureSummary) -> float | None:
    """MFU of the step; None where it is not known."""
    step = capture.limits.phase(STEP) if capture.limits else None
    return step.mfu if step else None


def _sentence(limits: Limits) -> StrOrText:
    """The rate of the step (else of a phase) against the peak, and what it means."""
    chief = limits.chief
    if limits.doubt or chief is None:
        return why_unknown(limits)
    name = "the step" if chief.phase == STEP else chief.phase
    time = f"{format_ms(chief.ms)} {_TIMES[chief.time_of]}"
    rate = f"{format_number(chief.flops_per_s, 'flop/s')} in {time}"
    if chief.mfu is None:
        return join_texts("", [f"{name.capitalize()} does {rate}. ", why_unknown(limits)])
    return f"MFU of {name} is {format_percent(chief.mfu)} of the GPU's {_precisions(limits)} peak: {rate}."


def _precisions(limits: Limits) -> str:
    return join_names([name for name, _ in limits.roofs]) if limits.roofs else str(limits.precision)


def why_unknown(limits: Limits) -> Text:
    """Returns why there is no MFU: the doubt about it, or what is not known and the option that gives it."""
    parts = [name for name in limits.missing if name in OPTIONS]
    reasons: list[StrOrText] = [limits.doubt] if limits.doubt else []
    if parts:
        options = join_texts(", ", [phrase("`{}`", OPTIONS[name]) for name in parts])
        reasons.append(phrase("MFU needs the {} ({}).", join_names(parts), options))
    if "peaks" in limits.missing:
        reasons.append(f"The peaks of this GPU ({limits.gpu}) are not known.")
    elif not reasons and limits.phases:
        reasons.append("In which precision the matmuls ran is not known.")
    elif not reasons:
        reasons.append("No phase is measured whose FLOPs are known.")
    return phrase("{}", join_texts(" ", reasons))


def _of_bandwidth(one: ClassRate, limits: Limits) -> float | None:
    """The share of the memory's peak; of copies between host and device the bus is the limit, which is not known."""
    between = one.kernel_class.startswith("copy") and "on the device" not in one.kernel_class
    known = one.bytes_per_s is not None and limits.peak_bytes_per_s and not between
    return (one.bytes_per_s or 0.0) / (limits.peak_bytes_per_s or 1.0) if known else None


def _peaks(limits: Limits) -> str:
    """The peaks of the GPU and where they are from."""
    said = ", ".join(f"{name} {format_number(peak, 'flop/s')}" for name, peak in limits.roofs)
    memory = format_number(limits.peak_bytes_per_s or 0, "bytes/s")
    return f"Peaks of {limits.gpu}: {said}, memory {memory} ({limits.source})."
