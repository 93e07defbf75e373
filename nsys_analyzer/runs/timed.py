"""Puts the timings of unprofiled runs beside the captures they belong to, and gives the others rows of their own."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from nsys_analyzer.analysis.findings.diagnosis import diagnose
from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.analysis.summary.summary import STATUSES, CaptureSummary, Unprofiled
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.configuration import Run
from nsys_analyzer.runs.doubts import doubts_of
from nsys_analyzer.runs.timings import UNKNOWN_PHASE, Timing, Timings

_ORDER = ("forward", "loss", "backward", "forward+backward", "optimizer", "step")
#: Statuses that say nothing of how a run ended.
_NO_NEWS = ("ok", "missing")
#: So many columns, and values of each, are named in a warning.
_FEW = 3


def with_timings(captures: Sequence[CaptureSummary], timings: Timings) -> list[CaptureSummary]:
    """The captures with the times of their unprofiled runs, and a row for each configuration that was only timed."""
    names = {capture.name for capture in captures}
    found = [_timings_of(capture, timings, names - {capture.name}) for capture in captures]
    timed = [
        _with(capture, list(phases.values())) if phases else _undecided(capture, timings, names - {capture.name})
        for capture, phases in zip(captures, found, strict=True)
    ]
    used = {timing for phases in found for timing in phases.values()}
    rest = [timing for timing in timings.rows if timing not in used and timing.capture not in names]
    known = [capture.configuration for capture in captures if capture.configuration]
    alone = [one for one in rest if one.capture or not any(_may_be(one.configuration, other) for other in known)]
    # With the times without the profiler, it is known what the profiler cost.
    timed = [replace(one, diagnosis=diagnose(one)) if one.unprofiled else one for one in timed]
    return [*timed, *_only_timed(alone, timings.source)]


def _timings_of(capture: CaptureSummary, timings: Timings, others: set[str]) -> dict[str, Timing]:
    """The timings that fit; where rows fit alike, those of the precision that the kernels' names tell."""
    configuration, run = _conditions(capture)
    found = timings.of_capture(capture.name, others, configuration, run)
    if found or configuration.precision:
        return found
    return timings.of_capture(capture.name, others, replace(configuration, precision=_precision(capture)), run)


def _precision(capture: CaptureSummary) -> str | None:
    """The precision of more than half of the matmul time whose precision is known."""
    known = {name: share for name, share in capture.precisions.items() if name != "unknown"}
    return next((name for name, share in known.items() if share > sum(known.values()) / 2), None)


def _conditions(capture: CaptureSummary) -> tuple[Configuration, Run]:
    """The conditions of a capture, as far as its name, its manifest or its trace tells them."""
    configuration, run = capture.configuration or Configuration(), capture.run or Run()
    gpu = run.gpu or (capture.gpu.name if capture.gpu and not capture.on_cpu else None)
    return replace(configuration, mode=configuration.mode or _mode(capture)), replace(run, gpu=gpu, rank=capture.rank)


def _undecided(capture: CaptureSummary, timings: Timings, others: set[str]) -> CaptureSummary:
    """The capture with a warning that names the columns in which the rows that fit it differ."""
    columns = timings.undecided(capture.name, others, *_conditions(capture))
    if not columns:
        return capture
    shown = list(columns.items())[:_FEW]
    more = f" and {len(columns) - _FEW} more" if len(columns) > _FEW else ""
    listed = ", ".join(f"{header} ({_values(values)})" for header, values in shown) + more
    options = " ".join(shlex.join(["--csv-where", f"{header}={values[0]}"]) for header, values in shown)
    warning = f"{timings.source}: none of the rows that fit is used, they differ in {listed}; pick with {options}"
    return replace(capture, warnings=(*capture.warnings, warning))


def _values(values: Sequence[str]) -> str:
    return ", ".join(value or "empty" for value in values[:_FEW]) + (", ..." if len(values) > _FEW else "")


def _mode(summary: CaptureSummary) -> str | None:
    """The mode of a capture, from the phases it has."""
    if summary.phase("optimizer"):
        return "train"
    return "forward+backward" if summary.phase("backward") else "forward" if summary.phase("forward") else None


def _with(capture: CaptureSummary, timings: list[Timing]) -> CaptureSummary:
    """The capture with these timings of its own, and a warning for each that cannot be right.

    The peak memory of its manifest serves where they have none.
    """
    unprofiled = _unprofiled(timings)
    known = capture.unprofiled.peak_memory_bytes if capture.unprofiled else None
    doubts = doubts_of(capture, unprofiled.phases)
    unprofiled = replace(unprofiled, peak_memory_bytes=unprofiled.peak_memory_bytes or known, doubts=doubts)
    phases = tuple(replace(phase, python_ms=unprofiled.phases.get(phase.phase)) for phase in capture.phases)
    warnings = (*capture.warnings, *_warnings(unprofiled, timings))
    return replace(capture, phases=phases, unprofiled=unprofiled, warnings=warnings)


