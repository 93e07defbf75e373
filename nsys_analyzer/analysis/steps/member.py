"""The record of one rank: what it did in each of its steps. Records of several ranks are joined into a run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from nsys_analyzer.analysis.attribution.processes import Process
from nsys_analyzer.analysis.intervals import NONE, Axis, Cover
from nsys_analyzer.analysis.kernels.classes import find_launching_collectives
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.anatomy import COMMUNICATING
from nsys_analyzer.analysis.steps.groups import Steps
from nsys_analyzer.analysis.steps.process import ProcessWork
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Ints, distinct_rows
from nsys_analyzer.trace.columns import COPY, KERNEL, SYNCHRONIZE, Columns, process_of
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP
from nsys_analyzer.trace.ranks import UNKNOWN_NUMBER

#: The kinds of collectives, each with the pattern that identifies it in the name of a kernel or of an NCCL function.
_COLLECTIVE_PATTERNS = {
    "all-reduce": "all_?reduce|cross_device_reduce_(?!scatter)", "all-gather": "all_?gather",
    "reduce-scatter": "reduce_?scatter", "broadcast": "broadcast|bcast", "send/receive": "send_?recv|send|recv",
    "all-to-all": "all_?to_?all", "reduce": "reduce", "gather": "gather", "scatter": "scatter", "other": "",
}  # fmt: skip
#: The names of the kinds, in the order of the codes in ``Collectives.kind``.
COLLECTIVE_KINDS = tuple(_COLLECTIVE_PATTERNS)
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, _, SEND_RECEIVE, ALL_TO_ALL, _, GATHER, SCATTER, OTHER_KIND = range(
    len(_COLLECTIVE_PATTERNS)
)
#: A launch that takes longer waits until the queue of launches has room, ns.
_LONG_LAUNCH_NS = 50_000
_RECEIVE = re.compile("recv", re.IGNORECASE)
_STEP_NUMBER = re.compile(r"\D*(\d{1,9})\D*")
#: ``Member.run`` if ``--ranks`` says that the order of the captures is the order of their ranks.
BY_ORDER = "--ranks"


@dataclass(frozen=True)
class Collectives(Columns):
    """The collectives of a rank in order of start. Each one is a kernel.

    All columns have the shape (collectives,).

    Attributes:
        start, end: when it runs, ns.
        launched: when the program launched it, ns.
        step: the index of the step that launched it; -1 outside of the steps.
        since: the index of the last step that had begun at its launch, even if it had ended; -1 before the first.
        kind: its kind, a code into ``COLLECTIVE_KINDS``.
        communicator: the ID of its communicator, which all ranks share; if unknown, -1 minus its stream.
        ranks: the number of ranks in its communicator; 0 if unknown.
        bytes: the message size of one rank as NCCL counts it, for an exchange the larger direction; -1 if unknown.
        peer: the other rank of a send or receive, as its number in the communicator; -1 if unknown.
        peers: the number of ranks that it sends to or receives from, including its own rank; 0 if unknown.
        phase: the phase that launched it, a code into ``names``; -1 outside of the phases.
        names: the names of the phases.
    """

    end: Ints
    launched: Ints
    step: Ints
    since: Ints
    kind: Ints
    communicator: Ints
    ranks: Ints
    bytes: Ints
    peer: Ints
    peers: Ints
    phase: Ints
    names: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """The record of one GPU of one process in a run: a rank, or one of several devices that a process drives.

    Columns of steps have the shape (steps,). For each step, compute + exposed copies + exposed communication + idle is
    the length of the step: a moment in which the GPU computes counts as compute, and one with a copy as a copy.

    Attributes:
        capture: the name of the capture.
        source: the name of the capture's file.
        rank: the number of the rank; None if it is not known, or if the process drives several devices.
        world_size: the number of ranks of the run; 0 if it is not known.
        process: the global ID of the process.
        device: the number of the GPU.
        started_utc_ns: when the profiler's session started; 0 if it is not known.
        number: the number of each step, from the name of its range or, without one, from its position.
        has_numbers: whether ``number`` comes from the names of the ranges.
        start, end: when each step begins and ends, ns.
        compute: the time in each step in which the GPU computes, ns.
        exposed_copy: the time in which it only copies, ns.
        exposed_communication: the time in which only collectives run, ns.
        idle: the time in which nothing runs on the GPU, ns.
        communication: the time in which at least one collective runs, hidden or exposed, ns.
        collectives: the collectives of the whole capture.
        cpu: the CPU time that the program needs for each step, without calls that wait for the GPU, ns.
        exposed: the starts and ends of the intervals in which only collectives run, sorted and disjoint, ns.
        run: the name of the run in the manifest; empty without one. ``BY_ORDER`` if ``--ranks`` was given.
        name_without_rank: the capture's name without the rank in it, if the rank is taken from that name; else empty.
    """

    capture: str
    source: str
    rank: int | None
    world_size: int
    process: int
    device: int
    started_utc_ns: int
    number: Ints
    has_numbers: bool
    start: Ints
    end: Ints
    compute: Ints
    exposed_copy: Ints
    exposed_communication: Ints
    idle: Ints
    communication: Ints
    collectives: Collectives
    cpu: Ints
    exposed: tuple[Ints, Ints] = field(repr=False)
    run: str = ""
    name_without_rank: str = ""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def label(self) -> str:
        """Returns the name of the rank, or of the device if the rank is not known."""
        return f"device {self.device}" if self.rank is None else f"rank {self.rank}"


def record_members(work: ProcessWork, process: Process, steps: Steps, capture: str) -> tuple[Member, ...]:
    """Returns the record of each device of a process; nothing if the process exchanges no data between devices.

    A process exchanges data if it runs collectives or uses several devices.
    """
    attributed, windows = work.attributed, steps.windows
    trace, operations, metadata = attributed.trace, attributed.trace.operations, attributed.trace.metadata
    index = np.flatnonzero(operations.process == process.global_pid)
    index = index[np.argsort(operations.start[index], kind="stable")]
    is_exchange = (work.activity[index] == COMMUNICATING) & (operations.kind[index] == KERNEL)
    exchanges = index[is_exchange]  # without copies, which do not wait for other ranks
    devices = sorted(work.devices)
    if len(devices) < 2 and not len(exchanges):
        return ()
    collectives = _find_collectives(attributed, windows, exchanges)
    numbers, has_numbers = _find_step_numbers(attributed, process.global_pid, steps)
    # CPU time: a step of the program without calls that wait for the GPU. These calls synchronize, copy, or take so
    # long that the queue of launches must be full.
    launches, begin, end = trace.launches, windows.cpu_start, windows.cpu_end
    waits = np.isin(launches.call, (SYNCHRONIZE, COPY)) | (launches.end - launches.start > _LONG_LAUNCH_NS)
    calls = np.flatnonzero(waits & (process_of(launches.thread) == process.global_pid))
    calls = calls[np.argsort(launches.start[calls], kind="stable")]
    cpu = end - begin - Cover.from_intervals(launches.start[calls], launches.end[calls]).covered_within(begin, end)
    world = trace.ranks.get(process.global_pid) or trace.ranks.get(0)
    members = []
    for device in devices:
        parts = np.hstack([anatomy.parts for _, anatomy in work.dissect(windows, device)])
        compute_ns, exposed_copy_ns, exposed_communication_ns, idle_ns = parts
        on_device = index[operations.device[index] == device]
        communicates = work.activity[on_device] == COMMUNICATING
        communication, other_work = (
            Cover.from_intervals(operations.start[on_device[mask]], operations.end[on_device[mask]])
            for mask in (communicates, ~communicates)
        )
        _, *exposed = other_work.find_gaps(communication.start, communication.end)
        members.append(
            Member(
                capture=capture,
                source=trace.path.name,
                rank=process.rank if len(devices) == 1 else None,
                world_size=world.world_size if world else 0,
                process=process.global_pid,
                device=device,
                started_utc_ns=metadata.started_utc_ns - metadata.time_shift_ns if metadata.started_utc_ns else 0,
                number=numbers,
                has_numbers=has_numbers,
                start=windows.start,
                end=windows.end,
                compute=compute_ns,
                exposed_copy=exposed_copy_ns,
                exposed_communication=exposed_communication_ns,
                idle=idle_ns,
                communication=communication.covered_within(windows.start, windows.end),
                collectives=collectives.select(operations.device[exchanges] == device),
                cpu=cpu,
                exposed=(exposed[0], exposed[1]),
            )
        )
    return tuple(members)


def _find_step_numbers(attributed: AttributedTrace, process: int, steps: Steps) -> tuple[Ints, bool]:
    """Returns the number of each step, and whether it comes from the name of its range, such as ``ProfilerStep#12``.

    Otherwise the number is the step's position, from 0, among all ranges of steps. Warm-up steps and incomplete steps
    count too, because another rank may not leave them out.
    """
    windows = steps.windows
    instances, ranges = attributed.instances, attributed.trace.ranges
    are_steps = np.isin(instances.phase, [instances.phases.index(name) for name in (STEP, OTHER_STEP)])
    index = np.flatnonzero(are_steps & (instances.process == process))
    index = index[np.argsort(instances.start[index], kind="stable")]
    place = np.searchsorted(instances.start[index], windows.cpu_start)
    if windows.source not in ("range", "profiler_step") or len(place) == 0 or place.max() >= len(index):
        return steps.positions, False
    names = [ranges.names[ranges.name[instances.range[i]]] for i in index[place].tolist()]
    numbers = np.array([int(match[1]) if (match := _STEP_NUMBER.fullmatch(name)) else NONE for name in names])
    rising = (numbers != NONE).all() and (np.diff(numbers) > 0).all()
    return (numbers, True) if rising and len(numbers) > 1 else (place, False)


def _find_collectives(attributed: AttributedTrace, windows: Windows, index: Ints) -> Collectives:
    """Returns the collectives of a process. ``index`` holds the indices of their operations in order of start."""
    trace, launched = attributed.trace, attributed.attribution.time[index]
    operations, calls, instances = trace.operations, trace.nccl_calls, attributed.instances
    place, call = _match_nccl_calls(attributed, index)
    last = np.full(len(index), NONE)  # the last NCCL call of each collective
    last[place] = call
    # A kernel may send and receive at the same time.
    is_receive = np.array([bool(_RECEIVE.search(name)) for name in (*calls.names, "")])[calls.name]
    sent, received = np.zeros((2, len(index)), np.int64)
    for total, mask in ((sent, ~is_receive), (received, is_receive)):
        np.add.at(total, place, np.where(mask, calls.bytes, 0)[call])
    with_peer = np.flatnonzero(calls.peer[call] >= 0)
    pairs, _ = distinct_rows(place[with_peer], calls.peer[call[with_peer]])
    by_kernel = np.array([_find_kind(name) for name in (*operations.names, "")])[operations.name[index]]
    by_call = np.array([_find_kind(name) for name in (*calls.names, "")])[np.append(calls.name, NONE)[last]]
    kind = np.where(by_call != OTHER_KIND, by_call, by_kernel)
    unnamed = np.flatnonzero(kind == OTHER_KIND)  # RCCL has one kernel for all collectives
    callers = find_launching_collectives(trace, attributed.attribution, index[unnamed])
    kind[unnamed] = [_find_kind(name) for name in callers]
    communicator = np.append(calls.communicator, 0)[last]
    since = np.searchsorted(windows.cpu_start, launched, side="right") - 1
    return Collectives(
        start=operations.start[index],
        end=operations.end[index],
        launched=launched,
        step=np.where((since != NONE) & (launched < windows.cpu_end[since]), since, NONE),
        since=since,
        kind=kind,
        communicator=np.where(communicator != 0, communicator, -operations.stream[index] - 1),
        bytes=np.where(
            np.append(calls.bytes, UNKNOWN_NUMBER)[last] != UNKNOWN_NUMBER, np.maximum(sent, received), UNKNOWN_NUMBER
        ),
        peer=np.append(calls.peer, UNKNOWN_NUMBER)[last],
        ranks=np.append(calls.ranks, 0)[last],
        peers=np.bincount(place[with_peer[pairs]], minlength=len(index)),
        phase=np.append(instances.phase, NONE)[attributed.instances_of_operations[0][index]],
        names=instances.phases,
    )


def _match_nccl_calls(attributed: AttributedTrace, index: Ints) -> tuple[Ints, Ints]:
    """Returns pairs of a collective and an NCCL call that it carries out: positions in ``index``, and call indices.

    A call belongs to the next collective that its thread launches. NCCL launches a group of calls after the last call
    of the group: as one kernel, or as one kernel per device in the order of the calls. Calls that
    cannot be divided evenly among more than one kernel are not matched.
    """
    calls, attribution = attributed.trace.nccl_calls, attributed.attribution
    launched = np.flatnonzero(attribution.thread[index] != NONE)
    if not len(calls) or not len(launched):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    thread, time = attribution.thread[index[launched]], attribution.time[index[launched]]
    axis = Axis(thread, time)
    place = axis.place(thread, time)
    # Collectives that one call launches on several devices are in order of start.
    order = np.argsort(place, kind="stable")
    at = np.searchsorted(place[order], axis.place(calls.thread, calls.start))
    matched = np.flatnonzero((at < len(order)) & np.isin(calls.thread, thread))
    matched = matched[thread[order[at[matched]]] == calls.thread[matched]]
    first, group, count = np.unique(at[matched], return_inverse=True, return_counts=True)
    last = np.minimum(np.append(first[1:], len(order)), np.searchsorted(thread[order], thread[order[first]], "right"))
    kernels = last - first
    per_kernel = np.where(kernels > count, 1, np.where(count % kernels == 0, count // kernels, 0))[group]
    by_group = np.argsort(group, kind="stable")  # the calls are in order of start
    number = np.empty_like(group)
    number[by_group] = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    even = per_kernel > 0
    at_kernel = first[group[even]] + number[even] // per_kernel[even]
    return launched[order[at_kernel]], matched[even]


def _find_kind(name: str) -> int:
    """Returns the kind of collective that the name of a kernel or of an NCCL function stands for."""
    return next(
        code for code, pattern in enumerate(_COLLECTIVE_PATTERNS.values()) if re.search(pattern, name, re.IGNORECASE)
    )
