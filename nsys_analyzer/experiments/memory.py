"""Defines the experiment ``memory``: the memory of a step over time, its peaks, and the activations by source line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from nsys_analyzer.configuration import PRECISIONS
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import AnyRow, Bench, Results, list_option, option, scalar_options
from nsys_analyzer.experiments.section import make_row_namer, make_rows_table
from nsys_analyzer.experiments.steps import PHASES, TransformerCase
from nsys_analyzer.inputs.rows import CaseTarget
from nsys_analyzer.report.model import Block, Cell, Details, Field, Lines, make_table
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import phrase

#: A time in ms, and the bytes that are allocated from then on.
Point: TypeAlias = tuple[float, int]
#: The report folds all timelines except for the first ones, which are this many.
_UNFOLDED_TIMELINES = 2
#: Two peaks count as equal if they differ by at most this share.
_EQUAL_PEAKS_TOLERANCE = 0.001
_DEFINITIONS = phrase(
    "*Definitions.* Memory is the size that tensors requested, before the allocator rounds it up. A peak is the "
    "highest memory in the history of PyTorch's allocator. The gradients of the previous step are released when "
    "backward begins. The activations of a layer are the memory that its lines allocate in forward and that is still "
    "allocated when forward ends, without parameters. *Reserved* is the memory that the allocator holds on the GPU."
)
#: A table shows at most this many characters of a source line.
_LONGEST_SOURCE_LINE = 52


@dataclass(frozen=True)
class MemoryCase(TransformerCase):
    """One configuration of the transformer.

    Raises:
        ConfigurationError: there is no warm-up step.
    """

    device: str
    model: str = option("small", "small, medium, large, xl, 2.7B, xl-2026 or 10B")
    num_layers: int = option(0, "number of layers; 0 means the number that --model has", least=0)
    context_length: int = option(256, "tokens in a sequence")
    batch_size: int = option(4, "batch size")
    mode: str = option("train", "forward under no_grad, or all phases of a step", ("forward", "train"))
    precision: str = option("fp32", "precision; bf16 uses autocast", PRECISIONS)
    warmup_steps: int = option(3, "steps before the recorded step; the first of them allocates the optimizer's state")

    def __post_init__(self) -> None:
        if self.warmup_steps < 1:
            raise ConfigurationError("warmup_steps must be at least 1")


@dataclass(frozen=True)
class PhaseFigures:
    """The start and the end of a phase, the memory at its start, and the peak memory during the phase."""

    name: str
    start_ms: float
    end_ms: float
    start_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class SavedLine:
    """The tensors and bytes that a source line saves for backward, as means over the layers."""

    source: str
    code: str
    tensors: float
    bytes: float


@dataclass
class MemoryFigures:
    """The memory of the recorded step.

    Attributes:
        base_bytes: the memory that was allocated before the step.
        timeline_ms_bytes: times since the step began, and the bytes that are allocated from then on.
        kept_bytes: the memory that forward allocates and that is still allocated when forward ends.
        layer_saves_bytes: the memory that forward allocates in one layer and that is still allocated when forward ends,
            as a mean over the layers.
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


def _write_sentences(results: Results) -> Iterator[str]:
    name = make_row_namer(results.rows)
    rows = [row for row in results.rows if row.ok]
    if rows:
        highest_row = max(rows, key=lambda row: row.figures.step_peak_bytes or 0)
        peak = format_number(highest_row.figures.step_peak_bytes or 0, "bytes")
        yield f"The highest memory is {peak}: {name(highest_row)}, in {name_peak_phases(highest_row)}."
    if steps := [row for row in rows if row.case.mode == "train"]:
        counts = Counter(map(name_peak_phases, steps)).most_common()
        phases = ", ".join(f"{phase} ({count} of {len(steps)})" for phase, count in counts)
        yield f"The memory of a full step peaks in {phases}."
        highest_row = max(steps, key=_read_saved_bytes)
        saved_size = format_number(_read_saved_bytes(highest_row), "bytes")
        yield f"A layer saves up to {saved_size} of activations for backward ({name(highest_row)})."


def name_peak_phases(row: AnyRow) -> str:
    """Returns the phase in which memory peaks. Phases with equal peaks are joined by "and"."""
    phases = row.figures.phases or []
    peak_bytes = max(phase.peak_bytes for phase in phases)
    phases_at_peak = [phase for phase in phases if phase.peak_bytes >= peak_bytes * (1 - _EQUAL_PEAKS_TOLERANCE)]
    rising_phases = [
        phase.name for phase in phases_at_peak if phase.peak_bytes > phase.start_bytes * (1 + _EQUAL_PEAKS_TOLERANCE)
    ]
    return " and ".join(rising_phases or [phases_at_peak[0].name])


