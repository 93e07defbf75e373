"""Reports how close a capture comes to the peaks of its GPU: MFU, and the rates of kernel classes."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.summary.limits import COPY_CLASSES
from nsys_analyzer.analysis.summary.summary import CaptureSummary, ClassRate, Limits, PhaseRate
from nsys_analyzer.report.evidence import name_scope
from nsys_analyzer.report.facts import say, say_all
from nsys_analyzer.report.model import Answer, Block, Field, Listing, Paragraph, make_table
from nsys_analyzer.report.units import format_ms, format_number, format_percent
from nsys_analyzer.text import StrOrText, Text, join_names, join_texts, phrase
from nsys_analyzer.trace.columns import ON_DEVICE
from nsys_analyzer.trace.phase_names import STEP

#: The words for how the time of a rate was measured, by ``PhaseRate.time_of``.
_TIME_WORDS = {
    "unprofiled": "without the profiler",
    "estimated": "estimated without the profiler",
    "gpu_busy": "GPU work, without idle time",
    "wall": "under the profiler",
}
#: The options that give the facts that MFU needs.
MFU_OPTIONS = {"model": "--model", "context length": "--context-length", "batch size": "--batch-size"}


def answer_limits(capture: CaptureSummary) -> Iterator[Block]:
    """Yields the MFU of step and phases, and the rates of kernel classes."""
    limits = capture.limits
    if limits is None:
        return
    yield Answer(_describe_mfu(limits), capture.title)
    mfu_title = f"MFU, of {_name_precisions(limits)}" if limits.precision else "MFU"
    is_pass = capture.step is not None and capture.step.is_pass
    phases: tuple[Field[PhaseRate], ...] = (
        Field("phase", "text", lambda rate: rate.phase),
        Field("ms", "ms", lambda rate: rate.ms),
        Field("time", "text", lambda rate: _TIME_WORDS[rate.time_of]),
        Field("model FLOPs", "flop", lambda rate: rate.model_flops),
        Field("achieved", "flop/s", lambda rate: rate.flops_per_s),
        Field(mfu_title, "percent", lambda rate: rate.mfu),
    )
    classes: tuple[Field[ClassRate], ...] = (
        Field("class", "text", lambda rate: rate.kernel_class),
        Field("phase", "text", lambda rate: "capture" if is_pass and rate.phase == STEP else rate.phase),
        Field("ms", "ms", lambda rate: rate.ms),
        Field("FLOP/s", "flop/s", lambda rate: rate.flops_per_s),
        Field("of peak", "percent", lambda rate: rate.share_of_peak),
        Field("B/s", "bytes/s", lambda rate: rate.bytes_per_s),
        Field("of peak bandwidth", "percent", lambda rate: _compute_bandwidth_share(rate, limits)),
        Field("FLOP per byte", "count", lambda rate: rate.intensity),
    )
    if limits.phases:
        yield make_table(phases, limits.phases, capture=capture.title)
    if limits.notes:
        yield Listing(say_all(limits.notes), capture=capture.title)
    rates = make_table(
        classes, limits.classes, "Rates while the kernels of a class run:", capture=capture.title, names=2
    )
    if rates.rows:
        yield rates
        if limits.source:
            peaks = [f"{format_number(peak, 'flop/s')} in {name}" for name, peak in limits.roofs]
            peaks.append(f"{format_number(limits.peak_bytes_per_s or 0, 'bytes/s')} of memory bandwidth")
            sentence = f"The peaks of {limits.gpu} are {join_names(peaks)} ({limits.source})."
            yield Paragraph(sentence, capture.title)


def find_step_mfu(capture: CaptureSummary) -> float | None:
    """Returns the MFU of the step; None if it is not known."""
    step = capture.limits.phase(STEP) if capture.limits else None
    return step.mfu if step else None


def _describe_mfu(limits: Limits) -> StrOrText:
    """Returns a sentence on the MFU of the step or of a phase, or on why the MFU is unknown."""
    main_rate = limits.main_rate
    if limits.doubt or main_rate is None:
        return explain_missing_mfu(limits)
    name = name_scope(main_rate.phase)
    time = f"{format_ms(main_rate.ms)} ({_TIME_WORDS[main_rate.time_of]})"
    rate = f"{name[0].upper()}{name[1:]} reaches {format_number(main_rate.flops_per_s, 'flop/s')} in {time}"
    if main_rate.mfu is None:
        return join_texts("", [f"{rate}. ", explain_missing_mfu(limits)])
    return f"{rate}, which is an MFU of {format_percent(main_rate.mfu)} of the GPU's {_name_precisions(limits)} peak."


def _name_precisions(limits: Limits) -> str:
    return join_names([name for name, _ in limits.roofs]) if limits.roofs else str(limits.precision)


def explain_missing_mfu(limits: Limits) -> Text:
    """Returns sentences on why the MFU is unknown, which name the options that give the missing facts."""
    missing_options = [name for name in limits.missing if name in MFU_OPTIONS]
    reasons: list[StrOrText] = [say(limits.doubt)] if limits.doubt else []
    if missing_options:
        options = join_texts(", ", [phrase("`{}`", MFU_OPTIONS[name]) for name in missing_options])
        reasons.append(phrase("The MFU needs the {} ({}).", join_names(missing_options), options))
    if "peaks" in limits.missing:
        reasons.append(f"The peaks of this GPU ({limits.gpu}) are not known.")
    elif not reasons and limits.phases:
        reasons.append("The precision of the matmuls is not known.")
    elif not reasons:
        reasons.append("No measured phase has known FLOPs.")
    return phrase("{}", join_texts(" ", reasons))


def _compute_bandwidth_share(rate: ClassRate, limits: Limits) -> float | None:
    """Returns a rate's share of the memory's peak; None for copies to and from the host, which the bus limits."""
    uses_bus = rate.kernel_class in COPY_CLASSES and rate.kernel_class != COPY_CLASSES[ON_DEVICE]
    if rate.bytes_per_s is None or not limits.peak_bytes_per_s or uses_bus:
        return None
    return rate.bytes_per_s / limits.peak_bytes_per_s
