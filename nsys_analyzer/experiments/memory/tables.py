"""The tables of the memory bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.transformer.saved_tensors import Saved, saved_by_layer
from nsys_analyzer.experiments.memory.case import Holder, MemoryRow, PhaseFigures, SavedLine, run_name
from nsys_analyzer.experiments.memory.facts import limit_of, paces_of, phases_of, slopes_of
from nsys_analyzer.experiments.memory.timeline import ALLOCATOR_SHARE, WAITING_SHARE
from nsys_analyzer.experiments.model import Results, known
from nsys_analyzer.report.model import Block, Cell, Details, Paragraph, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import percent
from nsys_analyzer.text import phrase

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary.device_memory import DeviceMemory

_PHASES = ("forward", "loss", "backward", "optimizer")
_AUTOGRAD = "autograd"
_LONGEST_CODE = 60
#: What the columns of the slopes mean, wherever it ran, and on a GPU besides.
_RULE = (
    "Memory changes as work is issued: a third is one of the time from a phase's start to its last allocation or free, "
    "on the host's clock while recording, which slows the host down; below zero memory falls. Backward counts from "
    "where the gradients of the step before are freed. Over the wall is all that a phase changes over its whole time "
    "without a recorder. Forward alone keeps nothing: its curve is a sawtooth, with falls of a tenth of its height or "
    "more; up and down are bytes over time of all rises and all falls. The allocator's part is of the time to issue, "
    "and an upper bound: its calls, each as long as torch.empty took alone, Python and the free included, and the time "
    "up to each cudaMalloc."
)
_RULE_ON_GPU = (
    "What a phase waits for is not what makes its slope. A tensor's memory is handed out when its kernel is launched: "
    "the curve has the host's pace while the GPU keeps up, and also where it does not until the launch queue is full; "
    "from then on it has the GPU's. Waiting is the share of the wall in which all is issued and the GPU still works. "
    f"From {percent(WAITING_SHARE)} of it on a phase waits for the GPU; else, from {percent(ALLOCATOR_SHARE)} of the "
    "time to issue in the allocator on, for the allocator; else for the host: Python and launches. That is no claim of "
    "GPU-bound, memory-bound or compute-bound, which take the GPU's busy time, its bytes/s and its FLOP/s."
)
_RULE_ON_CPU = (
    "A CPU issues and computes in one: a phase waits for the CPU, or for the allocator where that takes "
    f"{percent(ALLOCATOR_SHARE)} of it or more."
)


def _figure(name: str) -> Callable[[MemoryRow], Cell]:
    return lambda row: getattr(row.figures, name)


_RUN: Field[MemoryRow] = Field("run", "text", run_name)


def peaks(results: Results, rows: Sequence[MemoryRow]) -> Table:
    """The peak of each phase of each run, and what the allocator had reserved."""
    fields: tuple[Field[MemoryRow], ...] = (
        _RUN,
        *(Field(name, "bytes", _figure(f"{name}_peak_bytes")) for name in _PHASES),
        Field("reserved", "bytes", _figure("reserved_peak_bytes")),
        Field("unused", "percent", _unused),
        Field("status", "text", lambda row: row.status),
    )
    caption = "Most memory that tensors had in each phase (a run is model, context length, mode, precision)"
    said = ". Reserved is what PyTorch's allocator held of the device, unused the part of it beyond the tensors' peak"
    return table(fields, rows, f"{caption}{said if results.on_gpu else ''}:")


def _unused(row: MemoryRow) -> float | None:
    """The part of what the allocator reserved that its tensors' peak leaves."""
    reserved, allocated = row.figures.reserved_peak_bytes, row.figures.allocated_peak_bytes
    return 1 - allocated / reserved if reserved and allocated else None


_RESERVED: tuple[Field[MemoryRow], ...] = (
    _RUN,
    Field("before the step", "bytes", _figure("base_bytes")),
    Field("asked for", "bytes", _figure("step_peak_bytes")),
    Field("handed out", "bytes", _figure("allocated_peak_bytes")),
    Field("reserved", "bytes", _figure("reserved_peak_bytes")),
    Field("free between tensors", "bytes", _figure("inactive_split_peak_bytes")),
)


def reserved(results: Results, rows: Sequence[MemoryRow]) -> tuple[Block, ...]:
    """What is there between steps, and on a GPU how the allocator held it."""
    measured = [row for row in rows if row.ok]
    if not measured:
        return ()
    said = (
        " Handed out is what was asked for, rounded up. Free between tensors is what lies unused in segments that are "
        "in use, and so cannot go back to the driver: fragmentation, at most; it is no part of what was handed out, "
        "and need not be at its most when the rest is."
    )
    on_gpu = results.on_gpu
    caption = f"Memory between steps, and the highest of each kind in the recorded step.{said if on_gpu else ''}"
    title = "What the allocator held" if on_gpu else "Memory between steps"
    return (Details(title, (table(_RESERVED, measured, caption),)),)


