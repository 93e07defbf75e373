"""From an attributed trace to the record of each rank in it."""

from __future__ import annotations

import re

import numpy as np

from nsys_analyzer.analysis.attribution.processes import Process
from nsys_analyzer.analysis.intervals.axis import Axis
from nsys_analyzer.analysis.intervals.cover import Cover
from nsys_analyzer.analysis.intervals.timeline import NONE
from nsys_analyzer.analysis.kernels.classes import COMMUNICATION
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.analysis.ranks.member import COLLECTIVE_KINDS, OTHER_KIND, Collectives, Member, StepParts
from nsys_analyzer.analysis.steps.groups import Steps
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Bools, Ints, distinct_rows
from nsys_analyzer.trace.columns import COPY, MEMCPY, SYNCHRONIZE, process_of
from nsys_analyzer.trace.ranks import UNKNOWN

#: The kind of a collective by its kernel's name, or by the function of NCCL that it carries out.
_KINDS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("all-reduce", "all_?reduce"),
        ("all-gather", "all_?gather"),
        ("reduce-scatter", "reduce_?scatter"),
        ("broadcast", "broadcast|bcast"),
        ("send/receive", "send_?recv|send|recv"),
        ("all-to-all", "all_?to_?all"),
        ("reduce", "reduce"),
        ("gather", "gather"),
        ("scatter", "scatter"),
    )
)
#: A launch that takes this long waits for room in the queue, ns.
_LONG_CALL_NS = 50_000
_RECEIVES = re.compile("recv", re.IGNORECASE)
_NUMBER = re.compile(r"\D*(\d{1,9})\D*")


def record_members(attributed: AttributedTrace, process: Process, steps: Steps, capture: str) -> tuple[Member, ...]:
    """The record of each device that a process uses; none where it exchanges nothing with another one.

    A process exchanges something if it runs collectives, or uses several devices.
    """
    operations = attributed.trace.operations
    is_collective = _is_collective(attributed)
    mine = operations.process == process.global_pid
    devices = np.unique(operations.device[mine]).tolist()
    if len(devices) < 2 and not (is_collective & mine).any():
        return ()
    windows = steps.windows
    numbers, numbered = _numbers(attributed, process.global_pid, steps)
    calls = _calls(attributed, np.flatnonzero(is_collective))
    world = attributed.trace.ranks.get(process.global_pid) or attributed.trace.ranks.get(0)
    cpu = _cpu(attributed, process.global_pid, windows)

    def member(device: int) -> Member:
        chosen = np.flatnonzero(mine & (operations.device == device))
        chosen = chosen[np.argsort(operations.start[chosen], kind="stable")]
        parts, exposed = _parts(attributed, windows, chosen, is_collective)
        return Member(
            capture=capture,
            source=attributed.trace.path.name,
            rank=process.rank if len(devices) == 1 else None,
            world_size=world.world_size if world else 0,
            process=process.global_pid,
            device=device,
            started_utc_ns=_session_start(attributed),
            number=numbers,
            numbered=numbered,
            start=windows.start,
            end=windows.end,
            length_ms=steps.length_ms,
            parts=parts,
            collectives=_collectives(attributed, windows, chosen[is_collective[chosen]], calls),
            cpu=cpu,
            exposed=exposed,
        )

    return tuple(member(device) for device in devices)


def _cpu(attributed: AttributedTrace, process: int, windows: Windows) -> Ints:
    """Shape (steps,): from the program's begin of each step to the next, without the calls in which it waits, ns.

    A call waits if it synchronizes or copies, or if it takes so long that the queue of launches must be full.
    """
    launches = attributed.trace.launches
    waits = np.isin(launches.call, (SYNCHRONIZE, COPY)) | (launches.end - launches.start > _LONG_CALL_NS)
    chosen = np.flatnonzero(waits & (process_of(launches.thread) == process))
    chosen = chosen[np.argsort(launches.start[chosen], kind="stable")]
    begin, end = windows.called, windows.left
    own: Ints = end - begin - Cover.of(launches.start[chosen], launches.end[chosen]).within(begin, end)
    return own


def _session_start(attributed: AttributedTrace) -> int:
    metadata = attributed.trace.metadata
    return metadata.started_utc_ns - metadata.time_shift_ns if metadata.started_utc_ns else 0


def _is_collective(attributed: AttributedTrace) -> Bools:
    """Shape (operations,): True for the kernels of collectives and exchanges."""
    of_class = np.array([*(name == COMMUNICATION for name in attributed.kernels.classes), False], np.bool_)
    found: Bools = of_class[attributed.kernels.code]
    return found


def _numbers(attributed: AttributedTrace, process: int, steps: Steps) -> tuple[Ints, bool]:
    """The number of each step by the name of its range, such as ``ProfilerStep#12``; else by its place, from 0."""
    windows, by_place = steps.windows, (steps.number, False)
    instances, ranges = attributed.instances, attributed.trace.ranges
    are_steps = np.isin(instances.phase, [instances.phases.index(name) for name in (STEP, OTHER_STEP)])
    chosen = np.flatnonzero(are_steps & (instances.process == process))
    order = np.argsort(instances.start[chosen], kind="stable")
    place = np.searchsorted(instances.start[chosen][order], windows.called)
    if windows.source not in ("range", "profiler_step") or len(place) == 0 or place.max() >= len(chosen):
        return by_place
    names = [ranges.names[ranges.name[instances.range[i]]] for i in chosen[order][place].tolist()]
    found = [_NUMBER.fullmatch(name) for name in names]
    numbers = np.array([int(match[1]) if match else NONE for match in found])
    rising = (numbers != NONE).all() and (np.diff(numbers) > 0).all()
    return (numbers, True) if rising and len(numbers) > 1 else by_place


