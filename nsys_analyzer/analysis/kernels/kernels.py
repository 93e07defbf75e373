"""The distinct kernels of a trace: by name, and by class where launching operators give one name two classes.

cuDNN multiplies matrices with the very kernels of cuBLAS, so ``volta_sgemm_64x64_nt`` is a matmul launched by
``aten::mm`` and a convolution launched by ``aten::convolution_backward``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import Attribution
from nsys_analyzer.analysis.intervals import NONE, Timeline
from nsys_analyzer.analysis.kernels.classes import OTHER, classify, open_classes
from nsys_analyzer.trace.arrays import Ints, SmallInts
from nsys_analyzer.trace.columns import Operations
from nsys_analyzer.trace.trace import Trace


@dataclass(frozen=True)
class Kernels:
    """The distinct kernels of a trace.

    Attributes:
        code: shape (operations,), index of each operation's kernel; -1 for an operation that is none.
        names, classes: shape (kernels,), the full name and the class of each. A name is there once for each class.
    """

    code: SmallInts
    names: tuple[str, ...]
    classes: tuple[str, ...]


def launching_operators(trace: Trace, attribution: Attribution, operations: Ints) -> Ints:
    """Code into ``trace.operators.names`` of the innermost operator around the launch of some operations, or -1.

    That of the launching thread: an operator runs on one thread. A node of a CUDA graph was launched where it was
    captured, as far as the trace knows.
    """
    operators = trace.operators
    lines = Timeline(operators.thread, operators.start, operators.end, latest=True)
    thread, time = attribution.thread.copy(), attribution.time.copy()
    captures = attribution.captures
    thread[captures.operation], time[captures.operation] = captures.thread, captures.time
    found = lines.at(thread[operations], time[operations])
    return np.append(operators.name, NONE)[found]


def find_kernels(trace: Trace, attribution: Attribution) -> Kernels:
    """The distinct kernels of a trace, by name and by the operator where that may decide the class."""
    operations, operators = trace.operations, trace.operators
    classes = [classify(name) for name in operations.names]
    known = {classify(operators.names[i]) for i in np.flatnonzero(np.bincount(operators.name))} - {OTHER}
    is_open = np.array([not known.isdisjoint(open_classes(name)) for name in operations.names], np.bool_)
    undecided = np.flatnonzero(is_open[operations.name[operations.kernels]])
    operator = launching_operators(trace, attribution, undecided) if len(undecided) else undecided
    return _by_name_and_class(operations, classes, undecided, operator, operators.names)


def _by_name_and_class(
    operations: Operations, classes: list[str], undecided: Ints, operator: Ints, operators: tuple[str, ...]
) -> Kernels:
    """A kernel for every pair of a name and a class that an operator gives it."""
    number: dict[tuple[str, str], int] = {}
    by_name = [number.setdefault(pair, len(number)) for pair in zip(operations.names, classes, strict=True)]
    code = np.array([*by_name, NONE], np.int32)[operations.name]
    launched, operator = undecided[operator != NONE], operator[operator != NONE]
    # A name and an operator as one integer, so that numpy finds the distinct pairs.
    pair = operations.name[launched].astype(np.int64) * len(operators) + operator
    pairs, position = np.unique(pair, return_inverse=True)
    names = [(operations.names[one // len(operators)], operators[one % len(operators)]) for one in pairs.tolist()]
    decided = [number.setdefault((name, classify(name, by)), len(number)) for name, by in names]
    code[launched] = np.array(decided, np.int32)[position]
    return Kernels(code, tuple(name for name, _ in number), tuple(one for _, one in number))
