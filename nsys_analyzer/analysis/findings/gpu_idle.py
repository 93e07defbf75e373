"""The GPU computes for a small part of a step, and no other finding says why: the largest part of the rest."""

from __future__ import annotations

from nsys_analyzer.analysis.findings.finding import Finding, Place
from nsys_analyzer.analysis.steps.idle import Cause
from nsys_analyzer.analysis.steps.step import StepSummary

#: A GPU that computes for less of a step than this is mostly idle.
BUSY = 0.7
#: What the program does while the GPU idles, and the lines that tell more.
_TITLES: dict[Cause, str] = {
    "sync": "the program waits for it",
    "allocator": "memory is allocated and freed",
    "copy": "the program waits for copies",
    "launch": "it waits for launches",
    "host": "the program works on the CPU",
    "data": "batches are loaded",
    "communication": "collectives wait to start",
    "unknown": "the cause is unknown",
}
_REMEDIES: dict[Cause, tuple[str, ...]] = {
    "copy": (
        "# copy what is needed next while the GPU computes, from pinned memory, on a stream of its own:",
        "with torch.cuda.stream(side): ahead = host.to(device, non_blocking=True)",
        "# keep on the GPU what fits: fewer layers offloaded, smaller data types",
    ),
    "communication": ("# compare the ranks: a collective waits for the last one. Give the captures of all ranks.",),
    "unknown": ("# record the CPU, too: nsys profile --trace=cuda,nvtx; PyTorch: ProfilerActivity.CPU and CUDA",),
}
_DISPROOF = "Time the part by itself: if the step is no shorter without it, the GPU waits for something else."
_LOOK = ("# put a range around what you suspect, torch.cuda.nvtx.range_push(name) ... range_pop(), and record again",)


def find_idle_gpu(step: StepSummary, step_ms: float, told: frozenset[str]) -> Finding | None:
    """The largest part of a step in which the GPU does not compute; None where that is small, or told.

    Args:
        step: the steps.
        step_ms: what one takes without the profiler.
        told: the idle causes and kernel classes that other findings are about.
    """
    if not step_ms or step.compute_ms >= BUSY * step_ms:
        return None
    causes: dict[Cause, float] = {}
    for row in step.idle_by_cause:
        causes[row.cause] = causes.get(row.cause, 0.0) + row.ms
    # Without the profiler the GPU idles for less; copies and collectives take as long.
    idle_ms = max(step_ms - (step.total_ms - step.idle_ms), 0.0)
    scale = idle_ms / step.idle_ms if step.idle_ms else 0.0
    rest: list[tuple[float, Cause, str]]
    rest = [(ms * scale, cause, f"The GPU is idle: {_TITLES[cause]}") for cause, ms in causes.items()]
    rest.append((step.exposed_copy_ms, "copy", "Copies that nothing hides take most of the step"))
    rest.append((step.exposed_communication_ms, "communication", "Collectives take most of the step"))
    ms, cause, title = max(rest)
    if cause in told or not ms:
        return None
    where = max((row for row in step.idle_by_cause if row.cause == cause), key=lambda row: row.ms, default=None)
    place = f", most of it in the range {where.range}" if where and where.range else ""
    ms, of = min(ms, step_ms), "the capture" if step.is_pass else "a step"
    return Finding(
        "gpu_idle",
        str(step.in_words(title)),
        0.0,
        ms,
        step_ms,
        step_ms,
        (f"The GPU computes for {step.compute_ms / step_ms:.0%} of {of}; {ms:.3g} ms of the rest are this{place}.",),
        "No change that is looked for removes this time: between nothing and all of it may be saved.",
        _REMEDIES.get(cause, _LOOK),
        step.in_words(_DISPROOF),
        Place("idle", cause),
    )
