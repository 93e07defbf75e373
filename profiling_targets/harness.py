"""Contains the code that the profiling targets share: configuration, NVTX ranges, timed steps, memory and result rows.

``run`` runs a target that trains: it warms up, opens the capture range, times the phases, and reports how the run
ended. A target of an experiment is a function ``measure(case, figures)``, which ``main`` turns into a program. With
``--cases FILE --rows FILE`` the program measures each case of a JSON list and appends a line of JSON for each case, so
that an interrupted experiment can continue after the last line.

A phase is timed with ``time.perf_counter_ns()``, and the device is synchronized at its end. So the wall time of the
phase's range is the time of the phase. The measured steps lie between cudaProfilerStart and cudaProfilerStop. The
warm-up steps before them lie inside a range named ``warmup``.
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
from nsys_analyzer.capture.hooks.energy_steps import EnergySteps, observe_steps
from nsys_analyzer.capture.hooks.memory import MemoryHistory
from nsys_analyzer.configuration import DIMENSIONS, OPTIONS, Option, Options, Run, manifest_values
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.inputs.rows import CaseTarget, to_json_values
from nsys_analyzer.system.atomic_write import write_text
from nsys_analyzer.trace.schema import NS_PER_MS

C = TypeVar("C")
F = TypeVar("F")

Phases = Mapping[str, Callable[[], object]]
Times = dict[str, list[float]]

_OUT_OF_MEMORY_MESSAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
_GRAPH_WARMUP_STEPS = 3
_ranges_enabled = True


def annotate(name: str) -> AbstractContextManager[None]:
    """Returns a context manager that puts an NVTX range around its block, unless ranges are disabled.

    Code that torch.compile traces gets no ranges, because a range would cause a graph break.
    """
    if torch.compiler.is_compiling() or not _ranges_enabled:
        return nullcontext()
    return _Range(name)


class _Range(AbstractContextManager[None]):
    """An NVTX range as a context manager, written as a class because a generator would take twice as long."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        range_functions()[0](self.name)

    def __exit__(self, *_: object) -> None:
        range_functions()[1]()


def open_range(name: str) -> Callable[[], None]:
    """Starts a range that may overlap other ranges, and returns the function that ends it."""
    if not _ranges_enabled:
        return lambda: None
    _, _, start, end = range_functions()
    return partial(end, start(name))


@cache
def range_functions() -> tuple[Callable[..., Any], ...]:
    """Returns the functions push, pop, start and end of torch.cuda.nvtx.

    In a CPU build of PyTorch these functions fail. Then those of the package ``nvtx`` are used, if it is installed.
    """
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
    """A workload that a target makes from its configuration, such as a model with its data and optimizer."""

    def phases(self) -> Phases:
        """Returns the function of each phase of a step by the phase's name, in order."""


def run(
    build: Callable[[], Workload],
    options: Options[NoReturn],
    described_run: Run,
    results: Path | None,
    *,
    ranges: bool = True,
    finish: Callable[[Phases], None] | None = None,
) -> int:
    """Builds the workload, measures it, prints and writes the results, and returns the exit code.

    Running out of memory is a result with the exit code 3. Every other error is raised to the caller.

    Args:
        build: makes the workload.
        options: the device, the numbers of warm-up and measured steps, and whether each phase is captured as a CUDA
            graph.
        described_run: the configuration as the results record it.
        results: the JSON file for the manifest entries and the times of the run, or None to write no file.
        ranges: whether NVTX ranges are written.
        finish: is called inside the capture range after the measured steps, with the phases as they are before any of
            them is captured.
    """

    def measure(times: Times) -> Mapping[str, Any]:
        """Warms up and measures the phases of each step."""
        memory = MemoryHistory(torch)
        original_phases, device, step_times = build().phases(), options.device, observe_steps(torch)
        phases = original_phases
        with annotate("warmup"):
            if options.cuda_graph:
                phases = capture_graphs(phases)
            for _ in range(options.warmup_steps):
                run_step_ns(phases, device, memory)
                step_times.note_step_end()
            synchronize(device)  # so that earlier work of the device is no part of the first measured step
        step_times.finish()
        switch_profiler("start", device)
        for _ in range(options.steps):
            for phase, ns in run_step_ns(phases, device, memory).items():
                times.setdefault(phase, []).append(ns / NS_PER_MS)
        memory.finish()
        if finish:
            finish(original_phases)
        switch_profiler("stop", device)
        step_times.note_range_closed()
        if isinstance(step_times, EnergySteps):
            phases = {name: partial(_run_marked_phase, step_times, name, phase) for name, phase in phases.items()}
        while step_times.is_measuring:
            run_step_ns(phases, device)
            step_times.note_step_end()
        return {}

    return run_measured(measure, options.device, described_run, results, ranges=ranges)


