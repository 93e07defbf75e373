"""The ranges that each GPU operation belongs to: those open on the launching thread at the moment its launch starts.

A thread with no phase open (autograd's ``pt_autograd_N``) inherits the stack of the thread that waits for it, its own
ranges nested below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.attribution.launches import GraphCaptures, find_captures
from nsys_analyzer.analysis.intervals import (
    NONE,
    Axis,
    Timeline,
    count_open_ranges,
    has_moments,
    is_in_any_range,
    merge_ranges,
)
from nsys_analyzer.analysis.ranges.phases import ATTENTION_PARTS, STEP, PhaseNames, find_module_role
from nsys_analyzer.trace.arrays import (
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
    ENGINE_STEP_PREFIX,
    EXECUTOR_STEP_PREFIX,
    MODULE_RANGE_PREFIX,
    map_by_shape,
    parse_served_step,
)
from nsys_analyzer.trace.trace import Trace

#: How an operation was attributed, in the order of ``Attribution.how``'s codes.
ATTRIBUTION_METHODS = ("none", "same thread", "other thread", "graph")
UNATTRIBUTED, SAME_THREAD, OTHER_THREAD, GRAPH_REPLAY = range(4)

_AUTOGRAD_THREAD = "pt_autograd"


class RangeRoles:
    """The role of each range of a trace: a phase, ``step``, ``warmup``, a part of attention, a module, or none.

    ``inferred``: the phase of each name that an inferred range has; empty for a name that is no phase after all.
    ``decodes``: whether ranges such as "decode", without a batch, hold most of the GPU's work.
    """

    def __init__(
        self, ranges: Ranges, names: PhaseNames, inferred: Mapping[str, str] | None = None, *, decodes: bool = False
    ) -> None:
        self.names = names
        self.inferred = inferred or {}
        of_names = zip(ranges.names, names.find_roles(ranges.names), strict=True)
        keys = {name: self.inferred.get(name, key) for name, key in of_names}
        if STEP not in names.extra:
            keys |= dict.fromkeys(_no_steps(keys, decodes=decodes))
        if not set(ATTENTION_PARTS) & set(keys.values()):  # the program's own ranges say more
            calls = [name for name, key in keys.items() if not key and name.startswith(MODULE_RANGE_PREFIX)]
            keys |= {name: find_module_role(name) for name in calls}
        self._ranges, self._keys = ranges, tuple(dict.fromkeys((*keys.values(), None)))
        place = {key: code for code, key in enumerate(self._keys)}
        self._key = np.array([*(place[keys[name]] for name in ranges.names), place[None]])

    def codes(self, keys: tuple[str, ...], of: Ranges | None = None) -> Ints:
        """Shape (ranges,): the position of each range's role among these keys, -1 for another role.

        ``of``: other ranges with the same names, such as those without an end.
        """
        code = np.array([keys.index(key) if key in keys else NONE for key in self._keys], np.int64)
        codes: Ints = code[self._key[(self._ranges if of is None else of).name]]
        return codes

    def mask(self, *keys: str, of: Ranges | None = None) -> Bools:
        """Shape (ranges,): True for the ranges whose role is one of these keys."""
        mask: Bools = self.codes(keys, of) != NONE
        return mask

    @cached_property
    def is_leaf_phase(self) -> Bools:
        """True for the ranges of a phase other than the step."""
        return self.mask(*self.names.leaf_phases)

    @cached_property
    def is_phase_or_step(self) -> Bools:
        """True for the ranges of a phase, the step included."""
        return self.is_leaf_phase | self.mask(STEP)


def _no_steps(keys: Mapping[str, str | None], *, decodes: bool) -> set[str]:
    """Returns the names that are no steps if an engine marks its own: the names of ranges around its steps.

    Such ranges are a step of PyTorch's profiler, a whole generation, and the executor's step around SGLang's. "decode"
    without a batch is a step only if there is "prefill" as well, or if such ranges hold most of the GPU's work.
    """
    are_marks = zip(keys, map_by_shape(tuple(keys), parse_served_step), strict=True)
    marks = {name: mark for name, is_mark in are_marks if is_mark and (mark := parse_served_step(name))}
    is_inside = any(name.startswith(ENGINE_STEP_PREFIX) for name in marks)
    is_certain = any(mark.certain for mark in marks.values())
    doubtful = is_certain or (len({mark.kind for mark in marks.values()}) < 2 and not decodes)
    no_steps = {
        name
        for name, mark in marks.items()
        if (is_inside and name.startswith(EXECUTOR_STEP_PREFIX)) or (doubtful and not mark.certain)
    }
    trains = not {"backward", "optimizer"}.isdisjoint(keys.values())
    serves = bool(marks.keys() - no_steps) and not trains
    return no_steps | {name for name, key in keys.items() if serves and key == STEP and name not in marks}


def make_timeline(ranges: Ranges, chosen: Bools, *, latest: bool, by_process: bool = False) -> tuple[Timeline, Ints]:
    """The timeline of some of the ranges, by thread or by process, and the index of each of them."""
    index = np.flatnonzero(chosen)
    thread = ranges.thread[index]
    group = process_of(thread) if by_process else thread
    return Timeline(group, ranges.start[index], ranges.end[index], latest=latest), index


@dataclass(frozen=True)
class Attribution:
    """Where each operation was launched, and whose ranges it belongs to; every array has shape (operations,).

    Attributes:
        launch, thread, time: the index of the launch, where and when it starts; index and thread -1 without one.
        inherited: the thread whose stack it inherits, or -1.
        inside: True where a phase of its own thread counts before one that it inherits.
        engine: the threads that work for another one that waits in its backward pass.
        how: code into ``ATTRIBUTION_METHODS``.
        ambiguous: True where several threads of the process had phases open.
    """

    ranges: Ranges
    launch: SmallInts
    thread: Ints
    time: Ints
    inherited: Ints
    inside: Bools
    engine: Ints
    captures: GraphCaptures
    how: Codes
    ambiguous: Bools

    def find_outermost(self, chosen: Bools) -> SmallInts:
        """Returns the outermost of some ranges around each operation, or -1: the inherited stack lies outside."""
        lines, index = make_timeline(self.ranges, chosen, latest=False)
        found = lines.open_at(self.thread, self.time)
        inheriting = np.flatnonzero(self.inherited != NONE)
        inherited, launching = lines.open_at(self.inherited[inheriting], self.time[inheriting]), found[inheriting]
        keeps = (inherited == NONE) | (self.inside[inheriting] & (launching != NONE))
        found[inheriting] = np.where(keeps, launching, inherited)
        return np.append(index, NONE).astype(np.int32)[found]

    def find_innermost(self, chosen: Bools, operations: Ints) -> Ints:
        """Of some ranges, the innermost around some operations, or -1; those of a graph's capture lie inside."""
        lines, index = make_timeline(self.ranges, chosen, latest=True)
        found = np.full(len(self.launch), NONE, np.int64)
        found[self.captures.operation] = lines.open_at(self.captures.thread, self.captures.time)
        found = found[operations]
        for thread in (self.thread[operations], self.inherited[operations]):
            found = np.where(found == NONE, lines.open_at(thread, self.time[operations]), found)
        return np.append(index, NONE)[found]


