"""Finds the instances of each phase in a trace, and the instance that each GPU operation belongs to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import (
    Attribution,
    RangeRoles,
    attribute,
    find_inherited_ranges,
    make_timeline,
)
from nsys_analyzer.analysis.attribution.launches import (
    exclude_impossible_times,
    find_dropped_launches,
    measure_launch_waits,
)
from nsys_analyzer.analysis.intervals import (
    NONE,
    contains_any_time,
    find_last_time_before,
    is_in_any_range,
    is_inside_another_range,
)
from nsys_analyzer.analysis.kernels.classes import Kernels, find_kernels
from nsys_analyzer.analysis.ranges.inference import with_inferred_phases
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts, distinct, distinct_rows, distinct_texts, mask_by_name
from nsys_analyzer.trace.columns import LAUNCH, Ranges, process_of
from nsys_analyzer.trace.phase_names import (
    ATTENTION_PARTS,
    MODULE,
    OTHER_STEP,
    STEP,
    WARMUP,
    PhaseNames,
    is_framework_name,
    map_by_shape,
    normalize_name,
    parse_served_step,
    strip_counter,
)
from nsys_analyzer.trace.trace import Trace

#: Ranges such as "decode" are steps if there are at least ``_MIN_DECODE_RANGES`` of them, and if they contain at least
#: the share ``_MIN_DECODE_SHARE`` of the GPU's time.
_MIN_DECODE_RANGES, _MIN_DECODE_SHARE = 3, 0.8
#: Matches the names of ranges that libraries write, and of calls of modules.
_LIBRARY_RANGE = re.compile(r"nn\.Module: |(?i:nccl)|\w+::")
#: The maximum number of repeating ranges that a message lists.
_MAX_REPEATING_RANGES = 5
#: Profilers round times, so a range may end up to this many ns after the range that contains it.
_ROUNDING_NS = 1_000


class AttributedTrace:
    """A trace, with the ranges, the phase and the instance that each operation belongs to.

    Attributes:
        as_recorded: the trace as it was read.
        trace: the trace without operations whose times are wrong, and with a range for each inferred phase.
        unmeasured: the launches whose operation was left out because its times are wrong.
        start_ups: the start and end of each first step that counts as warm-up, ns, by the global ID of the process.

    Raises:
        ConfigurationError: according to ``names``, the step has a name that no range has.
    """

    def __init__(self, trace: Trace, names: PhaseNames | None = None) -> None:
        names = names or PhaseNames()
        for name in names.extra.get(STEP, ()):
            if not any(name in (text, strip_counter(text)) for text in trace.ranges.names):
                hint = f"Ranges that repeat: {', '.join(find_repeating_ranges(trace)) or 'none'}"
                raise ConfigurationError(f"No range has the name {name!r}, which the options give to the step", hint)
        self.as_recorded = trace
        self.start_ups: Mapping[int, tuple[int, int]] = {}
        consistent_trace, launch, self._clock_offset, self.unmeasured = exclude_impossible_times(trace)
        self.trace, inferred = with_inferred_phases(_remove_overlong_steps(consistent_trace, names), names, launch)
        self.roles = RangeRoles(self.trace.ranges, names, inferred, decodes=_has_decode_steps(consistent_trace, launch))
        self.attribution: Attribution = attribute(self.trace, self.roles, launch)

    def with_start_ups_as_warmup(self, start_ups: Mapping[int, tuple[int, int]]) -> AttributedTrace:
        """Returns a copy in which the first step of the given processes counts as warm-up."""
        changed_trace = copy(self)
        for name in ("instances", "instances_of_operations", "is_warmup"):
            changed_trace.__dict__.pop(name, None)
        changed_trace.start_ups = start_ups
        return changed_trace

    def measure_launch_waits(self, operations: Any) -> Ints:
        """Returns the time from the launch of each operation to its start, ns, corrected for the offset of the clocks.

        It is 0 for an operation without a launch.

        Args:
            operations: indices of operations, or a slice.
        """
        start, launch = self.trace.operations.start[operations], self.attribution.launch[operations]
        waits = measure_launch_waits(start, self.trace.launches.start, launch)
        corrected_waits: Ints = waits - self._clock_offset[operations]
        return corrected_waits

    @cached_property
    def instances(self) -> Instances:
        """Returns the instances of all phases in all processes."""
        ranges, roles = self.trace.ranges, self.roles
        phases = (*roles.names.leaf_phases, OTHER_STEP, STEP)
        is_leaf_instance, is_step = self._is_instance(roles.is_leaf_phase), self._is_instance(roles.has_role(STEP))
        masks = [roles.has_role(phase) & (is_step if phase == STEP else is_leaf_instance) for phase in phases]
        phase = np.concatenate([np.full(mask.sum(), code) for code, mask in enumerate(masks)])
        index = np.concatenate([np.flatnonzero(mask) for mask in masks])
        order = np.lexsort((phase, ranges.start[index]))
        index, phase = index[order], phase[order]
        selected_ranges = ranges.select(index)
        process, start, end = process_of(selected_ranges.thread), selected_ranges.start, selected_ranges.end
        # If some steps of a process have a backward pass, a step without a backward pass usually is an evaluation.
        is_step, is_backward = phase == phases.index(STEP), phase == phases.index("backward")
        trains = is_step & contains_any_time(process[is_backward], start[is_backward], process, start, end)
        phase[is_step & ~trains & np.isin(process, process[trains])] = phases.index(OTHER_STEP)
        warmup = self.is_in_warmup(process, start)
        is_incomplete = self._lacks_gpu_activity(selected_ranges, process) | self._ends_out_of_memory(
            selected_ranges, process
        )
        return Instances(index, phase, process, start, end, warmup, is_incomplete, phases)

    def _lacks_gpu_activity(self, ranges: Ranges, process: Ints) -> Bools:
        """Returns True for each range that contains a launch whose operation is missing or was left out.

        If API calls were left out, it also returns True for each range in which an operation without a launch starts.
        """
        launches_without_operation = self.trace.launches.select(np.concatenate([self.lost_launches, self.unmeasured]))
        lacks_activity = contains_any_time(
            process_of(launches_without_operation.thread),
            launches_without_operation.start,
            process,
            ranges.start,
            ranges.end,
        )
        if any(rows.table in schema.RUNTIME.aliases and not rows.only_end_excluded for rows in self.trace.left_out):
            unlaunched = self.trace.operations.select(self.attribution.launch == NONE)
            lacks_activity |= contains_any_time(unlaunched.process, unlaunched.start, process, ranges.start, ranges.end)
        return lacks_activity

    def _ends_out_of_memory(self, ranges: Ranges, process: Ints) -> Bools:
        """Returns True for each range in which an allocation failed, and no kernel was launched afterwards."""
        failed_allocations = self.trace.failed_allocations
        if not len(failed_allocations.start):
            return np.zeros(len(ranges), np.bool_)
        kernel_launches = self.trace.launches.select(self.trace.launches.call == LAUNCH)
        last_failure = find_last_time_before(
            process_of(failed_allocations.thread), failed_allocations.start, process, ranges.end
        )
        continues = contains_any_time(
            process_of(kernel_launches.thread), kernel_launches.start, process, last_failure, ranges.end
        )
        ends_run: Bools = (last_failure >= ranges.start) & ~continues
        return ends_run

    def is_in_warmup(self, process: Ints, time: Ints) -> Bools:
        """Returns True for each (process, time) in a warm-up range, on any thread, or in a step of ``start_ups``.

        A warm-up range without an end lasts to the end of the capture.
        """
        ended_warmups = self.trace.ranges.select(self.roles.has_role(WARMUP))
        endless_warmups = self.trace.open_ranges.select(self.roles.has_role(WARMUP, ranges=self.trace.open_ranges))
        if not len(ended_warmups) and not len(endless_warmups) and not self.start_ups:
            return np.zeros(len(time), np.bool_)
        in_warmup = is_in_any_range(
            process_of(ended_warmups.thread), ended_warmups.start, ended_warmups.end, process, time
        )
        for pid, (start, end) in self.start_ups.items():
            in_warmup |= (process == pid) & (time >= start) & (time < end)
        for pid, start in zip(process_of(endless_warmups.thread), endless_warmups.start, strict=True):
            in_warmup |= (process == pid) & (time >= start)
        return in_warmup

    def _is_instance(self, family: Bools) -> Bools:
        """Returns True for each range of a family that lies in no other range of this family.

        Args:
            family: shape (ranges,), True for the ranges of the family: of all phases, or of all steps.
        """
        ranges = self.trace.ranges
        index = np.flatnonzero(family)
        is_instance = family.copy()
        is_instance[index] = ~is_inside_another_range(ranges.thread[index], ranges.start[index], ranges.end[index])
        # If autograd's thread opens a phase while another thread is in a phase, the new phase is part of the other
        # thread's phase. An example is a forward pass that is recomputed in a backward pass.
        engine = self.attribution.engine_threads
        autograd = np.flatnonzero(np.isin(ranges.thread, engine) & family)
        process, start = process_of(ranges.thread[autograd]), ranges.start[autograd]
        inherited_range = find_inherited_ranges(
            self.trace, self.roles, engine, process, start, np.zeros(len(autograd), np.bool_)
        )
        is_instance[autograd] &= ~np.append(family, False)[inherited_range]
        return is_instance

    @cached_property
    def kernels(self) -> Kernels:
        """Returns the distinct kernels of the trace, each with its class."""
        return find_kernels(self.trace, self.attribution)

    @cached_property
    def lost_launches(self) -> Ints:
        """Returns the indices of the kernel launches whose kernel is missing in the capture."""
        return np.flatnonzero(find_dropped_launches(self.trace.launches, self.attribution.launch, self.unmeasured))

    @cached_property
    def instances_of_operations(self) -> tuple[SmallInts, SmallInts]:
        """Returns the instance of a phase and the step that each operation belongs to.

        Both are arrays of shape (operations,) with indices into ``instances``, or -1.
        """
        return self._find_instances(self.roles.is_leaf_phase), self._find_instances(self.roles.has_role(STEP))

    def _find_instances(self, family: Bools) -> SmallInts:
        instance_of_range = np.full(len(self.trace.ranges) + 1, NONE, np.int32)  # index -1 selects the last entry
        instance_of_range[self.instances.range] = np.arange(len(self.instances.range))
        instance = instance_of_range[self.attribution.find_outermost(family)]
        if self.is_warmup.any():  # the work of a warm-up range does not belong to a measured instance around the range
            instance[self.is_warmup & ~np.append(self.instances.warmup, True)[instance]] = NONE
        return instance

    @cached_property
    def is_warmup(self) -> Bools:
        """Returns True for each operation that was launched in warm-up; shape (operations,).

        If a trace contains only the GPU's timeline, each operation that ran in warm-up counts instead.
        """
        time, has_thread = self.attribution.time, self.attribution.thread != NONE
        is_warmup: Bools = has_thread & self.is_in_warmup(self.trace.operations.process, time)
        return is_warmup

    def find_attention_parts(self, operations: Ints) -> Ints:
        """Returns the index in ``ATTENTION_PARTS`` of the innermost attention range around each operation, or -1.

        If the trace has ranges around whole attention layers, a range outside them, such as a sampler's softmax, does
        not count.
        """
        part_of_range = self.roles.find_role_codes(ATTENTION_PARTS)
        is_attention = part_of_range == ATTENTION_PARTS.index("attention")
        # A projection is a module inside the module of attention, but it is not a part of attention.
        is_candidate = (part_of_range != NONE) | self.roles.has_role(MODULE)
        innermost_range = self.attribution.find_innermost(is_candidate, operations)
        has_attention = is_attention.any()
        attention_range = (
            self.attribution.find_innermost(is_attention, operations) if has_attention else innermost_range
        )
        return np.where(attention_range == NONE, NONE, np.append(part_of_range, NONE)[innermost_range])

    def count_lost_launches(self, process: int) -> int:
        """Counts the kernel launches of a process whose kernel is missing in the capture."""
        return int((process_of(self.trace.launches.thread[self.lost_launches]) == process).sum())

    def find_open_phases(self, process: int) -> tuple[str, ...]:
        """Returns the names of a process's phase ranges that have no end."""
        open_phases = self._select_open_ranges(process, *self.roles.names.leaf_phases, STEP)
        return tuple(sorted({open_phases.names[i] for i in open_phases.name}))

    def count_open_warmups(self, process: int) -> int:
        """Counts the warm-up ranges of a process that have no end."""
        return len(self._select_open_ranges(process, WARMUP))

    def _select_open_ranges(self, process: int, *roles: str) -> Ranges:
        ranges = self.trace.open_ranges
        return ranges.select((process_of(ranges.thread) == process) & self.roles.has_role(*roles, ranges=ranges))

    def count_nested_phases(self, process: int) -> dict[tuple[str, str], int]:
        """Counts the ranges of one phase that lie inside a range of another phase on the same thread.

        Returns:
            The count for each pair (name of the inner range, name of the outer range).
        """
        ranges = self.trace.ranges
        is_leaf = self.roles.is_leaf_phase & (process_of(ranges.thread) == process)
        inner_instances = np.flatnonzero(is_leaf)
        timeline, index = make_timeline(ranges, is_leaf, innermost=False)
        outer_range = timeline.open_at(ranges.thread[inner_instances], ranges.start[inner_instances])
        inner_instances, outer_instances = inner_instances[outer_range != NONE], index[outer_range[outer_range != NONE]]
        phase = self.roles.find_role_codes(self.roles.names.leaf_phases)
        is_nested = (ranges.end[outer_instances] >= ranges.end[inner_instances]) & (
            phase[outer_instances] != phase[inner_instances]
        )
        pairs = zip(
            ranges.name[inner_instances[is_nested]].tolist(),
            ranges.name[outer_instances[is_nested]].tolist(),
            strict=True,
        )
        counts = Counter[tuple[str, str]]()
        for (inner_name, outer_name), count in Counter(pairs).items():
            counts[self._name_phase(ranges.names[inner_name]), self._name_phase(ranges.names[outer_name])] += count
        return counts

    def _name_phase(self, name: str) -> str:
        """Returns the name of a range as a report shows it. For an inferred range, this is the name of its phase."""
        return self.roles.inferred.get(name) or normalize_name(name)

    def count_crossing_phases(self, process: int) -> dict[tuple[str, str], int]:
        """Counts the pairs of phase ranges that cross: the second starts inside the first and ends after the first.

        Only pushed ranges count. Pushed ranges are nested, so if two of them cross, a pop is missing or ended the wrong
        range.

        Returns:
            The count for each pair (name of the first range, name of the second range).
        """
        ranges, not_pushed_names = self.trace.ranges, {*self.trace.start_end_names, *self.roles.inferred}
        is_pushed = self.roles.is_phase_or_step & mask_by_name(ranges, lambda name: name not in not_pushed_names)
        timeline, first_ranges = make_timeline(
            ranges, is_pushed & (process_of(ranges.thread) == process), innermost=True
        )
        second_ranges = np.append(first_ranges, NONE)[
            timeline.open_at(ranges.thread[first_ranges], ranges.end[first_ranges] - 1)
        ]
        crosses = (ranges.end[second_ranges] > ranges.end[first_ranges]) & (
            ranges.end[first_ranges] - ranges.start[second_ranges] > _ROUNDING_NS
        )
        pairs = zip(
            ranges.name[first_ranges[crosses]].tolist(), ranges.name[second_ranges[crosses]].tolist(), strict=True
        )
        return Counter((ranges.names[first_name], ranges.names[second_name]) for first_name, second_name in pairs)

    def ran_out_of_memory(self, process: int) -> bool:
        """Returns True if an allocation of a process failed, and the process launched no kernel afterwards."""
        failed_allocations, launches = self.trace.failed_allocations, self.trace.launches
        failures = failed_allocations.start[process_of(failed_allocations.thread) == process]
        launch_starts = launches.start[(process_of(launches.thread) == process) & (launches.call == LAUNCH)]
        return bool(len(failures)) and not bool((launch_starts > failures.max()).any())


