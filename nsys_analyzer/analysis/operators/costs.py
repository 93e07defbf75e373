"""Defines the cost of an operator: the arithmetic and the memory traffic that its shapes require at least."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

#: The kinds of operators that differ in the rates that a GPU attains for them.
OperatorKind = Literal[
    "matmul", "attention", "convolution", "norm", "softmax", "reduction", "elementwise", "copy", "embedding",
    "cross entropy", "optimizer", "collective", "other",
]  # fmt: skip
OPERATOR_KINDS: tuple[OperatorKind, ...] = get_args(OperatorKind)


class Cost(NamedTuple):
    """The least work that an operator requires.

    Attributes:
        kind: the kind of the operator, which selects the attainable rates.
        precision: the precision of the operands, as in ``Peaks.flops_per_s`` (``bf16``); empty if it is unknown.
        flops: the number of floating-point operations; 0 for an operator that only moves data.
        bytes: the sizes of the inputs that are read once, and of the outputs that are written once.
    """

    kind: OperatorKind
    precision: str
    flops: float
    bytes: float
