"""The memory of a forward pass and of a full step over time: peaks, what holds them, and what limits its phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import PurePosixPath

from nsys_analyzer.experiments.limits import check_limits
from nsys_analyzer.experiments.memory.case import TARGET, MemoryCase, MemoryRow, run_name
from nsys_analyzer.experiments.memory.facts import (
    limit_of,
    minimum_memory,
    paces_of,
    phases_of,
    place_of_peak,
    rates,
    slopes_of,
    warnings,
)
from nsys_analyzer.experiments.memory.tables import captured, holders, layers, peaks, reserved, slopes
from nsys_analyzer.experiments.model import (
    Bench,
    Option,
    Profiled,
    Results,
    Settings,
    Task,
    grid,
    known,
    several,
    single,
)
from nsys_analyzer.experiments.section import conditions, endings, messages, precision_warnings, section
from nsys_analyzer.experiments.steps import models
from nsys_analyzer.report.model import Block, Details, Lines, Paragraph, Section
from nsys_analyzer.report.units import format_number
from nsys_analyzer.runs.targets import transformer_targets
from nsys_analyzer.text import Words, joined, link, phrase

_OPTIONS = (
    several(MemoryCase, "model", ("small", "large"), ("small",), "Models"),
    single(MemoryCase, "num_layers"),
    several(MemoryCase, "context_length", (128, 256, 512), (32,)),
    several(MemoryCase, "mode", ("forward", "train")),
    several(
        MemoryCase, "precision", ("fp32", "bf16"), ("fp32",),
        "The first at every context length, the others at the longest; bf16 is autocast",
    ),
    single(MemoryCase, "batch_size"),
    single(MemoryCase, "warmup_steps"),
    single(MemoryCase, "steps"),
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
_SNAPSHOTS = " Snapshots for its viewer at https://pytorch.org/memory_viz: {}."
_DEFINITIONS = phrase(
    "*Definitions.* Memory is what tensors asked for, before the allocator rounds it up. A peak is the most at any "
    "moment of a phase. A layer keeps what its lines made in forward and what is alive at forward's end; parameters "
    "are none of it. 1 GiB is 2³⁰ bytes, 1 GB/s 10⁹ bytes a second."
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
    blocks: tuple[Block, ...] = (
        peaks(results, rows),
        *timelines[:_UNFOLDED],
        *([Details("More timelines", timelines[_UNFOLDED:])] if timelines[_UNFOLDED:] else []),
        Paragraph(_source(results, rows)),
        *reserved(results, rows),
        *holders(longest),
        *layers(rows),
        *slopes(results, rows),
        *captured(results),
    )
    return section(
        "memory",
        "memory over a step",
        answers=_answers(rows),
        conditions=conditions(
            results,
            warmup=_steps(rows, "warmup_steps"),
            steps=f"one step, recorded; times are medians of {_steps(rows, 'steps')} without a recorder",
            synchronized="at the end of each phase",
            grad="none in forward alone (no_grad), recorded in a full step",
        ),
        warnings=(*precision_warnings(results), *warnings(results, rows)),
        blocks=blocks,
        lacking=messages(rows, run_name),
        limits=check_limits(results, rates(rows), minimum_memory(rows)),
        definitions=_DEFINITIONS,
    )


def _steps(rows: Sequence[MemoryRow], key: str) -> str:
    counts = sorted({getattr(row.case, key) for row in rows})
    return f"{', '.join(map(str, counts))} step{'' if counts == [1] else 's'}"


def _answers(every: Sequence[MemoryRow]) -> Iterator[str]:
    rows = [row for row in every if row.ok]
    steps = [row for row in rows if row.case.trains]
    if rows:
        top = max(rows, key=lambda row: known(row.figures.step_peak_bytes))
        peak = format_number(known(top.figures.step_peak_bytes), "bytes")
        yield f"Memory is highest in {run_name(top)}: {peak}, {place_of_peak(top)}."
    if steps:
        yield f"The peak of a full step lies {_counted([place_of_peak(row) for row in steps])}."
        top = max(steps, key=lambda row: known(row.figures.layer_saves_bytes))
        saved = known(top.figures.layer_saves_bytes)
        ratio = format_number(saved / known(top.figures.layer_saves_by_shapes_bytes), "factor")
        yield (
            f"A layer saves up to {format_number(saved, 'bytes')} of activations for backward ({run_name(top)}), "
            f"{ratio} what its shapes say."
        )
    limits = [f"the {limit_of(row, phase)}" for row, phase in slopes_of(rows)]
    if limits:
        yield f"The phases forward and backward wait for {_counted(limits)}."
    yield from _slowing(steps)
    yield from endings(every, run_name, "Nothing ran out of memory.")


def _slowing(steps: list[MemoryRow]) -> Iterator[str]:
    """The forward pass on a GPU whose memory rises slower most clearly, once the launch queue is full."""
    found = []
    for row in (step for step in steps if step.case.device == "cuda"):
        forward = next(phase for phase in phases_of(row) if phase.name == "forward")
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


def _longest(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Of each model, mode and precision the row of the longest context that ran, full steps and large models first."""
    best: dict[tuple[str, str, str], MemoryRow] = {}
    for row in sorted((row for row in rows if row.ok), key=lambda row: row.case.context_length):
        best[row.case.model, row.case.mode, row.case.precision] = row
    return sorted(best.values(), key=lambda row: (not row.case.trains, -known(row.figures.parameter_bytes)))


def _timeline(row: MemoryRow) -> Lines:
    scale, unit = (2**30, "GiB") if known(row.figures.step_peak_bytes) >= _IN_GIB else (2**20, "MiB")
    points = tuple((ms, level / scale) for ms, level in known(row.figures.timeline_ms_bytes))
    spans = tuple((phase.name, phase.start_ms, phase.end_ms) for phase in phases_of(row))
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
    """What recorded the timelines, and where the snapshots are."""
    drop = "Where backward begins, the gradients of the step before are freed. "
    if not results.on_gpu:
        return (
            f"{drop}A CPU has no caching allocator: the timelines are the memory events of torch.profiler, and there "
            "are no snapshots. Recording slows the step down; the times in tables are of steps without it."
        )
    named = [PurePosixPath(row.case.snapshot) for row in rows if row.ok and row.case.snapshot]
    inside = [path for path in named if not path.is_absolute() and ".." not in path.parts]
    links = [link(path.name, f"{results.folder}/{path}".lstrip("/")) for path in inside]
    found = phrase(_SNAPSHOTS, joined(", ", links)) if links else ""
    return phrase("{}The timelines are the history of PyTorch's allocator.{}", drop, found)


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
    targets=(TARGET,),
)
