"""The tables of the memory bench."""

from __future__ import annotations

from collections.abc import Sequence

from nsys_analyzer.analysis.memory_timeline import ALLOCATOR_SHARE, WAITING_SHARE
from nsys_analyzer.analysis.saved_tensors import saved_by_layer
from nsys_analyzer.benches.memory_facts import Phase, limit_of, paces_of, phases_of, run_name, size_of, sloped, trained
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.report.model import Block, Cell, Column, Details, Paragraph, Table
from nsys_analyzer.report.units import percent
from nsys_analyzer.text import marked

_PHASES = ("forward", "loss", "backward", "optimizer")
_AUTOGRAD = "autograd"
_LONGEST_CODE = 60
_PACES = ("first third", "last third", "over the wall")
_WAITS = (
    Column("issue", "ms"), Column("wall", "ms"), Column("allocator", "percent"), Column("waiting", "percent"),
    Column("waits for"),
)  # fmt: skip
#: What the columns of the slopes mean, wherever it ran, and on a GPU besides.
_RULE = (
    "Memory changes as work is issued: a third is one of the time from a phase's start to its last allocation or free, "
    "on the host's clock while recording, which slows the host down; below zero memory falls. Backward counts from "
    "where the gradients of the step before are freed. Over the wall is all that a phase changes over its whole time "
    "without a recorder. Forward alone keeps nothing: its curve has teeth, falls by a tenth of its height or more, and "
    "up and down are bytes over time of all rises and all falls. The allocator's part is of the time to issue, and an "
    "upper bound: its calls, each as long as torch.empty took alone, Python and the free included, and the time up to "
    "each cudaMalloc."
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


def reserved(results: Results) -> tuple[Block, ...]:
    """What is there between steps, and on a GPU how the allocator held it."""
    rows = [row for row in results.rows if row.ok]
    if not rows:
        return ()
    on_gpu = results.on_gpu
    of_allocator = ("allocated", "reserved", "inactive_split") if on_gpu else ()
    keys = ("base_bytes", "step_peak_bytes", *(f"{key}_peak_bytes" for key in of_allocator))
    names = ("before the step", "asked for", "handed out", "reserved", "free between tensors")[: len(keys)]
    cells = tuple((run_name(row), *(row.figures.get(key) for key in keys)) for row in rows)
    said = (
        " Handed out is what was asked for, rounded up. Free between tensors is what lies unused in segments that are "
        "in use, and so cannot go back to the driver: fragmentation, at most; it is no part of what was handed out, "
        "and need not be at its most when the rest is."
    )
    caption = f"Memory between steps, and the highest of each kind in the recorded step.{said if on_gpu else ''}"
    table = Table((Column("run"), *(Column(name, "bytes") for name in names)), cells, caption)
    return (Details("What the allocator held" if on_gpu else "Memory between steps", (table,)),)


def layers(results: Results) -> tuple[Block, ...]:
    """The residual stream, what a layer keeps for backward, and for the largest of them the two sums line by line."""
    rows = [row for row in results.rows if row.ok and trained(row)]
    if not rows:
        return ()
    columns = (
        Column("run"), Column("residual", "bytes"), Column("by shape", "bytes"), Column("a layer keeps", "bytes"),
        Column("by shapes", "bytes"), Column("ratio", "factor"), Column("all layers", "bytes"),
        Column("forward", "bytes"),
    )  # fmt: skip
    cells = []
    for row in rows:
        figures, count = row.figures, size_of(row).num_layers
        kept, expected = figures["layer_saves_bytes"], figures["layer_saves_by_shapes_bytes"]
        residual = figures["residual_seen_bytes"], figures["residual_bytes"]
        cells.append(
            (run_name(row), *residual, kept, expected, kept / expected, kept * count, figures.get("kept_bytes"))
        )
    caption = "The residual stream, and what one layer, all layers and all of forward keep for backward:"
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
    """How fast memory rises and falls in forward and backward, what they wait for, and what an empty cache costs."""
    found = list(sloped(results))
    if not found:
        return ()
    kept = [_courses(row, phase) for row, phase in found if trained(row)]
    alone = [_teeth(row, phase) for row, phase in found if not trained(row)]
    steady = (Column("run"), Column("phase"), *(Column(name, "bytes/s") for name in _PACES), *_WAITS)
    jagged = (Column("run"), Column("up", "bytes/s"), Column("down", "bytes/s"), Column("teeth", "count"), *_WAITS)
    tables = (
        *(
            [Table(steady, tuple(kept), "Full steps: how fast memory changes, and what the phase waits for:")]
            if kept
            else []
        ),
        *([Table(jagged, tuple(alone), "Forward alone: its teeth, and what it waits for:")] if alone else []),
    )
    rule = f"{_RULE} {_RULE_ON_GPU if results.on_gpu else _RULE_ON_CPU}"
    return (Details("Slopes", (*tables, Paragraph(rule))), *_cold(results))


def _courses(row: Row, phase: Phase) -> tuple[Cell, ...]:
    return (run_name(row), phase["name"], *paces_of(row, phase), *_waits(row, phase))


def _teeth(row: Row, phase: Phase) -> tuple[Cell, ...]:
    speeds = (value and value * 1e3 for value in (phase["rise_bytes_per_ms"], phase["fall_bytes_per_ms"]))
    return (run_name(row), *speeds, phase["teeth"], *_waits(row, phase))


def _waits(row: Row, phase: Phase) -> tuple[Cell, ...]:
    issue_ms, wall_ms = phase["issue_ms"], phase["wall_ms"]
    return issue_ms, wall_ms, phase["allocator_ms"] / issue_ms, max(1 - issue_ms / wall_ms, 0), limit_of(row, phase)


def _cold(results: Results) -> tuple[Block, ...]:
    """A step whose allocator has an empty cache beside a usual one, and in which of its phases it loses the time."""
    rows = [row for row in results.rows if row.figures.get("cold_step_ms")]
    if not rows:
        return ()
    columns = (
        Column("run"), Column("warm ms", "ms"), Column("cold ms", "ms"), Column("ratio", "factor"),
        Column("cudaMalloc", "count"), *(Column(f"more in {name}", "ms") for name in _PHASES),
    )  # fmt: skip
    cells = []
    for row in rows:
        warm, cold = row.figures["step_ms"], row.figures["cold_step_ms"]
        more = {phase["name"]: phase["cold_ms"] - phase["wall_ms"] for phase in phases_of(row) if phase["cold_ms"]}
        each = (more.get(name) for name in _PHASES)
        cells.append((run_name(row), warm, cold, cold / warm, row.figures["cold_device_calls"], *each))
    caption = (
        "The same step after torch.cuda.empty_cache(), when the allocator must ask the driver for all memory; one cold "
        "step against the median of warm ones:"
    )
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
    caption = marked(
        "Memory events of the profiler, over the measured steps. nsys sees cudaMalloc and cudaFree: the segments that "
        "PyTorch's allocator reserves, never the tensors in them. Compare its peak with *reserved* above; without "
        "nsys the PyTorch profiler records tensors instead:"
    )
    return (Table(columns, tuple(rows), caption),)
