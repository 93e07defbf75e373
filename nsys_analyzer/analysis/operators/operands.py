"""Reads the operands of an operator's call for the formulas of its cost, and defines a rule that contains formulas."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from nsys_analyzer.trace.operator_calls import Signature, Tensor

#: The kinds of operators that differ in the rates that a GPU attains for them.
OperatorKind = Literal[
    "matmul", "attention", "convolution", "norm", "softmax", "reduction", "elementwise", "copy", "embedding",
    "cross entropy", "optimizer", "collective", "other",
]  # fmt: skip

#: The precisions of PyTorch's data types. The names of the types with 8 and 4 bits have a suffix.
_PRECISIONS = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8", "float4": "fp4",
    "int8": "int8",
}  # fmt: skip


class Call:
    """The operands of one call.

    Attributes:
        signature: the operator and its arguments.
        outputs: the tensors that the operator returns; None if the source does not contain them.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature, self.outputs = signature, signature.outputs

    def tensor(self, position: int) -> Tensor:
        """Returns the tensor at a position of the arguments.

        Raises:
            LookupError: there is no tensor at this position.
        """
        argument = self.signature.inputs[position] if position < len(self.signature.inputs) else None
        if not isinstance(argument, Tensor):
            raise self.unknown(f"tensor at position {position}")
        return argument

    def tensors(self, *positions: int) -> list[Tensor]:
        """Returns the tensors at the given positions, including those in lists; without positions, all tensors."""
        inputs = self.signature.inputs
        arguments = [inputs[position] for position in positions if position < len(inputs)] if positions else [*inputs]
        return [
            tensor
            for argument in arguments
            if argument is not None
            for tensor in ((argument,) if isinstance(argument, Tensor) else argument)
        ]

    def all_tensors(self) -> list[Tensor]:
        """Returns the tensors among the arguments, and those that the operator returns."""
        return [*self.tensors(), *(self.outputs or ())]

    def value(self, position: int, default: Any = None) -> Any:
        """Returns the argument at a position that is not a tensor, or its default if the call leaves it out.

        Raises:
            LookupError: the source does not contain arguments, or this argument has no default.
        """
        texts = self.signature.arguments
        text = texts[position] if position < len(texts) else ""
        try:
            value = ast.literal_eval(text) if text else None
        except (ValueError, SyntaxError):  # such as the padding ``same`` of a convolution
            value = text
        if not texts or (value is None and default is None):
            raise self.unknown(f"argument at position {position}")
        return default if value is None else value

    def count_bytes(self, tensors: list[Tensor] | tuple[Tensor, ...]) -> float:
        """Returns the bytes of memory that tensors occupy. Elements that share memory count once."""
        return sum(count_stored_elements(tensor) * self.element_bytes(tensor) for tensor in tensors)

    def element_bytes(self, tensor: Tensor) -> int:
        """Returns the size of an element.

        Raises:
            LookupError: the data type of the tensor is unknown.
        """
        if tensor.dtype == "bool":
            return 1
        bits = re.search(r"\d+", tensor.dtype)  # types with fewer than 8 bits are packed into bytes: float4_e2m1fn_x2
        if bits is None:
            raise self.unknown("type of a tensor")
        return max(1, int(bits[0]) // 8)

    def unknown(self, operand: str) -> LookupError:
        """Returns the error that the source of the call does not contain an operand."""
        return LookupError(f"The {operand} of {self.signature.name} is unknown.")

    def find_precision(self) -> str:
        """Returns the precision of the first tensor of a type that has a precision, or an empty text."""
        for tensor in self.all_tensors():
            if precision := _PRECISIONS.get(tensor.dtype.partition("_")[0]):
                return precision
        return ""


def count_elements(tensor: Tensor) -> int:
    """Returns the number of elements of a tensor."""
    return math.prod(tensor.shape)


def count_stored_elements(tensor: Tensor) -> int:
    """Returns the number of elements in memory. Dimensions that are expanded (stride 0) or overlap share elements."""
    elements = count_elements(tensor)
    if tensor.strides is None or not elements:
        return elements
    span = 1 + sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    return min(elements, span)


#: A function that returns a number of operations, or of bytes, of a call.
Formula: TypeAlias = Callable[[Call], float]


def nothing(_call: Call) -> float:
    """Returns 0."""
    return 0.0


def bytes_of(*positions: int) -> Formula:
    """Makes a formula: the bytes of the tensors at the given positions; without positions, of all tensors."""
    return lambda call: call.count_bytes(call.tensors(*positions))


def size_of(*positions: int) -> Formula:
    """Makes a formula: the bytes of new tensors with the shapes and types of those at the given positions."""

    def count(call: Call) -> float:
        """Returns the bytes of the tensors, or raises an error if there are none."""
        tensors = call.tensors(*positions)
        if not tensors:
            raise call.unknown(f"tensor at position {positions[0]}")
        return sum(count_elements(tensor) * call.element_bytes(tensor) for tensor in tensors)

    return count


def outputs_or(otherwise: Formula) -> Formula:
    """Makes a formula: the bytes of the outputs, or the result of a formula if the outputs are unknown."""
    return lambda call: otherwise(call) if call.outputs is None else call.count_bytes(call.outputs)


def operations(per_element: float) -> Formula:
    """Makes a formula: a number of operations for each element of the tensor, or the tensors, at position 0."""
    return lambda call: per_element * sum(map(count_elements, call.tensors(0)))


class Rule(NamedTuple):
    """The formulas for the cost of an operator.

    Attributes:
        kind: the kind of the operator.
        read: the bytes of the inputs.
        written: the bytes of the outputs.
        flops: the number of floating-point operations.
    """

    kind: OperatorKind
    read: Formula = bytes_of()
    written: Formula = outputs_or(size_of(0))
    flops: Formula = nothing
