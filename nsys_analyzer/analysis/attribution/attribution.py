"""Attributes each GPU operation to the ranges that are open on the launching thread when the launch starts.

A thread without an open phase, such as autograd's ``pt_autograd_N``, inherits the range stack of the thread that waits
for it. The ranges of the inheriting thread are nested below the inherited stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.attribution.launches import GraphCaptures, find_graph_captures
from nsys_analyzer.analysis.intervals import (
    NONE,
    Timeline,
    contains_any_time,
    count_open_ranges,
    is_in_any_range,
    merge_ranges,
)
from nsys_analyzer.trace.arrays import (
    Axis,
    Bools,
    Codes,
    Ints,
    SmallInts,
    dense_codes,
    distinct,
    distinct_rows,
    take_or_default,
)
from nsys_analyzer.trace.columns import GRAPH, Ranges, process_of
from nsys_analyzer.trace.phase_names import (
    ATTENTION_PARTS,
    ENGINE_STEP_PREFIX,
    EXECUTOR_STEP_PREFIX,
    MODULE_RANGE_PREFIX,
    STEP,
    PhaseNames,
    find_module_role,
    map_by_shape,
    parse_served_step,
)
from nsys_analyzer.trace.trace import Trace

#: The ways in which an operation is attributed. ``Attribution.method`` contains indices into this tuple.
ATTRIBUTION_METHODS = ("none", "same thread", "other thread", "graph")
UNATTRIBUTED, SAME_THREAD, OTHER_THREAD, GRAPH_REPLAY = range(4)

_AUTOGRAD_THREAD = "pt_autograd"


@dataclass(frozen=True)
class Attribution:
    """The launch of each GPU operation, and the threads whose ranges the operation belongs to.

    Arrays have the shape (operations,) unless stated otherwise.

    Attributes:
        ranges: the ranges of the trace.
        launch: the index of the launch of each operation, -1 if it has no launch.
        thread: the thread of the launch, -1 without a launch.
        time: the start of the launch, ns; 0 without a launch.
        inherited_thread: the thread whose range stack the operation inherits, -1 if it inherits none.
        prefers_own_phase: True if a phase of the launching thread takes precedence over an inherited phase.
        engine_threads: shape (threads,), the threads of autograd's engine. They work for a thread that waits in its
            backward pass.
        captures: where the nodes of CUDA graphs were captured.
        method: the index in ``ATTRIBUTION_METHODS``.
        is_ambiguous: True if the operation inherits a range stack although several threads of its process had a phase
            open, so that the choice of the thread is uncertain.
    """

    ranges: Ranges
    launch: SmallInts
    thread: Ints
    time: Ints
    inherited_thread: Ints
    prefers_own_phase: Bools
    engine_threads: Ints
    captures: GraphCaptures
    method: Codes
    is_ambiguous: Bools

    def find_outermost(self, is_candidate: Bools) -> SmallInts:
        """Returns the outermost candidate range around each operation, or -1; shape (operations,).

        Ranges of an inherited stack lie outside the ranges of the launching thread.

        Args:
            is_candidate: shape (ranges,), True for the ranges to look for.
        """
        timeline, index = make_timeline(self.ranges, is_candidate, innermost=False)
        outermost_range = timeline.open_at(self.thread, self.time)
        inheriting = np.flatnonzero(self.inherited_thread != NONE)
        inherited_range = timeline.open_at(self.inherited_thread[inheriting], self.time[inheriting])
        range_of_launch = outermost_range[inheriting]
        keeps_own_range = (inherited_range == NONE) | (self.prefers_own_phase[inheriting] & (range_of_launch != NONE))
        outermost_range[inheriting] = np.where(keeps_own_range, range_of_launch, inherited_range)
        return np.append(index, NONE).astype(np.int32)[outermost_range]

    def find_innermost(self, is_candidate: Bools, operations: Ints) -> Ints:
        """Returns the innermost candidate range around each of ``operations``, or -1.

        For a node of a CUDA graph, ranges around the capture count as inside the ranges around the replay.
        """
        timeline, index = make_timeline(self.ranges, is_candidate, innermost=True)
        innermost_range = np.full(len(self.launch), NONE, np.int64)
        innermost_range[self.captures.operation] = timeline.open_at(self.captures.thread, self.captures.time)
        innermost_range = innermost_range[operations]
        for thread in (self.thread[operations], self.inherited_thread[operations]):
            innermost_range = np.where(
                innermost_range == NONE, timeline.open_at(thread, self.time[operations]), innermost_range
            )
        return np.append(index, NONE)[innermost_range]


def attribute(trace: Trace, roles: RangeRoles, launch: SmallInts) -> Attribution:
    """Attributes every operation to the ranges that are open when it is launched.

    Args:
        launch: shape (operations,), the index of the launch of each operation, -1 if there is none.
    """
    operations, launches, ranges = trace.operations, trace.launches, trace.ranges
    thread, time = take_or_default(launches.thread, launch, NONE), take_or_default(launches.start, launch, 0)
    phases = ranges.select(roles.is_phase_or_step)
    in_phase = is_in_any_range(phases.thread, phases.start, phases.end, thread, time)
    in_range = in_phase.copy()
    in_range[~in_phase] = is_in_any_range(ranges.thread, ranges.start, ranges.end, thread[~in_phase], time[~in_phase])
    engine_threads = _find_engine_threads(trace, roles)
    inherited_thread, is_ambiguous = _find_inherited_threads(
        trace, roles, engine_threads, in_range, in_phase, thread, time
    )
    prefers_own_phase = in_phase & ~np.isin(thread, engine_threads)
    is_replayed = (operations.kind == GRAPH) | (operations.graph_node != 0)
    method = np.full(len(operations), SAME_THREAD, np.int8)
    method[inherited_thread != NONE] = OTHER_THREAD
    method[is_replayed] = GRAPH_REPLAY
    method[~in_range & (inherited_thread == NONE)] = UNATTRIBUTED
    return Attribution(
        ranges,
        launch,
        thread,
        time,
        inherited_thread,
        prefers_own_phase,
        engine_threads,
        find_graph_captures(trace),
        method,
        is_ambiguous,
    )


def _find_inherited_threads(
    trace: Trace, roles: RangeRoles, engine_threads: Ints, in_range: Bools, in_phase: Bools, thread: Ints, time: Ints
) -> tuple[Ints, Bools]:
    """Returns the thread whose stack each operation inherits, or -1, and whether several threads had a phase open."""
    is_on_engine = np.isin(thread, engine_threads)
    inheriting = np.flatnonzero((is_on_engine | ~in_phase) & (thread != NONE))
    inherited_thread, is_ambiguous = np.full(len(thread), NONE, np.int64), np.zeros(len(thread), np.bool_)
    if len(inheriting) and len(trace.ranges):
        process, launch_time = process_of(thread[inheriting]), time[inheriting]
        without_ranges = ~in_range[inheriting] | is_on_engine[inheriting]
        inherited_range = find_inherited_ranges(trace, roles, engine_threads, process, launch_time, without_ranges)
        inherited_thread[inheriting] = np.append(trace.ranges.thread, NONE)[inherited_range]
        phases = trace.ranges.select(roles.is_phase_or_step & ~np.isin(trace.ranges.thread, engine_threads))
        group, start, end = merge_ranges(phases.thread, phases.start, phases.end)
        open_phases = count_open_ranges(process_of(group), start, end, process, launch_time)
        is_ambiguous[inheriting] = (inherited_range != NONE) & (open_phases > 1)
    # If a thread with phases has no steps, its phases are part of the step that is open on another thread.
    steps = trace.ranges.select(roles.has_role(STEP))
    stepless_operations = np.flatnonzero(in_phase & (inherited_thread == NONE) & ~np.isin(thread, steps.thread))
    if len(stepless_operations) and len(steps):
        open_step = make_timeline(steps, np.ones(len(steps), np.bool_), innermost=True, by_process=True)[0]
        open_step_index = open_step.open_at(process_of(thread[stepless_operations]), time[stepless_operations])
        inherited_thread[stepless_operations] = np.append(steps.thread, NONE)[open_step_index]
    return inherited_thread, is_ambiguous


def _find_engine_threads(trace: Trace, roles: RangeRoles) -> Ints:
    """Returns the global IDs of the threads of autograd's engine.

    A thread belongs to the engine if it has the engine's name, or if all of its phases are forward passes inside the
    backward pass of another thread that also runs forward passes of its own.
    """
    ranges = trace.ranges
    backward = roles.has_role("backward") & np.isin(ranges.thread, ranges.thread[roles.has_role("forward")])
    phases = ranges.select(roles.is_phase_or_step)
    timeline = make_timeline(ranges, backward, innermost=True, by_process=True)[0]
    in_backward = timeline.open_at(process_of(phases.thread), phases.start) != NONE
    recomputes = roles.has_role("forward", ranges=phases) & in_backward
    return np.append(find_autograd_threads(trace), np.setdiff1d(phases.thread[recomputes], phases.thread[~recomputes]))


def find_autograd_threads(trace: Trace) -> Ints:
    """Returns the global IDs of the threads that have the name of PyTorch's autograd engine."""
    thread_names = trace.metadata.thread_names.items()
    return np.array([thread for thread, name in thread_names if name.startswith(_AUTOGRAD_THREAD)], np.int64)


