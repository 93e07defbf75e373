"""Answers what-if questions: predicts the length of a step if some of its parts took more or less time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.facts import Fact, FactOrText
from nsys_analyzer.analysis.findings.finding import ReplayChange, saved_work
from nsys_analyzer.analysis.findings.saving_intervals import estimate_interval
from nsys_analyzer.analysis.findings.waits import find_pageable_copies, pin_copies, scale_launches
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, FILLS, UNKNOWN
from nsys_analyzer.analysis.operators.account import find_remaining_shares, has_name
from nsys_analyzer.analysis.operators.matching import OperatorWork
from nsys_analyzer.analysis.operators.pricing import price_operators
from nsys_analyzer.analysis.ranks.collectives import name_strategies
from nsys_analyzer.analysis.ranks.joined_study import CapturesToReplay, join_replays
from nsys_analyzer.analysis.ranks.more_ranks import MAX_LATENCY_NS, change_rank_count
from nsys_analyzer.analysis.ranks.run import DATA_PARALLEL, SHARDED
from nsys_analyzer.analysis.steps.pace import estimate_baselines, estimate_unprofiled_ms
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.errors import RECORD_COMMAND, RECORD_ON_GPU_COMMAND, CannotAnswerError, ConfigurationError
from nsys_analyzer.text import plain
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.columns import GRAPH
from nsys_analyzer.trace.schema import NS_PER_MS

#: Where a part of the critical path takes place; "queue" is the time between a launch and the start of its work.
PathLocation = Literal["GPU", "CPU", "queue"]
#: The parts of the critical path that are not the GPU's work.
LAUNCHING, LOADING, PAUSES, LATENCY = "calls and launches", "loading of batches", "pauses", "latency and gaps"
PINNING = "copies to pinned memory"
_LOCATION_OF_PART: dict[str, PathLocation] = {
    LAUNCHING: "CPU", LOADING: "CPU", PAUSES: "CPU", PINNING: "CPU", LATENCY: "queue",
}  # fmt: skip
#: The largest factor that a question may contain. A larger one would make times that a float cannot represent exactly.
_LARGEST_FACTOR = 1e6
#: A part of the critical path is listed only if it takes at least this share of a step.
_SMALLEST_LISTED_SHARE = 0.005

#: One change twice: under the assumption with which it saves least, and under the assumption with which it saves most.
ChangePair = tuple[ReplayChange, ReplayChange]


@dataclass(frozen=True)
class PathPart:
    """A part of the critical path of a step, before and after the changes.

    Attributes:
        part: a kernel class, or the name of a part on the CPU or in the queue.
        where: where the part is.
        before_ms, after_ms: the length of the part before and after the changes, ms.
        rank: the label of the part's rank; empty for the queue, and if a capture is replayed alone.
    """

    part: str
    where: PathLocation
    before_ms: float
    after_ms: float
    rank: str = ""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The predicted effect of changes on the length of a step.

    Attributes:
        group: the name of the group of steps, if there are several groups; else empty.
        steps: the number of steps.
        step_ms: the length of a step without the profiler, before the changes, ms.
        saves_ms: the predicted saving per step, ms; negative if the step would become longer.
        saves_ms_low, saves_ms_high: the interval of the saving, ms.
        new_step_ms: the predicted length of a step after the changes, ms.
    """

    group: str = ""
    steps: int
    step_ms: float
    saves_ms: float
    saves_ms_low: float
    saves_ms_high: float
    new_step_ms: float = field(init=False)

    def __post_init__(self) -> None:
        """Computes ``new_step_ms``."""
        vars(self).update(new_step_ms=self.step_ms - self.saves_ms)


@dataclass(frozen=True, kw_only=True)
class WhatIf(Saving):
    """The answer to a what-if question.

    Attributes:
        capture: the name of the capture or of the run.
        changes: the changes that the question asks for.
        less_ms: the decrease of the GPU's work plus the CPU's own time per step, ms; the mean over the ranks.
        path: the parts of the critical path, the longest part first.
        ranks: the labels of the ranks that were replayed together.
        groups: the saving in each group of steps, then the mean over all steps; empty if there is only one group.
    """

    capture: str
    changes: tuple[FactOrText, ...]
    less_ms: float
    path: tuple[PathPart, ...]
    ranks: tuple[str, ...] = ()
    groups: tuple[Saving, ...] = ()

    def on_path_ms(self, where: str) -> tuple[float, float]:
        """Returns the length of the critical path at one place or on one rank, ms, before and after the changes."""
        parts = [part for part in self.path if where in (part.where, part.rank)]
        return sum(part.before_ms for part in parts), sum(part.after_ms for part in parts)


