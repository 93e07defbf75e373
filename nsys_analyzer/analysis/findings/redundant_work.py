"""Finds work that a step does not need: recomputed, repeated, undone or unused work, and forward passes in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.analysis.findings.finding import Candidate, ReplayChange, StepsToExplain, saved_launches
from nsys_analyzer.analysis.findings.operators import OperatorsFigures, describe_calls
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.operators.redundancy import Redundancy, count_recomputed_bytes
from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.trace.arrays import Bools


@dataclass(frozen=True)
class RedundantWorkFigures(OperatorsFigures):
    """The work of one kind that a step does not need; see ``Redundancy``.

    Attributes:
        kind: the kind.
        modules: the number of modules that run again or in vain, without the modules inside of them.
        kept_bytes: the bytes of the recomputed values that memory would keep otherwise; 0 if they are unknown.
    """

    kind: Redundancy
    modules: int
    kept_bytes: float = 0.0


def find_redundant_work(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds work that a step does not need: recomputed, repeated, undone or unused work, and forward passes in vain."""
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
        is_one_call = kind == "recomputed"  # in which the backward pass runs no other code of the program
        changes = tuple(
            _without_calls(steps, operations, prepares=prepares, pauses=prepares or is_one_call)
            for prepares in (False, True)
        )
        yield Candidate(f"{kind}_work", figures, changes, None, operations, lines, is_redundant=True)


def _find_outer_modules(operators: PricedOperators, calls: Bools) -> list[str]:
    """Returns the modules that make the given calls, without the modules that are inside of others."""
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
        prepares: whether the program prepares the removed work before its first launch, so that only the usual time of
            a launch remains there.
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
