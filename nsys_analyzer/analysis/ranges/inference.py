"""Phases of a program without phase ranges of its own, from the ranges that PyTorch and nsys write by themselves.

nsys's ``--pytorch=functions-trace`` writes a range for each call of a module, of backward and of an optimizer.
PyTorch's profiler and ``--pytorch=autograd-nvtx`` write the operators: backward is what autograd's engine and its
threads run, forward is what is launched before it since the optimizer, the step's start or the last backward. Each
inferred phase becomes a range of the thread that runs the step. A process with a phase range of its own keeps these.
Where nothing is annotated, autograd's threads and the optimizer's kernels tell the phases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.attribution.attribution import RangeRoles, find_autograd_threads
from nsys_analyzer.analysis.intervals import (
    LONG_AGO,
    NONE,
    Timeline,
    has_moments,
    is_contained,
    is_in_any_range,
    merge_ranges,
)
from nsys_analyzer.analysis.kernels.class_rules import MODEL_CLASSES
from nsys_analyzer.analysis.kernels.classes import classify
from nsys_analyzer.analysis.ranges.phases import STEP, WARMUP, PhaseNames, is_framework_name
from nsys_analyzer.trace.arrays import Floats, Ints, SmallInts, distinct, mask_by_name
from nsys_analyzer.trace.columns import Launches, Ranges, process_of
from nsys_analyzer.trace.phase_names import MODULE_RANGE_PREFIX, map_by_shape
from nsys_analyzer.trace.trace import Trace

#: The ranges of ``--pytorch=functions-trace`` that are phases, each by its outermost range.
_FUNCTIONS = {
    "forward": re.compile(r"torch\.nn\.modules\.Module\.__call__"),
    "backward": re.compile(r"torch\.(?:autograd|Tensor)\.backward"),
    "optimizer": re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)(?:\w+\.)+step"),
}
#: The call of a module in a trace of PyTorch's profiler.
_MODULE = re.compile(rf"{MODULE_RANGE_PREFIX}.*")
#: What autograd's engine runs, and what it was called before PyTorch had a name for the engine.
_ENGINE = re.compile(r"autograd::engine::evaluate_function")
_EARLY_ENGINE = re.compile(r"(?:torch::autograd::)?(?:\w*Backward\d*|AccumulateGrad|CopySlices)")
#: ``backward()`` computes the first gradient with it before it starts the engine.
_FIRST_GRADIENT = "aten::ones_like"
_OPTIMIZER, _ZERO_GRAD, _PROFILER_STEP = "Optimizer.step#", "Optimizer.zero_grad#", "ProfilerStep#"
#: The sources of inferred phases, as the names of their ranges say.
FUNCTION_RANGES, _OPERATORS, _MODULES = "nsys's function ranges", "autograd's operators", "PyTorch's module calls"
BY_THREADS = "autograd's threads and the optimizer's kernels"

#: Modules that launch no more than this share of a process's work are not the model.
_LEAST = 0.1

_Spans = list[tuple[int, int]]


@dataclass
class _Found:
    """Inferred ranges of one thread: times in ns, by phase, and their source."""

    thread: int
    source: str
    spans: dict[str, _Spans]
    replaced: tuple[str, ...] = ()  # names of a framework's ranges that are no phase, since they hold a whole step


def with_inferred_phases(trace: Trace, names: PhaseNames, launch: SmallInts) -> tuple[Trace, Mapping[str, str]]:
    """Adds ranges for the phases that can be inferred from a framework's own ranges and operators.

    Returns:
        The trace, and the phase that each name of an added range stands for, empty for a framework's range that is no
        phase after all; nothing where nothing was added.
    """
    written = (*_FUNCTIONS.values(), _MODULE)
    has_functions = any(map_by_shape(trace.ranges.names, lambda name: any(p.fullmatch(name) for p in written)))
    has_marks = has_functions or len(trace.operators) or len(find_autograd_threads(trace))
    if any(phase in names.leaf_phases for phase in names.extra) or not has_marks:
        return trace, {}
    roles = RangeRoles(trace.ranges, names)
    own = roles.is_leaf_phase & ~mask_by_name(trace.ranges, is_framework_name)
    processes = np.setdiff1d(process_of(distinct(trace.launches.thread)), process_of(trace.ranges.thread[own]))
    if not len(processes):
        return trace, {}
    known = launch != NONE
    launched, place = np.unique(launch[known], return_inverse=True)
    duration = (trace.operations.end - trace.operations.start)[known].astype(np.float64)
    work = np.bincount(place, duration, len(launched)).astype(np.float64)
    launches = trace.launches.select(launched)
    classes = np.array([*map(classify, trace.operations.names), ""], np.object_)
    of_launch = np.full(len(launched), "", np.object_)
    of_launch[place] = classes[trace.operations.name[known]]
    found = [
        one
        for process in processes
        for one in _Inference(trace, roles, launches, work, of_launch, int(process)).found()
    ]
    return _added(trace, found) if found else (trace, {})


def _spans(ranges: Ranges) -> _Spans:
    order = np.argsort(ranges.start, kind="stable")
    return list(zip(ranges.start[order].tolist(), ranges.end[order].tolist(), strict=True))


class _Inference:
    """The phases of one process, by the ranges and operators that its framework wrote.

    ``work``, ``classes``: shape (launches,), how long what each launch has launched runs, ns, and its class.
    """

    def __init__(
        self, trace: Trace, roles: RangeRoles, launches: Launches, work: Floats, classes: npt.NDArray[np.object_],
        process: int,
    ) -> None:  # fmt: skip
        self.trace, self.ranges = trace, trace.ranges
        self.mine = process_of(trace.ranges.thread) == process
        self.operators = trace.operators.select(process_of(trace.operators.thread) == process)
        own = process_of(launches.thread) == process
        self.launches, self.work, self.classes = launches.select(own), work[own], classes[own]
        bounding = self.ranges.select(roles.mask(STEP, WARMUP) & self.mine)
        open_ranges = trace.open_ranges
        endless = roles.mask(WARMUP, of=open_ranges) & (process_of(open_ranges.thread) == process)
        #: No pass goes across the start or the end of a step or of warm-up.
        self.bounds = np.concatenate([bounding.start, bounding.end, open_ranges.start[endless]]).tolist()

    def found(self) -> Iterator[_Found]:
        """The phases of each thread that trains: those of its function ranges, else those of the operators."""
        threads = self._threads_with("backward", "optimizer") or self._threads_with("forward")[:1]
        if threads:
            for thread in threads:
                yield _Found(thread, FUNCTION_RANGES, self._of_functions(thread))
        elif one := (self._of_operators() if len(self.operators) else self._of_threads()) or self._of_modules():
            yield one

    def _called(self, prefix: str) -> Ranges:
        return self.ranges.select(self.mine & mask_by_name(self.ranges, lambda name: name.startswith(prefix)))

    # --- nsys's function ranges

    def _threads_with(self, *phases: str) -> list[int]:
        """The threads that have function ranges of these phases, those with most first; autograd's own is none."""
        chosen = self.mine & mask_by_name(self.ranges, lambda name: any(_FUNCTIONS[p].fullmatch(name) for p in phases))
        chosen &= ~np.isin(self.ranges.thread, find_autograd_threads(self.trace))
        return _by_frequency(self.ranges.thread[chosen])

    def _of_functions(self, thread: int) -> dict[str, _Spans]:
        here = self.ranges.thread == thread
        calls, backward, optimizer = (
            _spans(self.ranges.select(here & mask_by_name(self.ranges, pattern.fullmatch)))
            for pattern in _FUNCTIONS.values()
        )
        backward = _outermost(backward)
        optimizer = [_behind(span, backward) for span in _outermost(optimizer)]
        forward = self._joined(_apart(calls, [*backward, *optimizer]), backward, optimizer)
        return {"forward": forward, "backward": backward, "optimizer": optimizer}

    def _joined(self, calls: _Spans, backward: _Spans, optimizer: _Spans) -> _Spans:
        """The calls before one backward as one forward: a model and its criterion are called one after the other.

        Calls that no backward follows, as in evaluation, are none. Without any backward every call is a forward.
        """
        if not backward:
            return calls
        ends = {end for _, end in backward}
        bounds = sorted({*ends, *(end for _, end in optimizer), *self.bounds})
        passes: dict[int, _Spans] = {}
        for call in calls:
            passes.setdefault(int(np.searchsorted(bounds, call[0], side="right")), []).append(call)
        kept = (spans for i, spans in passes.items() if i < len(bounds) and bounds[i] in ends)
        return [(spans[0][0], spans[-1][1]) for spans in kept]

    # --- calls of modules, in a trace without a backward pass

    def _of_modules(self) -> _Found | None:
        """A forward pass from each call of the model: of the modules that none calls, the one that launches most work.

        What is called behind it, such as a head, is part of its pass. Beside the replay of a graph that holds the
        model, calls of its sampler are no forward.
        """
        calls = self.ranges.select(self.mine & mask_by_name(self.ranges, _MODULE.fullmatch))
        threads = _by_frequency(calls.thread)
        if not threads or len(self._called(_OPTIMIZER)):
            return None
        calls = calls.select(calls.thread == threads[0])
        calls = calls.select(~is_contained(calls.thread, calls.start, calls.end))
        calls = calls.select(np.argsort(calls.start, kind="stable"))
        here = np.flatnonzero(self.launches.thread == threads[0])
        here = here[np.argsort(self.launches.start[here], kind="stable")]
        work = np.append(0, np.cumsum(self.work[here]))
        first, behind = (np.searchsorted(self.launches.start[here], time) for time in (calls.start, calls.end))
        of_model = np.bincount(calls.name, work[behind] - work[first])
        if of_model.sum() <= _LEAST * self.work.sum():
            return None
        model = int(of_model.argmax())
        first = np.flatnonzero(calls.name == model)
        last = np.append(first[1:], len(calls)) - 1
        spans = zip(calls.start[first].tolist(), calls.end[last].tolist(), strict=True)
        return _Found(threads[0], _MODULES, {"forward": list(spans)})

    # --- autograd's operators

    def _of_operators(self) -> _Found | None:
        """The phases by the engine's operators and by the launches ``outside`` it of the step's thread."""
        engine = self.operators.select(mask_by_name(self.operators, _ENGINE.match))
        if is_early := not len(engine):
            engine = self.operators.select(mask_by_name(self.operators, _EARLY_ENGINE.fullmatch))
        if not len(engine):
            return None
        thread = self._step_thread(engine)
        here = engine.select(engine.thread == thread)
        if is_early and len(here):
            return None  # nothing separates one backward from the next
        launched = np.sort(self.launches.start[self.launches.thread == thread])
        outside = launched[
            ~is_in_any_range(here.thread, here.start, here.end, np.full(len(launched), thread), launched)
        ]
        backward = self._backward(engine, thread, outside)
        if not backward:
            return None
        optimizer, replaced = self._optimizer(backward)
        forward = list(self._forward(thread, outside, backward, optimizer))
        spans = {"forward": forward, "backward": backward, **({"optimizer": optimizer} if replaced else {})}
        return _Found(thread, _OPERATORS, spans, replaced)

    # --- threads and kernels alone

    def _of_threads(self) -> _Found | None:
        """Backward by what autograd's threads launch, the optimizer by its kernels, forward where both are known.

        Without kernels of an optimizer, what lies between two backward passes may hold one nevertheless.
        """
        helpers = find_autograd_threads(self.trace)
        threads = _by_frequency(self.launches.thread[~np.isin(self.launches.thread, helpers)])
        if not threads or not np.isin(self.launches.thread, helpers).any():
            return None
        here = self.launches.thread == threads[0]
        order = np.argsort(self.launches.start[here], kind="stable")
        outside, classes = self.launches.start[here][order], self.classes[here][order]
        backward = self._backward(self.operators, threads[0], outside)
        if not backward:  # the capture begins in it
            return None
        optimizer = []
        for (_, ended), (following, _) in zip(backward, [*backward[1:], (np.iinfo(np.int64).max, 0)], strict=True):
            between = slice(*np.searchsorted(outside, (ended, following)))
            updates = np.flatnonzero(classes[between] == "optimizer")
            if len(updates):
                model = np.flatnonzero(np.isin(classes[between], MODEL_CLASSES))
                until = np.append(model, len(classes))[np.searchsorted(model, updates[0])]
                times = outside[between][updates[updates < until]]
                optimizer.append((int(times[0]), int(times[-1]) + 1))
        forward = list(self._forward(threads[0], outside, backward, optimizer)) if optimizer else []
        spans = {"forward": forward, "backward": backward, "optimizer": optimizer}
        return _Found(threads[0], BY_THREADS, {phase: spans[phase] for phase in spans if spans[phase]})

    def _step_thread(self, engine: Ranges) -> int:
        """The thread of the optimizer or the profiler's steps, else that which launches most outside the engine."""
        helpers = [*find_autograd_threads(self.trace), *engine.thread]
        others = self.launches.thread[~np.isin(self.launches.thread, helpers)]
        steps = (self._called(name).thread for name in (_OPTIMIZER, _PROFILER_STEP))
        choices = (_by_frequency(threads) for threads in (*steps, others, engine.thread))
        return next(threads[0] for threads in choices if threads)

    def _backward(self, engine: Ranges, thread: int, outside: Ints) -> _Spans:
        """The stretches in which the engine or its threads work, parted by the step's launches and by bounds.

        A backward that began before the capture is left out.
        """
        _, starts, ends = self._stretches(engine, thread)
        operators = self.operators
        gradients = operators.select(mask_by_name(operators, _FIRST_GRADIENT.__eq__) & (operators.thread == thread))
        parting = np.sort(np.concatenate([outside, np.array(self.bounds, np.int64)]))
        parted = np.searchsorted(parting, starts[1:]) > np.searchsorted(parting, ends[:-1])
        firsts = np.flatnonzero(np.concatenate([[True], parted]))
        spans = [
            (_with_first_gradient(int(starts[i]), gradients, outside), int(ends[following - 1]))
            for i, following in zip(firsts, [*firsts[1:], len(starts)], strict=True)
        ]
        return spans[1:] if len(outside) and outside[0] > spans[0][0] else spans

    def _stretches(self, engine: Ranges, thread: int) -> tuple[Ints, Ints, Ints]:
        """The engine's operators, and all that runs on threads of its own, joined where they overlap."""
        helpers = np.setdiff1d([*find_autograd_threads(self.trace), *engine.thread], [thread])
        operators = self.operators.select(np.isin(self.operators.thread, helpers))
        launches = self.launches.start[np.isin(self.launches.thread, helpers)]
        start = np.concatenate([engine.start, operators.start, launches])
        end = np.concatenate([engine.end, operators.end, launches + 1])
        return merge_ranges(np.zeros(len(start), np.int64), start, end)

    def _optimizer(self, backward: _Spans) -> tuple[_Spans, tuple[str, ...]]:
        """The optimizers by the framework's ranges, and the names of the ranges that hold a backward.

        A closure runs the whole step in these: what lies behind the backward is the optimizer.
        """
        optimizers = self._called(_OPTIMIZER)
        spans = _spans(optimizers)
        behind = [_behind(span, backward) for span in spans]
        if behind == spans:
            return spans, ()
        return behind, tuple({optimizers.names[i] for i in optimizers.name})

    def _forward(self, thread: int, outside: Ints, backward: _Spans, optimizer: _Spans) -> Iterator[tuple[int, int]]:
        """From the first operator that launches before each backward, behind what came last, to the backward.

        Gradients that are set to zero are no forward.
        """
        zeroing = self._called(_ZERO_GRAD)
        group = np.full(len(outside), thread)
        outside = outside[~is_in_any_range(zeroing.thread, zeroing.start, zeroing.end, group, outside)]
        bounds = np.sort(np.array([*(end for _, end in (*backward, *optimizer)), *self.bounds], np.int64))
        operators = self.operators.select(self.operators.thread == thread)
        opened = Timeline(operators.thread, operators.start, operators.end, latest=False)
        for start, _ in backward:
            before = np.searchsorted(bounds, start, side="right")
            bound = int(bounds[before - 1]) if before else LONG_AGO
            launched = outside[np.searchsorted(outside, bound) : np.searchsorted(outside, start)]
            if len(launched):
                outermost = int(opened.open_at(np.array([thread]), launched[:1])[0])
                yield (int(launched[0]) if outermost == NONE else max(int(operators.start[outermost]), bound)), start


