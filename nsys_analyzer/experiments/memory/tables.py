"""Tables of the experiment ``memory``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nsys_analyzer.experiments.memory.case import Holder, MemoryRow, SavedLine, run_name
from nsys_analyzer.experiments.model import Results, known
from nsys_analyzer.experiments.section import ratio
from nsys_analyzer.experiments.steps import PHASES
from nsys_analyzer.report.model import Block, Cell, Details, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import phrase

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary.device_memory import DeviceMemory
    from nsys_analyzer.analysis.summary.summary import CaptureSummary

_LONGEST_CODE = 52


def _figure(name: str) -> Callable[[MemoryRow], Cell]:
    return lambda row: getattr(row.figures, name)


_RUN: Field[MemoryRow] = Field("run", "text", run_name)
_PEAKS: tuple[Field[MemoryRow], ...] = (
    _RUN,
    *(Field(name, "bytes", _figure(f"{name}_peak_bytes")) for name in PHASES),
    Field("status", "text", lambda row: row.status),
)


def peaks(rows: Sequence[MemoryRow]) -> Table:
    """The peak of each phase of each run."""
    return table(_PEAKS, rows, "Peak memory of tensors in each phase (a run is model, context, mode, precision):")


_ALLOCATOR: tuple[Field[MemoryRow], ...] = (
    _RUN,
    Field("before the step", "bytes", _figure("base_bytes")),
    Field("asked for", "bytes", _figure("step_peak_bytes")),
    Field("handed out", "bytes", _figure("allocated_peak_bytes")),
    Field("reserved", "bytes", _figure("reserved_peak_bytes")),
    Field("handed out ÷ reserved", "percent", lambda row: _use_of_reserved(row)),
    Field("free between tensors", "bytes", _figure("inactive_split_peak_bytes")),
    Field("step ms", "ms", _figure("step_ms")),
    Field("cold ms", "ms", _figure("cold_step_ms")),
    Field("cold ÷ step", "factor", lambda row: ratio(row.figures.cold_step_ms, row.figures.step_ms)),
    Field("cudaMalloc", "count", _figure("cold_device_calls")),
)


def _use_of_reserved(row: MemoryRow) -> float | None:
    return ratio(row.figures.allocated_peak_bytes, row.figures.reserved_peak_bytes)


def allocator(rows: Sequence[MemoryRow]) -> Details:
    """Memory between steps and in the allocator, and the cost of an empty cache."""
    caption = (
        "Memory before the step, and the peak of each kind in it. On a GPU tensors ask for memory, and the allocator "
        "hands it out rounded up; what is free between tensors is fragmentation, as an upper bound. Cold is a step "
        "after torch.cuda.empty_cache(), with its calls of cudaMalloc."
    )
    measured = [row for row in rows if row.ok]
    return Details("The allocator, and the cost of an empty cache", (table(_ALLOCATOR, measured, caption),))


_LAYERS: tuple[Field[MemoryRow], ...] = (
    _RUN,
    Field("residual", "bytes", _figure("residual_seen_bytes")),
    Field("a layer saves", "bytes", _figure("layer_saves_bytes")),
    Field("÷ by shapes", "factor", lambda row: _saved(row) / known(row.figures.layer_saves_by_shapes_bytes)),
    Field("all layers", "bytes", lambda row: _saved(row) * row.case.size.num_layers),
    Field("forward", "bytes", _figure("kept_bytes")),
)


def _saved(row: MemoryRow) -> float:
    return known(row.figures.layer_saves_bytes)


def layers(rows: Sequence[MemoryRow]) -> tuple[Block, ...]:
    """Memory that a layer saves for backward, and of the largest line by line."""
    trained = [row for row in rows if row.ok and row.case.trains]
    if not trained:
        return ()
    caption = "The residual stream, and the memory that one layer, all layers and all of forward save for backward:"
    row = max(trained, key=_saved)
    lines = [*known(row.figures.layer_saves), SavedLine("sum", "", 0, _saved(row))]
    by_line = f"{run_name(row)}: alive at the end of forward, by the line that asked for it, mean of the layers:"
    details = Details("What a layer saves for backward", (table(_SAVED_LINES, lines, by_line),))
    return (table(_LAYERS, trained, caption), details)


def _code(one: Holder | SavedLine) -> str:
    plain = one.code.partition("  #")[0]
    return plain if len(plain) <= _LONGEST_CODE else f"{plain[: _LONGEST_CODE - 1]}…"


_LINE: tuple[Field[Any], ...] = (
    Field("line", "text", lambda one: one.source or "autograd"),
    Field("code", "code", _code),
)
_SAVED_LINES: tuple[Field[SavedLine], ...] = (
    *_LINE,
    Field("tensors", "count", lambda one: one.tensors or None),
    Field("bytes", "bytes", lambda one: one.bytes),
)
_HOLDERS: tuple[Field[Holder], ...] = (
    *_LINE,
    Field("phase", "text", lambda one: one.phase),
    Field("each", "bytes", lambda one: one.bytes),
    Field("number", "count", lambda one: one.count),
    Field("at the peak", "count", lambda one: one.at_peak),
)


def holders(rows: Sequence[MemoryRow]) -> tuple[Block, ...]:
    """The largest allocations of some runs, with the lines that asked for them."""
    words = "the largest allocations, and how many of them were alive at the step's peak"
    tables = [table(_HOLDERS, known(row.figures.largest), f"{run_name(row)}: {words}:") for row in rows]
    return (Details("Largest allocations", tuple(tables)),) if tables else ()


def _memory(capture: CaptureSummary) -> DeviceMemory:
    return known(capture.device_memory)


_CAPTURED: tuple[Field[CaptureSummary], ...] = (
    Field("capture", "text", lambda one: one.title),
    Field("events are of", "text", lambda one: "tensors" if _memory(one).of_tensors else "cudaMalloc"),
    Field("in use before", "bytes", lambda one: _memory(one).before_bytes),
    Field("peak", "bytes", lambda one: _memory(one).peak_bytes),
    Field("allocations", "count", lambda one: _memory(one).allocations),
    Field("frees", "count", lambda one: _memory(one).frees),
)


def captured(results: Results) -> tuple[Block, ...]:
    """The profiler's view of device memory, beside the allocator's."""
    seen = [capture for capture in results.captures if capture.device_memory]
    caption = phrase(
        "Memory events of the profiler, over the measured steps. nsys sees cudaMalloc and cudaFree: the segments that "
        "PyTorch's allocator reserves (*reserved* above), never the tensors in them; the PyTorch profiler sees tensors:"
    )
    return (table(_CAPTURED, seen, caption),) if seen else ()
