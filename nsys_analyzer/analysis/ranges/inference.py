"""Infers the phases of a program that has no phase ranges of its own.

- nsys's ``--pytorch=functions-trace`` writes a range for each call of a module, of backward and of an optimizer.
- PyTorch's profiler and nsys's ``--pytorch=autograd-nvtx`` write the operators. The backward pass consists of the work
  of autograd's engine and its threads. The forward pass consists of the work that is launched between the end of the
  optimizer, the start of the step or the previous backward pass, and the start of the backward pass.
- If nothing is annotated, the launches on autograd's threads and the kernels of the optimizer show the phases.

Each inferred phase becomes a range on the thread that runs the step. If a process has phase ranges of its own, nothing
is inferred for this process.
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
    contains_any_time,
    is_in_any_range,
    is_inside_another_range,
    merge_ranges,
)
from nsys_analyzer.analysis.kernels.class_rules import MODEL_CLASSES
from nsys_analyzer.analysis.kernels.classes import classify
from nsys_analyzer.trace.arrays import Floats, Ints, SmallInts, distinct, mask_by_name
from nsys_analyzer.trace.columns import Launches, Ranges, process_of
from nsys_analyzer.trace.phase_names import (
    MODULE_RANGE_PREFIX,
    STEP,
    WARMUP,
    PhaseNames,
    is_framework_name,
    map_by_shape,
)
from nsys_analyzer.trace.trace import Trace

#: Matches the ranges of ``--pytorch=functions-trace`` that are phases. Only the outermost ranges count.
_FUNCTION_RANGES = {
    "forward": re.compile(r"torch\.nn\.modules\.Module\.__call__"),
    "backward": re.compile(r"torch\.(?:autograd|Tensor)\.backward"),
    "optimizer": re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)(?:\w+\.)+step"),
}
#: Matches the calls of modules in a trace of PyTorch's profiler.
_MODULE_CALL = re.compile(rf"{MODULE_RANGE_PREFIX}.*")
#: Matches the operators of autograd's engine.
_ENGINE_OPERATOR = re.compile(r"autograd::engine::evaluate_function")
#: The operator with which ``backward()`` creates the first gradient, before it starts the engine.
_FIRST_GRADIENT_OPERATOR = "aten::ones_like"
#: The starts of the names of PyTorch's ranges.
_OPTIMIZER_PREFIX, _ZERO_GRAD_PREFIX, _PROFILER_STEP_PREFIX = "Optimizer.step#", "Optimizer.zero_grad#", "ProfilerStep#"
#: The sources from which phases are inferred. The name of an inferred range contains its source.
FUNCTION_RANGES = "nsys's function ranges"
_OPERATORS = "autograd's operators"
_MODULE_CALLS = "PyTorch's module calls"
BY_THREADS = "autograd's threads and the optimizer's kernels"

#: If the modules of a process launch at most this share of its GPU work, they are not its model.
_MAX_SHARE_OUTSIDE_MODEL = 0.1

#: (start, end) of ranges, ns, sorted by start.
_Spans = list[tuple[int, int]]


@dataclass
class _InferredPhases:
    """The phases that were inferred for one thread.

    Attributes:
        thread: the global ID of the thread.
        source: what the phases were inferred from.
        spans: the start and end of each instance, ns, by phase.
        not_phases: the names of a framework's ranges that look like phases, but contain a whole step.
    """

    thread: int
    source: str
    spans: dict[str, _Spans]
    not_phases: tuple[str, ...] = ()


def with_inferred_phases(trace: Trace, names: PhaseNames, launch: SmallInts) -> tuple[Trace, Mapping[str, str]]:
    """Adds ranges for the phases that can be inferred from a framework's ranges and operators.

    Args:
        launch: shape (operations,), the index of the launch of each operation, -1 without a launch.

    Returns:
        The trace with the added ranges, and the phase of each name of an added range. The mapping also contains the
        name of each framework's range that looks like a phase but is none, with an empty text. If nothing was added,
        the mapping is empty.
    """
    patterns = (*_FUNCTION_RANGES.values(), _MODULE_CALL)
    has_functions = any(
        map_by_shape(trace.ranges.names, lambda name: any(pattern.fullmatch(name) for pattern in patterns))
    )
    has_marks = has_functions or len(trace.operators) or len(find_autograd_threads(trace))
    if any(phase in names.leaf_phases for phase in names.extra) or not has_marks:
        return trace, {}
    roles = RangeRoles(trace.ranges, names)
    is_own_phase = roles.is_leaf_phase & ~mask_by_name(trace.ranges, is_framework_name)
    annotated_processes = process_of(trace.ranges.thread[is_own_phase])
    processes = np.setdiff1d(process_of(distinct(trace.launches.thread)), annotated_processes)
    if not len(processes):
        return trace, {}
    has_launch = launch != NONE
    launches_with_work, position = np.unique(launch[has_launch], return_inverse=True)
    duration = (trace.operations.end - trace.operations.start)[has_launch].astype(np.float64)
    work_ns = np.bincount(position, duration, len(launches_with_work)).astype(np.float64)
    launches = trace.launches.select(launches_with_work)
    class_of_name = np.array([*map(classify, trace.operations.names), ""], np.object_)
    classes = np.full(len(launches_with_work), "", np.object_)
    classes[position] = class_of_name[trace.operations.name[has_launch]]
    inferred_phases = [
        phases
        for process in processes
        for phases in _Inference(trace, roles, launches, work_ns, classes, int(process)).infer()
    ]
    return _add_ranges(trace, inferred_phases) if inferred_phases else (trace, {})


def _add_ranges(trace: Trace, inferred: Sequence[_InferredPhases]) -> tuple[Trace, Mapping[str, str]]:
    """Returns the trace with the inferred ranges after its own ranges, and the phase of each name of such a range."""
    ranges = trace.ranges
    phase_of_name: dict[str, str] = {}
    rows: list[tuple[int, int, int, int]] = []
    codes: dict[str, int] = {}
    for phases in inferred:
        for phase, spans in phases.spans.items():
            name = f"{phase} (inferred from {phases.source})"
            phase_of_name[name] = phase
            code = codes.setdefault(name, len(ranges.names) + len(codes))
            rows += [(start, end, phases.thread, code) for start, end in spans]
    added = np.array(rows, np.int64).reshape(len(rows), 4).T
    recorded_columns = (ranges.start, ranges.end, ranges.thread, ranges.name)
    start, end, thread, name_code = (np.concatenate(pair) for pair in zip(recorded_columns, added, strict=True))
    phase_of_other_name = {name: "" for phases in inferred for name in phases.not_phases}
    ranges = Ranges(start, end, thread, name_code, (*ranges.names, *codes))
    return replace(trace, ranges=ranges), {**phase_of_name, **phase_of_other_name}


class _Inference:
    """Infers the phases of one process from the ranges, the operators and the launches in its trace.

    Args:
        work_ns: shape (launches,), the total duration of the operations of each launch, ns.
        classes: shape (launches,), the class of the kernel that each launch starts.
    """

    def __init__(
        self, trace: Trace, roles: RangeRoles, launches: Launches, work_ns: Floats,
        classes: npt.NDArray[np.object_], process: int,
    ) -> None:  # fmt: skip
        self.trace, self.ranges = trace, trace.ranges
        self.in_process = process_of(trace.ranges.thread) == process
        self.operators = trace.operators.select(process_of(trace.operators.thread) == process)
        launched_here = process_of(launches.thread) == process
        self.launches = launches.select(launched_here)
        self.work_ns, self.classes = work_ns[launched_here], classes[launched_here]
        bounding = self.ranges.select(roles.has_role(STEP, WARMUP) & self.in_process)
        open_ranges = trace.open_ranges
        is_endless = roles.has_role(WARMUP, ranges=open_ranges) & (process_of(open_ranges.thread) == process)
        #: The starts and ends of steps and of warm-up ranges, ns. No inferred phase extends beyond such a time.
        self.bounds = np.concatenate([bounding.start, bounding.end, open_ranges.start[is_endless]]).tolist()

    def infer(self) -> Iterator[_InferredPhases]:
        """Yields the phases of each thread that runs steps: from function ranges, else from operators or launches."""
        threads = self._threads_with_functions("backward", "optimizer") or self._threads_with_functions("forward")[:1]
        for thread in threads:
            yield _InferredPhases(thread, FUNCTION_RANGES, self._infer_from_functions(thread))
        if threads:
            return
        phases = self._infer_from_operators() if len(self.operators) else self._infer_from_threads()
        phases = phases or self._infer_from_modules()
        if phases:
            yield phases

    def _select_by_prefix(self, prefix: str) -> Ranges:
        return self.ranges.select(self.in_process & mask_by_name(self.ranges, lambda name: name.startswith(prefix)))

    # --- nsys's function ranges

    def _threads_with_functions(self, *phases: str) -> list[int]:
        """Returns the threads that have function ranges of these phases. The thread with most ranges comes first.

        The threads of autograd's engine are left out.
        """
        patterns = [_FUNCTION_RANGES[phase] for phase in phases]
        is_function = mask_by_name(self.ranges, lambda name: any(pattern.fullmatch(name) for pattern in patterns))
        is_function &= self.in_process & ~np.isin(self.ranges.thread, find_autograd_threads(self.trace))
        return _sort_by_frequency(self.ranges.thread[is_function])

    def _infer_from_functions(self, thread: int) -> dict[str, _Spans]:
        ranges_on_thread = self.ranges.select(self.ranges.thread == thread)
        calls, backward, optimizer = (
            _sorted_spans(ranges_on_thread.select(mask_by_name(ranges_on_thread, pattern.fullmatch)))
            for pattern in _FUNCTION_RANGES.values()
        )
        backward = _keep_outermost_spans(backward)
        optimizer = [_cut_to_after_backward(span, backward) for span in _keep_outermost_spans(optimizer)]
        # A call is part of a forward pass if it neither lies inside a backward pass or an optimizer, nor contains one.
        passes = _span_columns([*backward, *optimizer])
        calls = _keep_outermost_spans(list(compress(calls, ~contains_any_time(*passes[:2], *_span_columns(calls)))))
        calls = list(compress(calls, ~is_in_any_range(*passes, *_span_columns(calls)[:2])))
        return {
            "forward": self._join_calls(calls, backward, optimizer),
            "backward": backward,
            "optimizer": optimizer,
        }

    def _join_calls(self, calls: _Spans, backward: _Spans, optimizer: _Spans) -> _Spans:
        """Joins all calls before a backward pass into one forward pass, such as calls of a model and its criterion.

        Calls that no backward pass follows, as in an evaluation, are left out. If there is no backward pass at all,
        each call is a forward pass.
        """
        if not backward:
            return calls
        backward_ends = {end for _, end in backward}
        bounds = sorted({*backward_ends, *(end for _, end in optimizer), *self.bounds})
        passes: dict[int, _Spans] = {}
        for call in calls:
            passes.setdefault(int(np.searchsorted(bounds, call[0], side="right")), []).append(call)
        spans_before_backward = (spans for i, spans in passes.items() if i < len(bounds) and bounds[i] in backward_ends)
        return [(spans[0][0], spans[-1][1]) for spans in spans_before_backward]

    # --- calls of modules, in a trace without a backward pass

    def _infer_from_modules(self) -> _InferredPhases | None:
        """Infers a forward pass from each call of the model.

        The model is the module that launches most work among the modules that no other module calls. Calls between two
        calls of the model, such as those of a head, belong to the forward pass of the first of the two. If the modules
        launch too little work, nothing is inferred: a CUDA graph then replays the model, and the remaining calls, such
        as those of a sampler, are not a forward pass.
        """
        calls = self.ranges.select(self.in_process & mask_by_name(self.ranges, _MODULE_CALL.fullmatch))
        threads = _sort_by_frequency(calls.thread)
        if not threads or len(self._select_by_prefix(_OPTIMIZER_PREFIX)):
            return None
        calls = calls.select(calls.thread == threads[0])
        calls = calls.select(~is_inside_another_range(calls.thread, calls.start, calls.end))
        calls = calls.select(np.argsort(calls.start, kind="stable"))
        launches_on_thread = np.flatnonzero(self.launches.thread == threads[0])
        launches_on_thread = launches_on_thread[np.argsort(self.launches.start[launches_on_thread], kind="stable")]
        work_before = np.append(0, np.cumsum(self.work_ns[launches_on_thread]))
        first, stop = (
            np.searchsorted(self.launches.start[launches_on_thread], time) for time in (calls.start, calls.end)
        )
        work_by_module = np.bincount(calls.name, work_before[stop] - work_before[first])
        if work_by_module.sum() <= _MAX_SHARE_OUTSIDE_MODEL * self.work_ns.sum():
            return None
        model = int(work_by_module.argmax())
        first = np.flatnonzero(calls.name == model)
        last_calls = np.append(first[1:], len(calls)) - 1
        spans = zip(calls.start[first].tolist(), calls.end[last_calls].tolist(), strict=True)
        return _InferredPhases(threads[0], _MODULE_CALLS, {"forward": list(spans)})

    # --- autograd's operators

    def _infer_from_operators(self) -> _InferredPhases | None:
        """Infers the phases from the engine's operators, and from launches outside them on the thread of the step."""
        engine = self.operators.select(mask_by_name(self.operators, _ENGINE_OPERATOR.match))
        if not len(engine):
            return None
        thread = self._find_step_thread(engine)
        engine_on_thread = engine.select(engine.thread == thread)
        launch_times = np.sort(self.launches.start[self.launches.thread == thread])
        group = np.full(len(launch_times), thread)
        launches_outside = launch_times[
            ~is_in_any_range(engine_on_thread.thread, engine_on_thread.start, engine_on_thread.end, group, launch_times)
        ]
        backward = self._find_backward(engine, thread, launches_outside)
        if not backward:
            return None
        optimizer, whole_steps = self._find_optimizer(backward)
        spans = {
            "forward": list(self._find_forward(thread, launches_outside, backward, optimizer)),
            "backward": backward,
        }
        if whole_steps:
            spans["optimizer"] = optimizer
        return _InferredPhases(thread, _OPERATORS, spans, whole_steps)

    # --- threads and kernels alone

    def _infer_from_threads(self) -> _InferredPhases | None:
        """Infers backward passes from the launches of autograd's threads, and optimizer steps from their kernels.

        Forward passes are inferred only if there are kernels of an optimizer. Otherwise, the work between two backward
        passes may contain an optimizer whose kernels are not known as such.
        """
        engine_threads = find_autograd_threads(self.trace)
        threads = _sort_by_frequency(self.launches.thread[~np.isin(self.launches.thread, engine_threads)])
        if not threads or not np.isin(self.launches.thread, engine_threads).any():
            return None
        is_on_thread = self.launches.thread == threads[0]
        order = np.argsort(self.launches.start[is_on_thread], kind="stable")
        launches_outside, classes = self.launches.start[is_on_thread][order], self.classes[is_on_thread][order]
        backward = self._find_backward(self.operators, threads[0], launches_outside)
        if not backward:  # no pass is found, because the only backward pass began before the capture
            return None
        optimizer = []
        next_starts = [*(start for start, _ in backward[1:]), np.iinfo(np.int64).max]
        for (_, end), next_start in zip(backward, next_starts, strict=True):
            launches_between = slice(*np.searchsorted(launches_outside, (end, next_start)))
            updates = np.flatnonzero(classes[launches_between] == "optimizer")
            if len(updates):
                model_launches = np.flatnonzero(np.isin(classes[launches_between], MODEL_CLASSES))
                next_model_launch = np.append(model_launches, len(classes))[np.searchsorted(model_launches, updates[0])]
                update_times = launches_outside[launches_between][updates[updates < next_model_launch]]
                optimizer.append((int(update_times[0]), int(update_times[-1]) + 1))
        forward = list(self._find_forward(threads[0], launches_outside, backward, optimizer)) if optimizer else []
        spans = {"forward": forward, "backward": backward, "optimizer": optimizer}
        return _InferredPhases(threads[0], BY_THREADS, {phase: spans[phase] for phase in spans if spans[phase]})

    def _find_step_thread(self, engine: Ranges) -> int:
        """Returns the thread that runs the optimizer or the profiler's steps.

        If there are no such ranges, it returns the thread outside the engine that launches most.
        """
        engine_threads = [*find_autograd_threads(self.trace), *engine.thread]
        launching_threads = self.launches.thread[~np.isin(self.launches.thread, engine_threads)]
        steps = (self._select_by_prefix(prefix).thread for prefix in (_OPTIMIZER_PREFIX, _PROFILER_STEP_PREFIX))
        choices = (_sort_by_frequency(threads) for threads in (*steps, launching_threads, engine.thread))
        return next(threads[0] for threads in choices if threads)

    def _find_backward(self, engine: Ranges, thread: int, launches_outside: Ints) -> _Spans:
        """Returns the spans of the backward passes, in which the engine or its threads work.

        A launch outside the engine and a bound each separate two backward passes. A backward pass that began before the
        capture is left out.

        Args:
            launches_outside: the sorted times of the launches of ``thread`` outside the engine, ns.
        """
        _, starts, ends = self._merge_engine_work(engine, thread)
        operators = self.operators
        gradients = operators.select(
            mask_by_name(operators, _FIRST_GRADIENT_OPERATOR.__eq__) & (operators.thread == thread)
        )
        splits = np.sort(np.concatenate([launches_outside, np.array(self.bounds, np.int64)]))
        is_split = np.searchsorted(splits, starts[1:]) > np.searchsorted(splits, ends[:-1])
        first_ranges = np.flatnonzero(np.concatenate([[True], is_split]))
        spans = [
            (_include_first_gradient(int(starts[i]), gradients, launches_outside), int(ends[next_first - 1]))
            for i, next_first in zip(first_ranges, [*first_ranges[1:], len(starts)], strict=True)
        ]
        return spans[1:] if len(launches_outside) and launches_outside[0] > spans[0][0] else spans

    def _merge_engine_work(self, engine: Ranges, thread: int) -> tuple[Ints, Ints, Ints]:
        """Merges the ranges of the autograd engine with the operators and launches on the engine's own threads.

        Returns:
            The groups, all 0, and the starts and ends of the merged ranges, ns.
        """
        engine_threads = np.setdiff1d([*find_autograd_threads(self.trace), *engine.thread], [thread])
        operators = self.operators.select(np.isin(self.operators.thread, engine_threads))
        launches = self.launches.start[np.isin(self.launches.thread, engine_threads)]
        start = np.concatenate([engine.start, operators.start, launches])
        end = np.concatenate([engine.end, operators.end, launches + 1])
        return merge_ranges(np.zeros(len(start), np.int64), start, end)

    def _find_optimizer(self, backward: _Spans) -> tuple[_Spans, tuple[str, ...]]:
        """Returns the spans of the optimizer steps, and the names of the optimizer's ranges that contain a whole step.

        If the optimizer calls a closure, its range contains the forward and backward pass as well. The optimizer step
        is then the part of the range after the last backward pass.
        """
        optimizers = self._select_by_prefix(_OPTIMIZER_PREFIX)
        spans = _sorted_spans(optimizers)
        cut_spans = [_cut_to_after_backward(span, backward) for span in spans]
        if cut_spans == spans:
            return spans, ()
        return cut_spans, tuple({optimizers.names[i] for i in optimizers.name})

    def _find_forward(
        self, thread: int, launches_outside: Ints, backward: _Spans, optimizer: _Spans
    ) -> Iterator[tuple[int, int]]:
        """Yields the span of the forward pass before each backward pass.

        The span starts with the first operator that launches work after the previous backward pass, optimizer step or
        bound. It ends where the backward pass starts. Work that sets gradients to zero does not count.
        """
        zeroing = self._select_by_prefix(_ZERO_GRAD_PREFIX)
        group = np.full(len(launches_outside), thread)
        launches_outside = launches_outside[
            ~is_in_any_range(zeroing.thread, zeroing.start, zeroing.end, group, launches_outside)
        ]
        bounds = np.sort(np.array([*(end for _, end in (*backward, *optimizer)), *self.bounds], np.int64))
        operators = self.operators.select(self.operators.thread == thread)
        outermost_operators = Timeline(operators.thread, operators.start, operators.end, innermost=False)
        for start, _ in backward:
            bound_count = np.searchsorted(bounds, start, side="right")
            bound = int(bounds[bound_count - 1]) if bound_count else LONG_AGO
            forward_launches = launches_outside[
                np.searchsorted(launches_outside, bound) : np.searchsorted(launches_outside, start)
            ]
            if len(forward_launches):
                operator = int(outermost_operators.open_at(np.array([thread]), forward_launches[:1])[0])
                yield (
                    (int(forward_launches[0]) if operator == NONE else max(int(operators.start[operator]), bound)),
                    start,
                )


