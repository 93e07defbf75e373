"""How far each capture is from the limits of its hardware: MFU, rates by class, and a roofline."""

from __future__ import annotations

from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.statistics import FUSED, MATMUL
from nsys_analyzer.analysis.summary.summary import CaptureSummary, ClassRate, Limits, PhaseRate
from nsys_analyzer.report.evidence import FEW, Evidence
from nsys_analyzer.report.model import Answer, Block, Listing, Paragraph, Roofline, Section, Table, WorkPoint
from nsys_analyzer.report.sections.sweep import over_sweep
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, milliseconds, percent
from nsys_analyzer.text import Text, Words, joined, phrase

#: What a time is, in a table and in a sentence.
_TIMES = {
    "unprofiled": ("without the profiler", "without the profiler"),
    "estimated": ("estimated, without the profiler", "estimated without the profiler"),
    "gpu_busy": ("GPU busy, without idle time", "of GPU work, idle time left out"),
    "wall": ("wall, profiled", "under the profiler"),
}
_MFU = "MFU of the step, % of the peak of its own precision"
_OPTIONS = {"model": "--model", "context length": "--context-length", "batch size": "--batch-size"}
_LEGEND: tuple[Words, ...] = (
    phrase(
        "*MFU*: the model's FLOPs ÷ time ÷ peak of the precision that most of the matmul time ran in. One forward pass "
        "is 8·B·S·d²·L of projections, 4·B·S²·d·L of attention, 6·B·S·d·d_ff·L of feed-forward and 2·B·S·d·V of the "
        "head; backward is twice that."
    ),
    phrase(
        "Only the model's FLOPs count. Work beyond them (a forward pass recomputed in backward, the fused attention "
        "of backward, which computes its scores again) makes rates too low. Attention counts the whole S × S square; "
        "a causal kernel may do half of it, which makes its rate too high."
    ),
    phrase(
        "*Best peak*: the highest dense rate of the GPU that its datasheet gives. *Time*: without the profiler where "
        "it is known; else of a step as estimated, of a phase its profiled wall time if the GPU is busy for 90 % of "
        "it, and GPU busy if not, so that this MFU is an upper bound."
    ),
    phrase(
        "*Least bytes*, counted and not measured: each matmul reads both operands once and writes its result once, "
        "in elements of 4 bytes (fp32, TF32) or 2 (bf16, fp16); fused attention reads Q, K and V and writes its "
        "result; softmax as in its own section. A copy on the device reads and writes each byte. *B/s* is a lower "
        "bound, *arithmetic intensity* (FLOPs ÷ least bytes) an upper one."
    ),
)
_LEGEND_OF_COUNTED = phrase(
    "*MFU*: the model's FLOPs ÷ time ÷ peak of the precision that most of the matmul time ran in. FLOPs were counted "
    "by PyTorch's formulas as the operators of one step ran, a matmul of (m, k) and (k, n) as 2·m·k·n; where shapes "
    "are given, they follow from these: one forward pass is 8·B·S·d²·L of projections, 4·B·S²·d·L of attention, "
    "6·B·S·d·d_ff·L of feed-forward and 2·B·S·d·V of the head, and backward twice that."
)


def answer(evidence: Evidence) -> Section:
    """MFU of step and phases, rates of classes, the share of tensor cores, and a roofline for each capture."""
    found = [(capture, limits) for capture in evidence.measured if (limits := capture.limits)]
    blocks: list[Block] = [*over_sweep(evidence, _mfu_of_step, "percent", _MFU, "mfu")]
    for capture, limits in found:
        notes = (Listing(limits.notes, capture=capture.title),) if limits.notes else ()
        blocks += [_answer(capture, limits), *_tables(capture, limits), *notes]
    if any(limits.phases or limits.classes for _, limits in found):
        known = any(limits.phases for _, limits in found)
        shown = [_LEGEND_OF_COUNTED, *_LEGEND[1:]] if any(map(_counted, evidence.measured)) else _LEGEND
        blocks += [Listing(tuple(shown) if known else _LEGEND[-1:]), *map(Paragraph, _peaks(found))]
    if len(evidence.captures) <= FEW:
        blocks += [figure for capture, limits in found if (figure := _figure(capture, limits)).points]
    return Section("limits", "How far is it from the hardware's limits?", tuple(blocks), "limits")