def _run_marked_phase(energy_steps: EnergySteps, name: str, phase: Callable[[], object]) -> None:
    """Runs a phase, and notes when the GPU works on it."""
    start = energy_steps.mark_phase_start()
    phase()
    energy_steps.note_phase(name, start)


def run_measured(
    measure: Callable[[Times], Mapping[str, Any]], device: str, described_run: Run, results: Path | None,
    *, ranges: bool = True,
) -> int:  # fmt: skip
    """Measures with the target's own function, prints and writes the results, and returns the exit code.

    Args:
        measure: adds the times of each step in ms to its argument, and returns further entries for the results.
        device: the device that the target runs on.
        described_run, results, ranges: as for :func:`run`.
    """
    global _ranges_enabled
    _ranges_enabled = ranges
    times: Times = {}
    further_results: Mapping[str, Any] = {}
    status, message = "ok", None
    try:
        further_results = measure(times)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        status, message = "oom", str(error).strip().partition("\n")[0] or type(error).__name__
        print(f"Out of memory: {message}", file=sys.stderr)
    ended_run = replace(described_run, **read_machine(device), status=status, message=message)
    if results:
        write_text(
            results, json.dumps({**manifest_values(ended_run), **further_results, "times_ms": times}, indent=1) + "\n"
        )
    for phase, values in times.items():
        deviation_ms = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{phase:10} {statistics.mean(values):10.3f} ms ± {deviation_ms:.3f} over {len(values)} steps")
    return 3 if status == "oom" else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of PyTorch, cuBLAS or Python reports that memory ran out."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY_MESSAGES)


def run_step_ns(phases: Phases, device: str, memory: MemoryHistory | None = None) -> dict[str, int]:
    """Runs one step, and synchronizes at the end of each phase. Returns the times of the phases and the step in ns."""
    ns = {}
    step_start = time.perf_counter_ns()
    with annotate("step"):
        for name, phase in phases.items():
            phase_start, start_ns = time.perf_counter_ns(), time.time_ns()
            with annotate(name):
                phase()
                synchronize(device)
            ns[name] = time.perf_counter_ns() - phase_start
            if memory:
                memory.add_phase(name, start_ns)
    if memory:
        memory.note_step_end()
    return {**ns, "step": time.perf_counter_ns() - step_start}


