"""Finds the call of an operator that launched each GPU operation of the measured steps.

The calls of one step represent all steps: a further step in which the hooks put a range around each call, or a measured
step whose operators a profiler recorded with shapes. Its operations come in the order of those of the measured steps,
so an operation of a measured step belongs to the call that launched its counterpart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.operators.recorded import find_recorded_step
from nsys_analyzer.analysis.steps.groups import Steps
from nsys_analyzer.analysis.steps.process import ProcessWork
from nsys_analyzer.analysis.steps.step import KernelTime
from nsys_analyzer.trace.arrays import Ints, distinct_rows
from nsys_analyzer.trace.operator_calls import OperatorCalls, name_operations

#: A step is compared with each part of the operator step if it has less than this share of its operations, as a decode
#: step of a generation has.
_PART_OF_STEP = 0.7
#: The maximum number of parts of the operator step with which one step is compared.
_MAX_PARTS = 200


@dataclass(frozen=True)
class OperatorWork:
    """The calls of operators, and the GPU operations that they launched in the measured steps.

    Attributes:
        calls: the calls.
        call: shape (operations of the trace,), the index in ``calls`` of the call of each operation, or -1 if it is
            unknown or outside of the measured steps.
    """

    calls: OperatorCalls
    call: Ints


def find_operator_work(work: ProcessWork, steps: Steps) -> OperatorWork | None:
    """Returns the calls of operators and their GPU operations in the measured steps; None if the trace has no calls."""
    trace, windows = work.attributed.trace, steps.windows
    step = trace.operator_steps.get(work.process) or find_recorded_step(work, windows)
    if step is None:
        return None
    call = np.full(len(trace.operations), NONE)
    of_process = np.concatenate([*work.devices.values()]) if work.devices else np.zeros(0, np.int64)
    of_process = of_process[np.lexsort((trace.operations.start[of_process], work.launched_at[of_process]))]
    operation_names = name_operations(trace, of_process)
    code_of_name = {name: code for code, name in enumerate(dict.fromkeys((*operation_names, *step.operation)))}
    names, reference = (
        np.array([code_of_name[name] for name in row], np.int64) for row in (operation_names, step.operation)
    )
    step_of_operation = windows.step_at(work.launched_at[of_process])
    for number in range(len(windows)):
        index = np.flatnonzero(step_of_operation == number)
        counterpart = find_counterparts(names[index], reference)
        call[of_process[index]] = np.append(step.call, NONE)[counterpart]
    return OperatorWork(step.calls, call)


def name_operators_of_kernels(
    kernels: tuple[KernelTime, ...], work: ProcessWork, operators: OperatorWork
) -> tuple[KernelTime, ...]:
    """Returns the kernels of a step with the operator that launches each kernel most often."""
    traced, calls = work.attributed.kernels, operators.calls
    of_operator = np.flatnonzero((operators.call != NONE) & (traced.code != NONE))
    signature = calls.signature[operators.call[of_operator]]
    first, pair = distinct_rows(traced.code[of_operator], signature)
    launches: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for position, count in zip(first.tolist(), np.bincount(pair).tolist(), strict=True):
        kernel = traced.code[of_operator[position]]
        name = calls.signatures[signature[position]].name
        launches[traced.names[kernel], traced.classes[kernel]][name] += count
    return tuple(
        structs.replace(kernel, operator=launches[key].most_common(1)[0][0]) if key in launches else kernel
        for kernel in kernels
        for key in [(kernel.name, kernel.kernel_class)]
    )


def find_counterparts(names: Ints, reference: Ints) -> Ints:
    """Returns the position in ``reference`` of the counterpart of each operation of a step, or -1.

    Operations at the beginning and at the end are compared by position. Between them, the first operation of a name
    corresponds to the first operation of this name in the reference, and so on.

    Args:
        names: shape (operations,), a code for the name of each operation.
        reference: shape (reference operations,), the codes of the operator step.
    """
    first_reference = 0
    if len(names) < _PART_OF_STEP * len(reference):
        first_reference = _find_best_part(names, reference)
        reference = reference[first_reference : first_reference + len(names)]
    shorter = min(len(names), len(reference))
    equal = names[:shorter] == reference[:shorter]
    head = shorter if equal.all() else int(equal.argmin())
    equal = names[len(names) - shorter :][::-1] == reference[len(reference) - shorter :][::-1]
    tail = min(shorter if equal.all() else int(equal.argmin()), shorter - head)
    counterpart = np.full(len(names), NONE)
    counterpart[:head] = np.arange(head)
    counterpart[len(names) - tail :] = np.arange(len(reference) - tail, len(reference))
    middle, middle_of_reference = slice(head, len(names) - tail), slice(head, len(reference) - tail)
    positions = {
        key: position for position, key in enumerate(_number_occurrences(reference[middle_of_reference]), head)
    }
    counterpart[middle] = [positions.get(key, NONE) for key in _number_occurrences(names[middle])]
    return np.where(counterpart != NONE, counterpart + first_reference, NONE)


def _number_occurrences(names: Ints) -> list[tuple[int, int]]:
    """Returns each name with the number of its earlier occurrences."""
    occurrences: dict[int, int] = {}
    numbered = []
    for name in names.tolist():
        numbered.append((name, occurrences.get(name, 0)))
        occurrences[name] = occurrences.get(name, 0) + 1
    return numbered


def _find_best_part(names: Ints, reference: Ints) -> int:
    """Returns the start of the part of the reference in which most operations have the name of a step's operation."""
    if not len(names):
        return 0
    starts = np.flatnonzero(reference[: len(reference) - len(names) + 1] == names[0])[-_MAX_PARTS:]
    matches = [int((reference[start : start + len(names)] == names).sum()) for start in starts.tolist()]
    return int(starts[int(np.argmax(matches))]) if matches else 0
