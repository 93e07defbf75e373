"""What one rank did in each of its steps: the record that is made of a trace, and joined with those of other ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from nsys_analyzer.analysis.attribution.processes import Process
from nsys_analyzer.analysis.intervals import NONE, Axis, Cover
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranges.instances import AttributedTrace, find_launching_collectives
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.analysis.steps.windows import Steps, Windows
from nsys_analyzer.trace.arrays import Bools, Ints, distinct_rows
from nsys_analyzer.trace.columns import COPY, KERNEL, MEMCPY, SYNCHRONIZE, Columns, process_of
from nsys_analyzer.trace.ranks import UNKNOWN_NUMBER

#: The kinds of collective, by what the name of its kernel, or of the function of NCCL that it carries out, holds.
_KINDS = {
    "all-reduce": "all_?reduce|cross_device_reduce_(?!scatter)", "all-gather": "all_?gather",
    "reduce-scatter": "reduce_?scatter", "broadcast": "broadcast|bcast", "send/receive": "send_?recv|send|recv",
    "all-to-all": "all_?to_?all", "reduce": "reduce", "gather": "gather", "scatter": "scatter", "other": "",
}  # fmt: skip
#: In the order of ``Collectives.kind``'s codes.
COLLECTIVE_KINDS = tuple(_KINDS)
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, _, SEND_RECEIVE, ALL_TO_ALL, _, GATHER, SCATTER, OTHER_KIND = range(len(_KINDS))
#: A launch that takes this long waits for room in the queue, ns.
_LONG_CALL_NS = 50_000
_RECEIVES = re.compile("recv", re.IGNORECASE)
_NUMBER = re.compile(r"\D*(\d{1,9})\D*")
#: The run of captures whose order in the call is said to be that of their ranks.
BY_ORDER = "--ranks"


@dataclass(frozen=True)
class Collectives(Columns):
    """The collectives of a rank, each a kernel, in order of start.

    Attributes:
        start, end: ns.
        launched: ns, when the program launched it.
        step: which of the rank's steps launched it; -1 outside.
        since: which of the steps had begun last when it was launched, whether or not it had ended; -1 before the first.
        kind: code into ``COLLECTIVE_KINDS``.
        communicator: its ID, one for all of its ranks; where that is not known, minus the stream it runs on.
        ranks: how many its communicator is of; 0 where that is not known.
        bytes: the message as NCCL counts it, of one rank, of an exchange the larger way; -1 where it is not known.
        peer: the other rank of a send or receive, in its communicator; -1 where it is not known.
        peers: how many ranks it sends to or receives from, itself among them; 0 where that is not known.
        phase: code into ``names``, the phases of steps; -1 outside.
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
    """One device of one process of a run: a rank, or one of several devices that a process drives.

    Attributes:
        capture, source: the capture's name, and its file's.
        world_size: ranks of the run, 0 where it is not known.
        process: global process ID.
        run: what the manifest calls the run, empty where it does not; ``BY_ORDER`` where the call says the ranks.
        named: the file's name but for the rank that it says, empty where the rank is known by other means.
        started_utc_ns: when the profiler's session started, 0 where that is not known.
        number: shape (steps,), the number of each step: that in its range's name, else its place.
        numbered: whether the ranges' names say the numbers.
        start, end: shape (steps,), ns.
        compute, exposed_copy, exposed_communication, idle: shape (steps,), ns: what fills each step, compute before
            copies, and these before communication; they add up to its length.
        communication: shape (steps,), ns of the union of collectives, hidden or not.
        cpu: shape (steps,), ns that the program needs for a step itself: without calls that wait for the GPU.
        exposed: start and end, ns, of the stretches in which collectives run and nothing else does, in order and apart.
    """

    capture: str
    source: str
    rank: int | None
    world_size: int
    process: int
    device: int
    started_utc_ns: int
    number: Ints
    numbered: bool
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
    named: str = ""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def label(self) -> str:
        """Returns the rank, else the device."""
        return f"device {self.device}" if self.rank is None else f"rank {self.rank}"