def find_inherited_ranges(
    trace: Trace, roles: RangeRoles, engine_threads: Ints, process: Ints, time: Ints, without_ranges: Bools
) -> Ints:
    """Returns, for each launch, the index of the range from whose thread the launch inherits its stack, or -1.

    Only ranges that are open in the process count. A backward pass is preferred, then the phase that opened last, then
    the step that opened last. If none of these is open, a launch from a thread without ranges inherits the stack of the
    range that opened last, whatever its name is.

    Args:
        trace: the trace with the ranges.
        roles: the roles of these ranges.
        engine_threads: the threads of autograd's engine, whose stacks are not inherited.
        process, time: shape (launches,), the process and the start of each launch.
        without_ranges: shape (launches,), True if no range is open on the launching thread.
    """
    inherited_range = np.full(len(time), NONE, np.int64)
    is_outside_engine = ~np.isin(trace.ranges.thread, engine_threads)
    is_any_range = np.ones(len(trace.ranges), np.bool_)
    preferences = (roles.has_role("backward"), roles.is_leaf_phase, roles.is_phase_or_step, is_any_range)
    for preference, is_candidate in enumerate(preferences):
        undecided_operations = np.flatnonzero(
            (inherited_range == NONE) & (without_ranges | (preference < len(preferences) - 1))
        )
        if len(undecided_operations):
            timeline, index = make_timeline(
                trace.ranges, is_candidate & is_outside_engine, innermost=True, by_process=True
            )
            inherited_range[undecided_operations] = np.append(index, NONE)[
                timeline.open_at(process[undecided_operations], time[undecided_operations])
            ]
    return inherited_range


