"""The events of a PyTorch profiler's trace that are worth keeping, each as a small tuple."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One event: its name, process and thread (device and stream on a GPU) as written, start and end in ns."""

    kind: str
    name: str
    pid: Any
    tid: Any
    start: int
    end: int
    arguments: dict[str, Any]


@dataclass(frozen=True)
class KinetoTrace:
    """The events of a trace by kind, times in ns since the first of them, and the trace's own properties.

    Kinds: ``kernel``, ``memcpy``, ``memset``, ``runtime``, ``range``, ``operator``, ``memory``, ``thread``; and
    ``gpu range``, what Kineto draws of a range on the GPU's timeline, where there is nothing of the CPU's.

    Attributes:
        path: the file.
        properties: what the file says beside its events.
        events: the events of each kind.
        on_mtia: whether its device is an MTIA.
        remarks: what its reader must be told of it.

    """

    path: Path
    properties: dict[str, Any]
    events: dict[str, list[Event]] = field(default_factory=dict)
    on_mtia: bool = False
    remarks: tuple[str, ...] = ()

    def of(self, *kinds: str) -> list[Event]:
        """The events of one or more kinds, in the file's order within a kind."""
        return [event for kind in kinds for event in self.events.get(kind, ())]

    @property
    def has_gpu(self) -> bool:
        """Whether anything ran on a GPU."""
        return bool(self.of("kernel", "memcpy", "memset"))
