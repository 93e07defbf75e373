"""Replays steps at the pace that they have without the profiler: measured in the capture's process, or estimated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.schema import NS_PER_MS

#: The smallest ratio of CPU time without a profiler to CPU time under it, after the cost of recording is subtracted.
_UNPROFILED_CPU_TIME_RATIO = 0.84
#: The time to launch a CUDA graph without a profiler, ns. If the profiler records the nodes, the launch takes 0.9 to
#: 1.3 µs per node: 0.85 ms for 639 nodes. The step of examples/serving takes 2.93 ms with this recording, and 1.96 ms
#: without it.
_GRAPH_LAUNCH_NS = 50_000.0
#: The time that recording a node of a CUDA graph adds to the gap before the node, ns. On the GPU, a graph of 692 nodes
#: took 9.16 ms without the recording of nodes, and 9.45 ms with it.
_NODE_RECORDING_NS = 420.0
#: Two lengths of steps count as equal if they differ by at most this share.
_STEP_LENGTH_TOLERANCE = 0.03
#: A replayed step agrees with the median measured step of the same process if it differs by at most this share.
_STEP_SPREAD = 0.01
#: The assumed relative difference between two runs of a program in the CPU's time. In the rounds of the timed pairs of
#: examples/faults, the steps that are not filled by the GPU have a standard deviation of 1 to 21 %, of which the median
#: is 8 %. Processes differ more than rounds: 0.15 is the smallest of 0.08, 0.1, 0.12, 0.15 and 0.2 with which at least
#: eight of ten savings of the transformer and of the encoder are in their intervals.
CPU_RUN_TOLERANCE = 0.15
#: The assumed relative difference between two runs in the GPU's work of a step whose length is estimated. With it and
#: ``CPU_RUN_TOLERANCE`` for the rest of the step, the interval contains the measured length of 19 of the 22 pairs in
#: examples/faults that set a constant.
_GPU_SPREAD = 0.03
#: When the profiler's cost is fitted to the measured length of a step: the largest number of replays, and the relative
#: difference of the lengths at which the search ends.
_MAX_FIT_REPLAYS, _FIT_TOLERANCE = 16, 5e-4
#: The largest cost of the profiler that is tried, as a multiple of its upper bound.
_MAX_PROFILER_COST = 4.0
#: The slowest pace of the CPU that is tried: its time without the profiler, divided by its time under it.
_SLOWEST_PACE = 2.0
#: The columns of a replay that contain times. All of them are scaled to fit a measured length of a step.
_TIME_COLUMNS = (
    "cpu_ns", "min_wait_ns", "return_ns", "latency_ns", "spacing_ns", "work_ns", "pause_ns", "join_gap_ns",
)  # fmt: skip


def estimate_baselines(
    study: Study, length_ms: float, timed_ms: float | None, in_recorded_process: bool = False
) -> tuple[tuple[Replay, ...], float]:
    """Returns baselines, which are replays of the steps without the profiler, and a scale.

    The scale is the ratio of the length of a step to the length of a replayed step.

    Args:
        study: the steps that are replayed.
        length_ms: the length of a step under the profiler, ms.
        timed_ms: the measured length of a step without the profiler, ms; None if it was not measured.
        in_recorded_process: whether ``timed_ms`` was measured in the recorded process. If so, the profiled steps have
            the program's pace, and only the profiler's cost for each event makes them longer.
    """
    # The baselines differ in the profiler's cost: its lower bound, its upper bound, and its upper bound with a faster
    # CPU.
    most_cost = study.replay.without_profiler_cost(1.0)
    baselines = (
        study.replay.without_profiler_cost(study.min_cost_share),
        most_cost,
        most_cost.scale_cpu_time(_UNPROFILED_CPU_TIME_RATIO, study.calls.unrecorded_wait_ns).with_graph_launches(
            _GRAPH_LAUNCH_NS, _NODE_RECORDING_NS
        ),
    )
    if timed_ms:
        step_ns = timed_ms * NS_PER_MS
        # If the GPU works all the time, the length of a step does not depend on the profiler's cost. So baselines with
        # the measured length are kept, and the cost is fitted only if there are none.
        matching_baselines = (
            _find_costs_in_process(study, step_ns)
            if in_recorded_process
            else [replay for replay in baselines if abs(replay.step_ns / step_ns - 1) <= _STEP_LENGTH_TOLERANCE]
        )
        # All times of a replay are scaled to the measured length, as if the machine were faster or slower.
        fitted = [
            (replay, step_ns / replay.step_ns if replay.step_ns else 1.0)
            for replay in matching_baselines or _fit_profiler_cost(study, most_cost, step_ns)
        ]
        return tuple(
            replace(replay, **{name: getattr(replay, name) * pace for name in _TIME_COLUMNS}) for replay, pace in fitted
        ), 1.0
    # The replay contains only a few steps, so its times are scaled to the length of a step.
    return baselines, length_ms / (study.replay.step_ns / NS_PER_MS) if study.replay.step_ns else 1.0


def estimate_unprofiled_ms(replayed_ms: float, busy_ms: float, profiled_ms: float) -> float:
    """Returns the replayed length of a step, limited to the range from the GPU's work to the profiled length, ms."""
    return min(max(replayed_ms, busy_ms), profiled_ms)