def _by_frequency(threads: Ints) -> list[int]:
    """The distinct threads, the most frequent first."""
    values, counts = np.unique(threads, return_counts=True)
    return [int(values[i]) for i in np.argsort(-counts, kind="stable")]


def _columns(spans: _Spans) -> tuple[Ints, Ints, Ints]:
    """Spans as groups (all 0), starts and ends, each of shape (spans,)."""
    start, end = np.array(spans, np.int64).reshape(len(spans), 2).T
    return np.zeros(len(spans), np.int64), start, end


def _outermost(spans: _Spans) -> _Spans:
    return list(compress(spans, ~is_contained(*_columns(spans))))


def _apart(spans: _Spans, others: _Spans) -> _Spans:
    """The outermost of the spans in which none of the others starts, and which start in none of the others."""
    group, start, _ = _columns(others)
    spans = _outermost(list(compress(spans, ~has_moments(group, start, *_columns(spans)))))
    group, start, _ = _columns(spans)
    return list(compress(spans, ~is_in_any_range(*_columns(others), group, start)))


def _behind(span: tuple[int, int], backward: _Spans) -> tuple[int, int]:
    """The part of a range behind the last backward in it."""
    return max([span[0], *(end for start, end in backward if span[0] <= start and end <= span[1])]), span[1]


