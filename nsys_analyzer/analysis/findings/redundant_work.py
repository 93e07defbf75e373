"""Finds work that a step does not need: recomputed, repeated, undone or unused work, and work on zeros."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.analysis.findings.finding import Candidate, ReplayChange, StepsToExplain, saved_launches
from nsys_analyzer.analysis.findings.operators import OperatorsFigures, describe_calls, make_candidate
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.operators.redundancy import Redundancy, count_recomputed_bytes
from nsys_analyzer.analysis.operators.shape_reasons import ExplainedCalls, find_needed_calls
from nsys_analyzer.analysis.operators.zeros import find_work_on_zeros
from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.trace.arrays import Bools

#: A tensor is mostly zeros if at least this share of its elements is 0. The share is the usual limit of the empty rows
#: in the buffers of experts, which have up to two rows for each token.
LEAST_ZERO_SHARE = 0.5
#: The smallest and the largest share of the work on zeros that a fix is assumed to save. A fix has a cost, too: it
#: moves rows by their index, or keeps some spare rows.
ZERO_WORK_SAVINGS = (0.5, 1.0)


@dataclass(frozen=True)
class RedundantWorkFigures(OperatorsFigures):
    """The work of one kind that a step does not need; see ``Redundancy``.

    Attributes:
        kind: the kind.
        modules: the number of modules with redundant calls, without the modules inside of these modules.
        kept_bytes: the size of the values that would stay in memory without recomputation; 0 if it is unknown.
    """

    kind: Redundancy
    modules: int
    kept_bytes: float = 0.0


def find_redundant_work(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds work that a step does not need: recomputed, repeated, undone or unused work, and unused forward passes."""
    operators = steps.operators
    if operators is None:
        return
    for kind, calls in operators.redundant.items():
        operations = operators.operations_of(calls)
        if not steps.study.work_ms(operations):
            continue
        outer = _find_outer_modules(operators, calls)
        module = Counter(name.rpartition(": ")[2] for name in outer).most_common(1)[0][0] if outer else ""
        described = describe_calls(steps, calls)._replace(module=module)
        kept_bytes = count_recomputed_bytes(operators.calls) if kind == "recomputed" and operators.calls.reads else 0.0
        figures = RedundantWorkFigures(*described, kind=kind, modules=len(outer), kept_bytes=kept_bytes)
        lines: tuple[Line, ...] = ()
        if samples := steps.study.call_samples:
            if kind == "recomputed":
                lines = samples.find_callers(f"{module}.forward")
            elif kind == "no_backward":
                lines = samples.find_first_line(steps.study.calls_of(operations), steps.study.work_ms(operations))
        is_one_call = kind == "recomputed"  # the backward pass, in which no other code of the program runs
        changes = tuple(
            _without_calls(steps, operations, prepares=prepares, pauses=prepares or is_one_call)
            for prepares in (False, True)
        )
        yield Candidate(f"{kind}_work", figures, changes, None, operations, lines, is_redundant=True)


@dataclass(frozen=True)
class WorkOnZerosFigures(OperatorsFigures):
    """The operators that work on tensors which are mostly zeros.

    Attributes:
        zero_share: the mean share of zeros in the tensors, weighted by the time of the operators.
        in_rows: whether most of the work on zeros is on whole rows of zeros, and not on single elements.
    """

    zero_share: float
    in_rows: bool


def find_zeros(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds operators on tensors that are mostly zeros, and the lines that write the few nonzero elements."""
    operators = steps.operators
    if operators is None or not steps.has_data_flow:
        return
    on_zeros, measured_ns = find_work_on_zeros(operators), operators.measured_ns
    calls = find_needed_calls(operators) & (on_zeros.zero_share >= LEAST_ZERO_SHARE)
    zero_ns = measured_ns * on_zeros.zero_share * calls
    if not zero_ns.any():
        return
    least, most = ZERO_WORK_SAVINGS
    explained = ExplainedCalls(calls, measured_ns - most * zero_ns, measured_ns - least * zero_ns)
    figures = WorkOnZerosFigures(
        *describe_calls(steps, calls),
        zero_share=float(zero_ns.sum() / measured_ns[calls].sum()),
        in_rows=bool(zero_ns[on_zeros.in_rows].sum() >= zero_ns.sum() / 2),
    )
    origin_ns = np.zeros(len(calls))
    np.add.at(origin_ns, on_zeros.origin[calls], zero_ns[calls])
    lines = operators.lines_of(origin_ns)
    for candidate in make_candidate(steps, "work_on_zeros", figures, explained):
        yield replace(candidate, lines=lines or candidate.lines)


def _find_outer_modules(operators: PricedOperators, calls: Bools) -> list[str]:
    """Returns the modules that make the given calls, without the modules that are inside of other such modules."""
    names = [
        operators.calls.modules[index] for index in np.unique(operators.calls.module[calls]).tolist() if index >= 0
    ]
    paths = [name.partition(":")[0] for name in names]
    return [
        name
        for name, path in zip(names, paths, strict=True)
        if not any(path.startswith((f"{outer}.", f"{outer}/")) for outer in paths)
    ]


def _without_calls(steps: StepsToExplain, operations: Bools, *, prepares: bool, pauses: bool) -> ReplayChange:
    """Returns a change that removes operations and the time in which the program launches them.

    The time from the launch of an operation to the next launch is removed if the next launch is removed, too. Else,
    the usual time of a launch is removed.

    Args:
        steps: the steps.
        operations: shape (operations,), True for the removed operations.
        prepares: whether the time before the first removed launch is for preparing the removed work. If so, only the
            usual time of a launch remains of it.
        pauses: whether pauses between the removed launches are part of the removed work.
    """
    calls, launch = len(steps.study.calls), steps.study.replay.launch
    launched, removed = np.bincount(launch, minlength=calls), np.bincount(launch[operations], minlength=calls)
    launching = np.flatnonzero(launched)
    is_removed = np.append(removed[launching] == launched[launching], False)
    position = np.searchsorted(launching, np.arange(calls), side="right")
    is_inside = is_removed[position - 1] & is_removed[position]
    is_before = is_removed[position] & ~is_inside
    remove_launches = saved_launches(steps, operations.astype(np.float64))

    def change(replay: Replay) -> Replay:
        """Returns the steps without the operations and without the time in which the program launches them."""
        changed = remove_launches(replay)
        cpu_ns = np.where(is_inside, replay.pause_ns, changed.cpu_ns)
        limit_ns = np.where(is_inside & pauses, 0.0, np.where(is_before & prepares, replay.median_launch_ns, np.inf))
        return replace(changed, cpu_ns=np.minimum(cpu_ns, limit_ns), pause_ns=np.minimum(replay.pause_ns, limit_ns))

    return change