def capture_graphs(phases: Phases) -> dict[str, Callable[[], None]]:
    """Captures each phase as a CUDA graph, and returns the function that replays it.

    All graphs share one memory pool. A replay reads and writes the same tensors as the captured phase.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the first steps allocate memory and choose algorithms, which breaks a capture
        for _ in range(_GRAPH_WARMUP_STEPS):
            for phase in phases.values():
                phase()
    pool = torch.cuda.graph_pool_handle()
    replays: dict[str, Callable[[], None]] = {}
    for name, phase in phases.items():
        graph = torch.cuda.CUDAGraph()
        # Backward runs on the stream of the forward pass, so all phases are captured on one stream. The capture is
        # thread-local, so that the thread of a data loader may pin memory during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            phase()
        replays[name] = graph.replay
    torch.cuda.current_stream().wait_stream(stream)
    return replays


def synchronize(device: str) -> None:
    """Waits until the device has finished all submitted work."""
    if device == "cuda":
        torch.cuda.synchronize()


def switch_profiler(call: str, device: str) -> None:
    """Opens or closes the capture range. Without a GPU, only a recorder that replaced the function can do so.

    Args:
        call: ``start`` or ``stop``.
        device: the device of the target.
    """
    try:
        getattr(torch.cuda.profiler, call)()
    except (AssertionError, RuntimeError):
        if device == "cuda":
            raise


def read_machine(device: str) -> dict[str, Any]:
    """Returns the software versions, the name of the device, and the peak memory of tensors on the device."""
    on_gpu = device == "cuda"
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def time_calls_ms(
    work: Callable[[], object], device: str, warmup: int, steps: int, prepare: Callable[[], object] | None = None
) -> list[float]:
    """Returns the duration of each measured call in ms, including the wait for the device at its end.

    Args:
        work: the function to time.
        device: the device that the function uses.
        warmup: the number of calls before the measured calls.
        steps: the number of measured calls.
        prepare: is called before each call, and is not timed.
    """
    times_ms = []
    for _ in range(warmup + steps):
        if prepare:
            prepare()
            synchronize(device)
        start = time.perf_counter_ns()
        work()
        synchronize(device)
        times_ms.append((time.perf_counter_ns() - start) / NS_PER_MS)
    return times_ms[warmup:]


@dataclass
class Allocations:
    """The memory of tensors that a block of code allocated on a GPU. On a CPU, each figure is None.

    Attributes:
        peak_bytes: the peak of allocated memory minus the memory that was allocated when the block began.
        alive_bytes: the memory that the block allocated and that was still allocated at its end.
    """

    peak_bytes: int | None = None
    alive_bytes: int | None = None


@contextmanager
def measure_allocations(device: str) -> Iterator[Allocations]:
    """Measures the tensor memory that the block allocates. The yielded object gets its figures when the block ends."""
    block = Allocations()
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start_bytes = torch.cuda.memory_allocated()
    yield block
    if device == "cuda":
        torch.cuda.synchronize()
        block.peak_bytes = torch.cuda.max_memory_allocated() - start_bytes
        block.alive_bytes = torch.cuda.memory_allocated() - start_bytes


def set_precision(precision: str) -> None:
    """Lets matmuls of fp32 tensors run in TF32 if the precision is ``tf32``, and in fp32 otherwise."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


