"""Records the steps and the collectives of each rank. ``ranks/join.py`` joins the records of several ranks to a run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from nsys_analyzer.analysis.attribution.processes import Process
from nsys_analyzer.analysis.intervals import NONE, Cover
from nsys_analyzer.analysis.kernels.classes import find_launching_collectives
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.anatomy import COMMUNICATING
from nsys_analyzer.analysis.steps.groups import Steps
from nsys_analyzer.analysis.steps.process import ProcessWork
from nsys_analyzer.analysis.steps.windows import Windows, mask_instances
from nsys_analyzer.trace.arrays import Axis, Ints, distinct_rows
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
#: A launch that takes longer than this is assumed to wait until the queue of launches has room, ns.
_LONG_LAUNCH_NS = 50_000
_RECEIVE, _SEND = re.compile("recv", re.IGNORECASE), re.compile("send", re.IGNORECASE)
_STEP_NUMBER = re.compile(r"\D*(\d{1,9})\D*")
#: The value of ``Member.run`` if ``--ranks`` was given. The user then lists the captures in the order of their ranks.
BY_ORDER = "--ranks"


@dataclass(frozen=True)
class Collectives(Columns):
    """The collectives of a rank, sorted by start. Each collective is one kernel.

    All columns have the shape (collectives,).

    Attributes:
        start, end: the start and end of each collective, ns.
        launched: when the program launched the collective, ns.
        step: the index of the step that launched the collective; -1 outside of the steps.
        last_begun_step: the index of the last step that began before the launch, even if this step had ended; -1 if no
            step had begun.
        kind: the kind of the collective, an index into ``COLLECTIVE_KINDS``.
        communicator: the ID of the communicator, which all of its ranks share. If the ID is unknown, the value is -1
            minus the stream.
        ranks: the number of ranks in the communicator; 0 if unknown.
        bytes: the message size of one rank as NCCL counts it; -1 if unknown. If the rank both sends and receives, it
            is the larger of both sizes.
        peer: the number in the communicator of the other rank of a send or receive; -1 if unknown.
        peers: the number of ranks that the rank sends to or receives from, possibly including itself; 0 if unknown.
        sends, receives: the number of messages to single ranks, and from single ranks; 0 if it is not known.
        phase: the phase that launched the collective, an index into ``names``; -1 outside of the phases.
        instance: the number of the phase among all phases that the program runs; -1 outside of the phases.
        names: the names of the phases.
    """

    end: Ints
    launched: Ints
    step: Ints
    last_begun_step: Ints
    kind: Ints
    communicator: Ints
    ranks: Ints
    bytes: Ints
    peer: Ints
    peers: Ints
    sends: Ints
    receives: Ints
    phase: Ints
    instance: Ints
    names: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """The record of one GPU of one process in a run: a rank, or one of several devices that a process uses.

    Columns of steps have the shape (steps,). The length of a step is the sum of its compute, exposed copies, exposed
    communication and idle time. While the GPU computes, the time counts as compute only; of the remaining time, the
    time of copies counts as exposed copies.

    Attributes:
        capture: the name of the capture.
        source: the name of the capture's file.
        rank: the number of the rank; None if it is unknown, or if the process uses several devices.
        world_size: the number of ranks in the run; 0 if it is unknown.
        process: the global ID of the process.
        device: the number of the GPU.
        started_utc_ns: the UTC time at which the profiler's session started, ns; 0 if it is unknown.
        number: the number of each step, from the name of the step's range, or else the index of the step.
        has_numbers: whether ``number`` comes from the names of the ranges.
        start, end: the start and end of each step, ns.
        compute: the time in each step in which the GPU computes, ns.
        exposed_copy: the time in each step in which the GPU copies and does not compute, ns.
        exposed_communication: the time in each step in which only collectives run on the GPU, ns.
        idle: the time in each step in which nothing runs on the GPU, ns.
        communication: the time in each step in which at least one collective runs, hidden or exposed, ns.
        collectives: the collectives of the whole capture.
        cpu: the CPU time that the program needs for each step, without calls that wait for the GPU, ns.
        exposed: the starts and ends of the intervals in which only collectives run, sorted and disjoint, ns.
        run: the name of the run in the manifest, ``BY_ORDER`` if ``--ranks`` was given, or else empty.
        name_without_rank: the capture's name without the rank, if the rank was read from this name; else empty.
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
        """Returns a label such as ``rank 3``, or ``device 3`` if the rank is unknown."""
        return f"device {self.device}" if self.rank is None else f"rank {self.rank}"

    @property
    def median_work_ns(self) -> float:
        """Returns the median time of a step in which no communication is exposed, ns."""
        return float(np.median(self.end - self.start - self.exposed_communication)) if len(self) else 0.0