def attribute(trace: Trace, roles: RangeRoles, launch: SmallInts) -> Attribution:
    """Attributes every operation to the ranges open when it was launched; ``launch`` is that of each, -1 for none."""
    operations, launches, ranges = trace.operations, trace.launches, trace.ranges
    thread, time = take_or_default(launches.thread, launch, NONE), take_or_default(launches.start, launch, 0)
    phases = ranges.select(roles.is_phase_or_step)
    in_phase = is_in_any_range(phases.thread, phases.start, phases.end, thread, time)
    in_range = in_phase.copy()
    in_range[~in_phase] = is_in_any_range(ranges.thread, ranges.start, ranges.end, thread[~in_phase], time[~in_phase])
    engine = _engine_threads(trace, roles)
    inherited, ambiguous = _inherited(trace, roles, engine, in_range, in_phase, thread, time)
    inside = in_phase & ~np.isin(thread, engine)
    replayed = (operations.kind == GRAPH) | (operations.graph_node != 0)
    how = np.full(len(operations), SAME_THREAD, np.int8)
    how[inherited != NONE] = OTHER_THREAD
    how[replayed] = GRAPH_REPLAY
    how[~in_range & (inherited == NONE)] = UNATTRIBUTED
    return Attribution(ranges, launch, thread, time, inherited, inside, engine, find_captures(trace), how, ambiguous)


