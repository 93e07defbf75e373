"""Rules for values that leave the GPU: scalars that the program waits for, copied tensors, and work on the CPU.

Each rule consists of a type of figures and a function that finds them. ``report/finding_texts/waits.py`` makes
sentences from the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from nsys_analyzer.analysis.findings.finding import (
    Caller,
    Candidate,
    FindingFigures,
    Place,
    Rule,
    StepsToExplain,
    distinct_names,
)
from nsys_analyzer.analysis.findings.waits import list_most_frequent
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.steps.lines import parse_line
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import (
    ALLOCATE,
    COPY,
    DEVICE_TO_PAGEABLE,
    FREE,
    INTO_HOST,
    KERNEL,
    PAGEABLE_TO_DEVICE,
    SYNCHRONIZE,
)
from nsys_analyzer.trace.schema import NS_PER_MS

#: The maximum size of a device-to-host copy of a few scalars, such as for .item() or a mask for nonzero(), bytes.
_LARGEST_SCALAR_BYTES = 4096
#: The largest share of a copy's time that is assumed to remain if the copy runs on another stream. The copy still takes
#: memory bandwidth from other work.
_REMAINING_COPY_SHARE = 0.15
#: The assumed time of a call in a forward pass without anomaly detection, as a multiple of the time of a usual launch:
#: the longest and the shortest.
FORWARD_LAUNCHES = (4.0, 1.0)
#: The operators with which anomaly detection checks a gradient.
_CHECK_OPERATORS = {"aten::isnan", "aten::_is_any_true", "aten::_local_scalar_dense"}


@dataclass(frozen=True)
class DeviceToHostCopyFigures(FindingFigures):
    """The device-to-host copies that are larger than a few scalars, per step.

    Attributes:
        copies: the number of these copies per step.
        bytes: the size of these copies per step, bytes.
        ms: the time of these copies per step, ms.
        pageable_share: the share of these bytes that is copied to pageable memory.
        range_names: the ranges around these copies.
        is_torch: whether the program uses PyTorch.
        is_pass: whether the whole capture counts as one step.
    """

    copies: float
    bytes: float
    ms: float
    pageable_share: float
    range_names: tuple[str, ...]
    is_torch: bool
    is_pass: bool


def find_device_to_host_copy(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds device-to-host copies that are larger than a few scalars: a checkpoint, or outputs that are logged."""
    study = steps.study
    copies = steps.without_work_after_loop(np.isin(study.operations.copy, INTO_HOST) & ~_find_scalar_copies(study))
    copies &= ~_find_round_trips(steps)[1]
    if not copies.any():
        return
    calls = study.calls_of_copies(copies)
    copying_calls = calls | _is_range_around(study, calls, study.calls.range)
    # Between two of these copies, the program works on the copied tensor, and allocates memory for the next copy.
    pausing = _is_range_around(study, calls, study.calls.pause_range) | _are_followed_by(study, calls)
    if (copying_calls & study.calls_of(study.operations.kind == KERNEL)).any():  # the ranges contain other work, too
        copying_calls = calls

    def make_asynchronous(replay: Replay) -> Replay:
        """Returns the steps with copies that the program does not wait for."""
        return replay.without_waits(calls).scale_work(np.where(copies, _REMAINING_COPY_SHARE, 1.0))

    def remove_copies(replay: Replay) -> Replay:
        """Returns the steps without the copies."""
        shorter = replay.without_calls(copying_calls).limit_pauses(pausing, 0.0)
        return shorter.scale_work(np.where(copies, 0.0, 1.0))

    pageable = copies & (study.operations.copy == DEVICE_TO_PAGEABLE)
    figures = DeviceToHostCopyFigures(
        study.operations_per_step(copies),
        float(study.operations.size[copies].sum()) / study.steps,
        float(study.operations.duration_ns[copies].sum()) / study.steps / NS_PER_MS,
        float(study.operations.size[pageable].sum() / max(study.operations.size[copies].sum(), 1)),
        distinct_names(study.range_names(study.calls.range[calls])),
        steps.is_torch,
        steps.summary.is_pass,
    )
    yield Candidate("device_to_host_copy", figures, (make_asynchronous, remove_copies), Place("idle", "copy"))


