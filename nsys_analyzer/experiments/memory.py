"""Memory of a forward pass and of a full step over time: peaks, the allocations behind them, and the slopes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from nsys_analyzer.analysis.transformer.costs import backward_flops, forward_flops
from nsys_analyzer.configuration import PRECISIONS, Option
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import Bench, Profiled, Results, Settings, grid, option, require, several, single
from nsys_analyzer.experiments.section import MinimumMemory, Rate, each, endings, ratio, section
from nsys_analyzer.experiments.steps import PHASES, OfModel, models
from nsys_analyzer.report.model import Block, Cell, Details, Lines, Paragraph, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, milliseconds, percent
from nsys_analyzer.runs.rows import CaseTarget, Row, Task
from nsys_analyzer.runs.targets import transformer_targets
from nsys_analyzer.text import Words, joined, link, phrase, plural

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary.statistics import DeviceMemory
    from nsys_analyzer.analysis.summary.summary import CaptureSummary

#: Time in ms, and the bytes allocated from then on.
Point: TypeAlias = tuple[float, int]
#: From here on a timeline is drawn in GiB.
_IN_GIB = 2**31
_UNFOLDED = 2
#: How far two counts of the same bytes may lie apart, and two peaks that pass for equal.
_TOLERANCE = 0.001
_FLOPS = {"forward": forward_flops, "backward": backward_flops}
_DEFINITIONS = phrase(
    "*Definitions.* Memory is what tensors asked for, before the allocator rounds it up; a peak is the most at any "
    "moment. Where backward begins, the gradients of the step before are freed. A layer saves what its lines allocate "
    "in forward and what is alive at forward's end, without parameters."
)
#: The loss is too short for a slope, and the optimizer keeps nothing.
_SLOPED = ("forward", "backward")
#: Least share of the issue time in the allocator, and of the wall time behind the issue time, to wait for these.
_ALLOCATOR_SHARE, _WAITING_SHARE = 0.5, 0.1
_SLOPE_DEFINITIONS = phrase(
    "Memory changes when work is issued: at the pace of the host until the launch queue is full, then at that of the "
    "GPU. Of a full step the table has the first and the last third of the time up to a phase's last allocation or "
    "free, of backward from where the old gradients are freed. Forward alone is a sawtooth: bytes of its rises, and "
    "of its falls by a tenth of its height or more, ÷ their time. *Waiting* is the share of the wall time after all "
    "work is issued: from {} on a phase waits for the GPU; else for the allocator, where that takes {} of the issue "
    "time or more (an upper bound); else for the host. A CPU computes while it issues. This is no claim of GPU-bound, "
    "memory-bound or compute-bound.",
    percent(_WAITING_SHARE),
    percent(_ALLOCATOR_SHARE),
)
_LONGEST_CODE = 52


@dataclass(frozen=True)
class MemoryCase(OfModel):
    """One configuration of the transformer.

    Raises:
        ConfigurationError: no step to warm up, or none to measure.

    """

    device: str
    model: str = option("small", "small, medium, large, xl, 2.7B, xl-2026 or 10B")
    num_layers: int = option(0, "in place of the model's; 0 is its own", least=0, cpu=2)
    context_length: int = option(256, "tokens")
    batch_size: int = option(4, "batch size", cpu=1)
    mode: str = option("train", "forward under no_grad, or all phases of a step", ("forward", "train"))
    precision: str = option("fp32", "bf16 is autocast", PRECISIONS)
    warmup_steps: int = option(3, "steps before the measured ones; the first makes the optimizer's moments", cpu=1)
    steps: int = option(5, "steps timed without a recorder", cpu=2)
    snapshot: str = option("", "file for the allocator's snapshot, on a GPU; empty for none")

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup_steps < 1:
            raise ConfigurationError("steps and warmup_steps must be at least 1")

    @property
    def label(self) -> str:
        """The case in the progress of a bench."""
        return f"{self.model}, context {self.context_length:,}, {self.mode}, {self.precision}"

    @property
    def trains(self) -> bool:
        """Whether it is a full training step."""
        return self.mode == "train"


@dataclass(frozen=True)
class PhaseFigures:
    """Memory in one phase, at its start, peak and end, with the number of allocations and frees in it; and times.

    Attributes:
        counted_peak_bytes: the peak as the allocator counts it; None on a CPU.
        teeth: falls of the curve by a tenth of its height or more.
        device_calls_ms: the time up to the calls of the driver.
        wall_ms, issue_ms: medians without a recorder: to the synchronized end, and until all work was issued.
        allocator_ms: upper bound of the issue time in the allocator.
        cold_ms: of a step with an empty allocator cache; None on a CPU.

    """

    name: str
    start_ms: float
    end_ms: float
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    allocations: int
    frees: int
    allocated_bytes: int
    counted_peak_bytes: int | None = None
    teeth: int = 0
    rise_bytes_per_ms: float | None = None
    fall_bytes_per_ms: float | None = None
    device_allocations: int = 0
    device_frees: int = 0
    device_calls_ms: float | int = 0
    wall_ms: float = 0
    issue_ms: float = 0
    allocator_ms: float = 0
    cold_ms: float | None = None


@dataclass(frozen=True)
class Holder:
    """Allocations of one size by one line in one phase; ``at_peak`` of them were alive at the step's peak."""

    source: str
    phase: str
    bytes: int
    count: int
    at_peak: int
    code: str = ""