def make_timeline(
    ranges: Ranges, selected: Bools, *, innermost: bool, by_process: bool = False
) -> tuple[Timeline, Ints]:
    """Returns a timeline of the selected ranges, grouped by thread or by process, and the index of each such range."""
    index = np.flatnonzero(selected)
    thread = ranges.thread[index]
    group = process_of(thread) if by_process else thread
    return Timeline(group, ranges.start[index], ranges.end[index], innermost=innermost), index


class RangeRoles:
    """The role of each range of a trace: a phase, ``step``, ``warmup``, a part of attention, a module, or None.

    Args:
        inferred: the phase of each inferred range, by the range's name. The phase is empty if the range of a framework
            has the name of a phase, but is not a phase.
        decodes: True if ranges such as "decode", which do not name a batch, contain most of the GPU's work.
    """

    def __init__(
        self, ranges: Ranges, names: PhaseNames, inferred: Mapping[str, str] | None = None, *, decodes: bool = False
    ) -> None:
        self.names = names
        self.inferred = inferred or {}
        roles_by_name = zip(ranges.names, names.find_roles(ranges.names), strict=True)
        roles = {name: self.inferred.get(name, role) for name, role in roles_by_name}
        if STEP not in names.extra:
            roles |= dict.fromkeys(_find_rejected_steps(roles, decodes=decodes))
        # If the program has its own ranges for attention, they replace the roles of module calls.
        if not set(ATTENTION_PARTS) & set(roles.values()):
            calls = [name for name, role in roles.items() if not role and name.startswith(MODULE_RANGE_PREFIX)]
            roles |= {name: find_module_role(name) for name in calls}
        self._ranges, self._roles = ranges, tuple(dict.fromkeys((*roles.values(), None)))
        position = {role: i for i, role in enumerate(self._roles)}
        self._role_of_name = np.array([*(position[roles[name]] for name in ranges.names), position[None]])

    def find_role_codes(self, roles: tuple[str, ...], ranges: Ranges | None = None) -> Ints:
        """Returns the index in ``roles`` of the role of each range, -1 if ``roles`` lacks it; shape (ranges,).

        Args:
            ranges: other ranges that use the same table of names, such as the ranges without an end.
        """
        code = np.array([roles.index(role) if role in roles else NONE for role in self._roles], np.int64)
        codes: Ints = code[self._role_of_name[(self._ranges if ranges is None else ranges).name]]
        return codes

    def has_role(self, *roles: str, ranges: Ranges | None = None) -> Bools:
        """Returns True for each range whose role is one of ``roles``; shape (ranges,)."""
        mask: Bools = self.find_role_codes(roles, ranges) != NONE
        return mask

    @cached_property
    def is_leaf_phase(self) -> Bools:
        """Returns True for each range of a phase other than the step; shape (ranges,)."""
        return self.has_role(*self.names.leaf_phases)

    @cached_property
    def is_phase_or_step(self) -> Bools:
        """Returns True for each range of a phase, including the step; shape (ranges,)."""
        return self.is_leaf_phase | self.has_role(STEP)


