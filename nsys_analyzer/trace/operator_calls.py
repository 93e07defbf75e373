"""Defines the calls of PyTorch's operators with the shapes of their tensors, and reads the step that the hooks record.

The capture hooks record one step in which each operator has a range, after the measured steps (``capture/hooks``). They
write a file beside the capture that describes each call: the tensors that it reads and writes, and the module and the
line of the program that called it. The names of the ranges refer to the calls in this file.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.system.atomic_write import check_regular
from nsys_analyzer.trace.arrays import Axis, Bools, Ints, SmallInts, dense_codes, mask_by_name
from nsys_analyzer.trace.columns import OPERATION_KINDS, match_launches, pid_of, process_of
from nsys_analyzer.trace.sources import find_files_beside

OPERATORS_SUFFIX = ".operators.gz"
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


class Batch(NamedTuple):
    """A batch of tokens that a model was called with.

    Attributes:
        length: the length of the rows of the batch.
        tokens: the number of tokens of each row. The remaining part of the row is padding.
        line: the line of the program that called the model; empty if it is unknown.
    """

    length: int
    tokens: tuple[int, ...]
    line: str = ""


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
        phase: the index in ``phases`` of the phase that contains the call. The phase ``recomputed`` is a forward pass
            that the backward pass runs again (activation checkpoints). The phase ``other`` is outside of all phases.
        instance: the number of times that the phase has begun in the step until the call.
        keeps_graph: True for each call in which autograd records the graph for a backward pass.
        signatures, modules, lines, phases: the values that the indices refer to. A module is its path and its class
            (``GPT/h.0.attn: Attention``), and a line is ``train.py:12 in step``.
        reads, writes: the numbers of the values that each call reads and writes, by call.
        offsets: the offsets of the tensors that each call reads in their memory, in elements, by call. They distinguish
            views of one value that have equal shapes.
        lasting: the values that exist before the step, or whose memory is still in use after the step.
        batches: the batches of the models' calls whose padding is known.
    """

    signature: Ints
    module: Ints
    line: Ints
    phase: Ints
    instance: Ints
    keeps_graph: Bools
    signatures: tuple[Signature, ...]
    modules: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    writes: tuple[tuple[int, ...], ...] = ()
    offsets: tuple[tuple[int, ...], ...] = ()
    lasting: frozenset[int] = frozenset()
    batches: tuple[Batch, ...] = ()

    def __len__(self) -> int:
        return len(self.signature)

    @cached_property
    def readers(self) -> Mapping[int, list[int]]:
        """Returns the indices of the calls that read each value."""
        readers = defaultdict[int, list[int]](list)
        for index, reads in enumerate(self.reads):
            for value in reads:
                readers[value].append(index)
        return readers

    def in_phase(self, *phases: str) -> Bools:
        """Returns True for each call in one of the given phases; shape (calls,)."""
        mask: Bools = np.array([*(name in phases for name in self.phases), False])[self.phase]
        return mask


@dataclass(frozen=True)
class OperatorStep:
    """The step in which each call of an operator has a range. It follows the measured steps.

    Attributes:
        calls: the calls of the step.
        operation: the name of each GPU operation of the step in the order of their launches: the name of a kernel, or
            the kind of another operation.
        call: shape (operations,), the index in ``calls`` of the call that launched each operation, or -1.
    """

    calls: OperatorCalls
    operation: tuple[str, ...]
    call: Ints


class _File(msgspec.Struct):
    """The content of a file of operators. Every list of calls has one entry per call; -1 stands for none."""

    pid: int
    tensors: list[tuple[tuple[int, ...], str, tuple[int, ...] | None, str]]
    signatures: list[tuple[str, tuple[int | tuple[int, ...], ...], tuple[int, ...], tuple[str, ...]]]
    modules: list[str]
    lines: list[str]
    phases: list[str]
    lasting: list[int]
    signature: list[int]
    module: list[int]
    line: list[int]
    phase: list[int]
    passes: list[int]
    keeps_graph: list[int]
    reads: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    offsets: list[tuple[int, ...]] = []
    batches: list[Batch] = []


def find_operator_files(capture: Path) -> list[Path]:
    """Returns the files of operators that belong to a capture, including those of its ranks."""
    return find_files_beside(capture, rf"(_rank\d+)?{re.escape(OPERATORS_SUFFIX)}")


