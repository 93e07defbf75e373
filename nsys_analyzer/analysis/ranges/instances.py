"""The occurrences of each phase in a trace, and the occurrence each GPU operation belongs to.

The distinct kernels of a trace are those by name, and by class where launching operators give one name two classes:
cuDNN multiplies matrices with the very kernels of cuBLAS, so ``volta_sgemm_64x64_nt`` is a matmul launched by
``aten::mm`` and a convolution launched by ``aten::convolution_backward``.
"""

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
    find_waiting_ranges,
    make_timeline,
)
from nsys_analyzer.analysis.attribution.launches import (
    find_dropped_launches,
    leave_out_contradictions,
    measure_launch_waits,
)
from nsys_analyzer.analysis.intervals import (
    LONG_AGO,
    NONE,
    Timeline,
    find_last_before,
    has_moments,
    is_contained,
    is_in_any_range,
)
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, OTHER
from nsys_analyzer.analysis.kernels.classes import LIBRARY_COLLECTIVE, classify, find_possible_classes, is_collective
from nsys_analyzer.analysis.ranges.inference import with_inferred_phases
from nsys_analyzer.analysis.ranges.phases import (
    ATTENTION_PARTS,
    MODULE,
    OTHER_STEP,
    STEP,
    WARMUP,
    PhaseNames,
    is_framework_name,
)
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts, distinct, distinct_rows, distinct_texts, mask_by_name
from nsys_analyzer.trace.columns import BETWEEN_DEVICES, LAUNCH, MEMCPY, ON_DEVICE, Ranges, process_of
from nsys_analyzer.trace.phase_names import map_by_shape, normalize_name, parse_served_step, strip_counter
from nsys_analyzer.trace.trace import Trace

#: Ranges such as "decode" are steps if there are at least this many, and if they hold this share of the GPU's time.
_FEWEST_DECODES, _SHARE_OF_DECODES = 3, 0.8
#: Ranges that libraries write, and calls of modules.
_BY_LIBRARY = re.compile(r"nn\.Module: |(?i:nccl)|\w+::")
#: The number of repeating ranges that people are told.
_REPEATING_RANGES = 5
#: Profilers round times: a range may end up to this much after the range that it lies in.
_ROUNDED_NS = 1_000


@dataclass(frozen=True)
class Kernels:
    """The distinct kernels of a trace.

    Attributes:
        code: shape (operations,), index of each operation's kernel; -1 for an operation that is none. The copies of a
            collective that copy engines carry out have one as well.
        names, classes: shape (kernels,), the full name and the class of each. A name is there once for each class.
    """

    code: SmallInts
    names: tuple[str, ...]
    classes: tuple[str, ...]


def find_launching_operators(trace: Trace, attribution: Attribution, operations: Ints) -> Ints:
    """Code into ``trace.operators.names`` of the innermost operator around the launch of some operations, or -1.

    That of the launching thread: an operator runs on one thread. A node of a CUDA graph was launched where it was
    captured, as far as the trace knows.
    """
    return np.append(trace.operators.name, NONE)[_innermost_operators(trace, attribution, operations)]


def _innermost_operators(trace: Trace, attribution: Attribution, operations: Ints) -> Ints:
    """Returns the index of the innermost operator around the launch of each of some operations, or -1."""
    operators = trace.operators
    lines = Timeline(operators.thread, operators.start, operators.end, latest=True)
    thread, time = attribution.thread.copy(), attribution.time.copy()
    captures = attribution.captures
    thread[captures.operation], time[captures.operation] = captures.thread, captures.time
    return lines.open_at(thread[operations], time[operations])