def _counted(capture: CaptureSummary) -> bool:
    return capture.run is not None and capture.run.flops is not None


def _mfu_of_step(capture: CaptureSummary) -> float | None:
    limits = capture.limits
    step = limits.phase(STEP) if limits else None
    return step.mfu if step else None


def _answer(capture: CaptureSummary, limits: Limits) -> Answer:
    chief, cores = limits.chief, _tensor_cores(limits)
    if limits.doubt or chief is None:
        said: Words = limits.doubt or _missing(limits)
        short = "left out: a rate would be above a peak" if limits.doubt else "MFU is not known"
        return Answer(capture.title, joined(" ", [said, *([f"{cores}."] if cores else [])]), _and(short, cores))
    name = "the step" if chief.phase == STEP else chief.phase
    rate = f"{format_number(chief.flops_per_s, 'flop/s')} in {milliseconds(chief.ms)} {_TIMES[chief.time_of][1]}"
    if chief.mfu is None:
        best = f", {percent(chief.mfu_of_best)} of the GPU's best peak" if chief.mfu_of_best is not None else ""
        text = joined(" ", [f"{name} does {rate}{best}.", _missing(limits)])
        return Answer(capture.title, text, _and(f"{name} {format_number(chief.flops_per_s, 'flop/s')}{best}", cores))
    mfu = f"MFU of {name} is {percent(chief.mfu)} of the GPU's {limits.precision} peak"
    best = "" if limits.best_precision == limits.precision else _of_best(limits, chief)
    meaning = _meaning(limits, chief)
    text = f"{mfu}{best}: {rate}.{f' {meaning}' if meaning else ''}{f' {cores}.' if cores else ''}"
    return Answer(capture.title, text, _and(f"MFU of {name} {percent(chief.mfu)} ({limits.precision})", cores))


def _and(first: str, second: str) -> str:
    return f"{first}; {second}" if second else first


def _of_best(limits: Limits, phase: PhaseRate) -> str:
    share = phase.mfu_of_best
    return "" if share is None else f" ({percent(share)} of its best, in {limits.best_precision})"


def _meaning(limits: Limits, chief: PhaseRate) -> str:
    """Whether the rate of the matmuls, or the time without any, takes more of the peak."""
    parts = [one for one in limits.classes if one.kernel_class in (MATMUL, FUSED) and one.flops is not None]
    own = [one for one in parts if chief.phase in (STEP, one.phase)]
    # Of a step whose other half is not known, nothing follows.
    flops, ms = sum(one.flops or 0 for one in own), sum(one.ms for one in own)
    passes = round(chief.model_flops / flops) if flops else 0
    if not passes or abs(chief.model_flops / flops / passes - 1) > 1e-6 or not limits.peak_flops:
        return ""
    inside, covered = flops / (ms / 1e3) / limits.peak_flops, min(1.0, passes * ms / chief.ms)
    slow, rest = "slow matmuls", "the time without matmuls"
    most = f"{rest} costs more than {slow}" if covered < inside else f"{slow} cost more than {rest}"
    who = "Matmuls and fused attention" if any(one.kernel_class == FUSED for one in own) else "Matmuls"
    return (
        f"{who} take {percent(covered)} of this time and reach {percent(inside)} of the {limits.precision} "
        f"peak while they run: {most}."
    )