@dataclass(frozen=True)
class SavedLine:
    """Tensors and bytes that a line of a layer saves for backward, means of the layers."""

    source: str
    code: str
    tensors: float
    bytes: float


@dataclass
class MemoryFigures:
    """Memory of the recorded step.

    Attributes:
        parameter_bytes, logits_bytes, residual_bytes: by their shapes; residual is the residual stream.
        layer_saves_by_shapes_bytes: saved for backward by a layer, by the shapes.
        step_ms: the sum of the phases' medians, without a recorder.
        cold_device_calls, cold_step_ms: of a step with an empty allocator cache.
        cached_call_us: one allocation and free of a residual stream from the cache.
        base_bytes: allocated before the step.
        requested_peak_bytes and the three after it: as the allocator counts.
        timeline_ms_bytes: time since the step began, and bytes from then on.
        residual_seen_bytes: the residual stream as it was recorded.
        kept_bytes, layer_saves_bytes: allocated in forward and alive at its end: all, and that of a layer.

    """

    parameter_bytes: int | None = None
    logits_bytes: int | None = None
    residual_bytes: int | None = None
    layer_saves_by_shapes_bytes: int | None = None
    moment_bytes: int | None = None
    step_ms: float | None = None
    cold_device_calls: int | None = None
    cold_step_ms: float | None = None
    cached_call_us: float | None = None
    base_bytes: int | None = None
    step_peak_bytes: int | None = None
    forward_peak_bytes: int | None = None
    loss_peak_bytes: int | None = None
    backward_peak_bytes: int | None = None
    optimizer_peak_bytes: int | None = None
    requested_peak_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    inactive_split_peak_bytes: int | None = None
    timeline_ms_bytes: list[Point] | None = None
    phases: list[PhaseFigures] | None = None
    largest: list[Holder] | None = None
    residual_seen_bytes: int | None = None
    kept_bytes: int | None = None
    layer_saves_bytes: float | int | None = None
    layer_saves: list[SavedLine] | None = None


TARGET = CaseTarget("profiling_targets.memory_history", MemoryCase, MemoryFigures)
MemoryRow: TypeAlias = Row[MemoryCase, MemoryFigures]


def run_name(row: MemoryRow) -> str:
    """Returns a row's name in a sentence: ``small 256 train fp32``; ``small-L2`` with two layers of its own."""
    case = row.case
    layers = f"-L{case.num_layers}" if case.num_layers else ""
    return f"{case.model}{layers} {case.context_length} {case.mode} {case.precision}"