def _find_rejected_steps(roles: Mapping[str, str | None], *, decodes: bool) -> set[str]:
    """Returns the names of ranges that look like steps but are not steps.

    If a serving engine marks its own steps, the ranges around them are not steps: a step of PyTorch's profiler, a whole
    generation, or the executor's step around a step of SGLang. A range such as "decode" that does not name a batch is a
    step only if there is a range such as "prefill" as well, or if ``decodes`` is True.
    """
    marks_of_shapes = zip(roles, map_by_shape(tuple(roles), parse_served_step), strict=True)
    served_steps = {
        name: served_step for name, is_mark in marks_of_shapes if is_mark and (served_step := parse_served_step(name))
    }
    is_inside = any(name.startswith(ENGINE_STEP_PREFIX) for name in served_steps)
    is_certain = any(served_step.certain for served_step in served_steps.values())
    is_doubtful = is_certain or (len({served_step.kind for served_step in served_steps.values()}) < 2 and not decodes)
    rejected_names = {
        name
        for name, served_step in served_steps.items()
        if (is_inside and name.startswith(EXECUTOR_STEP_PREFIX)) or (is_doubtful and not served_step.certain)
    }
    trains = not {"backward", "optimizer"}.isdisjoint(roles.values())
    serves = bool(served_steps.keys() - rejected_names) and not trains
    return rejected_names | {
        name for name, role in roles.items() if serves and role == STEP and name not in served_steps
    }


#: Separates the names of the ranges in a range path.
PATH_SEPARATOR = " / "

#: The indices of the ranges that are open at the same time on a thread, the outermost range first.
RangeStack = tuple[int, ...]


