"""Rules on what the GPU waits for: batches, a program that waits for it or pauses, memory and launches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from nsys_analyzer.analysis.findings.copies import small_copies
from nsys_analyzer.analysis.findings.finding import Candidate, Case, Change, Place, listed, three, times
from nsys_analyzer.analysis.steps.process import CAUSES
from nsys_analyzer.analysis.steps.replay import Floats, Replay
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import ALLOCATE, COPY, FREE, SYNCHRONIZE

#: What it takes to get a batch that is ready: out of a queue, as far as the loop's own thread works for it, ns.
_READY_NS = (500_000, 50_000)
_READING = (
    "total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # stays on the GPU",
    "if step % 100 == 0: print(total.item())  # one wait in 100 steps",
)
_SYNCHRONIZING = (
    "# leave out of the loop: torch.cuda.synchronize(), which timing needs and training does not",
    "# CUDA events time the GPU's work without a wait: torch.cuda.Event(enable_timing=True)",
)
#: A pause from here on is no part of launching work (a slow CPU prepares an optimizer's launches for up to 2.4 ms), and
#: what is left of it when its cause is gone, ns.
_LONG_PAUSE_NS, _STALL_LEFT_NS = 3_000_000, (200_000, 20_000)
#: A range with less of the time of all pauses than this is not worth a word.
_MINOR = 0.1
#: The share of a step without the profiler in which the GPU has nothing to do, at least.
IDLE = 0.3
#: Waits with so many calls between them, or fewer, are looked at as one.
_CLOSE_CALLS = 20


def find_data_loading(case: Case) -> Iterator[Candidate]:
    """Finds pauses of the program in the input pipeline: a batch is loaded in the loop, on the thread that launches."""
    study = case.study
    loading = study.loading
    if not loading.any():
        return
    ms = case.paused_ms(loading)
    names = listed(study.names(study.pause_range[loading]))
    where = f"in the range {names}" if names else "between two steps, before the batch is copied"
    yield Candidate(
        "data_loading",
        "The GPU waits for the input pipeline",
        tuple(_shorter_pauses(loading, ns) for ns in _READY_NS),
        (
            f"For {three(ms)} ms of each step the program calls nothing of CUDA's {where}: "
            f"{times(study.calls(loading), 'stretch')}.",
        ),
        "The step is replayed with batches that are ready when they are asked for: 0.05 to 0.5 ms each.",
        (
            "loader = DataLoader(dataset, batch_size, num_workers=8, pin_memory=True,",
            "                    persistent_workers=True, prefetch_factor=4)",
            "batch = batch.to(device, non_blocking=True)",
        ),
        "Train on one batch that is made before the loop: if the step is no shorter, loading does not hold it up.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "data"),
    )


def find_host_sync(case: Case) -> Iterator[Candidate]:
    """Finds synchronizations, and small copies to the host, which wait: launches then come from an empty queue."""
    study = case.study
    values = small_copies(case)
    reading = case.calls_of(values)
    syncs = study.call == SYNCHRONIZE
    # A call directly behind one that copies more than a value waits for that copy.
    copying = case.calls_of((study.copy > 0) & ~values) & (study.call == COPY)
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

    remedy = _READING if reads >= 1 else _SYNCHRONIZING
    yield Candidate(
        "host_sync",
        "The program waits for the GPU inside the step",
        (without_waiting, without),
        (
            f"Each step waits in {times(study.calls(waits), 'call')}: {apis}"
            f"{f', in ranges such as {names}' if ', ' in names else f', in the range {names}' if names else ''}.",
            *(
                [f"{times(reads, 'value')} a step are copied to the host, as .item() and .cpu() do."]
                if reads >= 1
                else []
            ),
            *case.called_by(waiting),
        ),
        "The step is replayed without the waits and half of what Python does for them, and without the calls and their "
        "copies altogether.",
        remedy,
        "Comment the calls out for a run: if the step is no shorter, the GPU had work enough to bridge the wait.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "sync"),
    )


def find_host_stall(case: Case) -> Iterator[Candidate]:
    """Finds pauses outside the input pipeline: the program calls nothing of CUDA's, and the GPU runs out of work."""
    study = case.study
    pause = study.replay.pause
    stalls = (pause >= _LONG_PAUSE_NS) & ~study.loading
    if not stalls.any():
        return
    ms = case.paused_ms(stalls)
    where = _longest_ranges(study.pause_range[stalls], pause[stalls], study.ranges)
    yield Candidate(
        "host_stall",
        "The CPU stops launching work",
        tuple(_shorter_pauses(stalls, ns) for ns in _STALL_LEFT_NS),
        (
            f"Each step holds {times(study.calls(stalls), 'pause')} of {_LONG_PAUSE_NS / 1e6:.0f} ms or more, "
            f"{three(ms)} ms together, in which the program makes no CUDA call, most of it in {where}.",
            f"The longest takes {three(pause[stalls].max() / 1e6)} ms.",
        ),
        "The step is replayed with pauses of 0.02 to 0.2 ms in their place.",
        (
            "# py-spy dump --pid PID  # shows what Python does in the pause",
            "import gc; gc.collect(); gc.freeze(); gc.disable()  # where it is Python's garbage collector",
        ),
        "Put a range around what you suspect: if the pause is not in it, it is something else.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "host"),
    )