_LAYERS: tuple[Field[MemoryRow], ...] = (
    _RUN,
    Field("residual", "bytes", _figure("residual_seen_bytes")),
    Field("by shape", "bytes", _figure("residual_bytes")),
    Field("a layer saves", "bytes", _figure("layer_saves_bytes")),
    Field("by shapes", "bytes", _figure("layer_saves_by_shapes_bytes")),
    Field("ratio", "factor", lambda row: _saved(row) / known(row.figures.layer_saves_by_shapes_bytes)),
    Field("all layers", "bytes", lambda row: _saved(row) * row.case.size.num_layers),
    Field("forward", "bytes", _figure("kept_bytes")),
)


def _saved(row: MemoryRow) -> float:
    return known(row.figures.layer_saves_bytes)


def layers(rows: Sequence[MemoryRow]) -> tuple[Block, ...]:
    """The residual stream, what a layer saves for backward, and for the largest of them the two sums line by line."""
    trained = [row for row in rows if row.ok and row.case.trains]
    if not trained:
        return ()
    caption = "The residual stream, and what one layer, all layers and all of forward save for backward:"
    largest = max(trained, key=_saved)
    return (table(_LAYERS, trained, caption), Details("What a layer saves for backward", _layer(largest)))


_SAVED_LINES: tuple[Field[SavedLine], ...] = (
    Field("line", "text", lambda one: _place(one.source)),
    Field("code", "code", lambda one: _code(one.code)),
    Field("tensors", "count", lambda one: one.tensors or None),
    Field("bytes", "bytes", lambda one: one.bytes),
)
_SAVED_TENSORS: tuple[Field[Saved], ...] = (
    Field("tensor", "text", lambda one: one.name),
    Field("shape", "text", lambda one: one.shape),
    Field("bytes", "bytes", lambda one: one.bytes),
)


def _layer(row: MemoryRow) -> tuple[Block, ...]:
    """The two sums of one row: by the lines that asked for memory, and by the shapes."""
    case = row.case
    lines = [*known(row.figures.layer_saves), SavedLine("sum", "", 0, _saved(row))]
    saved = saved_by_layer(case.size, case.batch_size, case.context_length, case.precision, case.device == "cuda")
    by_shape = [*saved, Saved("sum", "", sum(one.bytes for one in saved))]
    caption = f"{run_name(row)}: alive at the end of forward, by the line that asked for it, mean of the layers:"
    return (
        table(_SAVED_LINES, lines, caption),
        table(_SAVED_TENSORS, by_shape, "By the shapes; autograd saves what the derivative of each operation needs:"),
    )


_HOLDERS: tuple[Field[Holder], ...] = (
    Field("line", "text", lambda one: _place(one.source)),
    Field("code", "code", lambda one: _code(one.code)),
    Field("phase", "text", lambda one: one.phase),
    Field("each", "bytes", lambda one: one.bytes),
    Field("number", "count", lambda one: one.count),
    Field("at the peak", "count", lambda one: one.at_peak),
)


def holders(rows: Sequence[MemoryRow]) -> tuple[Block, ...]:
    """The largest allocations of some runs, with the lines that asked for them."""
    words = "the largest, and how many of them were alive at the step's peak"
    tables = [table(_HOLDERS, known(row.figures.largest), f"{run_name(row)}: {words}:") for row in rows]
    return (Details("Largest allocations", tuple(tables)),) if tables else ()


def _place(source: str) -> str:
    return source or _AUTOGRAD


def _code(code: str) -> str:
    plain = code.partition("  #")[0]
    return plain if len(plain) <= _LONGEST_CODE else f"{plain[: _LONGEST_CODE - 1]}…"


@dataclass(frozen=True)
class _Slope:
    """A phase of a run, and how fast its memory changes, in bytes/s: first third, last third, over the wall."""

    row: MemoryRow
    phase: PhaseFigures
    paces: tuple[float | None, float | None, float | None]