def make_range_paths(trace: Trace, attribution: Attribution) -> tuple[Ints, list[str]]:
    """Makes the range path of each operation, such as ``step / forward``.

    Returns:
        The code of each operation's path, shape (operations,), and the list of paths, whose indices are the codes. The
        first path is empty.
    """
    ranges, captures = trace.ranges, attribution.captures
    capture_columns = np.full((2, len(attribution.launch)), NONE, np.int64)
    capture_columns[:, captures.operation] = captures.thread, captures.time
    thread = np.concatenate([attribution.inherited_thread, attribution.thread, capture_columns[0]])
    time = np.concatenate([attribution.time, attribution.time, capture_columns[1]])
    stack_codes, stacks = find_open_stacks(ranges, thread, time)
    codes_by_stack = stack_codes.reshape(3, len(attribution.launch))
    first_of_path, path_code = distinct_rows(*codes_by_stack)
    path_texts = [""]
    for inherited, launching, capturing in codes_by_stack[:, first_of_path].T.tolist():
        replay = [ranges.names[ranges.name[i]] for i in (*stacks[inherited], *stacks[launching])]
        capture = [ranges.names[ranges.name[i]] for i in stacks[capturing]]
        # The stack at the capture of a graph may repeat names of the stack at its replay, such as step and forward.
        # Only the names after the last repeated name are added.
        last_repeated = max((i for i, name in enumerate(capture) if name in replay), default=-1)
        path_texts.append(PATH_SEPARATOR.join([*replay, *capture[last_repeated + 1 :]]))
    # Different combinations of stacks may have the same text. The paths must be distinct, because they become the
    # categories of a pandas Categorical.
    paths, code_of_text = np.unique(np.array(path_texts, np.object_), return_inverse=True)
    return code_of_text[1:][path_code], paths.tolist()


def find_open_stacks(ranges: Ranges, thread: Ints, time: Ints) -> tuple[Ints, list[RangeStack]]:
    """Finds the stack of ranges that are open at each (thread, time), in the order in which the ranges open.

    If two ranges open at the same time, the longer range comes first.

    Returns:
        The code of the stack at each (thread, time), shape (moments,), and the list of stacks, whose indices are the
        codes. The first stack is empty.
    """
    # Leave out ranges that contain none of the times. Most of these are operators that launch nothing.
    index = np.flatnonzero(contains_any_time(thread, time, ranges.thread, ranges.start, ranges.end))
    entered_ranges = ranges.select(index)
    axis = Axis(entered_ranges.thread, entered_ranges.start, entered_ranges.end)
    opened_at = axis.place(entered_ranges.thread, entered_ranges.start)
    closed_at = axis.place(entered_ranges.thread, entered_ranges.end)
    boundaries = distinct(np.concatenate([opened_at, closed_at]))
    # The stack is constant between two boundaries. The segment is NONE before the first boundary and off the axis.
    segment = np.searchsorted(boundaries, axis.place(thread, time), side="right") - 1
    used_segments, codes = dense_codes(segment)
    used_boundaries = boundaries[used_segments[used_segments != NONE]].tolist()
    order = np.lexsort((index, -closed_at, opened_at))
    code_of_stack: dict[RangeStack, int] = {(): 0}
    sweep = _sweep_stacks(index[order].tolist(), opened_at[order].tolist(), closed_at[order].tolist(), used_boundaries)
    swept_codes = [code_of_stack.setdefault(stack, len(code_of_stack)) for stack in sweep]
    code_of_segment = [0] * (len(used_segments) - len(used_boundaries)) + swept_codes
    return np.array(code_of_segment, np.int64)[codes], list(code_of_stack)


def _sweep_stacks(
    index: list[int], opened: list[int], closed: list[int], boundaries: list[int]
) -> Iterator[RangeStack]:
    """Yields the stack of open ranges at each boundary.

    Args:
        index, opened, closed: the index, start and end of each range, sorted by start.
        boundaries: the sorted positions at which a range starts or ends.
    """
    closing_order = sorted(range(len(index)), key=closed.__getitem__)
    stack: dict[int, None] = {}  # a dict keeps the order of opening, even if ranges close in another order
    next_open = next_close = 0
    for boundary in boundaries:
        while next_open < len(index) and opened[next_open] <= boundary:
            stack[index[next_open]] = None
            next_open += 1
        while next_close < len(closing_order) and closed[closing_order[next_close]] <= boundary:
            del stack[index[closing_order[next_close]]]
            next_close += 1
        yield tuple(stack)