def _cases(settings: Settings) -> tuple[Task[MemoryCase], ...]:
    """Returns every context length in the first precision, the longest in the others; snapshots of some of them."""
    lengths = settings["context_length"]
    first, *others = settings["precision"]
    shapes = [(length, first) for length in lengths] + [(max(lengths), precision) for precision in others]
    tasks = [
        task
        for model, (length, precision) in product(models(settings), shapes)
        for task in grid(
            TARGET, settings, lambda case: case.label, model=(model,), context_length=(length,),
            precision=(precision,),
        )
    ]  # fmt: skip
    if settings.device != "cuda" or settings["snapshots"] == "none":
        return tuple(tasks)

    def with_snapshot(task: Task[MemoryCase]) -> Task[MemoryCase]:
        case = task.case
        path = f"snapshots/{case.model}_ctx{case.context_length}_{case.mode}_{case.precision}.pickle"
        return replace(task, case=replace(case, snapshot=path))

    firsts = {task.case.mode: task for task in reversed(tasks)}.values()
    kept = tasks if settings["snapshots"] == "all" else firsts
    return tuple(with_snapshot(task) if task in kept else task for task in tasks)


def _captures(settings: Settings) -> Profiled:
    """Returns the first model's full step at the longest context; a CPU has no device memory to see."""
    if settings.device != "cuda":
        return Profiled(())
    count = settings["num_layers"]
    targets = transformer_targets(
        settings["model"][:1],
        {
            "context_length": [max(settings["context_length"])], "precision": settings["precision"][:1],
            "batch_size": [settings["batch_size"]], "device": [settings.device], "steps": [settings["steps"]],
            "warmup_steps": [settings["warmup_steps"]],
        },
        ("--num-layers", str(count)) if count else (),
    )  # fmt: skip
    return Profiled(targets, memory=True)


def _section(results: Results) -> Section:
    rows = results.rows_of(TARGET)
    ok = [row for row in rows if row.ok]
    # Of each model, mode and precision the row of the longest context, full steps and large models first.
    best = {
        (row.case.model, row.case.mode, row.case.precision): row
        for row in sorted(ok, key=lambda row: row.case.context_length)
    }
    longest = sorted(best.values(), key=lambda row: (not row.case.trains, -require(row.figures.parameter_bytes)))
    timelines = tuple(_timeline(row) for row in longest)
    return section(
        "memory",
        "memory over a step",
        results,
        rows,
        run_name,
        answers=_answers(rows),
        warmup=f"{each(rows, 'warmup_steps')} steps",
        measured=f"one step, recorded; times are medians of {each(rows, 'steps')} steps without a recorder",
        synchronized="at the end of each phase",
        gradients="none in forward alone (no_grad), recorded in a full step",
        warnings=_warnings(results, rows),
        blocks=(
            table(_PEAKS, rows, _PEAKS_CAPTION),
            *timelines[:_UNFOLDED],
            *([Details("More timelines", timelines[_UNFOLDED:])] if timelines[_UNFOLDED:] else []),
            Paragraph(_source(results, rows)),
            Details("The allocator, and the cost of an empty cache", (table(_ALLOCATOR, ok, _ALLOCATOR_CAPTION),)),
            *_holders(longest),
            *_layers(ok),
            *_slopes(rows),
            *_captured(results),
        ),
        definitions=_DEFINITIONS,
        rates=_rates(rows),
        memory=_minimum_memory(rows),
    )


def _answers(every: Sequence[MemoryRow]) -> Iterator[str]:

    def counted(words: list[str]) -> str:
        """Returns ``backward (5 of 8), optimizer (3 of 8)``: how often each word occurs, most often first."""
        return ", ".join(f"{word} ({count} of {len(words)})" for word, count in Counter(words).most_common())

    rows = [row for row in every if row.ok]
    steps = [row for row in rows if row.case.trains]
    if rows:
        top = max(rows, key=lambda row: require(row.figures.step_peak_bytes))
        peak = format_number(require(top.figures.step_peak_bytes), "bytes")
        yield f"Memory is highest in {run_name(top)}: {peak}, in {_phase_of_peak(top)}."
    if steps:
        yield f"The peak of a full step is in {counted([_phase_of_peak(row) for row in steps])}."
        top = max(steps, key=lambda row: require(row.figures.layer_saves_bytes))
        saved = require(top.figures.layer_saves_bytes)
        share = format_number(saved / require(top.figures.layer_saves_by_shapes_bytes), "factor")
        yield (
            f"A layer saves up to {format_number(saved, 'bytes')} of activations for backward ({run_name(top)}), "
            f"{share} the bytes of their shapes."
        )
    if waits := [f"the {slope.waits_for}" for slope in slopes_of(rows)]:
        yield f"Forward and backward wait for {counted(waits)}."
    yield from endings(every, run_name, "Nothing ran out of memory.")


