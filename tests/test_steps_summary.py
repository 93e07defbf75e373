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
from nsys_analyzer.analysis.steps.process import OUTSIDE_PHASES
from nsys_analyzer.analysis.steps.step import DeviceSteps, StepSummary
from tests.support.cases import Capture, make_case_test
from tests.support.export import ADD, GEMM, global_pid
from tests.support.program import NCCL, Program, attributed, summary_of_steps

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


def steps_in(capture: Capture) -> StepSummary:
    """Returns the steps of a case, and checks that their parts add up."""
    summary = summary_of_steps(AttributedTrace(capture.trace), global_pid())
    assert summary is not None
    check_sums(summary)
    return summary


def critical_path_us(capture: Capture) -> dict[str, float]:
    path = steps_in(capture).critical_path
    parts = {part.part: round(part.ms * 1e3, 6) for part in path if part.where != "idle"}
    return {**parts, "idle": round(sum(part.ms * 1e3 for part in path if part.where == "idle"), 6)}


def path_by_gpu_us(capture: Capture) -> dict[tuple[str, int | None], int]:
    path = steps_in(capture).critical_path
    return {(part.part, part.device): round(part.ms * 1e3) for part in path if part.where == "GPU"}


def deviation_of_matmul_us(capture: Capture) -> float:
    (matmul,) = steps_in(capture).classes
    assert matmul.std_ms is not None
    return matmul.std_ms * 1e3


def latency_us(capture: Capture) -> tuple[float, float]:
    latency = steps_in(capture).launch_latency_us
    assert latency is not None
    return latency.median, latency.p90


def queue(capture: Capture) -> tuple[float, int]:
    found = steps_in(capture).queue
    assert found is not None
    return found.median, found.max


test_small_steps = make_case_test(
    "steps_summary",
    {
        "classes in ns": lambda capture: {row.kernel_class: round(row.ms * 1e6) for row in steps_in(capture).classes},
        "compute and idle in ns": lambda capture: {
            "outside" if row.phase == OUTSIDE_PHASES else row.phase: (
                round(row.compute_ms * 1e6),
                round(row.idle_ms * 1e6),
            )
            for row in steps_in(capture).phases
        },
        "critical path in µs": critical_path_us,
        "path by GPU in µs": path_by_gpu_us,
        "device": lambda capture: steps_in(capture).device,
        "compute of devices in ns": lambda capture: [
            (device.device, round(device.compute_ms * 1e6)) for device in steps_in(capture).devices
        ],
        "length_us": lambda capture: round(steps_in(capture).length_ms * 1e3, 6),
        "compute_us": lambda capture: round(steps_in(capture).compute_ms * 1e3, 6),
        "idle_us": lambda capture: round(steps_in(capture).idle_ms * 1e3, 6),
        "deviation of matmul in µs": deviation_of_matmul_us,
        "latency in µs": latency_us,
        "queue": queue,
    },
)


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
        patch.setattr(processing, "OPERATIONS_PER_BLOCK", 2)
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
