"""Memory of a forward pass and of a full step over time: peaks, the allocations behind them, and the slopes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import PurePosixPath

from nsys_analyzer.analysis.transformer.flops import backward_flops, forward_flops
from nsys_analyzer.configuration import Option
from nsys_analyzer.experiments.limits import MinimumMemory, Rate
from nsys_analyzer.experiments.memory.case import TARGET, MemoryCase, MemoryRow, run_name
from nsys_analyzer.experiments.memory.slopes import slopes, slopes_of
from nsys_analyzer.experiments.memory.tables import allocator, captured, holders, layers, peaks
from nsys_analyzer.experiments.model import (
    Bench,
    Profiled,
    Results,
    Settings,
    Task,
    grid,
    known,
    several,
    single,
)
from nsys_analyzer.experiments.section import each, endings, section
from nsys_analyzer.experiments.steps import models
from nsys_analyzer.report.model import Details, Lines, Paragraph, Section
from nsys_analyzer.report.units import format_number, milliseconds
from nsys_analyzer.runs.targets import transformer_targets
from nsys_analyzer.text import Words, joined, link, phrase, plural

_OPTIONS = (
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
)  # fmt: skip
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


def _cases(settings: Settings) -> tuple[Task[MemoryCase], ...]:
    """Every context length in the first precision, the longest in the others; snapshots of some of them."""
    lengths = settings["context_length"]
    first, *others = settings["precision"]
    shapes = [(length, first) for length in lengths] + [(max(lengths), precision) for precision in others]
    tasks = [
        task
        for model, (length, precision) in product(models(settings), shapes)
        for task in grid(
            TARGET, settings, _label, model=(model,), context_length=(length,), mode=settings["mode"],
            precision=(precision,),
        )
    ]  # fmt: skip
    if settings.device != "cuda" or settings["snapshots"] == "none":
        return tuple(tasks)
    firsts = {task.case.mode: task for task in reversed(tasks)}.values()
    kept = tasks if settings["snapshots"] == "all" else firsts
    return tuple(_with_snapshot(task) if task in kept else task for task in tasks)


def _label(case: MemoryCase) -> str:
    return f"{case.model}, context {case.context_length:,}, {case.mode}, {case.precision}"


def _with_snapshot(task: Task[MemoryCase]) -> Task[MemoryCase]:
    case = task.case
    path = f"snapshots/{case.model}_ctx{case.context_length}_{case.mode}_{case.precision}.pickle"
    return replace(task, case=replace(case, snapshot=path))


def _captures(settings: Settings) -> Profiled:
    """The first model's full step at the longest context; a CPU has no device memory to see."""
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
    longest = _longest(rows)
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
            peaks(rows),
            *timelines[:_UNFOLDED],
            *([Details("More timelines", timelines[_UNFOLDED:])] if timelines[_UNFOLDED:] else []),
            Paragraph(_source(results, rows)),
            allocator(rows),
            *holders(longest),
            *layers(rows),
            *slopes(rows),
            *captured(results),
        ),
        definitions=_DEFINITIONS,
        rates=_rates(rows),
        memory=_minimum_memory(rows),
    )


def _answers(every: Sequence[MemoryRow]) -> Iterator[str]:
    rows = [row for row in every if row.ok]
    steps = [row for row in rows if row.case.trains]
    if rows:
        top = max(rows, key=lambda row: known(row.figures.step_peak_bytes))
        peak = format_number(known(top.figures.step_peak_bytes), "bytes")
        yield f"Memory is highest in {run_name(top)}: {peak}, in {_phase_of_peak(top)}."
    if steps:
        yield f"The peak of a full step is in {_counted([_phase_of_peak(row) for row in steps])}."
        top = max(steps, key=lambda row: known(row.figures.layer_saves_bytes))
        saved = known(top.figures.layer_saves_bytes)
        share = format_number(saved / known(top.figures.layer_saves_by_shapes_bytes), "factor")
        yield (
            f"A layer saves up to {format_number(saved, 'bytes')} of activations for backward ({run_name(top)}), "
            f"{share} the bytes of their shapes."
        )
    if waits := [f"the {one.waits_for}" for one in slopes_of(rows)]:
        yield f"Forward and backward wait for {_counted(waits)}."
    yield from endings(every, run_name, "Nothing ran out of memory.")


def _phase_of_peak(row: MemoryRow) -> str:
    """The phase in which memory is highest; of several with the same peak those that rise to it."""
    phases = known(row.figures.phases)
    top = max(phase.peak_bytes for phase in phases)
    tied = [phase for phase in phases if phase.peak_bytes >= top * (1 - _TOLERANCE)]
    rising = [phase.name for phase in tied if phase.peak_bytes > phase.start_bytes * (1 + _TOLERANCE)]
    return " and ".join(rising or [tied[0].name])