def find_launching_collectives(trace: Trace, attribution: Attribution, operations: Ints) -> list[str]:
    """Returns the name of the collective that launches each of some operations; empty if none does.

    It consists of the names of the innermost range and of the innermost operator, as far as these are collectives. What
    another operator inside the range launches only prepares the collective, and counts as none.
    """
    ranges, operators = trace.ranges, trace.operators
    around = attribution.find_innermost(mask_by_name(ranges, is_collective), operations)
    within = _innermost_operators(trace, attribution, operations)
    by_range = (around != NONE) & (np.append(operators.start, LONG_AGO)[within] <= np.append(ranges.start, 0)[around])
    by_operator = np.append(mask_by_name(operators, is_collective), False)[within]
    range_name = np.where(by_range, np.append(ranges.name, NONE)[around], NONE).tolist()
    operator_name = np.where(by_operator, np.append(operators.name, NONE)[within], NONE).tolist()
    names, called = (*ranges.names, ""), (*operators.names, "")
    return [f"{names[i]} {called[j]}".strip() for i, j in zip(range_name, operator_name, strict=True)]


def find_kernels(trace: Trace, attribution: Attribution) -> Kernels:
    """Returns the distinct kernels of a trace, by name and by the operator where that may decide the class.

    A collective that copies carry out counts as a kernel, too.
    """
    operations, operators = trace.operations, trace.operators
    classes = [classify(name) for name in operations.names]
    known = {classify(operators.names[i]) for i in np.flatnonzero(np.bincount(operators.name))} - {OTHER}
    is_open = np.array([not known.isdisjoint(find_possible_classes(name)) for name in operations.names], np.bool_)
    undecided = np.flatnonzero(is_open[operations.name[operations.kernels]])
    operator = find_launching_operators(trace, attribution, undecided) if len(undecided) else undecided
    # A kernel for every pair of a name and a class that an operator gives it.
    number: dict[tuple[str, str], int] = {}
    by_name = [number.setdefault(pair, len(number)) for pair in zip(operations.names, classes, strict=True)]
    code = np.array([*by_name, NONE], np.int32)[operations.name]
    launched, operator = undecided[operator != NONE], operator[operator != NONE]
    first, position = distinct_rows(operations.name[launched], operator)
    pairs = zip(operations.name[launched[first]].tolist(), operator[first].tolist(), strict=True)
    names = [(operations.names[name], operators.names[by]) for name, by in pairs]
    decided = [number.setdefault((name, classify(name, by)), len(number)) for name, by in names]
    code[launched] = np.array(decided, np.int32)[position]
    copies = np.flatnonzero((operations.kind == MEMCPY) & np.isin(operations.copy, (ON_DEVICE, BETWEEN_DEVICES)))
    if len(copies) and any(map(is_collective, (*trace.ranges.names, *operators.names))):
        for copied, name in zip(copies.tolist(), find_launching_collectives(trace, attribution, copies), strict=True):
            # A range of the program may also hold other copies on one device.
            if name and (operations.copy[copied] == BETWEEN_DEVICES or LIBRARY_COLLECTIVE.search(name)):
                code[copied] = number.setdefault((f"{name} (copies)", COMMUNICATION), len(number))
    return Kernels(code, tuple(name for name, _ in number), tuple(kernel_class for _, kernel_class in number))