def _phase_of_peak(row: MemoryRow) -> str:
    """Returns the phase in which memory is highest; of several with the same peak those that rise to it."""
    phases = require(row.figures.phases)
    top = max(phase.peak_bytes for phase in phases)
    tied = [phase for phase in phases if phase.peak_bytes >= top * (1 - _TOLERANCE)]
    rising = [phase.name for phase in tied if phase.peak_bytes > phase.start_bytes * (1 + _TOLERANCE)]
    return " and ".join(rising or [tied[0].name])


def _warnings(results: Results, rows: Sequence[MemoryRow]) -> Iterator[Words]:
    """Yields calls of the driver in a warm step, and counts of the same bytes that differ."""
    for row in rows:
        figures = row.figures
        phases = figures.phases or []
        if calls := sum(phase.device_allocations + phase.device_frees for phase in phases):
            took = milliseconds(sum(phase.device_calls_ms for phase in phases))
            yield phrase(
                "**cudaMalloc in the recorded step**: {} calls the driver {} {}, in {} at most. Its allocator's cache "
                "had not settled.",
                run_name(row), calls, plural(calls, "time"), took,
            )  # fmt: skip
        twice: list[tuple[str, float | None, float | None]] = [
            (f"peak of {phase.name}", phase.peak_bytes, phase.counted_peak_bytes) for phase in phases
        ]
        twice.append(("residual stream", figures.residual_seen_bytes, figures.residual_bytes))
        twice.append(("memory that a layer saves", figures.layer_saves_bytes, figures.layer_saves_by_shapes_bytes))
        for name, seen, expected in twice:
            if seen and expected and abs(seen / expected - 1) > _TOLERANCE:
                sizes = f"{format_number(seen, 'bytes')} recorded, {format_number(expected, 'bytes')} expected"
                yield phrase("**Two counts differ**: {}, {}: {}.", run_name(row), name, sizes)
    for capture in results.captures:
        memory = capture.device_memory
        if memory and not memory.of_tensors and memory.allocations:
            times = f"{memory.allocations:,} {plural(memory.allocations, 'time')}"
            yield phrase("**cudaMalloc while measuring**: {} allocates {} in its measured steps.", capture.title, times)


def _rates(rows: Sequence[MemoryRow]) -> list[Rate]:
    """Returns FLOPs of the matmuls, and bytes: what the allocator hands out is written once at least."""
    return [
        Rate(
            f"{phase.name}, {run_name(row)}",
            row.case.precision,
            _FLOPS[phase.name](row.case.size, row.case.batch_size, row.case.context_length),
            phase.allocated_bytes,
            phase.wall_ms,
            phase.peak_bytes - phase.start_bytes,
        )
        for row, phase in slopes_of(rows)
    ]


def _minimum_memory(rows: Sequence[MemoryRow]) -> Iterator[tuple[str, MinimumMemory]]:
    """Yields the tensors that exist as forward ends, by the mode."""
    for row in (row for row in rows if row.ok):
        figures = row.figures
        sizes = {"weights": require(figures.parameter_bytes), "logits": require(figures.logits_bytes)}
        if row.case.trains:
            # Gradients have the size of the parameters, and are freed when the next backward begins.
            sizes |= {"grads": require(figures.parameter_bytes), "moments": require(figures.moment_bytes)}
            sizes["activations"] = require(figures.layer_saves_by_shapes_bytes) * row.case.size.num_layers
        peak, least = require(figures.forward_peak_bytes), sum(sizes.values())
        yield row.case.mode, MinimumMemory(f"forward, {run_name(row)}", peak, least, ", ".join(sizes))


