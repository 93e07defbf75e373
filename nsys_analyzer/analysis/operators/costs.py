"""Defines the cost of an operator: the arithmetic and the memory traffic that its shapes require at least."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

from nsys_analyzer.trace.operator_calls import Signature, Tensor, TensorArgument

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


def estimate_cost(signature: Signature) -> Cost | None:
    """Returns the cost of an operator; None if there is no formula for it."""
    tensors = [tensor for argument in (*signature.inputs, signature.outputs) for tensor in _tensors_of(argument)]
    traffic_bytes = sum(math.prod(tensor.shape) * _ELEMENT_BYTES.get(tensor.dtype, 0) for tensor in tensors)
    if signature.name in ("aten::mm", "aten::addmm", "aten::bmm") and signature.outputs:
        first = [tensor for argument in signature.inputs for tensor in _tensors_of(argument)][-2]
        flops = 2 * math.prod(signature.outputs[0].shape) * first.shape[-1]
        return Cost("matmul", _PRECISIONS.get(first.dtype, ""), flops, traffic_bytes)
    return Cost("elementwise", "", 0, traffic_bytes) if tensors else None


_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "bool": 1}
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def _tensors_of(argument: TensorArgument) -> tuple[Tensor, ...]:
    return (argument,) if isinstance(argument, Tensor) else argument or ()
