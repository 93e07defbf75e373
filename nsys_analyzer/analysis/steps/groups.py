"""Divides the steps of a process into groups of similar steps, and decides which group is measured.

The steps of one program differ: the first step initializes the program, some steps wait for a batch, and some contain
an evaluation. A report lists each group with its count and length, because one length for all steps would hide this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.boundaries import find_windows
from nsys_analyzer.analysis.steps.windows import Windows, mask_instances, runs_training
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import MEMCPY
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP, ServedStep, parse_served_step
from nsys_analyzer.trace.schema import NS_PER_MS

#: The figures of a report are those of the "usual" steps. "longer" and "shorter" steps do the same work as usual steps;
#: steps of "other work" do other work. The "first" steps contain the program's initialization. The "last" step is a
#: group of its own if the time from its work to the next step is unknown.
GroupKind = Literal["usual", "longer", "shorter", "other work", "first", "last"]

#: A step is longer or shorter than usual if its length differs from the median length by more than this factor.
_UNUSUAL_LENGTH_FACTOR = 1.5
#: A step is never longer or shorter than usual if its length differs from the usual length by less than this, ns.
_MIN_DIFFERENCE_NS = 50_000
#: Steps do different work if their numbers of operations, or their compute times, differ by more than this factor.
_DIFFERENT_WORK_FACTOR = 1.5
#: This number is added to the numbers of operations before they are compared, so that small numbers count as similar.
_ADDED_OPERATIONS = 20
#: The last step is incomplete if the gap between steps exceeds this share of a step.
_INCOMPLETE_LAST_STEP_GAP = 0.1
#: The first steps of a capture are a cold call only if at least this many of them are longer than usual.
_MIN_COLD_STEPS = 3


@dataclass(frozen=True)
class StepGroup:
    """A group of similar steps.

    Attributes:
        kind: how the steps differ from the usual steps.
        steps: the number of steps.
        median_ms: the median length of the steps, ms.
        measured: whether a report's figures of a step are computed from the steps of this group.
    """

    kind: GroupKind
    steps: int
    median_ms: float
    measured: bool


@dataclass(frozen=True)
class Steps:
    """The recorded steps of a process, and the steps whose figures are computed: usually the measured steps.

    Attributes:
        windows: the steps whose figures are computed.
        positions: shape (steps,), the index in ``recorded`` of each step of ``windows``.
        recorded: all recorded steps.
        groups: the groups of similar steps, the usual steps first.
        marks: the mark that a serving engine sets on each recorded step; empty if the steps have no marks.
        group_names: for each recorded step, the kind of its mark ("prefill", …), or the kind of its group without a
            mark.
    """

    windows: Windows
    positions: Ints
    recorded: Windows
    groups: tuple[StepGroup, ...]
    marks: tuple[ServedStep, ...] = ()
    group_names: tuple[str, ...] = ()

    @property
    def unmeasured_groups(self) -> Iterator[tuple[str, Steps]]:
        """Yields the name and the steps of each group that is not measured, except for "first" and "last" steps."""
        measured_names = {self.group_names[position] for position in self.positions.tolist()}
        for name in dict.fromkeys(self.group_names):
            if name not in (*measured_names, "first", "last"):
                positions = np.flatnonzero(np.array(self.group_names, np.object_) == name)
                yield name, replace(self, windows=self.recorded.select(positions), positions=positions)

    @property
    def length_ms(self) -> float:
        """Returns the median length of the steps whose figures are computed, ms."""
        return float(np.median(self.windows.length)) / NS_PER_MS

    @property
    def start_up_bounds(self) -> tuple[int, int] | None:
        """Returns the start of the first and the end of the last "first" step, ns, or None without "first" steps."""
        first_step_count = sum(group.steps for group in self.groups if group.kind == "first")
        return (
            (int(self.recorded.cpu_start[0]), int(self.recorded.cpu_end[first_step_count - 1]))
            if first_step_count
            else None
        )


def find_steps(attributed: AttributedTrace, process: int) -> Steps | None:
    """Finds the steps of the process with this global ID. Returns None if nothing of the process ran on a device."""
    recorded = find_windows(attributed, process)
    if recorded is None:
        return None
    marks = _find_serving_marks(attributed, process, recorded)
    if marks:
        usual_mark = Counter(mark.kind for mark in marks).most_common(1)[0][0]
        kinds_by_work: list[GroupKind] = ["usual" if mark.kind == usual_mark else "other work" for mark in marks]
    else:
        kinds_by_work = _group_steps_by_work(attributed, process, recorded)
    kinds = np.array(kinds_by_work, np.object_)
    is_usual, length = kinds == "usual", recorded.length
    median = np.sort(length[is_usual])[(is_usual.sum() - 1) // 2]
    is_longer = length > _UNUSUAL_LENGTH_FACTOR * median + _MIN_DIFFERENCE_NS
    is_shorter = length < median / _UNUSUAL_LENGTH_FACTOR - _MIN_DIFFERENCE_NS
    kinds[: _count_cold_steps(attributed, process, marks, is_usual, is_longer)] = "first"
    if not marks:  # marked steps may differ in length because their batches differ
        kinds[(kinds == "usual") & is_longer], kinds[(kinds == "usual") & is_shorter] = "longer", "shorter"
    if kinds[-1] == "shorter" and recorded.source in ("phases", "repetition"):
        kinds[-1] = "last"
    step_groups = []
    for kind in get_args(GroupKind):
        if len(length_of_kind := length[kinds == kind]):
            median_ms = float(np.median(length_of_kind)) / NS_PER_MS
            step_groups.append(StepGroup(kind, len(length_of_kind), median_ms, kind == "usual"))
    positions = np.flatnonzero(kinds == "usual")
    labels = np.array([mark.kind for mark in marks] or kinds, np.object_)
    group_names = tuple(np.where(kinds == "first", kinds, labels).tolist())
    return Steps(recorded.select(positions), positions, recorded, tuple(step_groups), marks, group_names)


def _find_serving_marks(attributed: AttributedTrace, process: int, recorded: Windows) -> tuple[ServedStep, ...]:
    """Returns the mark that a serving engine set on each step.

    The tuple is empty if a step has no mark, or if it is uncertain whether a serving engine set the marks.
    """
    instances, ranges = attributed.instances, attributed.trace.ranges
    index = np.flatnonzero(mask_instances(attributed, process, STEP, OTHER_STEP))
    if recorded.source != "range" or not len(index):
        return ()
    index = index[np.searchsorted(instances.start[index], recorded.cpu_start)]
    names = ranges.name[instances.range[index]].tolist()
    marks = tuple(mark for code in names if (mark := parse_served_step(ranges.names[code])))
    serves = any(mark.certain for mark in marks) or len({mark.kind for mark in marks}) > 1
    return marks if serves and len(marks) == len(names) else ()


def _count_cold_steps(
    attributed: AttributedTrace, process: int, marks: tuple[ServedStep, ...], is_usual: Bools, is_longer: Bools
) -> int:
    """Returns the number of longer steps at the start of the capture if they are a cold call, otherwise 0.

    A cold call is the first use of a model that does not train. It ends with the last of the longer steps that does the
    usual work. The first steps of a server are not a cold call, because they may be longer due to a larger batch. For
    the same reason, the first steps of a generation are a cold call only if the first batch is not larger than the
    median batch.
    """
    cold_steps = np.flatnonzero(is_usual[: int(np.argmin(is_longer))])
    if len(cold_steps) < _MIN_COLD_STEPS or runs_training(attributed, process):
        return 0
    batches = [mark.batch or 0 for mark, usual in zip(marks, is_usual.tolist(), strict=False) if usual]
    is_generation = all(mark.inferred for mark in marks) and (not marks or batches[0] <= np.median(batches))
    return int(cold_steps[-1]) + 1 if is_generation else 0


def _group_steps_by_work(attributed: AttributedTrace, process: int, recorded: Windows) -> list[GroupKind]:
    """Finds the kind of each step by its work. Steps with the length or the work of most steps are usual."""
    steps, length = len(recorded), recorded.length
    launches, compute_ns = _measure_launched_work(attributed, process, recorded)
    kinds: list[GroupKind] = ["usual"] * steps
    if steps < 2 or recorded.source == "said":
        return kinds
    # Compute the length of each step without the time between steps.
    body_ns = np.maximum(recorded.body_end - recorded.cpu_start, recorded.end - recorded.cpu_end)
    # If the last step has no pause after its work, its end is unknown.
    has_open_end = bool(recorded.cpu_end[-1] == recorded.body_end[-1])
    first_step_count = int(
        _is_first_step_long(attributed, process, recorded, body_ns, compute_ns, has_open_end=has_open_end)
    )
    between_ns = (
        np.median((recorded.cpu_end - recorded.body_end)[first_step_count:-1]) if steps > first_step_count + 1 else 0
    )
    is_last_incomplete = has_open_end and between_ns > _INCOMPLETE_LAST_STEP_GAP * np.median(length[first_step_count:])
    end = steps - int(is_last_incomplete)
    inner_steps = slice(first_step_count, end)
    clusters = _cluster_values(launches[inner_steps] + _ADDED_OPERATIONS) * steps
    clusters += _cluster_values(compute_ns[inner_steps] + _MIN_DIFFERENCE_NS)
    largest_cluster = max(
        np.unique(clusters).tolist(),
        key=lambda cluster: ((clusters == cluster).sum(), length[inner_steps][clusters == cluster].sum()),
    )
    usual_ns = np.median(body_ns[inner_steps][clusters == largest_cluster])
    has_usual_length = (body_ns <= _UNUSUAL_LENGTH_FACTOR * usual_ns) & (body_ns >= usual_ns / _UNUSUAL_LENGTH_FACTOR)
    # Work of one step may run in a neighboring step on another stream, so a step of the usual length is always usual.
    is_usual = has_usual_length[inner_steps] | (clusters == largest_cluster)
    kinds[inner_steps] = ["usual" if usual else "other work" for usual in is_usual.tolist()]
    kinds[:first_step_count], kinds[end:] = ["first"] * first_step_count, ["last"] * (steps - end)
    return kinds


def _is_first_step_long(
    attributed: AttributedTrace, process: int, recorded: Windows, body_ns: Ints, compute_ns: Ints, *, has_open_end: bool
) -> bool:
    """Checks whether the first step is longer than the other steps because the program initializes itself in it."""
    length = recorded.length
    complete_lengths = length[1 : len(recorded) - has_open_end]
    is_long = bool(body_ns[0] > _UNUSUAL_LENGTH_FACTOR * np.median(body_ns[1:]))
    if len(complete_lengths):
        is_long |= bool(length[0] > _UNUSUAL_LENGTH_FACTOR * np.median(complete_lengths) + _MIN_DIFFERENCE_NS)
    # Inference may begin with a long prompt. The first step is then longer in proportion to its work.
    work_ratio = compute_ns[0] / max(np.median(compute_ns[1:]), 1)
    is_in_proportion = body_ns[0] <= _UNUSUAL_LENGTH_FACTOR * work_ratio * np.median(body_ns[1:])
    has_other_work = work_ratio > _UNUSUAL_LENGTH_FACTOR and is_in_proportion
    return is_long and (not has_other_work or runs_training(attributed, process))


def _measure_launched_work(attributed: AttributedTrace, process: int, recorded: Windows) -> tuple[Ints, Ints]:
    """Returns the number of operations that each step launches, and their compute time, ns; both of shape (steps,).

    Collectives do not count. Copies count as operations, but not as compute time, since a first step may copy the whole
    model to the device.
    """
    operations, attribution, kernels = attributed.trace.operations, attributed.attribution, attributed.kernels
    is_collective = np.array([*(name == COMMUNICATION for name in kernels.classes), False])[kernels.code]
    counts = (operations.process == process) & ~is_collective
    has_launch = counts & (attribution.thread != NONE)
    time = operations.start
    if has_launch.any():  # operations without a launch are left out: they were launched before the recording
        counts, time = has_launch, attribution.time
    step = recorded.step_at(time[counts]) + 1  # 0 for an operation outside of all steps
    compute_ns = np.where(operations.kind == MEMCPY, 0, operations.end - operations.start)[counts]
    launches = np.bincount(step, minlength=len(recorded) + 1)
    return launches[1:], np.bincount(step, compute_ns, len(recorded) + 1)[1:].astype(np.int64)


def _cluster_values(values: Ints) -> Ints:
    """Returns the index of each value's cluster, from 0 for the smallest values.

    Two neighboring sorted values are in different clusters if the larger value exceeds the smaller value by more than
    the factor ``_DIFFERENT_WORK_FACTOR``.
    """
    order = np.argsort(values, kind="stable")
    clusters = np.empty(len(values), np.int64)
    clusters[order] = np.append(0, np.cumsum(values[order][1:] > _DIFFERENT_WORK_FACTOR * values[order][:-1]))
    return clusters
