"""Estimates the interval of a saving from where the freed time lies: on the GPU, or on the CPU.

The constants were set with two programs of ``examples/faults``, the transformer and the encoder. ``docs/accuracy.md``
says how many measured savings of other programs lie inside their intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nsys_analyzer.analysis.steps.pace import CPU_RUN_TOLERANCE
from nsys_analyzer.analysis.steps.replay import MIN_STEPS, Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.columns import DEVICE_TO_PAGEABLE, PAGEABLE_TO_DEVICE
from nsys_analyzer.trace.schema import NS_PER_MS

#: The assumed relative difference between two runs of one program in the GPU's time that a change saves or adds.
GPU_TIME_TOLERANCE = 0.03
#: The assumed relative difference between two runs in the GPU's time of a step. In the rounds of the timed pairs, steps
#: that the GPU fills have a standard deviation of 0 to 2 %.
_GPU_RUN_TOLERANCE = 0.01
#: The columns of a replay whose times a change can remove from a step.
_REMOVED_COLUMNS = ("cpu_ns", "min_wait_ns", "return_ns", "latency_ns", "spacing_ns", "work_ns", "join_gap_ns")


def estimate_interval(
    study: Study, replays: Sequence[tuple[Replay, Replay]], scale: float, step_spread: float = 0.0
) -> tuple[float, float, float]:
    """Returns the least, the middle and the largest saving per step in another run of the program, ms.

    A saving is negative if a step becomes longer. If the saving has the same sign in all replays, the interval contains
    no values of the other sign.
    The replays differ in the profiler's cost and in the effect of the change. The differences between runs are added to
    the spread of the replays as independent errors: of the GPU's time that the change saves, of the GPU's time after
    the change, of the CPU's time on the critical path that the change saves and leaves, and of the length of a step.

    Args:
        study: the steps.
        replays: the steps before and after the change, for each replay.
        scale: the ratio of the length of a step to the length of a replayed step.
        step_spread: the relative standard deviation of the steps that the recorded process made without the profiler.
    """
    by_saving = sorted(replays, key=lambda pair: pair[0].step_ns - pair[1].step_ns)
    least_ns, most_ns = (before.step_ns - after.step_ns for before, after in (by_saving[0], by_saving[-1]))
    before_ns, after_ns = (_measure_path_ns(study, replay) for replay in by_saving[len(by_saving) // 2])
    half_ns = math.hypot(
        (most_ns - least_ns) / 2,
        GPU_TIME_TOLERANCE * (before_ns.gpu - after_ns.gpu),
        _GPU_RUN_TOLERANCE * after_ns.gpu,
        CPU_RUN_TOLERANCE * (before_ns.cpu - after_ns.cpu),
        CPU_RUN_TOLERANCE * after_ns.cpu,
        step_spread * float(np.median([before.step_ns for before, _ in replays])),
    )
    middle_ns, ms_per_ns = (least_ns + most_ns) / 2, scale / NS_PER_MS
    low_ns = max(middle_ns - half_ns, 0.0 if least_ns >= 0 else -math.inf)
    high_ns = min(middle_ns + half_ns, 0.0 if most_ns <= 0 else max(most_ns, *map(_measure_removed_ns, replays)))
    return low_ns * ms_per_ns, middle_ns * ms_per_ns, high_ns * ms_per_ns


def _measure_removed_ns(replays: tuple[Replay, Replay]) -> float:
    """Returns the time per step that a change removes, ns. The change cannot save more than this time.

    The result is infinite if the change removes waits or the work of another thread, because the columns of a replay do
    not contain their time.
    """
    before, after = replays
    if before.least_step_ns > after.least_step_ns or not np.array_equal(before.awaited, after.awaited):
        return math.inf
    removed_ns = (np.maximum(getattr(before, name) - getattr(after, name), 0.0).sum() for name in _REMOVED_COLUMNS)
    return float(sum(removed_ns)) / before.steps * (1 + CPU_RUN_TOLERANCE)


class _PathTimes(NamedTuple):
    """The time per step on the critical path, ns: of the GPU, and of the CPU with its copies of pageable memory."""

    gpu: float
    cpu: float


def _measure_path_ns(study: Study, replay: Replay) -> _PathTimes:
    """Returns the time per step on the critical path of the steps, ns."""
    call_shares, operation_shares = replay.critical_path()
    # The critical path of several steps begins at the start of the second step.
    steps = replay.steps - 1 if replay.steps >= MIN_STEPS else replay.steps
    work_ns = operation_shares * replay.work_ns / steps
    # The CPU moves the data of a copy from or to pageable memory.
    is_pageable = np.isin(study.operations.copy, (PAGEABLE_TO_DEVICE, DEVICE_TO_PAGEABLE))
    gpu_ns, pageable_ns = float(work_ns[~is_pageable].sum()), float(work_ns[is_pageable].sum())
    cpu_ns = float((call_shares * replay.cpu_ns).sum()) / steps + pageable_ns
    return _PathTimes(gpu_ns, max(cpu_ns, replay.least_step_ns - gpu_ns))
