"""The records that are kept of a PyTorch profiler's trace: its events, and the properties beside them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""An ordinal: of a device, a rank; a version."""

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63) + 1, le=2**63 - 1)]
"""The range of a column of integers."""

Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of bytes or of processors."""

Text = str | int | float

Name = int | str
"""The ID of a process or a thread in a trace: any number, or any text."""


class Event(msgspec.Struct, gc=False):
    """One event: its name, process and thread (device and stream on a GPU) as written, start and end in ns.

    A thread's name is an event of that name, without a time.
    """

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
    """A kernel, copy or fill: the GPU's ordinal, stream, the node of a CUDA graph that it came from, bytes moved."""

    device: int = 0
    stream: int = 0
    graph_node: int | None = None
    size: int = 0


class Operator(Event, gc=False):
    """An operator, with what ``trace.columns.Operators`` says of it; ``shapes`` is empty where there are none."""

    sequence: int = -1
    forward_thread: int = 0
    shapes: str = ""


class Allocation(Event, gc=False):
    """Bytes that PyTorch's allocator allocated, or freed (negative); of the host where ``device`` is None."""

    size: int = 0
    device: int | None = None
    allocated: int | None = None


class Device(msgspec.Struct, rename={"memory": "totalGlobalMem", "sms": "numSms"}):
    """A GPU of the machine, as Kineto lists it."""

    id: Int32
    name: str | None = None
    memory: Size | None = None
    sms: Size | None = None


class Distributed(msgspec.Struct):
    """The rank of the process in its group."""

    rank: Int32 | None = None
    world_size: Int32 | None = None


class Properties(msgspec.Struct):
    """The properties that are read; None, or empty, where the trace does not have one."""

    device_properties: tuple[Device, ...] = msgspec.field(name="deviceProperties", default=())
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    torch_version: Text | None = None
    cuda_driver_version: Int32 | None = None
    hip_driver_version: Int32 | None = None
    hip_runtime_version: Int32 | None = None
    roctracer_version: Text | None = None
    driver_version: Text | None = None
    cpu: Text | None = None
    os: Text | None = None


@dataclass(frozen=True)
class KinetoTrace:
    """The events of a trace by kind, in the file's order, times in ns since the first of them.

    Kinds: ``kernel``, ``memcpy``, ``memset``, ``runtime``, ``range``, ``operator``, ``memory``, ``thread``; and
    ``gpu range``, a range on the GPU's timeline, where the trace holds nothing of the CPU. ``status`` is the file's,
    ``remarks`` are warnings about what could not be read; ``on_cpu`` means that it holds nothing of a GPU.
    """

    path: Path
    status: os.stat_result
    properties: Properties
    events: dict[str, list[Any]]
    remarks: list[str]
    on_mtia: bool
    on_cpu: bool

    def of(self, *kinds: str) -> list[Any]:
        """The events of one or more kinds, in the file's order within a kind."""
        return [event for kind in kinds for event in self.events.get(kind, ())]

    @property
    def calls(self) -> list[Call]:
        """The API calls."""
        return self.of("runtime")

    @property
    def operations(self) -> list[GpuOperation]:
        """The GPU operations: kernels, copies and fills."""
        return self.of("kernel", "memcpy", "memset")
