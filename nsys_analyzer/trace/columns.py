"""Defines the columns of a trace: GPU operations, API calls, NVTX ranges and graph nodes as arrays.

``match_launches`` finds the API call that launched each GPU operation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nsys_analyzer.text import StrOrText, code
from nsys_analyzer.trace.arrays import Axis, Bools, Codes, Ints, SmallInts, distinct

if TYPE_CHECKING:
    from typing_extensions import Self

#: The names of the kinds of GPU operation, by the codes in ``Operations.kind``.
OPERATION_KINDS = ("kernel", "memcpy", "memset", "graph")
KERNEL, MEMCPY, MEMSET, GRAPH = range(4)

#: The names of the kinds of copy, by the codes in ``Operations.copy``. A kind is a direction, with the kind of host
#: memory (pageable or pinned) if it is known.
COPY_KINDS = (
    "other", "pageable to device", "pinned to device", "device to pageable", "device to pinned", "on the device",
    "to the device", "to the host", "other",
)  # fmt: skip
OTHER_COPY, PAGEABLE_TO_DEVICE, PINNED_TO_DEVICE, DEVICE_TO_PAGEABLE, DEVICE_TO_PINNED, ON_DEVICE = range(6)
TO_DEVICE, TO_HOST, BETWEEN_DEVICES = 6, 7, 8
#: The codes of copies from host memory and to host memory, whether the memory is pageable, pinned or unknown.
FROM_HOST = (PAGEABLE_TO_DEVICE, PINNED_TO_DEVICE, TO_DEVICE)
INTO_HOST = (DEVICE_TO_PAGEABLE, DEVICE_TO_PINNED, TO_HOST)

OTHER_CALL, LAUNCH, BEGIN_CAPTURE, END_CAPTURE, ALLOCATE, FREE, SYNCHRONIZE, COPY, FILL, LAUNCH_GRAPH = range(10)
#: The prefixes of the names of API functions of CUDA and HIP, by the kind of call.
CALL_PREFIXES = {
    LAUNCH: (
        "cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchCooperativeKernel",
        "hipLaunchKernel", "hipLaunchCooperativeKernel", "hipModuleLaunchKernel", "hipModuleLaunchCooperative",
        "hipExtLaunchKernel", "hipExtModuleLaunchKernel", "hipHccModuleLaunchKernel", "hipDrvLaunchKernelEx",
    ),
    BEGIN_CAPTURE: ("cudaStreamBeginCapture", "cuStreamBeginCapture", "hipStreamBeginCapture"),
    END_CAPTURE: ("cudaStreamEndCapture", "cuStreamEndCapture", "hipStreamEndCapture"),
    ALLOCATE: (
        "cudaMalloc", "cuMemAlloc", "cuMemCreate", "cudaHostAlloc", "cuMemHostAlloc",
        "hipMalloc", "hipExtMalloc", "hipMemAlloc", "hipMemCreate", "hipHostMalloc", "hipHostAlloc",
    ),
    FREE: (
        "cudaFree", "cuMemFree", "cuMemRelease", "cuMemUnmap", "hipFree", "hipMemRelease", "hipMemUnmap",
        "hipHostFree",
    ),
    SYNCHRONIZE: (
        "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaThreadSynchronize",
        "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "hipDeviceSynchronize",
        "hipStreamSynchronize", "hipEventSynchronize", "hipCtxSynchronize",
    ),
    COPY: ("cudaMemcpy", "cuMemcpy", "hipMemcpy"),
    FILL: ("cudaMemset", "cuMemset", "hipMemset"),
    LAUNCH_GRAPH: ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch"),
}  # fmt: skip

#: The prefix of the name that a kernel gets if the file does not contain its real name. The ID of the missing string
#: follows. The prefix contains a space, so no symbol starts with it.
UNNAMED_KERNEL = "unknown kernel"

_MAX_QUOTED_CHARACTERS = 120

#: The bits of a global thread ID that form the global process ID. The other 24 bits are the thread's own ID.
PROCESS_MASK = ~0xFFFFFF


def process_of(thread: Ints) -> Ints:
    """Returns the global process ID of each global thread ID."""
    return thread & PROCESS_MASK


def pid_of(process: Any) -> Any:
    """Returns the operating system's process ID, which is bits 24 to 47 of a global process ID (int or array)."""
    return (process >> 24) & 0xFFFFFF


