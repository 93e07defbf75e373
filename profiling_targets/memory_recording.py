"""A recording of memory, and the line of the model that asked for an allocation."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from profiling_targets.memory_timeline import MemoryEvent, Span
from profiling_targets.transformer import Block

Frame = tuple[str, int, str]
"""A file, a line in it, and the function's name."""

_FORWARD: CodeType = Block.forward.__code__
_MODEL = _FORWARD.co_filename
_BLOCK_LINES = frozenset(line for _, _, line in _FORWARD.co_lines() if line)


@dataclass(frozen=True)
class Source:
    """The line of the model that asked for memory, empty where none did; whether a layer called it, or is it."""

    line: str = ""
    in_block: bool = False
    is_residual: bool = False


@dataclass(frozen=True)
class DeviceCall:
    """A cudaMalloc, or a cudaFree (bytes below 0): when, and the time since the allocator's event before it."""

    ms: float
    bytes: int
    since_ms: float


@dataclass(frozen=True)
class Recording:
    """One step: the tensors' events, the phases, what was alive before, and what the allocator asked of the device.

    Attributes:
        events: in order.
        spans: the phases.
        base_bytes: alive when the step began.
        statistics: of each phase what the allocator itself counted; empty where it counts nothing.
        device_calls: cudaMalloc and cudaFree.

    """

    events: list[MemoryEvent]
    spans: list[Span]
    base_bytes: int
    statistics: dict[str, dict[str, int]] = field(default_factory=dict)
    device_calls: list[DeviceCall] = field(default_factory=list)


def source_of(frames: Iterable[Frame]) -> Source:
    """The innermost line of the model's own file among the frames of a stack, innermost first."""
    own = [frame for frame in frames if frame[0] == _MODEL]
    if not own:
        return Source()
    is_block = [name == _FORWARD.co_name and line in _BLOCK_LINES for _, line, name in own]
    _, line, name = own[0]
    return Source(f"{Path(_MODEL).name}:{line} {name}", any(is_block), is_block[0])


def code_of(source: str) -> str:
    """The line of code that a source names, empty for a node of autograd."""
    place = source.partition(" ")[0].rpartition(":")[2]
    return linecache.getline(_MODEL, int(place)).strip() if place.isdigit() else ""
