"""Rules on what the GPU waits for: batches, copies, a program that waits for it or pauses, memory and launches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from nsys_analyzer.analysis.findings.finding import Candidate, Change, Place, Rule, StepsToExplain, listed, times
from nsys_analyzer.analysis.steps.process import CAUSES
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.text import rounded, rounded_percent
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

#: What it takes to get a batch that is ready: out of a queue, as far as the loop's own thread works for it, ns.
_READY_NS = (500_000, 50_000)
_READING_IN_TRAINING = (
    "total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # stays on the GPU",
    "if step % 100 == 0: print(total.item())  # one wait in 100 steps",
)
_READING = (
    "values.append(x)  # a tensor: it stays on the GPU",
    "print(torch.stack(values).tolist())  # one wait for all",
)
_AS_TORCH = ", as .item() and .cpu() do"
_SYNCHRONIZING = (
    "# leave out of the loop: torch.cuda.synchronize(), which timing alone needs",
    "# CUDA events time the GPU's work without a wait: torch.cuda.Event(enable_timing=True)",
)
#: A pause from here on is no part of launching work (a slow CPU prepares an optimizer's launches for up to 2.4 ms), and
#: what is left of it when its cause is gone, ns.
_LONG_PAUSE_NS, _STALL_LEFT_NS = 3_000_000, (200_000, 20_000)
#: A range with less of the time of all pauses than this is not worth a word.
_MINOR = 0.1
#: From this share on, a part is most of something.
MOSTLY = 0.5
#: What a copy from pinned memory reaches over 16 lanes of PCIe 4.0 at least, bytes/s.
_PINNED_BYTES_PER_S = 25e9
#: A smaller copy is no batch.
_BATCH_BYTES = 64 << 10
#: A batch is copied in at most this many places of a step: its inputs and its targets.
_TENSORS_OF_BATCH = 2
#: What is left of a pause for a batch that another thread has put into pinned memory, ns.
_COPIED_NS = 50_000
#: A copy to the host of so many bytes at most is a value that Python asks for (.item(), a mask for nonzero()).
_VALUE_BYTES = 4096
#: What is left of a copy's time on a stream of its own at most: it takes bandwidth, and host memory differs.
_LEFT_OF_COPY = 0.15
#: The share of a step without the profiler in which the GPU has nothing to do, at least.
IDLE = 0.3
#: Waits with so many calls between them, or fewer, are looked at as one.
_CLOSE_CALLS = 20


def find_data_loading(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds pauses of the program in the input pipeline: a batch is loaded in the loop, on the thread that launches."""
    study = steps.study
    loading = study.loading
    if not loading.any():
        return
    not_loading_ns = study.replay.pause - study.loading_ns
    ms = steps.paused_ms(study.loading_ns)
    names = listed(study.names(study.pause_range[loading]))
    before = "before a batch is copied" if steps.summary.is_pass else "between two steps, before the batch is copied"
    where = f"in the range {names}" if names else before
    has_workers = "MultiProcessingDataLoader" in names
    yield Candidate(
        "data_loading",
        "The GPU waits for the input pipeline",
        tuple(_shorter_pauses(loading, not_loading_ns + ns) for ns in _READY_NS),
        (
            f"For {rounded(ms)} ms of each step the program calls nothing of CUDA's {where}: "
            f"{times(study.calls(loading), 'stretch')}.",
            *steps.off_cpu(loading),
        ),
        "The step is replayed with batches that are ready when they are asked for: 0.05 to 0.5 ms each.",
        (
            "# the loader has worker processes: try more of them, or less work for each batch"
            if has_workers
            else f"# load the next batch in other processes{f', in place of {names}' if names else ''}:",
            f"loader = DataLoader(dataset, batch_size, num_workers={16 if has_workers else 8}, pin_memory=True,",
            "                    persistent_workers=True, prefetch_factor=4)",
            "batch = batch.to(device, non_blocking=True)",
        ),
        "Run on one batch that is made before the loop: if the step is no shorter, loading does not hold it up.",
        place=Place("idle", "data"),
    )