def _are_followed_by(study: Study, calls: Bools) -> Bools:
    """Returns True for each of ``calls`` whose next call with work is also one of ``calls``; shape (calls,)."""
    does_work = study.calls_of(np.ones(len(study.operations), np.bool_))
    does_work |= np.isin(study.calls.kind, (COPY, SYNCHRONIZE, ALLOCATE, FREE))
    working = np.flatnonzero(does_work)
    next_working = np.searchsorted(working, np.arange(len(calls)), side="right")
    followed: Bools = calls & np.append(calls[working], False)[next_working]
    return followed


def _find_scalar_copies(study: Study) -> Bools:
    """Returns True for each device-to-host copy of a few scalars, such as a loss; shape (operations,).

    A small copy next to larger copies is not a copy of scalars, but of a small tensor, such as in a model's state.
    """
    to_host = np.isin(study.operations.copy, INTO_HOST)
    is_small, run = study.operations.size <= _LARGEST_SCALAR_BYTES, np.cumsum(~to_host)
    scalars: Bools = to_host & is_small & (np.bincount(run, to_host & ~is_small)[run] == 0)
    return scalars


def _is_range_around(study: Study, calls: Bools, range_codes: Ints) -> Bools:
    """Returns True for each element of ``range_codes`` that is the range around one of ``calls``.

    The result is False for ranges that are phases.
    """
    codes = [code for code in np.unique(study.calls.range[calls]).tolist() if code >= 0]
    no_phases = [code for code in codes if study.ranges[code] not in study.phase_ranges]
    inside: Bools = np.isin(range_codes, no_phases)
    return inside


@dataclass(frozen=True)
class HostSyncFigures(FindingFigures):
    """The calls in which the program waits for the GPU, per step.

    Attributes:
        waits: the number of these calls per step.
        apis: the names of these calls.
        range_names: the ranges around these calls.
        values_read: the number of device-to-host copies of a few scalars per step.
        callers: the functions of PyTorch that make these calls.
        is_torch: whether the program uses PyTorch.
        is_pass: whether the whole capture counts as one step.
        trains: whether the program trains a model.
        warned_lines: the lines that wait for the GPU according to a warning of PyTorch, and their number of waits in a
            step.
    """

    waits: float
    apis: tuple[str, ...]
    range_names: tuple[str, ...]
    values_read: float
    callers: tuple[Caller, ...]
    is_torch: bool
    is_pass: bool
    trains: bool
    warned_lines: tuple[tuple[str, int], ...]


