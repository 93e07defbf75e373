"""Records the memory of one step, event by event, with the line of the model that asked for each allocation.

On a GPU the history of PyTorch's caching allocator tells it. On the CPU the memory events of ``torch.profiler`` do: a
mode around every operator marks the line that called it, so that an event can be told its line by time; in backward no
line calls, and the name of autograd's node stands in. Marks and profiler slow the step down: nothing is timed here.
"""

from __future__ import annotations

import linecache
import pickle
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from profiling_targets.harness import Phases, trace_events
from profiling_targets.transformer import Block

Frame = tuple[str, int, str]
"""A file, a line in it, and the function's name."""

_FORWARD: CodeType = Block.forward.__code__
_MODEL = _FORWARD.co_filename
_BLOCK_LINES = frozenset(line for _, _, line in _FORWARD.co_lines() if line)
_PHASE, _LINE, _NODE = "memory phase: ", "memory line: ", "autograd::engine::evaluate_function: "
#: Backward has no lines to mark, and could not reuse memory that a mode holds on to.
_MARKED = ("forward", "loss", "optimizer")

Interval = tuple[float, float, str]
"""Start and end in µs, and a name."""
_MOST_ENTRIES = 1_000_000
_STATISTICS = ("requested_bytes", "allocated_bytes", "reserved_bytes", "inactive_split_bytes")
_TENSORS = {"alloc": 1, "free_requested": -1}
_VIEWER_PROTOCOL = 4


@dataclass(frozen=True)
class Source:
    """The line of the model that asked for memory, empty where none did; and whether a layer called it."""

    line: str = ""
    in_block: bool = False


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation of a tensor's memory, or its free.

    Attributes:
        ms: when, since the step began.
        bytes: its size, negative for a free.
        address: the same in both events of one tensor.
        source: who asked for it.
    """

    ms: float
    bytes: int
    address: int
    source: Source = Source()


@dataclass(frozen=True)
class Span:
    """A phase of the step, in ms since the step began."""

    name: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Recording:
    """One step: the tensors' events, the phases, and what was alive before.

    Attributes:
        events: in order.
        spans: the phases.
        base_bytes: alive when the step began.
        statistics: of each phase what the allocator itself counted; empty where it counts nothing.
    """

    events: list[MemoryEvent]
    spans: list[Span]
    base_bytes: int
    statistics: dict[str, dict[str, int]] = field(default_factory=dict)


def source_of(frames: Iterable[Frame]) -> Source:
    """Returns the innermost line of the model's own file among the frames of a stack, innermost first."""
    own = [frame for frame in frames if frame[0] == _MODEL]
    if not own:
        return Source()
    in_block = any(name == _FORWARD.co_name and line in _BLOCK_LINES for _, line, name in own)
    _, line, name = own[0]
    return Source(f"{Path(_MODEL).name}:{line} {name}", in_block)


def code_of(source: str) -> str:
    """Returns the line of code that a source names, empty for a node of autograd."""
    place = source.partition(" ")[0].rpartition(":")[2]
    return linecache.getline(_MODEL, int(place)).strip() if place.isdigit() else ""


def record_on_gpu(phases: Phases, snapshot: Path | None) -> Recording:
    """Records one step.

    Args:
        phases: the phases of a step, which must have run before.
        snapshot: where to write the snapshot, None for nowhere.

    Raises:
        OSError: the snapshot cannot be written.

    """
    spans, statistics, began = [], {}, time.time_ns()
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=_MOST_ENTRIES)
    try:
        base_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"]
        for name, phase in phases.items():
            torch.cuda.reset_peak_memory_stats()
            start = time.time_ns()
            phase()
            torch.cuda.synchronize()
            spans.append(Span(name, (start - began) / 1e6, (time.time_ns() - began) / 1e6))
            stats = torch.cuda.memory_stats()
            statistics[name] = {key: stats[f"{key}.all.peak"] for key in _STATISTICS}
        taken = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    events = reduced(taken["device_traces"][torch.cuda.current_device()], began)
    if snapshot:
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        snapshot.write_bytes(pickle.dumps(taken, _VIEWER_PROTOCOL))
    return Recording(events, spans, base_bytes, statistics)


def reduced(trace: Sequence[dict[str, Any]], began_ns: int) -> list[MemoryEvent]:
    """Returns the tensors' events of the entries of one device's trace.

    Args:
        trace: the entries; ``time_us`` is Unix time.
        began_ns: the Unix time of the step's start.
    """
    events = []
    for entry in trace:
        if sign := _TENSORS.get(entry["action"]):
            source = source_of((frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ()))
            ms = entry["time_us"] / 1e3 - began_ns / 1e6
            events.append(MemoryEvent(ms, sign * entry["size"], entry["addr"], source))
    return events


def record_on_cpu(phases: Phases, living: Callable[[], Iterable[Tensor]]) -> Recording:
    """Records one step.

    Args:
        phases: the phases of a step, which must have run before.
        living: all tensors that outlive a step.

    """
    marks = _Marks()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for phase in phases.values():  # the profiler sees no free of what it did not see allocated
            phase()
        storages = {
            storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in living())
        }
        for name, phase in phases.items():
            with record_function(_PHASE + name), marks if name in _MARKED else nullcontext():
                phase()
    trace = trace_events(profiler)
    phase_spans, lines, nodes = (
        [
            (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(prefix))
            for event in trace
            if event.get("ph") == "X" and event["name"].startswith(prefix)
        ]
        for prefix in (_PHASE, _LINE, _NODE)
    )
    begin, events = phase_spans[0][0], []
    for event in trace:
        if event["name"] == "[memory]" and begin <= event["ts"] <= phase_spans[-1][1]:
            number, node = _around(lines, event["ts"]), _around(nodes, event["ts"])
            source = marks.sources[int(number)] if number else Source(node or "")
            values = event["args"]
            events.append(MemoryEvent((event["ts"] - begin) / 1e3, values["Bytes"], values["Addr"], source))
    spans = [Span(name, (start - begin) / 1e3, (end - begin) / 1e3) for start, end, name in phase_spans]
    return Recording(events, spans, sum(storages.values()))


class _Marks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts a range around each operator; its name is the number of the line that called it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources: list[Source] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame, frames = sys._getframe(1), []
        while frame:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back  # type: ignore[assignment]
        source = source_of(frames)
        if source not in self.sources:
            self.sources.append(source)
        with record_function(f"{_LINE}{self.sources.index(source)}"):
            return func(*args, **(kwargs or {}))


def _around(intervals: Sequence[Interval], ts: float) -> str | None:
    """Returns the name of the interval that holds a moment; none of them lies in another."""
    index = bisect_right(intervals, ts, key=lambda interval: interval[0]) - 1
    return intervals[index][2] if index >= 0 and ts <= intervals[index][1] else None