def _parts(
    attributed: AttributedTrace, windows: Windows, chosen: Ints, is_collective: Bools
) -> tuple[StepParts, tuple[Ints, Ints]]:
    """What fills the steps on one device, and the stretches of exposed communication.

    ``chosen`` are the operations of the device, in the order of their starts. Compute comes before copies, and these
    before communication.
    """
    operations = attributed.trace.operations
    copies = operations.kind[chosen] == MEMCPY
    collectives = is_collective[chosen]

    def cover(some: Bools) -> Cover:
        return Cover.of(operations.start[chosen[some]], operations.end[chosen[some]])

    compute, work, communication, busy = (
        cover(some) for some in (~copies & ~collectives, ~collectives, collectives, np.ones_like(copies))
    )
    within = [one.within(windows.start, windows.end) for one in (compute, work, busy, communication)]
    parts = StepParts(
        compute=within[0],
        exposed_copy=within[1] - within[0],
        exposed_communication=within[2] - within[1],
        idle=windows.end - windows.start - within[2],
        communication=within[3],
    )
    _, *exposed = work.without(communication.start, communication.end)
    return parts, (exposed[0], exposed[1])


class _Calls:
    """NCCL's calls by the kernel that carries them out."""

    def __init__(self, kernel: Ints, call: Ints) -> None:
        """Shape (calls,): index of the operation, and of the call."""
        order = np.argsort(kernel, kind="stable")
        self.kernel, self.call = kernel[order], call[order]

    def last(self, chosen: Ints) -> Ints:
        """The last call of some operations, -1 for none."""
        at = np.searchsorted(self.kernel, chosen, side="right") - 1
        found = np.where(at >= 0, np.append(self.kernel, NONE)[at], NONE) == chosen
        return np.where(found, np.append(self.call, NONE)[at], NONE)

    def sums(self, chosen: Ints, values: Ints) -> Ints:
        """The sum of a column of the calls over those of each of some operations."""
        total = np.append(0, np.cumsum(values[self.call]))
        low, high = (np.searchsorted(self.kernel, chosen, side=side) for side in ("left", "right"))
        sums: Ints = total[high] - total[low]
        return sums

    def distinct(self, chosen: Ints, values: Ints) -> Ints:
        """How many values of a column the calls of each of some operations have, without those below 0."""
        known = np.flatnonzero(values[self.call] >= 0)
        first, _ = distinct_rows(self.kernel[known], values[self.call[known]])
        kernel = self.kernel[known[first]]
        low, high = (np.searchsorted(kernel, chosen, side=side) for side in ("left", "right"))
        distinct: Ints = high - low
        return distinct


def _calls(attributed: AttributedTrace, collectives: Ints) -> _Calls:
    """A call belongs to the next collective that its thread launches.

    A group of calls is launched when the last one has been made: as one kernel, or for several devices as one of each,
    in the order of the calls. Calls that do not go into the kernels evenly belong to none.
    """
    calls, attribution = attributed.trace.nccl_calls, attributed.attribution
    collectives = collectives[attribution.thread[collectives] != NONE]
    thread, time = attribution.thread[collectives], attribution.time[collectives]
    none = np.zeros(0, np.int64)
    if not len(calls) or not len(collectives):
        return _Calls(none, none)
    axis = Axis(thread, time)
    place = axis.place(thread, time)
    order = np.lexsort((attributed.trace.operations.start[collectives], place))
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
    return _Calls(collectives[order[at_kernel]], known[even])


def _collectives(attributed: AttributedTrace, windows: Windows, chosen: Ints, calls: _Calls) -> Collectives:
    """The collectives among the operations of one device, ``chosen`` in the order of their starts."""
    trace, launched = attributed.trace, attributed.attribution.time[chosen]
    operations, noted = trace.operations, trace.nccl_calls
    of_kernel = [_kind(name) for name in (*operations.names, "")]
    of_call = [_kind(name) for name in (*noted.names, "")]
    call = calls.last(chosen)
    by_kernel = np.array(of_kernel)[operations.name[chosen]]
    by_call = np.array(of_call)[np.append(noted.name, NONE)[call]]
    since = np.searchsorted(windows.called, launched, side="right") - 1
    instances = attributed.instances
    phase = np.append(instances.phase, NONE)[attributed.instance_pair[0][chosen]]
    communicator = np.append(noted.communicator, 0)[call]
    # An exchange sends and receives at the same time.
    receives = np.array([bool(_RECEIVES.search(name)) for name in (*noted.names, "")])[noted.name]
    sizes = (calls.sums(chosen, np.where(receives == way, noted.bytes, 0)) for way in (False, True))
    return Collectives(
        start=operations.start[chosen],
        end=operations.end[chosen],
        launched=launched,
        step=np.where((since != NONE) & (launched < windows.left[since]), since, NONE),
        since=since,
        kind=np.where(by_call != OTHER_KIND, by_call, by_kernel),
        communicator=np.where(communicator != 0, communicator, -operations.stream[chosen].astype(np.int64) - 1),
        bytes=np.where(np.append(noted.bytes, UNKNOWN)[call] != UNKNOWN, np.maximum(*sizes), UNKNOWN),
        peer=np.append(noted.peer, UNKNOWN)[call],
        ranks=np.append(noted.ranks, 0)[call],
        peers=calls.distinct(chosen, noted.peer),
        phase=phase,
        names=instances.phases,
    )


def _kind(name: str) -> int:
    """The kind of collective that the name of a kernel or of a function of NCCL tells."""
    return next((COLLECTIVE_KINDS.index(kind) for kind, pattern in _KINDS if pattern.search(name)), OTHER_KIND)
