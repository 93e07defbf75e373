"""``nsys-analyze what-if``: what a step would take if some of its parts took more or less time; times worked out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nsys_analyzer import render, summarize, what_if
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary.complete import diagnose_capture
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.what_if import LAUNCHING, PINNING, WhatIf
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.sections.what_if import what_if_section
from nsys_analyzer.trace.columns import PAGEABLE_TO_DEVICE
from tests.conftest import Main
from tests.support.export import ADD
from tests.support.packed import EXAMPLES, unpack
from tests.support.program import SYNC, Program
from tests.support.steps import Steps


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a capture of the examples, uncompressed."""
    return lambda name: unpack(EXAMPLES / f"{name}.sqlite.xz", tmp_path_factory.getbasetemp())


def timed(steps: Steps, us: float) -> CaptureSummary:
    """Steps timed without the profiler, which cost nothing; where the GPU fills them, the CPU may be faster."""
    capture = steps.capture(unprofiled_us=us)
    return replace(capture, diagnosis=diagnose_capture(capture))


def said(found: WhatIf) -> str:
    return " ".join(render(Report("", (what_if_section(found),))).replace("\N{NO-BREAK SPACE}", " ").split())


def run_ahead() -> CaptureSummary:
    """40 µs of a matmul and 10 µs of an addition, launched in 10 µs each: the GPU needs 50 µs, the CPU 20."""
    return timed(Steps().kernel(40).kernel(10, ADD), 50)


def test_a_step_is_shorter_until_something_else_limits_it() -> None:
    """Without matmuls the GPU has 40 µs less to do, but launching takes 20 µs, or 16.8: 30 to 33.2 are saved.

    In another run, 3 % of the GPU's 50 µs and 15 % of the CPU's 20 are different, both of what is added to the critical
    path and of what is left of it.
    """
    found = what_if(run_ahead(), classes={"matmul": 0})
    assert (found.step_ms, found.less_ms, found.saves_ms, found.new_step_ms) == pytest.approx(
        (0.05, 0.04, 0.0316, 0.0184)
    )
    half = math.hypot(0.0016, 0.03 * 0.05, 0.15 * 0.02, 0.15 * 0.02)
    assert (found.saves_ms_low, found.saves_ms_high) == pytest.approx((0.0316 - half, 0.0316 + half))
    assert {part.part: (part.before_ms, part.after_ms) for part in found.path} == {
        "matmul": pytest.approx((0.04, 0)), "elementwise": pytest.approx((0.01, 0)),
        LAUNCHING: pytest.approx((0, 0.02)),
    }  # fmt: skip
    assert "a step would take 0.0184 ms instead of 0.05 ms" in said(found)
    assert (
        "The changes remove 0.04 ms of work but save only 0.0316 ms, because the step then waits for the CPU, which "
        "takes 0.02 ms" in said(found)
    )


def test_what_limits_the_step_saves_all_of_its_time() -> None:
    """Half the matmul's time: 30 µs for the GPU, still more than the CPU's 20."""
    found = what_if(run_ahead(), classes={"matmul": 0.5})
    assert (found.less_ms, found.saves_ms) == pytest.approx((0.02, 0.02))
    assert "save only" not in said(found)


def test_a_step_may_become_longer() -> None:
    """Twice the matmul's time: 90 µs. In another run, 3 % of 40 µs and 1 % of 90 are different: together 1.5 µs."""
    found = what_if(run_ahead(), classes={"matmul": 2})
    assert (found.saves_ms, found.less_ms) == pytest.approx((-0.04, -0.04))
    assert "instead of 0.05 ms: it would be 0.038–0.042 ms longer (80 %)" in said(found)


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
    """40 µs are left, the GPU's. In another run, 15 % of the CPU's 10 µs and 1 % of these 40 are different."""
    found = what_if(logging_loop(), ranges={"log": 0})
    half = math.hypot(0.15 * 0.01, 0.01 * 0.04)
    assert (found.saves_ms, found.saves_ms_low, found.saves_ms_high) == pytest.approx((0.01, 0.01 - half, 0.01 + half))


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
    """250 kB take 100 µs, which the program waits for, and 10 at 25 GB/s. One thread pins a batch in 100 µs as well.

    Three copies with kernels between them are no batch, and a step takes less than the 300 µs of these copies.
    """
    found = what_if(timed(Steps().copy(100, PAGEABLE_TO_DEVICE, 250_000, waits=True), 110), pinned=True)
    assert (found.step_ms, found.new_step_ms) == pytest.approx((0.11, 0.1), rel=0.01)
    assert next(part for part in found.path if part.part == PINNING).after_ms == pytest.approx(0.1, rel=0.01)
    layers = Steps()
    for _ in range(3):
        layers = layers.copy(100, PAGEABLE_TO_DEVICE, 250_000, waits=True).kernel(1)
    # The work takes 3 · (10 + 1) µs, or 3 · 1 if the copies are hidden, and at most 10 µs lie before the next step.
    assert 0.003 < what_if(timed(layers, 333), pinned=True).new_step_ms < 0.043


