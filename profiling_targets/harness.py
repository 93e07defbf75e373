"""How a target is run: ranges, warm-up, synchronised phases, the capture range, timings, and how it ended.

Every phase is timed with ``time.perf_counter_ns()`` around work that is synchronised at its end, so the wall time
of its range is the phase's time. Measured steps lie between cudaProfilerStart and cudaProfilerStop; the warm-up
before them lies inside a range ``warmup``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

Phases = Mapping[str, Callable[[], None]]
Times = dict[str, list[float]]

_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
_GRAPH_WARMUP = 3
_ranges_wanted = True


@dataclass(frozen=True)
class Measurement:
    """How a target is measured.

    Attributes:
        device: ``cuda`` or ``cpu``.
        warmup_steps, steps: steps before the measured ones, and the measured ones.
        cuda_graph: whether each phase is captured once and replayed.
        results: the JSON file for times and status, None for none.
    """

    device: str
    warmup_steps: int
    steps: int
    cuda_graph: bool
    results: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], Measurement]:
    """Adds the options that every target has; returns the function that reads them."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--warmup", type=int, default=5, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--cuda-graph", action="store_true", help="capture each phase once, then replay it")
    parser.add_argument("--no-ranges", action="store_true", help="no NVTX ranges: the difference is what they cost")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write times and status there, as JSON")

    def read(given: argparse.Namespace) -> Measurement:
        if given.steps < 1 or given.warmup < 0:
            parser.error("--steps must be at least 1, and --warmup at least 0")
        global _ranges_wanted
        _ranges_wanted = not given.no_ranges
        return Measurement(given.device, given.warmup, given.steps, given.cuda_graph, given.results)

    return read


def annotate(name: str, wanted: bool = True) -> AbstractContextManager[None]:
    """Puts an NVTX range around a block of code, where it is wanted.

    Code that torch.compile traces gets no ranges: they would break its graph.
    """
    if torch.compiler.is_compiling() or not (wanted and _ranges_wanted):
        return nullcontext()
    return _Range(name)


class _Range(AbstractContextManager[None]):
    """A range; a class, since a generator would cost twice as long."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        _range_functions()[0](self.name)

    def __exit__(self, *_: object) -> None:
        _range_functions()[1]()


@cache
def _range_functions() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Push and pop of torch.cuda.nvtx; a CPU build of PyTorch has none and takes the ``nvtx`` package's, if any."""
    try:
        torch.cuda.nvtx.mark("ranges of profiling_targets")  # type: ignore[no-untyped-call]
    except RuntimeError:
        try:
            import nvtx
        except ImportError:
            return (lambda _: None), (lambda: None)
        return nvtx.push_range, nvtx.pop_range
    return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop


class Workload(Protocol):
    """What a target makes of its configuration."""

    def phases(self) -> Phases:
        """The phases of a step, in order."""


def run(build: Callable[[], Workload], measurement: Measurement, described: Mapping[str, Any]) -> int:
    """Builds the workload, measures it, prints and writes what came of it; returns the exit code.

    Running out of memory is a result, with exit code 3; every other error is the caller's.

    Args:
        build: makes the workload.
        measurement: how to measure.
        described: what the results say of the configuration, in JSON's types.
    """
    times: Times = {}
    status, message = "ok", None
    try:
        _measure(build().phases(), measurement, times)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        status, message = "oom", str(error).strip().partition("\n")[0] or type(error).__name__
        print(f"Out of memory: {message}", file=sys.stderr)
    results = {
        **described,
        **machine(measurement.device),
        "warmup_steps": measurement.warmup_steps,
        "steps": measurement.steps,
        "status": status,
        "message": message,
        "times_ms": times,
    }
    if measurement.results:
        _write(measurement.results, results)
    _print(times)
    return 3 if status == "oom" else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: PyTorch's own, cuBLAS's, or Python's."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


def _write(path: Path, results: Mapping[str, Any]) -> None:
    """Writes the results whole or not at all."""
    unfinished = path.with_name(f".{path.name}.part")
    try:
        unfinished.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _measure(phases: Phases, measurement: Measurement, times: Times) -> None:
    """Warms up, then times the measured steps into ``times``, in milliseconds by phase, ``step`` the last."""
    device = measurement.device
    with annotate("warmup"):
        if measurement.cuda_graph:
            phases = _captured(phases)
        for _ in range(measurement.warmup_steps):
            step_ns(phases, device)
        synchronize(device)  # nothing that made the model and its data may run into the first measured step
    _profiler("start", device)
    for _ in range(measurement.steps):
        for phase, ns in step_ns(phases, device).items():
            times.setdefault(phase, []).append(ns / 1e6)
    _profiler("stop", device)


def step_ns(phases: Phases, device: str) -> dict[str, int]:
    """One step, synchronised at the end of each phase: nanoseconds by phase, and of the whole step."""
    ns = {}
    before_step = time.perf_counter_ns()
    with annotate("step"):
        for name, phase in phases.items():
            before = time.perf_counter_ns()
            with annotate(name):
                phase()
                synchronize(device)
            ns[name] = time.perf_counter_ns() - before
    return {**ns, "step": time.perf_counter_ns() - before_step}


def _captured(phases: Phases) -> Phases:
    """A CUDA graph for each phase, all in one memory pool; what they replay reads and writes the same tensors."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the first steps allocate and choose algorithms, which no capture may do
        for _ in range(_GRAPH_WARMUP):
            for phase in phases.values():
                phase()
    pool = torch.cuda.graph_pool_handle()
    replays: dict[str, Callable[[], None]] = {}
    for name, phase in phases.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):  # autograd goes back to the stream of the forward
            phase()
        replays[name] = graph.replay
    torch.cuda.current_stream().wait_stream(stream)
    return replays


def synchronize(device: str) -> None:
    """Waits until the device has done all it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def _profiler(call: str, device: str) -> None:
    """Opens or closes the capture range; without a GPU only a recorder that replaced the function hears it."""
    try:
        getattr(torch.cuda.profiler, call)()
    except (AssertionError, RuntimeError):
        if device == "cuda":
            raise


def machine(device: str) -> dict[str, Any]:
    """Versions, the device's name, and the most memory that tensors took on it."""
    on_gpu = device == "cuda"
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def _print(times: Times) -> None:
    for phase, values in times.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{phase:10} {statistics.mean(values):10.3f} ms ± {spread:.3f} over {len(values)} steps")