@dataclass(frozen=True)
class Config(Options[NoReturn]):
    """The dimensions of a transformer, and the options of a run. An option that is None gets its default.

    Raises:
        ConfigurationError: the options cannot run together.
    """

    size: ModelSize

    def __post_init__(self) -> None:
        defaults = {option.name: option.default for option in OPTIONS.values() if option.default is not None} | {
            "device": "cuda"
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.precision == "tf32" and self.device == "cpu":
            raise ConfigurationError("TF32 is a precision of NVIDIA's tensor cores", "Choose fp32 or bf16 on a CPU")
        if self.cuda_graph and (self.device == "cpu" or self.compile):
            raise ConfigurationError("--cuda-graph needs a GPU, and does not go with --compile")

    def run(self) -> Run:
        """Returns the configuration in the form in which results record it."""
        size = asdict(self.size)
        return Run(model=size.pop("name"), **size, **{name: getattr(self, name) for name in OPTIONS})


def make_config(case: Any, **overrides: Any) -> Config:
    """Returns the configuration of the transformer for a case of an experiment.

    Args:
        case: the case. Each field sets the option of the same name.
        overrides: further options by name. They replace those of the case.

    Raises:
        NotHereError: this device cannot run the configuration.
    """
    shared_names = {option.name for option in fields(Config)} & {option.name for option in fields(case)}
    try:
        return Config(**{"size": case.size, **{name: getattr(case, name) for name in shared_names}, **overrides})
    except ConfigurationError as error:
        raise NotHereError(str(error)) from error


def make_parser(target: str, description: str, options: Iterable[str] = OPTIONS) -> argparse.ArgumentParser:
    """Returns the command-line parser of a target that trains the transformer.

    Args:
        target: the name of the target's module.
        description: the description of the target in its help.
        options: the names of the target's options, besides those for the model and its dimensions.
    """
    parser = argparse.ArgumentParser(f"python -m profiling_targets.{target}", description=description)
    parser.add_argument("--model", default="small", help=list_model_names())
    for dimension in DIMENSIONS:
        parser.add_argument(f"--{dimension.replace('_', '-')}", type=int, help="replaces the model's value")
    for name in options:
        add_option(parser, OPTIONS[name])
    parser.add_argument("--no-ranges", action="store_true", help="emit no NVTX ranges, to measure what they cost")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write times and status to this JSON file")
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def read_options(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[Config, argparse.Namespace]:
    """Reads a command line.

    Returns:
        The configuration and all parsed arguments. The arguments also contain ``results`` (the file for times and
        status, or None), ``no_ranges``, and the options that the target added.

    Raises:
        ConfigurationError: the model is unknown, its dimensions are impossible, or the options cannot run together.
    """
    parsed_options = parser.parse_args(arguments)
    options: dict[str, Any] = {name: getattr(parsed_options, name) for name in OPTIONS if hasattr(parsed_options, name)}
    return Config(read_model_size(parsed_options), **options), parsed_options


def read_model_size(parsed_options: argparse.Namespace) -> ModelSize:
    """Returns the dimensions of the model on a command line, whose further options replace some of them."""
    given_dimensions = {name: value for name in DIMENSIONS if (value := getattr(parsed_options, name)) is not None}
    size = replace(find_model(parsed_options.model), **given_dimensions)
    return replace(size, name=f"d{size.d_model}-L{size.num_layers}") if given_dimensions else size


class NotHereError(ConfigurationError):
    """An error for a case of an experiment that this device or installation cannot run."""


def main(target: CaseTarget[C, F], measure: Callable[[C, F], None]) -> None:
    """Measures the cases in a file that ``nsys-analyze bench`` wrote.

    The process ends after a case that fails or runs out of memory, so that the next case starts in a new process.

    Args:
        target: the types of the target's case and figures.
        measure: fills in the figures, one after the other. The row contains the figures that were measured before an
            error.
    """
    parser = argparse.ArgumentParser(f"python -m {target.module}")
    parser.add_argument("--cases", type=Path, metavar="FILE", required=True, help="a JSON list of the cases")
    parser.add_argument("--rows", type=Path, metavar="FILE", required=True, help="append a row for each case")
    arguments = parser.parse_args()
    for values in json.loads(arguments.cases.read_text(encoding="utf-8")):
        row = measure_case(target, target.case(**values), measure)
        with arguments.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if row["status"] in ("failed", "oom"):
            sys.exit(1)


def add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    """Adds an option to a target's command line."""
    help_text = option.help if option.default is None else f"{option.help} (default {option.default})"
    keywords: dict[str, Any] = {"dest": option.name, "default": option.default, "help": help_text}

    def parse_value(text: str) -> Any:
        """Reads a value of the option from the command line."""
        if option.kind is int and not text.lstrip("-").isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
        if option.kind is int and int(text) < option.least:
            raise argparse.ArgumentTypeError(f"{text} is below {option.least}")
        return option.kind(text)

    if option.kind is bool:
        parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, **keywords)
    else:
        parser.add_argument(option.flag, type=parse_value, choices=option.choices or None, **keywords)


def measure_case(target: CaseTarget[C, F], case: C, measure: Callable[[C, F], None]) -> dict[str, Any]:
    """Measures one case, and returns its row in JSON types: the case, its status, its figures, and the machine."""
    device = to_json_values(case)["device"]
    # Memory and compiled code of earlier cases are freed, so that they are not counted for this case.
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
    except Exception as error:  # noqa: BLE001  the error is the result of this case, and its row contains the message
        message = " ".join(str(error).split()) or type(error).__name__
        if is_out_of_memory(error):
            status = "oom"
        else:
            traceback.print_exc()
            status, message = "failed", f"{type(error).__name__}: {message}"
    # JSON has neither infinity nor NaN.
    finite_figures = {
        key: value if not isinstance(value, float) or math.isfinite(value) else None
        for key, value in to_json_values(figures).items()
    }
    machine = read_machine(device)
    del machine["peak_memory_bytes"]  # the figures of a case contain its peak memory
    return {
        "case": to_json_values(case),
        "status": status,
        "message": message,
        "figures": finite_figures,
        "machine": {**machine, "threads": torch.get_num_threads()},
    }
