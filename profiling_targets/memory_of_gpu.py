"""Records the memory of one step on a GPU, with the history of PyTorch's caching allocator.

The snapshot that is kept is the dictionary of ``torch.cuda.memory._snapshot()`` for the viewer at
pytorch.org/memory_viz, made small: stacks of Python alone, of allocations alone, equal ones written once.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from profiling_targets import transformer
from profiling_targets.harness import Phases
from profiling_targets.memory_recording import DeviceCall, Recording, source_of
from profiling_targets.memory_timeline import MemoryEvent, Span

_MOST_ENTRIES = 1_000_000
_STATISTICS = ("requested_bytes", "allocated_bytes", "reserved_bytes", "inactive_split_bytes")
_DEVICE_CALLS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_TENSORS = {"alloc": 1, "free_requested": -1}
_VIEWER_PROTOCOL = 4
#: Prefixes of file names on this machine, the longest first: a snapshot shows what comes after them.
_ROOTS = sorted((f"{Path(str(module.__file__)).parents[1]}/" for module in (transformer, torch)), key=len, reverse=True)


def record(phases: Phases, snapshot: Path | None) -> Recording:
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
    events, calls = reduced(taken["device_traces"][torch.cuda.current_device()], began)
    if snapshot:
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        snapshot.write_bytes(pickle.dumps(made_small(taken), _VIEWER_PROTOCOL))
    return Recording(events, spans, base_bytes, statistics, calls)


def reduced(trace: Sequence[dict[str, Any]], began_ns: int) -> tuple[list[MemoryEvent], list[DeviceCall]]:
    """The tensors' events, and the allocator's calls to the device, of the entries of one device's trace.

    Args:
        trace: the entries; ``time_us`` is Unix time.
        began_ns: the Unix time of the step's start.

    """
    events, calls, before = [], [], 0.0
    for entry in trace:
        action, ms = entry["action"], entry["time_us"] / 1e3 - began_ns / 1e6
        if action in _TENSORS:
            frames = ((one["filename"], one["line"], one["name"]) for one in entry.get("frames", ()))
            source = source_of(frames)
            size = _TENSORS[action] * entry["size"]
            events.append(MemoryEvent(ms, size, entry["addr"], source.line, source.in_block, source.is_residual))
        elif action in _DEVICE_CALLS:
            calls.append(DeviceCall(ms, _DEVICE_CALLS[action] * entry["size"], ms - before))
        before = ms
    return events, calls


def made_small(taken: dict[str, Any]) -> dict[str, Any]:
    """A snapshot of which equal stacks and frames are the same objects, which pickle writes once."""
    stacks: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    frames: dict[tuple[Any, ...], dict[str, Any]] = {}
    blocks = [block for segment in taken["segments"] for block in segment["blocks"]]
    entries = [entry for trace in taken["device_traces"] for entry in trace]
    for one in (*blocks, *entries):
        stack = tuple((_short(frame["filename"]), frame["line"], frame["name"]) for frame in one.get("frames", ()))
        for frame in stack:
            frames.setdefault(frame, dict(zip(("filename", "line", "name"), frame, strict=True)))
        one["frames"] = stacks.setdefault(stack, [frames[frame] for frame in stack])
    return taken


def _short(filename: str) -> str:
    return next((filename.removeprefix(root) for root in _ROOTS if filename.startswith(root)), Path(filename).name)