def _timeline(row: MemoryRow) -> Lines:
    scale, unit = (2**30, "GiB") if require(row.figures.step_peak_bytes) >= _IN_GIB else (2**20, "MiB")
    points = tuple((ms, level / scale) for ms, level in require(row.figures.timeline_ms_bytes))
    spans = tuple((phase.name, phase.start_ms, phase.end_ms) for phase in require(row.figures.phases))
    return Lines(
        f"memory-{row.case.model}-{row.case.context_length}-{row.case.mode}-{row.case.precision}",
        f"Memory of tensors over a step: {run_name(row)}, batch {row.case.batch_size}",
        (("memory", points),),
        "ms since the step began, on the host's clock, while recording",
        unit,
        spans=spans,
        steps=True,
    )


def _source(results: Results, rows: Sequence[MemoryRow]) -> Words:
    """Says what recorded the timelines, with links to the snapshots."""
    if not results.on_gpu:
        return "A CPU has no caching allocator: the timelines are the memory events of torch.profiler."
    named = [PurePosixPath(row.case.snapshot) for row in rows if row.ok and row.case.snapshot]
    inside = [path for path in named if not path.is_absolute() and ".." not in path.parts]
    links = [link(path.name, f"{results.folder}/{path}".lstrip("/")) for path in inside]
    found = phrase(" Snapshots for https://pytorch.org/memory_viz: {}.", joined(", ", links)) if links else ""
    return phrase("The timelines are the history of PyTorch's allocator.{}", found)


def _figure(name: str) -> Callable[[MemoryRow], Cell]:
    return lambda row: getattr(row.figures, name)


_RUN: Field[MemoryRow] = Field("run", "text", run_name)
_PEAKS: tuple[Field[MemoryRow], ...] = (
    _RUN,
    *(Field(name, "bytes", _figure(f"{name}_peak_bytes")) for name in PHASES),
    Field("status", "text", lambda row: row.status),
)
_PEAKS_CAPTION = "Peak memory of tensors in each phase (a run is model, context, mode, precision):"
_ALLOCATOR: tuple[Field[MemoryRow], ...] = (
    _RUN,
    Field("before the step", "bytes", _figure("base_bytes")),
    Field("asked for", "bytes", _figure("step_peak_bytes")),
    Field("handed out", "bytes", _figure("allocated_peak_bytes")),
    Field("reserved", "bytes", _figure("reserved_peak_bytes")),
    Field(
        "handed out ÷ reserved", "percent",
        lambda row: ratio(row.figures.allocated_peak_bytes, row.figures.reserved_peak_bytes),
    ),
    Field("free between tensors", "bytes", _figure("inactive_split_peak_bytes")),
    Field("step ms", "ms", _figure("step_ms")),
    Field("cold ms", "ms", _figure("cold_step_ms")),
    Field("cold ÷ step", "factor", lambda row: ratio(row.figures.cold_step_ms, row.figures.step_ms)),
    Field("cudaMalloc", "count", _figure("cold_device_calls")),
)  # fmt: skip
_ALLOCATOR_CAPTION = (
    "Memory before the step, and the peak of each kind in it. On a GPU tensors ask for memory, and the allocator "
    "hands it out rounded up; what is free between tensors is fragmentation, as an upper bound. Cold is a step "
    "after torch.cuda.empty_cache(), with its calls of cudaMalloc."
)


def _saved(row: MemoryRow) -> float:
    return require(row.figures.layer_saves_bytes)


_LAYERS: tuple[Field[MemoryRow], ...] = (
    _RUN,
    Field("residual", "bytes", _figure("residual_seen_bytes")),
    Field("a layer saves", "bytes", _figure("layer_saves_bytes")),
    Field("÷ by shapes", "factor", lambda row: _saved(row) / require(row.figures.layer_saves_by_shapes_bytes)),
    Field("all layers", "bytes", lambda row: _saved(row) * row.case.size.num_layers),
    Field("forward", "bytes", _figure("kept_bytes")),
)