@dataclass(frozen=True)
class Instances:
    """Occurrences of phases, in order of start; each array has shape (instances,), times are ns on the CPU's clock.

    Attributes:
        range: index into the trace's ranges.
        phase: code into ``phases``, which are in the order of a step.
        process: global process ID.
        incomplete: True where the capture lacks GPU activity of the instance: launches without a kernel, an
            operation whose times cannot be true, or an allocation that failed inside.
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
    def measured(self) -> Bools:
        """True for the instances that count as measurements."""
        measured: Bools = ~self.warmup & ~self.incomplete
        return measured


def _without_overlong_steps(trace: Trace, names: PhaseNames) -> Trace:
    """Takes the end from each step that lasts into the next one of its name and thread, where few do.

    Where most do, one step is in another.
    """
    ranges = trace.ranges
    pairs = zip(ranges.names, names.find_roles(ranges.names), strict=True)
    _, name = distinct_texts([normalize_name(text) if key == STEP else "" for text, key in pairs])
    index = np.flatnonzero(name[ranges.name] > 0)  # the first text is the empty one
    index = index[np.lexsort((ranges.start[index], name[ranges.name[index]], ranges.thread[index]))]
    start, end = ranges.start[index], ranges.end[index]
    _, loop = distinct_rows(ranges.thread[index], name[ranges.name[index]])
    lasts = np.append((loop[1:] == loop[:-1]) & (end[:-1] > start[1:] + (end - start)[1:] // 10), False)[: len(index)]
    few = 2 * np.bincount(loop[lasts], minlength=loop.max(initial=0) + 1) < np.bincount(loop, minlength=1)
    wrong = np.zeros(len(ranges), np.bool_)
    wrong[index] = lasts & few[loop]
    if not wrong.any():
        return trace
    both = zip(trace.open_ranges.columns().values(), ranges.select(wrong).columns().values(), strict=True)
    start, end, thread, name = (np.concatenate(columns) for columns in both)
    return replace(trace, ranges=ranges.select(~wrong), open_ranges=Ranges(start, end, thread, name, ranges.names))


def find_repeating_ranges(trace: Trace) -> list[str]:
    """Returns the names, without counters, of the program's ranges that occur several times: the longest ones."""
    ranges, operators = trace.ranges, {trace.operators.names[code] for code in distinct(trace.operators.name)}
    ns, count = Counter[str](), Counter[str]()
    lengths = np.bincount(ranges.name, ranges.end - ranges.start, len(ranges.names)).tolist()
    counts = np.bincount(ranges.name, minlength=len(ranges.names)).tolist()
    for name, of_name, length in zip(ranges.names, counts, lengths, strict=True):
        if of_name and not is_framework_name(name) and name not in operators and not _BY_LIBRARY.match(name):
            ns[strip_counter(name)] += length
            count[strip_counter(name)] += of_name
    return [name for name, _ in ns.most_common() if count[name] > 1][:_REPEATING_RANGES]


def _check_step(trace: Trace, names: PhaseNames) -> None:
    """Raises ``ConfigurationError`` where no range has a name that is said to be the step's."""
    for name in names.extra.get(STEP, ()):
        if not any(name in (text, strip_counter(text)) for text in trace.ranges.names):
            hint = f"Those that repeat: {', '.join(find_repeating_ranges(trace)) or 'none'}"
            raise ConfigurationError(f"No range is called {name!r}, which was to be the step", hint)


def _decodes(trace: Trace, launch: SmallInts) -> bool:
    """Tells whether ranges such as "decode", without a batch, hold most of the GPU's time; image decoders do not."""
    operations, marks = trace.operations, map_by_shape(trace.ranges.names, parse_served_step)
    is_mark = np.array([*(mark is not None and not mark.certain for mark in marks), False])[trace.ranges.name]
    if is_mark.sum() < _FEWEST_DECODES:
        return False
    ranges, ns, placed = trace.ranges.select(is_mark), operations.end - operations.start, launch != NONE
    calls = trace.launches.thread[launch[placed]], trace.launches.start[launch[placed]]
    inside = is_in_any_range(ranges.thread, ranges.start, ranges.end, *calls)
    return bool(ns[placed][inside].sum() >= _SHARE_OF_DECODES * ns.sum())


