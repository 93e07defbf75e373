"""The columns of a trace: GPU operations, API calls, NVTX ranges and graph nodes as arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nsys_analyzer.text import StrOrText, code
from nsys_analyzer.trace.arrays import Codes, Ints, SmallInts

if TYPE_CHECKING:
    from typing_extensions import Self

#: The kinds of GPU operation, in the order of ``Operations.kind``'s codes.
OPERATION_KINDS = ("kernel", "memcpy", "memset", "graph")
KERNEL, MEMCPY, MEMSET, GRAPH = range(4)

#: The kinds of copy, in the order of ``Operations.copy``'s codes: which way, and whether the host's memory is pageable.
COPY_KINDS = (
    "other", "pageable to device", "pinned to device", "device to pageable", "device to pinned", "on the device",
    "to the device", "to the host", "other",
)  # fmt: skip
OTHER_COPY, PAGEABLE_TO_DEVICE, PINNED_TO_DEVICE, DEVICE_TO_PAGEABLE, DEVICE_TO_PINNED, ON_DEVICE = range(6)
TO_DEVICE, TO_HOST, BETWEEN_DEVICES = 6, 7, 8
#: The copies from the host and those to it, whatever its memory.
FROM_HOST = (PAGEABLE_TO_DEVICE, PINNED_TO_DEVICE, TO_DEVICE)
INTO_HOST = (DEVICE_TO_PAGEABLE, DEVICE_TO_PINNED, TO_HOST)

OTHER_CALL, LAUNCH, BEGIN_CAPTURE, END_CAPTURE, ALLOCATE, FREE, SYNCHRONIZE, COPY, FILL, LAUNCH_GRAPH = range(10)
#: What an API call does, by the starts of its name.
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

#: How a kernel is called whose name the file does not hold, with its string ID behind it: no symbol reads like this.
UNNAMED_KERNEL = "unknown kernel"

_LONGEST = 120  # letters of a name in a sentence

#: The fields of columns that are no arrays: they belong to all rows.
_SHARED = ("names",)

PROCESS_MASK = ~0xFFFFFF


def process_of(thread: Ints) -> Ints:
    """Returns the global process ID of global thread IDs: the low 24 bits are the thread's."""
    return thread & PROCESS_MASK


def pid_of(process: Any) -> Any:
    """Returns the operating system's process ID inside global process IDs (bits 24 to 47), of an int or an array."""
    return (process >> 24) & 0xFFFFFF


def quote_name(name: str) -> StrOrText:
    """Returns the name of a kernel or a range in a sentence, the start of a long one."""
    return code(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…")


@dataclass(frozen=True)
class Columns:
    """Arrays of one length, an entry each for every row, and what they share: the texts that codes stand for."""

    start: Ints

    def __len__(self) -> int:
        return len(self.start)

    def columns(self) -> dict[str, Any]:
        """Returns the arrays, by the names of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _SHARED}

    def select(self, mask: Any) -> Self:
        """Returns the rows that a boolean mask, a slice or an index array picks; itself, without a copy, for all."""
        if getattr(mask, "dtype", None) == np.bool_ and mask.all():
            return self
        return replace(self, **{key: array[mask] for key, array in self.columns().items()})


@dataclass(frozen=True)
class Operations(Columns):
    """GPU operations, kernels first in the file's order.

    Attributes:
        kind: code into ``KINDS``.
        start, end: ns.
        context: that of CUDA, 0 where the file does not say; it numbers streams by itself.
        correlation: unique within a process.
        process: global process ID.
        name: code into ``names``; -1 for an operation that is not a kernel.
        graph_node: 0 outside graph replays.
        size: thread blocks of a kernel, bytes of a copy or a fill; 0 where the file does not say.
        copy: code into ``COPIES``, 0 for an operation that is no copy.
        continues: 1 for what goes on with an earlier row, as an operator on the CPU does between those that it calls.
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
    names: tuple[str, ...]

    @property
    def kernels(self) -> slice:
        """The kernels: they come first."""
        return self.of_kind(KERNEL)

    def of_kind(self, kind: int) -> slice:
        """Returns the operations of a kind: the kinds lie one behind the other."""
        bounds = np.array([kind, kind + 1], self.kind.dtype)  # of another type numpy copies all kinds
        first, last = np.searchsorted(self.kind, bounds).tolist()
        return slice(first, last)

    def called(self, index: int) -> StrOrText:
        """Returns an operation in words: the kernel's name, or its kind."""
        return quote_name(self.names[self.name[index]]) if self.name[index] >= 0 else OPERATION_KINDS[self.kind[index]]


@dataclass(frozen=True)
class Launches(Columns):
    """API calls, those that only ask for something left out.

    Attributes:
        start, end: ns; the end is the start where the file has none that can be true.
        thread: global thread ID.
        correlation: unique within a process.
        call: what the call does, a key of ``CALLS`` or 0.
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
    """NVTX ranges: start, end in ns (meaningless in ``Trace.open_ranges``), global thread ID, code into ``names``."""

    start: Ints
    end: Ints
    thread: Ints
    name: Ints
    names: tuple[str, ...]


@dataclass(frozen=True)
class Operators(Ranges):
    """PyTorch's operators, autograd's own among them: ranges with what the profiler says of each.

    Autograd counts the nodes of its graph, for each thread by itself; the count is never set back. It is carried by

    - an operator called with gradients on: the count at its start. The node that it makes gets this number, and what
      starts behind it a larger one. One that leaves this to an operator inside it, or makes none, passes the number on:
      ``aten::linear`` 26, in it ``aten::t`` 26, which made node 26, and ``aten::addmm`` 27. In backward, too, where a
      checkpoint runs its forward again, or with ``create_graph``.
    - a node of backward: its own number, ``AddmmBackward0`` 27. PyTorch's profiler writes it for what the engine opens
      around it, too (``autograd::engine::evaluate_function: AddmmBackward0``); NVTX ranges have it on the node alone.

    No other operator has one: none below autograd, none that a node calls without ``create_graph``, and no
    ``AccumulateGrad``. So node n was made by the operator that started last, of those on the thread that made the node
    which started before it runs, are no nodes, and carry at most n. It carries n itself, but where one operator makes
    several nodes: ``copy_`` 29 into a slice makes ``CopyBackwards`` 29 and ``CopySlices`` 30.

    The thread that made a node is mostly the one that runs the steps. What autograd's threads ran with gradients on
    (above) made nodes of theirs, whose numbers occur on the other thread, too: ``forward_thread`` tells the two apart.

    Attributes:
        sequence: the number; -1 for none.
        forward_thread: of a node, the thread that made it, as PyTorch counts threads from 1 in the order in which they
            first ran an operator; 0 for what is no node, and for all in NVTX ranges, which do not say it.
    """

    sequence: Ints
    forward_thread: SmallInts


@dataclass(frozen=True)
class GraphNodes:
    """CUDA graph nodes as they were created: time in ns, thread, node ID and the node it was instantiated from."""

    start: Ints
    thread: Ints
    node: Ints
    original: Ints


@dataclass(frozen=True)
class MemoryUses(Columns):
    """Device memory as it was allocated and freed, in the file's order.

    Attributes:
        start: ns; that of the session for what was there before the capture range.
        process: global process ID.
        bytes: below zero where it was freed.
        alive: bytes in use in its pool afterwards, -1 without a pool.
    """

    start: Ints
    process: Ints
    bytes: Ints
    alive: Ints
