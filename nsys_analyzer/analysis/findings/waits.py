"""Rules for idle time of the GPU: loading of batches, copies, synchronizations, pauses, allocations and launches.

Each rule consists of a type of figures and a function that finds them. ``report/finding_texts/waits.py`` makes
sentences from the figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.analysis.findings.finding import (
    Caller,
    Candidate,
    FindingFigures,
    Place,
    ReplayChange,
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
    FREE,
    PAGEABLE_TO_DEVICE,
    SYNCHRONIZE,
)
from nsys_analyzer.trace.schema import NS_PER_MS, NS_PER_S, US_PER_MS

#: The longest and the shortest time that is assumed for fetching a batch that is ready, on the launching thread, ns.
READY_BATCH_NS = (500_000, 50_000)
#: A pause of at least this length is not part of launching work, ns. On a slow CPU, an optimizer prepares its launches
#: for 2.4 ms.
LONG_PAUSE_NS = 3_000_000
#: The longest and the shortest time of a long pause that is assumed to remain without its cause, ns.
REMAINING_PAUSE_NS = (200_000, 20_000)
#: The longest and the shortest time between two steps of an engine that is assumed to remain if the next step is
#: prepared during the previous step, ns.
REMAINING_GAP_NS = (200_000, 20_000)
#: The lower bound of the rate of a copy from pinned memory over 16 lanes of PCIe 4.0, bytes/s.
PINNED_BYTES_PER_S = 25e9
#: A range is named only if it contains at least this share of the time of all pauses.
_SMALLEST_NAMED_RANGE_SHARE = 0.1
#: A sentence says "most of" a time if the part is at least this share of the time.
MAJORITY_SHARE = 0.5
#: A copy from the host may be a batch of input data only if it has at least this size, bytes.
_SMALLEST_BATCH_BYTES = 64 << 10
#: The maximum number of runs of consecutive copies per step that count as a batch: its inputs and its targets.
_MAX_TENSORS_OF_BATCH = 2
#: Idle time limits a step only if the GPU is idle for at least this share of the step without the profiler.
LEAST_IDLE_SHARE = 0.3
#: Two waits with at most this number of calls between them count as one wait, since a CUDA graph would contain too few
#: calls.
_MAX_CALLS_BETWEEN_WAITS = 20
#: The longest gap before a node of a CUDA graph, ns. The steps of three networks, with 391 to 1,965 nodes, took the
#: GPU's busy time plus 0.37 to 0.41 µs per node.
NODE_GAP_NS = 400.0
#: The shortest pause that may contain a recompilation by torch.compile, ms. Tracing a function of a few operators takes
#: longer than this.
_SHORTEST_COMPILATION_MS = 50.0
#: The maximum number of lines, with a wait, a graph break or a recompilation, that are named.
_MAX_NAMED_LINES = 3


@dataclass(frozen=True)
class DataLoadingFigures(FindingFigures):
    """The pauses of the program in the input pipeline, per step.

    Attributes:
        pause_ms: the time of these pauses per step, ms.
        pauses: the number of these pauses per step.
        range_names: the ranges around these pauses.
        has_worker_processes: whether a DataLoader with worker processes loads the batches.
        is_pass: whether the whole capture counts as one step.
        off_cpu_share: the share of the pauses in which the thread has no CPU; None if this was not recorded.
    """

    pause_ms: float
    pauses: float
    range_names: tuple[str, ...]
    has_worker_processes: bool
    is_pass: bool
    off_cpu_share: float | None


def find_data_loading(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds pauses of the program in the input pipeline: the launching thread loads a batch in the program's loop."""
    study = steps.study
    loading = study.is_loading
    if not loading.any():
        return
    other_pause_ns = study.replay.pause_ns - study.calls.loading_ns
    names = distinct_names(study.range_names(study.calls.pause_range[loading]))
    figures = DataLoadingFigures(
        steps.pause_ms_per_step(study.calls.loading_ns),
        study.calls_per_step(loading),
        names,
        any("MultiProcessingDataLoader" in name for name in names),
        steps.summary.is_pass,
        steps.off_cpu_share(loading),
    )
    load_ahead, load_faster = (_shorten_pauses(loading, other_pause_ns + ns) for ns in READY_BATCH_NS)
    copy_ahead = pin_copies(study)[-1]
    changes = (load_ahead, lambda replay: copy_ahead(load_faster(replay)))
    yield Candidate("data_loading", figures, changes, Place("idle", "data"))


@dataclass(frozen=True)
class PageableCopyFigures(FindingFigures):
    """The large copies to the GPU from pageable memory, per step.

    Attributes:
        copies: the number of these copies per step.
        bytes: the size of these copies per step, bytes.
        ms: the time of these copies per step, ms.
        is_batch: whether the copied data is a batch.
        callers: the functions of PyTorch that make these copies.
    """

    copies: float
    bytes: float
    ms: float
    is_batch: bool
    callers: tuple[Caller, ...]