@dataclass(frozen=True)
class WhatIfQuestion:
    """The changes of a what-if question. The attributes are the arguments of ``what_if``."""

    classes: Mapping[str, float] = field(default_factory=dict)
    ranges: Mapping[str, float] = field(default_factory=dict)
    launches: float | None = None
    pinned: bool = False
    on_time: Collection[int] = ()
    network: float | None = None
    operators: Mapping[str, float | None] = field(default_factory=dict)
    rank_count: int | None = None


def what_if(
    *captures: CaptureSummary, classes: Mapping[str, float] | None = None, ranges: Mapping[str, float] | None = None,
    launches: float | None = None, pinned: bool = False, on_time: Collection[int] = (), network: float | None = None,
    operators: Mapping[str, float | None] | None = None, rank_count: int | None = None,
) -> WhatIf:  # fmt: skip
    """Predicts the length of a step of a capture or of a run if some of its parts took more or less time.

    A factor multiplies a time: 0.5 halves the time, and 0 removes it.

    Args:
        captures: the summary of one capture, as ``summarize`` returns it, or the summaries of all ranks of a run.
        classes: the factor for the time of each kernel class, such as ``{"matmul": 0.5}``.
        ranges: the factor for each range. It applies to the program's time in the range and to the work launched there.
        launches: the factor for the CPU's time to launch work. The factor 0 stands for a CUDA graph.
        pinned: whether large copies to the GPU come from pinned memory, so that they do not block.
        on_time: the ranks that the other ranks no longer wait for.
        network: the factor by which the transfers of collectives become faster.
        operators: the factor for the kernel time of each operator, such as ``{"aten::mm": 0.5}``. None stands for the
            attainable time of the operator.
        rank_count: the number of ranks, each of which does the work of a recorded rank.

    Raises:
        CannotAnswerError: the steps cannot be replayed, or the attainable time of an operator is not known.
        ConfigurationError: the question is invalid, or the steps do not contain a class, range, copy or operator in
            the question.
    """
    question = WhatIfQuestion(
        classes or {}, ranges or {}, launches, pinned, on_time, network, operators or {}, rank_count
    )
    answers = list(answer_all(captures, question))
    if len(answers) != 1:
        raise ConfigurationError("These are not the captures of one run whose ranks can be replayed together")
    return answers[0]


def answer_all(captures: Sequence[CaptureSummary], question: WhatIfQuestion) -> Iterator[WhatIf]:
    """Yields the answer for each run whose ranks can be replayed together, and for each other capture.

    Raises:
        CannotAnswerError: the steps cannot be replayed, or the attainable time of an operator is not known.
        ConfigurationError: the question is invalid, or the steps do not contain a class, range, copy or operator in
            the question.
    """
    launches = 1.0 if question.launches is None else question.launches
    factors = [*question.classes.values(), *question.ranges.values(), launches]
    factors += [factor for factor in question.operators.values() if factor is not None]
    largest, smallest = f"{_LARGEST_FACTOR:,.0f}", f"{1 / _LARGEST_FACTOR:f}"
    if not all(0 <= factor <= _LARGEST_FACTOR for factor in factors):
        hint = "0.5 is half the time, 0 no time, 2 twice the time"
        raise ConfigurationError(f"A factor is a number from 0 to {largest}", hint)
    if question.network is not None and not 1 / _LARGEST_FACTOR <= question.network <= _LARGEST_FACTOR:
        hint = "2 is twice as fast, 0.5 half as fast"
        raise ConfigurationError(f"The factor of the network is a number from {smallest} to {largest}", hint)
    if question == WhatIfQuestion():
        raise ConfigurationError(
            "The question changes nothing", "Give a kernel class, a range, launches, copies or an operator"
        )
    if question.rank_count is not None and not 2 <= question.rank_count <= _LARGEST_FACTOR:
        raise ConfigurationError(f"The number of ranks is from 2 to {largest}")
    for subject in join_replays(captures):
        looked_at = [capture for capture in subject.captures if not capture.is_one_of_many_ranks]
        doubtful = next((capture for capture in looked_at if not capture.diagnosis or capture.diagnosis.doubt), None)
        if subject.study is None or doubtful:
            reason = plain((doubtful or subject.captures[0]).findings_missing or "Its steps are unknown.", "`")
            hint = RECORD_ON_GPU_COMMAND if subject.captures[0].on_cpu else RECORD_COMMAND
            message = f"The steps of {subject.title} cannot be replayed. {reason.removesuffix('.')}"
            raise CannotAnswerError(message, hint)
        yield _answer_question(subject, subject.study, question)


