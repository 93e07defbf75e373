"""Builds tiny exports of programs whose API calls last some µs, to test why the GPU is idle."""

from __future__ import annotations

from pathlib import Path

from nsys_analyzer import Trace
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.groups import Steps, find_steps
from nsys_analyzer.analysis.steps.process import IdleStretches, ProcessWork
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.steps.summarize import summarize_steps
from tests.support.export import GEMM, MAIN, PID, Export, global_tid

US = 1_000
LAUNCH, SYNC = "cudaLaunchKernel_v7000", "cudaStreamSynchronize_v3020"
MALLOC, FREE = "cudaMalloc_v3020", "cudaFree_v3020"
COPY, GRAPH = "cudaMemcpyAsync_v3020", "cudaGraphLaunch_v10000"
RECORD, WAIT = "cudaEventRecordWithFlags_v11010", "cudaStreamWaitEvent_v3020"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Program(Export):
    """An export under construction whose times are µs, from calls that last and from what they launch."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu()
        self._calls = 1_000_000  # correlation IDs behind those of the builder of exports

    def api(self, name: str, start: float, end: float, tid: int = MAIN, pid: int = PID) -> int:
        """An API call from start to end; returns its correlation ID."""
        self._calls += 1
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=_ns(start), end=_ns(end), globalTid=global_tid(tid, pid),
            correlationId=self._calls, nameId=self.string(name), returnValue=0,
        )  # fmt: skip
        return self._calls

    def work(
        self, called: tuple[float, float], ran: tuple[float, float], tid: int = MAIN, pid: int = PID, *,
        name: str = GEMM, api: str = LAUNCH, stream: int = 7, device: int = 0,
    ) -> Program:  # fmt: skip
        """A kernel, and the call that launched it."""
        correlation = self.api(api, *called, tid, pid)
        ns = (_ns(one) for one in ran)
        self.kernel(name, None, *ns, tid, pid, correlation=correlation, stream=stream, device=device)
        return self

    def copy(self, called: tuple[float, float], ran: tuple[float, float], stream: int = 7) -> Program:
        """A copy, and its call."""
        correlation = self.api(COPY, *called)
        self._gpu("MEMCPY", _ns(ran[0]), _ns(ran[1]), correlation, PID, stream, 0)
        return self

    def open(self, name: str, start: float, end: float, tid: int = MAIN, pid: int = PID) -> Program:
        """An NVTX range."""
        self.range(name, _ns(start), _ns(end), tid, pid)
        return self

    def step(self, start: float, end: float) -> Program:
        """The range of a step."""
        return self.open("step", start, end)


def three_steps(*work: tuple[str, float, float, float], waits: tuple[float, float] | None = None) -> Program:
    """Three steps of 100 µs, each with some kernels: its name, the start of its launch, and its own start and end."""
    program = Program()
    for start in (0, 100, 200):
        program.step(start, start + 100)
        for name, called, *ran in work:
            program.work((start + called, start + called + 4), (start + ran[0], start + ran[1]), name=name)
        if waits:
            program.api(SYNC, start + waits[0], start + waits[1])
    return program


def _ns(us: float) -> int:
    return round(us * US)


def attributed(export: Export, folder: Path) -> AttributedTrace:
    """The trace of an export, each operation with its ranges."""
    return AttributedTrace(Trace.load(export.write(folder / "t.sqlite")))


def work_of(trace: AttributedTrace, process: int) -> tuple[ProcessWork, Steps]:
    """What a process did, and its steps."""
    steps = find_steps(trace, process)
    assert steps is not None
    return ProcessWork(trace, process, steps.recorded), steps


def idle_of(trace: AttributedTrace, process: int) -> list[IdleStretches]:
    """When each device of a process idles in every step, and why."""
    work, steps = work_of(trace, process)
    return [work.find_idle_stretches(steps.recorded, device) for device in work.devices]


def summary_of_steps(trace: AttributedTrace, process: int) -> StepSummary | None:
    """The steps of a process, None where nothing of it ran on a device."""
    return summarize_steps(*work_of(trace, process))[0] if find_steps(trace, process) else None