def record_members(attributed: AttributedTrace, process: Process, steps: Steps, capture: str) -> tuple[Member, ...]:
    """Returns the record of each device that a process uses; none where it exchanges nothing with another one.

    A process exchanges something if it runs collectives, or uses several devices.
    """
    trace, windows = attributed.trace, steps.windows
    operations, metadata = trace.operations, trace.metadata
    of_class = np.array([*(name == COMMUNICATION for name in attributed.kernels.classes), False], np.bool_)
    is_collective: Bools = of_class[attributed.kernels.code]
    index = np.flatnonzero(operations.process == process.global_pid)
    index = index[np.argsort(operations.start[index], kind="stable")]
    exchanges = index[is_collective[index] & (operations.kind[index] == KERNEL)]  # a copy waits for no other rank
    devices = np.unique(operations.device[index]).tolist()
    if len(devices) < 2 and not len(exchanges):
        return ()
    collectives = _collectives(attributed, windows, exchanges)
    numbers, numbered = _numbers(attributed, process.global_pid, steps)
    # The time from a step's begin in the program to the next without calls that wait: that synchronize or copy, or that
    # take so long that the queue of launches must be full.
    launches, begin, end = trace.launches, windows.called, windows.left
    waits = np.isin(launches.call, (SYNCHRONIZE, COPY)) | (launches.end - launches.start > _LONG_CALL_NS)
    calls = np.flatnonzero(waits & (process_of(launches.thread) == process.global_pid))
    calls = calls[np.argsort(launches.start[calls], kind="stable")]
    cpu = end - begin - Cover.from_intervals(launches.start[calls], launches.end[calls]).covered_within(begin, end)
    world = trace.ranks.get(process.global_pid) or trace.ranks.get(0)
    members = []
    for device in devices:
        on_device = index[operations.device[index] == device]
        is_copy = operations.kind[on_device] == MEMCPY
        exchange = is_collective[on_device]
        compute, work, communication, busy = (
            Cover.from_intervals(operations.start[on_device[mask]], operations.end[on_device[mask]])
            for mask in (~is_copy & ~exchange, ~exchange, exchange, np.ones_like(is_copy))
        )
        compute_ns, work_ns, communication_ns, busy_ns = (
            cover.covered_within(windows.start, windows.end) for cover in (compute, work, communication, busy)
        )
        _, *exposed = work.find_gaps(communication.start, communication.end)
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
                numbered=numbered,
                start=windows.start,
                end=windows.end,
                compute=compute_ns,
                exposed_copy=work_ns - compute_ns,
                exposed_communication=busy_ns - work_ns,
                idle=windows.end - windows.start - busy_ns,
                communication=communication_ns,
                collectives=collectives.select(operations.device[exchanges] == device),
                cpu=cpu,
                exposed=(exposed[0], exposed[1]),
            )
        )
    return tuple(members)


def _numbers(attributed: AttributedTrace, process: int, steps: Steps) -> tuple[Ints, bool]:
    """Returns the number of each step by its range's name, such as ``ProfilerStep#12``; else by its place, from 0.

    That is its place among all ranges of steps, those of warm-up and those that are not whole among them: what one rank
    leaves out another one may have.
    """
    windows = steps.windows
    instances, ranges = attributed.instances, attributed.trace.ranges
    are_steps = np.isin(instances.phase, [instances.phases.index(name) for name in (STEP, OTHER_STEP)])
    index = np.flatnonzero(are_steps & (instances.process == process))
    index = index[np.argsort(instances.start[index], kind="stable")]
    place = np.searchsorted(instances.start[index], windows.called)
    if windows.source not in ("range", "profiler_step") or len(place) == 0 or place.max() >= len(index):
        return steps.number, False
    names = [ranges.names[ranges.name[instances.range[i]]] for i in index[place].tolist()]
    numbers = np.array([int(match[1]) if (match := _NUMBER.fullmatch(name)) else NONE for name in names])
    rising = (numbers != NONE).all() and (np.diff(numbers) > 0).all()
    return (numbers, True) if rising and len(numbers) > 1 else (place, False)