def _answer_question(subject: CapturesToReplay, study: Study, question: WhatIfQuestion) -> WhatIf:
    """Answers a question for the steps of a capture, or of all ranks of a run."""
    _check_that_steps_contain(subject, (study, *(group.study for group in study.other_groups)), question)
    diagnoses = [capture.diagnosis for capture in subject.captures if capture.diagnosis]
    steps = [capture.step for capture in subject.captures if capture.step]
    is_timed = all(diagnosis.is_timed for diagnosis in diagnoses)
    step_spread = max(diagnosis.step_ms_high / diagnosis.step_ms - 1 for diagnosis in diagnoses) if is_timed else 0.0
    timed_ms = max(diagnosis.step_ms for diagnosis in diagnoses) if is_timed else None
    is_alone = len(steps) == 1
    # In a run, collectives wait for other ranks, so the time of collectives is not a lower bound of the step.
    busy_ms = max(
        step.total_ms - step.idle_ms if is_alone else step.compute_ms + step.exposed_copy_ms for step in steps
    )
    operators = subject.captures[0].operators if is_alone else None
    names, changes = zip(*_make_changes(study, question, subject.ranks, operators), strict=True)
    length_ms = max(step.length_ms for step in steps)
    in_recorded_process = all(diagnosis.in_recorded_process for diagnosis in diagnoses)
    replays = replay_changes(study, changes, length_ms, busy_ms, timed_ms, in_recorded_process, step_spread)
    before, after = sorted(replays.pairs, key=lambda pair: pair[0].step_ns)[len(replays.pairs) // 2]
    saving = replace(replays.saving, group=study.group, steps=steps[0].instances)
    scale = replays.scale
    before_ms, after_ms = (_measure_path_ms(study, replay, subject.labels or ("",)) for replay in (before, after))
    parts = [
        PathPart(
            part, _LOCATION_OF_PART.get(part, "GPU"), ms * replays.scale, after_ms[part, rank] * replays.scale, rank
        )
        for (part, rank), ms in before_ms.items()
    ]
    least_ms = _SMALLEST_LISTED_SHARE * before.step_ns / NS_PER_MS * scale
    listed_parts = [part for part in parts if max(part.before_ms, part.after_ms) >= least_ms]
    return WhatIf(
        steps=saving.steps,
        step_ms=saving.step_ms,
        saves_ms=saving.saves_ms,
        saves_ms_low=saving.saves_ms_low,
        saves_ms_high=saving.saves_ms_high,
        capture=subject.title,
        changes=names,
        less_ms=(_add_up_work_ms(before) - _add_up_work_ms(after)) * scale / len(steps),
        path=tuple(sorted(listed_parts, key=lambda part: -part.before_ms)),
        ranks=subject.labels,
        groups=tuple(_replay_groups(study, question, saving, operators)) if is_alone else (),
    )


@dataclass(frozen=True)
class ChangedReplays:
    """Replays of the steps before and after the changes.

    There are two replays for each baseline: with the changes as they save least, and as they save most.

    Attributes:
        pairs: (the replay before the changes, the replay after the changes).
        scale: the ratio of the length of a step to the length of a replayed step.
        saving: the saving; ``saves_ms`` is the middle of the savings in the replays.
    """

    pairs: tuple[tuple[Replay, Replay], ...]
    scale: float
    saving: Saving


def replay_changes(
    study: Study, changes: Iterable[ChangePair], length_ms: float, busy_ms: float, timed_ms: float | None = None,
    in_recorded_process: bool = False, step_spread: float = 0.0,
) -> ChangedReplays:  # fmt: skip
    """Replays steps before and after changes.

    Args:
        study: the steps.
        changes: the changes that are made one after the other.
        length_ms: the length of a step under the profiler, ms.
        busy_ms: the time in a step in which the GPU works, ms.
        timed_ms: the measured length of a step without the profiler, ms; None if it was not measured.
        in_recorded_process: whether ``timed_ms`` was measured in the recorded process.
        step_spread: the relative standard deviation of the steps that the recorded process made without the profiler.
    """
    baselines, scale = estimate_baselines(study, length_ms, timed_ms, in_recorded_process)
    pairs = [(replay, replay) for replay in baselines for _ in range(2)]
    for change in changes:
        pairs = [(before, change[index % 2](after)) for index, (before, after) in enumerate(pairs)]
    ms = [(before.step_ns / NS_PER_MS * scale, after.step_ns / NS_PER_MS * scale) for before, after in pairs]
    bounds = [timed_ms or estimate_unprofiled_ms(before, busy_ms, length_ms) for before, _ in (min(ms), max(ms))]
    step_ms = sum(bounds) / 2
    low, middle, high = estimate_interval(study, pairs, scale, step_spread)
    saving = Saving(
        steps=study.steps, step_ms=step_ms, saves_ms=middle, saves_ms_low=low, saves_ms_high=min(high, step_ms)
    )
    return ChangedReplays(tuple(pairs), scale, saving)


def _replay_groups(
    study: Study, question: WhatIfQuestion, usual: Saving, operators: OperatorWork | None
) -> Iterator[Saving]:
    """Yields the saving in each group of steps, then the mean over all steps; nothing if there is only one group."""
    savings = [usual]
    for group in study.other_groups:
        changes = (change for _, change in _make_changes(group.study, question, (), operators))
        replays = replay_changes(group.study, changes, group.length_ms, group.study.busy_ms)
        savings.append(replace(replays.saving, group=group.name, steps=group.steps))
    if len(savings) > 1:
        count = sum(saving.steps for saving in savings)

        def mean(name: str) -> float:
            """Returns the mean of a saving's attribute over all steps."""
            return float(sum(getattr(saving, name) * saving.steps for saving in savings)) / count

        yield from savings
        yield Saving(
            group="all",
            steps=count,
            step_ms=mean("step_ms"),
            saves_ms=mean("saves_ms"),
            saves_ms_low=mean("saves_ms_low"),
            saves_ms_high=mean("saves_ms_high"),
        )


def _check_that_steps_contain(subject: CapturesToReplay, studies: Sequence[Study], question: WhatIfQuestion) -> None:
    """Checks that some steps contain the classes, ranges, copies and ranks of the question.

    Raises:
        ConfigurationError: no step contains one of them.
    """
    codes = [(study.classes, np.unique(study.operations.kernel).tolist()) for study in studies]
    present_classes = {names[code] for names, kernels in codes for code in kernels if code >= 0} - {""}
    present_ranges = {study.ranges[code] for study in studies for code in study.spans.name.tolist()}
    classes = [*question.classes, *([COMMUNICATION] if question.network is not None else [])]
    for noun, names, present in (
        ("kernel of class", classes, present_classes),
        ("range", question.ranges, present_ranges),
    ):
        for name in (name for name in names if name not in present):
            present_names = ", ".join(sorted(present)) or "none"
            raise ConfigurationError(f"The steps contain no {noun} {name!r}", f"They contain: {present_names}")
    if question.operators and len(subject.captures) > 1:
        hint = "Give the capture of one rank"
        raise ConfigurationError("Operators cannot be changed if several ranks are replayed together", hint)
    if question.rank_count is not None:
        strategies = set(name_strategies([member for capture in subject.captures for member in capture.members]))
        if not subject.ranks:
            hint = "Give the captures of all ranks"
            raise ConfigurationError(f"{subject.title} is no run of several ranks that wait for each other", hint)
        if not strategies <= {DATA_PARALLEL, SHARDED}:
            reason = "Its ranks share the layers of the model, so with more ranks, each rank would do other work"
            raise CannotAnswerError(f"The steps of {subject.title} cannot be predicted for more ranks. {reason}")
    if question.pinned and not any(find_pageable_copies(study).any() for study in studies):
        raise ConfigurationError("The steps contain no large copy from pageable memory to the GPU")
    if question.on_time and not set(question.on_time) < set(subject.ranks):
        ranks = ", ".join(map(str, question.on_time))
        hint = "Give the captures of all ranks. At least one of them must stay late"
        raise ConfigurationError(f"No other rank of {subject.title} is known to wait for rank {ranks}", hint)


def _make_changes(
    study: Study, question: WhatIfQuestion, ranks: Sequence[int | None], operators: OperatorWork | None
) -> Iterator[tuple[Fact, ChangePair]]:
    """Yields each change of a question: the fact from which a report makes its name, and the change itself."""
    for name, factor in question.classes.items():
        change = saved_work(study.of_class(name) * (1 - factor))
        yield Fact("changed_class", name=name, factor=factor), (change, change)
    for name, factor in question.ranges.items():
        change = _scale_range(study, name, factor)
        yield Fact("changed_range", name=name, factor=factor), (change, change)
    for name, share in question.operators.items():
        change = _change_operator(study, operators, name, share)
        yield Fact("changed_operator", name=name, factor=share), (change, change)
    if question.pinned:
        yield Fact("pinned_copies"), pin_copies(study)
    if question.launches is not None:
        change = scale_launches(study, question.launches)
        yield Fact("changed_launches", factor=question.launches), (change, change)
    if question.on_time:
        positions = frozenset(position for position, rank in enumerate(ranks) if rank in question.on_time)
        yield Fact("ranks_on_time", ranks=tuple(question.on_time)), _put_on_time(study, positions)
    if question.rank_count is not None:
        yield (
            Fact("more_ranks", before=len(ranks), after=question.rank_count),
            change_rank_count(study, question.rank_count),
        )
    if question.network is not None:
        yield Fact("faster_network", factor=question.network), _speed_up_network(study, question.network)


def _change_operator(study: Study, operators: OperatorWork | None, name: str, factor: float | None) -> ReplayChange:
    """Returns a change that multiplies the kernel time of an operator, or shortens it to the attainable time.

    Raises:
        CannotAnswerError: the operators of the steps, or the attainable time of this operator, are not known.
        ConfigurationError: the steps do not contain the operator.
    """
    if operators is None:
        raise CannotAnswerError("The operators of the steps are not known", RECORD_COMMAND)
    priced = price_operators(study, operators)
    names = [signature.name for signature in priced.calls.signatures]
    is_named = np.array([has_name(full, name) for full in names])[priced.calls.signature]
    if not priced.operations_of(is_named).any():
        with_work = np.unique(priced.calls.signature[priced.measured_ns > 0]).tolist()
        present = ", ".join(sorted({names[index] for index in with_work})) or "none"
        raise ConfigurationError(f"The steps contain no operator {name!r}", f"They contain: {present}")
    if factor is None and not (is_named & priced.is_priced).any():
        raise CannotAnswerError(f"The attainable time of {name} is not known", "nsys-analyze operators CAPTURE")
    shares = find_remaining_shares(priced) if factor is None else np.full(len(priced.calls), factor)
    return saved_work(1 - priced.spread(np.where(is_named, shares, 1.0)))


def _scale_range(study: Study, name: str, factor: float) -> ReplayChange:
    """Returns a change that multiplies the time of calls, pauses and GPU work in a range.

    The factor 0 also removes the waits for the GPU in the range.
    """
    calls, pauses = study.inside_range(name)
    pause_factors, work_factors = np.where(pauses, factor, 1.0), np.where(calls[study.replay.launch], factor, 1.0)

    def change(replay: Replay) -> Replay:
        """Returns the steps with all requested changes."""
        if not factor:
            replay = replay.without_waits(calls)
        replay = replay.scale_launches(np.where(calls, factor, 1.0)).scale_work(work_factors)
        pause = replay.pause_ns * pause_factors
        return replace(replay, cpu_ns=replay.cpu_ns - replay.pause_ns + pause, pause_ns=pause)

    return change


def _put_on_time(study: Study, late_ranks: frozenset[int]) -> ChangePair:
    """Returns two changes after which no rank waits for the late ranks.

    The first change does not affect kernels. The second change also shortens kernels of the other ranks to their mean
    duration on the late ranks, because kernels take longer while a waiting collective occupies a part of the GPU.
    """
    _, rank = study.replay.rank_of
    names = np.array([*study.kernels, ""])
    _, name_code = np.unique(names[study.operations.kernel], return_inverse=True)
    is_kernel = (study.operations.kernel >= 0) & ~study.of_class(COMMUNICATION)
    is_late = np.isin(rank, list(late_ranks))

    def mean_ns(kernels: Bools, code: Ints) -> Floats:
        """Returns, for each operation, the mean duration of the kernels with its code, ns, shape (operations,)."""
        count = np.bincount(code[kernels], None, code.max() + 1)
        total_ns = np.bincount(code[kernels], study.replay.work_ns[kernels], code.max() + 1)
        means: Floats = (total_ns / np.maximum(count, 1))[code]
        return means

    on_other_ranks = is_kernel & ~is_late
    own_ns = mean_ns(on_other_ranks, name_code + rank * len(names))
    on_late_ns = mean_ns(is_kernel & is_late, name_code)
    is_shorter_on_late = (on_late_ns > 0) & (on_late_ns < own_ns)
    remaining = np.divide(on_late_ns, own_ns, out=np.ones(len(own_ns)), where=is_shorter_on_late)
    shorten = saved_work(np.where(on_other_ranks, 1 - remaining, 0.0))
    return (
        lambda replay: replace(replay, unawaited_ranks=late_ranks),
        lambda replay: shorten(replace(replay, unawaited_ranks=late_ranks)),
    )


def _speed_up_network(study: Study, factor: float) -> ChangePair:
    """Returns two changes that make the transfers of collectives faster.

    The first change keeps a latency of each collective, and the second does not. If a rank is replayed alone, it is
    unknown which part of a collective is waiting: the first change then saves nothing, and the second change shortens
    the whole collective.
    """
    work, collective = study.replay.work_ns, study.replay.collective
    if not len(collective):
        return saved_work(np.zeros(len(work))), saved_work(study.of_class(COMMUNICATION) * (1 - 1 / factor))
    transfers = (collective != -1) & (work > 0)
    latency_ns = work[transfers].min(initial=MAX_LATENCY_NS)
    share_after_latency = np.where(transfers, 1 - latency_ns / np.maximum(work, 1.0), 0.0)
    return saved_work(share_after_latency * (1 - 1 / factor)), saved_work(transfers * (1 - 1 / factor))


def _add_up_work_ms(replay: Replay) -> float:
    """Returns the sum of the GPU's work and the CPU's own time per step, ms."""
    own_ns = replay.min_wait_ns[replay.awaited >= 0]
    return float(replay.work_ns.sum() + replay.cpu_ns.sum() + own_ns.sum()) / replay.steps / NS_PER_MS


def _measure_path_ms(study: Study, replay: Replay, labels: Sequence[str]) -> dict[tuple[str, str], float]:
    """Returns the length of each part of the critical path per replayed step, ms, by part and rank."""
    call_shares, operation_shares = replay.critical_path()
    work_ns, pause_ns = operation_shares * replay.work_ns, call_shares * replay.pause_ns
    names = (*study.classes, FILLS, UNKNOWN)
    class_code = np.where(
        study.operations.kernel >= 0, study.operations.kernel, len(study.classes) + (study.operations.kind == GRAPH)
    )
    parts_ns = defaultdict[tuple[str, str], float](float)
    for rank, label in enumerate(labels):
        calls, operations = (position == rank for position in replay.rank_of)
        class_ns = np.bincount(class_code[operations], work_ns[operations], len(names)).tolist()
        for name, ns in zip(names, class_ns, strict=True):
            parts_ns[name, label] += ns
        loading_ns = float(np.minimum(pause_ns, call_shares * study.calls.loading_ns)[calls].sum())
        parts_ns[LOADING, label] = loading_ns
        parts_ns[PAUSES, label] = float(pause_ns[calls].sum()) - loading_ns
        parts_ns[LAUNCHING, label] = float((call_shares * replay.cpu_ns)[calls].sum() - pause_ns[calls].sum())
    # The critical path of several steps begins at the start of the second step.
    steps = replay.steps - 1 if replay.steps > 2 else replay.steps
    replayed_ns = replace(replay, least_step_ns=0.0).step_ns * steps
    parts_ns[LATENCY, ""] = max(replayed_ns - sum(parts_ns.values()), 0.0)
    parts_ns[PINNING, ""] = replay.step_ns * steps - replayed_ns
    return {key: ns / steps / NS_PER_MS for key, ns in parts_ns.items()}