def find_host_sync(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds synchronizations and device-to-host copies of a few scalars, in which the program waits for the GPU."""
    study = steps.study
    scalars = _find_scalar_copies(study)
    reading = study.calls_of(scalars)
    # A synchronization directly after a larger copy waits for this copy, so it does not count.
    copying = study.calls_of((study.operations.copy > 0) & ~scalars) & (study.calls.kind == COPY)
    after_copy = np.append(False, copying[:-1])
    # A synchronization directly after a copy of scalars does count, like the copy itself.
    waiting = (study.calls.kind == SYNCHRONIZE) & ~after_copy | (reading & (study.calls.kind == COPY))
    waiting &= ~(_find_round_trips(steps)[0] | study.calls_of_copies(_find_gradient_checks(steps)))
    waits = waiting & (study.replay.awaited >= 0)
    if not waits.any():
        return
    half_the_time, without_scalars = np.where(waiting, 0.5, 1.0), np.where(scalars, 0.0, 1.0)

    def remove_waits(replay: Replay) -> Replay:
        """Returns a replay in which the program does not wait for the scalars that it copies from the GPU."""
        return replay.without_waits(waiting).scale_launches(half_the_time)

    def remove_calls(replay: Replay) -> Replay:
        """Returns the steps without the calls and the copies of the scalars."""
        return replay.without_calls(waiting).scale_work(without_scalars)

    most_often = list_most_frequent(steps.run.waits or {})
    figures = HostSyncFigures(
        study.calls_per_step(waits),
        distinct_names(study.api_names(waiting)),
        distinct_names(study.range_names(study.calls.range[waiting])),
        study.operations_per_step(scalars),
        steps.callers_of(waiting),
        steps.is_torch,
        steps.summary.is_pass,
        steps.trains,
        most_often,
    )
    # Samples during the idle time show where the program waits. Without such samples, PyTorch's warnings do.
    total = sum(count for _, count in most_often)
    warned = [parse_line(text, count / total) for text, count in most_often] if not study.lines.get("sync") else []
    lines = tuple(filter(None, warned))
    yield Candidate("host_sync", figures, (remove_waits, remove_calls), Place("idle", "sync"), lines=lines)


@dataclass(frozen=True)
class RoundTripsFigures(FindingFigures):
    """Values that the program copies to the host, works on there, and copies back, per step.

    Attributes:
        trips: the number of these round trips.
        bytes: the size of the values that are copied to the host, bytes.
        cpu_ms: the time between the copies, without waits for the GPU, ms.
    """

    trips: float
    bytes: float
    cpu_ms: float


def find_round_trips(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds functions that copy values to the host, work on them there, and copy the result back."""
    study, operators = steps.study, steps.operators
    calls, copies = _find_round_trips(steps)
    if operators is None or not copies.any():
        return
    between = calls & np.append(calls[1:], False)

    def stay_on_gpu(replay: Replay) -> Replay:
        """Returns the steps without the copies, the waits for them, and the program's work between them."""
        stays = replay.without_calls(calls).limit_pauses(between, 0.0)
        return stays.scale_work(np.where(copies, 0.0, 1.0))

    to_host = copies & np.isin(study.operations.copy, INTO_HOST)
    cpu_ns = np.where(between, study.replay.pause_ns, 0.0)
    figures = RoundTripsFigures(
        study.operations_per_step(to_host),
        float(study.operations.size[to_host].sum()) / study.steps,
        steps.pause_ms_per_step(cpu_ns),
    )
    yield Candidate(
        "host_round_trip", figures, (stay_on_gpu,), Place("idle", "sync"),
        lines=operators.lines_of(operators.measure_ns(copies)),
        idle_causes=frozenset(("sync", "copy", "launch", "host", "data")),
    )  # fmt: skip


def _find_round_trips(steps: StepsToExplain) -> tuple[Bools, Bools]:
    """Returns the calls of round trips to the host, from the first copy to the last, and their copies.

    A round trip consists of a copy to the host and the next work of the GPU, a copy back from pageable memory, in one
    function. A training loop that reads a loss and then copies the next batch also does this, so functions that call
    the model or the optimizer do not count.
    """
    study, operators = steps.study, steps.operators
    calls, copies = np.zeros(len(study.calls), np.bool_), np.zeros(len(study.operations), np.bool_)
    if operators is None or not operators.calls.lines:
        return calls, copies
    phase_lines = (steps.run.lines or {}).values()
    places = [line.partition(" in ") for line in operators.calls.lines]
    functions = [f"{place.rpartition(':')[0]} {function}" for place, _, function in places]
    loops = {
        function
        for function, (place, *_) in zip(functions, places, strict=True)
        if any(place.endswith(line) for line in phase_lines)
    }
    code = {function: number for number, function in enumerate(dict.fromkeys(functions)) if function not in loops}
    names = {number: function.partition(" ")[2] for function, number in code.items()}
    code_of_line = np.array([*(code.get(function, NONE) for function in functions), NONE])
    function_of_operation = np.append(code_of_line[operators.calls.line], NONE)[operators.call]
    launch = study.replay.launch
    order = np.argsort(launch, kind="stable")
    first, second = order[:-1], order[1:]
    is_trip = np.isin(study.operations.copy[first], INTO_HOST)
    is_trip &= study.operations.copy[second] == PAGEABLE_TO_DEVICE
    is_trip &= function_of_operation[first] != NONE
    for index in np.flatnonzero(is_trip).tolist():
        begin, end = int(launch[first[index]]), int(launch[second[index]])
        function = function_of_operation[first[index]]
        is_known = operators.call[second[index]] != NONE  # torch.tensor() copies without an operator
        if function_of_operation[second[index]] == function if is_known else _is_in(study, begin, end, names[function]):
            calls[begin : end + 1] = True
            copies[[first[index], second[index]]] = True
    calls |= study.calls_of_copies(copies)
    return calls, copies


def _is_in(study: Study, begin: int, end: int, function: str) -> bool:
    """Returns whether most samples of the program's stack between two calls are in a function of this name."""
    samples = study.cpu_samples
    if samples is None:
        return False
    stacks = samples.stack[(samples.call >= begin) & (samples.call < end)].tolist()
    inside = [any(frame.function == function for frame in samples.stacks.stacks[stack]) for stack in stacks]
    return bool(inside) and sum(inside) >= len(inside) / 2


@dataclass(frozen=True)
class GradientChecksFigures(FindingFigures):
    """The checks of gradients for NaN by autograd's anomaly detection, per step: their number and GPU time, ms."""

    checks: float
    ms: float


def find_gradient_checks(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds the anomaly detection of autograd, which checks each gradient and records stacks in the forward pass."""
    study, checks = steps.study, _find_gradient_checks(steps)
    if not checks.any():
        return
    calls = study.calls_of(checks) | study.calls_of_copies(checks)
    in_forward = study.calls_of(study.in_phase("forward"))

    def remove_checks(replay: Replay, usual_launches: float) -> Replay:
        """Returns the steps without the checks. Each call in forward takes at most the time of the given launches."""
        unchecked = replay.without_calls(calls).scale_work(np.where(checks, 0.0, 1.0))
        excess_ns = np.maximum(replay.cpu_ns - usual_launches * replay.median_launch_ns, 0.0)
        return unchecked.without_cpu_time(np.where(in_forward, excess_ns, 0.0))

    figures = GradientChecksFigures(
        study.operations_per_step(checks & np.isin(study.operations.copy, INTO_HOST)), study.work_ms(checks)
    )
    changes = tuple(partial(remove_checks, usual_launches=launches) for launches in FORWARD_LAUNCHES)
    most_often = list_most_frequent(steps.run.waits or {})
    lines = [parse_line(text, count / sum(count for _, count in most_often)) for text, count in most_often]
    yield Candidate(
        "gradient_checks", figures, changes, Place("idle", "host"), lines=tuple(filter(None, lines)),
        idle_causes=frozenset(("sync", "copy", "launch", "host")),
    )  # fmt: skip


def _find_gradient_checks(steps: StepsToExplain) -> Bools:
    """Returns True for each operation with which anomaly detection looks for NaN in gradients; shape (operations,).

    Anomaly detection computes ``isnan`` of each gradient, computes whether any element is true, and reads the result.
    """
    operators = steps.operators
    checks = np.zeros(len(steps.study.operations), np.bool_)
    if operators is None:
        return checks
    calls = operators.calls
    is_check = np.array([signature.name in _CHECK_OPERATORS for signature in calls.signatures] or [False])
    in_backward = is_check[calls.signature] & calls.in_phase("backward")
    names = {calls.signatures[code].name for code in calls.signature[in_backward].tolist()}
    return operators.operations_of(in_backward) if names == _CHECK_OPERATORS else checks


#: The rules of this file. If two findings save equal time, the finding of the earlier rule comes first.
RULES: tuple[Rule, ...] = (find_host_sync, find_device_to_host_copy, find_round_trips, find_gradient_checks)
