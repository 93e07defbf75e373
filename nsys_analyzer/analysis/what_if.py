"""A person's own question: what a step would take if some of its parts took more or less time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from nsys_analyzer.analysis.findings.diagnosis import estimate_baselines, estimate_interval, estimate_unprofiled_ms
from nsys_analyzer.analysis.findings.finding import Change, saved_work
from nsys_analyzer.analysis.findings.waits import cheaper_launches, pageable_copies, pinned_copies
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, FILLS, UNKNOWN
from nsys_analyzer.analysis.ranks.joined_study import ReplayedCaptures, join_replays
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.errors import RECORD_COMMAND, RECORD_ON_GPU_COMMAND, CannotAnswerError, ConfigurationError
from nsys_analyzer.text import plain
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.columns import GRAPH
from nsys_analyzer.trace.schema import NS_PER_MS

Where = Literal["GPU", "CPU", "queue"]
#: The parts of the critical path that are none of the GPU's work: three of the CPU's, and what is between both.
LAUNCHING, LOADING, PAUSES, LATENCY = "calls and launches", "loading of batches", "pauses", "latency and gaps"
_PLACES: dict[str, Where] = {LAUNCHING: "CPU", LOADING: "CPU", PAUSES: "CPU", LATENCY: "queue"}
#: The most of a collective that a faster network does not shorten, ns; no more than the shortest one takes.
_LATENCY_NS = 100_000.0
#: The largest factor that may be asked for. With a larger one, times would have no digits left.
_LARGEST_FACTOR = 1e6
#: What is on the critical path for less of a step is not listed.
_LEAST = 0.005


@dataclass(frozen=True)
class PathPart:
    """A part of the critical path of a step, ms, before and after the changes.

    Attributes:
        part: a kernel class, or what the CPU does.
        where: who works on it, if it is not the time from a launch to its start, or between kernels: "queue".
        rank: of which rank it is; empty where one is asked about, and of the queue.
    """

    part: str
    where: Where
    before_ms: float
    after_ms: float
    rank: str = ""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What steps would take after some changes, none of which was made.

    Attributes:
        group: what these steps are called where they differ, else empty.
        steps: how many there are.
        step_ms: a step without the profiler, before.
        saves_ms_low, saves_ms_high: what it would be shorter by; below zero where it would be longer.
        saves_ms: what it would be shorter by in the replays; ``new_step_ms`` is what it would take then.
    """

    group: str = ""
    steps: int
    step_ms: float
    saves_ms: float
    saves_ms_low: float
    saves_ms_high: float
    new_step_ms: float = field(init=False)

    def __post_init__(self) -> None:
        """Fills what follows from the saving."""
        vars(self).update(new_step_ms=self.step_ms - self.saves_ms)


@dataclass(frozen=True, kw_only=True)
class WhatIf(Saving):
    """What a step would take after some changes.

    Attributes:
        capture: the capture's name, or the run's.
        changes: the changes in words.
        less_ms: how much less a GPU and its CPU would have to do in a step, together; of ranks the mean.
        path: the critical path, its longest parts first.
        ranks: what the ranks are called that were replayed together.
        groups: where steps differ those of each group, and at last the mean of all, by how many there are.
    """

    capture: str
    changes: tuple[str, ...]
    less_ms: float
    path: tuple[PathPart, ...]
    ranks: tuple[str, ...] = ()
    groups: tuple[Saving, ...] = ()

    def on_path_ms(self, where: str) -> tuple[float, float]:
        """Returns how much of the critical path is there, or on a rank, before and after."""
        parts = [part for part in self.path if where in (part.where, part.rank)]
        return sum(part.before_ms for part in parts), sum(part.after_ms for part in parts)


@dataclass(frozen=True)
class Question:
    """What is asked about steps, as of ``what_if``."""

    classes: Mapping[str, float] = field(default_factory=dict)
    ranges: Mapping[str, float] = field(default_factory=dict)
    launches: float | None = None
    pinned: bool = False
    on_time: Collection[int] = ()
    network: float | None = None


