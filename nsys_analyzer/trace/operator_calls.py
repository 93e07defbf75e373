"""Defines the calls of PyTorch's operators with the shapes of their tensors, and reads the files that the hooks write.

The capture hooks record one step in which each operator has a range, after the measured steps (``capture/hooks``). They
write a file beside the capture that describes each call: the tensors that it reads and writes, and the module and the
line of the program that called it. The names of the ranges refer to the calls in this file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from nsys_analyzer.trace.arrays import Bools, Ints

OPERATORS_SUFFIX = ".operators.json.gz"
#: The name of the range around the step in which each operator has a range. All figures leave this step out.
OPERATOR_STEP = "nsys-analyze operators"
#: Matches the name of the range around one call of an operator, which contains the index of the call in the file.
OPERATOR_RANGE = re.compile(r"nsys-analyze operator (\d{1,9})")


class Tensor(NamedTuple):
    """The properties of a tensor that determine the cost of an operator.

    Attributes:
        shape: the size of each dimension.
        dtype: the name of the data type in PyTorch without ``torch.``, such as ``bfloat16``; empty if it is unknown.
        strides: the stride of each dimension in elements; None if the strides are unknown.
        device: ``cuda`` or ``cpu``; empty if the device is unknown.
    """

    shape: tuple[int, ...]
    dtype: str = ""
    strides: tuple[int, ...] | None = None
    device: str = ""


#: An argument of an operator: a tensor, a list of tensors, or None for an argument of another type.
TensorArgument: TypeAlias = Tensor | tuple[Tensor, ...] | None


class Signature(NamedTuple):
    """An operator with the properties of its arguments. Calls with equal signatures have equal costs.

    Attributes:
        name: the name of the operator with its namespace and without its overload, such as ``aten::mm``.
        inputs: the tensors among the arguments, by position.
        outputs: the tensors that the operator returns or writes; None if the source does not contain them.
        arguments: the arguments that are not tensors as Python text, by position; empty for tensors.
    """

    name: str
    inputs: tuple[TensorArgument, ...]
    outputs: tuple[Tensor, ...] | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class OperatorCalls:
    """The calls of operators that launch work or read and write tensors, in the order in which they begin.

    Arrays have the shape (calls,). An index is -1 if the value is unknown.

    A *value* is the content of a tensor's memory at one time. Each call that writes to memory makes a new value. A view
    of a tensor has the same value as the tensor. ``reads``, ``writes`` and ``lasting`` are empty if the source does not
    contain values.

    Attributes:
        signature: the index of the signature of each call in ``signatures``.
        module: the index in ``modules`` of the module that called the operator. The module of a call in a backward pass
            is the module whose forward pass created the node of autograd.
        line: the index in ``lines`` of the line of the program that called the operator. The line of a call in a
            backward pass is the line whose forward pass created the node of autograd.
        phase: the index in ``phases`` of the phase that contains the call.
        is_recomputed: True for each call of a forward pass that the backward pass runs again (activation checkpoints).
        signatures, modules, lines, phases: the values that the indices refer to. A module is its path and its class
            (``GPT/h.0.attn: Attention``), and a line is ``train.py:12 in step``.
        reads, writes: the numbers of the values that each call reads and writes, by call.
        lasting: the values that exist before the step, or whose memory is still in use after the step.
    """

    signature: Ints
    module: Ints
    line: Ints
    phase: Ints
    is_recomputed: Bools
    signatures: tuple[Signature, ...]
    modules: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    writes: tuple[tuple[int, ...], ...] = ()
    lasting: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.signature)