@dataclass(frozen=True)
class Instances:
    """The instances of phases, sorted by start.

    Each array has the shape (instances,).

    Attributes:
        range: the index of the instance's range in the trace's ranges.
        phase: the index of the phase in ``phases``.
        process: the global ID of the process.
        start, end: the start and end of the range on the CPU's clock, ns.
        warmup: True if the instance starts in warm-up.
        incomplete: True if the capture lacks GPU activity of the instance. The instance then contains a launch without
            a kernel, an operation whose times are wrong, or an allocation that failed.
        phases: the names of the phases, in the order in which a step runs them.
    """

    range: Ints
    phase: Ints
    process: Ints
    start: Ints
    end: Ints
    warmup: Bools
    incomplete: Bools
    phases: tuple[str, ...]

    @property
    def is_measured(self) -> Bools:
        """Returns True for each instance that counts as a measurement."""
        is_measured: Bools = ~self.warmup & ~self.incomplete
        return is_measured


def find_repeating_ranges(trace: Trace) -> list[str]:
    """Returns the names of the program's ranges that occur several times, without counters in the names.

    The names are sorted by the total duration of their ranges, the longest first.
    """
    ranges, operators = trace.ranges, {trace.operators.names[code] for code in distinct(trace.operators.name)}
    total_ns, total_count = Counter[str](), Counter[str]()
    lengths = np.bincount(ranges.name, ranges.end - ranges.start, len(ranges.names)).tolist()
    counts = np.bincount(ranges.name, minlength=len(ranges.names)).tolist()
    for name, count, length in zip(ranges.names, counts, lengths, strict=True):
        if count and not is_framework_name(name) and name not in operators and not _LIBRARY_RANGE.match(name):
            total_ns[strip_counter(name)] += length
            total_count[strip_counter(name)] += count
    return [name for name, _ in total_ns.most_common() if total_count[name] > 1][:_MAX_REPEATING_RANGES]


