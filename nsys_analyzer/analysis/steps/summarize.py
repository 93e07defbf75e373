"""From an attributed trace to the summary of a process's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.analysis.intervals.timeline import LONG_AGO, NONE
from nsys_analyzer.analysis.kernels.classes import COMMUNICATION, UNKNOWN
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.analysis.steps.anatomy import COMMUNICATING, COMPUTE, COPYING, Anatomy, dissect
from nsys_analyzer.analysis.steps.host import Host, find_host
from nsys_analyzer.analysis.steps.idle import Causes, IdleRow, find_causes
from nsys_analyzer.analysis.steps.lanes import Lane, draw_lanes
from nsys_analyzer.analysis.steps.step import (
    OUTSIDE,
    ClassTime,
    DeviceSteps,
    IdleTime,
    Parts,
    PhaseParts,
    StepSummary,
)
from nsys_analyzer.analysis.steps.study import study_steps
from nsys_analyzer.analysis.steps.windows import Windows, find_windows
from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.trace.arrays import Ints, SmallInts, distinct
from nsys_analyzer.trace.columns import GRAPH, MEMCPY, MEMSET, pid_of

#: Operations that are dissected at once: enough for numpy, and few enough for the processor's cache.
_AT_ONCE = 50_000
#: Operations of a process that are dissected in all, about.
_MOST_OPERATIONS = 300_000
_FILLS = "memset/memcpy"


def summarize_steps(attributed: AttributedTrace, process: int) -> StepSummary | None:
    """The steps of one process by its global ID; None where it has no step, or nothing on a GPU."""
    windows = find_windows(attributed, process)
    operations = attributed.trace.operations
    mine = np.flatnonzero(operations.process == process).astype(np.int32)
    if windows is None or not len(mine):
        return None
    every, windows = windows, _some_of(windows, len(mine))
    host = find_host(attributed, process, (int(every.start[0]), int(every.end[-1])))
    view = _View(attributed, windows, every, host)
    on = operations.device[mine]
    devices = distinct(on).tolist()
    chosen = [mine[on == device] for device in devices] if len(devices) > 1 else [mine]
    del mine, on
    dissected = [view.device(device, index) for device, index in zip(devices, chosen, strict=True)]
    main = int(np.argmax([one.parts.compute_ms for one in dissected]))
    gpu = attributed.trace.metadata.gpu(pid_of(process), devices[main])
    return StepSummary(
        len(windows),
        windows.source,
        windows.unit,
        windows.on_gpu,
        Stats.of_ns(windows.end - windows.start),
        tuple(dissected),
        view.latency(chosen[main]),
        view.queue(chosen[main]),
        view.lanes(chosen[main]),
        study_steps(attributed, every, view.host, chosen[main], view.rank, gpu),
    )


def _some_of(windows: Windows, operations: int) -> Windows:
    """All steps; of a long capture blocks of them, evenly spread, which tell as much in a part of the time."""
    fewer = -(-operations // _MOST_OPERATIONS)
    block = max(1, _AT_ONCE * len(windows) // max(operations, 1))
    if fewer < 2 or len(windows) < 2 * fewer * block:
        return windows
    chosen = np.flatnonzero(np.arange(len(windows)) // block % fewer == 0)
    return replace(windows.select(chosen), unit=f"{windows.unit} (of {len(windows):,}, {len(chosen):,} are looked at)")


@dataclass
class _Sums:
    """What the parts of the windows add up to, ns."""

    parts: Ints
    classes: Ints
    phases: Ints
    rows: list[IdleRow]


class _View:
    """The operations of an attributed trace, each with its rank, its class and its phase."""

    def __init__(self, attributed: AttributedTrace, windows: Windows, every: Windows, host: Host) -> None:
        self.attributed, self.windows, self.every, self.host = attributed, windows, every, host
        operations, kernels = attributed.trace.operations, attributed.kernels
        self.classes = tuple(dict.fromkeys((*kernels.classes, _FILLS, UNKNOWN)))
        code = {name: i for i, name in enumerate(self.classes)}
        of_kernel = np.array([*(code[name] for name in kernels.classes), code[UNKNOWN]], np.int32)
        self.label = of_kernel[kernels.code]
        self.label[operations.of_kind(MEMCPY)] = self.label[operations.of_kind(MEMSET)] = code[_FILLS]
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

    def device(self, device: int, chosen: SmallInts) -> DeviceSteps:
        """The steps on one device, of which ``chosen`` are the operations."""
        kinds, phases = len(self.classes), len(self.phase_names)
        sums = _Sums(np.zeros(4, np.int64), np.zeros(kinds, np.int64), np.zeros((phases, 4), np.int64), [])
        for part, some in self._chunks(chosen):
            self._add(sums, part, some)
        steps = len(self.windows) * 1e6
        rows: dict[tuple[str, str, str], list[float]] = {}
        for row in sums.rows:
            key = rows.setdefault((row.cause, row.range, row.api), [0.0, 0.0])
            key[0] += row.ns
            key[1] += row.gaps
        idle = [
            IdleTime(cause, name, api, ns / steps, gaps / len(self.windows))  # type: ignore[arg-type]
            for (cause, name, api), (ns, gaps) in rows.items()
            if ns
        ]
        classes = [ClassTime(name, ns / steps) for name, ns in zip(self.classes, sums.classes.tolist(), strict=True)]
        return DeviceSteps(
            device,
            Parts(*(sums.parts / steps).tolist()),
            tuple(sorted((one for one in classes if one.ms), key=lambda one: -one.ms)),
            tuple(
                PhaseParts(name, Parts(*(row / steps).tolist()))
                for name, row in zip(self.phase_names, sums.phases, strict=True)
                if row.any()
            ),
            tuple(sorted(idle, key=lambda one: -one.ms)),
        )

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
        fragments = anatomy.fragments
        sums.parts += [part.sum() for part in anatomy.parts]
        compute = fragments.rank == COMPUTE
        label = self.label[fragments.operation[compute]]
        sums.classes += np.bincount(label, fragments.fresh[compute], len(self.classes)).astype(np.int64)
        phase = self.phase[fragments.operation]
        for rank in (COMPUTE, COPYING, COMMUNICATING):
            mine = fragments.rank == rank
            sums.phases[:, rank] += _sums(phase[mine], fragments.fresh[mine], len(self.phase_names))
        following = self.phase[anatomy.gaps.next]
        sums.phases[:, 3] += _sums(following, anatomy.gaps.length, len(self.phase_names))
        sums.rows += causes.rows

    def _dissect(self, windows: Windows, chosen: SmallInts) -> tuple[Anatomy, Causes]:
        anatomy = dissect(windows, self.attributed.trace.operations, chosen, self.rank)
        return anatomy, find_causes(anatomy.gaps, self.host, self.launched, self.rank, self.steps)

    def latency(self, chosen: SmallInts) -> tuple[float, float] | None:
        """From launches to the starts of their operations, µs: median and 90th percentile."""
        waits = self.attributed.wait(self._near_the_middle(chosen))
        if not len(waits):
            return None
        median, most = (np.percentile(waits, [50, 90]) / 1e3).tolist()
        return median, most

    def queue(self, chosen: SmallInts) -> tuple[float, int] | None:
        """The operations that are launched and not done when another is launched: median and most."""
        mine = self._near_the_middle(chosen)
        if not len(mine):
            return None
        launched = np.sort(self.launched[mine])
        ended = np.sort(self.attributed.trace.operations.end[mine])
        waiting = np.maximum(np.arange(len(mine)) - np.searchsorted(ended, launched, side="right"), 0)
        return float(np.median(waiting)), int(waiting.max())

    def _near_the_middle(self, chosen: SmallInts) -> SmallInts:
        """The operations that are launched in some steps of the middle of the capture."""
        middle = len(self.every) // 2
        low, high = max(0, middle - _LOOKED_AT), min(len(self.every), middle + _LOOKED_AT)
        time = self.launched[chosen]
        near: SmallInts = chosen[(time >= self.every.called[low]) & (time < self.every.called[high])]
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


def _sums(group: SmallInts, ns: Ints, groups: int) -> Ints:
    sums: Ints = np.bincount(group, ns, groups).astype(np.int64)
    return sums