def find_allocator(case: Case) -> Iterator[Candidate]:
    """Finds calls of cudaMalloc, cudaFree and the like, and the synchronizations before they free.

    PyTorch's cache should serve memory inside the step.
    """
    study = case.study
    # Those of the host's memory, and those in the order of a stream, are another matter.
    others = np.array([bool(re.search("Async|Host", api)) for api in study.apis] or [False])
    allocating = np.isin(study.call, (ALLOCATE, FREE)) & ~others[study.api]
    if study.calls(allocating) < 1 or case.step.is_pass:  # of a pass, the first allocations of all
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
            *case.called_by(allocating),
        ),
        "The step is replayed without these calls.",
        (
            "# leave out: torch.cuda.empty_cache()",
            "# where the cache is too small for the sizes in turn:",
            "# PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py",
        ),
        "torch.cuda.memory_stats()['num_device_alloc'] stays the same over the steps afterwards.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "allocator"),
    )


def find_launch_bound(case: Case) -> Iterator[Candidate]:
    """Finds a GPU that idles between launches for 30 % of a step or more, and more than for any other cause.

    Its kernels are shorter than what the CPU needs to launch the next one.
    """
    study = case.study
    idle = {cause: case.step.idle_of(cause) for cause in CAUSES}
    if max(idle, key=lambda cause: idle[cause]) != "launch" or case.idle_share < IDLE:
        return
    others = study.loading | np.isin(study.call, (ALLOCATE, FREE)) | _between_waits(study.replay.awaited)
    kept, pausing = np.where(others, 1.0, 0.0), ~others & (study.replay.pause < _LONG_PAUSE_NS)

    def in_graph(replay: Replay) -> Replay:
        return replay.with_launching(kept)

    def without_pauses(replay: Replay) -> Replay:
        return replay.with_launching(kept).with_pauses(pausing, 0.0)

    work = study.busy_ms
    launches = len(study.replay.work) / study.steps
    on_gpu, by_program = (three(ms / max(launches, 1) * 1e3) for ms in (work, case.step_ms))
    yield Candidate(
        "launch_bound",
        "The GPU waits for launches",
        (in_graph, without_pauses),
        (
            f"{times(launches, 'operation')} a step take {on_gpu} µs on the GPU each, on average; without the profiler "
            f"the program needs {by_program} µs for one.",
            f"The GPU idles for {case.step.idle_of('launch'):.3g} ms of a profiled step because the next launch has "
            "not come.",
        ),
        "The step is replayed with launches that cost nothing, as in a CUDA graph, and without the program's own "
        "pauses between them, too.",
        (
            'model = torch.compile(model, mode="reduce-overhead")  # CUDA graphs',
            "# or a larger batch: the same launches, more work in each",
        ),
        "Double the batch: if the step takes twice as long, launches are not what it waits for.",
        of_cpu=True,
        explained=True,
        place=Place("idle", "launch"),
    )


def _between_waits(awaited: Ints) -> Bools:
    """Marks the calls between two waits that follow each other closely: no graph holds a wait."""
    waits = np.flatnonzero(awaited >= 0)
    position = np.arange(len(awaited))
    place = np.searchsorted(waits, position, side="right")
    before = np.append(waits, -len(awaited))[place - 1]
    behind = np.append(waits, 2 * len(awaited))[place]
    close: Bools = behind - before <= _CLOSE_CALLS
    return close


def _shorter_pauses(calls: Bools, ns: float) -> Change:
    """Returns a change that leaves at most so much time behind some calls."""
    return lambda replay: replay.with_pauses(calls, ns)


def _longest_ranges(codes: Ints, ns: Floats, ranges: Sequence[str], most: int = 3) -> str:
    """Names the ranges in which the most of some time passes, by the codes of their names, "no range" for -1."""
    total = {code: float(ns[codes == code].sum()) for code in np.unique(codes).tolist()}
    by_time = sorted(total, key=lambda code: -total[code])
    longest = [code for code in by_time if total[code] >= _MINOR * sum(total.values())][:most]
    return ", ".join(f"the range {ranges[code]}" if code >= 0 else "no range" for code in longest)