def _remove_overlong_steps(trace: Trace, names: PhaseNames) -> Trace:
    """Moves steps that overlap the next step of the same name and thread to the ranges without an end.

    The end of such a step is wrong. If at least half of the steps overlap the next one, steps are nested, and nothing
    is moved.
    """
    ranges = trace.ranges
    roles_by_name = zip(ranges.names, names.find_roles(ranges.names), strict=True)
    _, name = distinct_texts([normalize_name(text) if role == STEP else "" for text, role in roles_by_name])
    index = np.flatnonzero(name[ranges.name] > 0)  # the code 0 belongs to the empty text, which is no name
    index = index[np.lexsort((ranges.start[index], name[ranges.name[index]], ranges.thread[index]))]
    start, end = ranges.start[index], ranges.end[index]
    _, loop = distinct_rows(ranges.thread[index], name[ranges.name[index]])
    is_next_reached = (loop[1:] == loop[:-1]) & (end[:-1] > start[1:] + (end - start)[1:] // 10)
    is_overlong = np.append(is_next_reached, False)[: len(index)]
    overlong_count = np.bincount(loop[is_overlong], minlength=loop.max(initial=0) + 1)
    are_few = 2 * overlong_count < np.bincount(loop, minlength=1)
    is_wrong = np.zeros(len(ranges), np.bool_)
    is_wrong[index] = is_overlong & are_few[loop]
    if not is_wrong.any():
        return trace
    columns = zip(trace.open_ranges.columns().values(), ranges.select(is_wrong).columns().values(), strict=True)
    start, end, thread, name = (np.concatenate(pair) for pair in columns)
    return replace(trace, ranges=ranges.select(~is_wrong), open_ranges=Ranges(start, end, thread, name, ranges.names))


def _has_decode_steps(trace: Trace, launch: SmallInts) -> bool:
    """Returns True if ranges with names such as "decode" contain most of the GPU's time and thus mark decode steps.

    The ranges "decode" of a program that decodes images contain little GPU time.
    """
    operations, marks = trace.operations, map_by_shape(trace.ranges.names, parse_served_step)
    is_mark = np.array([*(mark is not None and not mark.certain for mark in marks), False])[trace.ranges.name]
    if is_mark.sum() < _MIN_DECODE_RANGES:
        return False
    ranges, ns, has_launch = trace.ranges.select(is_mark), operations.end - operations.start, launch != NONE
    calls = trace.launches.thread[launch[has_launch]], trace.launches.start[launch[has_launch]]
    is_inside = is_in_any_range(ranges.thread, ranges.start, ranges.end, *calls)
    return bool(ns[has_launch][is_inside].sum() >= _MIN_DECODE_SHARE * ns.sum())
