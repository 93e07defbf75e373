"""How far each capture is from the limits of its hardware: MFU, rates by class, and a roofline."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.kernels.class_rules import FUSED, MATMUL
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.summary import CaptureSummary, ClassRate, Limits, PhaseRate
from nsys_analyzer.report.model import Answer, Block, Listing, Paragraph, Roofline, Table, WorkPoint
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import about_milliseconds, format_number, percent
from nsys_analyzer.text import Text, Words, joined, listed, phrase

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
    """MFU of step and phases, rates of classes, and a roofline."""
    limits = capture.limits
    if limits is None:
        return
    yield Answer(_sentence(limits), capture.title)
    phases, classes = _tables(capture, limits)
    if phases.rows:
        yield phases
    if limits.notes:
        yield Listing(limits.notes, capture=capture.title)
    if classes.rows:
        yield classes
        if limits.source:
            yield Paragraph(_peaks(limits), capture.title)
    if (figure := _figure(capture, limits)).points:
        yield figure


def mfu_of_step(capture: CaptureSummary) -> float | None:
    """MFU of the step; None where it is not known."""
    step = capture.limits.phase(STEP) if capture.limits else None
    return step.mfu if step else None


def _sentence(limits: Limits) -> Words:
    """The rate of the step (else of a phase) against the peak, and what it means."""
    chief = limits.chief
    if limits.doubt or chief is None:
        return limits.doubt or _missing(limits)
    name = "the step" if chief.phase == STEP else chief.phase
    time = f"{about_milliseconds(chief.ms)} {_TIMES[chief.time_of]}"
    rate = f"{format_number(chief.flops_per_s, 'flop/s')} in {time}"
    if chief.mfu is None:
        best = f", {percent(chief.mfu_of_best)} of the GPU's best peak" if chief.mfu_of_best is not None else ""
        return joined("", [f"{name.capitalize()} does {rate}{best}. ", _missing(limits)])
    meaning = _meaning(limits, chief)
    said = f"MFU of {name} is {percent(chief.mfu)} of the GPU's {_precisions(limits)} peak: {rate}."
    return f"{said} {meaning}".rstrip()


def _precisions(limits: Limits) -> str:
    return listed([name for name, _ in limits.roofs]) if limits.roofs else str(limits.precision)


def _meaning(limits: Limits, chief: PhaseRate) -> str:
    """What the rate of the matmuls costs, and what the time without any."""
    parts = [one for one in limits.classes if one.kernel_class in (MATMUL, FUSED) and one.flops is not None]
    own = [one for one in parts if chief.phase in (STEP, one.phase)]
    # Of a step whose other half is not known, nothing follows.
    flops, ms = sum(one.flops or 0 for one in own), sum(one.ms for one in own)
    passes = round(chief.model_flops / flops) if flops else 0
    if not passes or abs(chief.model_flops / flops / passes - 1) > 1e-6 or not limits.peak_flops:
        return ""
    inside, covered = flops / (ms / 1e3) / limits.peak_flops, min(1.0, passes * ms / chief.ms)
    who = "Matmuls and fused attention" if any(one.kernel_class == FUSED for one in own) else "Matmuls"
    return (
        f"{who} take {percent(covered)} of this time and reach {percent(inside)} of the {_precisions(limits)} "
        f"peak while they run: at the peak it would be {percent(covered * (1 - inside))} shorter, without all else "
        f"{percent(1 - covered)}."
    )


def _missing(limits: Limits) -> Text:
    """What is not known, and how to give it."""
    parts = [name for name in limits.missing if name in OPTIONS]
    said: list[Words] = []
    if parts:
        options = joined(", ", [phrase("`{}`", OPTIONS[name]) for name in parts])
        said.append(phrase("MFU needs the {} ({}).", listed(parts), options))
    if "peaks" in limits.missing:
        said.append(f"The peaks of this GPU ({limits.gpu}) are not known.")
    elif not parts and limits.phases:
        said.append("In which precision the matmuls ran is not known.")
    elif not parts:
        said.append("No phase is measured whose FLOPs are known.")
    return phrase("{}", joined(" ", said))


def _tables(capture: CaptureSummary, limits: Limits) -> tuple[Table, Table]:
    """The phases, then the classes with whatever is known of each."""
    of_peak = f"MFU, of {_precisions(limits)}" if limits.precision else "MFU"
    of_best = f"of best peak, {limits.best_precision}"
    is_pass = capture.step is not None and capture.step.is_pass
    phases: tuple[Field[PhaseRate], ...] = (
        Field("phase", "text", lambda one: one.phase),
        Field("ms", "ms", lambda one: one.ms),
        Field("time", "text", lambda one: _TIMES[one.time_of]),
        Field("model FLOPs", "flop", lambda one: one.model_flops),
        Field("achieved", "flop/s", lambda one: one.flops_per_s),
        Field(of_peak, "percent", lambda one: one.mfu),
        *([] if limits.best_precision == limits.precision else [_best(of_best)]),
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
    return (
        table(phases, limits.phases, capture=capture.title),
        table(classes, limits.classes, "While kernels of a class run:", capture=capture.title, names=2),
    )


def _best(title: str) -> Field[PhaseRate]:
    return Field(title, "percent", lambda one: one.mfu_of_best)


def _of_bandwidth(one: ClassRate, limits: Limits) -> float | None:
    """The share of the memory's peak; of copies between host and device the bus is the limit, which is not known."""
    between = one.kernel_class.startswith("copy") and "on the device" not in one.kernel_class
    known = one.bytes_per_s is not None and limits.peak_bytes_per_s and not between
    return (one.bytes_per_s or 0.0) / (limits.peak_bytes_per_s or 1.0) if known else None


def _peaks(limits: Limits) -> str:
    """The peaks of the GPU and where they are from."""
    roofs = dict(limits.roofs)
    if limits.best_precision and limits.best_peak_flops:
        roofs[limits.best_precision] = limits.best_peak_flops
    said = ", ".join(f"{name} {format_number(peak, 'flop/s')}" for name, peak in roofs.items())
    memory = format_number(limits.peak_bytes_per_s or 0, "bytes/s")
    return f"Peaks of {limits.gpu}: {said}, memory {memory} ({limits.source})."


def _figure(capture: CaptureSummary, limits: Limits) -> Roofline:
    points = [
        WorkPoint(one.kernel_class, one.phase, one.intensity, one.flops_per_s)
        for one in limits.classes
        if one.intensity and one.flops_per_s and limits.peak_bytes_per_s
    ]
    title = f"{capture.title}: matmuls and attention under the roofs of the {limits.gpu}"
    return Roofline(f"{capture.title}-roofline", title, tuple(points), limits.roofs, limits.peak_bytes_per_s or 0.0)