def find_pageable_copy(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds large copies to the GPU from pageable memory. Such copies are slow, and the program waits for them."""
    study = steps.study
    copies = steps.without_work_after_loop(find_pageable_copies(study))
    if not copies.any():
        return
    is_batch = steps.is_torch and _copies_batch(study, copies)
    figures = PageableCopyFigures(
        study.operations_per_step(copies),
        float(study.operations.size[copies].sum()) / study.steps,
        float(study.operations.duration_ns[copies].sum()) / study.steps / NS_PER_MS,
        is_batch,
        steps.callers_of(study.calls_of_copies(copies)),
    )
    yield Candidate("pageable_copy", figures, pin_copies(study), Place("idle", "copy"))


def find_pageable_copies(study: Study) -> Bools:
    """Returns True for each large copy to the GPU from pageable memory; shape (operations,)."""
    copies: Bools = (study.operations.copy == PAGEABLE_TO_DEVICE) & (study.operations.size >= _SMALLEST_BATCH_BYTES)
    return copies


def _copies_batch(study: Study, copies: Bools) -> bool:
    """Returns whether the copies may be those of a batch: its tensors are copied directly after each other."""
    starts_run = copies & ~np.append(False, copies[:-1])
    return study.operations_per_step(starts_run) <= _MAX_TENSORS_OF_BATCH


def pin_copies(study: Study) -> tuple[ReplayChange, ReplayChange]:
    """Returns two changes that make the pageable copies as if from pinned memory, without waits.

    With the first change, the copies are faster. With the second change, they are made ahead of their use, so that
    other work hides them. After both changes, a step takes at least the time in which one thread of the CPU makes its
    batch, copies it to pinned memory, about as fast as the driver copies pageable memory, and frees it. Other data is
    pinned once.
    """
    copies = find_pageable_copies(study)
    calls, is_batch = study.calls_of_copies(copies), _copies_batch(study, copies)
    faster = np.minimum(
        study.operations.size / PINNED_BYTES_PER_S * NS_PER_S / np.maximum(study.operations.duration_ns, 1), 1.0
    )
    # If a thread of its own copies batches into pinned memory, the program still takes the time to make a batch, but it
    # neither fetches the batch nor frees its memory. Freeing is assumed to take at most as long as copying.
    longest_ns = study.operations.duration_ns[copies].max(initial=0)
    fetching = study.is_loading & (study.calls.loading_ns <= longest_ns)
    fetching_ns = study.calls.loading_ns + np.where(fetching, longest_ns, 0)

    def pin(replay: Replay, ready_batch_ns: float = READY_BATCH_NS[0]) -> Replay:
        """Returns the steps with copies from pinned memory on the same stream, and with batches that are ready."""
        remaining_ns = np.maximum(replay.pause_ns - fetching_ns, 0.0) + ready_batch_ns
        pinned = replay.without_waits(calls).limit_pauses(fetching, remaining_ns)
        moved_ns = np.minimum(fetching_ns, replay.pause_ns)[study.is_loading].sum() + replay.work_ns[copies].sum()
        pinned = replace(pinned, least_step_ns=float(moved_ns) / replay.steps if is_batch else 0.0)
        return pinned.scale_work(np.where(copies, faster, 1.0))

    def prefetch(replay: Replay) -> Replay:
        """Returns the steps with batches that were copied ahead of their use."""
        ready = pin(replay, READY_BATCH_NS[1])
        return ready.without_calls(calls & (study.calls.kind == COPY)).scale_work(np.where(copies, 0.0, 1.0))

    return pin, prefetch


@dataclass(frozen=True)
class HostStallFigures(FindingFigures):
    """The long pauses of the program outside the input pipeline, per step.

    Attributes:
        pauses: the number of these pauses per step.
        pause_ms: the time of these pauses per step, ms.
        longest_ms: the duration of the longest pause, ms.
        range_names: the few ranges that contain most of the time, the longest first; "" stands for pauses outside of
            ranges. It is empty if the time is spread over many ranges.
        off_cpu_share: the share of the pauses in which the thread has no CPU; None if this was not recorded.
    """

    pauses: float
    pause_ms: float
    longest_ms: float
    range_names: tuple[str, ...]
    off_cpu_share: float | None


@dataclass(frozen=True)
class RecompilationFigures(FindingFigures):
    """The long pauses of a program that torch.compile compiles again in the measured steps.

    Attributes:
        stall: the pauses.
        recompiles: the number of recompilations by the function and the reason, the most frequent reasons first.
    """

    stall: HostStallFigures
    recompiles: tuple[tuple[str, int], ...]


def find_host_stall(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds long pauses outside the input pipeline, in which the program makes no CUDA call and the GPU may idle."""
    study = steps.study
    pause_ns = study.replay.pause_ns - study.calls.loading_ns - study.calls.unrecorded_wait_ns
    stalls = pause_ns >= LONG_PAUSE_NS
    stalls[:1] &= not steps.summary.is_pass  # the program initializes itself before its first call
    if steps.summary.kind:  # `find_between_steps` reports the time between steps
        stalls[study.replay.first_call[1:] - 1] = False
    if not stalls.any():
        return
    without_loading = stalls & ~study.is_loading
    figures = HostStallFigures(
        float(stalls.sum()) / study.steps,
        float(pause_ns[stalls].sum()) / study.steps / NS_PER_MS,
        float(pause_ns[stalls].max()) / NS_PER_MS,
        _find_longest_ranges(study.calls.pause_range[without_loading], pause_ns[without_loading], study.ranges),
        steps.off_cpu_share(stalls),
    )
    changes = tuple(_shorten_pauses(stalls, study.replay.pause_ns - pause_ns + ns) for ns in REMAINING_PAUSE_NS)
    recompiles = list_most_frequent(steps.run.compiled.recompiles) if steps.run.compiled else ()
    if recompiles and figures.longest_ms >= _SHORTEST_COMPILATION_MS:
        yield Candidate("recompilation", RecompilationFigures(figures, recompiles), changes, Place("idle", "host"))
    else:
        yield Candidate("host_stall", figures, changes, Place("idle", "host"))


def list_most_frequent(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Returns the most frequent texts with their counts."""
    return tuple(sorted(counts.items(), key=lambda item: -item[1])[:_MAX_NAMED_LINES])


def _find_longest_ranges(codes: Ints, ns: Floats, ranges: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of up to three ranges that together contain at least half of the time, the longest first.

    If the time is spread over more ranges, the tuple is empty.

    Args:
        codes: the code of the range of each stretch of time; -1 outside of ranges, for which "" is returned.
        ns: the length of each stretch, ns.
        ranges: the names of the ranges, by code.
    """
    total_ns = {code: float(ns[codes == code].sum()) for code in np.unique(codes).tolist()}
    codes_by_time = sorted(total_ns, key=lambda code: -total_ns[code])
    least_ns = _SMALLEST_NAMED_RANGE_SHARE * sum(total_ns.values())
    longest = [code for code in codes_by_time if total_ns[code] >= least_ns][:3]
    if not longest or sum(total_ns[code] for code in longest) < MAJORITY_SHARE * sum(total_ns.values()):
        return ()
    return tuple(ranges[code] if code >= 0 else "" for code in longest)


@dataclass(frozen=True)
class BetweenStepsFigures(FindingFigures):
    """The mean time ``gap_ms`` from the last CUDA call of a step to the first CUDA call of the next step, ms."""

    gap_ms: float


def find_between_steps(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds pauses between the steps of a serving engine: it schedules, samples or detokenizes without CUDA calls."""
    study = steps.study
    between = np.zeros(len(study.calls.kind), np.bool_)
    between[study.replay.first_call[1:] - 1] = True
    between &= study.replay.pause_ns > 0
    if not steps.summary.kind or not between.any():
        return
    figures = BetweenStepsFigures(steps.pause_ms_per_step(study.replay.pause_ns[between]))
    changes = tuple(lambda replay, ns=ns: replay.limit_pauses(between, ns) for ns in REMAINING_GAP_NS)
    yield Candidate("between_steps", figures, changes, Place("idle", "host"))


@dataclass(frozen=True)
class AllocatorFigures(FindingFigures):
    """The calls that allocate and free device memory, per step.

    Attributes:
        calls: the number of these calls per step.
        apis: the names of these calls.
        frees: whether a call frees memory.
        callers: the functions of PyTorch that make these calls.
    """

    calls: float
    apis: tuple[str, ...]
    frees: bool
    callers: tuple[Caller, ...]


def find_allocator(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds calls such as cudaMalloc and cudaFree, and the synchronizations directly before memory is freed.

    Inside a step, PyTorch's caching allocator should serve memory without such calls.
    """
    study = steps.study
    # Calls that allocate host memory, or that allocate asynchronously on a stream, do not make the GPU idle.
    is_harmless = np.array([bool(re.search("Async|Host", api)) for api in study.apis] or [False])
    allocating = np.isin(study.calls.kind, (ALLOCATE, FREE)) & ~is_harmless[study.calls.api]
    if study.calls_per_step(allocating) < 1 or steps.summary.is_pass:  # a pass contains the program's first allocations
        return
    # PyTorch waits for the device before it frees memory.
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
    """The operations of the GPU, which are shorter than the time to launch them.

    Attributes:
        operations: the number of operations per step.
        gpu_us: the mean duration of an operation on the GPU, µs.
        program_us: the mean time of a step per operation without the profiler, µs.
        idle_ms: the time in a profiled step in which the GPU waits for launches, ms.
    """

    operations: float
    gpu_us: float
    program_us: float
    idle_ms: float


@dataclass(frozen=True)
class GraphBreakFigures(FindingFigures):
    """The graph breaks of a compiled program whose GPU waits for launches.

    Attributes:
        launches: the operations of the GPU and the time to launch them.
        breaks: the number of lines at which torch.compile ends a graph.
        reasons: the most frequent of these lines with their reasons, and their number of compilations.
    """

    launches: LaunchBoundFigures
    breaks: int
    reasons: tuple[tuple[str, int], ...]


def find_launch_bound(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds steps in which the GPU is idle for at least 30 %, mostly because it waits for launches.

    The kernels are then shorter than the time that the CPU needs to launch the next kernel.
    """
    study = steps.study
    idle_ms = {cause: steps.summary.idle_of(cause) for cause in CAUSES}
    if max(idle_ms, key=lambda cause: idle_ms[cause]) != "launch" or steps.idle_share < LEAST_IDLE_SHARE:
        return
    operations = float(study.on_device.sum()) / study.steps
    gpu_us, program_us = (ms / max(operations, 1) * US_PER_MS for ms in (study.busy_ms, steps.step_ms))
    figures = LaunchBoundFigures(operations, gpu_us, program_us, idle_ms["launch"])
    changes, place = (scale_launches(study, 0.0),), Place("idle", "launch")
    if steps.run.compiled and (breaks := steps.run.compiled.graph_breaks):
        of_breaks = GraphBreakFigures(figures, len(breaks), list_most_frequent(breaks))
        yield Candidate("graph_breaks", of_breaks, changes, place)
    else:
        yield Candidate("launch_bound", figures, changes, place)


def find_launching_calls(study: Study) -> Bools:
    """Returns True for each call that a CUDA graph could contain; shape (calls,).

    A graph cannot contain a wait. So the result is False for calls between two waits that closely follow each other,
    for calls that allocate or free memory, and for calls after which a batch is loaded.
    """
    calls = len(study.calls.kind)
    waits = np.flatnonzero(study.replay.awaited >= 0)
    wait_number = np.searchsorted(waits, np.arange(calls), side="right")
    last_wait = np.append(waits, -calls)[wait_number - 1]
    next_wait = np.append(waits, 2 * calls)[wait_number]
    is_between_waits = next_wait - last_wait <= _MAX_CALLS_BETWEEN_WAITS
    is_outside_graphs: Bools = study.is_loading | np.isin(study.calls.kind, (ALLOCATE, FREE)) | is_between_waits
    return ~is_outside_graphs


def scale_launches(study: Study, factor: float) -> ReplayChange:
    """Returns a change that multiplies the time of launching calls, up to the next call and without pauses.

    The factor 0 stands for a CUDA graph, which has no short pauses, and shorter gaps between its nodes.
    """
    launching = find_launching_calls(study)
    if factor:
        factors = np.where(launching, factor, 1.0)
        return lambda replay: replay.scale_launches(factors)
    is_node, in_graph = launching[study.replay.launch], launching & (study.replay.pause_ns < LONG_PAUSE_NS)

    def capture_graph(replay: Replay) -> Replay:
        """Returns the steps with the launching calls in a CUDA graph."""
        graph = replay.scale_launches(np.where(launching, 0.0, 1.0))
        graph = graph.limit_pauses(in_graph, study.calls.unrecorded_wait_ns.astype(np.float64))
        limit_ns = np.where(is_node, NODE_GAP_NS, np.inf)
        spacing_ns, join_gap_ns = (np.minimum(ns, limit_ns) for ns in (graph.spacing_ns, graph.join_gap_ns))
        return replace(graph, spacing_ns=spacing_ns, join_gap_ns=join_gap_ns)

    return capture_graph


def _shorten_pauses(calls: Bools, ns: float | Floats) -> ReplayChange:
    """Returns a change that shortens the pauses after the given calls to at most ``ns``."""
    return lambda replay: replay.limit_pauses(calls, ns)


#: The rules of this file. If two findings save equal time, the finding of the earlier rule comes first.
RULES: tuple[Rule, ...] = (
    find_data_loading, find_launch_bound, find_pageable_copy, find_allocator, find_host_stall, find_between_steps,
)  # fmt: skip