def record_members(work: ProcessWork, process: Process, steps: Steps, capture: str) -> tuple[Member, ...]:
    """Returns the record of each device of a process, if the process runs collectives or uses several devices.

    Otherwise, the tuple is empty.
    """
    attributed, windows = work.attributed, steps.windows
    trace, operations, metadata = attributed.trace, attributed.trace.operations, attributed.trace.metadata
    index = np.flatnonzero(operations.process == process.global_pid)
    index = index[np.argsort(operations.start[index], kind="stable")]
    is_exchange = (work.activity[index] == COMMUNICATING) & (operations.kind[index] == KERNEL)
    exchanges = index[is_exchange]  # copies are left out, because they do not wait for other ranks
    devices = sorted(work.devices)
    if len(devices) < 2 and not len(exchanges):
        return ()
    collectives = _find_collectives(attributed, windows, exchanges)
    step_numbers, has_numbers = _find_step_numbers(attributed, process.global_pid, steps)
    # The CPU time of a step is its length without calls that wait for the GPU. These are calls that synchronize, that
    # copy, or that take so long that the queue of launches is assumed to be full.
    launches, begin, end = trace.launches, windows.cpu_start, windows.cpu_end
    waits = np.isin(launches.call, (SYNCHRONIZE, COPY)) | (launches.end - launches.start > _LONG_LAUNCH_NS)
    calls = np.flatnonzero(waits & (process_of(launches.thread) == process.global_pid))
    calls = calls[np.argsort(launches.start[calls], kind="stable")]
    cpu = end - begin - Cover.from_intervals(launches.start[calls], launches.end[calls]).covered_within(begin, end)
    world = trace.ranks.get(process.global_pid) or trace.ranks.get(0)
    members = []
    for device in devices:
        compute_ns, exposed_copy_ns, exposed_communication_ns, idle_ns = work.measure_parts(windows, device)
        operations_on_device = index[operations.device[index] == device]
        communicates = work.activity[operations_on_device] == COMMUNICATING
        communication, other_work = (
            Cover.from_intervals(
                operations.start[operations_on_device[mask]], operations.end[operations_on_device[mask]]
            )
            for mask in (communicates, ~communicates)
        )
        _, *exposed_communication = other_work.find_gaps(communication.start, communication.end)
        members.append(
            Member(
                capture=capture,
                source=trace.path.name,
                rank=process.rank if len(devices) == 1 else None,
                world_size=world.world_size if world else 0,
                process=process.global_pid,
                device=device,
                started_utc_ns=metadata.started_utc_ns - metadata.time_shift_ns if metadata.started_utc_ns else 0,
                number=step_numbers,
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
                exposed=(exposed_communication[0], exposed_communication[1]),
            )
        )
    return tuple(members)


def _find_step_numbers(attributed: AttributedTrace, process: int, steps: Steps) -> tuple[Ints, bool]:
    """Returns the number of each step, and whether the numbers come from the names of ranges (``ProfilerStep#12``).

    If the names have no numbers, the number of a step is its index among all steps. Warm-up steps and incomplete steps
    count too, because they may be measured on another rank.
    """
    windows = steps.windows
    instances, ranges = attributed.instances, attributed.trace.ranges
    index = np.flatnonzero(mask_instances(attributed, process, STEP, OTHER_STEP))
    index = index[np.argsort(instances.start[index], kind="stable")]
    position = np.searchsorted(instances.start[index], windows.cpu_start)
    if windows.source not in ("range", "profiler_step") or len(position) == 0 or position.max() >= len(index):
        return steps.positions, False
    names = [ranges.names[ranges.name[instances.range[i]]] for i in index[position].tolist()]
    numbers = np.array([int(match[1]) if (match := _STEP_NUMBER.fullmatch(name)) else NONE for name in names])
    is_rising = (numbers != NONE).all() and (np.diff(numbers) > 0).all()
    return (numbers, True) if is_rising and len(numbers) > 1 else (position, False)


