"""How a target is run: ranges, warm-up, synchronised phases, the capture range, timings, and how it ended.

Every phase is timed with ``time.perf_counter_ns()`` around work that is synchronised at its end, so the wall time
of its range is the phase's time. Measured steps lie between cudaProfilerStart and cudaProfilerStop; the warm-up
before them lies inside a range ``warmup``.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from nsys_analyzer.configuration import Options, Run, as_json
from nsys_analyzer.system.atomic_write import write_text

Phases = Mapping[str, Callable[[], None]]
Times = dict[str, list[float]]

_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
_GRAPH_WARMUP = 3
_ranges_wanted = True


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
    """The parts that a target makes from its configuration."""

    def phases(self) -> Phases:
        """The phases of a step, in order."""


def run(
    build: Callable[[], Workload],
    options: Options[NoReturn],
    described: Run,
    results: Path | None,
    *,
    ranges: bool = True,
) -> int:
    """Builds the workload, measures it, prints and writes what came of it; returns the exit code.

    Running out of memory is a result, with exit code 3; every other error is the caller's.

    Args:
        build: makes the workload.
        options: device, warm-up and measured steps, and whether each phase is captured as a CUDA graph.
        described: what the results say of the configuration.
        results: the JSON file for all that a manifest holds of the run, and the times; None for none.
        ranges: whether there are NVTX ranges.
    """

    def measure(times: Times) -> Mapping[str, Any]:
        _measure(build().phases(), options, times)
        return {}

    return run_measured(measure, options.device, described, results, ranges=ranges)


def run_measured(
    measure: Callable[[Times], Mapping[str, Any]], device: str, described: Run, results: Path | None,
    *, ranges: bool = True,
) -> int:  # fmt: skip
    """Measures as the target does, as :func:`run` is for those that are timed phase by phase.

    Args:
        measure: adds milliseconds to the times, step by step; returns what else the results are to hold.
        device: where it runs.
        described, results, ranges: as for :func:`run`.
    """
    global _ranges_wanted
    _ranges_wanted = ranges
    times: Times = {}
    more: Mapping[str, Any] = {}
    status, message = "ok", None
    try:
        more = measure(times)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        status, message = "oom", str(error).strip().partition("\n")[0] or type(error).__name__
        print(f"Out of memory: {message}", file=sys.stderr)
    ended = replace(described, **machine(device), status=status, message=message)
    if results:
        write_text(results, json.dumps({**as_json(ended), **more, "times_ms": times}, indent=1) + "\n")
    _print(times)
    return 3 if status == "oom" else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: PyTorch's own, cuBLAS's, or Python's."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


def _measure(phases: Phases, options: Options[NoReturn], times: Times) -> None:
    """Warms up, then times the measured steps into ``times``, in milliseconds by phase, ``step`` the last."""
    device = options.device
    with annotate("warmup"):
        if options.cuda_graph:
            phases = _captured(phases)
        for _ in range(options.warmup_steps):
            step_ns(phases, device)
        synchronize(device)  # nothing that made the model and its data may run into the first measured step
    profiler("start", device)
    for _ in range(options.steps):
        for phase, ns in step_ns(phases, device).items():
            times.setdefault(phase, []).append(ns / 1e6)
    profiler("stop", device)


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


def profiler(call: str, device: str) -> None:
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
