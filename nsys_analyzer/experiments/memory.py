"""Memory of a forward pass and of a full step over time: peaks, and what layers save for backward, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

from nsys_analyzer.configuration import PRECISIONS, Option
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import Bench, Results, Settings, grid, option, ratio, several, single
from nsys_analyzer.experiments.section import namer, rows_table
from nsys_analyzer.experiments.steps import PHASES, OfModel, models
from nsys_analyzer.report.model import Block, Cell, Details, Lines, Paragraph
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number
from nsys_analyzer.runs.rows import CaseTarget, Row, Task
from nsys_analyzer.text import Words, joined, link, phrase

#: Time in ms, and the bytes allocated from then on.
Point: TypeAlias = tuple[float, int]
#: From here on a timeline is drawn in GiB.
_IN_GIB = 2**31
_UNFOLDED = 2
#: How far two peaks that pass for equal may lie apart.
_TOLERANCE = 0.001
_DEFINITIONS = phrase(
    "*Definitions.* Memory is what tensors asked for, before the allocator rounds it up; a peak is the most at any "
    "moment. Where backward begins, the gradients of the step before are freed. A layer saves what its lines allocate "
    "in forward and what is alive at forward's end, without parameters. On a GPU the allocator hands out what is asked "
    "for, rounded up, of what it has reserved; what is free between tensors is fragmentation, as an upper bound."
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
    def trains(self) -> bool:
        """Whether it is a full training step."""
        return self.mode == "train"


@dataclass(frozen=True)
class PhaseFigures:
    """Memory in one phase, at its start, peak and end, with the number of allocations and frees in it; and its time.

    Attributes:
        wall_ms: the median without a recorder.
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
    wall_ms: float = 0


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
        base_bytes: allocated before the step.
        requested_peak_bytes and the three after it: as the allocator counts.
        timeline_ms_bytes: time since the step began, and bytes from then on.
        kept_bytes, layer_saves_bytes: allocated in forward and alive at its end: all, and that of a layer.
    """

    parameter_bytes: int | None = None
    logits_bytes: int | None = None
    residual_bytes: int | None = None
    layer_saves_by_shapes_bytes: int | None = None
    moment_bytes: int | None = None
    step_ms: float | None = None
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
    kept_bytes: int | None = None
    layer_saves_bytes: float | int | None = None
    layer_saves: list[SavedLine] | None = None


TARGET = CaseTarget("profiling_targets.memory_history", MemoryCase, MemoryFigures)
MemoryRow: TypeAlias = Row[MemoryCase, MemoryFigures]


def _cases(settings: Settings) -> Iterator[Task[MemoryCase]]:
    """Yields every context length in the first precision, the longest in the others; snapshots of some of them."""
    lengths = settings["context_length"]
    first, *others = settings["precision"]
    shapes = [(length, first) for length in lengths] + [(max(lengths), precision) for precision in others]
    has_snapshot: set[str] = set()
    for model, (length, precision) in product(models(settings), shapes):
        for task in grid(TARGET, settings, model=(model,), context_length=(length,), precision=(precision,)):
            wanted = settings["snapshots"] == "all" or (
                settings["snapshots"] == "first" and task.case.mode not in has_snapshot
            )
            if settings.device == "cuda" and wanted:
                has_snapshot.add(task.case.mode)
                path = f"snapshots/{model}_ctx{length}_{task.case.mode}_{precision}.pickle"
                task = replace(task, case=replace(task.case, snapshot=path))
            yield task


def _answers(results: Results) -> Iterator[str]:
    name = namer(results.rows)
    rows = [row for row in results.rows_of(TARGET) if row.ok]
    if rows:
        top = max(rows, key=lambda row: row.figures.step_peak_bytes or 0)
        peak = format_number(top.figures.step_peak_bytes or 0, "bytes")
        yield f"Memory is highest in {name(top)}: {peak}, in {phase_of_peak(top)}."
    if steps := [row for row in rows if row.case.trains]:
        counted = Counter(map(phase_of_peak, steps)).most_common()
        listed = ", ".join(f"{phase} ({count} of {len(steps)})" for phase, count in counted)
        yield f"The peak of a full step is in {listed}."
        top = max(steps, key=_saved)
        share = ratio(_saved(top), top.figures.layer_saves_by_shapes_bytes)
        yield (
            f"A layer saves up to {format_number(_saved(top), 'bytes')} of activations for backward ({name(top)}), "
            f"{format_number(share or 0, 'factor')} the bytes of their shapes."
        )


def phase_of_peak(row: MemoryRow) -> str:
    """Returns the phase in which memory is highest; of several with the same peak those that rise to it."""
    phases = row.figures.phases or []
    top = max(phase.peak_bytes for phase in phases)
    tied = [phase for phase in phases if phase.peak_bytes >= top * (1 - _TOLERANCE)]
    rising = [phase.name for phase in tied if phase.peak_bytes > phase.start_bytes * (1 + _TOLERANCE)]
    return " and ".join(rising or [tied[0].name])


def _saved(row: MemoryRow) -> float:
    return row.figures.layer_saves_bytes or 0


def _blocks(results: Results) -> Iterator[Block]:
    rows = results.rows_of(TARGET)
    name, ok = namer(rows), [row for row in rows if row.ok]
    yield rows_table(
        rows, "Peak memory of tensors in each phase:",
        *((phase, "bytes", f"{phase}_peak_bytes") for phase in PHASES),
    )  # fmt: skip
    # Of each model, mode and precision the row of the longest context, full steps and large models first.
    ordered = sorted(ok, key=lambda row: row.case.context_length)
    best = {(row.case.model, row.case.mode, row.case.precision): row for row in ordered}
    longest = sorted(best.values(), key=lambda row: (not row.case.trains, -(row.figures.parameter_bytes or 0)))
    timelines = tuple(_timeline(row, name(row)) for row in longest)
    yield from timelines[:_UNFOLDED]
    if timelines[_UNFOLDED:]:
        yield Details("More timelines", timelines[_UNFOLDED:])
    yield Paragraph(_source(results))
    if trained := [row for row in ok if row.case.trains]:
        yield rows_table(
            trained,
            "The residual stream, and the memory that one layer, all layers and all of forward save for backward:",
            ("residual", "bytes", "residual_bytes"),
            ("a layer saves", "bytes", "layer_saves_bytes"),
            ("÷ by shapes", "factor", lambda row: ratio(_saved(row), row.figures.layer_saves_by_shapes_bytes)),
            ("all layers", "bytes", lambda row: _saved(row) * row.case.size.num_layers),
            ("forward", "bytes", "kept_bytes"),
        )
        top = max(trained, key=_saved)
        by_line = f"{name(top)}: alive at the end of forward, by the line that asked for it, mean of the layers:"
        lines = [*(top.figures.layer_saves or ()), SavedLine("sum", "", 0, _saved(top))]
        yield Details("What a layer saves for backward", (table(_SAVED_LINES, lines, by_line),))
    allocator = rows_table(
        ok, "Memory before the step, and the peak of each kind in it:",
        ("before the step", "bytes", "base_bytes"), ("asked for", "bytes", "step_peak_bytes"),
        ("handed out", "bytes", "allocated_peak_bytes"), ("reserved", "bytes", "reserved_peak_bytes"),
        ("free between tensors", "bytes", "inactive_split_peak_bytes"), ("step ms", "ms", "step_ms"),
    )  # fmt: skip
    yield Details("The allocator", (allocator,))


def _timeline(row: MemoryRow, name: str) -> Lines:
    scale, unit = (2**30, "GiB") if (row.figures.step_peak_bytes or 0) >= _IN_GIB else (2**20, "MiB")
    points = tuple((ms, level / scale) for ms, level in row.figures.timeline_ms_bytes or ())
    spans = tuple((phase.name, phase.start_ms, phase.end_ms) for phase in row.figures.phases or ())
    return Lines(
        f"memory-{row.case.model}-{row.case.context_length}-{row.case.mode}-{row.case.precision}",
        f"Memory of tensors over a step: {name}, batch {row.case.batch_size}",
        (("memory", points),),
        "ms since the step began, on the host's clock, while recording",
        unit,
        spans=spans,
        steps=True,
    )


def _source(results: Results) -> Words:
    """Says what recorded the timelines, with links to the snapshots."""
    if not results.on_gpu:
        return "A CPU has no caching allocator: the timelines are the memory events of torch.profiler."
    paths = [row.case.snapshot for row in results.rows_of(TARGET) if row.ok]
    paths = [path for path in paths if path.startswith("snapshots/") and ".." not in path]
    links = [link(path.rpartition("/")[2], f"{results.folder}/{path}".lstrip("/")) for path in paths]
    listed = phrase(" Snapshots for https://pytorch.org/memory_viz: {}.", joined(", ", links)) if links else ""
    return phrase("The timelines are the history of PyTorch's allocator.{}", listed)


def _code(line: SavedLine) -> Cell:
    plain = line.code.partition("  #")[0]
    return plain if len(plain) <= _LONGEST_CODE else f"{plain[: _LONGEST_CODE - 1]}…"


_SAVED_LINES: tuple[Field[SavedLine], ...] = (
    Field("line", "text", lambda line: line.source),
    Field("code", "code", _code),
    Field("tensors", "count", lambda line: line.tensors or None),
    Field("bytes", "bytes", lambda line: line.bytes),
)


BENCH = Bench(
    name="memory",
    title="memory over a step",
    summary="Memory of a forward pass and of a full step over time: peaks, and what a layer saves for backward.",
    options=(
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
    targets=(TARGET,),
    cases=_cases,
    how={
        "warm-up": "{warmup_steps} steps",
        "measured": "one step, recorded; times are medians of {steps} steps without a recorder",
        "synchronized": "at the end of each phase",
        "gradients": "none in forward alone (no_grad), recorded in a full step",
    },
    answers=_answers,
    blocks=_blocks,
    definitions=_DEFINITIONS,
)  # fmt: skip