def _find_collectives(attributed: AttributedTrace, windows: Windows, index: Ints) -> Collectives:
    """Returns the collectives of a process. ``index`` contains the indices of their operations, sorted by start."""
    trace, launched_at = attributed.trace, attributed.attribution.time[index]
    operations, calls, instances = trace.operations, trace.nccl_calls, attributed.instances
    position, call = _match_nccl_calls(attributed, index)
    last_call = np.full(len(index), NONE)  # the last NCCL call of each collective
    last_call[position] = call
    # A kernel may send and receive at the same time.
    is_receive, is_send = (
        np.array([bool(pattern.search(name)) for name in (*calls.names, "")])[calls.name]
        for pattern in (_RECEIVE, _SEND)
    )
    sent_bytes, received_bytes = np.zeros((2, len(index)), np.int64)
    for total_bytes, mask in ((sent_bytes, ~is_receive), (received_bytes, is_receive)):
        np.add.at(total_bytes, position, np.where(mask, calls.bytes, 0)[call])
    calls_with_peer = np.flatnonzero(calls.peer[call] >= 0)
    pairs, _ = distinct_rows(position[calls_with_peer], calls.peer[call[calls_with_peer]])
    kind_by_kernel = np.array([_find_kind(name) for name in (*operations.names, "")])[operations.name[index]]
    kind_by_call = np.array([_find_kind(name) for name in (*calls.names, "")])[np.append(calls.name, NONE)[last_call]]
    kind = np.where(kind_by_call != OTHER_KIND, kind_by_call, kind_by_kernel)
    # RCCL runs one kernel for all kinds, so its name does not show the kind.
    unnamed_index = np.flatnonzero(kind == OTHER_KIND)
    collective_names = find_launching_collectives(trace, attributed.attribution, index[unnamed_index])
    kind[unnamed_index] = [_find_kind(name) for name in collective_names]
    communicator = np.append(calls.communicator, 0)[last_call]
    instance = attributed.instances_of_operations[0][index].astype(np.int64)
    last_begun_step = np.searchsorted(windows.cpu_start, launched_at, side="right") - 1
    has_size = np.append(calls.bytes, UNKNOWN_NUMBER)[last_call] != UNKNOWN_NUMBER
    return Collectives(
        start=operations.start[index],
        end=operations.end[index],
        launched=launched_at,
        step=windows.step_at(launched_at),
        last_begun_step=last_begun_step,
        kind=kind,
        communicator=np.where(communicator != 0, communicator, -operations.stream[index] - 1),
        bytes=np.where(has_size, np.maximum(sent_bytes, received_bytes), UNKNOWN_NUMBER),
        peer=np.append(calls.peer, UNKNOWN_NUMBER)[last_call],
        ranks=np.append(calls.ranks, 0)[last_call],
        peers=np.bincount(position[calls_with_peer[pairs]], minlength=len(index)),
        sends=np.bincount(position[is_send[call]], minlength=len(index)),
        receives=np.bincount(position[is_receive[call]], minlength=len(index)),
        phase=np.append(instances.phase, NONE)[instance],
        instance=instance,
        names=instances.phases,
    )


def _match_nccl_calls(attributed: AttributedTrace, index: Ints) -> tuple[Ints, Ints]:
    """Matches each collective with the NCCL calls that it carries out.

    An NCCL call belongs to the next collective that its thread launches. NCCL launches a group of calls after the last
    call of the group: as one kernel, or as one kernel per device in the order of the calls. If the calls of a group
    cannot be divided evenly among several kernels, they are not matched.

    Returns:
        For each pair of a collective and an NCCL call: the position of the collective in ``index``, and the index of
        the call.
    """
    calls, attribution = attributed.trace.nccl_calls, attributed.attribution
    launched_positions = np.flatnonzero(attribution.thread[index] != NONE)
    if not len(calls) or not len(launched_positions):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    thread, time = attribution.thread[index[launched_positions]], attribution.time[index[launched_positions]]
    axis = Axis(thread, time)
    axis_position = axis.place(thread, time)
    # If one call launches collectives on several devices, a stable sort keeps them in the order of their starts.
    order = np.argsort(axis_position, kind="stable")
    next_collective = np.searchsorted(axis_position[order], axis.place(calls.thread, calls.start))
    matched_calls = np.flatnonzero((next_collective < len(order)) & np.isin(calls.thread, thread))
    matched_calls = matched_calls[thread[order[next_collective[matched_calls]]] == calls.thread[matched_calls]]
    first, group, count = np.unique(next_collective[matched_calls], return_inverse=True, return_counts=True)
    end = np.minimum(np.append(first[1:], len(order)), np.searchsorted(thread[order], thread[order[first]], "right"))
    kernels = end - first
    per_kernel = np.where(kernels > count, 1, np.where(count % kernels == 0, count // kernels, 0))[group]
    order_by_group = np.argsort(group, kind="stable")  # the calls are in order of start
    call_number = np.empty_like(group)
    call_number[order_by_group] = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    is_even = per_kernel > 0
    kernel_of_call = first[group[is_even]] + call_number[is_even] // per_kernel[is_even]
    return launched_positions[order[kernel_of_call]], matched_calls[is_even]


def _find_kind(name: str) -> int:
    """Returns the index in ``COLLECTIVE_KINDS`` for the name of a kernel or of an NCCL function."""
    return next(
        code for code, pattern in enumerate(_COLLECTIVE_PATTERNS.values()) if re.search(pattern, name, re.IGNORECASE)
    )
