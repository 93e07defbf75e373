"""From an attributed trace to the summary of a process's steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from nsys_analyzer.analysis.attribution.processes import is_on_cpu
from nsys_analyzer.analysis.intervals.cover import Cover
from nsys_analyzer.analysis.intervals.timeline import LONG_AGO, NONE
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, FILLS, UNKNOWN
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.analysis.steps.anatomy import COMMUNICATING, COMPUTE, COPYING, Anatomy, Fragments, dissect
from nsys_analyzer.analysis.steps.groups import Steps, find_steps
from nsys_analyzer.analysis.steps.host import Host, find_host, is_loading
from nsys_analyzer.analysis.steps.idle import CAUSES, Cause, Causes, IdleRow, find_causes, idle_stretches
from nsys_analyzer.analysis.steps.lanes import Lane, draw_lanes
from nsys_analyzer.analysis.steps.step import (
    INPUT,
    OUTSIDE,
    CauseTime,
    ClassTime,
    DeviceSteps,
    DissectedSteps,
    IdleTime,
    KernelTime,
    LaunchLatency,
    PhaseParts,
    Queue,
    StepSummary,
    narrowed,
)
from nsys_analyzer.analysis.steps.study import Study, study_steps
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.analysis.summary.statistics import Moments, Stats, values_ms
from nsys_analyzer.trace.arrays import Ints, SmallInts, distinct
from nsys_analyzer.trace.columns import GRAPH, MEMCPY, MEMSET, pid_of, process_of

#: Operations that are dissected at once: enough for numpy, and few enough for the processor's cache.
_AT_ONCE = 50_000
#: Operations of a process that are dissected in all, about.
_MOST_OPERATIONS = 300_000
_Timed = TypeVar("_Timed", ClassTime, CauseTime, KernelTime, IdleTime)


def summarize_steps(
    attributed: AttributedTrace, process: int, steps: Steps
) -> tuple[StepSummary, Study | None, tuple[Lane, ...]]:
    """The steps of one process by its global ID, some of them in detail, and one as it passed.

    The detail is None where no launch is known, and there are no lanes then.
    """
    operations = attributed.trace.operations
    mine = np.flatnonzero(operations.process == process).astype(np.int32)
    every, windows = steps.windows, _some_of(steps.windows, len(mine))
    host = find_host(attributed, process, (int(every.start[0]), int(every.end[-1])))
    view = View(attributed, windows, every, host, steps.length_ms)
    on = operations.device[mine]
    devices = distinct(on).tolist()
    chosen = [mine[on == device] for device in devices] if len(devices) > 1 else [mine]
    del mine, on
    dissected = [view.device(device, index) for device, index in zip(devices, chosen, strict=True)]
    main = int(np.argmax([one.compute_ms for one in dissected]))
    looked_at = f" (of {len(every):,}, {len(windows):,} are looked at)" if len(windows) < len(every) else ""
    on_cpu = is_on_cpu(attributed.trace, process)
    dissected = [_by_ranges(view, host, dissected[main])] if on_cpu else dissected
    summary = StepSummary(
        **vars(dissected[0 if on_cpu else main]),
        instances=len(every),
        source=windows.source,
        unit=f"{windows.unit}{looked_at}",
        on_gpu_timeline=windows.on_gpu,
        length_ms=steps.length_ms,
        wall_ms=Stats.of_ns(every.end - every.start),
        wall_values_ms=values_ms(every.end - every.start),
        groups=steps.groups,
        cut=every.cut,
        devices=tuple(narrowed(one, DeviceSteps) for one in dissected),
    )
    if on_cpu:
        return summary, None, ()
    gpu = attributed.trace.metadata.gpu(pid_of(process), devices[main])
    timed = replace(summary, launch_latency_us=view.latency(chosen[main]), queue=view.queue(chosen[main]))
    study = study_steps(attributed, steps, view.host, chosen[main], view.rank, gpu)
    return timed, study, view.lanes(chosen[main])


def _by_ranges(view: View, host: Host, device: DissectedSteps) -> DissectedSteps:
    """The steps of a program without a GPU: each phase by its ranges, the loading of batches, and the rest.

    Nothing is launched there: the time in which no operator runs is the program's own.
    """
    windows, instances, ranges = view.windows, view.attributed.instances, host.ranges
    loads = np.array([*(is_loading(name) for name in ranges.names), False])[ranges.name]
    loads &= process_of(ranges.thread) == host.process
    wall = float((windows.end - windows.start).sum())
    computes = {one.phase: one.compute_ms for one in device.phases}
    phases: list[PhaseParts] = []
    left = device.total_ms
    spans = [(INPUT, ranges.start[loads], ranges.end[loads])]
    for code, name in enumerate(instances.phases[: -len((OTHER_STEP, STEP))]):
        chosen = (instances.phase == code) & (instances.process == host.process)
        spans.append((name, instances.start[chosen], instances.end[chosen]))
    for name, start, end in spans:
        order = np.argsort(start, kind="stable")
        ns = Cover.of(start[order], end[order]).within(windows.start, windows.end).sum()
        ms = min(float(ns) / wall * device.total_ms, left) if wall else 0.0
        compute = min(computes.get(name, 0.0), ms)
        if ms:
            phases.append(PhaseParts(compute, 0.0, 0.0, ms - compute, name))
        left -= ms
    compute = max(device.compute_ms - sum(one.compute_ms for one in phases), 0.0)
    phases.append(PhaseParts(compute, 0.0, 0.0, max(left - compute, 0.0), OUTSIDE))
    idle_ms, gaps = device.idle_ms, sum(one.gaps for one in device.idle_by_cause)
    idle = (IdleTime("host", None, None, idle_ms, gaps),) if idle_ms else ()
    causes = (CauseTime("host", idle_ms, None),) if idle_ms else ()
    return replace(device, phases=tuple(phases), idle_by_cause=idle, causes=causes, own_pauses_ms=0.0)


@dataclass(frozen=True)
class DeviceIdle:
    """When a device of a process idles in its steps: shape (stretches,), ns, and codes into ``CAUSES``, in order."""

    device: int
    start: Ints
    end: Ints
    cause: Ints


def find_idle(attributed: AttributedTrace, process: int) -> tuple[DeviceIdle, ...]:
    """The idle time of each device in every step of a process; none where nothing of it ran on a device."""
    steps = find_steps(attributed, process)
    if steps is None:
        return ()
    windows, operations = steps.every, attributed.trace.operations
    mine = np.flatnonzero(operations.process == process).astype(np.int32)
    host = find_host(attributed, process, (int(windows.start[0]), int(windows.end[-1])))
    view = View(attributed, windows, windows, host)
    on = operations.device[mine]
    return tuple(DeviceIdle(device, *view.idle(mine[on == device])) for device in distinct(on).tolist())


def _some_of(windows: Windows, operations: int) -> Windows:
    """All steps; of a long capture blocks of them, evenly spread, which tell as much in a part of the time."""
    fewer = -(-operations // _MOST_OPERATIONS)
    block = max(1, _AT_ONCE * len(windows) // max(operations, 1))
    if fewer < 2 or len(windows) < 2 * fewer * block:
        return windows
    chosen = np.flatnonzero(np.arange(len(windows)) // block % fewer == 0)
    return windows.select(chosen)


@dataclass
class _Sums:
    """What the parts of the windows add up to, ns; ``busy`` is the GPU's work in each."""

    parts: Moments
    classes: Moments
    kernels: Moments
    launches: Ints
    causes: Moments
    phases: Ints
    rows: list[IdleRow]
    busy: list[Ints]
    own_pauses: int = 0


