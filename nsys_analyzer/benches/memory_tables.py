"""The tables of the memory bench."""

from __future__ import annotations

from collections.abc import Sequence

from nsys_analyzer.analysis.memory_timeline import ALLOCATOR_SHARE, WAITING_SHARE
from nsys_analyzer.analysis.saved_tensors import saved_by_layer
from nsys_analyzer.benches.memory_facts import bound_of, run_name, size_of, sloped, trained
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.report.model import Block, Cell, Column, Details, Paragraph, Table
from nsys_analyzer.report.units import percent

_PHASES = ("forward", "loss", "backward", "optimizer")
_AUTOGRAD = "autograd"
_LONGEST_CODE = 60
#: What the columns of the slopes mean.
_RULE = (
    "A tooth is a fall by a tenth of the phase's height or more; up and down are bytes over time of the rises and "
    "of the falls, on the host's clock while recording. The allocator's share is its calls, each as long as one "
    "that its cache serves took alone, and the time up to each cudaMalloc; waits is the share of the phase in "
    f"which all work is issued and the GPU still works. From {percent(ALLOCATOR_SHARE)} on the slope is "
    f"allocator-bound; else from {percent(WAITING_SHARE)} of waiting on, and always on a CPU, compute-bound; "
    "else launch-bound: neither, but Python and launches. A tensor's memory is handed out when its kernel is "
    "launched: where the GPU is behind, the curve runs ahead of it."
)


def peaks(results: Results) -> Table:
    """The peak of each phase of each run, and what the allocator had reserved."""
    reserving = (Column("reserved", "bytes"), Column("unused", "percent")) if results.on_gpu else ()
    columns = (Column("run"), *(Column(name, "bytes") for name in _PHASES), *reserving, Column("status"))
    rows = []
    for row in results.rows:
        cells = [row.figures.get(f"{name}_peak_bytes") for name in _PHASES]
        rows.append((run_name(row), *cells, *(_reserved(row) if reserving else ()), row.status))
    caption = "Most memory that tensors had in each phase (a run is model, context length, mode, precision)"
    said = ". Reserved is what PyTorch's allocator held of the device, unused the part of it beyond the tensors' peak"
    return Table(columns, tuple(rows), f"{caption}{said if reserving else ''}:")


def _reserved(row: Row) -> tuple[float | None, float | None]:
    """The peak of what the allocator reserved, and the part of it that its tensors' peak leaves."""
    reserved, allocated = (row.figures.get(f"{key}_peak_bytes") for key in ("reserved", "allocated"))
    return reserved, 1 - allocated / reserved if reserved and allocated else None


def layers(results: Results) -> tuple[Block, ...]:
    """The residual stream, what a layer keeps for backward, and for the largest of them the two sums line by line."""
    rows = [row for row in results.rows if row.ok and trained(row)]
    if not rows:
        return ()
    columns = (
        Column("run"), Column("residual", "bytes"), Column("by shape", "bytes"), Column("a layer keeps", "bytes"),
        Column("by shapes", "bytes"), Column("ratio", "factor"), Column("all layers", "bytes"),
    )  # fmt: skip
    cells = []
    for row in rows:
        figures, count = row.figures, size_of(row).num_layers
        kept, expected = figures["layer_saves_bytes"], figures["layer_saves_by_shapes_bytes"]
        residual = figures["residual_seen_bytes"], figures["residual_bytes"]
        cells.append((run_name(row), *residual, kept, expected, kept / expected, kept * count))
    caption = "The residual stream, and what one layer keeps from forward for backward, recorded and by its shapes:"
    largest = max(rows, key=lambda row: float(row.figures["layer_saves_bytes"]))
    return (Table(columns, tuple(cells), caption), Details("What a layer keeps", _layer(largest)))


def _layer(row: Row) -> tuple[Block, ...]:
    """The two sums of one row: by the lines that asked for memory, and by the shapes."""
    by_line = tuple(
        (_place(one["source"]), _code(one["code"]), one["tensors"], one["bytes"]) for one in row.figures["layer_saves"]
    )
    case = row.case
    on_gpu = case["device"] == "cuda"
    saved = saved_by_layer(size_of(row), case["batch_size"], case["context_length"], case["precision"], on_gpu)
    by_shape = tuple((one.name, one.shape, one.bytes) for one in saved)
    lines = (Column("line"), Column("code", "code"), Column("tensors", "count"), Column("bytes", "bytes"))
    return (
        Table(lines, (*by_line, ("sum", "", None, row.figures["layer_saves_bytes"])),
              f"{run_name(row)}: alive at the end of forward, by the line that asked for it, mean of the layers:"),
        Table((Column("tensor"), Column("shape"), Column("bytes", "bytes")),
              (*by_shape, ("sum", "", sum(one.bytes for one in saved))),
              "By the shapes; autograd keeps what the derivative of each operation needs:"),
    )  # fmt: skip


