"""Follows the memory of tensors through a step: which call allocates each storage, and which call reads it last.

A *storage* is the memory that a value of ``OperatorCalls`` shares with the values that are written over it in place.
A storage is assumed to be freed after the last call that reads it. So memory that only a variable of the program keeps
is not counted, and neither is the workspace of a kernel. The difference between two orders of calls contains neither.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from nsys_analyzer.analysis.memory.blocks import ROUNDING_BYTES
from nsys_analyzer.analysis.operators.operands import Call, count_elements
from nsys_analyzer.trace.operator_calls import OperatorCalls, Signature, Tensor

#: Matches the names of operators that make random numbers. Without inputs, they make a synthetic batch.
_RANDOM = re.compile(r"::(?:rand|normal|uniform|bernoulli)")
#: The beginnings of the names of types that contain indices, labels and masks.
_INDEX_TYPES = ("int", "uint", "bool", "long")

#: A storage, and the number of the repetition of the calls that it belongs to: 0 for the recorded calls.
Key: TypeAlias = tuple[int, int]


#: What a storage contains: a value that the backward pass reads, the gradient of a parameter, or something else.
TensorKind: TypeAlias = Literal["saved for backward", "gradients", "temporaries"]
TENSOR_KINDS: tuple[TensorKind, ...] = get_args(TensorKind)


class Peak(NamedTuple):
    """The most memory in use at once: its bytes, the index of the call at which it is in use, and its parts."""

    bytes: float
    call: int
    parts: Mapping[TensorKind, float]


class Access(NamedTuple):
    """The memory that one call reads and writes, and the index of the call."""

    reads: Sequence[Key]
    writes: Sequence[Key]
    call: int


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps from step to step: its state, and the number and the size of the tensors that it updates.

    Attributes:
        state_bytes, state_elements: the size of the state, and its number of elements.
        parameter_bytes, parameter_tensors: the size and the number of the updated parameters.
        largest_state_bytes: the size of the largest tensor of the state.
        gradient_bytes: the size of the gradients.
    """

    state_bytes: float
    state_elements: int
    parameter_bytes: float
    parameter_tensors: int
    largest_state_bytes: float
    gradient_bytes: float


