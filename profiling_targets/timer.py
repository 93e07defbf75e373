"""Times synchronised work, and counts the memory it allocates."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from profiling_targets.harness import synchronize


def times_ms(work: Callable[[], object], device: str, warmup: int, steps: int) -> list[float]:
    """Milliseconds of each measured call, by ``time.perf_counter_ns`` around work that is synchronised at its end."""
    for _ in range(warmup):
        work()
    synchronize(device)
    times = []
    for _ in range(steps):
        before = time.perf_counter_ns()
        work()
        synchronize(device)
        times.append((time.perf_counter_ns() - before) / 1e6)
    return times


@dataclass
class Allocations:
    """Memory that tensors took inside a block.

    Attributes:
        peak_bytes: the most at once, above what was allocated when the block began.
        alive_bytes: what was still there at the end of the block.
        total_bytes: the sum of all allocations, however short they lived.

    """

    peak_bytes: int = 0
    alive_bytes: int = 0
    total_bytes: int = 0


@contextmanager
def allocations(device: str) -> Iterator[Allocations]:
    """Counts the tensor memory allocated inside the block; the figures are there after it.

    On a GPU the statistics of PyTorch's allocator say it, on the CPU the memory events of ``torch.profiler``, which
    slow the work down: nothing should be timed inside. Memory that does not come from PyTorch's allocator is not seen.
    """
    counted = Allocations()
    if device == "cuda":
        yield from _of_gpu(counted)
    else:
        yield from _of_cpu(counted)


def _of_gpu(counted: Allocations) -> Iterator[Allocations]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    alive, ever = (torch.cuda.memory_stats().get(f"allocated_bytes.all.{key}", 0) for key in ("current", "allocated"))
    yield counted
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    counted.peak_bytes = after["allocated_bytes.all.peak"] - alive
    counted.alive_bytes = after["allocated_bytes.all.current"] - alive
    counted.total_bytes = after["allocated_bytes.all.allocated"] - ever


def _of_cpu(counted: Allocations) -> Iterator[Allocations]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield counted
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda event: event["ts"])
    sizes = [event["args"]["Bytes"] for event in memory]
    counted.peak_bytes, counted.alive_bytes = max(accumulate(sizes, initial=0)), sum(sizes)
    counted.total_bytes = sum(size for size in sizes if size > 0)
