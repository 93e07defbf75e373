"""``nsys-analyze what-if``: what a step would take if some of its parts took more or less time; times worked out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nsys_analyzer import render, what_if
from nsys_analyzer.analysis.findings.diagnosis import diagnose
from nsys_analyzer.analysis.findings.what_if import LAUNCHING, WhatIf
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.sections.what_if import answer
from nsys_analyzer.trace.columns import PAGEABLE_TO_DEVICE
from tests.conftest import Main
from tests.support.export import ADD
from tests.support.steps import Steps


def timed(steps: Steps, us: float) -> CaptureSummary:
    """Steps timed without the profiler, which cost nothing; where the GPU fills them, the CPU may be faster."""
    capture = steps.capture(unprofiled_us=us)
    return replace(capture, diagnosis=diagnose(capture))


def said(found: WhatIf) -> str:
    return " ".join(render(Report("", (answer(found),))).replace("\N{NO-BREAK SPACE}", " ").split())


def run_ahead() -> CaptureSummary:
    """40 µs of a matmul and 10 µs of an addition, launched in 10 µs each: the GPU needs 50 µs, the CPU 20."""
    return timed(Steps().kernel(40).kernel(10, ADD), 50)


def test_a_step_is_shorter_until_something_else_limits_it() -> None:
    """Without matmuls the GPU has 40 µs less to do, but launching takes 20 µs, or 16.8: 30 to 33.2 are saved, ± 3 %."""
    found = what_if(run_ahead(), classes={"matmul": 0})
    assert (found.step_ms, found.less_ms, found.saves_ms, found.new_step_ms) == pytest.approx(
        (0.05, 0.04, 0.0316, 0.0184)
    )
    assert (found.saves_ms_low, found.saves_ms_high) == pytest.approx((0.97 * 0.03, 1.03 * 0.0332))
    assert {part.part: (part.before_ms, part.after_ms) for part in found.path} == {
        "matmul": pytest.approx((0.04, 0)), "elementwise": pytest.approx((0.01, 0)),
        LAUNCHING: pytest.approx((0, 0.02)),
    }  # fmt: skip
    assert "A step would take 0.0184 ms instead of 0.05 ms" in said(found)
    assert "0.04 ms less to do save 0.0316 ms, since the step then waits for the CPU: 0.02 ms" in said(found)


def test_what_limits_the_step_saves_all_of_its_time() -> None:
    """Half the matmul's time: 30 µs for the GPU, still more than the CPU's 20."""
    found = what_if(run_ahead(), classes={"matmul": 0.5})
    assert (found.less_ms, found.saves_ms) == pytest.approx((0.02, 0.02))
    assert "less to do" not in said(found)


def test_a_step_may_become_longer() -> None:
    """Twice the matmul's time: 90 µs."""
    found = what_if(run_ahead(), classes={"matmul": 2})
    assert (found.saves_ms, found.less_ms) == pytest.approx((-0.04, -0.04))
    assert "instead of 0.05 ms without the profiler: 0.039–0.041 ms longer (80 %)" in said(found)


def test_changes_are_made_together() -> None:
    """Half of either alone: nothing for launches; of the work 15 µs, then launching takes 20 or 16.8; of both 15 µs."""
    capture = timed(Steps().kernel(20).kernel(10, ADD), 30)
    halves = {"classes": {"matmul": 0.5, "elementwise": 0.5}, "launches": 0.5}
    assert what_if(capture, launches=0.5).saves_ms == pytest.approx(0)
    assert what_if(capture, classes={"matmul": 0.5, "elementwise": 0.5}).new_step_ms == pytest.approx(0.0184)
    assert what_if(capture, **halves).new_step_ms == pytest.approx(0.015)  # type: ignore[arg-type]


def logging_loop() -> CaptureSummary:
    """A matmul of 40 µs launched in 10, and in the range `log` a wait for it with 10 µs behind it: 50 µs."""
    return timed(Steps().kernel(40, range="forward").sync(10, range="log"), 50)


def test_a_range_that_is_gone_waits_for_nothing() -> None:
    """40 µs are left, the GPU's; of the CPU's time two captures differ by a fifth."""
    found = what_if(logging_loop(), ranges={"log": 0})
    assert (found.saves_ms, found.saves_ms_low, found.saves_ms_high) == pytest.approx((0.01, 0.008, 0.012))


def test_a_range_holds_the_work_that_it_launches() -> None:
    """Half of the forward's: launched in 5 µs, until 20; the wait's end stays 10 µs before the step's."""
    assert what_if(logging_loop(), ranges={"forward": 0.5}).new_step_ms == pytest.approx(0.03)


def test_half_a_range_still_waits() -> None:
    assert what_if(logging_loop(), ranges={"log": 0.5}).new_step_ms == pytest.approx(0.045)


def test_a_pause_in_a_range() -> None:
    """The program sleeps for 500 µs in `sleep`, behind a call outside of it: a quarter of them are left."""
    capture = timed(Steps().kernel(40, after=510, pause="sleep"), 510)
    assert what_if(capture, ranges={"sleep": 0.25}).new_step_ms == pytest.approx(0.1275)


def test_cheaper_launches() -> None:
    """Two kernels of 2 µs, launched in 10 each: 20 µs, or half of it."""
    found = what_if(timed(Steps().kernel(2).kernel(2), 20), launches=0.5)
    assert found.new_step_ms == pytest.approx(0.01)


def test_copies_from_pinned_memory() -> None:
    """250 kB in 100 µs, which the program waits for, and 10 behind them; at 25 GB/s 10 µs, and no wait."""
    found = what_if(timed(Steps().copy(100, PAGEABLE_TO_DEVICE, 250_000, waits=True), 110), pinned=True)
    assert (found.step_ms, found.new_step_ms) == pytest.approx((0.11, 0.01), rel=0.01)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"classes": {"convolution": 0.5}}, "no kernel of class 'convolution'. They hold: matmul"),
        ({"ranges": {"logs": 0}}, "no range 'logs'. They hold: forward, log"),
        ({"pinned": True}, "no large copy from pageable memory"),
        ({"launches": float("nan")}, "A factor is a number from 0 on"),
        ({}, "Nothing is changed"),
    ],
)
def test_what_cannot_be_asked(asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        what_if(logging_loop(), **asked)  # type: ignore[arg-type]


def test_the_command_answers_as_the_function_does(real_capture: Callable[[str], Path], run_main: Main) -> None:
    path = real_capture("train_small256")
    (found,) = json.loads(run_main("what-if", path, "--class", "matmul=0.5", "--format", "json").out)["what_if"]
    assert found["changes"] == ["matmul × 0.5"]
    assert found["saves_ms_low"] <= found["saves_ms"] <= found["saves_ms_high"]
    # The critical path is the whole of a step.
    assert sum(part["before_ms"] for part in found["path"]) == pytest.approx(found["step_ms"], rel=0.1)
    text = " ".join(run_main("what-if", path, "--class", "matmul=0.5").out.split())
    assert "the step then waits for" in text or "less to do" in text
    assert "no range 'nothing'" in run_main("what-if", path, "--range", "nothing=0").err
    assert "NAME=FACTOR" in run_main("what-if", path, "--class", "matmul").err
    assert "Say what is changed" in run_main("what-if", path).err