def _collectives(attributed: AttributedTrace, windows: Windows, index: Ints) -> Collectives:
    """Returns the collectives of a process; ``index`` are their operations, in the order of their starts."""
    trace, launched = attributed.trace, attributed.attribution.time[index]
    operations, calls, instances = trace.operations, trace.nccl_calls, attributed.instances
    place, call = _calls(attributed, index)
    last = np.full(len(index), NONE)  # the last call of each
    last[place] = call
    # An exchange sends and receives at the same time.
    is_receive = np.array([bool(_RECEIVES.search(name)) for name in (*calls.names, "")])[calls.name]
    sent, received = np.zeros((2, len(index)), np.int64)
    for total, mask in ((sent, ~is_receive), (received, is_receive)):
        np.add.at(total, place, np.where(mask, calls.bytes, 0)[call])
    with_peer = np.flatnonzero(calls.peer[call] >= 0)
    pairs, _ = distinct_rows(place[with_peer], calls.peer[call[with_peer]])
    by_kernel = np.array([_kind(name) for name in (*operations.names, "")])[operations.name[index]]
    by_call = np.array([_kind(name) for name in (*calls.names, "")])[np.append(calls.name, NONE)[last]]
    kind = np.where(by_call != OTHER_KIND, by_call, by_kernel)
    unnamed = np.flatnonzero(kind == OTHER_KIND)  # as RCCL's kernels for any collective are
    kind[unnamed] = [_kind(name) for name in find_launching_collectives(trace, attributed.attribution, index[unnamed])]
    communicator = np.append(calls.communicator, 0)[last]
    since = np.searchsorted(windows.called, launched, side="right") - 1
    return Collectives(
        start=operations.start[index],
        end=operations.end[index],
        launched=launched,
        step=np.where((since != NONE) & (launched < windows.left[since]), since, NONE),
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


def _calls(attributed: AttributedTrace, index: Ints) -> tuple[Ints, Ints]:
    """Returns NCCL's calls by the collective that carries them out: its place in ``index``, and the call, of each.

    A call belongs to the next collective that its thread launches. A group of calls is launched when the last one has
    been made: as one kernel, or for several devices as one of each, in the order of the calls. Calls that do not go
    into the kernels evenly belong to none.
    """
    calls, attribution = attributed.trace.nccl_calls, attributed.attribution
    launched = np.flatnonzero(attribution.thread[index] != NONE)
    if not len(calls) or not len(launched):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    thread, time = attribution.thread[index[launched]], attribution.time[index[launched]]
    axis = Axis(thread, time)
    place = axis.place(thread, time)
    # Those that one call launches, on several devices, are in order of start.
    order = np.argsort(place, kind="stable")
    at = np.searchsorted(place[order], axis.place(calls.thread, calls.start))
    known = np.flatnonzero((at < len(order)) & np.isin(calls.thread, thread))
    known = known[thread[order[at[known]]] == calls.thread[known]]
    first, group, count = np.unique(at[known], return_inverse=True, return_counts=True)
    last = np.minimum(np.append(first[1:], len(order)), np.searchsorted(thread[order], thread[order[first]], "right"))
    kernels = last - first
    each = np.where(kernels > count, 1, np.where(count % kernels == 0, count // kernels, 0))[group]
    by_group = np.argsort(group, kind="stable")  # the calls are in order of start
    number = np.empty_like(group)
    number[by_group] = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    even = each > 0
    at_kernel = first[group[even]] + number[even] // each[even]
    return launched[order[at_kernel]], known[even]


def _kind(name: str) -> int:
    """Returns the kind of collective that the name of a kernel or of a function of NCCL tells."""
    return next(code for code, pattern in enumerate(_KINDS.values()) if re.search(pattern, name, re.IGNORECASE))