def read_operator_calls(path: Path) -> tuple[int, OperatorCalls]:
    """Returns the process ID and the calls of a file of operators.

    Raises:
        TraceError: the file is damaged.
        NsysAnalyzerError: it is not a regular file.
    """
    hint = "Remove it. The report then shows no operators"
    check_regular(path, hint)
    try:
        file = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=_File)
        tensors = [Tensor(*tensor) for tensor in file.tensors]

        def argument(index: int | tuple[int, ...]) -> TensorArgument:
            """Returns the tensor or the tensors that an entry of a signature refers to."""
            if isinstance(index, tuple):
                return tuple(tensors[i] for i in index)
            return tensors[index] if index >= 0 else None

        signatures = tuple(
            Signature(name, tuple(map(argument, inputs)), tuple(tensors[i] for i in outputs), texts)
            for name, inputs, outputs, texts in file.signatures
        )
        columns = (file.signature, file.module, file.line, file.phase, file.passes)
        signature, module, line, phase, instance = np.array(columns, np.int64)
        calls = OperatorCalls(
            signature, module, line, phase, instance, np.array(file.keeps_graph, np.bool_), signatures,
            tuple(file.modules), tuple(file.lines), tuple(file.phases), tuple(file.reads), tuple(file.writes),
            tuple(file.offsets),
            frozenset(file.lasting), tuple(file.batches),
        )  # fmt: skip
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise TraceError(f"{path} cannot be read ({error})", hint) from error
    return file.pid, calls


def without_operator_steps(trace: Any) -> Any:
    """Returns a ``Trace`` without the step in which each operator has a range, and without everything after this step.

    The result has the step of each process in ``operator_steps``, if the file of the process exists.
    """
    is_step = mask_by_name(trace.ranges, OPERATOR_STEP.__eq__)
    if not is_step.any():
        return trace
    processes, first = np.unique(process_of(trace.ranges.thread[is_step]), return_index=True)
    begins = trace.ranges.start[is_step][first]

    def is_late(start: Ints, process: Ints) -> Bools:
        """Returns True for each event that starts in the step of its process, or after it."""
        position = np.minimum(np.searchsorted(processes, process), len(processes) - 1)
        late: Bools = (processes[position] == process) & (start >= begins[position])
        return late

    def select_early(rows: Any) -> Any:
        """Returns the rows that start before the step in which each operator of their process has a range."""
        return rows.select(~is_late(rows.start, process_of(rows.thread)))

    launch = match_launches(trace.operations, trace.launches)
    launched_at = np.append(trace.launches.start, 0)[launch]
    # An operation without a launch is late if it starts late.
    is_late_operation = is_late(np.where(launch >= 0, launched_at, trace.operations.start), trace.operations.process)
    calls_of = dict(map(read_operator_calls, find_operator_files(trace.path)))
    steps = {}
    for process in processes.tolist():
        if calls := calls_of.get(int(pid_of(process))):
            index = np.flatnonzero(is_late_operation & (trace.operations.process == process) & (launch >= 0))
            index = index[np.argsort(trace.launches.start[launch[index]], kind="stable")]
            steps[process] = OperatorStep(calls, name_operations(trace, index), _find_calls(trace, launch[index]))
    ranges, events, memory = select_early(trace.ranges), select_early(trace.profiler_events), trace.memory
    names, name = dense_codes(ranges.name)
    return replace(
        trace,
        operations=trace.operations.select(~is_late_operation),
        launches=select_early(trace.launches),
        failed_allocations=select_early(trace.failed_allocations),
        ranges=replace(ranges, name=name.astype(np.int64), names=tuple(ranges.names[code] for code in names.tolist())),
        open_ranges=select_early(trace.open_ranges),
        operators=select_early(trace.operators),
        memory=memory and memory.select(~is_late(memory.start, memory.process)),
        nccl_calls=select_early(trace.nccl_calls),
        profiler_events=replace(events, end=np.minimum(events.end, begins.max())),
        operator_steps=steps,
    )


def name_operations(trace: Any, index: Ints) -> tuple[str, ...]:
    """Returns the names of kernels, and the kinds of other operations."""
    operations = trace.operations
    pairs = zip(operations.name[index].tolist(), operations.kind[index].tolist(), strict=True)
    return tuple(operations.names[code] if code >= 0 else OPERATION_KINDS[kind] for code, kind in pairs)


def _find_calls(trace: Any, launch: SmallInts) -> Ints:
    """Returns the call of an operator that made each launch: the range of the thread that began last, or -1."""
    ranges, thread, time = trace.ranges, trace.launches.thread[launch], trace.launches.start[launch]
    matches = [OPERATOR_RANGE.fullmatch(name) for name in ranges.names]
    call_of_name = np.array([int(match[1]) if match else -1 for match in matches], np.int64)
    ranges = ranges.select(call_of_name[ranges.name] >= 0)
    if not len(ranges):
        return np.full(len(launch), -1)
    axis = Axis(ranges.thread, ranges.start)
    ranges = ranges.select(np.argsort(axis.place(ranges.thread, ranges.start), kind="stable"))
    last = np.searchsorted(axis.place(ranges.thread, ranges.start), axis.place(thread, time), side="right") - 1
    is_inside = (last >= 0) & (ranges.thread[last] == thread) & (ranges.end[last] >= time)
    return np.where(is_inside, call_of_name[ranges.name[last]], -1)
