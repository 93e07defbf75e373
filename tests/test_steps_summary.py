"""The summaries of steps: their parts add up, and a capture has the figures that are known of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps import process as processing
from nsys_analyzer.analysis.steps.process import OUTSIDE
from nsys_analyzer.analysis.steps.step import DeviceSteps, Queue, StepSummary
from tests.support.export import ADD, AUTOGRAD, GEMM, Export, global_pid, training_step
from tests.support.program import NCCL, SYNC, Program, attributed, summary_of_steps, three_steps

PARTS = ("compute_ms", "exposed_copy_ms", "exposed_communication_ms", "idle_ms")
EXACT = 1e-6  # ms: a nanosecond


def summaries(path: Path) -> list[StepSummary]:
    """The steps of each process of a capture, by rank."""
    trace = AttributedTrace(Trace.load(path))
    found = [summary_of_steps(trace, process.global_pid) for process in find_processes(trace.trace)]
    return [one for one in found if one is not None]


def check_sums(step: StepSummary) -> None:
    """Parts, classes, phases and causes of idle time say the same time, of each device."""
    for device in (step, *step.devices):
        check_device(device, step.length_ms)
    assert sum(one.ms for one in step.causes) == pytest.approx(step.idle_ms, abs=EXACT)
    for cause in step.causes:
        assert step.idle_of(cause.cause) == pytest.approx(cause.ms, abs=EXACT), "the rows of a cause add up to it"
    for one in step.classes:
        kernels = [kernel for kernel in step.kernels if kernel.kernel_class == one.kernel_class]
        assert sum(kernel.ms for kernel in kernels) == pytest.approx(one.ms, abs=EXACT)
        if len(kernels) == 1:
            assert kernels[0].std_ms == pytest.approx(one.std_ms, abs=EXACT)
    path = [one.ms for one in step.critical_path]
    assert min(path, default=0) >= 0
    assert not path or sum(path) == pytest.approx(step.length_ms, abs=EXACT), "the critical path is as long as the step"
    assert step.own_pauses_ms <= sum(one.ms for one in step.causes if one.cause == "launch") + EXACT


def check_device(device: DeviceSteps, length_ms: float) -> None:
    assert device.total_ms == pytest.approx(length_ms, abs=EXACT)
    assert sum(one.ms for one in device.classes) == pytest.approx(device.compute_ms, abs=EXACT)
    assert sum(one.ms for one in device.idle_by_cause) == pytest.approx(device.idle_ms, abs=EXACT)
    for part in PARTS:
        by_phase = sum(getattr(one, part) for one in device.phases)
        assert by_phase == pytest.approx(getattr(device, part), abs=EXACT)
    figures = [getattr(one, part) for one in device.phases for part in PARTS]
    figures += [*(one.ms for one in device.classes), *(one.ms for one in device.idle_by_cause)]
    assert min(figures, default=0) >= 0


def test_the_collectives_of_two_ranks(real_capture: Callable[[str], Path]) -> None:
    """The 19 collectives of a step take 2.4 and 79.6 ms, of which 2.2 and 56.2 are exposed: the second rank waits."""
    fast, slow = summaries(real_capture("ddp2_small256"))
    assert fast.exposed_communication_ms == pytest.approx(2.2, abs=0.05)
    assert slow.exposed_communication_ms == pytest.approx(56.2, abs=0.05)
    # Every rank does the same work, beside its collectives more slowly.
    assert fast.length_ms == pytest.approx(slow.length_ms, rel=0.02)


def test_a_small_model_leaves_the_gpu_idle(real_capture: Callable[[str], Path]) -> None:
    """A forward pass keeps the GPU busy for 9.0 ms; 12 ms of the step's idle time are in front of its kernels."""
    (summary,) = summaries(real_capture("train_small256"))
    assert (summary.instances, summary.source, summary.on_gpu_timeline) == (3, "range", False)
    phases = {one.phase: one for one in summary.phases}
    assert phases["forward"].compute_ms == pytest.approx(9.0, abs=0.1)
    assert summary.idle_of("launch") > 0.7 * summary.idle_ms
    assert summary.classes[0].kernel_class == "matmul"


# --- small steps, worked out by hand


def summary_of(export: Export, folder: Path) -> StepSummary:
    summary = summary_of_steps(attributed(export, folder), global_pid())
    assert summary is not None
    return summary


