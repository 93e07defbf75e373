"""Rules on what the GPU waits for: batches, copies, a program that waits for it or pauses, memory and launches.

Each rule is a type of figures and the function that finds them. ``report/finding_texts/waits.py`` puts them into words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.findings.finding import (
    Caller,
    Candidate,
    Change,
    FindingFigures,
    Place,
    Rule,
    StepsToExplain,
    distinct_names,
)
from nsys_analyzer.analysis.steps.process import CAUSES
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
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
from nsys_analyzer.trace.schema import NS_PER_MS, NS_PER_S, US_PER_MS

#: The time to get a batch that is ready, on the thread that launches: the most and the least assumed, ns.
READY_BATCH_NS = (500_000, 50_000)
#: A pause of this length is not part of launching work, ns: a slow CPU prepares an optimizer's launches for 2.4 ms.
LONG_PAUSE_NS = 3_000_000
#: The time that is left of a long pause without its cause: the most and the least assumed, ns.
REMAINING_PAUSE_NS = (200_000, 20_000)
#: The time between two steps of an engine that remains if the next step is prepared meanwhile: the most and the least
#: assumed, ns.
REMAINING_GAP_NS = (200_000, 20_000)
#: The least rate of a copy from pinned memory over 16 lanes of PCIe 4.0, bytes/s.
PINNED_BYTES_PER_S = 25e9
#: The ranges of a pause are named only if each holds at least this share of the time of all pauses.
_SMALLEST_NAMED_SHARE = 0.1
#: From this share on, a part counts as most of a whole.
MOST_SHARE = 0.5
#: A smaller copy is not a batch, bytes.
_SMALLEST_BATCH_BYTES = 64 << 10
#: A batch is copied in at most this many places of a step: its inputs and its targets.
_MAX_TENSORS_OF_BATCH = 2
#: The remaining pause for a batch that another thread has copied into pinned memory, ns.
_PINNED_BATCH_NS = 50_000
#: A copy to the host of at most this size is a value that Python asks for (.item(), a mask for nonzero()), bytes.
_LARGEST_VALUE_BYTES = 4096
#: The largest share of a copy's time that remains on a stream of its own: it takes bandwidth, and host memory differs.
_REMAINING_COPY_SHARE = 0.15
#: A step is limited by idle time only if the GPU is idle for this share of it without the profiler.
LEAST_IDLE_SHARE = 0.3
#: Two waits with at most this many calls between them count as one wait: no CUDA graph fits between them.
_MAX_CALLS_BETWEEN_WAITS = 20


@dataclass(frozen=True)
class DataLoadingFigures(FindingFigures):
    """The time in which the input pipeline stops the program, per step.

    Attributes:
        pauses: their number in a step.
        range_names: the ranges around them.
        has_worker_processes: whether a DataLoader with worker processes loads the batches.
        off_cpu_share: the share of the pauses in which the thread is on no CPU; None if that was not recorded.
    """

    pause_ms: float
    pauses: float
    range_names: tuple[str, ...]
    has_worker_processes: bool
    is_pass: bool
    off_cpu_share: float | None


def find_data_loading(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds pauses of the program in the input pipeline: a batch is loaded in the loop, on the thread that launches."""
    study = steps.study
    loading = study.is_loading
    if not loading.any():
        return
    other_pause_ns = study.replay.pause_ns - study.calls.loading_ns
    names = distinct_names(study.range_names(study.calls.pause_range[loading]))
    figures = DataLoadingFigures(
        steps.paused_ms(study.calls.loading_ns),
        study.calls_per_step(loading),
        names,
        any("MultiProcessingDataLoader" in name for name in names),
        steps.summary.is_pass,
        steps.off_cpu_share(loading),
    )
    changes = tuple(_shorter_pauses(loading, other_pause_ns + ns) for ns in READY_BATCH_NS)
    yield Candidate("data_loading", figures, changes, Place("idle", "data"))