def _inherited(
    trace: Trace, roles: RangeRoles, engine: Ints, in_range: Bools, in_phase: Bools, thread: Ints, time: Ints
) -> tuple[Ints, Bools]:
    """Returns the thread that each launch inherits from, -1 for none, and whether the choice was ambiguous."""
    autograd = np.isin(thread, engine)
    lacking = np.flatnonzero((autograd | ~in_phase) & (thread != NONE))
    inherited, ambiguous = np.full(len(thread), NONE, np.int64), np.zeros(len(thread), np.bool_)
    if len(lacking) and len(trace.ranges):
        process, at = process_of(thread[lacking]), time[lacking]
        without_ranges = ~in_range[lacking] | autograd[lacking]
        waiting = find_waiting_ranges(trace, roles, engine, process, at, without_ranges)
        inherited[lacking] = np.append(trace.ranges.thread, NONE)[waiting]
        phases = trace.ranges.select(roles.is_phase_or_step & ~np.isin(trace.ranges.thread, engine))
        group, start, end = merge_ranges(phases.thread, phases.start, phases.end)
        ambiguous[lacking] = (waiting != NONE) & (count_open_ranges(process_of(group), start, end, process, at) > 1)
    # A phase on a thread without steps is part of the step that another thread has open.
    steps = trace.ranges.select(roles.mask(STEP))
    stepless = np.flatnonzero(in_phase & (inherited == NONE) & ~np.isin(thread, steps.thread))
    if len(stepless) and len(steps):
        open_step = make_timeline(steps, np.ones(len(steps), np.bool_), latest=True, by_process=True)[0]
        around = open_step.open_at(process_of(thread[stepless]), time[stepless])
        inherited[stepless] = np.append(steps.thread, NONE)[around]
    return inherited, ambiguous


def _engine_threads(trace: Trace, roles: RangeRoles) -> Ints:
    """Returns the global thread IDs of autograd's engine: by their names, or by what runs on them.

    A thread without such a name is the engine's if its only phases are forward passes inside backward passes of other
    threads, which run forward passes as well.
    """
    ranges = trace.ranges
    backward = roles.mask("backward") & np.isin(ranges.thread, ranges.thread[roles.mask("forward")])
    phases = ranges.select(roles.is_phase_or_step)
    lines = make_timeline(ranges, backward, latest=True, by_process=True)[0]
    again = roles.mask("forward", of=phases) & (lines.open_at(process_of(phases.thread), phases.start) != NONE)
    return np.append(find_autograd_threads(trace), np.setdiff1d(phases.thread[again], phases.thread[~again]))


def find_autograd_threads(trace: Trace) -> Ints:
    """The global thread IDs of PyTorch's autograd engine, known by the names it gives its threads."""
    thread_names = trace.metadata.thread_names.items()
    return np.array([thread for thread, name in thread_names if name.startswith(_AUTOGRAD_THREAD)], np.int64)


def find_waiting_ranges(
    trace: Trace, roles: RangeRoles, engine: Ints, process: Ints, time: Ints, without_ranges: Bools
) -> Ints:
    """The range whose thread a launch inherits from, or -1.

    Of the phases open in the process: the one in backward, else the one opened last, else the step opened
    last. With no phase open, a launch from a thread without ranges takes the range opened last, whatever its name.
    """
    waiting = np.full(len(time), NONE, np.int64)
    from_others = ~np.isin(trace.ranges.thread, engine)
    any_name = np.ones(len(trace.ranges), np.bool_)
    preferences = (roles.mask("backward"), roles.is_leaf_phase, roles.is_phase_or_step, any_name)
    for rank, chosen in enumerate(preferences):
        undecided = np.flatnonzero((waiting == NONE) & (without_ranges | (rank < len(preferences) - 1)))
        if len(undecided):
            lines, index = make_timeline(trace.ranges, chosen & from_others, latest=True, by_process=True)
            waiting[undecided] = np.append(index, NONE)[lines.open_at(process[undecided], time[undecided])]
    return waiting


