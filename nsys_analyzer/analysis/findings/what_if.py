"""A person's own question: what a step would take if some of its parts took more or less time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.findings.diagnosis import baselines_of, interval_of
from nsys_analyzer.analysis.findings.finding import Change, saved_work
from nsys_analyzer.analysis.findings.waits import cheaper_launches, pageable_copies, pinned_copies
from nsys_analyzer.analysis.kernels.class_rules import FILLS, UNKNOWN
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.trace.columns import GRAPH

Where = Literal["GPU", "CPU", "queue"]
#: The parts of the critical path that are none of the GPU's work: three of the CPU's, and what is between both.
LAUNCHING, LOADING, PAUSES, LATENCY = "calls and launches", "loading of batches", "pauses", "latency and gaps"
_PLACES: dict[str, Where] = {LAUNCHING: "CPU", LOADING: "CPU", PAUSES: "CPU", LATENCY: "queue"}
#: What is on the critical path for less of a step is not listed.
_LEAST = 0.005


@dataclass(frozen=True)
class PathPart:
    """A part of the critical path of a step, ms, before and after the changes.

    Attributes:
        part: a kernel class, or what the CPU does.
        where: who works on it, if it is not the time from a launch to its start, or between kernels: "queue".
    """

    part: str
    where: Where
    before_ms: float
    after_ms: float


@dataclass(frozen=True)
class WhatIf:
    """What a step would take after some changes, none of which was made.

    Attributes:
        capture: the capture's name.
        changes: the changes in words.
        step_ms: the step without the profiler, before.
        saves_ms_low, saves_ms_high: what it would be shorter by; below zero where it would be longer.
        less_ms: how much less the GPU and the CPU would have to do in a step, together.
        path: the critical path, its longest parts first.
        saves_ms: what it would be shorter by in the replays; ``new_step_ms`` is what it would take then.
    """

    capture: str
    changes: tuple[str, ...]
    step_ms: float
    saves_ms: float
    saves_ms_low: float
    saves_ms_high: float
    less_ms: float
    path: tuple[PathPart, ...]
    new_step_ms: float = field(init=False)

    def __post_init__(self) -> None:
        """Fills what follows from the saving."""
        vars(self).update(new_step_ms=self.step_ms - self.saves_ms)

    def on_path_ms(self, where: Where) -> tuple[float, float]:
        """Returns how much of the critical path is there, before and after."""
        parts = [part for part in self.path if part.where == where]
        return sum(part.before_ms for part in parts), sum(part.after_ms for part in parts)


def what_if(
    capture: CaptureSummary, *, classes: Mapping[str, float] | None = None, ranges: Mapping[str, float] | None = None,
    launches: float | None = None, pinned: bool = False,
) -> WhatIf:  # fmt: skip
    """Returns what a step of a capture would take if its parts took so many times their time; 0: they are gone.

    Args:
        capture: one of those that ``summarize`` returns.
        classes: kernel class to factor, such as ``{"matmul": 0.5}``.
        ranges: name of a range to factor, for what the program does inside it and what it launches there.
        launches: a factor for what the CPU needs to launch work, as a CUDA graph may save it.
        pinned: whether large copies to the GPU come from pinned memory, and do not block.

    Raises:
        ConfigurationError: the steps hold nothing of the kind, or cannot be replayed.
    """
    study, found = capture.study, capture.diagnosis
    if study is None or found is None or found.doubt:
        raise ConfigurationError(
            f"The steps of {capture.title} cannot be replayed", str(capture.findings_missing or "")
        )
    factors = (*(classes or {}).values(), *(ranges or {}).values(), 1.0 if launches is None else launches)
    if not all(0 <= factor < np.inf for factor in factors):
        raise ConfigurationError("A factor is a number from 0 on", "0.5 is half the time, 0 none, 2 twice as much")
    changes = dict(_changes(study, classes or {}, ranges or {}, launches, pinned=pinned))
    if not changes:
        raise ConfigurationError("Nothing is changed", "Say what: a kernel class, a range, launches, or copies")

    def changed(replay: Replay) -> Replay:
        for change in changes.values():
            replay = change(replay)
        return replay

    baselines, scale = baselines_of(capture, study)
    pairs = [(replay, changed(replay)) for replay in baselines]
    saved_ms = [(before.step_ns - after.step_ns) / 1e6 * scale for before, after in pairs]
    of_cpu = bool(ranges) or pinned or launches is not None
    low, high = interval_of(saved_ms, of_cpu=of_cpu, timed=found.timed)
    before, after = sorted(pairs, key=lambda pair: pair[0].step_ns)[len(pairs) // 2]
    return WhatIf(
        capture.title,
        tuple(changes),
        found.step_ms,
        (min(saved_ms) + max(saved_ms)) / 2,
        low,
        min(high, found.step_ms),
        (_work_ms(before) - _work_ms(after)) * scale,
        _path(study, before, after, scale),
    )


def _changes(
    study: Study, classes: Mapping[str, float], ranges: Mapping[str, float], launches: float | None, *, pinned: bool
) -> Iterator[tuple[str, Change]]:
    """Yields each change in words, and itself."""
    for name, factor in classes.items():
        pieces = study.of_class(name)
        if not pieces.any():
            held = sorted({study.classes[code] for code in np.unique(study.kernel).tolist() if code >= 0})
            raise ConfigurationError(f"The steps hold no kernel of class {name!r}", f"They hold: {', '.join(held)}")
        yield f"{name} × {factor:g}", saved_work(pieces * (1 - factor))
    for name, factor in ranges.items():
        if name not in (held := sorted({study.ranges[code] for code in study.spans[:, 0].tolist()})):
            raise ConfigurationError(f"The steps hold no range {name!r}", f"They hold: {', '.join(held) or 'none'}")
        yield f"range {name} × {factor:g}", _range_times(study, name, factor)
    if pinned:
        if not pageable_copies(study).any():
            raise ConfigurationError("The steps hold no large copy from pageable memory to the GPU")
        yield "copies from pinned memory", pinned_copies(study)
    if launches is not None:
        yield f"launches × {launches:g}", cheaper_launches(study, launches)


def _range_times(study: Study, name: str, factor: float) -> Change:
    """Returns a change of a range: the calls, the pauses and the GPU's work in it; without it nothing waits there."""
    calls, pauses = study.inside(name)
    of_pauses, of_work = np.where(pauses, factor, 1.0), np.where(calls[study.replay.launch], factor, 1.0)

    def change(replay: Replay) -> Replay:
        if not factor:
            replay = replay.without_waits(calls)
        replay = replay.with_launching(np.where(calls, factor, 1.0)).with_work(of_work)
        pause = replay.pause * of_pauses
        return replace(replay, after=replay.after - replay.pause + pause, pause=pause)

    return change