def _tensor_cores(limits: Limits) -> str:
    """How much of the matmul time is on tensor cores, by the names of the kernels."""
    share, unknown = limits.tensor_core_share, limits.tensor_core_unknown
    if share is None:
        return ""
    rest = f" (unknown for {percent(unknown)})" if unknown >= 0.0005 else ""
    return f"{percent(share)} of the matmul time is on tensor cores{rest}"


def _missing(limits: Limits) -> Text:
    """What is not known, and how to give it."""
    parts = [name for name in limits.missing if name in _OPTIONS]
    said: list[Words] = []
    if parts:
        options = joined(", ", [phrase("`{}`", _OPTIONS[name]) for name in parts])
        said.append(phrase("The {} of this capture {} not known: give {}.", _listed(parts), _is(parts), options))
    if "peaks" in limits.missing:
        said.append(f"The peaks of this GPU ({limits.gpu}) are not known.")
    elif not parts and limits.phases:
        said.append("In which precision the matmuls ran is not known.")
    elif not parts:
        said.append("No phase is measured whose FLOPs are known.")
    return phrase("{}", joined(" ", said))


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _is(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _tables(capture: CaptureSummary, limits: Limits) -> tuple[Table, ...]:
    """The phases, then the classes with whatever is known of each."""
    of_peak = f"MFU, of {limits.precision}" if limits.precision else "MFU"
    of_best = f"of best peak, {limits.best_precision}"
    is_pass = capture.step is not None and capture.step.is_pass
    phases: tuple[Field[PhaseRate], ...] = (
        Field("phase", "text", lambda one: one.phase),
        Field("ms", "ms", lambda one: one.ms),
        Field("time", "text", lambda one: _TIMES[one.time_of][0]),
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
    caption = "Each class while its kernels run (one forward, backward or step):"
    built = (
        table(phases, limits.phases, "The model's FLOPs against time and peak:", capture=capture.title),
        table(classes, limits.classes, caption, capture=capture.title, names=2),
    )
    return tuple(one for one in built if one.rows)


def _best(title: str) -> Field[PhaseRate]:
    return Field(title, "percent", lambda one: one.mfu_of_best)


def _of_bandwidth(one: ClassRate, limits: Limits) -> float | None:
    """The share of the memory's peak; of copies between host and device the bus is the limit, which is not known."""
    between = one.kernel_class.startswith("copy") and "on the device" not in one.kernel_class
    known = one.bytes_per_s is not None and limits.peak_bytes_per_s and not between
    return (one.bytes_per_s or 0.0) / (limits.peak_bytes_per_s or 1.0) if known else None


def _peaks(found: list[tuple[CaptureSummary, Limits]]) -> list[str]:
    """The peaks of each GPU and where they are from."""
    said: dict[str, dict[str, float]] = {}
    ends: dict[str, str] = {}
    for _, limits in found:
        if limits.source:
            roofs = said.setdefault(limits.gpu, {})
            roofs.update(limits.roofs)
            if limits.best_precision and limits.best_peak_flops:
                roofs[limits.best_precision] = limits.best_peak_flops
            ends[limits.gpu] = f"{format_number(limits.peak_bytes_per_s or 0, 'bytes/s')} ({limits.source})"
    return [
        f"Peaks of {gpu}: "
        + ", ".join(f"{name} {format_number(peak, 'flop/s')}" for name, peak in roofs.items())
        + f", memory {ends[gpu]}."
        for gpu, roofs in said.items()
    ]


def _figure(capture: CaptureSummary, limits: Limits) -> Roofline:
    points = [
        WorkPoint(one.kernel_class, one.phase, one.intensity, one.flops_per_s)
        for one in limits.classes
        if one.intensity and one.flops_per_s and limits.peak_bytes_per_s
    ]
    title = f"{capture.title}: matmuls and attention under the roofs of the {limits.gpu}"
    return Roofline(f"{capture.title}-roofline", title, tuple(points), limits.roofs, limits.peak_bytes_per_s or 0.0)
