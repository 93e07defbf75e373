"""Estimates the cost of an operator: the arithmetic and the memory traffic that its shapes require at least."""

from __future__ import annotations

from typing import NamedTuple

from nsys_analyzer.analysis.operators.data_rules import find_data_rule
from nsys_analyzer.analysis.operators.matmul_rules import find_matmul_rule
from nsys_analyzer.analysis.operators.operands import Call, OperatorKind
from nsys_analyzer.trace.operator_calls import Signature


class Cost(NamedTuple):
    """The least work that an operator requires.

    Attributes:
        kind: the kind of the operator, which selects the attainable rates. A backward operator has the kind of its
            forward operator.
        precision: the precision of the operands, as in ``Peaks.flops_per_s`` (``bf16``); empty if it is unknown.
            Operands in float32 have ``fp32``, even if the kernel multiplies in TF32, which no argument shows.
        flops: the number of floating-point operations; 0 for an operator that only moves data.
        bytes: the sizes of the inputs that are read once, and of the outputs that are written once; 0 if the types
            of the operands of a matmul, a convolution or an attention are unknown.
    """

    kind: OperatorKind
    precision: str
    flops: float
    bytes: float


def estimate_cost(signature: Signature, *, on_cpu: bool = False) -> Cost | None:
    """Returns the cost of an operator, or None if no formula fits its name and its arguments.

    Copies between the CPU and the GPU, and operators on the CPU, have no cost, unless ``on_cpu`` is true. An operator
    that only moves data has no cost if a type is unknown.
    """
    call = Call(signature)
    if not on_cpu and any(
        tensor.device == "cpu" and tensor.shape for tensor in (*call.tensors(), *(call.outputs or ()))
    ):
        return None
    matmul_rule = find_matmul_rule(signature)
    rule = matmul_rule or find_data_rule(signature)
    if rule is None:
        return None
    try:
        flops = rule.flops(call)
        has_types = matmul_rule is None or all(tensor.dtype for tensor in call.tensors())
        transferred_bytes = rule.read(call) + rule.written(call) if has_types else 0.0
    except (LookupError, TypeError, ValueError, ZeroDivisionError):  # a formula does not fit the arguments of the call
        return None
    return Cost(rule.kind, call.find_precision(), float(flops), float(transferred_bytes))