def _layers(rows: Sequence[MemoryRow]) -> tuple[Block, ...]:
    """Returns the memory that a layer saves for backward, and of the largest line by line."""
    trained = [row for row in rows if row.case.trains]
    if not trained:
        return ()
    caption = "The residual stream, and the memory that one layer, all layers and all of forward save for backward:"
    row = max(trained, key=_saved)
    lines = [*require(row.figures.layer_saves), SavedLine("sum", "", 0, _saved(row))]
    by_line = f"{run_name(row)}: alive at the end of forward, by the line that asked for it, mean of the layers:"
    details = Details("What a layer saves for backward", (table(_SAVED_LINES, lines, by_line),))
    return (table(_LAYERS, trained, caption), details)


def _code(one: Holder | SavedLine) -> str:
    plain = one.code.partition("  #")[0]
    return plain if len(plain) <= _LONGEST_CODE else f"{plain[: _LONGEST_CODE - 1]}…"


_LINE: tuple[Field[Any], ...] = (
    Field("line", "text", lambda holder: holder.source or "autograd"),
    Field("code", "code", _code),
)
_SAVED_LINES: tuple[Field[SavedLine], ...] = (
    *_LINE,
    Field("tensors", "count", lambda line: line.tensors or None),
    Field("bytes", "bytes", lambda line: line.bytes),
)
_HOLDERS: tuple[Field[Holder], ...] = (
    *_LINE,
    Field("phase", "text", lambda holder: holder.phase),
    Field("each", "bytes", lambda holder: holder.bytes),
    Field("number", "count", lambda holder: holder.count),
    Field("at the peak", "count", lambda holder: holder.at_peak),
)


def _holders(rows: Sequence[MemoryRow]) -> tuple[Block, ...]:
    """Returns the largest allocations of some runs, with the lines that asked for them."""
    words = "the largest allocations, and how many of them were alive at the step's peak"
    tables = [table(_HOLDERS, require(row.figures.largest), f"{run_name(row)}: {words}:") for row in rows]
    return (Details("Largest allocations", tuple(tables)),) if tables else ()


def _captured(results: Results) -> tuple[Block, ...]:
    """Returns the profiler's view of device memory, beside the allocator's."""

    def memory(capture: CaptureSummary) -> DeviceMemory:
        return require(capture.device_memory)

    fields: tuple[Field[CaptureSummary], ...] = (
        Field("capture", "text", lambda capture: capture.title),
        Field("events are of", "text", lambda capture: "tensors" if memory(capture).of_tensors else "cudaMalloc"),
        Field("in use before", "bytes", lambda capture: memory(capture).before_bytes),
        Field("peak", "bytes", lambda capture: memory(capture).peak_bytes),
        Field("allocations", "count", lambda capture: memory(capture).allocations),
        Field("frees", "count", lambda capture: memory(capture).frees),
    )
    seen = [capture for capture in results.captures if capture.device_memory]
    caption = phrase(
        "Memory events of the profiler, over the measured steps. nsys sees cudaMalloc and cudaFree: the segments that "
        "PyTorch's allocator reserves (*reserved* above), never the tensors in them; the PyTorch profiler sees tensors:"
    )
    return (table(fields, seen, caption),) if seen else ()


class Slope(NamedTuple):
    """A forward or backward phase of a run."""

    row: MemoryRow
    phase: PhaseFigures

    @property
    def waits_for(self) -> str:
        """The ``GPU``, ``allocator`` or ``host``; on a CPU the ``CPU`` or ``allocator``."""
        phase, on_gpu = self.phase, self.row.case.device == "cuda"
        if on_gpu and phase.wall_ms - phase.issue_ms >= _WAITING_SHARE * phase.wall_ms:
            return "GPU"
        if phase.allocator_ms >= _ALLOCATOR_SHARE * phase.issue_ms:
            return "allocator"
        return "host" if on_gpu else "CPU"

    def third(self, index: int) -> float | None:
        """Returns bytes/s in the first (0) or the last (-1) third of a full step's phase; None in forward alone."""
        found = slope_of_thirds(_course(self)) if self.row.case.trains else None
        return found[index] * 1e3 if found else None


