"""Runs as a report's JSON holds them, made from the figures that a test is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from nsys_analyzer.analysis.comparison.comparison import Side
from nsys_analyzer.analysis.comparison.recorded import Recorded, RecordedKernel
from nsys_analyzer.analysis.steps.idle import Cause
from nsys_analyzer.analysis.summary.statistics import Stats
from tests.support.steps import H200


def kernel(name: str, ms: float, kernel_class: str = "matmul", launches: float = 1, std_ms: float = 0.0) -> Any:
    """A kernel of a step."""
    return RecordedKernel(name, launches, ms, std_ms, kernel_class)


def run(
    kernels: Sequence[RecordedKernel] = (),
    idle: Mapping[Cause, float] | None = None,
    *,
    name: str = "train",
    copy_ms: float = 0.0,
    jitter_ms: Sequence[float] = (0.0,) * 5,
    unprofiled: Stats | None = None,
    **more: Any,
) -> Recorded:
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
    step = {
        "instances": len(jitter),
        "source": "range",
        "unit": "each NVTX range named step",
        "wall_ms": msgspec.to_builtins(Stats.of_ns((wall * 1e6).round().astype(np.int64))),
        "wall_values_ms": wall.tolist(),
        "busy_values_ms": [busy + copy_ms] * len(jitter),
        "compute_ms": busy,
        "exposed_copy_ms": copy_ms,
        "exposed_communication_ms": 0.0,
        "idle_ms": sum(causes.values()),
        "exposed_copy_std_ms": 0.0,
        "exposed_communication_std_ms": 0.0,
        "own_pauses_ms": 0.0,
        "classes": [{"class": one, "ms": ms, "std_ms": 0.0} for one, ms in classes.items()],
        "causes": [{"cause": one, "ms": ms, "std_ms": 0.0} for one, ms in causes.items()],
        "kernels": [msgspec.to_builtins(one) for one in kernels],
    }
    times = {"phases": {"step": msgspec.to_builtins(unprofiled)}, "doubts": {}} if unprofiled else None
    known = {
        "name": name, "process": None, "rank": None, "source": f"{name}.sqlite", "status": "ok", "message": None,
        "gpu": H200.name, "configuration": None, "run": None, "precisions": {}, "phases": [], "step": step,
        "findings": [], "unprofiled": times,
    }  # fmt: skip
    return msgspec.convert({**known, **more}, Recorded)


def side(*runs: Recorded) -> Side:
    """What stands on one side."""
    return Side(runs)