class TensorMemory:
    """The storages that a step reads, allocates and frees.

    Attributes:
        calls: the calls of the step.
        reads, writes: the storages that each call reads and writes.
        size_bytes: the size of each storage that the step allocates. Older memory is not in it.
        growing: the storages whose size is proportional to the size of the batch.
        lasting: the storages that are in use after the step.
        call_grows: shape (calls,), True for each call whose work is proportional to the size of the batch.
        parameter_shapes: the shapes of the tensors that the optimizer updates, and these shapes transposed.
    """

    def __init__(self, calls: OperatorCalls) -> None:
        self.calls = calls
        self._signatures = [calls.signatures[code] for code in calls.signature.tolist()]
        storage_of = self._find_storages()
        self.reads = [tuple(dict.fromkeys(storage_of[value] for value in values)) for values in calls.reads]
        self.writes = [tuple(dict.fromkeys(storage_of[value] for value in values)) for values in calls.writes]
        self.lasting = {storage_of[value] for value in calls.lasting if value in storage_of}
        is_optimizer, is_backward = calls.in_phase("optimizer"), calls.in_phase("backward")
        shapes = [tensor.shape for index in np.flatnonzero(is_optimizer) for tensor in self._tensors(int(index))]
        self.parameter_shapes = {*shapes, *(shape[::-1] for shape in shapes)} - {()}
        self.size_bytes: dict[int, float] = {}
        self._elements: dict[int, int] = {}
        self.growing: set[int] = set()
        self.call_grows = np.zeros(len(calls), np.bool_)
        older: set[int] = set()
        for index, signature in enumerate(self._signatures):
            older.update(storage for storage in self.reads[index] if storage not in self.size_bytes)
            depends_on_batch = not self.growing.isdisjoint(self.reads[index]) or self._takes_batch(index)
            tensors = [tensor for tensor in signature.outputs or () if tensor.device != "cpu"]
            for position, storage in enumerate(self.writes[index] if tensors else ()):
                if storage in older or storage in self.size_bytes:
                    continue
                tensor = tensors[min(position, len(tensors) - 1)]
                size_bytes = Call(signature).count_bytes((tensor,))
                self.size_bytes[storage] = -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
                self._elements[storage] = count_elements(tensor)
                is_of_parameter = tensor.shape in self.parameter_shapes
                if (
                    count_elements(tensor) > 1
                    and not is_optimizer[index]
                    and (depends_on_batch if is_of_parameter or not shapes else True)
                    and not (is_of_parameter and is_backward[index])
                ):
                    self.growing.add(storage)
            touched = {*self.reads[index], *self.writes[index]}
            self.call_grows[index] = not is_optimizer[index] and (
                depends_on_batch or not self.growing.isdisjoint(touched)
            )

    def _tensors(self, index: int) -> list[Tensor]:
        return Call(self._signatures[index]).tensors()

    def _find_storages(self) -> dict[int, int]:
        """Returns the storage of each value.

        An operator whose name ends with ``_`` writes its result over one of its inputs. If several inputs are possible,
        it is the oldest one that no later call reads.
        """
        calls, storage_of = self.calls, dict[int, int]()
        for index, signature in enumerate(self._signatures):
            for value in calls.reads[index]:
                storage_of.setdefault(value, value)
            overwritten = []
            if signature.name.endswith("_"):
                overwritten = [value for value in calls.reads[index] if calls.readers[value][-1] == index]
            for position, value in enumerate(calls.writes[index]):
                is_in_place = position < len(overwritten)
                storage_of[value] = storage_of[overwritten[position]] if is_in_place else value
        return storage_of

    def _takes_batch(self, index: int) -> bool:
        """Returns whether a call reads data from which a batch is made: from the CPU, as indices, or at random."""
        tensors = self._tensors(index)
        if not tensors:
            return bool(_RANDOM.search(self._signatures[index].name))
        return any(
            count_elements(tensor) > 1 and (tensor.device == "cpu" or tensor.dtype.startswith(_INDEX_TYPES))
            for tensor in tensors
        )

    def repeat(self, index: int, repetition: int = 0, own: Collection[int] = ()) -> Access:
        """Returns the memory that a call accesses if it reads and writes a repetition of the storages ``own``."""
        reads, writes = (
            [(storage, repetition if storage in own else 0) for storage in storages]
            for storages in (self.reads[index], self.writes[index])
        )
        return Access(reads, writes, index)

    @cached_property
    def kinds(self) -> dict[int, TensorKind]:
        """Returns the kind of each storage that the step allocates."""
        is_backward, kinds = self.calls.in_phase("backward", "recomputed"), dict[int, TensorKind]()
        of_backward = set[int]()
        read_by_optimizer = {
            storage for index in np.flatnonzero(self.calls.in_phase("optimizer")) for storage in self.reads[index]
        }
        for index, in_backward in enumerate(is_backward.tolist()):
            for storage in self.writes[index]:
                is_gradient = in_backward and (storage in read_by_optimizer or storage in self.lasting)
                kinds.setdefault(storage, "gradients" if is_gradient else "temporaries")
                if in_backward:
                    of_backward.add(storage)
            for storage in self.reads[index] if in_backward else ():
                if storage in kinds and storage not in of_backward:
                    kinds[storage] = "saved for backward"
        return {storage: kind for storage, kind in kinds.items() if storage in self.size_bytes}

    def find_peak(self, accesses: Iterable[Access], batch: float = 1.0) -> Peak:
        """Returns the most memory of the step's own storages that is in use at once.

        Args:
            accesses: the memory of each call, in the order of the calls.
            batch: the size of the batch, as a multiple of the recorded batch.
        """
        first: dict[Key, int] = {}
        last: dict[Key, int] = {}
        calls = list[int]()
        for position, access in enumerate(accesses):
            calls.append(access.call)
            for key in access.writes:
                if key[0] in self.size_bytes:
                    first.setdefault(key, position)
                    last[key] = position
            for key in access.reads:
                last[key] = position
        changes = {kind: np.zeros(len(calls) + 1) for kind in TENSOR_KINDS}
        for (storage, repetition), begin in first.items():
            size_bytes = self.size_bytes[storage] * (batch if storage in self.growing else 1.0)
            changes[self.kinds[storage]][begin] += size_bytes
            if repetition or storage not in self.lasting:
                changes[self.kinds[storage]][last[storage, repetition] + 1] -= size_bytes
        in_use = {kind: np.cumsum(change[:-1]) for kind, change in changes.items()}
        total = np.sum([*in_use.values()], axis=0)
        at = int(total.argmax())
        return Peak(float(total[at]), calls[at], {kind: float(column[at]) for kind, column in in_use.items()})

    @cached_property
    def older_tensors(self) -> dict[int, Tensor]:
        """Returns the tensor of each older storage, as the first call that reads the storage describes it.

        The tensors of a call are those of the values that it reads, in an unknown order. Those with the sizes of known
        values are left out, and the remaining ones are the tensors of the older storages in the order of their numbers.
        """
        known: dict[int, Tensor] = {}
        for index in range(len(self.calls)):
            older = [storage for storage in self.reads[index] if storage not in self.size_bytes]
            unknown = [storage for storage in sorted(older) if storage not in known]
            if not unknown:
                continue
            sizes = Counter(count_elements(known[storage]) for storage in older if storage in known)
            sizes.update(self._elements[storage] for storage in self.reads[index] if storage in self._elements)
            remaining = []
            for tensor in self._tensors(index):
                if sizes[count_elements(tensor)]:
                    sizes[count_elements(tensor)] -= 1
                else:
                    remaining.append(tensor)
            known.update(zip(unknown, remaining, strict=False))
        return known

    @property
    def older_bytes(self) -> float:
        """Returns the size of the memory that existed before the step and that the step reads."""
        tensors = [tensor for tensor in self.older_tensors.values() if tensor.device != "cpu"]
        return Call(Signature("older memory", ())).count_bytes(tensors)

    @cached_property
    def optimizer_state(self) -> OptimizerState | None:
        """Returns what the optimizer keeps and updates; None if the step contains no call of an optimizer.

        Parameters are older tensors that the optimizer writes and that other calls read as well. The state is the older
        memory that only the optimizer touches.
        """
        is_optimizer = self.calls.in_phase("optimizer")
        if not is_optimizer.any():
            return None
        touched: list[set[int]] = [set(), set()]
        for index, in_optimizer in enumerate(is_optimizer.tolist()):
            touched[in_optimizer].update(self.reads[index])
        tensors = {x: tensor for x, tensor in self.older_tensors.items() if count_elements(tensor) > 1}
        parameters = [tensors[x] for x in touched[True] & touched[False] & tensors.keys()]
        state = [tensors[x] for x in (touched[True] - touched[False]) & tensors.keys()]
        count_bytes = Call(Signature("optimizer", ())).count_bytes
        gradients = [storage for storage in touched[True] if self.kinds.get(storage) == "gradients"]
        return OptimizerState(
            state_bytes=count_bytes(state),
            state_elements=sum(map(count_elements, state)),
            parameter_bytes=count_bytes(parameters),
            parameter_tensors=len(parameters),
            largest_state_bytes=max((count_bytes([tensor]) for tensor in state), default=0.0),
            gradient_bytes=sum(self.size_bytes[x] for x in gradients) or count_bytes(parameters),
        )