def _counted(words: list[str]) -> str:
    """``backward (5 of 8), optimizer (3 of 8)``: how often each word occurs, most often first."""
    return ", ".join(f"{word} ({count} of {len(words)})" for word, count in Counter(words).most_common())


def _warnings(results: Results, rows: Sequence[MemoryRow]) -> Iterator[Words]:
    """Calls of the driver in a warm step, and counts of the same bytes that differ."""
    for row in rows:
        phases = row.figures.phases or []
        if calls := sum(phase.device_allocations + phase.device_frees for phase in phases):
            took = milliseconds(sum(phase.device_calls_ms for phase in phases))
            yield phrase(
                "**cudaMalloc in the recorded step**: {} calls the driver {} {}, in {} at most. Its allocator's cache "
                "had not settled.",
                run_name(row), calls, plural(calls, "time"), took,
            )  # fmt: skip
        for name, seen, expected in _counted_twice(row):
            if seen and expected and abs(seen / expected - 1) > _TOLERANCE:
                sizes = f"{format_number(seen, 'bytes')} recorded, {format_number(expected, 'bytes')} expected"
                yield phrase("**Two counts differ**: {}, {}: {}.", run_name(row), name, sizes)
    for one in results.captures:
        memory = one.device_memory
        if memory and not memory.of_tensors and memory.allocations:
            times = f"{memory.allocations:,} {plural(memory.allocations, 'time')}"
            yield phrase("**cudaMalloc while measuring**: {} allocates {} in its measured steps.", one.title, times)


def _counted_twice(row: MemoryRow) -> Iterator[tuple[str, float | None, float | None]]:
    """Bytes as they were recorded, and as the allocator or the shapes say."""
    figures = row.figures
    for phase in figures.phases or []:
        yield f"peak of {phase.name}", phase.peak_bytes, phase.counted_peak_bytes
    yield "residual stream", figures.residual_seen_bytes, figures.residual_bytes
    yield "memory that a layer saves", figures.layer_saves_bytes, figures.layer_saves_by_shapes_bytes


def _rates(rows: Sequence[MemoryRow]) -> list[Rate]:
    """FLOPs of the matmuls, and bytes: what the allocator hands out is written once at least."""
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
    """The tensors that exist as forward ends, by the mode."""
    for row in (row for row in rows if row.ok):
        figures = row.figures
        sizes = {"weights": known(figures.parameter_bytes), "logits": known(figures.logits_bytes)}
        if row.case.trains:
            # Gradients have the size of the parameters, and are freed when the next backward begins.
            sizes |= {"grads": known(figures.parameter_bytes), "moments": known(figures.moment_bytes)}
            sizes["activations"] = known(figures.layer_saves_by_shapes_bytes) * row.case.size.num_layers
        peak, least = known(figures.forward_peak_bytes), sum(sizes.values())
        yield row.case.mode, MinimumMemory(f"forward, {run_name(row)}", peak, least, ", ".join(sizes))


def _longest(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Of each model, mode and precision the row of the longest context that ran, full steps and large models first."""
    best: dict[tuple[str, str, str], MemoryRow] = {}
    for row in sorted((row for row in rows if row.ok), key=lambda row: row.case.context_length):
        best[row.case.model, row.case.mode, row.case.precision] = row
    return sorted(best.values(), key=lambda row: (not row.case.trains, -known(row.figures.parameter_bytes)))


def _timeline(row: MemoryRow) -> Lines:
    scale, unit = (2**30, "GiB") if known(row.figures.step_peak_bytes) >= _IN_GIB else (2**20, "MiB")
    points = tuple((ms, level / scale) for ms, level in known(row.figures.timeline_ms_bytes))
    spans = tuple((phase.name, phase.start_ms, phase.end_ms) for phase in known(row.figures.phases))
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
    """The recorder of the timelines, and links to the snapshots."""
    if not results.on_gpu:
        return "A CPU has no caching allocator: the timelines are the memory events of torch.profiler."
    named = [PurePosixPath(row.case.snapshot) for row in rows if row.ok and row.case.snapshot]
    inside = [path for path in named if not path.is_absolute() and ".." not in path.parts]
    links = [link(path.name, f"{results.folder}/{path}".lstrip("/")) for path in inside]
    found = phrase(" Snapshots for https://pytorch.org/memory_viz: {}.", joined(", ", links)) if links else ""
    return phrase("The timelines are the history of PyTorch's allocator.{}", found)


BENCH = Bench(
    "memory",
    "Memory of a forward pass and of a full step over time: peaks, what holds them, what a layer saves for backward.",
    _OPTIONS,
    _cases,
    _section,
    _captures,
    precisions=lambda settings: tuple(settings["precision"]),
    targets=(TARGET,),
)
