"""Builds steps that are all alike, call by call, so that what a finding saves can be worked out beside it.

An operation starts as soon as it is launched and the one before it has ended; a wait ends with what it waits for. Times
are µs; a call takes 10 µs up to the next one where nothing else is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nsys_analyzer.analysis.findings.finding import StepsToExplain
from nsys_analyzer.analysis.kernels.classes import classify
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.groups import StepGroup
from nsys_analyzer.analysis.steps.process import PAUSE_NS, Cause, is_loading
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.step import DeviceSteps, IdleTime, StepSummary
from nsys_analyzer.analysis.steps.study import RangeSpans, StudiedCalls, StudiedOperations, Study
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Unprofiled
from nsys_analyzer.trace import columns
from nsys_analyzer.trace.columns import ALLOCATE, FREE, KERNEL, MEMCPY, BlockResources
from nsys_analyzer.trace.metadata import Gpu
from nsys_analyzer.trace.phase_names import ATTENTION_PARTS
from tests.support.export import GEMM

US = 1_000
#: µs without a call from which on the program pauses.
PAUSE = PAUSE_NS // US
H200 = Gpu(
    0, "NVIDIA H200", 150 << 30, 132, compute_capability=9, registers_per_sm=65_536, shared_bytes_per_sm=233_472,
    warps_per_sm=64, blocks_per_sm=32,
)  # fmt: skip
#: Blocks of a kernel that fills the GPU.
MANY = 10_000
_PHASES = ("forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class _Call:
    kind: int
    api: str
    after: float
    range: str
    pause: str
    caller: str
    awaited: int
    events: float


@dataclass(frozen=True)
class _Operation:
    call: int
    kind: int
    kernel: str
    us: float
    phase: str
    part: str
    size: int
    copy: int
    duration: float
    resources: BlockResources | None = None


@dataclass
class Steps:
    """Steps under construction: what is called and launched in one of them, in this order."""

    steps: int = 4
    gpu: Gpu | None = H200
    phase: str = "forward"
    kind: str = ""
    batch: float | None = None
    calls: list[_Call] = field(default_factory=list)
    operations: list[_Operation] = field(default_factory=list)

    def call(
        self, api: str, after: float = 10, *, range: str = "", pause: str = "", caller: str = "", waits: bool = False,
        events: float = 0,
    ) -> Steps:  # fmt: skip
        """An API call in a range, with the range of the time behind it; one that waits does so for all before it."""
        starts = {name: kind for kind, names in columns.CALL_PREFIXES.items() for name in names}
        kind = next((kind for start, kind in starts.items() if api.startswith(start)), columns.OTHER_CALL)
        awaited = len(self.operations) - 1 if waits else -1
        self.calls.append(_Call(kind, api, after, range, pause or range, caller, awaited, events))
        return self

    def kernel(
        self, us: float, name: str = GEMM, after: float = 10, *, part: str = "", blocks: int = MANY,
        duration: float | None = None, range: str = "", pause: str = "", events: float = 0,
        resources: BlockResources | None = None,
    ) -> Steps:  # fmt: skip
        """A kernel of the current phase; of a longer ``duration`` where other work hides the rest."""
        self.call("cudaLaunchKernel_v7000", after, range=range, pause=pause, events=events)
        longest = us if duration is None else duration
        self.operations.append(
            _Operation(len(self.calls) - 1, KERNEL, name, us, self.phase, part, blocks, 0, longest, resources)
        )
        return self

    def copy(
        self, us: float, way: int, size: int, after: float = 10, *, waits: bool = False, range: str = ""
    ) -> Steps:  # fmt: skip
        """A copy one way; a blocking one waits for itself."""
        operation = _Operation(len(self.calls), MEMCPY, "", us, self.phase, "", size, way, us)
        self.operations.append(operation)
        return self.call("cudaMemcpyAsync_v3020", after, range=range, waits=waits)

    def sync(self, after: float = 10, *, range: str = "", caller: str = "") -> Steps:
        """A wait for everything."""
        return self.call("cudaStreamSynchronize_v3020", after, range=range, caller=caller, waits=True)

    def study(self, measured_us: float | None = None, low_share: float = 1.0) -> Study:
        """The steps one behind the other; they take what their replay takes where nothing was measured."""
        calls, operations, number = len(self.calls), len(self.operations), np.arange(self.steps)
        kernels = tuple(dict.fromkeys(one.kernel for one in self.operations if one.kernel))
        apis = tuple(dict.fromkeys(one.api for one in self.calls))
        resources = tuple(dict.fromkeys(one.resources for one in self.operations if one.resources))
        ranges = tuple(dict.fromkeys(name for one in self.calls for name in (one.range, one.pause) if name))

        def ns(values: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
            return np.tile(np.array(values, np.float64) * US, self.steps)

        def codes(names: tuple[str, ...], values: list[str]) -> np.ndarray[Any, Any]:
            found = [names.index(value) if value in names else -1 for value in values]
            return np.tile(np.array(found, np.int64), self.steps)

        def each(values: list[Any], dtype: type = np.int64) -> np.ndarray[Any, Any]:
            return np.tile(np.array(values, dtype), self.steps)

        awaited = each([one.awaited for one in self.calls])
        callers = tuple(dict.fromkeys(["", *(one.caller for one in self.calls)]))
        replay = Replay(
            cpu_ns=ns([one.after for one in self.calls]),
            min_wait_ns=ns([0] * calls),
            awaited=np.where(awaited >= 0, awaited + np.repeat(number * operations, calls), -1),
            return_ns=ns([0] * calls),
            launch=each([one.call for one in self.operations]) + np.repeat(number * calls, operations),
            latency_ns=ns([0] * operations),
            spacing_ns=ns([0] * operations),
            work_ns=ns([one.us for one in self.operations]),
            first_call=np.arange(self.steps + 1) * calls,
            max_profiler_ns=ns([one.events for one in self.calls]),
            pause_ns=ns([0 if one.after < PAUSE or one.kind in (ALLOCATE, FREE) else one.after for one in self.calls]),
            stream=each([0] * operations),
            joined=each([-1] * operations),
            join_gap_ns=ns([0] * operations),
        )
        starts = number * int(replay.step_ns)
        return Study(
            replay=replay,
            windows=Windows.of_program("range", "a range", starts, starts + int(replay.step_ns)),
            calls=StudiedCalls(
                start=np.zeros(calls * self.steps, np.int64),
                kind=each([one.kind for one in self.calls], np.int8),
                api=codes(apis, [one.api for one in self.calls]),
                caller=codes(callers, [one.caller for one in self.calls]),
                range=codes(ranges, [one.range for one in self.calls]),
                pause_range=codes(ranges, [one.pause for one in self.calls]),
                loading_ns=each(
                    [self._loads(place) * one.after * US for place, one in enumerate(self.calls)], np.int64
                ),
                unrecorded_wait_ns=np.zeros(calls * self.steps, np.int64),
                off_cpu_ns=np.full(calls * self.steps, np.nan),
            ),
            operations=StudiedOperations(
                start=np.zeros(operations * self.steps, np.int64),
                trace_index=np.arange(operations * self.steps),
                kind=each([one.kind for one in self.operations], np.int8),
                size=each([one.size for one in self.operations]),
                copy=each([one.copy for one in self.operations], np.int8),
                kernel=codes(kernels, [one.kernel for one in self.operations]),
                phase=codes(_PHASES, [one.phase for one in self.operations]),
                attention_part=codes(ATTENTION_PARTS, [one.part for one in self.operations]),
                duration_ns=each([one.duration * US for one in self.operations]),
                exposed_ns=ns([one.us for one in self.operations]),
                resource=each([resources.index(one.resources) if one.resources else -1 for one in self.operations]),
            ),
            spans=self._spans(ranges),
            kernels=kernels,
            classes=tuple(map(classify, kernels)),
            phases=_PHASES,
            apis=apis,
            callers=callers,
            ranges=ranges,
            phase_ranges=frozenset(_PHASES),
            profiled_step_ns=replay.step_ns if measured_us is None else measured_us * US,
            min_cost_share=low_share,
            gpu=self.gpu,
            resources=resources,
        )

    def _spans(self, ranges: tuple[str, ...]) -> RangeSpans:
        """A range around each call that is in one, and one around the time behind it."""
        every = [one for _ in range(self.steps) for one in self.calls]
        rows = [(ranges.index(one.range), at, at + 1, 0, 0) for at, one in enumerate(every) if one.range]
        rows += [(ranges.index(one.pause), 0, 0, at, at + 1) for at, one in enumerate(every) if one.pause]
        return RangeSpans(*np.array(rows, np.int64).reshape(-1, 5).T)

    def _loads(self, place: int) -> bool:
        """Whether the pause behind a call is the input pipeline's: by its name, or without one before a copy."""
        one, following = self.calls[place], self.calls[place + 1 :][:1]
        copies = [operation.call for operation in self.operations if operation.copy in columns.FROM_HOST]
        before_copy = bool(following) and place + 1 in copies
        return one.after >= PAUSE and (is_loading(one.pause) if one.pause else before_copy)

    def case(self, **idle_ms: float) -> StepsToExplain:
        """What a rule looks at, where no profiler cost anything; ``idle_ms`` is by cause."""
        study = self.study()
        step = replace(step_summary(study, idle_ms), kind=self.kind, batch=self.batch)
        return StepsToExplain(step, study, (study.replay,), 1.0, study.replay.step_ns / 1e6)

    def capture(
        self, *, unprofiled_us: float | None = None, measured_us: float | None = None, low_share: float = 1.0,
        **idle_ms: float,
    ) -> CaptureSummary:  # fmt: skip
        """A capture with these steps, and with their time without the profiler where it was taken."""
        study = self.study(measured_us, low_share)
        timed = Unprofiled("ok", phases={"step": Stats(n=1, mean=unprofiled_us / US)}) if unprofiled_us else None
        step = step_summary(study, idle_ms)
        return CaptureSummary(
            "steps", None, "steps.sqlite", "ok", device=self.gpu, step=step, study=study, unprofiled=timed
        )


def step_summary(study: Study, idle_ms: dict[str, float]) -> StepSummary:
    """The figures of the steps that findings look at: the idle time of each cause."""
    causes: dict[str, Cause] = {
        "sync": "sync", "allocator": "allocator", "copy": "copy", "launch": "launch", "host": "host", "data": "data",
        "unknown": "unknown",
    }  # fmt: skip
    idle = tuple(IdleTime(causes[cause], None, None, ms, 1) for cause, ms in idle_ms.items())
    busy = float(study.replay.work_ns.sum()) / study.steps / 1e6
    length = study.profiled_step_ns / 1e6
    device = DeviceSteps(busy, 0.0, 0.0, sum(idle_ms.values()), 0, (), (), idle)
    return StepSummary(
        **vars(device), instances=study.steps, source="range", unit="a range", on_gpu_timeline=False, length_ms=length,
        wall_ms=Stats(n=study.steps, mean=length), wall_values_ms=(length,), busy_values_ms=(busy,),
        groups=(StepGroup("usual", study.steps, length, True),), devices=(device,),
    )  # fmt: skip
