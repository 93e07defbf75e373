"""Tests the pace of replayed steps: measured in the recorded process, or estimated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.pace import estimate_baselines, widen_interval_ms
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.inputs.match_times import match_timings
from nsys_analyzer.inputs.unprofiled_times import PhaseTiming, Timings, read_sweep_timings, read_timings, write_timings
from nsys_analyzer.trace.schema import NS_PER_MS
from tests.test_replay import make_replay

STEPS = 4


def study_with(work_ns: int, min_cost_share: float = 0.4) -> Any:
    """Steps of two calls that take 20 and 60 ns, 40 of these in Python, and whose recording costs at most 10 ns each.

    Each call launches a kernel.
    """
    calls = 2 * STEPS
    replay = make_replay(
        cpu_ns=[20, 60] * STEPS, min_wait_ns=[0] * calls, awaited=[-1] * calls, return_ns=[0] * calls,
        launch=[*range(calls)], latency_ns=[1] * calls, spacing_ns=[0] * calls, work_ns=[work_ns] * calls,
        first_call=[*range(0, calls + 1, 2)],
    )  # fmt: skip
    replay = replace(
        replay, pause_ns=np.array([0.0, 40.0] * STEPS), max_profiler_ns=np.full(calls, 10.0), is_single_pass=False
    )
    waits = SimpleNamespace(unrecorded_wait_ns=np.zeros(calls, np.int64))
    return SimpleNamespace(replay=replay, min_cost_share=min_cost_share, calls=waits)


def test_the_cost_of_each_call_is_solved_from_steps_of_the_recorded_process() -> None:
    """80 ns under the profiler and 64 without it: the two calls cost 8 ns each, whatever the time between them is."""
    (replay,), scale = estimate_baselines(study_with(work_ns=1), 80 / NS_PER_MS, 64 / NS_PER_MS, True)
    assert (replay.step_ns, scale) == (pytest.approx(64, rel=1e-9), 1.0)  # the identity replay
    assert replay.cpu_ns[:2] == pytest.approx([12, 52], abs=0.01)  # one factor would give 16 and 48


def test_steps_that_the_gpu_fills_do_not_tell_the_cost() -> None:
    """The two kernels of a step take 100 ns, with any cost: those of 4 and 10 ns, the usual bounds, are tried."""
    baselines, _ = estimate_baselines(study_with(work_ns=50), 100 / NS_PER_MS, 100 / NS_PER_MS, True)
    assert [replay.step_ns for replay in baselines] == [100, 100]
    assert [replay.cpu_ns[0] for replay in baselines] == pytest.approx([16, 10], abs=0.01)


def test_steps_of_the_recorded_process_that_are_longer_without_the_profiler() -> None:
    """80 ns under the profiler and 86 without it: no cost explains it, so the CPU was slower, and the GPU was not."""
    (replay,), _ = estimate_baselines(study_with(work_ns=1), 80 / NS_PER_MS, 86 / NS_PER_MS, True)
    assert replay.step_ns == pytest.approx(86)
    assert replay.cpu_ns[:2] == pytest.approx([20 * 86 / 80, 60 * 86 / 80], rel=0.001)
    assert replay.work_ns[0] == pytest.approx(1, rel=0.001)


def test_steps_of_another_process_tell_only_the_length() -> None:
    """80 ns under the profiler, and 40 in another process: a faster CPU may be the reason, so two paces are tried."""
    baselines, _ = estimate_baselines(study_with(work_ns=1), 80 / NS_PER_MS, 40 / NS_PER_MS)
    assert [replay.step_ns for replay in baselines] == pytest.approx([40, 40])
    # The cost alone: 18 of 20 ns, because a call keeps a tenth, and 22 of 60. A pace: 2/3 of 20 − 10 and of 60 − 10.
    assert [replay.cpu_ns[0] for replay in baselines] == pytest.approx([2, 10 * 2 / 3], rel=0.01)


def test_an_estimated_length_has_a_width() -> None:
    """3 % of the GPU's work and 15 % of the rest beside the replays, between the GPU's work and the profiled step."""
    assert widen_interval_ms(100, 100, 100, 100) == (97, 103)
    # the middle is 70: 10 + 0.03 · 40 + 0.15 · 30 = 15.7
    assert widen_interval_ms(60, 80, 40, 90) == pytest.approx((54.3, 85.7))
    # the middle is 50: 10 + 1.2 + 1.5 = 12.7, but 50 − 40 · 0.97 = 11.2
    assert widen_interval_ms(40, 60, 40, 90) == pytest.approx((38.8, 61.2))
    # the middle is 70: 15.7, but 75 + 0.03 · 40 = 76.2
    assert widen_interval_ms(60, 80, 40, 75) == pytest.approx((63.8, 76.2))


def test_a_manifest_with_steps_of_the_recorded_process(tmp_path: Path) -> None:
    """They replace the step of the other process, but not its phases. Those with the shorter median are used.

    The first step after the capture begins with an idle GPU.
    """
    (tmp_path / "one").mkdir()
    timings = {
        "status": "ok", "times_ms": {"forward": [1, 2], "step": [7, 7]},
        "steps_before_capture_ms": [5, 6, 10], "steps_after_capture_ms": [9, 9, 9],
    }  # fmt: skip
    (tmp_path / "one/manifest.json").write_text(json.dumps({"steps": 2, "timings": timings}))
    rows = read_sweep_timings(tmp_path).rows
    assert [(row.phase, row.times and row.times.median, row.in_recorded_process) for row in rows] == [
        ("forward", 1.5, False), ("step", 6, True),
    ]  # fmt: skip
    shorter = {**timings, "steps_after_capture_ms": [9, 5, 5, 5]}
    (tmp_path / "one/manifest.json").write_text(json.dumps({"steps": 2, "timings": shorter}))
    assert read_sweep_timings(tmp_path).rows[1].times == Stats(3, 5, 0, 5, 5, 5)
    few = {**timings, "steps_after_capture_ms": [4, 4]}  # shorter, but fewer than three
    (tmp_path / "one/manifest.json").write_text(json.dumps({"steps": 2, "timings": few}))
    assert read_sweep_timings(tmp_path).rows == rows
    read = read_timings(write_timings(tmp_path)).rows
    assert [row.in_recorded_process for row in read] == [False, True]
    (capture,) = match_timings([CaptureSummary("one", None, "", "ok")], Timings("", rows), one_run=True)
    assert capture.unprofiled
    assert capture.unprofiled.step_in_recorded_process
    (given,) = match_timings(
        [CaptureSummary("one", None, "", "ok")],
        Timings("--step-ms", (PhaseTiming("step", Stats(None, 6.0), "--step-ms"),)),
        one_run=True,
    )
    assert given.unprofiled
    assert not given.unprofiled.step_in_recorded_process