def what_if(
    *captures: CaptureSummary, classes: Mapping[str, float] | None = None, ranges: Mapping[str, float] | None = None,
    launches: float | None = None, pinned: bool = False, on_time: Collection[int] = (), network: float | None = None,
) -> WhatIf:  # fmt: skip
    """Returns what a step of a capture, or of a run, would take if its parts took so many times their time; 0: none.

    Args:
        captures: one of those that ``summarize`` returns, or those of all ranks of a run.
        classes: kernel class to factor, such as ``{"matmul": 0.5}``.
        ranges: name of a range to factor, for what the program does inside it and what it launches there.
        launches: a factor for what the CPU needs to launch work, as a CUDA graph may save it.
        pinned: whether large copies to the GPU come from pinned memory, and do not block.
        on_time: ranks of a run for which the others do not wait.
        network: how many times as fast collectives transfer, once the last rank has started them.

    Raises:
        CannotAnswerError: the steps cannot be replayed.
        ConfigurationError: they hold nothing of the kind.
    """
    answers = list(answer_all(captures, Question(classes or {}, ranges or {}, launches, pinned, on_time, network)))
    if len(answers) != 1:
        raise ConfigurationError("These are not the captures of one run whose ranks can be replayed together")
    return answers[0]


def answer_all(captures: Sequence[CaptureSummary], asked: Question) -> Iterator[WhatIf]:
    """Yields the answer of each run whose ranks can be replayed together, and of each other capture.

    Raises:
        CannotAnswerError: the steps cannot be replayed.
        ConfigurationError: they hold nothing of the kind.
    """
    factors = (*asked.classes.values(), *asked.ranges.values(), 1.0 if asked.launches is None else asked.launches)
    largest, smallest = f"{_LARGEST_FACTOR:,.0f}", f"{1 / _LARGEST_FACTOR:f}"
    if not all(0 <= factor <= _LARGEST_FACTOR for factor in factors):
        remedy = "0.5 is half the time, 0 none, 2 twice as much"
        raise ConfigurationError(f"A factor is a number from 0 to {largest}", remedy)
    if asked.network is not None and not 1 / _LARGEST_FACTOR <= asked.network <= _LARGEST_FACTOR:
        remedy = "2 is twice as fast, 0.5 half as fast"
        raise ConfigurationError(f"A network's factor is a number from {smallest} to {largest}", remedy)
    if asked == Question():
        raise ConfigurationError("Nothing is changed", "Say what: a kernel class, a range, launches, or copies")
    for subject in join_replays(captures):
        doubtful = next((row for row in subject.captures if not row.diagnosis or row.diagnosis.doubt), None)
        if subject.study is None or doubtful:
            why = plain((doubtful or subject.captures[0]).findings_missing or "Its steps are not known.", "`")
            remedy = RECORD_ON_GPU_COMMAND if subject.captures[0].on_cpu else RECORD_COMMAND
            raise CannotAnswerError(f"The steps of {subject.title} cannot be replayed. {why.removesuffix('.')}", remedy)
        yield _answer(subject, subject.study, asked)