def widen_interval_ms(low_ms: float, high_ms: float, busy_ms: float, profiled_ms: float) -> tuple[float, float]:
    """Returns the interval of the estimated length of a step without the profiler, ms, around the same middle.

    The interval contains the lengths of the replays. It is wider by the assumed differences between runs of a program,
    of the GPU's work and of the remaining time, which the CPU determines. The interval neither begins below the GPU's
    work nor ends above the length under the profiler by more than the GPU's work differs between runs.
    """
    middle_ms = (low_ms + high_ms) / 2
    gpu_ms, cpu_ms = _GPU_SPREAD * busy_ms, CPU_RUN_TOLERANCE * max(middle_ms - busy_ms, 0.0)
    room_ms = max(min(middle_ms - busy_ms, profiled_ms - middle_ms), 0.0) + gpu_ms
    half_ms = min((high_ms - low_ms) / 2 + gpu_ms + cpu_ms, room_ms)
    return middle_ms - half_ms, middle_ms + half_ms


def _find_costs_in_process(study: Study, step_ns: float) -> list[Replay]:
    """Returns the steps without the profiler's cost for each event, for costs with which a step takes ``step_ns``.

    If launches limit the steps, one cost fits. If the GPU fills the steps, many costs fit, so there are two replays,
    with the smallest and the largest usual cost. The list is empty if no cost fits.
    """
    recorded = study.replay.with_graph_launches(_GRAPH_LAUNCH_NS, _NODE_RECORDING_NS)
    usual = [recorded.without_profiler_cost(cost) for cost in sorted({study.min_cost_share, 1.0})]
    replays = [replay for replay in usual if abs(replay.step_ns / step_ns - 1) <= _STEP_SPREAD]
    if len(replays) < len(usual):
        replays.append(recorded.without_profiler_cost(find_profiler_cost(recorded, step_ns)))
    return [replay for replay in replays if abs(replay.step_ns / step_ns - 1) <= _STEP_LENGTH_TOLERANCE]


def _fit_profiler_cost(study: Study, most_cost: Replay, step_ns: float) -> list[Replay]:
    """Subtracts the profiler's cost from the steps. The cost is fitted so that a step has the length ``step_ns``.

    If this cost is not between 0 and its upper bound, the CPU may have been faster or slower instead. The list then
    also contains the steps with a fitted speed of the CPU. Replays with another length are left out if one replay has
    this length.
    """
    cost = find_profiler_cost(study.replay, step_ns)
    fitted = [study.replay.without_profiler_cost(cost)]
    if cost > 1 or fitted[0].step_ns < (1 - _STEP_LENGTH_TOLERANCE) * step_ns:
        steps = most_cost if cost > 1 else study.replay
        replay_at_pace = partial(steps.scale_cpu_time, unrecorded_wait_ns=study.calls.unrecorded_wait_ns)
        pace = _find_crossing(_SLOWEST_PACE, 0.0, lambda pace: replay_at_pace(pace).step_ns / step_ns - 1)
        fitted.append(replay_at_pace(pace))
    return [replay for replay in fitted if abs(replay.step_ns / step_ns - 1) <= _STEP_LENGTH_TOLERANCE] or fitted


def find_profiler_cost(recorded: Replay, step_ns: float) -> float:
    """Finds the multiple of ``max_profiler_ns`` without which a recorded step takes ``step_ns``.

    If even the largest cost that is tried is too small, this cost is returned, and 0 if recorded steps are shorter.
    """
    return _find_crossing(
        0.0, _MAX_PROFILER_COST, lambda cost: recorded.without_profiler_cost(cost).step_ns / step_ns - 1
    )


def _find_crossing(low: float, high: float, find_excess: Callable[[float], float]) -> float:
    """Finds the point between ``low`` and ``high`` at which an excess that falls from ``low`` to ``high`` is 0.

    The next point is where a line through the values at both bounds is 0. The value of a bound that stays is halved, so
    that both bounds move (the Illinois method). Returns a bound if the excess has the same sign at both bounds.
    """
    excess_of_low, excess_of_high = find_excess(low), find_excess(high)
    if excess_of_low <= 0 or excess_of_high >= 0:
        return low if excess_of_low <= 0 else high
    point = high
    for _ in range(_MAX_FIT_REPLAYS - 2):
        point = low + (high - low) * excess_of_low / (excess_of_low - excess_of_high)
        excess = find_excess(point)
        if abs(excess) < _FIT_TOLERANCE:
            break
        if excess > 0:
            low, excess_of_low, excess_of_high = point, excess, excess_of_high / 2
        else:
            high, excess_of_high, excess_of_low = point, excess, excess_of_low / 2
    return point