def slopes_of(rows: Sequence[MemoryRow]) -> Iterator[Slope]:
    """Yields each forward and backward phase of the runs that were measured."""
    for row in rows:
        if row.ok:
            yield from (Slope(row, phase) for phase in require(row.figures.phases) if phase.name in _SLOPED)


def slope_of_thirds(points: Sequence[Point]) -> tuple[float, float] | None:
    """Returns bytes/ms by which a curve changes in the first and in the last third of its time; None without time."""
    import numpy as np  # here, so that help need not wait for it

    times, levels = np.array(points, float).T
    thirds = np.linspace(times[0], times[-1], 4)
    if thirds[0] == thirds[-1]:
        return None
    changes = np.diff(levels[np.searchsorted(times, thirds, side="right") - 1]) / np.diff(thirds)
    return float(changes[0]), float(changes[-1])


def _course(slope: Slope) -> list[Point]:
    """Returns the curve of a phase, of backward from where the gradients of the step before are freed."""
    phase, figures = slope.phase, slope.row.figures
    timeline = require(figures.timeline_ms_bytes)
    points = [(phase.start_ms, phase.start_bytes)]
    points += [(ms, level) for ms, level in timeline if phase.start_ms < ms <= phase.end_ms]
    if phase.name == "forward":
        return points
    # Gradients have the size of the parameters; they go at once, which is no slope.
    freed = phase.start_bytes - require(figures.parameter_bytes)
    begin = next((index for index, (_, level) in enumerate(points) if level <= freed), 0)
    return points[begin:]


def _per_second(slope: Slope, per_ms: float | None) -> float | None:
    return None if per_ms is None or slope.row.case.trains else per_ms * 1e3


_SLOPES: tuple[Field[Slope], ...] = (
    Field("run", "text", lambda slope: run_name(slope.row)),
    Field("phase", "text", lambda slope: slope.phase.name),
    Field("first third of issue", "bytes/s", lambda slope: slope.third(0)),
    Field("last third of issue", "bytes/s", lambda slope: slope.third(-1)),
    Field("rises", "bytes/s", lambda slope: _per_second(slope, slope.phase.rise_bytes_per_ms)),
    Field("falls", "bytes/s", lambda slope: _per_second(slope, slope.phase.fall_bytes_per_ms)),
    Field("number of falls", "count", lambda slope: None if slope.row.case.trains else slope.phase.teeth),
    Field("issue ms", "ms", lambda slope: slope.phase.issue_ms),
    Field("wall ms", "ms", lambda slope: slope.phase.wall_ms),
    Field("cold ms", "ms", lambda slope: slope.phase.cold_ms),
    Field("allocator", "percent", lambda slope: slope.phase.allocator_ms / slope.phase.issue_ms),
    Field("waiting", "percent", lambda slope: max(1 - slope.phase.issue_ms / slope.phase.wall_ms, 0)),
    Field("waits for", "text", lambda slope: slope.waits_for),
)


def _slopes(rows: Sequence[MemoryRow]) -> tuple[Block, ...]:
    """Returns the slopes of forward and backward, and what these wait for."""
    found = table(_SLOPES, slopes_of(rows), "How fast memory changes, and what the phase waits for:", names=2)
    return (Details("Slopes", (found, Paragraph(_SLOPE_DEFINITIONS))),) if found.rows else ()


BENCH = Bench(
    "memory",
    "Memory of a forward pass and of a full step over time: peaks, what holds them, what a layer saves for backward.",
    (
        several(MemoryCase, "model", ("small", "large"), ("small",), help="models"),
        several(MemoryCase, "context_length", (128, 256, 512), (32,)),
        several(MemoryCase, "mode", ("forward", "train")),
        several(
            MemoryCase, "precision", ("fp32", "bf16"), ("fp32",),
            help="the first at every context length, the others at the longest; bf16 is autocast",
        ),
        *single(MemoryCase, "num_layers", "batch_size", "warmup_steps", "steps"),
        Option(
            "first", "cases of which the allocator's history is kept, on a GPU: the first of each mode, all, none",
            ("first", "all", "none"), name="snapshots",
        ),
    ),
    _cases,
    _section,
    _captures,
    targets=(TARGET,),
)  # fmt: skip
