"""Summaries of runs that are compared, made from the figures that a test is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nsys_analyzer.analysis.comparison.comparison import Side
from nsys_analyzer.analysis.findings.finding import Finding, FindingTexts
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.process import Cause
from nsys_analyzer.analysis.steps.step import CauseTime, ClassTime, KernelTime, StepSummary
from nsys_analyzer.analysis.summary.summary import Summary, Unprofiled
from tests.support.steps import H200


def kernel(
    name: str, ms: float, kernel_class: str = "matmul", launches: float = 1, std_ms: float = 0.0, operator: str = ""
) -> KernelTime:
    """A kernel of a step."""
    return KernelTime(name, kernel_class, launches, ms, std_ms, operator)


def run(
    kernels: Sequence[KernelTime] = (),
    idle: Mapping[Cause, float] | None = None,
    *,
    name: str = "train",
    copy_ms: float = 0.0,
    jitter_ms: Sequence[float] = (0.0,) * 5,
    unprofiled: Stats | None = None,
    **more: Any,
) -> Summary:
    """A run whose every step holds these kernels and idle times, and lasts so much longer than that: of each step.

    The jitter is idle time of the cause ``launch``.
    """
    jitter = np.asarray(jitter_ms, np.float64)
    causes: dict[str, float] = {**(idle or {})}
    if jitter.any():
        causes["launch"] = causes.get("launch", 0.0) + float(jitter.mean())
    busy = sum(one.ms for one in kernels)
    wall = busy + copy_ms + sum((idle or {}).values()) + jitter
    classes: dict[str, float] = {}
    for one in kernels:
        classes[one.kernel_class] = classes.get(one.kernel_class, 0.0) + one.ms
    parts = {"compute_ms": busy, "exposed_copy_ms": copy_ms, "exposed_communication_ms": 0.0}
    step = StepSummary(
        **parts, idle_ms=sum(causes.values()), device=0, phases=(), idle_by_cause=(), instances=len(jitter),
        source="range", unit="each NVTX range named step", on_gpu_timeline=False, length_ms=float(wall.mean()),
        wall_ms=Stats.of_ns((wall * 1e6).round().astype(np.int64)), wall_values_ms=tuple(wall.tolist()),
        busy_values_ms=(busy + copy_ms,) * len(jitter), exposed_copy_std_ms=0.0, exposed_communication_std_ms=0.0,
        classes=tuple(ClassTime(one, ms, 0.0) for one, ms in classes.items()),
        causes=tuple(CauseTime(one, ms, 0.0) for one, ms in causes.items()), kernels=tuple(kernels),
    )  # fmt: skip
    known = {
        "process": None, "source": f"{name}.sqlite", "status": "ok", "gpu": H200.name, "step": step, "findings": (),
        "unprofiled": Unprofiled("ok", phases={"step": unprofiled}) if unprofiled else None,
    }  # fmt: skip
    return Summary(name, **{**known, **more})


def finding(key: str, low: float, high: float) -> Finding:
    """A finding that saves so much."""
    texts = FindingTexts(title=key, evidence=(), derivation="", remedy=(), disproof="")
    return Finding(id=key, saves_ms_low=low, saves_ms_high=high, step_ms=100.0, left_after_all_ms=100.0, **vars(texts))


def side(*runs: Summary) -> Side:
    """What stands on one side."""
    return Side(runs)