PATH_SEPARATOR = " / "

Stack = tuple[int, ...]


def make_range_paths(trace: Trace, attribution: Attribution) -> tuple[Ints, list[str]]:
    """The range path of each operation: codes of shape (operations,), and the paths; the first is the empty one."""
    ranges, captures = trace.ranges, attribution.captures
    captured = np.full((2, len(attribution.launch)), NONE, np.int64)
    captured[:, captures.operation] = captures.thread, captures.time
    thread = np.concatenate([attribution.inherited, attribution.thread, captured[0]])
    time = np.concatenate([attribution.time, attribution.time, captured[1]])
    of_moment, stacks = find_open_stacks(ranges, thread, time)
    three_of = of_moment.reshape(3, len(attribution.launch))
    first, codes = distinct_rows(*three_of)
    # Different combinations may read the same; a categorical's categories must not.
    texts = [
        PATH_SEPARATOR.join(_path(ranges, *(stacks[code] for code in three))) for three in three_of[:, first].T.tolist()
    ]
    paths, recode = np.unique(np.array(["", *texts], np.object_), return_inverse=True)
    return recode[1:][codes], paths.tolist()


def find_open_stacks(ranges: Ranges, thread: Ints, time: Ints) -> tuple[Ints, list[Stack]]:
    """The ranges open on each (thread, time), in the order in which they were opened, the longer of two first.

    Returns:
        Codes of shape (moments,), and the stacks they stand for, as indices of ranges; the first is the empty one.
    """
    # A range without a moment in it need not be opened: most operators launch nothing.
    index = np.flatnonzero(has_moments(thread, time, ranges.thread, ranges.start, ranges.end))
    held = ranges.select(index)
    axis = Axis(held.thread, held.start, held.end)
    opened, closed = axis.place(held.thread, held.start), axis.place(held.thread, held.end)
    boundaries = distinct(np.concatenate([opened, closed]))
    # What is open is the same from one boundary to the next; before the first one, and off the axis: NONE.
    segment = np.searchsorted(boundaries, axis.place(thread, time), side="right") - 1
    used, codes = dense_codes(segment)
    at = boundaries[used[used != NONE]].tolist()
    order = np.lexsort((index, -closed, opened))
    stacks: dict[Stack, int] = {(): 0}
    sweep = _sweep(index[order].tolist(), opened[order].tolist(), closed[order].tolist(), at)
    found = [*[0] * (len(used) - len(at)), *(stacks.setdefault(stack, len(stacks)) for stack in sweep)]
    return np.array(found, np.int64)[codes], list(stacks)


def _sweep(index: list[int], opened: list[int], closed: list[int], boundaries: list[int]) -> Iterator[Stack]:
    """The stack at each of some boundaries, in their order; the ranges come in the order in which they open."""
    closing = sorted(range(len(index)), key=closed.__getitem__)
    stack: dict[int, None] = {}  # in the order in which they were opened, whatever is closed in between
    next_open = next_close = 0
    for boundary in boundaries:
        while next_open < len(index) and opened[next_open] <= boundary:
            stack[index[next_open]] = None
            next_open += 1
        while next_close < len(closing) and closed[closing[next_close]] <= boundary:
            del stack[index[closing[next_close]]]
            next_close += 1
        yield tuple(stack)


def _path(ranges: Ranges, outer: Stack, launching: Stack, captured: Stack) -> list[str]:
    """The names of a combination of the inherited, the launching and the captured stack.

    A capture's stack repeats names of the replay's (step, forward): what it adds stands below their last one.
    """
    stack, added = ([ranges.names[ranges.name[one]] for one in some] for some in ((*outer, *launching), captured))
    seen = set(stack)
    last = max((i for i, name in enumerate(added) if name in seen), default=-1)
    return [*stack, *added[last + 1 :]]
