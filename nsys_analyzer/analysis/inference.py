"""Phases of a program without phase ranges of its own, from what PyTorch and nsys write by themselves.

nsys's ``--pytorch=functions-trace`` writes a range for each call of a module, of backward and of an optimizer.
PyTorch's profiler and ``--pytorch=autograd-nvtx`` write the operators: those of autograd's engine are backward, and
what is launched before them since the optimizer, the step's start, a bound of warm-up or the last backward is forward.
Each inferred phase becomes a range of the thread that runs the step, so that everything else treats it like a range of
the person's own. A process in which the person named a phase is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nsys_analyzer.analysis.attribution import RangeRoles, autograd_threads
from nsys_analyzer.analysis.launches import match_launches
from nsys_analyzer.analysis.phases import STEP, WARMUP, PhaseNames, is_framework_name
from nsys_analyzer.analysis.timeline import LONG_AGO, NONE, Timeline, contained, merged
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import Launches, Ranges, process_of
from nsys_analyzer.trace.trace import Trace

#: The ranges of ``--pytorch=functions-trace`` that are phases, each by its outermost range.
_FUNCTIONS = {
    "forward": re.compile(r"torch\.nn\.modules\.Module\.__call__"),
    "backward": re.compile(r"torch\.(?:autograd|Tensor)\.backward"),
    "optimizer": re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)(?:\w+\.)+step"),
}
#: What autograd's engine runs, and what it was called before PyTorch had a name for the engine.
_ENGINE = re.compile(r"autograd::engine::evaluate_function")
_BACKWARD_OPERATOR = re.compile(r"\w*Backward\d*")
#: ``backward()`` makes the first gradient with it before it starts the engine.
_FIRST_GRADIENT = "aten::ones_like"
_OF_FUNCTIONS, _OF_OPERATORS = "nsys's function ranges", "autograd's operators"


@dataclass
class _Found:
    """Inferred ranges of one process: times in ns, the phase of each, and what it was inferred from."""

    thread: int
    source: str
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def with_inferred_phases(trace: Trace, names: PhaseNames) -> tuple[Trace, Mapping[str, str]]:
    """Adds ranges for the phases that a framework's own ranges and operators tell.

    Returns:
        The trace, and the phase that each name of an added range stands for; empty where nothing was added.
    """
    if any(phase in names.leaf_phases for phase in names.extra) or not _may_tell(trace):
        return trace, {}
    roles = RangeRoles(trace.ranges, names)
    named = roles.leaf & ~_of_framework(trace.ranges)
    processes = np.setdiff1d(process_of(trace.launches.thread), process_of(trace.ranges.thread[named]))
    if not len(processes):
        return trace, {}
    launched = np.unique(match_launches(trace.operations, trace.launches))
    launches = trace.launches.select(launched[launched != NONE])
    found = [one for process in processes if (one := _infer(trace, roles, launches, int(process)))]
    return _added(trace, found) if found else (trace, {})


def _may_tell(trace: Trace) -> bool:
    """Whether a trace holds anything that phases can be inferred from."""
    functions = any(words.fullmatch(name) for name in trace.ranges.names for words in _FUNCTIONS.values())
    return functions or bool(len(trace.operators))


def _of_framework(ranges: Ranges) -> Bools:
    framework = np.array([is_framework_name(name) for name in ranges.names], np.bool_)
    return framework[ranges.name] if len(framework) else np.zeros(len(ranges), np.bool_)


def _infer(trace: Trace, roles: RangeRoles, launches: Launches, process: int) -> _Found | None:
    """The phases of one process; ``launches`` are the calls that put work on the GPU."""
    engine = trace.operators.select(_engine(trace.operators, process))
    running = Timeline(engine.thread, engine.start, engine.end, latest=False)
    outside = launches.select(
        (process_of(launches.thread) == process)
        & (running.at(launches.thread, launches.start) == NONE)
        & ~np.isin(launches.thread, autograd_threads(trace))
    )
    thread = _busiest(outside.thread if len(outside.thread) else engine.thread)
    own = np.sort(outside.start[outside.thread == thread])
    steps = [start for start, _ in _spans(trace.ranges, roles.mask(STEP) & (trace.ranges.thread == thread))]
    cuts = [*steps, *_bounds_of_warmup(trace, roles, process)]
    functions = _functions(trace.ranges, thread)
    if functions:
        forward = _joined(functions.get("forward", []), functions, cuts)
        return _Found(thread, _OF_FUNCTIONS, {**functions, "forward": forward})
    if not len(engine):
        return None
    backward = list(_backward(engine, _first_gradients(trace.operators, thread), own))
    optimizer = [end for _, end in _spans(trace.ranges, roles.mask("optimizer") & (trace.ranges.thread == thread))]
    mine = trace.operators.select(trace.operators.thread == thread)
    forward = list(_forward(mine, own, backward, [*optimizer, *cuts]))
    return _Found(thread, _OF_OPERATORS, {"forward": forward, "backward": backward})


def _engine(operators: Ranges, process: int) -> Bools:
    """The operators of a process that autograd's engine runs."""
    mine = process_of(operators.thread) == process
    chosen: Bools = np.zeros(len(operators), np.bool_)
    for words in (_ENGINE.match, _BACKWARD_OPERATOR.fullmatch):
        named = np.array([bool(words(name)) for name in operators.names], np.bool_)
        if len(named) and not chosen.any():
            chosen = mine & named[operators.name]
    return chosen


def _busiest(threads: Ints) -> int:
    """The thread with the most launches, or operators: the one that runs the steps; -1 where there is none."""
    values, counts = np.unique(threads, return_counts=True)
    return int(values[np.argmax(counts)]) if len(values) else NONE