@pytest.mark.parametrize(("pause_ms", "fetching_ms", "new_step_ms"), [(7, 3, 4 + 7), (30, 0.01, 30 - 4)])
def test_pinned_batches_are_neither_fetched_nor_freed_by_the_program(
    pause_ms: float, fetching_ms: float, new_step_ms: float
) -> None:
    """A pause fetches a batch and frees it, and the copy of the batch takes 4 ms. Freeing takes as long at most.

    The thread that pins takes 4 + 7 ms in place of the program. Of 30 ms, the program does other work for 26 ms.
    """
    steps = Steps().kernel(1_000)
    steps = steps.copy(4_000, PAGEABLE_TO_DEVICE, 10_000_000, waits=True, after=pause_ms * 1_000, range="data")
    capture = steps.capture(unprofiled_us=5_020 + pause_ms * 1_000)
    assert capture.study
    calls = capture.study.calls
    loading_ns = np.where(calls.loading_ns > 0, int(fetching_ms * 1e6), 0)
    capture = replace(capture, study=replace(capture.study, calls=replace(calls, loading_ns=loading_ns)))
    found = what_if(replace(capture, diagnosis=diagnose_capture(capture)), pinned=True)
    # A batch that is ready takes 0.05 to 0.5 ms, and launches 0.02 ms.
    assert found.new_step_ms == pytest.approx(new_step_ms, abs=0.5)