class AttributedTrace:
    """A trace with each operation's ranges, phase and instance.

    Attributes:
        as_recorded, trace: the trace as it was, and without the operations that contradict it, with a range for each
            inferred phase.
        unmeasured: the launches whose operation was left out since its times cannot be true.
        start_ups: when the first step of a process begins and ends, by its global ID, where that counts as warm-up.
    """

    def __init__(self, trace: Trace, names: PhaseNames | None = None) -> None:
        names = names or PhaseNames()
        _check_step(trace, names)
        self.as_recorded = trace
        self.start_ups: Mapping[int, tuple[int, int]] = {}
        sound, launch, self._behind, self.unmeasured = leave_out_contradictions(trace)
        self.trace, inferred = with_inferred_phases(_without_overlong_steps(sound, names), names, launch)
        self.roles = RangeRoles(self.trace.ranges, names, inferred, decodes=_decodes(sound, launch))
        self.attribution: Attribution = attribute(self.trace, self.roles, launch)

    def with_start_ups_as_warmup(self, start_ups: Mapping[int, tuple[int, int]]) -> AttributedTrace:
        """The same trace, in which the first step of these processes counts as warm-up."""
        other = copy(self)
        for name in ("instances", "instances_of_operations", "is_warmup"):
            other.__dict__.pop(name, None)
        other.start_ups = start_ups
        return other

    def measure_launch_waits(self, chosen: Any) -> Ints:
        """From the launch of each of some operations to its start, ns, by one clock; 0 without a launch."""
        operations, launch = self.trace.operations, self.attribution.launch
        wait: Ints = (
            measure_launch_waits(operations.start[chosen], self.trace.launches.start, launch[chosen])
            - self._behind[chosen]
        )
        return wait

    @cached_property
    def instances(self) -> Instances:
        """Every occurrence of every phase."""
        ranges, roles = self.trace.ranges, self.roles
        phases = (*roles.names.leaf_phases, OTHER_STEP, STEP)
        leaf, step = self._is_instance(roles.is_leaf_phase), self._is_instance(roles.mask(STEP))
        chosen = [roles.mask(phase) & (step if phase == STEP else leaf) for phase in phases]
        phase = np.concatenate([np.full(mask.sum(), code) for code, mask in enumerate(chosen)])
        index = np.concatenate([np.flatnonzero(mask) for mask in chosen])
        order = np.lexsort((phase, ranges.start[index]))
        index, phase = index[order], phase[order]
        picked = ranges.select(index)
        process = process_of(picked.thread)
        # Steps that hold no backward pass, in processes where others do, are evaluation as a rule.
        is_step, backward = phase == phases.index(STEP), picked.select(phase == phases.index("backward"))
        trains = is_step & has_moments(process_of(backward.thread), backward.start, process, picked.start, picked.end)
        phase[is_step & ~trains & np.isin(process, process[trains])] = phases.index(OTHER_STEP)
        incomplete = self._lacks_gpu_activity(picked, process) | self._ends_out_of_memory(picked, process)
        return Instances(
            index,
            phase,
            process,
            picked.start,
            picked.end,
            self.is_in_warmup(process, picked.start),
            incomplete,
            phases,
        )

    def _lacks_gpu_activity(self, picked: Ranges, process: Ints) -> Bools:
        """The ranges with launches whose kernel is missing or impossible, or with operations whose API call is."""
        lacking = self.trace.launches.select(np.concatenate([self.lost_launches, self.unmeasured]))
        lacks = has_moments(process_of(lacking.thread), lacking.start, process, picked.start, picked.end)
        if any(one.table in schema.RUNTIME.aliases and not one.only_end_excluded for one in self.trace.left_out):
            unlaunched = self.trace.operations.select(self.attribution.launch == NONE)
            lacks |= has_moments(unlaunched.process, unlaunched.start, process, picked.start, picked.end)
        return lacks

    def _ends_out_of_memory(self, picked: Ranges, process: Ints) -> Bools:
        """The ranges in which an allocation failed and nothing was launched afterwards."""
        failed = self.trace.failed_allocations
        if not len(failed.start):
            return np.zeros(len(picked), np.bool_)
        launched = self.trace.launches.select(self.trace.launches.call == LAUNCH)
        last_failure = find_last_before(process_of(failed.thread), failed.start, process, picked.end)
        goes_on = has_moments(process_of(launched.thread), launched.start, process, last_failure, picked.end)
        ends: Bools = (last_failure >= picked.start) & ~goes_on
        return ends

    def is_in_warmup(self, process: Ints, time: Ints) -> Bools:
        """True where a warm-up range of the process is open, on whichever thread, or a first step that is left out.

        A warm-up range without an end stays open.
        """
        ended = self.trace.ranges.select(self.roles.mask(WARMUP))
        endless = self.trace.open_ranges.select(self.roles.mask(WARMUP, of=self.trace.open_ranges))
        if not len(ended) and not len(endless) and not self.start_ups:
            return np.zeros(len(time), np.bool_)
        warm = is_in_any_range(process_of(ended.thread), ended.start, ended.end, process, time)
        for one, (start, end) in self.start_ups.items():
            warm |= (process == one) & (time >= start) & (time < end)
        for one, start in zip(process_of(endless.thread), endless.start, strict=True):
            warm |= (process == one) & (time >= start)
        return warm

    def _is_instance(self, family: Bools) -> Bools:
        """True for the ranges of a family (all phases, or steps) that lie inside no other one of it."""
        ranges = self.trace.ranges
        index = np.flatnonzero(family)
        instance = family.copy()
        instance[index] = ~is_contained(ranges.thread[index], ranges.start[index], ranges.end[index])
        # A phase that autograd's thread opens while another thread is in one (a recomputed forward) is part of it.
        engine = self.attribution.engine
        autograd = np.flatnonzero(np.isin(ranges.thread, engine) & family)
        process, start = process_of(ranges.thread[autograd]), ranges.start[autograd]
        waiting = find_waiting_ranges(self.trace, self.roles, engine, process, start, np.zeros(len(autograd), np.bool_))
        instance[autograd] &= ~np.append(family, False)[waiting]
        return instance

    @cached_property
    def kernels(self) -> Kernels:
        """The distinct kernels, each with its class."""
        return find_kernels(self.trace, self.attribution)

    @cached_property
    def lost_launches(self) -> Ints:
        """The kernel launches whose kernel the capture lacks: indices into ``trace.launches``."""
        return np.flatnonzero(find_dropped_launches(self.trace.launches, self.attribution.launch, self.unmeasured))

    @cached_property
    def instances_of_operations(self) -> tuple[SmallInts, SmallInts]:
        """Shape (operations,) each: the instance of a phase and the step that each operation belongs to, or -1."""
        return self._instance_of(self.roles.is_leaf_phase), self._instance_of(self.roles.mask(STEP))

    def _instance_of(self, family: Bools) -> SmallInts:
        lookup = np.full(len(self.trace.ranges) + 1, NONE, np.int32)  # the last entry serves index -1
        lookup[self.instances.range] = np.arange(len(self.instances.range))
        found = lookup[self.attribution.find_outermost(family)]
        if self.is_warmup.any():  # a measured instance may hold a warm-up range, whose work is not its own
            found[self.is_warmup & ~np.append(self.instances.warmup, True)[found]] = NONE
        return found

    @cached_property
    def is_warmup(self) -> Bools:
        """Shape (operations,): True for each that was launched (on the GPU's timeline: ran) in a warm-up range."""
        time, placed = self.attribution.time, self.attribution.thread != NONE
        warm: Bools = placed & self.is_in_warmup(self.trace.operations.process, time)
        return warm

    def find_attention_parts(self, operations: Ints) -> Ints:
        """Code into ``ATTENTION_PARTS`` of the innermost attention range around each of some operations, or -1.

        Where there are ranges around attention, a part outside them (a sampler's softmax) is none.
        """
        part_of_range = self.roles.codes(ATTENTION_PARTS)
        attention = part_of_range == ATTENTION_PARTS.index("attention")
        # A projection is a module inside that of attention, and no part of it.
        chosen = (part_of_range != NONE) | self.roles.mask(MODULE)
        found = self.attribution.find_innermost(chosen, operations)
        around = self.attribution.find_innermost(attention, operations) if attention.any() else found
        return np.where(around == NONE, NONE, np.append(part_of_range, NONE)[found])

    def count_lost_launches(self, process: int) -> int:
        """The number of kernel launches of a process without their kernel."""
        return int((process_of(self.trace.launches.thread[self.lost_launches]) == process).sum())

    def find_open_phases(self, process: int) -> tuple[str, ...]:
        """The names of a process's phase ranges without an end."""
        found = self._open_ranges(process, *self.roles.names.leaf_phases, STEP)
        return tuple(sorted({found.names[i] for i in found.name}))

    def count_open_warmups(self, process: int) -> int:
        """The number of warm-up ranges of a process without an end."""
        return len(self._open_ranges(process, WARMUP))

    def _open_ranges(self, process: int, *keys: str) -> Ranges:
        ranges = self.trace.open_ranges
        return ranges.select((process_of(ranges.thread) == process) & self.roles.mask(*keys, of=ranges))

    def count_nested_phases(self, process: int) -> dict[tuple[str, str], int]:
        """Returns the number of ranges of one phase inside another phase on their thread: (inner, outer) to count."""
        ranges = self.trace.ranges
        is_leaf = self.roles.is_leaf_phase & (process_of(ranges.thread) == process)
        inner = np.flatnonzero(is_leaf)
        lines, index = make_timeline(ranges, is_leaf, latest=False)
        around = lines.open_at(ranges.thread[inner], ranges.start[inner])
        inner, outer = inner[around != NONE], index[around[around != NONE]]
        phase = self.roles.codes(self.roles.names.leaf_phases)
        chosen = (ranges.end[outer] >= ranges.end[inner]) & (phase[outer] != phase[inner])
        pairs = zip(ranges.name[inner[chosen]].tolist(), ranges.name[outer[chosen]].tolist(), strict=True)
        counts = Counter[tuple[str, str]]()
        for (inner_name, outer_name), count in Counter(pairs).items():
            counts[self._called(ranges.names[inner_name]), self._called(ranges.names[outer_name])] += count
        return counts

    def _called(self, name: str) -> str:
        """Returns the name of a range for people: an inferred one is called by its phase."""
        return self.roles.inferred.get(name) or normalize_name(name)

    def count_crossing_phases(self, process: int) -> dict[tuple[str, str], int]:
        """Returns how many pushed ranges of phases end inside one that began in them: (first, second) to count.

        Ranges that are pushed and popped lie inside each other, so a pop is missing, or it came from elsewhere.
        """
        ranges, free = self.trace.ranges, {*self.trace.start_end_names, *self.roles.inferred}
        pushed = self.roles.is_phase_or_step & mask_by_name(ranges, lambda name: name not in free)
        lines, first = make_timeline(ranges, pushed & (process_of(ranges.thread) == process), latest=True)
        second = np.append(first, NONE)[lines.open_at(ranges.thread[first], ranges.end[first] - 1)]
        crosses = (ranges.end[second] > ranges.end[first]) & (ranges.end[first] - ranges.start[second] > _ROUNDED_NS)
        pairs = zip(ranges.name[first[crosses]].tolist(), ranges.name[second[crosses]].tolist(), strict=True)
        return Counter((ranges.names[outlasting], ranges.names[inner]) for outlasting, inner in pairs)

    def ran_out_of_memory(self, process: int) -> bool:
        """True where an allocation of a process failed and it launched no kernel afterwards."""
        failed, launches = self.trace.failed_allocations, self.trace.launches
        mine = failed.start[process_of(failed.thread) == process]
        later = (process_of(launches.thread) == process) & (launches.call == LAUNCH)
        return bool(len(mine)) and not bool((launches.start[later] > mine.max()).any())
