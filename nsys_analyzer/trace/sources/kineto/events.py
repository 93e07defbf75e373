"""The records that are kept of a PyTorch profiler's trace: its events, and the properties beside them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""An ordinal: of a device, a rank; a version."""

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63) + 1, le=2**63 - 1)]
"""The range of a column of integers."""

Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of bytes or of processors."""

Text = str | int | float

Name = int | str
"""The ID of a process or a thread in a trace: any number, or any text."""

Place = tuple[Name, Name]
"""A process and a thread of it; a device and a stream on a GPU."""

_Value = TypeVar("_Value")


Rows: TypeAlias = npt.NDArray[np.void]
"""The events of one kind: a structured array of integers, in the file's order, whose columns ``COLUMNS`` names."""

NULL = -(2**63)
"""In a column: no value. No number of a trace is as low."""


class Numbered(dict[_Value, int]):
    """A number for each value, from 0 on, in the order in which they were first asked for."""

    def __missing__(self, value: _Value) -> int:
        self[value] = number = len(self)
        return number


def _columns(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


#: Of every event: the numbers of its name and of its place (process and thread; device and stream on a GPU) among
#: those of the trace, its start and end in ns. A thread's name is an event of that name, without a time.
_EVENT = ("name", "place", "start", "end")
#: An API call, or anything else that has a correlation ID; 0 where the trace has none.
_CALL = (*_EVENT, "correlation")

EVENT = _columns(*_EVENT)
CALL = _columns(*_CALL)
GPU_OPERATION = _columns(*_CALL, "device", "stream", "graph_node", "size")
"""A kernel, copy or fill: the GPU's ordinal, stream, the node of a CUDA graph that it came from or 0, bytes moved."""
COLLECTIVE = _columns(*_CALL, "size", "ranks")
"""What a kernel says of its collective: its name, the message of one rank in bytes or -1, ranks of its group or 0."""
OPERATOR = _columns(*_EVENT, "sequence", "forward_thread", "shapes")
"""An operator, with what ``trace.columns.Operators`` says of it; ``shapes`` is the number of a text, or NULL."""
ALLOCATION = _columns(*_EVENT, "size", "device", "allocated")
"""Bytes that PyTorch's allocator allocated, or freed (negative); of the host where ``device`` is NULL."""

COLUMNS = {
    **dict.fromkeys(("kernel", "memcpy", "memset"), GPU_OPERATION),
    "collective": COLLECTIVE,
    "runtime": CALL,
    "operator": OPERATOR,
    "memory": ALLOCATION,
}
"""The columns of the kinds that have more than ``EVENT``."""


def with_columns(rows: Rows, columns: np.dtype[np.void]) -> Rows:
    """The rows with these columns: those that they have, 0 in the others."""
    found = np.zeros(len(rows), columns)
    for name in set(columns.names or ()) & set(rows.dtype.names or ()):
        found[name] = rows[name]
    return found


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
    """The events of a trace by kind, times in ns since the first of them.

    Kinds: ``kernel``, ``memcpy``, ``memset``, ``runtime``, ``range``, ``operator``, ``memory``, ``thread``;
    ``collective``, what kernels say of theirs; and ``gpu range``, a range on the GPU's timeline, where the trace holds
    nothing of the CPU. ``texts`` and ``places`` are those of the events' numbers. ``status`` is the
    file's, ``remarks`` are warnings about what could not be read; ``on_cpu`` means that it holds nothing of a GPU.
    """

    path: Path
    status: os.stat_result
    properties: Properties
    events: dict[str, Rows]
    texts: list[str]
    places: list[Place]
    remarks: list[str]
    on_mtia: bool
    on_cpu: bool

    def of(self, kind: str) -> Rows:
        """The events of a kind."""
        return self.events.get(kind, np.empty(0, COLUMNS.get(kind, EVENT)))

    def places_of(self, kind: str) -> set[Place]:
        """The processes and threads, or devices and streams, of the events of a kind."""
        return {self.places[number] for number in np.unique(self.of(kind)["place"])}

    @property
    def calls(self) -> Rows:
        """The API calls."""
        return self.of("runtime")

    @property
    def operations(self) -> Rows:
        """The GPU operations: kernels, copies and fills."""
        return np.concatenate([self.of("kernel"), self.of("memcpy"), self.of("memset")])
