"""What the targets share: the configuration, ranges, synchronized steps and their times, memory, and rows of results.

A target that trains is run by ``run``: warm-up, the capture range, the times of its phases, and how it ended. A target
that measures cases of an experiment is a function ``measure(case, figures)``, which ``main`` makes a program: alone it
prints the figures of one case; with ``--cases FILE --rows FILE`` it measures each case of a JSON list and appends a
line of JSON for it, so that whoever started it can go on where it ended.

Every phase is timed with ``time.perf_counter_ns()`` around work that is synchronised at its end, so the wall time
of its range is the phase's time. Measured steps lie between cudaProfilerStart and cudaProfilerStop; the warm-up
before them lies inside a range ``warmup``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from nsys_analyzer.analysis.transformer.models import ModelSize, find_model, list_model_names
from nsys_analyzer.configuration import DIMENSIONS, OPTIONS, Option, Options, Run, as_json
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.inputs.rows import CaseTarget, written
from nsys_analyzer.system.atomic_write import write_text
from nsys_analyzer.trace.schema import NS_PER_MS

C = TypeVar("C")
F = TypeVar("F")

Phases = Mapping[str, Callable[[], object]]
Times = dict[str, list[float]]

_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
_GRAPH_WARMUP = 3
_ranges_wanted = True


def annotate(name: str) -> AbstractContextManager[None]:
    """Puts an NVTX range around a block of code, where ranges are wanted.

    Code that torch.compile traces gets no ranges: they would break its graph.
    """
    if torch.compiler.is_compiling() or not _ranges_wanted:
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


def open_range(name: str) -> Callable[[], None]:
    """Starts a range that need not nest in others, where ranges are wanted; returns what ends it."""
    if not _ranges_wanted:
        return lambda: None
    _, _, start, end = _range_functions()
    return partial(end, start(name))


@cache
def _range_functions() -> tuple[Callable[..., Any], ...]:
    """Returns push, pop, start and end of torch.cuda.nvtx; a CPU build of PyTorch takes those of ``nvtx``, if any."""
    try:
        torch.cuda.nvtx.mark("ranges of profiling_targets")  # type: ignore[no-untyped-call]
    except RuntimeError:
        try:
            import nvtx
        except ImportError:
            return (lambda _: None), (lambda: None), (lambda _: None), (lambda _: None)
        return nvtx.push_range, nvtx.pop_range, nvtx.start_range, nvtx.end_range
    return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop, torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end


class Workload(Protocol):
    """The parts that a target makes from its configuration."""

    def phases(self) -> Phases:
        """Returns the phases of a step, in order."""


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
        phases, device = build().phases(), options.device
        with annotate("warmup"):
            if options.cuda_graph:
                phases = captured(phases)
            for _ in range(options.warmup_steps):
                step_ns(phases, device)
            synchronize(device)  # nothing that made the model and its data may run into the first measured step
        profiler("start", device)
        for _ in range(options.steps):
            for phase, ns in step_ns(phases, device).items():
                times.setdefault(phase, []).append(ns / NS_PER_MS)
        profiler("stop", device)
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
    for phase, values in times.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{phase:10} {statistics.mean(values):10.3f} ms ± {spread:.3f} over {len(values)} steps")
    return 3 if status == "oom" else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory ran out: PyTorch's own, cuBLAS's, or Python's."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


def step_ns(phases: Phases, device: str) -> dict[str, int]:
    """Runs one step, synchronised at the end of each phase; returns nanoseconds by phase, and of the whole step."""
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


def captured(phases: Phases) -> dict[str, Callable[[], None]]:
    """Captures a CUDA graph for each phase, all in one memory pool; replays read and write the same tensors."""
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
        # Autograd goes back to the stream of the forward. Thread-local: a loader's thread may pin memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
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
    """Returns the versions, the device's name, and the most memory that tensors took on it."""
    on_gpu = device == "cuda"
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def times_ms(
    work: Callable[[], object], device: str, warmup: int, steps: int, prepare: Callable[[], object] | None = None
) -> list[float]:
    """Returns the milliseconds of each measured call, synchronised at its end; ``prepare`` runs untimed before each."""
    times = []
    for _ in range(warmup + steps):
        if prepare:
            prepare()
            synchronize(device)
        before = time.perf_counter_ns()
        work()
        synchronize(device)
        times.append((time.perf_counter_ns() - before) / NS_PER_MS)
    return times[warmup:]


@dataclass
class Allocations:
    """Memory that tensors took inside a block on a GPU; None on a CPU, where nothing counts it.

    Attributes:
        peak_bytes: the most at once, above what was allocated when the block began.
        alive_bytes: what was still there at the end of the block.
    """

    peak_bytes: int | None = None
    alive_bytes: int | None = None


@contextmanager
def allocations(device: str) -> Iterator[Allocations]:
    """Counts the tensor memory allocated inside the block, by PyTorch's allocator; the figures are there after it."""
    counted = Allocations()
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        alive = torch.cuda.memory_allocated()
    yield counted
    if device == "cuda":
        torch.cuda.synchronize()
        counted.peak_bytes = torch.cuda.max_memory_allocated() - alive
        counted.alive_bytes = torch.cuda.memory_allocated() - alive