def _sorted_spans(ranges: Ranges) -> _Spans:
    order = np.argsort(ranges.start, kind="stable")
    return list(zip(ranges.start[order].tolist(), ranges.end[order].tolist(), strict=True))


def _sort_by_frequency(threads: Ints) -> list[int]:
    """Returns the distinct thread IDs, sorted from the most frequent to the rarest."""
    values, counts = np.unique(threads, return_counts=True)
    return [int(values[i]) for i in np.argsort(-counts, kind="stable")]


def _span_columns(spans: _Spans) -> tuple[Ints, Ints, Ints]:
    """Returns the groups (all 0), the starts and the ends of spans, each with the shape (spans,)."""
    start, end = np.array(spans, np.int64).reshape(len(spans), 2).T
    return np.zeros(len(spans), np.int64), start, end


def _keep_outermost_spans(spans: _Spans) -> _Spans:
    return list(compress(spans, ~is_inside_another_range(*_span_columns(spans))))


def _cut_to_after_backward(span: tuple[int, int], backward: _Spans) -> tuple[int, int]:
    """Returns the part of a span after the last backward pass inside it; the whole span if it contains none."""
    return max([span[0], *(end for start, end in backward if span[0] <= start and end <= span[1])]), span[1]


def _include_first_gradient(start: int, gradients: Ranges, launches_outside: Ints) -> int:
    """Returns the start of a backward pass, including the operator that creates its first gradient.

    The operator does not belong to the backward pass if something else is launched between both.
    """
    earlier_gradients = np.flatnonzero(gradients.end <= start)
    if not len(earlier_gradients):
        return start
    last_gradient = earlier_gradients[np.argmax(gradients.end[earlier_gradients])]
    launches_between = launches_outside[(launches_outside >= gradients.end[last_gradient]) & (launches_outside < start)]
    return start if len(launches_between) else int(gradients.start[last_gradient])
