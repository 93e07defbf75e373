"""Puts the timings of unprofiled runs beside the captures they belong to, and gives the others rows of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from nsys_analyzer.analysis.models import Configuration
from nsys_analyzer.analysis.runs import Unprofiled
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary import STATUSES, CaptureSummary
from nsys_analyzer.capture.timings import UNKNOWN_PHASE, Timing, Timings

_ORDER = ("forward", "loss", "backward", "forward+backward", "optimizer", "step")
#: Statuses that say nothing of how a run ended.
_NO_NEWS = ("ok", "missing")


def with_timings(captures: Sequence[CaptureSummary], timings: Timings) -> list[CaptureSummary]:
    """The captures with the times of their unprofiled runs, and a row for each configuration that was only timed."""
    names = {capture.name for capture in captures}
    found = [_timings_of(capture, timings, names - {capture.name}) for capture in captures]
    timed = [_with(capture, list(own.values())) for capture, own in zip(captures, found, strict=True)]
    used = {timing for own in found for timing in own.values()}
    rest = [timing for timing in timings.rows if timing not in used and timing.capture not in names]
    known = [capture.configuration for capture in captures if capture.configuration]
    lone = [one for one in rest if one.capture or not any(_may_be(_configuration(one), other) for other in known)]
    return [*timed, *_only_timed(lone, timings.path.name)]


def _timings_of(capture: CaptureSummary, timings: Timings, others: set[str]) -> dict[str, Timing]:
    configuration = capture.configuration or Configuration()
    configuration = replace(configuration, mode=configuration.mode or _mode(capture))
    return timings.of_capture(capture.name, others, configuration)


def _mode(summary: CaptureSummary) -> str | None:
    """What a capture ran, from the phases it has."""
    if summary.phase("optimizer"):
        return "train"
    return "forward+backward" if summary.phase("backward") else "forward" if summary.phase("forward") else None


def _with(capture: CaptureSummary, timings: list[Timing]) -> CaptureSummary:
    """The capture with these timings of its own; the peak memory of its manifest serves where they have none."""
    if not timings:
        return capture
    unprofiled = _unprofiled(timings)
    known = capture.unprofiled.peak_memory_bytes if capture.unprofiled else None
    unprofiled = replace(unprofiled, peak_memory_bytes=unprofiled.peak_memory_bytes or known)
    phases = tuple(replace(phase, python_ms=unprofiled.phases.get(phase.phase)) for phase in capture.phases)
    return replace(capture, phases=phases, unprofiled=unprofiled)


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
    center = timing.mean_ms if timing.mean_ms is not None else timing.median_ms
    if center is None or timing.phase == UNKNOWN_PHASE:
        return None
    return Stats(timing.steps, center, timing.std_ms, timing.min_ms, timing.median_ms, timing.max_ms)


def _only_timed(timings: Iterable[Timing], source: str) -> Iterator[CaptureSummary]:
    """A row for each configuration without a capture: timed alone, or ended before it was."""
    groups: dict[str | Configuration, list[Timing]] = defaultdict(list)
    for timing in timings:
        groups[timing.capture or _configuration(timing)].append(timing)
    rows: dict[str, CaptureSummary] = {}
    for group in groups.values():
        row = _row(group, source)
        if row:
            rows.setdefault(row.name, row)
    yield from rows.values()


def _row(timings: list[Timing], source: str) -> CaptureSummary | None:
    """A run that failed before it timed anything is one row, whatever its modes."""
    unprofiled, configuration = _unprofiled(timings), _configuration(timings[0])
    if unprofiled.status == "missing" and not timings[0].capture:
        return None
    if not unprofiled.phases and not timings[0].capture:
        configuration = replace(configuration, mode=None)
    status = "not_profiled" if unprofiled.status in _NO_NEWS else unprofiled.status
    message = unprofiled.message if status in STATUSES else status
    return CaptureSummary(
        timings[0].capture or _name(configuration), "", source, status if status in STATUSES else "failed", message,
        configuration=configuration, unprofiled=unprofiled,
    )  # fmt: skip


def _name(configuration: Configuration) -> str:
    model = configuration.model.name if configuration.model else "unknown model"
    batch = f"b{configuration.batch_size}" if configuration.batch_size else ""
    details = (batch, configuration.precision or "", configuration.mode or "")
    return "_".join([f"{model}_ctx{configuration.context_length or '?'}", *filter(None, details)])


def _configuration(timing: Timing) -> Configuration:
    return Configuration(
        timing.model, timing.context_length, timing.batch_size, timing.precision, timing.mode, timing.attention,
        source="timings",
    )  # fmt: skip


def _may_be(one: Configuration, other: Configuration) -> bool:
    """Whether two configurations of one model and context contradict each other in nothing that both know."""
    pairs = ((one.batch_size, other.batch_size), (one.precision, other.precision), (one.mode, other.mode))
    same = (one.model, one.context_length) == (other.model, other.context_length)
    return same and all(left == right for left, right in pairs if left is not None and right is not None)