def _read_saved_bytes(row: AnyRow) -> float:
    return row.figures.layer_saves_bytes or 0


def _make_tables_and_charts(results: Results) -> Iterator[Block]:
    rows = results.rows
    name, finished_rows = make_row_namer(rows), [row for row in rows if row.ok]
    yield make_rows_table(
        rows, "Memory of tensors before the step, the peak of each phase, and the reserved memory:",
        ("before", "bytes", "base_bytes"),
        *((phase, "bytes", partial(_find_peak_bytes, name=phase)) for phase in PHASES),
        ("reserved", "bytes", "reserved_peak_bytes"),
    )  # fmt: skip
    # Each model, mode and precision has a timeline, of its longest context. Full steps and large models come first.
    rows_by_context = sorted(finished_rows, key=lambda row: row.case.context_length)
    rows_of_longest_context = {
        (row.case.model, row.case.mode, row.case.precision): row for row in rows_by_context
    }.values()
    drawn_rows = sorted(
        rows_of_longest_context, key=lambda row: (row.case.mode != "train", -(row.figures.base_bytes or 0))
    )
    timelines = tuple(_make_timeline(row, name(row)) for row in drawn_rows)
    yield from timelines[:_UNFOLDED_TIMELINES]
    if timelines[_UNFOLDED_TIMELINES:]:
        yield Details("More timelines", timelines[_UNFOLDED_TIMELINES:])
    if training_rows := [row for row in finished_rows if row.case.mode == "train"]:
        yield make_rows_table(
            training_rows,
            "Memory saved for backward (activations):",
            ("one layer", "bytes", "layer_saves_bytes"),
            ("all layers", "bytes", lambda row: _read_saved_bytes(row) * row.case.size.num_layers),
            ("whole forward pass", "bytes", "kept_bytes"),
        )
        highest_row = max(training_rows, key=_read_saved_bytes)
        caption = f"{name(highest_row)}: activations by the source line that allocated them, mean over the layers:"
        lines = [*(highest_row.figures.layer_saves or ()), SavedLine("sum", "", 0, _read_saved_bytes(highest_row))]
        yield Details("Activations of a layer by source line", (make_table(_SAVED_LINE_FIELDS, lines, caption),))


def _find_peak_bytes(row: AnyRow, name: str) -> Cell:
    """Returns the peak of the GPU memory that is allocated during a phase, bytes."""
    return next((phase.peak_bytes for phase in row.figures.phases or () if phase.name == name), None)


def _make_timeline(row: AnyRow, name: str) -> Lines:
    points = tuple((ms, level / 2**30) for ms, level in row.figures.timeline_ms_bytes or ())
    spans = tuple((phase.name, phase.start_ms, phase.end_ms) for phase in row.figures.phases or ())
    return Lines(
        f"memory-{row.case.model}-{row.case.context_length}-{row.case.mode}-{row.case.precision}",
        f"Memory of tensors during a step: {name}, batch {row.case.batch_size}",
        (("memory", points),),
        "ms since the step began, while recording",
        "GiB",
        spans=spans,
        steps=True,
    )


def _shorten_source_line(line: SavedLine) -> Cell:
    code = line.code.partition("  #")[0]
    return code if len(code) <= _LONGEST_SOURCE_LINE else f"{code[: _LONGEST_SOURCE_LINE - 1]}…"


_SAVED_LINE_FIELDS: tuple[Field[SavedLine], ...] = (
    Field("line", "text", lambda line: line.source),
    Field("code", "code", _shorten_source_line),
    Field("tensors", "count", lambda line: line.tensors or None),
    Field("bytes", "bytes", lambda line: line.bytes),
)


BENCH = Bench(
    name="memory",
    title="memory over a step",
    summary="Records the memory of a forward pass and of a training step on a GPU: peaks, and activations by line.",
    options=(
        list_option(MemoryCase, "model", ("small", "large"), ("small",), help="model sizes"),
        list_option(MemoryCase, "context_length", (128, 256, 512)),
        list_option(MemoryCase, "mode", ("forward", "train")),
        list_option(MemoryCase, "precision", ("fp32", "bf16")),
        *scalar_options(MemoryCase, "num_layers", "batch_size", "warmup_steps"),
    ),
    target=TARGET,
    conditions={
        "warm-up": "{warmup_steps} steps",
        "measured": "one step, recorded",
        "synchronized": "at the end of each phase",
        "gradients": "not recorded in mode forward (no_grad), recorded in a full step",
    },
    write_sentences=_write_sentences,
    make_tables_and_charts=_make_tables_and_charts,
    definitions=_DEFINITIONS,
)