def quote_name(name: str) -> StrOrText:
    """Returns the name of a kernel or a range as code for a sentence, without the end of a very long name."""
    return code(name if len(name) <= _MAX_QUOTED_CHARACTERS else f"{name[:_MAX_QUOTED_CHARACTERS]}…")


@dataclass(frozen=True)
class Columns:
    """The columns of a table: arrays with one entry per row, and the texts that the codes in them stand for."""

    start: Ints

    def __len__(self) -> int:
        return len(self.start)

    def columns(self) -> dict[str, Any]:
        """Returns the columns of the table: an array by the name of its field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if not isinstance(value, tuple)}

    def select(self, mask: Any) -> Self:
        """Returns the rows that a mask, a slice or an index array selects. A mask of all rows copies nothing."""
        if getattr(mask, "dtype", None) == np.bool_ and mask.all():
            return self
        return replace(self, **{key: array[mask] for key, array in self.columns().items()})


class BlockResources(NamedTuple):
    """What a block of a kernel occupies: registers of a thread, threads, and bytes of shared memory."""

    registers: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Operations(Columns):
    """GPU operations, grouped by kind in the order of ``OPERATION_KINDS``. Within a kind, the order is the file's.

    Attributes:
        kind: code into ``OPERATION_KINDS``.
        start, end: ns.
        context: CUDA context ID, 0 if the file does not contain it. Stream IDs are unique only within a context.
        correlation: correlation ID, unique within a process.
        process: global process ID.
        name: code into ``names``, or -1 for an operation that is not a kernel.
        graph_node: CUDA graph node ID; 0 outside graph replays.
        size: thread blocks of a kernel, bytes of a copy or a memset; 0 if the file does not contain it.
        copy: code into ``COPY_KINDS``; 0 for an operation that is not a copy.
        continues: 1 for each part of an operation after the first part. Only a PyTorch operator on the CPU has several
            parts: the stretches of its own time between the operators that it calls.
        resource: code into ``resources``, what a block of a kernel occupies; -1 if it is unknown. It is read only if
            the operators of the program are known.
    """

    kind: Codes
    start: Ints
    end: Ints
    device: SmallInts
    context: SmallInts
    stream: Ints
    correlation: Ints
    process: Ints
    name: SmallInts
    graph_node: Ints
    size: Ints
    copy: SmallInts
    continues: SmallInts
    resource: SmallInts
    names: tuple[str, ...]
    resources: tuple[BlockResources, ...] = ()

    @property
    def kernels(self) -> slice:
        """The positions of the kernels, which are the first operations of the table."""
        return self.of_kind(KERNEL)

    def of_kind(self, kind: int) -> slice:
        """Returns the positions of the operations of a kind, which are contiguous."""
        # The column's dtype, because searchsorted would otherwise copy the column.
        bounds = np.array([kind, kind + 1], self.kind.dtype)
        first, last = np.searchsorted(self.kind, bounds).tolist()
        return slice(first, last)

    def describe(self, index: int) -> StrOrText:
        """Returns a description of an operation: the name of a kernel, or the kind of any other operation."""
        return quote_name(self.names[self.name[index]]) if self.name[index] >= 0 else OPERATION_KINDS[self.kind[index]]


@dataclass(frozen=True)
class Launches(Columns):
    """Calls of CUDA or HIP API functions, without functions that only query something.

    Attributes:
        start, end: ns. If the file contains no valid end, the end equals the start.
        thread: global thread ID.
        correlation: correlation ID, unique within a process.
        call: kind of the call: a key of ``CALL_PREFIXES``, or 0 for other calls.
        name: code into ``names``.
    """

    start: Ints
    end: Ints
    thread: Ints
    correlation: Ints
    call: Codes
    name: SmallInts
    names: tuple[str, ...]


@dataclass(frozen=True)
class Ranges(Columns):
    """NVTX ranges.

    Attributes:
        start, end: ns; the ends of ``Trace.open_ranges`` have no meaning.
        thread: global thread ID.
        name: code into ``names``.
    """

    start: Ints
    end: Ints
    thread: Ints
    name: Ints
    names: tuple[str, ...]


@dataclass(frozen=True)
class Operators(Ranges):
    """PyTorch's operators, including autograd's nodes: ranges with their autograd sequence numbers.

    Each thread has a counter of the autograd nodes that it created, which is never reset. Two kinds of operator carry a
    sequence number:

    - An operator that is called with gradients enabled carries the value of the counter at its start. The node that
      the operator creates gets this number, and operators that start later carry a larger number. If an inner operator
      creates the node, or if no node is created, the inner operator carries the same number: ``aten::linear`` 26
      contains ``aten::t`` 26, which creates node 26, and ``aten::addmm`` 27. The backward pass also contains such
      operators, if a checkpoint runs its forward pass again, or with ``create_graph``.
    - A node of the backward pass carries its own number: ``AddmmBackward0`` 27. PyTorch's profiler also writes it for
      the engine's range around the node (``autograd::engine::evaluate_function: AddmmBackward0``). Of the NVTX ranges,
      only the range of the node carries the number.

    No other operator has a number: no operator below autograd, none that a node calls without ``create_graph``, and not
    ``AccumulateGrad``. The creator of node n is therefore the last operator that starts on the creating thread before
    the node runs, is no node itself, and carries at most n. It normally carries n itself. The exception is an operator
    that creates several nodes: ``copy_`` 29 into a slice creates ``CopyBackwards`` 29 and ``CopySlices`` 30.

    A node is usually created on the thread that runs the steps. Autograd's own threads also create nodes if they run
    operators with gradients enabled. Both threads use the same numbers, so ``forward_thread`` tells which thread
    created a node.

    Attributes:
        sequence: the sequence number; -1 for none.
        forward_thread: the thread that created a node. PyTorch counts threads from 1 in the order in which they first
            run an operator. 0 for operators that are not nodes, and for NVTX ranges, which do not contain the thread.
        arguments: code into ``argument_texts``; -1 if the shapes of the arguments were not recorded.
        argument_texts: the texts that describe arguments, which ``trace.operator_shapes`` parses.
    """

    sequence: Ints
    forward_thread: SmallInts
    arguments: SmallInts
    argument_texts: tuple[str, ...]


@dataclass(frozen=True)
class GraphNodes:
    """CUDA graph nodes as they were created.

    Attributes:
        start: time at which the node was created, ns.
        thread: global ID of the thread that created the node.
        node: CUDA graph node ID.
        original: ID of the captured node that this one was instantiated from, or 0.
    """

    start: Ints
    thread: Ints
    node: Ints
    original: Ints


@dataclass(frozen=True)
class MemoryUses(Columns):
    """Allocations and releases of device memory, in the file's order.

    Attributes:
        start: ns. Memory that was allocated before the capture range has the start of the session.
        process: global process ID.
        bytes: allocated bytes; negative for a release.
        alive: bytes that are in use in the memory pool after the event; -1 without a pool.
    """

    start: Ints
    process: Ints
    bytes: Ints
    alive: Ints


def match_launches(operations: Operations, launches: Launches) -> SmallInts:
    """Returns the index of the launch of each operation, -1 for an operation without a recorded launch.

    A correlation ID is unique within one process. If several calls share a correlation ID, as a runtime call and the
    driver call inside it do, the launch is the call that starts first.

    Returns:
        Shape (operations,).
    """
    if not len(launches):
        return np.full(len(operations), -1, np.int32)
    axis, keys = place_correlation_ids(launches)
    order = np.lexsort((launches.start, keys))
    position, is_known = search_keys(keys[order], axis.place(operations.process, operations.correlation))
    return np.where(is_known, order[position], -1).astype(np.int32)


def place_correlation_ids(launches: Launches) -> tuple[Axis, Ints]:
    """Returns the axis of (process, correlation ID), and the position of each launch on this axis."""
    axis = Axis(process_of(distinct(launches.thread)), launches.correlation)
    return axis, axis.place(process_of(launches.thread), launches.correlation)


def search_keys(keys: Ints, searched_keys: Ints) -> tuple[Ints, Bools]:
    """Returns the first position of each searched key in the sorted ``keys``, and whether ``keys`` contains the key."""
    position = np.searchsorted(keys, searched_keys).clip(max=len(keys) - 1)
    return position, keys[position] == searched_keys
