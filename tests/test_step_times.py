"""Tests the lengths of steps outside of the capture range, which the recorded process measures by itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsys_analyzer.capture.hooks.step_times import VARIABLE, StepTimes
from nsys_analyzer.capture.profilers import make_hook_variables
from tests.support.annotated import ASKED, run

#: Each step waits, so that its length is known.
LOOP = """
import time, torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({steps}):
    model(torch.randn(4, 8)).sum().backward()
    time.sleep(0.02)
    print(step)
    optimizer.step()
    {after_step}
"""
BEFORE, AFTER = "steps_before_capture_ms", "steps_after_capture_ms"


class FakeGpu:
    """The parts of PyTorch that a clock on a GPU uses. The time of the GPU is set by the test."""

    def __init__(self) -> None:
        self.now_ms, self.synchronizations, self.is_capturing = 0.0, 0, False
        gpu = self

        class Event:
            """An event that has the time of the GPU at which it was recorded."""

            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, _: object) -> None:
                self.ms = gpu.now_ms

            def elapsed_time(self, end: Event) -> float:
                return end.ms - self.ms

        def synchronize() -> None:
            gpu.synchronizations += 1

        self.cuda = SimpleNamespace(
            Event=Event, synchronize=synchronize, is_available=lambda: True, is_initialized=lambda: True,
            current_stream=lambda: 0, is_current_stream_capturing=lambda: gpu.is_capturing,
        )  # fmt: skip
        self._C = SimpleNamespace(_cuda_getCurrentStream=lambda _: 0, _cuda_getDevice=lambda: 0)

    def step(self, times: StepTimes, ms: float) -> bool:
        """Runs a step of this length, and returns whether it was the last one to measure."""
        self.now_ms += ms
        return times.note_step_end()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, f"3:{tmp_path}/steps_rank%q{{RANK}}.json")
    monkeypatch.setenv("RANK", "1")
    return tmp_path / "steps_rank1.json"


def test_steps_overlap_between_two_synchronizations(file: Path) -> None:
    """The first two steps do one-time work, and the last three before the range are kept."""
    gpu: Any = FakeGpu()
    times = StepTimes(gpu)
    for ms in (500, 90, 14, 13, 12, 11):
        gpu.step(times, ms)
    assert gpu.synchronizations == 1
    times.finish()
    assert gpu.synchronizations == 2
    for ms in (20, 20):  # inside the range
        gpu.step(times, ms)
    times.note_range_closed()
    assert [gpu.step(times, ms) for ms in (12, 12, 13)] == [False, False, True]
    assert not times.is_measuring
    assert json.loads(file.read_text()) == {BEFORE: [13, 12, 11], AFTER: [12, 12, 13]}


def test_a_step_that_is_captured_as_a_graph_is_not_measured(file: Path) -> None:
    gpu: Any = FakeGpu()
    times = StepTimes(gpu)
    for ms in (500, 90, 14):
        gpu.step(times, ms)
    gpu.is_capturing = True
    gpu.step(times, 80)
    gpu.is_capturing = False
    for ms in (6, 7):  # the first of them begins a new measurement at its end
        gpu.step(times, ms)
    times.finish()
    assert json.loads(file.read_text()) == {BEFORE: [7]}


def test_only_the_first_rank_writes_a_file_without_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"3:{tmp_path / 'steps.json'}")
    monkeypatch.setenv("RANK", "1")
    gpu: Any = FakeGpu()
    times = StepTimes(gpu)
    for ms in (500, 90, 14):
        gpu.step(times, ms)
    times.finish()
    assert not (tmp_path / "steps.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "limit", "after_step", "printed", "before", "after"),
    [
        # 3 of the warm-up, of which two do one-time work, 4 recorded, and 4 after the range
        (40, 4, "", 3 + 4 + 4, 1, 4),
        (9, 4, "", 9, 1, 9 - 3 - 4),  # the program ends before
        (7, 4, "", 7, 1, 0),  # no step is left
        (40, 0, "", 3 + 4, 0, 0),
        # The program opens its own range after its fifth step, closes it after its eighth, and runs to its end.
        (12, 9, "import torch.cuda.profiler as p; step == 4 and p.start(); step == 7 and p.stop()", 12, 5 - 2, 12 - 8),
    ],
    ids=["usual", "few", "none_left", "off", "own_range"],
)
def test_steps_before_and_after_the_range_of_a_program(
    tmp_path: Path, steps: int, limit: int, after_step: str, printed: int, before: int, after: int
) -> None:
    variables = make_hook_variables(ASKED) | {VARIABLE: f"{limit}:{tmp_path / 'steps.json'}"}
    body = f"try: {after_step}\n    except (AssertionError, RuntimeError): pass" if after_step else ""
    ran = run(tmp_path, LOOP.format(steps=steps, after_step=body), **variables)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split() == [str(step) for step in range(printed)]
    lengths = json.loads((tmp_path / "steps.json").read_text()) if before else {}
    assert {key: len(ms) for key, ms in lengths.items()} == {
        key: count for key, count in {BEFORE: before, AFTER: after}.items() if count
    }
    assert all(ms >= 20 for values in lengths.values() for ms in values)  # each step sleeps for 20 ms


@pytest.mark.slow
def test_steps_after_the_operators_run_without_hooks_of_each_module(tmp_path: Path) -> None:
    """The hooks are limited to the model after two steps, and see all modules again in the step of the operators only.

    There are 3 steps of warm-up, 4 recorded steps, the step of the operators, and 2 steps after the recording.
    """
    variables = make_hook_variables(ASKED, operators=tmp_path / "capture.operators.gz")
    is_limited = "print(torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl)"
    loop = LOOP.replace("print(step)", is_limited).format(steps=40, after_step="")
    ran = run(tmp_path, loop, **variables, **{VARIABLE: f"2:{tmp_path / 'steps.json'}"})
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split() == ["False"] * 2 + ["True"] * 5 + ["False"] + ["True"] * 2