class View:
    """The operations of an attributed trace, each with its rank, its class and its phase.

    ``length_ms``: the length of a step, to which its parts add up; 0 where they are not asked for.
    """

    def __init__(
        self, attributed: AttributedTrace, windows: Windows, every: Windows, host: Host, length_ms: float = 0.0
    ) -> None:
        self.attributed, self.windows, self.every, self.host = attributed, windows, every, host
        self.length_ms = length_ms
        operations, kernels = attributed.trace.operations, attributed.kernels
        self.classes = tuple(dict.fromkeys((*kernels.classes, FILLS, UNKNOWN)))
        code = {name: i for i, name in enumerate(self.classes)}
        of_kernel = np.array([*(code[name] for name in kernels.classes), code[UNKNOWN]], np.int32)
        self.label = of_kernel[kernels.code]
        self.label[operations.of_kind(MEMCPY)] = self.label[operations.of_kind(MEMSET)] = code[FILLS]
        self.label[operations.of_kind(GRAPH)] = code[UNKNOWN]
        self.rank = np.full(len(operations), COMPUTE, np.int8)
        self.rank[operations.of_kind(MEMCPY)] = COPYING
        if COMMUNICATION in code:
            self.rank[self.label == code[COMMUNICATION]] = COMMUNICATING
        self.phase_names = (*attributed.instances.phases, OUTSIDE)
        outside = len(self.phase_names) - 1
        phase_of = np.append(attributed.instances.phase, outside).astype(np.int32)
        # The last entry serves what follows the last operation.
        self.phase = np.full(len(operations) + 1, outside, np.int32)
        np.take(phase_of, attributed.instance_pair[0], out=self.phase[:-1], mode="wrap")
        placed, time = attributed.attribution.thread != NONE, attributed.attribution.time
        self.launched = time if placed.all() else np.where(placed, time, LONG_AGO)
        self.steps = attributed.roles.mask(STEP, OTHER_STEP)

    def device(self, device: int, chosen: SmallInts) -> DissectedSteps:
        """The steps on one device, of which ``chosen`` are the operations."""
        sums = self._nothing()
        for part, some in self._chunks(chosen):
            self._add(sums, part, some)
        steps = len(self.windows)
        works, waits = self._scales(sums)
        (compute, _), (copy, copy_std), *_ = sums.parts.of(steps, works)
        *_, (communication, communication_std), (idle, _) = sums.parts.of(steps, waits)
        classes = zip(self.classes, sums.classes.of(steps, works), strict=True)
        scales = np.array([works, works, waits, waits]) / (steps * 1e6)
        of_phases = *(sums.phases * scales).T.tolist(), self.phase_names
        return DissectedSteps(
            compute_ms=compute,
            exposed_copy_ms=copy,
            exposed_communication_ms=communication,
            idle_ms=idle,
            device=device,
            classes=_longest(ClassTime(name, *ms) for name, ms in classes),
            phases=tuple(PhaseParts(*ms) for ms in zip(*of_phases, strict=True) if any(ms[:4])),
            idle_by_cause=_longest(_idle_times(sums.rows, steps, waits)),
            kernels=_longest(self._kernels(sums, steps, works)),
            causes=_longest(
                CauseTime(cause, *ms) for cause, ms in zip(CAUSES, sums.causes.of(steps, waits), strict=True)
            ),
            busy_values_ms=values_ms(np.concatenate(sums.busy)),
            exposed_copy_std_ms=copy_std,
            exposed_communication_std_ms=communication_std,
            own_pauses_ms=sums.own_pauses / (steps * 1e6) * waits,
        )

    def _scales(self, sums: _Sums) -> tuple[float, float]:
        """What mean times are multiplied by, so that the parts add up to the length of a step: of work, and of waiting.

        Computing and copying take as long in a long step as in others: what a step waits is what they leave of it.
        """
        mean = sums.parts.total / (len(self.windows) * 1e6)
        works, waits = float(mean[:2].sum()), float(mean[2:].sum())
        if self.length_ms < works or not waits:
            return (self.length_ms / (works + waits),) * 2 if works + waits else (1.0, 1.0)
        return 1.0, (self.length_ms - works) / waits

    def _nothing(self) -> _Sums:
        phases, rows = len(self.phase_names), len(self.attributed.kernels.names) + len(self.classes)
        return _Sums(
            Moments(4), Moments(len(self.classes)), Moments(rows), np.zeros(rows, np.int64), Moments(len(CAUSES)),
            np.zeros((phases, 4), np.int64), [], [],
        )  # fmt: skip

    def _kernels(self, sums: _Sums, steps: int, scale: float) -> Iterator[KernelTime]:
        """Every kernel, and behind them, without a name, what of each class is none: fills, and opaque graphs."""
        kernels = self.attributed.kernels
        names = [*zip(kernels.names, kernels.classes, strict=True), *(("", one) for one in self.classes)]
        figures = zip(names, sums.launches.tolist(), sums.kernels.of(steps, scale), strict=True)
        return (KernelTime(*name, launches / steps, *ms) for name, launches, ms in figures)

    def _chunks(self, chosen: SmallInts) -> Sequence[tuple[Windows, SmallInts]]:
        """The windows in parts, each with the operations that may touch them, in order of their starts."""
        operations, windows = self.attributed.trace.operations, self.windows
        start = operations.start[chosen]
        if (start[1:] < start[:-1]).any():
            chosen = chosen[np.argsort(start, kind="stable")]
            start = operations.start[chosen]
        reached = operations.end[chosen]
        np.maximum.accumulate(reached, out=reached)
        low = np.searchsorted(reached, windows.start, side="right")
        # With the operation that follows the last window: what ends its last gap.
        high = np.minimum(np.searchsorted(start, windows.end) + 1, len(chosen))
        part = (np.cumsum(high - low) - 1) // _AT_ONCE
        found = []
        for one in np.unique(part).tolist():
            picked = np.flatnonzero(part == one)
            some = chosen[int(low[picked].min()) : int(high[picked].max())]
            found.append((windows.select(picked), some))
        return found

    def _add(self, sums: _Sums, windows: Windows, chosen: SmallInts) -> None:
        anatomy, causes = self._dissect(windows, chosen)
        fragments, gaps = anatomy.fragments, anatomy.gaps
        steps = np.arange(len(windows))
        for place, part in enumerate(anatomy.parts):
            sums.parts.add(steps, np.full(len(windows), place), part)
        sums.busy.append(anatomy.wall - anatomy.idle)
        self._add_compute(sums, fragments)
        phase = self.phase[fragments.operation]
        for rank in (COMPUTE, COPYING, COMMUNICATING):
            mine = fragments.rank == rank
            sums.phases[:, rank] += _sums(phase[mine], fragments.fresh[mine], len(self.phase_names))
        sums.phases[:, 3] += _sums(self.phase[gaps.next], gaps.length, len(self.phase_names))
        for cause, ns in causes.parts:
            sums.causes.add(gaps.window, cause, ns)
        sums.own_pauses += int(gaps.length[causes.own].sum())
        sums.rows += causes.rows

    def _add_compute(self, sums: _Sums, fragments: Fragments) -> None:
        """Adds what computes, by class and by kernel."""
        compute = fragments.rank == COMPUTE
        operation, fresh, window = (one[compute] for one in (fragments.operation, fragments.fresh, fragments.window))
        label, code = self.label[operation], self.attributed.kernels.code[operation]
        kernel = np.where(code == NONE, len(self.attributed.kernels.names) + label, code)
        sums.classes.add(window, label, fresh)
        sums.kernels.add(window, kernel, fresh)
        begins = fragments.start[compute] == self.attributed.trace.operations.start[operation]
        sums.launches += np.bincount(kernel[begins], minlength=len(sums.launches))

    def _dissect(self, windows: Windows, chosen: SmallInts) -> tuple[Anatomy, Causes]:
        """What fills some windows on a device, and why it idles; ``chosen`` are its operations, in order of start."""
        anatomy = dissect(windows, self.attributed.trace.operations, chosen, self.rank)
        return anatomy, find_causes(anatomy.gaps, self.host, self.launched, self.rank, self.steps)

    def idle(self, chosen: SmallInts) -> tuple[Ints, Ints, Ints]:
        """Start, end and cause of each stretch in which a device idles, of which ``chosen`` are the operations."""
        found = [(np.empty(0, np.int64),) * 3]
        for part, some in self._chunks(chosen):
            anatomy, causes = self._dissect(part, some)
            found.append(idle_stretches(anatomy.gaps, causes, self.host, self.launched))
        start, end, cause = (np.concatenate(columns) for columns in zip(*found, strict=True))
        return start, end, cause

    def latency(self, chosen: SmallInts) -> LaunchLatency | None:
        """How long operations wait behind their launches; None without any."""
        waits = self.attributed.wait(self._near_the_middle(chosen))
        if not len(waits):
            return None
        return LaunchLatency(*(np.percentile(waits, [50, 90]) / 1e3).tolist())

    def queue(self, chosen: SmallInts) -> Queue | None:
        """The operations that are launched and not done when another is launched."""
        mine = self._near_the_middle(chosen)
        if not len(mine):
            return None
        launched = np.sort(self.launched[mine])
        ended = np.sort(self.attributed.trace.operations.end[mine])
        waiting = np.maximum(np.arange(len(mine)) - np.searchsorted(ended, launched, side="right"), 0)
        return Queue(float(np.median(waiting)), int(waiting.max()))

    def _near_the_middle(self, chosen: SmallInts) -> SmallInts:
        """The operations that are launched in some steps of the middle of the capture."""
        middle = len(self.every) // 2
        low, high = max(0, middle - _LOOKED_AT), min(len(self.every), middle + _LOOKED_AT) - 1
        time = self.launched[chosen]
        near: SmallInts = chosen[(time >= self.every.called[low]) & (time < self.every.left[high])]
        return near

    def lanes(self, chosen: SmallInts) -> tuple[Lane, ...]:
        """A step of median duration as it passed."""
        length = self.windows.end - self.windows.start
        middle = np.argsort(length, kind="stable")[(len(length) - 1) // 2]
        windows = self.windows.select(np.array([middle]))
        bounds = int(windows.start[0]), int(windows.end[0])
        operations = self.attributed.trace.operations
        near = chosen[(operations.end[chosen] > bounds[0]) & (operations.start[chosen] < bounds[1] + _BEHIND_NS)]
        near = near[np.argsort(operations.start[near], kind="stable")]
        anatomy, causes = self._dissect(windows, near)
        return draw_lanes(
            self.attributed, self.host, bounds, near, self.label, self.classes, anatomy.gaps, causes.largest
        )


#: So many steps before the middle one, and from it on, tell how far the program runs ahead.
_LOOKED_AT = 8
#: How far behind a step its last gap's end is looked for, ns.
_BEHIND_NS = 1_000_000_000


def _idle_times(rows: Sequence[IdleRow], steps: int, scale: float) -> Iterator[IdleTime]:
    """The idle time of each cause, range and API call in a step, scaled as all times are."""
    sums: dict[tuple[Cause, str, str], tuple[int, int]] = {}
    for row in rows:
        ns, gaps = sums.get((row.cause, row.range, row.api), (0, 0))
        sums[row.cause, row.range, row.api] = ns + row.ns, gaps + row.gaps
    for (cause, range_, api), (ns, gaps) in sums.items():
        name = api.partition("_v")[0]  # without the version that CUPTI puts behind it
        yield IdleTime(cause, range_ or None, name or None, ns / (steps * 1e6) * scale, gaps / steps)


def _longest(rows: Iterable[_Timed]) -> tuple[_Timed, ...]:
    """The rows that take time, the longest first."""
    return tuple(sorted((one for one in rows if one.ms), key=lambda one: -one.ms))


def _sums(group: SmallInts, ns: Ints, groups: int) -> Ints:
    sums: Ints = np.bincount(group, ns, groups).astype(np.int64)
    return sums
