"""The memory of a forward pass and of a full step over time: peaks, what holds them, and what limits its phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from nsys_analyzer.benches.conditions import conditions, precision_warnings
from nsys_analyzer.benches.endings import endings, messages
from nsys_analyzer.benches.memory_facts import (
    flags,
    limit_of,
    paces_of,
    phases_of,
    place_of_peak,
    rates,
    residences,
    run_name,
    sloped,
    trained,
)
from nsys_analyzer.benches.memory_tables import captured, holders, layers, peaks, reserved, slopes
from nsys_analyzer.benches.model import Bench, Case, Option, Profiled, Results, Row, Settings
from nsys_analyzer.benches.physics import physics
from nsys_analyzer.capture.targets import Sweep
from nsys_analyzer.report.model import Block, Details, Lines, Listing, Paragraph, Section
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import link, marked

_TARGET = "profiling_targets.memory_history"
_OPTIONS = (
    Option("model", str, ("small", "large"), ("small",), "Models."),
    Option("num_layers", int, (0,), (2,), "Layers; 0 is the model's own number.", several=False, least=0),
    Option("context_length", int, (128, 256, 512), (32,), "Tokens."),
    Option("mode", ("forward", "train"), ("forward", "train"), ("forward", "train"), "Forward alone, a full step."),
    Option(
        "precision", ("fp32", "tf32", "bf16"), ("fp32", "bf16"), ("fp32",),
        "The first at every context length, the others at the longest.",
    ),
    Option("batch_size", int, (4,), (1,), "Sequences.", several=False),
    Option("warmup_steps", int, (3,), (1,), "Steps before the timed ones.", several=False),
    Option("steps", int, (5,), (2,), "Steps timed without a recorder.", several=False),
    Option(
        "snapshots", ("first", "all", "none"), ("first",), ("first",),
        "Cases of which the allocator's history is kept, on a GPU: the first of each mode, all, none.", several=False,
    ),
)  # fmt: skip
#: From here on a timeline is drawn in GiB.
_IN_GIB = 2**31
_UNFOLDED = 2
#: How many times faster memory must rise at first than at last for the queue to have been full.
_SLOWER = 1.5
_DEFINITIONS = marked(
    "*Definitions.* Memory is what tensors asked for, before the allocator rounds it up. A peak is the most at any "
    "moment of a phase. A layer keeps what its lines made in forward and what is alive at forward's end; parameters "
    "are none of it. 1 GiB is 2³⁰ bytes, 1 GB/s 10⁹ bytes a second."
)


def _cases(settings: Settings) -> tuple[Case, ...]:
    same = {key: settings[key] for key in ("num_layers", "batch_size", "warmup_steps", "steps")}
    shapes = [
        (model, length, mode, precision)
        for model in settings["model"]
        for length, precision in _shapes(settings)
        for mode in settings["mode"]
    ]
    kept = _kept(settings, shapes)
    return tuple(
        Case(
            _TARGET,
            {
                "device": settings.device, "model": model, "context_length": length, "mode": mode,
                "precision": precision, **same,
                "snapshot": f"snapshots/{model}_ctx{length}_{mode}_{precision}.pickle" if shape in kept else "",
            },
            f"{model}, context {length:,}, {mode}, {precision}",
        )
        for shape in shapes
        for model, length, mode, precision in (shape,)
    )  # fmt: skip


_Shape = tuple[str, int, str, str]


def _shapes(settings: Settings) -> Iterator[tuple[int, str]]:
    first, *others = settings["precision"]
    yield from ((length, first) for length in settings["context_length"])
    yield from ((max(settings["context_length"]), precision) for precision in others)


def _kept(settings: Settings, shapes: list[_Shape]) -> set[_Shape]:
    """The shapes whose snapshot is kept."""
    if settings.device != "cuda" or settings["snapshots"] == "none":
        return set()
    return set(shapes if settings["snapshots"] == "all" else {shape[2]: shape for shape in reversed(shapes)}.values())


def _captures(settings: Settings) -> Profiled:
    """The first model's full step at the longest context; a CPU has no device memory to see."""
    if settings.device != "cuda":
        return Profiled(())
    count = settings["num_layers"]
    sweep = Sweep(
        models=settings["model"][:1], context_lengths=(max(settings["context_length"]),), modes=("train",),
        precisions=settings["precision"][:1], batch_size=settings["batch_size"], device=settings.device,
        warmup_steps=settings["warmup_steps"], steps=settings["steps"],
        options=("--num-layers", str(count)) if count else (),
    )  # fmt: skip
    return Profiled(sweep.targets(), memory=True)


def _section(results: Results) -> Section:
    longest = _longest(results)
    timelines = tuple(_timeline(row) for row in longest)
    warnings = (*precision_warnings(results), *flags(results))
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join(_answers(results))),
        conditions(
            results,
            warmup=_steps(results, "warmup_steps"),
            steps=f"one step, recorded; times are medians of {_steps(results, 'steps')} without a recorder",
            synchronized="at the end of each phase",
            grad="none in forward alone (no_grad), recorded in a full step",
        ),
        *([Listing(warnings)] if warnings else []),
        peaks(results),
        *messages(results.rows, run_name),
        *timelines[:_UNFOLDED],
        *([Details("More timelines", timelines[_UNFOLDED:])] if timelines[_UNFOLDED:] else []),
        Paragraph(_source(results)),
        *reserved(results),
        *holders(longest),
        *layers(results),
        *slopes(results),
        *captured(results),
        *physics(results, rates(results), residences(results)),
        Paragraph(_DEFINITIONS),
    )
    return Section("bench-memory", "Bench: memory over a step", blocks)


