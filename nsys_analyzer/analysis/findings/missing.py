"""Why findings of a capture are missing, and how to get them."""

from __future__ import annotations

from nsys_analyzer.analysis.kernels.classes import UNKNOWN
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.text import Words, phrase

#: From this share of the compute on, kernels inside CUDA graphs hide what could be found.
_HIDES = 0.3
_BY_NSYS = phrase("Capture with `nsys profile --trace=cuda,nvtx`")
_BY_TORCH = phrase("Record with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`")


def why_missing(capture: CaptureSummary) -> Words | None:
    """Why some findings, or all of them, cannot be had; None where all were looked for."""
    step = capture.step
    if capture.on_cpu:
        return "The program ran on the CPU: no findings are looked for."
    if capture.metadata is None:
        return capture.message or "There is no capture of this run."
    if has_no_kernel(capture):
        return phrase("No kernel was recorded. {} around steps that run on the GPU.", _how(capture))
    if step is None or not works(step):
        return "Nothing runs on the GPU in the steps."
    if capture.ranges_on_gpu or step.launch_latency_us is None:
        return phrase(
            "This trace has no {}: without them no waits and launches are known, and nothing can be replayed. So "
            "all findings are missing: on launches, waits, copies, memory and data loading, and on matmuls, attention, "
            "elementwise kernels and the optimizer. {}.",
            "CPU events" if capture.ranges_on_gpu else "API calls",
            _how(capture),
        )
    if capture.diagnosis is None:
        return "Findings need the API calls of whole steps, and this capture holds too few of them."
    if capture.diagnosis.doubt:
        return f"No saving can be told here: {capture.diagnosis.doubt}."
    return _inside_graphs(capture, step)


def has_no_kernel(capture: CaptureSummary) -> bool:
    """Whether a trace holds no kernel, and no graph that may hide some."""
    hidden = capture.whole is not None and capture.whole.opaque
    return capture.coverage is not None and not capture.coverage.kernels and not hidden


def works(step: StepSummary) -> bool:
    """Whether anything runs on a GPU in the steps."""
    return any(device.total_ms > device.idle_ms for device in step.devices)


def _how(capture: CaptureSummary) -> Words:
    return _BY_TORCH if capture.metadata and capture.metadata.profiler == "torch" else _BY_NSYS


def _inside_graphs(capture: CaptureSummary, step: StepSummary) -> Words | None:
    """That CUDA graphs hide the kernels, where they do."""
    compute, opaque = step.compute_ms, capture.whole is not None and capture.whole.opaque
    hidden = sum(one.ms for one in step.classes if one.kernel_class == UNKNOWN)
    if not opaque or hidden < _HIDES * compute:
        return None
    return phrase(
        "{} of the GPU's compute time is inside CUDA graphs whose kernels were not recorded: findings about matmuls, "
        "attention, elementwise kernels and the optimizer cannot be had. Capture with `--cuda-graph-trace=node`.",
        f"{hidden / compute:.0%}".replace("%", "\N{NO-BREAK SPACE}%"),
    )