def _warnings(unprofiled: Unprofiled, timings: Sequence[Timing]) -> Iterator[str]:
    """A line for each time in doubt: its place, the reasons against it, and the consequence."""
    for timing in timings:
        if reasons := unprofiled.doubts.get(timing.phase):
            time = f"{timing.phase} {unprofiled.typical_ms(timing.phase):.3f} ms"
            place = f"{Path(timing.file).name}, line {timing.line}"
            yield f"{place}: {time} is not trusted, no verdict rests on it: {'; '.join(reasons)}"


def _unprofiled(timings: list[Timing]) -> Unprofiled:
    """The timings of one configuration, phases in the order of a step."""
    timings = sorted(timings, key=lambda timing: _ORDER.index(timing.phase) if timing.phase in _ORDER else len(_ORDER))
    phases = {timing.phase: stats for timing in timings if (stats := _stats(timing))}
    ended = [timing for timing in timings if timing.status not in _NO_NEWS]
    return Unprofiled(
        status=ended[0].status if ended else "ok" if phases else "missing",
        message=next((timing.message for timing in ended if timing.message), ""),
        phases=phases,
        warmup_steps=timings[0].warmup_steps,
        device=timings[0].device,
        peak_memory_bytes=max((timing.peak_memory_bytes or 0 for timing in timings), default=0) or None,
    )


def _stats(timing: Timing) -> Stats | None:
    """The timing's statistics; where it gives a median alone, that stands for the mean."""
    if timing.center_ms is None or timing.phase == UNKNOWN_PHASE:
        return None
    return Stats(timing.steps, timing.center_ms, timing.std_ms, timing.min_ms, timing.median_ms, timing.max_ms)


def _only_timed(timings: Sequence[Timing], source: str) -> Iterator[CaptureSummary]:
    """A row for each configuration without a capture: timed alone, or ended before it was."""
    groups: dict[object, list[Timing]] = defaultdict(list)
    for timing in timings:
        own = timing.capture, timing.conditions  # such as the rank of a capture of several
        groups[own if timing.capture else (timing.setup, timing.mode)].append(timing)
    fields = ("attention", "optimizer", "device", "gpu")
    differing = [field for field in fields if len({getattr(timing, field) for timing in timings}) > 1]
    rows: dict[str, CaptureSummary] = {}
    for group in groups.values():
        row = _row(group, source, differing)
        if row:
            rows.setdefault(row.name, row)
    yield from rows.values()


def _row(timings: list[Timing], source: str, differing: Sequence[str]) -> CaptureSummary | None:
    """A run that failed before it timed anything is one row, whatever its modes."""
    unprofiled, configuration = _unprofiled(timings), timings[0].configuration
    if unprofiled.status == "missing" and not timings[0].capture:
        return None
    if not unprofiled.phases and not timings[0].capture:
        configuration = replace(configuration, mode=None)
    status = "not_profiled" if unprofiled.status in _NO_NEWS else unprofiled.status
    message = unprofiled.message if status in STATUSES else status
    row = CaptureSummary(
        timings[0].capture or _name(configuration, timings[0], differing), "", source,
        status if status in STATUSES else "failed", message, configuration=configuration, run=_run(timings[0]),
    )  # fmt: skip
    unprofiled = replace(unprofiled, doubts=doubts_of(row, unprofiled.phases))
    return replace(row, unprofiled=unprofiled, warnings=tuple(_warnings(unprofiled, timings)))


def _name(configuration: Configuration, timing: Timing, differing: Sequence[str]) -> str:
    model = configuration.model.name if configuration.model else "unknown model"
    batch = f"b{configuration.batch_size}" if configuration.batch_size else ""
    details = (
        *(batch, configuration.precision, configuration.mode),
        *("compiled" if timing.compile else "", "cuda-graph" if timing.cuda_graph else ""),
        *(getattr(timing, field) for field in differing),
        *(f"{header}={value}" for header, value in timing.conditions if value),
    )
    return "_".join([f"{model}_ctx{configuration.context_length or '?'}", *filter(None, details)])


def _run(timing: Timing) -> Run | None:
    """The conditions of a run that the file names beside its configuration, None where it names none."""
    run = Run(
        compile=timing.compile, cuda_graph=timing.cuda_graph, attention=timing.attention, optimizer=timing.optimizer,
        device=timing.device, gpu=timing.gpu,
    )  # fmt: skip
    return None if run == Run() else run


def _may_be(one: Configuration, other: Configuration) -> bool:
    """Whether two configurations of one model contradict each other in nothing that both know."""
    fields = ("context_length", "batch_size", "precision", "mode")
    pairs = [(getattr(one, field), getattr(other, field)) for field in fields]
    return one.model == other.model and all(left == right for left, right in pairs if None not in (left, right))