def _work_ms(replay: Replay) -> float:
    """The GPU's work and the CPU's own time in a step, ms."""
    own = replay.own[replay.awaited >= 0]
    return float(replay.work.sum() + replay.after.sum() + own.sum()) / replay.steps / 1e6


def _path(study: Study, before: Replay, after: Replay, scale: float) -> tuple[PathPart, ...]:
    """Returns the parts of the critical path of a step, the longest first."""
    sides = [{part: ms * scale for part, ms in _parts(study, replay).items()} for replay in (before, after)]
    parts = [PathPart(part, _PLACES.get(part, "GPU"), sides[0][part], sides[1][part]) for part in sides[0]]
    least = _LEAST * before.step_ns / 1e6 * scale
    listed = [part for part in parts if max(part.before_ms, part.after_ms) >= least]
    return tuple(sorted(listed, key=lambda part: -part.before_ms))


def _parts(study: Study, replay: Replay) -> dict[str, float]:
    """Returns how much of a replayed step, ms, each part of its critical path is."""
    calls, pieces = replay.critical_path()
    works, pauses = pieces * replay.work, calls * replay.pause
    names = (*study.classes, FILLS, UNKNOWN)
    code = np.where(study.kernel >= 0, study.kernel, len(study.classes) + (study.kind == GRAPH))
    parts = dict.fromkeys(names, 0.0)
    for name, ns in zip(names, np.bincount(code, works, len(names)).tolist(), strict=True):
        parts[name] += ns
    parts[LOADING] = float(pauses[study.loading].sum())
    parts[PAUSES] = float(pauses.sum()) - parts[LOADING]
    parts[LAUNCHING] = float((calls * replay.after).sum() - pauses.sum())
    steps = replay.steps - 1 if replay.steps > 2 else replay.steps
    parts[LATENCY] = max(replay.step_ns * steps - sum(parts.values()), 0.0)
    return {name: ns / steps / 1e6 for name, ns in parts.items()}