@dataclass(frozen=True)
class PageableCopyFigures(FindingFigures):
    """The large copies to the GPU from pageable memory, per step.

    Attributes:
        is_batch: whether the copied data is a batch.
        callers: the functions of PyTorch that copy.
    """

    copies: float
    bytes: float
    ms: float
    is_batch: bool
    callers: tuple[Caller, ...]


def find_pageable_copy(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds large copies from memory that is not pinned: they are slow, and the program waits for them."""
    study = steps.study
    copies = steps.recurring(pageable_copies(study))
    if not copies.any():
        return
    calls = study.copy_calls(copies)
    # The tensors of a batch are copied directly after each other, before the work on them.
    starts_row = copies & ~np.append(False, copies[:-1])
    is_batch = steps.is_torch and study.operations_per_step(starts_row) <= _MAX_TENSORS_OF_BATCH
    # Copying a batch into pinned memory ahead of its use saves the time of fetching it, not that of making it.
    fetching = study.is_loading & (study.replay.pause_ns <= study.pieces.duration_ns[copies].max())

    def prefetched(replay: Replay) -> Replay:
        ready = replay.with_pauses(fetching, _PINNED_BATCH_NS).without_waits(calls)
        return ready.without_calls(calls & (study.calls.kind == COPY)).with_work(np.where(copies, 0.0, 1.0))

    figures = PageableCopyFigures(
        study.operations_per_step(copies),
        float(study.pieces.size[copies].sum()) / study.steps,
        float(study.pieces.duration_ns[copies].sum()) / study.steps / NS_PER_MS,
        is_batch,
        steps.callers_of(calls),
    )
    yield Candidate("pageable_copy", figures, (pinned_copies(study), prefetched), Place("idle", "copy"))


def pageable_copies(study: Study) -> Bools:
    """Returns which operations are large copies to the GPU from memory that is not pinned."""
    copies: Bools = (study.pieces.copy == PAGEABLE_TO_DEVICE) & (study.pieces.size >= _SMALLEST_BATCH_BYTES)
    return copies


def pinned_copies(study: Study) -> Change:
    """Returns a change that makes these copies from pinned memory: faster, and without a wait."""
    copies = pageable_copies(study)
    calls = study.copy_calls(copies)
    faster = np.minimum(
        study.pieces.size / PINNED_BYTES_PER_S * NS_PER_S / np.maximum(study.pieces.duration_ns, 1), 1.0
    )
    return lambda replay: replay.without_waits(calls).with_work(np.where(copies, faster, 1.0))


@dataclass(frozen=True)
class DeviceToHostCopyFigures(FindingFigures):
    """The copies to the host that are larger than single values, per step.

    Attributes:
        pageable_share: the share of the bytes that goes to pageable memory.
        range_names: the ranges around the copies.
    """

    copies: float
    bytes: float
    ms: float
    pageable_share: float
    range_names: tuple[str, ...]
    is_torch: bool
    is_pass: bool


def find_device_to_host_copy(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds copies to the host that are larger than values: a checkpoint, or outputs that are logged."""
    study = steps.study
    copies = steps.recurring(np.isin(study.pieces.copy, INTO_HOST) & ~_value_copies(study))
    if not copies.any():
        return
    calls = study.copy_calls(copies)
    copying_calls = calls | _calls_in_ranges_of(study, calls, study.calls.range)
    # Between two of these copies the program makes room for the next one.
    pausing = _calls_in_ranges_of(study, calls, study.calls.pause_range) | (calls & np.append(calls[1:], False))
    if (copying_calls & study.calls_of(study.pieces.kind == KERNEL)).any():  # the ranges hold more than copies
        copying_calls = calls

    def asynchronous(replay: Replay) -> Replay:
        return replay.without_waits(calls).with_work(np.where(copies, _REMAINING_COPY_SHARE, 1.0))

    def removed(replay: Replay) -> Replay:
        shorter = replay.without_calls(copying_calls).with_pauses(pausing, 0.0)
        return shorter.with_work(np.where(copies, 0.0, 1.0))

    pageable = copies & (study.pieces.copy == DEVICE_TO_PAGEABLE)
    figures = DeviceToHostCopyFigures(
        study.operations_per_step(copies),
        float(study.pieces.size[copies].sum()) / study.steps,
        float(study.pieces.duration_ns[copies].sum()) / study.steps / NS_PER_MS,
        float(study.pieces.size[pageable].sum() / max(study.pieces.size[copies].sum(), 1)),
        distinct_names(study.range_names(study.calls.range[calls])),
        steps.is_torch,
        steps.summary.is_pass,
    )
    yield Candidate("device_to_host_copy", figures, (asynchronous, removed), Place("idle", "copy"))


def _value_copies(study: Study) -> Bools:
    """Returns which operations copy single values to the host."""
    values: Bools = np.isin(study.pieces.copy, INTO_HOST) & (study.pieces.size <= _LARGEST_VALUE_BYTES)
    return values


def _calls_in_ranges_of(study: Study, calls: Bools, range_codes: Ints) -> Bools:
    """Returns which calls have the range of one of ``calls``, if that range is not a phase of the step."""
    codes = [code for code in np.unique(study.calls.range[calls]).tolist() if code >= 0]
    no_phases = [code for code in codes if study.ranges[code] not in study.phase_ranges]
    inside: Bools = np.isin(range_codes, no_phases)
    return inside


@dataclass(frozen=True)
class HostSyncFigures(FindingFigures):
    """The calls in which the program waits for the GPU, per step.

    Attributes:
        apis: the names of the API calls.
        range_names: the ranges around them.
        values_read: the number of values that are copied to the host.
        callers: the functions of PyTorch that wait.
        trains: whether the program trains a model.
        warned_lines: the lines of which PyTorch warned, and how often each waits in a step.
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


#: This many lines of which PyTorch warned are named, those that wait most often.
_MAX_WARNED_LINES = 3


def find_host_sync(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds synchronizations, and small copies to the host, which wait: launches then come from an empty queue."""
    study = steps.study
    values = _value_copies(study)
    reading = study.calls_of(values)
    # A synchronization directly after a copy of more than a value waits for that copy.
    copying = study.calls_of((study.pieces.copy > 0) & ~values) & (study.calls.kind == COPY)
    after_copy = np.append(False, copying[:-1])
    # A copy of a value is followed by the synchronization that waits for it.
    waiting = (study.calls.kind == SYNCHRONIZE) & ~after_copy | (reading & (study.calls.kind == COPY))
    waits = waiting & (study.replay.awaited >= 0)
    if not waits.any():
        return
    half_the_time, without_values = np.where(waiting, 0.5, 1.0), np.where(values, 0.0, 1.0)

    def without_waits(replay: Replay) -> Replay:
        return replay.without_waits(waiting).with_launching(half_the_time)

    def without_calls(replay: Replay) -> Replay:
        return replay.without_calls(waiting).with_work(without_values)

    most_often = sorted(steps.warned_lines.items(), key=lambda line: -line[1])[:_MAX_WARNED_LINES]
    figures = HostSyncFigures(
        study.calls_per_step(waits),
        distinct_names(study.api_names(waiting)),
        distinct_names(study.range_names(study.calls.range[waiting])),
        study.operations_per_step(values),
        steps.callers_of(waiting),
        steps.is_torch,
        steps.summary.is_pass,
        steps.trains,
        tuple(most_often),
    )
    yield Candidate("host_sync", figures, (without_waits, without_calls), Place("idle", "sync"))


@dataclass(frozen=True)
class HostStallFigures(FindingFigures):
    """The long pauses of the program outside the input pipeline, per step.

    Attributes:
        longest_ms: the longest of all pauses.
        range_names: the ranges that hold most of the time, the longest first, "" for none; empty if no few ranges do.
        off_cpu_share: the share of the pauses in which the thread is on no CPU; None if that was not recorded.
    """

    pauses: float
    pause_ms: float
    longest_ms: float
    range_names: tuple[str, ...]
    off_cpu_share: float | None


def find_host_stall(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds pauses outside the input pipeline: the program makes no CUDA call, and the GPU runs out of work."""
    study = steps.study
    pause_ns = study.replay.pause_ns - study.calls.loading_ns - study.calls.unrecorded_ns
    stalls = pause_ns >= LONG_PAUSE_NS
    stalls[:1] &= not steps.summary.is_pass  # the program starts up before its first call
    if steps.summary.kind:  # the time between the steps of an engine is a finding of its own
        stalls[study.replay.first_call[1:] - 1] = False
    if not stalls.any():
        return
    without_loading = stalls & ~study.is_loading
    figures = HostStallFigures(
        float(stalls.sum()) / study.steps,
        float(pause_ns[stalls].sum()) / study.steps / NS_PER_MS,
        float(pause_ns[stalls].max()) / NS_PER_MS,
        _ranges_with_most_time(study.calls.pause_range[without_loading], pause_ns[without_loading], study.ranges),
        steps.off_cpu_share(stalls),
    )
    changes = tuple(_shorter_pauses(stalls, study.replay.pause_ns - pause_ns + ns) for ns in REMAINING_PAUSE_NS)
    yield Candidate("host_stall", figures, changes, Place("idle", "host"))


def _ranges_with_most_time(codes: Ints, ns: Floats, ranges: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of up to three ranges in which half of some time passes, the longest first; else none.

    Args:
        codes: the range of each stretch of time, -1 for none, which is returned as "".
        ns: the length of each stretch.
        ranges: the names of the ranges.
    """
    total_ns = {code: float(ns[codes == code].sum()) for code in np.unique(codes).tolist()}
    by_time = sorted(total_ns, key=lambda code: -total_ns[code])
    least_ns = _SMALLEST_NAMED_SHARE * sum(total_ns.values())
    longest = [code for code in by_time if total_ns[code] >= least_ns][:3]
    if not longest or sum(total_ns[code] for code in longest) < MOST_SHARE * sum(total_ns.values()):
        return ()
    return tuple(ranges[code] if code >= 0 else "" for code in longest)


@dataclass(frozen=True)
class BetweenStepsFigures(FindingFigures):
    """The time from the last CUDA call of a step to the first of the next one, ms."""

    gap_ms: float


def find_between_steps(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds time between steps in which the program makes no CUDA call: scheduling, sampling, detokenization."""
    study = steps.study
    between = np.zeros(len(study.calls.kind), np.bool_)
    between[study.replay.first_call[1:] - 1] = True
    between &= study.replay.pause_ns > 0
    if not steps.summary.kind or not between.any():
        return
    figures = BetweenStepsFigures(steps.paused_ms(study.replay.pause_ns[between]))
    changes = tuple(lambda replay, ns=ns: replay.with_pauses(between, ns) for ns in REMAINING_GAP_NS)
    yield Candidate("between_steps", figures, changes, Place("idle", "host"))


@dataclass(frozen=True)
class AllocatorFigures(FindingFigures):
    """The calls that allocate and free memory, per step; ``frees`` tells whether any of them frees."""

    calls: float
    apis: tuple[str, ...]
    frees: bool
    callers: tuple[Caller, ...]


def find_allocator(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds calls of cudaMalloc, cudaFree and the like, and the synchronizations before they free.

    PyTorch's cache should serve memory inside the step.
    """
    study = steps.study
    # Calls that allocate host memory, or in the order of a stream, do not stop the GPU.
    is_harmless = np.array([bool(re.search("Async|Host", api)) for api in study.apis] or [False])
    allocating = np.isin(study.calls.kind, (ALLOCATE, FREE)) & ~is_harmless[study.calls.api]
    if (
        study.calls_per_step(allocating) < 1 or steps.summary.is_pass
    ):  # a pass holds the first allocations of the program
        return
    # PyTorch waits for the device before it frees.
    waits = (
        (study.calls.kind == SYNCHRONIZE)
        & np.append(allocating[1:], False)
        & (np.append(study.calls.kind[1:], 0) == FREE)
    )
    removed_calls = allocating | waits
    figures = AllocatorFigures(
        study.calls_per_step(allocating),
        distinct_names(study.api_names(allocating)),
        bool((allocating & (study.calls.kind == FREE)).any()),
        steps.callers_of(allocating),
    )
    changes = (lambda replay: replay.without_calls(removed_calls),)
    yield Candidate("allocator", figures, changes, Place("idle", "allocator"))


@dataclass(frozen=True)
class LaunchBoundFigures(FindingFigures):
    """The GPU's operations, which are shorter than the time to launch them.

    Attributes:
        operations: their number in a step.
        gpu_us: the mean time of an operation on the GPU.
        program_us: the mean time that the program needs for an operation without the profiler.
        idle_ms: the time of a profiled step in which the GPU waits for launches.
    """

    operations: float
    gpu_us: float
    program_us: float
    idle_ms: float


def find_launch_bound(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds a GPU that idles between launches for 30 % of a step or more, and more than for any other cause.

    Its kernels are shorter than the time that the CPU needs to launch the next one.
    """
    study = steps.study
    idle_ms = {cause: steps.summary.idle_of(cause) for cause in CAUSES}
    if max(idle_ms, key=lambda cause: idle_ms[cause]) != "launch" or steps.idle_share < LEAST_IDLE_SHARE:
        return
    short_pauses = launching_calls(study) & (study.replay.pause_ns < LONG_PAUSE_NS)
    free_launches = cheaper_launches(study, 0.0)

    def without_pauses(replay: Replay) -> Replay:
        return free_launches(replay).with_pauses(short_pauses, study.calls.unrecorded_ns.astype(np.float64))

    operations = float(study.on_device.sum()) / study.steps
    gpu_us, program_us = (ms / max(operations, 1) * US_PER_MS for ms in (study.busy_ms, steps.step_ms))
    figures = LaunchBoundFigures(operations, gpu_us, program_us, idle_ms["launch"])
    yield Candidate("launch_bound", figures, (free_launches, without_pauses), Place("idle", "launch"))


def launching_calls(study: Study) -> Bools:
    """Returns which calls a CUDA graph could hold.

    These are all but calls that load, allocate or free, and calls between two waits that follow each other closely: a
    graph holds no wait.
    """
    calls = len(study.calls.kind)
    waits = np.flatnonzero(study.replay.awaited >= 0)
    next_wait = np.searchsorted(waits, np.arange(calls), side="right")
    before = np.append(waits, -calls)[next_wait - 1]
    after = np.append(waits, 2 * calls)[next_wait]
    is_between_waits = after - before <= _MAX_CALLS_BETWEEN_WAITS
    is_outside_graphs: Bools = study.is_loading | np.isin(study.calls.kind, (ALLOCATE, FREE)) | is_between_waits
    return ~is_outside_graphs


def cheaper_launches(study: Study, factor: float) -> Change:
    """Returns a change that multiplies the time of these calls, up to the next call; pauses stay."""
    factors = np.where(launching_calls(study), factor, 1.0)
    return lambda replay: replay.with_launching(factors)


def _shorter_pauses(calls: Bools, ns: float | Floats) -> Change:
    """Returns a change that shortens the pauses after some calls to at most this time."""
    return lambda replay: replay.with_pauses(calls, ns)


#: The rules of this family; of two findings that save as much, the rule that stands first here comes first.
RULES: tuple[Rule, ...] = (
    find_data_loading, find_host_sync, find_launch_bound, find_pageable_copy, find_device_to_host_copy,
    find_allocator, find_host_stall, find_between_steps,
)  # fmt: skip