def test_a_step_by_class_and_by_phase(tmp_path: Path) -> None:
    """``training_step``: matmul 100 + 200 ns, elementwise 20 + 40 + 80, idle 560 of 1,000.

    Gaps: [0, 30) forward's; [150, 360) backward's; [600, 720) the optimizer's; [800, 1000) in front of the next step,
    whose forward ends it, and of the last of two in front of nothing.
    """
    export = Export().thread(AUTOGRAD, "pt_autograd_0")
    summary = summary_of(training_step(training_step(export), 1000), tmp_path)
    ns = 1e-6
    assert {one.kernel_class: round(one.ms / ns) for one in summary.classes} == {"matmul": 300, "elementwise": 140}
    phases = {one.phase: (round(one.compute_ms / ns), round(one.idle_ms / ns)) for one in summary.phases}
    assert phases == {"forward": (120, 130), "backward": (240, 210), "optimizer": (80, 120), OUTSIDE: (0, 100)}
    check_sums(summary)


@pytest.mark.parametrize(
    ("program", "path"),
    [
        # The GPU works for all of the step, and each kernel is launched long before it starts.
        (three_steps((GEMM, 0, 0, 60), (ADD, 4, 60, 100)), {"matmul": 60, "elementwise": 40, "idle": 0}),
        # Launches 30 µs apart of 10 µs each: no kernel makes a step longer.
        (
            three_steps((GEMM, 0, 6, 16), (ADD, 30, 36, 46), (ADD, 60, 66, 76)),
            {"program": 30, "idle": 70},
        ),
        # The program waits for the matmul, and works on its own then.
        (
            three_steps((GEMM, 0, 6, 46), waits=(5, 50)),
            {"matmul": 40, "idle": 60},
        ),
    ],
)
def test_what_is_on_the_critical_path(tmp_path: Path, program: Program, path: dict[str, float]) -> None:
    summary = summary_of(program, tmp_path)
    check_sums(summary)
    found = {one.part: one.ms * 1e3 for one in summary.critical_path if one.where != "idle"}
    idle = sum(one.ms * 1e3 for one in summary.critical_path if one.where == "idle")
    assert {**found, "idle": idle} == pytest.approx(path, abs=EXACT)


def test_the_critical_path_leads_through_the_gpu_that_another_one_waits_for(tmp_path: Path) -> None:
    """GPU 0 computes from 2 to 42 µs of a step of 100, and then GPU 1, behind an event, from 44 to 100.

    GPU 1 has most work: its 44 µs without any are 40 of GPU 0's matmuls and 4 between them.
    """
    program = Program()
    for at in (0, 100, 200, 300):
        program.step(at, at + 100).work((at, at + 1), (at + 2, at + 42))
        program.api("cudaStreamWaitEvent", at + 1, at + 2)
        program.work((at + 2, at + 3), (at + 44, at + 100), name=ADD, stream=20, device=1)
        program.api(SYNC, at + 4, at + 100)
    summary = summary_of(program, tmp_path)
    check_sums(summary)
    assert summary.device == 1
    path = {(one.part, one.device): round(one.ms * 1e3) for one in summary.critical_path if one.where == "GPU"}
    assert path == {("elementwise", None): 56, ("matmul", 0): 40}
    assert sum(one.ms for one in summary.critical_path if one.where == "idle") == pytest.approx(0.004, abs=EXACT)


@pytest.mark.parametrize(
    ("lengths", "works", "length", "compute", "std"),
    [
        # The mean is 11 ms; of the median step 4 are work and 6 idle.
        ((10_000, 9_000, 14_000), (4_000, 3_000, 5_000), 10_000, 4_000, 1_000),
        # Of two in the middle both: (4 + 5) / 2 of (10 + 12) / 2; the deviation is √((1.5² + 0.5² + 0.5² + 1.5²) ÷ 3).
        ((9_000, 10_000, 12_000, 13_000), (3_000, 4_000, 5_000, 6_000), 11_000, 4_500, 1_290.994),
        # All within 1 % of the median: (4 + 4.2 + 4.4) / 3.
        ((10_000, 10_050, 9_950), (4_000, 4_200, 4_400), 10_000, 4_200, 200),
    ],
)
def test_parts_are_those_of_steps_near_the_median(
    tmp_path: Path, lengths: tuple[float, ...], works: tuple[float, ...], length: float, compute: float, std: float
) -> None:
    program, at = Program(), 1.0
    for lasts, works_us in zip(lengths, works, strict=True):
        program.step(at, at + lasts).work((at, at + 4), (at + 6, at + 6 + works_us))
        at += lasts
    summary = summary_of(program, tmp_path)
    assert (summary.length_ms * 1e3, summary.compute_ms * 1e3) == pytest.approx((length, compute))
    assert summary.idle_ms * 1e3 == pytest.approx(length - compute)
    (matmul,) = summary.classes
    assert matmul.std_ms is not None
    assert matmul.std_ms * 1e3 == pytest.approx(std, abs=1e-3)  # that of all steps
    check_sums(summary)