def holders(rows: Sequence[Row]) -> tuple[Block, ...]:
    """The largest allocations of some runs, with the lines that asked for them."""
    columns = (
        Column("line"), Column("code", "code"), Column("phase"), Column("each", "bytes"), Column("number", "count"),
        Column("at the peak", "count"),
    )  # fmt: skip
    tables = [
        Table(
            columns,
            tuple(
                (_place(one["source"]), _code(one["code"]), one["phase"], one["bytes"], one["count"], one["at_peak"])
                for one in row.figures["largest"]
            ),
            f"{run_name(row)}: the largest, and how many of them were alive at the step's peak:",
        )
        for row in rows
    ]
    return (Details("Largest allocations", tuple(tables)),) if tables else ()


def _place(source: str) -> str:
    return source or _AUTOGRAD


def _code(code: str) -> str:
    plain = code.partition("  #")[0]
    return plain if len(plain) <= _LONGEST_CODE else f"{plain[: _LONGEST_CODE - 1]}…"


def slopes(results: Results) -> tuple[Block, ...]:
    """How fast memory rises and falls in forward and backward, what limits it, and what an empty cache costs."""
    found = list(sloped(results))
    if not found:
        return ()
    columns = (
        Column("run"), Column("phase"), Column("up", "bytes/s"), Column("down", "bytes/s"), Column("teeth", "count"),
        Column("wall", "ms"), Column("allocator", "percent"), Column("waits", "percent"), Column("slope is"),
    )  # fmt: skip
    rows = []
    for row, phase in found:
        speeds = [value and value * 1e3 for value in (phase["rise_bytes_per_ms"], phase["fall_bytes_per_ms"])]
        wall_ms = phase["wall_ms"]
        shares = phase["allocator_ms"] / wall_ms, max(1 - phase["issue_ms"] / wall_ms, 0)
        rows.append((run_name(row), phase["name"], *speeds, phase["teeth"], wall_ms, *shares, bound_of(row, phase)))
    return (
        Details("Slopes", (Table(columns, tuple(rows), "How memory rises and falls:"), Paragraph(_RULE))),
        *_cold(results),
    )


def _cold(results: Results) -> tuple[Block, ...]:
    """A step whose allocator has an empty cache beside a usual one: what an allocator-bound slope would look like."""
    rows = [row for row in results.rows if row.figures.get("cold_step_ms")]
    if not rows:
        return ()
    columns = (
        Column("run"), Column("warm ms", "ms"), Column("cold ms", "ms"), Column("ratio", "factor"),
        Column("cudaMalloc", "count"),
    )  # fmt: skip
    cells = []
    for row in rows:
        warm, cold = row.figures["step_ms"], row.figures["cold_step_ms"]
        cells.append((run_name(row), warm, cold, cold / warm, row.figures["cold_device_calls"]))
    caption = "The same step after torch.cuda.empty_cache(), when the allocator must ask the driver for all memory:"
    return (Details("With an empty cache", (Table(columns, tuple(cells), caption),)),)


def captured(results: Results) -> tuple[Block, ...]:
    """The profiler's view of device memory, beside the allocator's."""
    seen = [(one, one.device_memory) for one in results.captures if one.device_memory]
    if not seen:
        return ()
    columns = (
        Column("capture"), Column("events are of"), Column("in use before", "bytes"), Column("peak", "bytes"),
        Column("allocations", "count"), Column("frees", "count"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (one.title, "tensors" if memory.of_tensors else "cudaMalloc", memory.before_bytes, memory.peak_bytes,
         memory.allocations, memory.frees)
        for one, memory in seen
    ]  # fmt: skip
    caption = (
        "Memory events of the profiler, over the measured steps. nsys sees cudaMalloc and cudaFree: the segments that "
        "PyTorch's allocator reserves, never the tensors in them. Compare its peak with *reserved* above; without "
        "nsys the PyTorch profiler records tensors instead:"
    )
    return (Table(columns, tuple(rows), caption),)