def _answer(subject: ReplayedCaptures, study: Study, asked: Question) -> WhatIf:
    """Returns the answer about the steps of a capture, or of all ranks of a run."""
    _check(subject, (study, *(other.study for other in study.others)), asked)
    diagnoses = [capture.diagnosis for capture in subject.captures if capture.diagnosis]
    steps = [capture.step for capture in subject.captures if capture.step]
    timed = max(row.step_ms for row in diagnoses) if all(row.is_timed for row in diagnoses) else None
    # In a run a collective waits for other ranks, and no GPU has to.
    alone = len(steps) == 1
    busy = max(step.total_ms - step.idle_ms if alone else step.compute_ms + step.exposed_copy_ms for step in steps)
    changes = dict(_changes(study, asked, subject.ranks))
    saving, pairs, scale = _try(study, asked, changes, max(step.length_ms for step in steps), busy, timed)
    before, after = sorted(pairs, key=lambda pair: pair[0].step_ns)[len(pairs) // 2]
    return WhatIf(
        **saving,
        steps=steps[0].instances,
        capture=subject.title,
        changes=tuple(changes),
        less_ms=(_work_ms(before) - _work_ms(after)) * scale / len(steps),
        path=_path(study, before, after, scale, subject.labels),
        ranks=subject.labels,
        groups=tuple(_groups(study, asked, saving, steps[0])) if alone else (),
    )


def _try(
    study: Study, asked: Question, changes: Mapping[str, tuple[Change, Change]], length_ms: float, busy_ms: float,
    timed_ms: float | None = None,
) -> tuple[dict[str, Any], list[tuple[Replay, Replay]], float]:  # fmt: skip
    """Replays steps of a length before and after changes, on each baseline, as they save least and as they save most.

    Returns the figures, the replays before and after, and the length of a step ÷ that of a replayed one.
    """
    baselines, scale = estimate_baselines(study, length_ms, timed_ms)
    pairs = [(replay, replay) for replay in baselines for _ in range(2)]
    for change in changes.values():
        pairs = [(before, change[place % 2](after)) for place, (before, after) in enumerate(pairs)]
    ms = [(before.step_ns / NS_PER_MS * scale, after.step_ns / NS_PER_MS * scale) for before, after in pairs]
    bounds = [timed_ms or estimate_unprofiled_ms(before, busy_ms, length_ms) for before, _ in (min(ms), max(ms))]
    step_ms = sum(bounds) / 2
    saved_ms = [before - after for before, after in ms]
    of_cpu = bool(asked.ranges or asked.pinned or asked.on_time) or asked.launches is not None
    low, high = estimate_interval(saved_ms, of_cpu=of_cpu, is_timed=bool(timed_ms))
    middle = (min(saved_ms) + max(saved_ms)) / 2
    figures = {"step_ms": step_ms, "saves_ms": middle, "saves_ms_low": low, "saves_ms_high": min(high, step_ms)}
    return figures, pairs, scale


def _groups(study: Study, asked: Question, saving: dict[str, Any], step: StepSummary) -> Iterator[Saving]:
    """Yields what the steps of each group would take, and the mean of all; nothing if there is one group."""
    savings = [Saving(**saving, group=study.group, steps=step.instances)]
    for group in study.others:
        changes = dict(_changes(group.study, asked, ()))
        figures, _, _ = _try(group.study, asked, changes, group.length_ms, group.study.busy_ms)
        savings.append(Saving(**figures, group=group.name, steps=group.steps))
    if len(savings) > 1:
        count = sum(row.steps for row in savings)
        mean = {name: sum(getattr(row, name) * row.steps for row in savings) / count for name in saving}
        yield from (*savings, Saving(**mean, group="all", steps=count))


def _check(subject: ReplayedCaptures, studies: Sequence[Study], asked: Question) -> None:
    """Raises ``ConfigurationError`` where none of the steps hold what is asked about."""
    codes = [(study.classes, np.unique(study.kernel).tolist()) for study in studies]
    classes = {names[code] for names, kernels in codes for code in kernels if code >= 0} - {""}
    ranges = {study.ranges[code] for study in studies for code in study.spans[:, 0].tolist()}
    asked_classes = [*asked.classes, *([COMMUNICATION] if asked.network is not None else [])]
    for kind, names, present in (("kernel of class", asked_classes, classes), ("range", asked.ranges, ranges)):
        for name in (name for name in names if name not in present):
            present_names = ", ".join(sorted(present)) or "none"
            raise ConfigurationError(f"The steps hold no {kind} {name!r}", f"They hold: {present_names}")
    if asked.pinned and not any(pageable_copies(study).any() for study in studies):
        raise ConfigurationError("The steps hold no large copy from pageable memory to the GPU")
    if asked.on_time and not set(asked.on_time) < set(subject.ranks):
        late, hint = ", ".join(map(str, asked.on_time)), "Give the captures of all ranks; one of them at least is late"
        raise ConfigurationError(f"No other rank of {subject.title} is known to wait for rank {late}", hint)


def _changes(study: Study, asked: Question, ranks: Sequence[int | None]) -> Iterator[tuple[str, tuple[Change, Change]]]:
    """Yields each change in words, and itself: as it saves least, and as it saves most."""
    for name, factor in asked.classes.items():
        yield f"{name} × {factor:g}", (saved_work(study.of_class(name) * (1 - factor)),) * 2
    for name, factor in asked.ranges.items():
        yield f"range {name} × {factor:g}", (_range_times(study, name, factor),) * 2
    if asked.pinned:
        yield "copies from pinned memory", (pinned_copies(study),) * 2
    if asked.launches is not None:
        yield f"launches × {asked.launches:g}", (cheaper_launches(study, asked.launches),) * 2
    if asked.on_time:
        places = frozenset(place for place, rank in enumerate(ranks) if rank in asked.on_time)
        yield f"{', '.join(f'rank {rank}' for rank in asked.on_time)} on time", _on_time(study, places)
    if asked.network is not None:
        yield f"a network {asked.network:g} times as fast", _faster_network(study, asked.network)


def _on_time(study: Study, places: frozenset[int]) -> tuple[Change, Change]:
    """Returns changes after which nobody waits for some ranks: kernels as they are, and no longer than on these ranks.

    A collective that waits occupies a part of the GPU: kernels beside it take longer than on the rank that is late.
    """
    _, rank = study.replay.rank_of
    names = np.array([*study.kernels, ""])
    _, name = np.unique(names[study.kernel], return_inverse=True)
    counted = (study.kernel >= 0) & ~study.of_class(COMMUNICATION)
    is_late = np.isin(rank, list(places))

    def mean(kernels: Bools, code: Ints) -> Floats:
        count, ns = (np.bincount(code[kernels], some, code.max() + 1) for some in (None, study.replay.work[kernels]))
        means: Floats = (ns / np.maximum(count, 1))[code]
        return means

    of_others = counted & ~is_late
    own, there = mean(of_others, name + rank * len(names)), mean(counted & is_late, name)
    shorter = np.divide(there, own, out=np.ones(len(own)), where=(there > 0) & (there < own))
    most = saved_work(np.where(of_others, 1 - shorter, 0.0))
    return lambda replay: replace(replay, on_time=places), lambda replay: most(replace(replay, on_time=places))


def _faster_network(study: Study, factor: float) -> tuple[Change, Change]:
    """Returns changes of what collectives transfer: but for a latency of each, and all of it.

    Of a rank alone nobody knows which part of a collective waits for others: none of it, or all of it is transferred.
    """
    work, meets = study.replay.work, study.replay.meets
    if not len(meets):
        return saved_work(np.zeros(len(work))), saved_work(study.of_class(COMMUNICATION) * (1 - 1 / factor))
    transfers = (meets != -1) & (work > 0)
    latency = work[transfers].min(initial=_LATENCY_NS)
    rest = np.where(transfers, 1 - latency / np.maximum(work, 1.0), 0.0)
    return saved_work(rest * (1 - 1 / factor)), saved_work(transfers * (1 - 1 / factor))


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
    return float(replay.work.sum() + replay.after.sum() + own.sum()) / replay.steps / NS_PER_MS


def _path(study: Study, before: Replay, after: Replay, scale: float, labels: Sequence[str]) -> tuple[PathPart, ...]:
    """Returns the parts of the critical path of a step, the longest first."""
    sides = [_parts(study, replay, labels or ("",)) for replay in (before, after)]
    ms = {key: [side[key] * scale for side in sides] for key in sides[0]}
    parts = [PathPart(part, _PLACES.get(part, "GPU"), old, new, rank) for (part, rank), (old, new) in ms.items()]
    least = _LEAST * before.step_ns / NS_PER_MS * scale
    listed = [part for part in parts if max(part.before_ms, part.after_ms) >= least]
    return tuple(sorted(listed, key=lambda part: -part.before_ms))


def _parts(study: Study, replay: Replay, labels: Sequence[str]) -> dict[tuple[str, str], float]:
    """Returns how much of a replayed step, ms, each part of its critical path is, by part and rank."""
    calls, pieces = replay.critical_path()
    works, pauses = pieces * replay.work, calls * replay.pause
    names = (*study.classes, FILLS, UNKNOWN)
    code = np.where(study.kernel >= 0, study.kernel, len(study.classes) + (study.kind == GRAPH))
    parts = defaultdict[tuple[str, str], float](float)
    for rank, label in enumerate(labels):
        mine, of_rank = (place == rank for place in replay.rank_of)
        for name, ns in zip(names, np.bincount(code[of_rank], works[of_rank], len(names)).tolist(), strict=True):
            parts[name, label] += ns
        parts[LOADING, label] = float(np.minimum(pauses, calls * study.loading_ns)[mine].sum())
        parts[PAUSES, label] = float(pauses[mine].sum()) - parts[LOADING, label]
        parts[LAUNCHING, label] = float((calls * replay.after)[mine].sum() - pauses[mine].sum())
    steps = replay.steps - 1 if replay.steps > 2 else replay.steps
    parts[LATENCY, ""] = max(replay.step_ns * steps - sum(parts.values()), 0.0)
    return {key: ns / steps / NS_PER_MS for key, ns in parts.items()}