def find_pageable_copy(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds large copies from memory that is not pinned: they are slow, and the program waits for them."""
    study = steps.study
    copies = steps.recurring(pageable_copies(study))
    if not copies.any():
        return
    calls, pinned = study.copying(copies), pinned_copies(study)
    # The tensors of a batch are copied one directly behind the other, ahead of the work on them.
    is_batch = steps.is_torch and study.count(copies & ~np.append(False, copies[:-1])) <= _TENSORS_OF_BATCH
    name = "batch" if is_batch else "data"
    # A batch that is in pinned memory ahead of its use saves the time of fetching it, not that of making it.
    loading = study.loading & (study.replay.pause <= study.duration[copies].max())

    def prefetched(replay: Replay) -> Replay:
        ready = replay.with_pauses(loading, _COPIED_NS).without_waits(calls)
        return ready.without_calls(calls & (study.call == COPY)).with_work(np.where(copies, 0.0, 1.0))

    size, ms = study.size[copies].sum() / study.steps, study.duration[copies].sum() / study.steps / NS_PER_MS
    yield Candidate(
        "pageable_copy",
        f"{'Batches are' if is_batch else 'Data is'} copied from pageable memory",
        (pinned, prefetched),
        (
            f"{times(study.count(copies), 'copy')} a step from pageable memory: {size / 2**20:,.1f} MiB in "
            f"{ms:.3g} ms, {size / max(ms, 1e-9) / 1e6:.3g} GB/s.",
            "The program waits for each: such a copy goes through a buffer of the driver's.",
            *steps.called_by(calls),
        ),
        f"The step is replayed with copies that do not block, at {_PINNED_BYTES_PER_S / 1e9:.0f} GB/s on the same "
        "stream, and hidden altogether.",
        (
            f"{name} = {name}.pin_memory()  # ahead, as a DataLoader does with pin_memory=True",
            f"{name} = {name}.to(device, non_blocking=True)  # best on a side stream, ahead of its use",
        ),
        "Run on tensors that are on the GPU already: if the step is no shorter, the copies are hidden.",
        place=Place("idle", "copy"),
    )


def pageable_copies(study: Study) -> Bools:
    """Marks the large copies to the GPU from memory that is not pinned."""
    copies: Bools = (study.copy == PAGEABLE_TO_DEVICE) & (study.size >= _BATCH_BYTES)
    return copies


def pinned_copies(study: Study) -> Change:
    """Returns a change that makes these from pinned memory: faster, and without a wait."""
    copies = pageable_copies(study)
    calls = study.copying(copies)
    faster = np.minimum(study.size / _PINNED_BYTES_PER_S * NS_PER_S / np.maximum(study.duration, 1), 1.0)
    return lambda replay: replay.without_waits(calls).with_work(np.where(copies, faster, 1.0))


def find_device_to_host_copy(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds copies to the host that are more than values: a checkpoint, or outputs that are logged."""
    study = steps.study
    copies = steps.recurring(np.isin(study.copy, INTO_HOST) & ~_small_copies(steps))
    if not copies.any():
        return
    calls = study.copying(copies)
    names = listed(study.names(study.range[calls]))
    around = calls | _in_ranges(steps, calls, study.range)
    # Between two of these copies the program makes room for the next one.
    pausing = _in_ranges(steps, calls, study.pause_range) | (calls & np.append(calls[1:], False))
    if (around & study.calls_of(study.kind == KERNEL)).any():  # the ranges hold more than copies
        around = calls

    def asynchronous(replay: Replay) -> Replay:
        return replay.without_waits(calls).with_work(np.where(copies, _LEFT_OF_COPY, 1.0))

    def gone(replay: Replay) -> Replay:
        return replay.without_calls(around).with_pauses(pausing, 0.0).with_work(np.where(copies, 0.0, 1.0))

    size, ms = study.size[copies].sum() / study.steps, study.duration[copies].sum() / study.steps / NS_PER_MS
    pageable = study.size[copies & (study.copy == DEVICE_TO_PAGEABLE)].sum() / max(study.size[copies].sum(), 1)
    yield Candidate(
        "device_to_host_copy",
        f"{'Tensors are' if steps.is_torch else 'Data is'} copied to the host{steps.inside}",
        (asynchronous, gone),
        (
            f"{times(study.count(copies), 'copy')} a step from the GPU: {size / 2**20:,.1f} MiB in {rounded(ms)} ms, "
            f"{rounded_percent(pageable)} of it to pageable memory{f', in the range {names}' if names else ''}.",
        ),
        "The step is replayed with copies on a stream of their own, which the program does not wait for, and without "
        "the code around them, too.",
        (
            "host = {k: torch.empty_like(v, device='cpu', pin_memory=True) for k, v in state.items()}  # once",
            "side = torch.cuda.Stream()  # once",
            "side.wait_stream(torch.cuda.current_stream())",
            "with torch.cuda.stream(side):",
            "    for k, v in state.items(): host[k].copy_(v, non_blocking=True)",
            "# before the tensors change: torch.cuda.current_stream().wait_stream(side)",
            "# before host is written to a file: side.synchronize()",
        ),
        "Leave the copies out for a run: if the step is no shorter, they are hidden.",
        place=Place("idle", "copy"),
    )


def _small_copies(steps: StepsToExplain) -> Bools:
    """Marks the copies of values to the host."""
    values: Bools = np.isin(steps.study.copy, INTO_HOST) & (steps.study.size <= _VALUE_BYTES)
    return values


def _in_ranges(steps: StepsToExplain, calls: Bools, around: Ints) -> Bools:
    """Marks the calls around which is a range that holds the copies, and no phase of the step."""
    study = steps.study
    codes = [code for code in np.unique(study.range[calls]).tolist() if code >= 0]
    inside: Bools = np.isin(around, [code for code in codes if study.ranges[code] not in study.phase_ranges])
    return inside


def find_host_sync(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds synchronizations, and small copies to the host, which wait: launches then come from an empty queue."""
    study = steps.study
    values = _small_copies(steps)
    reading = study.calls_of(values)
    syncs = study.call == SYNCHRONIZE
    # A call directly behind one that copies more than a value waits for that copy.
    copying = study.calls_of((study.copy > 0) & ~values) & (study.call == COPY)
    behind_copy = np.append(False, copying[:-1])
    # A copy of a value is followed by the synchronization that waits for it.
    waiting = syncs & ~behind_copy | (reading & (study.call == COPY))
    waits = waiting & (study.replay.awaited >= 0)
    if not waits.any():
        return
    apis = listed(study.called(waiting))
    names = listed(study.names(study.range[waiting]))
    reads = study.count(values)
    half, gone = np.where(waiting, 0.5, 1.0), np.where(values, 0.0, 1.0)

    def without_waiting(replay: Replay) -> Replay:
        return replay.without_waits(waiting).with_launching(half)

    def without(replay: Replay) -> Replay:
        return replay.without_calls(waiting).with_work(gone)

    reading_remedy = _READING_IN_TRAINING if steps.trains else _READING
    remedy = reading_remedy if reads >= 1 else _SYNCHRONIZING
    yield Candidate(
        "host_sync",
        f"The program waits for the GPU{steps.inside}",
        (without_waiting, without),
        (
            f"Each step waits in {times(study.calls(waits), 'call')}: {apis}"
            f"{f', in ranges such as {names}' if ', ' in names else f', in the range {names}' if names else ''}.",
            *(
                [f"{times(reads, 'value')} a step are copied to the host{_AS_TORCH if steps.is_torch else ''}."]
                if reads >= 1
                else []
            ),
            *steps.called_by(waiting),
        ),
        "The step is replayed without the waits and half of what the program does for them, and without the calls and "
        "their copies altogether.",
        remedy,
        "Comment the calls out for a run: if the step is no shorter, the GPU had work enough to bridge the wait.",
        place=Place("idle", "sync"),
    )


def find_host_stall(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds pauses outside the input pipeline: the program calls nothing of CUDA's, and the GPU runs out of work."""
    study = steps.study
    pause = study.replay.pause - study.loading_ns - study.unrecorded_ns
    stalls = pause >= _LONG_PAUSE_NS
    stalls[:1] &= not steps.summary.is_pass  # the program starts up before its first call
    if steps.summary.kind:  # what lies between the steps of an engine is a finding of its own
        stalls[study.replay.first_call[1:] - 1] = False
    if not stalls.any():
        return
    count, ms = float(stalls.sum()) / study.steps, float(pause[stalls].sum()) / study.steps / NS_PER_MS
    without_loading = stalls & ~study.loading
    where = _longest_ranges(study.pause_range[without_loading], pause[without_loading], study.ranges)
    yield Candidate(
        "host_stall",
        "The CPU stops launching work",
        tuple(_shorter_pauses(stalls, study.replay.pause - pause + ns) for ns in _STALL_LEFT_NS),
        (
            f"Each step holds {times(count, 'pause')} of {_LONG_PAUSE_NS / NS_PER_MS:.0f} ms or more"
            f"{'' if count == round(count) else ' on average'}, {rounded(ms)} ms together, "
            f"in which the program makes no CUDA call{where}.",
            f"The longest takes {rounded(pause[stalls].max() / NS_PER_MS)} ms.",
            *steps.off_cpu(stalls),
        ),
        "The step is replayed with pauses of 0.02 to 0.2 ms in their place.",
        (
            "# py-spy dump --pid PID  # shows what Python does in the pause",
            "import gc; gc.collect(); gc.freeze(); gc.disable()  # where it is Python's garbage collector",
        ),
        "Put a range around what you suspect: if the pause is not in it, it is something else.",
        place=Place("idle", "host"),
    )


def find_allocator(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds calls of cudaMalloc, cudaFree and the like, and the synchronizations before they free.

    PyTorch's cache should serve memory inside the step.
    """
    study = steps.study
    # Those of the host's memory, and those in the order of a stream, are another matter.
    others = np.array([bool(re.search("Async|Host", api)) for api in study.apis] or [False])
    allocating = np.isin(study.call, (ALLOCATE, FREE)) & ~others[study.api]
    if study.calls(allocating) < 1 or steps.summary.is_pass:  # of a pass, the first allocations of all
        return
    # PyTorch waits for the device before it frees.
    waits = (study.call == SYNCHRONIZE) & np.append(allocating[1:], False) & (np.append(study.call[1:], 0) == FREE)
    calls = allocating | waits
    apis = listed(study.called(allocating))
    yield Candidate(
        "allocator",
        "Memory is allocated and freed inside the step",
        (lambda replay: replay.without_calls(calls),),
        (
            f"Each step makes {times(study.calls(allocating), 'call')} of {apis}.",
            *(
                ["A call that frees waits for all work on the GPU."]
                if (allocating & (study.call == FREE)).any()
                else []
            ),
            *steps.called_by(allocating),
        ),
        "The step is replayed without these calls.",
        (
            "# leave out: torch.cuda.empty_cache()",
            "# where the cache is too small for the sizes in turn:",
            "# export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        "torch.cuda.memory_stats()['num_device_alloc'] stays the same over the steps afterwards.",
        place=Place("idle", "allocator"),
    )


def find_launch_bound(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds a GPU that idles between launches for 30 % of a step or more, and more than for any other cause.

    Its kernels are shorter than what the CPU needs to launch the next one.
    """
    study = steps.study
    idle = {cause: steps.summary.idle_of(cause) for cause in CAUSES}
    if max(idle, key=lambda cause: idle[cause]) != "launch" or steps.idle_share < IDLE:
        return
    launching = launching_calls(study)
    pausing, in_graph = launching & (study.replay.pause < _LONG_PAUSE_NS), cheaper_launches(study, 0.0)

    def without_pauses(replay: Replay) -> Replay:
        return in_graph(replay).with_pauses(pausing, study.unrecorded_ns.astype(np.float64))

    work = study.busy_ms
    launches = float(study.on_device.sum()) / study.steps
    on_gpu, by_program = (rounded(ms / max(launches, 1) * US_PER_MS) for ms in (work, steps.step_ms))
    yield Candidate(
        "launch_bound",
        "The GPU waits for launches",
        (in_graph, without_pauses),
        (
            f"{times(launches, 'operation')} a step take {on_gpu} µs on the GPU each, on average; without the profiler "
            f"the program needs {by_program} µs for one.",
            f"The GPU idles for {rounded(steps.summary.idle_of('launch'))} ms of a profiled step because the next "
            "launch has not come.",
        ),
        "The step is replayed with launches that cost nothing, as in a CUDA graph, and without the program's own "
        "pauses between them, too.",
        (
            'model = torch.compile(model, mode="reduce-overhead")  # CUDA graphs',
            "# or a larger batch: the same launches, more work in each",
        ),
        "Double the batch: if the step takes twice as long, launches are not what it waits for.",
        place=Place("idle", "launch"),
    )


def launching_calls(study: Study) -> Bools:
    """Marks the calls that a CUDA graph could hold: none that loads, allocates or frees, and none between two waits."""
    others = study.loading | np.isin(study.call, (ALLOCATE, FREE)) | _between_waits(study.replay.awaited)
    return ~others


def cheaper_launches(study: Study, factor: float) -> Change:
    """Returns a change of what these calls take, up to the next one; pauses stay."""
    kept = np.where(launching_calls(study), factor, 1.0)
    return lambda replay: replay.with_launching(kept)


def _between_waits(awaited: Ints) -> Bools:
    """Marks the calls between two waits that follow each other closely: no graph holds a wait."""
    waits = np.flatnonzero(awaited >= 0)
    position = np.arange(len(awaited))
    place = np.searchsorted(waits, position, side="right")
    before = np.append(waits, -len(awaited))[place - 1]
    behind = np.append(waits, 2 * len(awaited))[place]
    close: Bools = behind - before <= _CLOSE_CALLS
    return close


def _shorter_pauses(calls: Bools, ns: float | Floats) -> Change:
    """Returns a change that shortens the pauses behind some calls to at most this much time."""
    return lambda replay: replay.with_pauses(calls, ns)


def _longest_ranges(codes: Ints, ns: Floats, ranges: Sequence[str], most: int = 3) -> str:
    """Names the ranges in which half of some time passes, by the codes of their names (-1 is none), or nothing."""
    total = {code: float(ns[codes == code].sum()) for code in np.unique(codes).tolist()}
    by_time = sorted(total, key=lambda code: -total[code])
    longest = [code for code in by_time if total[code] >= _MINOR * sum(total.values())][:most]
    if not longest or sum(total[code] for code in longest) < MOSTLY * sum(total.values()):
        return ""
    names = (f"the range {ranges[code]}" if code >= 0 else "no range" for code in longest)
    return f", most of it in {', '.join(names)}"


#: What is looked for; of two findings that save as much, the one that is named first comes first.
RULES: tuple[Rule, ...] = (
    find_data_loading, find_host_sync, find_launch_bound, find_pageable_copy, find_device_to_host_copy,
    find_allocator, find_host_stall,
)  # fmt: skip
