"""Memory of a forward pass and of a full step over time: peaks, and what layers save for backward, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from nsys_analyzer.configuration import PRECISIONS
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import AnyRow, Bench, Results, option, several, single
from nsys_analyzer.experiments.section import Column, namer, rows_table
from nsys_analyzer.experiments.steps import PHASES, OfModel
from nsys_analyzer.inputs.rows import CaseTarget
from nsys_analyzer.report.model import Block, Cell, Details, Field, Lines, make_table
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import phrase

#: Time in ms, and the bytes allocated from then on.
Point: TypeAlias = tuple[float, int]
_UNFOLDED = 2
#: How far two peaks that pass for equal may lie apart.
_TOLERANCE = 0.001
_DEFINITIONS = phrase(
    "*Definitions.* Memory is what tensors asked for, before the allocator rounds it up; a peak is the most at any "
    "moment, as the history of PyTorch's allocator has it. Where backward begins, the gradients of the step before are "
    "freed. A layer saves what its lines allocate in forward and what is alive at forward's end, without parameters. "
    "*Reserved* is what the allocator took of the GPU."
)
_LONGEST_CODE = 52


@dataclass(frozen=True)
class MemoryCase(OfModel):
    """One configuration of the transformer.

    Raises:
        ConfigurationError: no step to warm up.
    """

    device: str
    model: str = option("small", "small, medium, large, xl, 2.7B, xl-2026 or 10B")
    num_layers: int = option(0, "in place of the model's; 0 is its own", least=0)
    context_length: int = option(256, "tokens")
    batch_size: int = option(4, "batch size")
    mode: str = option("train", "forward under no_grad, or all phases of a step", ("forward", "train"))
    precision: str = option("fp32", "bf16 is autocast", PRECISIONS)
    warmup_steps: int = option(3, "steps before the recorded one; the first makes the optimizer's moments")

    def __post_init__(self) -> None:
        if self.warmup_steps < 1:
            raise ConfigurationError("warmup_steps must be at least 1")


@dataclass(frozen=True)
class PhaseFigures:
    """Memory in one phase: at its start, and its peak."""

    name: str
    start_ms: float
    end_ms: float
    start_bytes: int
    peak_bytes: int


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
        base_bytes: allocated before the step.
        timeline_ms_bytes: time since the step began, and bytes from then on.
        kept_bytes, layer_saves_bytes: allocated in forward and alive at its end: all, and that of a layer.
    """

    base_bytes: int | None = None
    step_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    timeline_ms_bytes: list[Point] | None = None
    phases: list[PhaseFigures] | None = None
    kept_bytes: int | None = None
    layer_saves_bytes: float | int | None = None
    layer_saves: list[SavedLine] | None = None


TARGET = CaseTarget("profiling_targets.memory_history", MemoryCase, MemoryFigures)


def _answers(results: Results) -> Iterator[str]:
    name = namer(results.rows)
    rows = [row for row in results.rows if row.ok]
    if rows:
        top = max(rows, key=lambda row: row.figures.step_peak_bytes or 0)
        peak = format_number(top.figures.step_peak_bytes or 0, "bytes")
        yield f"Memory is highest in {name(top)}: {peak}, in {phase_of_peak(top)}."
    if steps := [row for row in rows if row.case.mode == "train"]:
        counted = Counter(map(phase_of_peak, steps)).most_common()
        listed = ", ".join(f"{phase} ({count} of {len(steps)})" for phase, count in counted)
        yield f"The peak of a full step is in {listed}."
        top = max(steps, key=_saved)
        yield f"A layer saves up to {format_number(_saved(top), 'bytes')} of activations for backward ({name(top)})."


def phase_of_peak(row: AnyRow) -> str:
    """Returns the phase in which memory is highest; of several with the same peak those that rise to it."""
    phases = row.figures.phases or []
    top = max(phase.peak_bytes for phase in phases)
    tied = [phase for phase in phases if phase.peak_bytes >= top * (1 - _TOLERANCE)]
    rising = [phase.name for phase in tied if phase.peak_bytes > phase.start_bytes * (1 + _TOLERANCE)]
    return " and ".join(rising or [tied[0].name])


def _saved(row: AnyRow) -> float:
    return row.figures.layer_saves_bytes or 0


def _blocks(results: Results) -> Iterator[Block]:
    rows = results.rows
    name, ok = namer(rows), [row for row in rows if row.ok]
    yield rows_table(
        rows, "Memory of tensors before the step and the peak of each phase, and what was reserved:",
        ("before", "bytes", "base_bytes"), *(_peak_of(phase) for phase in PHASES),
        ("reserved", "bytes", "reserved_peak_bytes"),
    )  # fmt: skip
    # Of each model, mode and precision the row of the longest context, full steps and those of most memory first.
    ordered = sorted(ok, key=lambda row: row.case.context_length)
    longest = {(row.case.model, row.case.mode, row.case.precision): row for row in ordered}.values()
    shown = sorted(longest, key=lambda row: (row.case.mode != "train", -(row.figures.base_bytes or 0)))
    timelines = tuple(_timeline(row, name(row)) for row in shown)
    yield from timelines[:_UNFOLDED]
    if timelines[_UNFOLDED:]:
        yield Details("More timelines", timelines[_UNFOLDED:])
    if trained := [row for row in ok if row.case.mode == "train"]:
        yield rows_table(
            trained,
            "The memory that one layer, all layers and all of forward save for backward:",
            ("a layer saves", "bytes", "layer_saves_bytes"),
            ("all layers", "bytes", lambda row: _saved(row) * row.case.size.num_layers),
            ("forward", "bytes", "kept_bytes"),
        )
        top = max(trained, key=_saved)
        by_line = f"{name(top)}: alive at the end of forward, by the line that asked for it, mean of the layers:"
        lines = [*(top.figures.layer_saves or ()), SavedLine("sum", "", 0, _saved(top))]
        yield Details("What a layer saves for backward", (make_table(_SAVED_LINES, lines, by_line),))


def _peak_of(phase: str) -> Column:
    def peak(row: AnyRow) -> Cell:
        return next((one.peak_bytes for one in row.figures.phases or () if one.name == phase), None)

    return phase, "bytes", peak


def _timeline(row: AnyRow, name: str) -> Lines:
    points = tuple((ms, level / 2**30) for ms, level in row.figures.timeline_ms_bytes or ())
    spans = tuple((phase.name, phase.start_ms, phase.end_ms) for phase in row.figures.phases or ())
    return Lines(
        f"memory-{row.case.model}-{row.case.context_length}-{row.case.mode}-{row.case.precision}",
        f"Memory of tensors over a step: {name}, batch {row.case.batch_size}",
        (("memory", points),),
        "ms since the step began, on the host's clock, while recording",
        "GiB",
        spans=spans,
        steps=True,
    )


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
    summary="Memory of a forward pass and of a full step over time, on a GPU: peaks, and what a layer saves for "
    "backward.",
    options=(
        several(MemoryCase, "model", ("small", "large"), ("small",), help="models"),
        several(MemoryCase, "context_length", (128, 256, 512)),
        several(MemoryCase, "mode", ("forward", "train")),
        several(MemoryCase, "precision", ("fp32", "bf16")),
        *single(MemoryCase, "num_layers", "batch_size", "warmup_steps"),
    ),
    target=TARGET,
    how={
        "warm-up": "{warmup_steps} steps",
        "measured": "one step, recorded",
        "synchronized": "at the end of each phase",
        "gradients": "none in forward alone (no_grad), recorded in a full step",
    },
    answers=_answers,
    blocks=_blocks,
    definitions=_DEFINITIONS,
)