def _steps(results: Results, key: str) -> str:
    counts = sorted({int(row.case[key]) for row in results.rows})
    return f"{', '.join(map(str, counts))} step{'' if counts == [1] else 's'}"


def _answers(results: Results) -> Iterator[str]:
    rows = [row for row in results.rows if row.ok]
    steps = [row for row in rows if trained(row)]
    if rows:
        top = max(rows, key=lambda row: int(row.figures["step_peak_bytes"]))
        yield f"Memory is highest in {run_name(top)}: {_size(top, 'step_peak_bytes')}, {place_of_peak(top)}."
    if steps:
        yield f"The peak of a full step lies {_counted([place_of_peak(row) for row in steps])}."
        top = max(steps, key=lambda row: float(row.figures["layer_saves_bytes"]))
        ratio = top.figures["layer_saves_bytes"] / top.figures["layer_saves_by_shapes_bytes"]
        yield (
            f"A layer keeps up to {_size(top, 'layer_saves_bytes')} of forward for backward ({run_name(top)}), "
            f"{format_number(ratio, 'factor')} what its shapes say."
        )
    limits = [f"the {limit_of(row, phase)}" for row, phase in sloped(results)]
    if limits:
        yield f"The phases forward and backward wait for {_counted(limits)}."
    yield from _slowing(steps)
    yield from endings(results.rows, run_name, "Nothing ran out of memory.")


def _slowing(steps: list[Row]) -> Iterator[str]:
    """The forward pass on a GPU whose memory rises slower most clearly, once the launch queue is full."""
    found = []
    for row in (step for step in steps if step.case["device"] == "cuda"):
        forward = next(phase for phase in phases_of(row) if phase["name"] == "forward")
        first, last, _ = paces_of(row, forward)
        if first and last and first > _SLOWER * last > 0:
            found.append((first / last, run_name(row), first, last))
    if found:
        _, name, first, last = max(found)
        yield (
            "While work is issued memory rises as fast as the host launches, and once the launch queue is full as "
            f"fast as the GPU works: in forward of {name} by {format_number(first, 'bytes/s')} in the first third of "
            f"that time, by {format_number(last, 'bytes/s')} in the last."
        )


def _size(row: Row, key: str) -> str:
    return format_number(row.figures[key], "bytes")


def _longest(results: Results) -> list[Row]:
    """Of each model, mode and precision the row of the longest context that ran, full steps and large models first."""
    best: dict[tuple[str, str, str], Row] = {}
    for row in sorted((row for row in results.rows if row.ok), key=lambda row: int(row.case["context_length"])):
        best[row.case["model"], row.case["mode"], row.case["precision"]] = row
    return sorted(best.values(), key=lambda row: (not trained(row), -row.figures["parameter_bytes"]))


def _timeline(row: Row) -> Lines:
    scale, unit = (2**30, "GiB") if row.figures["step_peak_bytes"] >= _IN_GIB else (2**20, "MiB")
    points = tuple((ms, level / scale) for ms, level in row.figures["timeline_ms_bytes"])
    spans = tuple((phase["name"], phase["start_ms"], phase["end_ms"]) for phase in phases_of(row))
    return Lines(
        f"memory-{row.case['model']}-{row.case['context_length']}-{row.case['mode']}-{row.case['precision']}",
        f"Memory of tensors over a step: {run_name(row)}, batch {row.case['batch_size']}",
        (("memory", points),),
        "ms since the step began, on the host's clock, while recording",
        unit,
        spans=spans,
        steps=True,
    )


def _source(results: Results) -> str:
    """What recorded the timelines, and where the snapshots are."""
    drop = "Where backward begins, the gradients of the step before are freed. "
    if not results.on_gpu:
        return (
            f"{drop}A CPU has no caching allocator: the timelines are the memory events of torch.profiler, and there "
            "are no snapshots. Recording slows the step down; the times in tables are of steps without it."
        )
    named = [PurePosixPath(str(row.case["snapshot"])) for row in results.rows if row.ok and row.case["snapshot"]]
    inside = [path for path in named if not path.is_absolute() and ".." not in path.parts]
    links = [link(path.name, f"{results.folder}/{path}".lstrip("/")) for path in inside]
    found = f" Snapshots for its viewer at https://pytorch.org/memory_viz: {', '.join(links)}." if links else ""
    return f"{drop}The timelines are the history of PyTorch's allocator.{found}"


def _counted(words: list[str]) -> str:
    """``backward (5 of 8), optimizer (3 of 8)``: how often each word occurs, most often first."""
    return ", ".join(f"{word} ({count} of {len(words)})" for word, count in Counter(words).most_common())


BENCH = Bench(
    "memory",
    "The memory of a forward pass and of a full step over time: peaks, what holds them, what a layer keeps.",
    _OPTIONS,
    _cases,
    _section,
    _captures,
    precisions=lambda settings: tuple(settings["precision"]),
)