_WAITS: tuple[Field[_Slope], ...] = (
    Field("issue", "ms", lambda one: one.phase.issue_ms),
    Field("wall", "ms", lambda one: one.phase.wall_ms),
    Field("allocator", "percent", lambda one: one.phase.allocator_ms / one.phase.issue_ms),
    Field("waiting", "percent", lambda one: max(1 - one.phase.issue_ms / one.phase.wall_ms, 0)),
    Field("waits for", "text", lambda one: limit_of(one.row, one.phase)),
)
_STEADY: tuple[Field[_Slope], ...] = (
    Field("run", "text", lambda one: run_name(one.row)),
    Field("phase", "text", lambda one: one.phase.name),
    Field("first third", "bytes/s", lambda one: one.paces[0]),
    Field("last third", "bytes/s", lambda one: one.paces[1]),
    Field("over the wall", "bytes/s", lambda one: one.paces[2]),
    *_WAITS,
)
_JAGGED: tuple[Field[_Slope], ...] = (
    Field("run", "text", lambda one: run_name(one.row)),
    Field("up", "bytes/s", lambda one: _per_s(one.phase.rise_bytes_per_ms)),
    Field("down", "bytes/s", lambda one: _per_s(one.phase.fall_bytes_per_ms)),
    Field("falls", "count", lambda one: one.phase.teeth),
    *_WAITS,
)


def _per_s(per_ms: float | None) -> float | None:
    return None if per_ms is None else per_ms * 1e3


def slopes(results: Results, rows: Sequence[MemoryRow]) -> tuple[Block, ...]:
    """How fast memory rises and falls in forward and backward, what they wait for, and what an empty cache costs."""
    found = [_Slope(row, phase, paces_of(row, phase)) for row, phase in slopes_of(rows)]
    if not found:
        return ()
    trained, alone = ([one for one in found if one.row.case.trains is wanted] for wanted in (True, False))
    tables = (
        table(_STEADY, trained, "Full steps: how fast memory changes, and what the phase waits for:", names=2),
        table(_JAGGED, alone, "Forward alone: its sawtooth, and what it waits for:"),
    )
    rule = f"{_RULE} {_RULE_ON_GPU if results.on_gpu else _RULE_ON_CPU}"
    return (Details("Slopes", (*(one for one in tables if one.rows), Paragraph(rule))), *_cold(rows))


_COLD: tuple[Field[MemoryRow], ...] = (
    _RUN,
    Field("warm ms", "ms", _figure("step_ms")),
    Field("cold ms", "ms", _figure("cold_step_ms")),
    Field("ratio", "factor", lambda row: known(row.figures.cold_step_ms) / known(row.figures.step_ms)),
    Field("cudaMalloc", "count", _figure("cold_device_calls")),
)


def _more(name: str, row: MemoryRow) -> float | None:
    """The milliseconds that a phase takes more with an empty cache."""
    phase = next((one for one in phases_of(row) if one.name == name), None)
    return phase.cold_ms - phase.wall_ms if phase and phase.cold_ms else None


def _cold(rows: Sequence[MemoryRow]) -> tuple[Block, ...]:
    """A step whose allocator has an empty cache beside a usual one, and in which of its phases it loses the time."""
    cold = [row for row in rows if row.figures.cold_step_ms]
    if not cold:
        return ()
    more = tuple(Field(f"more in {name}", "ms", partial(_more, name)) for name in _PHASES)
    caption = (
        "The same step after torch.cuda.empty_cache(), when the allocator must ask the driver for all memory; one cold "
        "step against the median of warm ones:"
    )
    return (Details("With an empty cache", (table((*_COLD, *more), cold, caption),)),)


@dataclass(frozen=True)
class _Captured:
    """The memory events of a capture."""

    title: str
    memory: DeviceMemory


_CAPTURED: tuple[Field[_Captured], ...] = (
    Field("capture", "text", lambda one: one.title),
    Field("events are of", "text", lambda one: "tensors" if one.memory.of_tensors else "cudaMalloc"),
    Field("in use before", "bytes", lambda one: one.memory.before_bytes),
    Field("peak", "bytes", lambda one: one.memory.peak_bytes),
    Field("allocations", "count", lambda one: one.memory.allocations),
    Field("frees", "count", lambda one: one.memory.frees),
)


def captured(results: Results) -> tuple[Block, ...]:
    """The profiler's view of device memory, beside the allocator's."""
    seen = [_Captured(one.title, one.device_memory) for one in results.captures if one.device_memory]
    caption = phrase(
        "Memory events of the profiler, over the measured steps. nsys sees cudaMalloc and cudaFree: the segments that "
        "PyTorch's allocator reserves, never the tensors in them. Compare its peak with *reserved* above; without "
        "nsys the PyTorch profiler records tensors instead:"
    )
    return (table(_CAPTURED, seen, caption),) if seen else ()
