"""Rows whose times cannot be true: left out, counted, told of, and without effect on any other phase."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summarize import summarize
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.text import plain
from tests.export import Export, training_step

KERNEL, RANGE = "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"
SECOND = 10**9
#: Three steps a second apart, so that a time may be wrong by seconds and still lie in the capture.
STEPS = (10 * SECOND, 11 * SECOND, 12 * SECOND)


def three_steps(tmp_path: Path) -> Path:
    export = Export().gpu()
    for at in STEPS:
        training_step(export, at)
    return export.write(tmp_path / "t.sqlite")


def broken(path: Path, *statements: str) -> CaptureSummary:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    (summary,) = summarize(Trace.load(path), "t")
    return summary


def figures(summary: CaptureSummary, phase: str) -> object:
    found = summary.phase(phase)
    return (found.wall_ms, found.gpu_busy_ms, found.gpu_span_ms, found.kernels) if found else None


def left_out(summary: CaptureSummary) -> list[str]:
    said = [plain(warning, "`") for warning in summary.warnings]
    return [warning for warning in said if warning.startswith("Left out of every figure: ")]


#: The second step's ADD kernel of forward runs from 130 to 150.
AT = STEPS[1]
OF_FORWARD = f"WHERE start = {AT + 130}"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("start = 0, end = 0", "no times, such as"),
        ("start = NULL", "no times, such as"),
        ("end = NULL", "no times, such as"),
        ("start = end, end = start", "an end before the start"),
        (f"start = start - {SECOND // 2}", "a start before the launch"),
        (f"start = start - {SECOND // 2}, end = end - {SECOND // 2}", "a start before the launch"),
        (f"end = {2**40}", "a time outside the capture"),
        (f"start = {2**40}, end = {2**40 + 5}", "a time outside the capture"),
        (f"end = {2**62}", "a time outside the capture"),
        (f"start = -{2**62 - 1}", "a time outside the capture"),
        (f"end = {2**63 - 1}", "a time outside the capture"),
        (f"start = -{2**63}", "a time outside the capture"),
        (f"end = end + {2 * SECOND}", "an end long after the next start of their stream"),
    ],
)
def test_an_operation_with_an_impossible_time(tmp_path: Path, wrong: str, why: str) -> None:
    path = three_steps(tmp_path)
    before = broken(path)
    after = broken(path, f"UPDATE {KERNEL} SET {wrong} {OF_FORWARD}")
    (said,) = left_out(after)
    assert f"1 row of {KERNEL} with {why}" in said
    assert after.coverage is not None
    assert before.coverage is not None
    assert after.coverage.kernels == before.coverage.kernels - 1
    for phase in ("backward", "optimizer"):
        assert figures(after, phase) == figures(before, phase)
    # The forward that it touches, and the step around it, are partial: two of three are left.
    forward = after.phase("forward")
    assert forward is not None
    assert (forward.instances, forward.incomplete_instances) == (2, 1)
    assert forward.gpu_busy_ms.mean == pytest.approx(120 / 1e6)
    assert any("2 instances of phases left out" in warning for warning in after.warnings)


def test_a_copy_with_an_impossible_time_makes_its_phase_partial(tmp_path: Path) -> None:
    export = Export().gpu()
    for at in STEPS:
        training_step(export, at).memory("MEMCPY", at + 15, at + 160, at + 170)
    path = export.write(tmp_path / "t.sqlite")
    summary = broken(path, f"UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET end = 0 WHERE start = {AT + 160}")
    (said,) = left_out(summary)
    assert said.endswith(
        f"CUPTI_ACTIVITY_KIND_MEMCPY with an end before the start, such as memcpy, {AT + 160:,} to 0 ns."
    )
    forward = summary.phase("forward")
    assert forward is not None
    assert (forward.instances, forward.incomplete_instances) == (2, 1)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (f"start = start + {SECOND}", "an end before the start"),
        (f"end = {2**42}", "a time outside the capture"),
        ("start = NULL", "no times"),
    ],
)
def test_a_range_with_an_impossible_time(tmp_path: Path, wrong: str, why: str) -> None:
    path = three_steps(tmp_path)
    before = broken(path)
    after = broken(path, f"UPDATE {RANGE} SET {wrong} WHERE start = {AT + 10}")
    (said,) = left_out(after)
    assert f"1 row of {RANGE} with {why}, such as `forward`" in said
    for phase in ("backward", "optimizer"):
        assert figures(after, phase) == figures(before, phase)
    forward = after.phase("forward")
    assert forward is not None
    assert (forward.instances, forward.wall_ms.mean) == (2, pytest.approx(290 / 1e6))


def test_a_call_with_an_impossible_time(tmp_path: Path) -> None:
    path = three_steps(tmp_path)
    before = broken(path)
    after = broken(path, f"UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = {2**62} WHERE start = {AT + 40}")
    (said,) = left_out(after)
    assert "1 row of CUPTI_ACTIVITY_KIND_RUNTIME with a time outside the capture, such as correlation ID" in said
    assert "1 kernels have no launch row and stay unattributed." in after.warnings
    assert figures(after, "backward") == figures(before, "backward")


def test_the_session_says_how_long_a_capture_is(tmp_path: Path) -> None:
    path = three_steps(tmp_path)
    summary = broken(
        path,
        "CREATE TABLE ANALYSIS_DETAILS (globalVid INTEGER, duration INTEGER, startTime INTEGER, stopTime INTEGER)",
        f"INSERT INTO ANALYSIS_DETAILS VALUES (0, {13 * SECOND}, 0, {13 * SECOND})",
        f"UPDATE {RANGE} SET end = {15 * SECOND} WHERE start = {AT + 10}",
    )
    (said,) = left_out(summary)
    assert "1 row of NVTX_EVENTS with a time outside the capture" in said


def test_a_session_that_most_rows_do_not_lie_in_is_not_believed(tmp_path: Path) -> None:
    path = three_steps(tmp_path)
    summary = broken(
        path,
        "CREATE TABLE ANALYSIS_DETAILS (globalVid INTEGER, duration INTEGER, startTime INTEGER, stopTime INTEGER)",
        "INSERT INTO ANALYSIS_DETAILS VALUES (0, 1000, 0, 1000)",
    )
    assert left_out(summary) == []
    assert summary.coverage is not None
    assert summary.coverage.kernels == 15


def test_times_may_count_from_anywhere(tmp_path: Path) -> None:
    # Nanoseconds since 1970, and one kernel at the session's zero.
    export = Export().gpu()
    for at in STEPS:
        training_step(export, 1_795_000_000 * SECOND + at)
    path = export.write(tmp_path / "t.sqlite")
    summary = broken(path)
    assert left_out(summary) == []
    assert summary.coverage is not None
    assert summary.coverage.kernels == 15
    changed = broken(path, f"UPDATE {KERNEL} SET start = 5 WHERE start = {1_795_000_000 * SECOND + AT + 130}")
    (said,) = left_out(changed)
    assert "1 row of CUPTI_ACTIVITY_KIND_KERNEL with a time outside the capture" in said


def test_clocks_that_differ_by_a_constant_leave_nothing_out(tmp_path: Path) -> None:
    # Every operation 5 ms before its launch: the GPU's clock is behind the CPU's.
    path = three_steps(tmp_path)
    summary = broken(path, f"UPDATE {KERNEL} SET start = start - 5000000, end = end - 5000000")
    assert left_out(summary) == []
    assert summary.coverage is not None
    assert summary.coverage.kernels == 15


def test_the_kernel_table_holds_none_of_them(tmp_path: Path) -> None:
    path = three_steps(tmp_path)
    broken(path, f"UPDATE {KERNEL} SET start = start - {SECOND // 2} {OF_FORWARD}")
    assert len(Trace.load(path).kernels) == 14