def test_the_spread_of_steps_of_the_recorded_process_widens_a_saving() -> None:
    """Steps of 50 µs have a standard deviation of 5 µs, which is as large an error as any other of the saving."""
    capture = Steps().kernel(40).kernel(10, ADD).capture(unprofiled_us=50)
    assert capture.unprofiled
    widths_ms = []
    for std in (0.0, 0.005):
        times = {"step": Stats(10, 0.05, std, 0.04, 0.05, 0.06)}
        unprofiled = replace(capture.unprofiled, phases=times, step_in_recorded_process=True)
        spread = replace(capture, unprofiled=unprofiled)
        spread = replace(spread, diagnosis=diagnose_capture(spread))
        assert spread.diagnosis
        assert (spread.diagnosis.step_ms_low, spread.diagnosis.step_ms_high) == pytest.approx((0.05 - std, 0.05 + std))
        found = what_if(spread, classes={"matmul": 0})
        widths_ms.append((found.saves_ms_high - found.saves_ms_low) / 2)
    assert widths_ms[1] == pytest.approx(math.hypot(widths_ms[0], 0.005))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"classes": {"convolution": 0.5}}, "no kernel of class 'convolution'. They contain: matmul"),
        ({"ranges": {"logs": 0}}, "no range 'logs'. They contain: forward, log"),
        ({"pinned": True}, "no large copy from pageable memory"),
        ({"launches": float("nan")}, "A factor is a number from 0 to 1,000,000"),
        ({"classes": {"matmul": 1e308}}, "A factor is a number from 0 to 1,000,000"),
        ({"ranges": {"log": -1.0}}, "A factor is a number from 0 to 1,000,000"),
        ({"network": 0.0}, "The factor of the network is a number from 0.000001 to 1,000,000"),
        ({"network": 1e-308}, "The factor of the network is a number from 0.000001 to 1,000,000"),
        ({"classes": {"": 1.0}}, "no kernel of class ''. They contain: matmul"),
        ({}, "The question changes nothing"),
    ],
)
def test_what_cannot_be_asked(asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        what_if(logging_loop(), **asked)  # type: ignore[arg-type]


# --- groups of steps


def stalling(steps: int, folder: Path) -> CaptureSummary:
    """A kernel of 40 µs, launched in 10, and a wait; every third step sleeps 200 µs behind it, in `sleep`."""
    program, at = Program(), 1.0
    for step in range(steps):
        sleeps = 200.0 * (step % 3 == 2)
        program.step(at, at + 100 + sleeps).work((at, at + 4), (at + 6, at + 46)).api(SYNC, at + 10, at + 48)
        if sleeps:
            program.open("sleep", at + 50, at + 250)
        at += 100 + sleeps
    (capture,) = summarize(program.write(folder / "t.sqlite"))
    return capture


def test_each_group_of_steps_by_itself(tmp_path: Path) -> None:
    """Of 12 steps 8 take 100 µs and 4 take 300: (8 × 100 + 4 × 300) ÷ 12. Sleep is in the latter alone."""
    found = what_if(stalling(12, tmp_path), ranges={"sleep": 0})
    usual, longer, mean = found.groups
    assert (usual.group, usual.steps, longer.group, longer.steps) == ("usual", 8, "longer", 4)
    assert (usual.step_ms, longer.step_ms) == pytest.approx((0.1, 0.3), rel=0.15)  # the CPU may be faster
    # The pause from the wait's end to the next step is 252 µs long, or up to a quarter shorter without the profiler.
    assert usual.saves_ms == pytest.approx(0)
    assert 0.75 * 0.252 < longer.saves_ms < 0.252
    assert (found.step_ms, found.saves_ms) == (usual.step_ms, usual.saves_ms)
    assert mean.saves_ms == pytest.approx((8 * usual.saves_ms + 4 * longer.saves_ms) / 12)
    assert "| all | 12 |" in said(found)


def test_prefill_and_decode_are_replayed_apart(packed: Callable[[str], Path]) -> None:
    """By how many there are of each: 58 and 16."""
    (capture,) = summarize(packed("serving/captures/eager"))
    found = what_if(capture, launches=0)
    decode, prefill, mean = found.groups
    assert [(group.group, group.steps) for group in found.groups] == [("decode", 58), ("prefill", 16), ("all", 74)]
    assert decode.saves_ms == found.saves_ms
    assert mean.step_ms == pytest.approx((58 * decode.step_ms + 16 * prefill.step_ms) / 74)
    assert mean.saves_ms == pytest.approx((58 * decode.saves_ms + 16 * prefill.saves_ms) / 74)


# --- ranks of a run


def test_a_rank_on_time(packed: Callable[[str], Path]) -> None:
    """Rank 1 sleeps 10 ms in each step; the same program without that takes 31.75 ms of 40.26 under the profiler."""
    ranks = summarize(*(packed(f"ranks/captures/late_rank_rank{rank}") for rank in (0, 1)))
    found = what_if(*ranks, on_time=[1])
    assert found.saves_ms_low < 40.26 - 31.75 < found.saves_ms_high
    assert found.saves_ms == pytest.approx(40.26 - 31.75, rel=0.15)
    assert found.on_path_ms("rank 0")[1] > 20 > 0 == found.on_path_ms("rank 1")[1]
    assert re.search(r"Of the critical path, [\d.]+ ms would be on rank 0", said(found))
    assert what_if(*ranks, on_time=[0]).saves_ms == pytest.approx(0, abs=0.2)


def test_a_faster_network(packed: Callable[[str], Path]) -> None:
    """One bucket is reduced when backward is done: half of its 7.6 ms at most is saved, all but 0.1 ms of it or not.

    What it waits for the other rank is not divided. Of a rank alone nobody knows how much that is.
    """
    ranks = summarize(*(packed(f"ranks/captures/one_bucket_rank{rank}") for rank in (0, 1)))
    assert ranks[0].study is not None
    found, alone = what_if(*ranks, network=2), what_if(ranks[0], network=2)
    assert 3.4 < found.saves_ms_low < found.saves_ms_high < 4.2
    assert alone.saves_ms_low == 0 < alone.saves_ms_high
    assert "does not show how much of a collective is waiting" in said(alone)
    assert "Other ranks" not in said(found)
    assert what_if(*ranks, network=0.5).saves_ms < -6


def test_the_command_answers_as_the_function_does(real_capture: Callable[[str], Path], run_main: Main) -> None:
    path = real_capture("train_small256")
    (found,) = json.loads(run_main("what-if", path, "--class", "matmul=0.5", "--format", "json").out)["what_if"]
    assert found["changes"] == ["matmul × 0.5"]
    assert found["saves_ms_low"] <= found["saves_ms"] <= found["saves_ms_high"]
    # The critical path is the whole of a step.
    assert sum(part["before_ms"] for part in found["path"]) == pytest.approx(found["step_ms"], rel=0.1)
    text = " ".join(run_main("what-if", path, "--class", "matmul=0.5").out.split())
    assert "the step then waits for" in text or "save only" in text
    assert "no range 'nothing'" in run_main("what-if", path, "--range", "nothing=0").err
    assert "NAME=FACTOR" in run_main("what-if", path, "--class", "matmul").err
    assert "=1' does not have the form NAME=FACTOR" in run_main("what-if", path, "--class", "=1").err
    assert "Give a change" in run_main("what-if", path).err
    for words in (("--matmul", "0.5"), ("--MatMul=0.5",)):
        assert "Did you mean --class matmul=0.5?" in run_main("what-if", path, *words).err
    assert "Did you mean one of: '--batch', '--launches'," in run_main("what-if", path, "--launche", "0").err