def set_precision(precision: str) -> None:
    """Lets matmuls of fp32 tensors run as TF32 for ``tf32``, and keeps them in fp32 for others."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


@dataclass(frozen=True)
class Config(Options[NoReturn]):
    """A transformer, and what to do with it: options that are not given are at their defaults.

    Raises:
        ConfigurationError: a combination that cannot run.
    """

    size: ModelSize

    def __post_init__(self) -> None:
        usual = {option.name: option.default for option in OPTIONS.values() if option.default is not None} | {
            "device": "cuda"
        }
        for name, default in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.precision == "tf32" and self.device == "cpu":
            raise ConfigurationError("TF32 is a precision of NVIDIA's tensor cores", "Choose fp32 or bf16 on a CPU")
        if self.cuda_graph and (self.device == "cpu" or self.compile):
            raise ConfigurationError("--cuda-graph needs a GPU, and does not go with --compile")

    def run(self) -> Run:
        """Returns the configuration as results tell it."""
        size = asdict(self.size)
        return Run(model=size.pop("name"), **size, **{name: getattr(self, name) for name in OPTIONS})


def config_of(case: Any, **more: Any) -> Config:
    """Returns the transformer's configuration in a case of an experiment: the options that both have, and more.

    Raises:
        NotHereError: this device cannot run it.
    """
    shared = {option.name for option in fields(Config)} & {option.name for option in fields(case)}
    try:
        return Config(**{"size": case.size, **{name: getattr(case, name) for name in shared}, **more})
    except ConfigurationError as error:
        raise NotHereError(str(error)) from error


def command_line(target: str, description: str, options: Iterable[str] = OPTIONS) -> argparse.ArgumentParser:
    """Returns the command line of a target that trains the transformer: model, these options, and where results go."""
    parser = argparse.ArgumentParser(f"python -m profiling_targets.{target}", description=description)
    parser.add_argument("--model", default="small", help=list_model_names())
    for dimension in DIMENSIONS:
        parser.add_argument(f"--{dimension.replace('_', '-')}", type=int, help="in place of the model's")
    for name in options:
        add_option(parser, OPTIONS[name])
    parser.add_argument("--no-ranges", action="store_true", help="no NVTX ranges: the difference is what they cost")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write times and status there, as JSON")
    parser.set_defaults(device=default_device())
    return parser


def read_options(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[Config, argparse.Namespace]:
    """Reads a command line; a known model's dimensions can be changed one by one.

    Returns:
        The configuration, and what else was said: ``results``, the file for times and status, or None; ``no_ranges``;
        and what the target added.

    Raises:
        ConfigurationError: an unknown model, impossible dimensions or a combination that cannot run.
    """
    given = parser.parse_args(arguments)
    asked: dict[str, Any] = {name: getattr(given, name) for name in OPTIONS if hasattr(given, name)}
    return Config(size_of(given), **asked), given


def size_of(given: argparse.Namespace) -> ModelSize:
    """Returns the model of a command line: the named one, with the dimensions that are given in place of its own."""
    changed = {name: value for name in DIMENSIONS if (value := getattr(given, name)) is not None}
    size = replace(find_model(given.model), **changed)
    return replace(size, name=f"d{size.d_model}-L{size.num_layers}") if changed else size


class NotHereError(ConfigurationError):
    """A case that this device or installation cannot run."""


def main(target: CaseTarget[C, F], measure: Callable[[C, F], None]) -> None:
    """Measures the cases of a file, as ``nsys-analyze bench`` asks for them, and ends the process.

    It ends after the first case that leaves the process in doubt. Running out of memory does: the memory of the next
    case should be that of a fresh process.

    Args:
        target: its types.
        measure: fills the figures as it goes: what was there when memory ran out is kept.
    """
    parser = argparse.ArgumentParser(f"python -m {target.module}")
    parser.add_argument("--cases", type=Path, metavar="FILE", required=True, help="a JSON list of cases to measure")
    parser.add_argument("--rows", type=Path, metavar="FILE", required=True, help="gets a line of JSON for each of them")
    given = parser.parse_args()
    for values in json.loads(given.cases.read_text(encoding="utf-8")):
        row = measured(target, target.case(**values), measure)
        with given.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if row["status"] in ("failed", "oom"):
            sys.exit(1)


def default_device() -> str:
    """Returns ``cuda`` where there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    """Adds an option to a target's command line."""
    says = option.help if option.default is None else f"{option.help} (default {option.default})"
    known: dict[str, Any] = {"dest": option.name, "default": option.default, "help": says}

    def read(text: str) -> Any:
        if option.kind is int and not text.lstrip("-").isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
        if option.kind is int and int(text) < option.least:
            raise argparse.ArgumentTypeError(f"{text} is below {option.least}")
        return option.kind(text)

    if option.kind is bool:
        parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, **known)
    else:
        parser.add_argument(option.flag, type=read, choices=option.choices or None, **known)


def measured(target: CaseTarget[C, F], case: C, measure: Callable[[C, F], None]) -> dict[str, Any]:
    """Returns one row in JSON's types: the case, how it ended, its figures, and the machine."""
    device = written(case)["device"]
    # A case's memory and compiled code are its own: what earlier cases left is freed.
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    figures = target.figures()
    status, message = "ok", None
    try:
        measure(case, figures)
    except NotHereError as error:
        status, message = "unsupported", str(error)
    except Exception as error:  # noqa: BLE001  it is this case's result, and its row says so
        message = " ".join(str(error).split()) or type(error).__name__
        if is_out_of_memory(error):
            status = "oom"
        else:
            traceback.print_exc()
            status, message = "failed", f"{type(error).__name__}: {message}"
    # JSON has neither an infinity nor a NaN.
    finite = {
        key: value if not isinstance(value, float) or math.isfinite(value) else None
        for key, value in written(figures).items()
    }
    known = machine(device)
    del known["peak_memory_bytes"]  # what a case says of that stands in its figures
    return {
        "case": written(case),
        "status": status,
        "message": message,
        "figures": finite,
        "machine": {**known, "threads": torch.get_num_threads()},
    }