def _with_first_gradient(start: int, gradients: Ranges, outside: Ints) -> int:
    """When a backward begins: where its first gradient is made, if nothing else is launched in between."""
    made = np.flatnonzero(gradients.end <= start)
    if not len(made):
        return start
    last = made[np.argmax(gradients.end[made])]
    launched = outside[(outside >= gradients.end[last]) & (outside < start)]
    return start if len(launched) else int(gradients.start[last])


def _added(trace: Trace, found: Sequence[_Found]) -> tuple[Trace, Mapping[str, str]]:
    """The trace with the inferred ranges behind its own, under names that say what they were inferred from."""
    ranges = trace.ranges
    phases = {_name(phase, one): phase for one in found for phase in one.spans}
    code = {name: len(ranges.names) + i for i, name in enumerate(phases)}
    by_name = [(one, code[_name(phase, one)], spans) for one in found for phase, spans in one.spans.items()]
    rows = [(start, end, one.thread, name) for one, name, spans in by_name for start, end in spans]
    added = np.array(rows, np.int64).reshape(len(rows), 4).T
    recorded = (ranges.start, ranges.end, ranges.thread, ranges.name)
    start, end, thread, name = (np.concatenate(pair) for pair in zip(recorded, added, strict=True))
    replaced = {name: "" for one in found for name in one.replaced}
    return replace(trace, ranges=Ranges(start, end, thread, name, (*ranges.names, *phases))), {**phases, **replaced}


def _name(phase: str, found: _Found) -> str:
    return f"{phase} (inferred from {found.source})"
