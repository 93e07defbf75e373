"""The events of a PyTorch profiler's trace that are worth keeping, each as a small record."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec

from nsys_analyzer.capture.kineto_origin import Source
from nsys_analyzer.capture.kineto_properties import Properties

Name = int | str
"""What a trace calls a process or a thread: any number, or any text."""


class Event(msgspec.Struct, gc=False):
    """One event: its name, process and thread (device and stream on a GPU) as written, start and end in ns."""

    kind: str
    name: str
    pid: Name
    tid: Name
    start: int
    end: int


class Call(Event, gc=False):
    """An API call, or anything else that has a correlation ID; 0 where the trace has none."""

    correlation: int = 0


class GpuOperation(Call, gc=False):
    """A kernel, copy or fill.

    Attributes:
        device: the GPU's ordinal.
        stream: its stream.
        context: its context.
        size: what a copy or fill moved, in bytes.
        graph_node: the node of a CUDA graph, None where it came from none.
        direction: which way a copy of an MTIA went.

    """

    device: int = 0
    stream: int = 0
    context: int = 0
    size: int = 0
    graph_node: int | None = None
    direction: str | None = None


class Allocation(Event, gc=False):
    """What PyTorch's allocator gave out (``size`` in bytes), or took back (negative), and what it then held.

    ``device`` is None for the host's memory.
    """

    size: int = 0
    address: int = 0
    device: int | None = None
    reserved: int | None = None
    allocated: int | None = None


class ThreadName(Event, gc=False):
    """What a thread is called."""

    thread_name: str = ""


@dataclass(frozen=True)
class KinetoTrace:
    """The events of a trace by kind, times in ns since the first of them, and the trace's own properties.

    Kinds: ``kernel``, ``memcpy``, ``memset``, ``runtime``, ``range``, ``operator``, ``memory``, ``thread``; and
    ``gpu range``, what Kineto draws of a range on the GPU's timeline, where there is nothing of the CPU's.

    Attributes:
        path: the file.
        source: what tells it from another.
        properties: what the file says beside its events.
        events: the events of each kind.
        on_mtia: whether its device is an MTIA.
        remarks: what its reader must be told of it.

    """

    path: Path
    source: Source
    properties: Properties
    events: dict[str, list[Event]] = field(default_factory=dict)
    on_mtia: bool = False
    remarks: tuple[str, ...] = ()

    def of(self, *kinds: str) -> list[Event]:
        """The events of one or more kinds, in the file's order within a kind."""
        return [event for kind in kinds for event in self.events.get(kind, ())]

    @property
    def calls(self) -> list[Call]:
        """The API calls."""
        return cast("list[Call]", self.of("runtime"))

    def operations(self, *kinds: str) -> list[GpuOperation]:
        """What ran on GPUs, of some of its kinds; of all without."""
        return cast("list[GpuOperation]", self.of(*(kinds or ("kernel", "memcpy", "memset"))))

    @property
    def allocations(self) -> list[Allocation]:
        """What PyTorch's allocator did."""
        return cast("list[Allocation]", self.of("memory"))

    @property
    def thread_names(self) -> list[ThreadName]:
        """What the threads are called; more than once each."""
        return cast("list[ThreadName]", self.of("thread"))

    @property
    def has_gpu(self) -> bool:
        """Whether anything ran on a GPU."""
        return any(self.events.get(kind) for kind in ("kernel", "memcpy", "memset"))