def _spans(ranges: Ranges, chosen: Bools) -> list[tuple[int, int]]:
    order = np.flatnonzero(chosen)
    order = order[np.argsort(ranges.start[order], kind="stable")]
    return list(zip(ranges.start[order].tolist(), ranges.end[order].tolist(), strict=True))


def _bounds_of_warmup(trace: Trace, roles: RangeRoles, process: int) -> list[int]:
    """When warm-up starts and ends in a process: no forward is half in it."""
    ranges, endless = trace.ranges, trace.open_ranges
    ended = _spans(ranges, roles.mask(WARMUP) & (process_of(ranges.thread) == process))
    mine = roles.mask(WARMUP, of=endless) & (process_of(endless.thread) == process)
    return [*(time for span in ended for time in span), *endless.start[mine].tolist()]


def _functions(ranges: Ranges, thread: int) -> dict[str, list[tuple[int, int]]]:
    """The outermost function ranges of a thread by phase; a module called in backward is part of backward."""
    found: dict[str, list[tuple[int, int]]] = {}
    phase_of = [next((p for p, words in _FUNCTIONS.items() if words.fullmatch(name)), "") for name in ranges.names]
    index = np.flatnonzero(np.array([bool(phase) for phase in phase_of])[ranges.name] & (ranges.thread == thread))
    inside = contained(ranges.thread[index], ranges.start[index], ranges.end[index])
    for i in index[~inside]:
        found.setdefault(phase_of[int(ranges.name[i])], []).append((int(ranges.start[i]), int(ranges.end[i])))
    return {phase: sorted(spans) for phase, spans in found.items()}


def _joined(
    calls: list[tuple[int, int]], functions: Mapping[str, list[tuple[int, int]]], cuts: list[int]
) -> list[tuple[int, int]]:
    """The calls before one backward as one forward: a model and its criterion are modules, each called by itself.

    Without a backward every call is a forward of its own. ``cuts`` are other moments that no forward goes across.
    """
    if not functions.get("backward"):
        return calls
    ends = np.sort([*(end for phase in ("backward", "optimizer") for _, end in functions.get(phase, ())), *cuts])
    passes: dict[int, list[tuple[int, int]]] = {}
    for start, end in calls:
        passes.setdefault(int(np.searchsorted(ends, start, side="right")), []).append((start, end))
    return [(spans[0][0], spans[-1][1]) for spans in passes.values()]


def _first_gradients(operators: Ranges, thread: int) -> Ranges:
    named = [i for i, name in enumerate(operators.names) if name == _FIRST_GRADIENT]
    return operators.select(np.isin(operators.name, named) & (operators.thread == thread))


def _backward(engine: Ranges, first_gradients: Ranges, own: Ints) -> Iterator[tuple[int, int]]:
    """The stretches in which autograd's engine runs and the step's thread launches nothing outside it.

    Args:
        engine: its operators.
        first_gradients: operators that may make a backward's first gradient, on the step's thread.
        own: when that thread launches outside the engine, sorted.
    """
    _, starts, ends = merged(np.zeros(len(engine), np.int64), engine.start, engine.end)
    launches_between = np.searchsorted(own, starts[1:]) > np.searchsorted(own, ends[:-1])
    firsts = np.flatnonzero(np.concatenate([[True], launches_between]))
    for first, following in zip(firsts, [*firsts[1:], len(starts)], strict=True):
        start = int(starts[first])
        made = np.flatnonzero(first_gradients.end <= start)
        if len(made):
            last = made[np.argmax(first_gradients.end[made])]
            launched = own[(own >= first_gradients.end[last]) & (own < start)]
            start = start if len(launched) else int(first_gradients.start[last])
        yield start, int(ends[following - 1])


def _forward(
    operators: Ranges, own: Ints, backward: Sequence[tuple[int, int]], others: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """From the first launch before each backward to the backward, no earlier than what came last before it.

    Args:
        operators: those of the step's thread; the one that launches first is inside.
        own: when that thread launches outside the engine, sorted.
        backward: the backward passes.
        others: the ends of optimizers, the starts of steps, the bounds of warm-up.
    """
    bounds = np.sort(np.array([*(end for _, end in backward), *others], np.int64))
    opened = Timeline(operators.thread, operators.start, operators.end, latest=False)
    for start, _ in backward:
        before = np.searchsorted(bounds, start, side="right")
        bound = int(bounds[before - 1]) if before else LONG_AGO
        launched = own[np.searchsorted(own, bound) : np.searchsorted(own, start)]
        if len(launched):
            outermost = int(opened.at(operators.thread[:1], launched[:1])[0]) if len(operators) else NONE
            yield (int(launched[0]) if outermost == NONE else max(int(operators.start[outermost]), bound)), start


def _added(trace: Trace, found: Sequence[_Found]) -> tuple[Trace, Mapping[str, str]]:
    """The trace with the inferred ranges behind its own, under names that say what they were inferred from."""
    ranges = trace.ranges
    phases = {_name(phase, one): phase for one in found for phase in one.spans}
    code = {name: len(ranges.names) + i for i, name in enumerate(phases)}
    rows = [
        (start, end, one.thread, code[_name(phase, one)])
        for one in found
        for phase, spans in one.spans.items()
        for start, end in spans
    ]
    added = np.array(rows, np.int64).reshape(-1, 4).T
    own = (ranges.start, ranges.end, ranges.thread, ranges.name)
    start, end, thread, name = (np.concatenate(pair) for pair in zip(own, added, strict=True))
    return replace(trace, ranges=Ranges(start, end, thread, name, (*ranges.names, *phases))), phases


def _name(phase: str, found: _Found) -> str:
    return f"{phase} (inferred from {found.source})"
