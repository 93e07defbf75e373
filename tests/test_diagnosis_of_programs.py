"""Tests findings of whole programs: work around the steps and on other threads is not a fault of the steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsys_analyzer import summarize
from nsys_analyzer.analysis.findings.finding import Diagnosis
from tests.support.export import GEMM
from tests.support.program import MAIN, SYNC, Program

#: Ten kernels of 900 µs, one every 1,000 µs from 10 µs on; the program waits for the last. It takes 10,010 µs.
STEP = 10_010


def step(program: Program, at: float, lead: float = 0) -> float:
    """A step with a range from ``at``, its work ``lead`` µs later; returns when it ends."""
    work(program, at + lead)
    program.step(at, at + lead + STEP)
    return at + lead + STEP


def work(program: Program, at: float) -> None:
    for i in range(10):
        program.work((at + i * 100, at + i * 100 + 5), (at + 10 + i * 1000, at + 910 + i * 1000))
    program.api(SYNC, at + 1000, at + STEP)


def diagnosed(program: Program, folder: Path) -> Diagnosis:
    (summary,) = summarize(program.write(folder / "program.sqlite"))
    assert summary.diagnosis is not None
    return summary.diagnosis


def ids(diagnosis: Diagnosis) -> set[str]:
    return {one.id for one in diagnosis.findings}


def test_a_slow_first_step_is_no_overhead_of_the_profiler(tmp_path: Path) -> None:
    """2 s of compiling in the first of five steps: the others take 10 ms, and so does a step."""
    program, end = Program(), 0.0
    for number in range(5):
        end = step(program, end, lead=0 if number else 2_000_000) + 20
    diagnosis = diagnosed(program, tmp_path)
    assert diagnosis.profiled_ms == pytest.approx(10.03)
    assert diagnosis.replay_error == pytest.approx(0, abs=0.01)
    assert "profiler_overhead" not in ids(diagnosis)


def test_an_evaluation_between_steps_is_no_part_of_one(tmp_path: Path) -> None:
    """After every fourth step ten batches are evaluated, 100 ms in no range: a step takes 10 ms all the same."""
    program, end = Program(), 0.0
    for number in range(12):
        end = step(program, end) + 30
        for _ in range(10 if number % 4 == 3 else 0):
            work(program, end)
            end += STEP
    diagnosis = diagnosed(program, tmp_path)
    assert diagnosis.step_ms == pytest.approx(10.03, abs=0.05)
    assert diagnosis.busy_ms == pytest.approx(9)


def test_a_thread_that_waits_beside_the_one_that_launches(tmp_path: Path) -> None:
    """It sits in a synchronization for the whole step, and the program goes on: nothing waits, nothing is found."""
    program = Program()
    for number in range(8):
        at = 10_000 * number
        program.work((at + 5, at + 8), (at + 10, at + 20), MAIN + 1, name=GEMM, stream=13)
        program.api(SYNC, at + 20, at + 9_900, MAIN + 1)
        for i in range(10):
            program.work((at + 100 + i * 980, at + 105 + i * 980), (at + 110 + i * 980, at + 810 + i * 980))
        program.step(at, at + 10_000)
    diagnosis = diagnosed(program, tmp_path)
    assert diagnosis.replay_error == pytest.approx(0, abs=0.02)
    assert "host_sync" not in ids(diagnosis)


def test_loading_between_the_steps_ranges_is_no_saving_of_other_findings(tmp_path: Path) -> None:
    """20 ms before each step, in a range ``get_batch``, behind the last call of the step before: the loader's alone."""
    program, end = Program(), 0.0
    for _ in range(8):
        program.open("get_batch", end, end + 20_000)
        end = step(program, end + 20_000)
    diagnosis = diagnosed(program, tmp_path)
    loading, *others = diagnosis.findings
    assert loading.id == "data_loading"
    # Its CPU time may differ by 29 % in another run: 20 ms, 0.84 of that where the profiler slowed the CPU down.
    assert 0.84 * 20 * (1 - 0.29) < loading.saves_ms_low < loading.saves_ms_high < 20 * 1.05 * (1 + 0.29)
    # Without the wait, loading would go on beside the 9 ms of the GPU's work, which are of matmuls in fp32.
    assert {one.id for one in others} == {"host_sync", "fp32_matmul"}
    assert all(one.saves_ms_high < 9.6 * (1 + 0.29) for one in others)
