"""Values that a program reads, works on or checks on the CPU while the GPU waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsys_analyzer.analysis.findings.finding import StepsToExplain
from nsys_analyzer.analysis.findings.values_on_host import (
    find_device_to_host_copy,
    find_gradient_checks,
    find_host_sync,
    find_round_trips,
)
from nsys_analyzer.configuration import Run
from nsys_analyzer.trace.columns import DEVICE_TO_PAGEABLE, PAGEABLE_TO_DEVICE
from tests.support.operator_calls import OperatorSteps, tensor
from tests.test_operator_findings import only, saved_us, text_of

INDEX = tensor(16_384, dtype="int64")
LARGE = tensor(8192, 8192)


def routing(back: str = "moe.py:8 in dispatch", *, loop: str = "moe.py:90") -> StepsToExplain:
    """A function copies indices to the host, sorts them there for 900 µs, and copies the order back."""
    steps = OperatorSteps().call("mm", LARGE, LARGE, out=[LARGE], us=2_000, line="moe.py:3 in forward")
    there = "moe.py:7 in dispatch"
    steps.call("_to_copy", INDEX, out=[INDEX], us=5, line=there, way=DEVICE_TO_PAGEABLE, size=131_072, after=900)
    steps.call("_to_copy", INDEX, out=[INDEX], us=30, line=back, way=PAGEABLE_TO_DEVICE, size=131_072)
    steps.call("mm", LARGE, LARGE, out=[LARGE], us=2_000, line="moe.py:9 in forward")
    return replace(steps.case(sync=0.9), run=Run(lines={"forward": loop}))


def test_work_on_the_cpu_between_two_copies() -> None:
    """The GPU waits for 900 µs, two copies of 5 and 30 µs, and launches of up to 30 µs."""
    steps = routing()
    candidate = only(find_round_trips, steps)
    assert saved_us(steps, candidate) == pytest.approx([935], abs=35)
    assert [line.place for line in candidate.lines] == ["moe.py:8", "moe.py:7"]
    assert "copies values from the GPU to the host" in text_of(candidate)
    assert "works on them for 0.9 ms" in text_of(candidate)
    assert [*find_device_to_host_copy(steps), *find_host_sync(steps)] == []


@pytest.mark.parametrize(("back", "loop"), [("moe.py:8 in other", "moe.py:90"), ("moe.py:8 in dispatch", "moe.py:7")])
def test_a_loop_that_reads_values_and_then_copies_a_batch(back: str, loop: str) -> None:
    """The copy back is of another function, or of the function that calls the model: it may be the next batch."""
    steps = routing(back, loop=loop)
    assert [*find_round_trips(steps)] == []
    assert [candidate.id for candidate in find_device_to_host_copy(steps)] == ["device_to_host_copy"]


def backward(*names: str) -> StepsToExplain:
    """A backward pass in which the program reads a value of each gradient."""
    steps = OperatorSteps().call("mm", LARGE, LARGE, out=[LARGE], us=500, after=200)
    for _ in range(4):
        steps.call("mm", LARGE, LARGE, out=[LARGE], us=300, phase="backward")
        for name in names:
            steps.call(name, LARGE, us=40, phase="backward")
        steps.call("_local_scalar_dense", LARGE, us=2, phase="backward", way=DEVICE_TO_PAGEABLE, size=1)
    return steps.case(sync=0.5)


def test_anomaly_detection() -> None:
    """Each of 4 checks takes 82 µs, and the GPU then waits for the next launch: a copy and a launch of 10 µs."""
    steps = backward("isnan", "_is_any_true")
    candidate = only(find_gradient_checks, steps)
    least, most = saved_us(steps, candidate)
    assert 4 * 82 <= least <= most <= 4 * (82 + 30) + 200
    assert "torch.autograd.set_detect_anomaly(False)" in text_of(candidate)
    assert [*find_host_sync(steps)] == []


def test_values_that_a_hook_reads_are_no_anomaly_detection() -> None:
    steps = backward("norm")
    assert [*find_gradient_checks(steps)] == []
    assert [candidate.id for candidate in find_host_sync(steps)] == ["host_sync"]


def test_small_tensors_and_work_between_the_copies_of_a_state() -> None:
    """Three copies of 20 µs and 300 µs of work after each of the first two are of one state, although one is small."""
    steps = OperatorSteps().call("mm", LARGE, LARGE, out=[LARGE], us=500)
    for size, after in ((1 << 20, 300), (512, 300), (1 << 20, 10)):
        steps.call("_to_copy", LARGE, us=20, way=DEVICE_TO_PAGEABLE, size=size, after=after)
    case = steps.call("mm", LARGE, LARGE, out=[LARGE], us=500).case(copy=0.7)
    candidate = only(find_device_to_host_copy, case)
    assert "3 copies" in text_of(candidate)
    assert saved_us(case, candidate)[1] == pytest.approx(3 * 20 + 2 * 300, abs=60)
    assert [*find_host_sync(case)] == []