def test_devices_are_dissected_one_by_one(tmp_path: Path) -> None:
    """Device 0 computes 30 of 100 ns, device 1 80: that one is the main device."""
    export = Export().range("step", 10, 110).kernel(GEMM, 11, 20, 50).kernel(ADD, 12, 20, 100, device=1)
    summary = summary_of(export, tmp_path)
    assert [(one.device, round(one.compute_ms * 1e6)) for one in summary.devices] == [(0, 30), (1, 80)]
    assert summary.device == 1


def test_latency_and_queue(tmp_path: Path) -> None:
    """Launched 1 µs apart, each takes 10: 1, 10, 19, 28 µs from launch to start; when the fourth comes, three wait."""
    program = Program().step(1, 50)
    for number in range(4):
        program.work((1 + number, 1.5 + number), (2 + 10 * number, 12 + 10 * number))
    summary = summary_of(program, tmp_path)
    assert summary.launch_latency_us is not None
    # 1, 10, 19, 28: the median lies between the middle two, the 90th percentile at 0.9 × 3 = 2.7: 19 + 0.7 × 9.
    assert (summary.launch_latency_us.median, summary.launch_latency_us.p90) == pytest.approx((14.5, 25.3))
    assert summary.queue == Queue(1.5, 3)


def test_the_nodes_of_a_graph_are_one_launch(tmp_path: Path) -> None:
    """Launched at 10 and at 20, started 5 and 15 µs later; when the second comes, the first has two nodes to go."""
    export = Export().gpu().range("step", 0, 100_000)
    launch = export.call("cudaGraphLaunch_v10000", 10_000)
    for start in (15_000, 25_000, 30_000):
        export.kernel(GEMM, None, start, start + 5_000, correlation=launch)
    summary = summary_of(export.kernel(ADD, 20_000, 35_000, 40_000), tmp_path)
    assert summary.queue == Queue(0.5, 1)
    assert summary.launch_latency_us is not None
    assert summary.launch_latency_us.median == pytest.approx(10)


# --- laws

NAMES = (GEMM, ADD, NCCL, "copy")
times = st.integers(1000, 3000)
work = st.lists(
    st.tuples(times, st.integers(0, 300), st.integers(1, 400), st.sampled_from(NAMES), st.integers(7, 9)),
    min_size=1,
    max_size=14,
)
phases = st.lists(
    st.tuples(st.sampled_from(["forward", "backward", "optimizer", "data"]), times, st.integers(1, 400)), max_size=6
)
steps = st.lists(st.tuples(times, st.integers(1, 700)), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("summaries")


@given(steps, phases, work)
def test_the_parts_of_any_steps_add_up(
    folder: Path,
    steps: list[tuple[int, int]],
    phases: list[tuple[str, int, int]],
    work: list[tuple[int, int, int, str, int]],
) -> None:
    program = Program()
    for start, length in steps:
        program.step(start, start + length)
    for name, start, length in phases:
        program.open(name, start, start + length)
    for called, latency, length, name, stream in work:
        ran = (called + latency, called + latency + length)
        if name == "copy":
            program.copy((called, called + 4), ran, stream)
        else:
            program.work((called, called + 4), ran, name=name, stream=stream)
    trace = attributed(program, folder)
    whole = summary_of_steps(trace, global_pid())
    assert whole is not None
    check_sums(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processing, "OPERATIONS_AT_ONCE", 2)
        in_chunks = summary_of_steps(trace, global_pid())
    assert in_chunks is not None
    assert [getattr(in_chunks, part) for part in PARTS] == [getattr(whole, part) for part in PARTS]
    for rows in ("classes", "phases"):  # shares of a moment are no whole numbers: sums differ in the last digit
        columns = [
            [msgspec.structs.asdict(one) if rows == "classes" else vars(one) for one in getattr(side, rows)]
            for side in (in_chunks, whole)
        ]
        for in_parts, at_once in zip(*columns, strict=True):
            assert in_parts == pytest.approx(at_once)
    found = [{(r.cause, r.range, r.api): r.ms for r in one.idle_by_cause} for one in (in_chunks, whole)]
    assert found[0] == pytest.approx(found[1])
