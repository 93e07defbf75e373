"""Rows whose times cannot be true: left out, counted, told of, and without effect on any other phase."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.text import plain
from tests.support.export import ADD, GEMM, PID, Export, training_step
from tests.support.kineto import Kineto

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
        ("end = start", "no duration"),
        ("start = start - 2000000", "a start before the launch"),
        (f"start = start - {SECOND // 2}", "a start before the launch"),
        (f"start = start - {SECOND // 2}, end = end - {SECOND // 2}", "a start before the launch"),
        (f"end = {2**40}", "a time outside the capture"),
        (f"start = {2**40}, end = {2**40 + 5}", "a time outside the capture"),
        (f"end = {2**62}", "a time outside the capture"),
        (f"start = -{2**62 - 1}", "a time outside the capture"),
        (f"end = {2**63 - 1}", "a time outside the capture"),
        (f"start = -{2**63}", "a time outside the capture"),
        (f"end = end + {3 * SECOND}", "an end long after all others and the next start of their stream"),
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
    assert any("2 instances of phases left out" in plain(warning) for warning in after.warnings)


@pytest.fixture
def capture(tmp_path: Path, real_capture: Callable[[str], Path]) -> Path:
    """A real capture to break."""
    return shutil.copyfile(real_capture("train_small256"), tmp_path / "capture.sqlite")


def test_many_operations_before_their_launch_are_no_clock(capture: Path) -> None:
    """An eighth of all kernels 0.9 s early: a clock that is behind would have put nearly all of them before theirs."""
    after = broken(capture, f"UPDATE {KERNEL} SET start = start - 900000000, end = end - 900000000 WHERE rowid % 8 = 0")
    (said,) = left_out(after)
    assert f"1,395 rows of {KERNEL} with a start before the launch" in said  # of 11,166
    assert after.status == "partial"
    assert not after.phase("forward")


def test_rows_that_stand_there_twice_count_once(capture: Path) -> None:
    before = broken(capture)
    after = broken(capture, f"INSERT INTO {KERNEL} SELECT * FROM {KERNEL} WHERE rowid % 3 = 0")
    (said,) = left_out(after)
    assert f"3,722 rows of {KERNEL} with all values of another row" in said  # of 11,166
    assert (after.phases, after.status) == (before.phases, "ok")


def test_a_table_outside_the_session_does_not_stretch_it(capture: Path) -> None:
    shift = 10 * SECOND
    after = broken(capture, f"UPDATE {KERNEL} SET start = start + {shift}, end = end + {shift}")
    assert f"11,166 rows of {KERNEL} with a time outside the capture" in left_out(after)[0]


def test_ranges_of_no_duration(capture: Path) -> None:
    chosen = f"(SELECT rowid FROM {RANGE} WHERE text = 'forward' LIMIT 1)"
    after = broken(capture, f"UPDATE {RANGE} SET end = start WHERE rowid = {chosen}")
    assert f"1 row of {RANGE} with no duration, such as `forward`" in left_out(after)[0]
    forward = after.phase("forward")
    assert forward
    assert (forward.instances, forward.kernels_per_instance) == (2, 644)


@pytest.mark.parametrize("name", ["   ", "\t\n", "\0gemm"])
def test_names_of_blanks_are_unknown(capture: Path, name: str) -> None:
    after = broken(capture, f"UPDATE StringIds SET value = {' || '.join(f'char({ord(c)})' for c in name)} "
                   "WHERE value LIKE '%gemm%'")  # fmt: skip
    forward = after.phase("forward")
    assert forward
    assert forward.share_of("matmul") is None
    assert any("does not hold the names of" in plain(warning) for warning in after.warnings)


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


def forwards(export: Export, count: int, offset_of: Callable[[int], int], *, pid: int = PID, device: int = 0) -> Export:
    """Forwards a second apart, each with a kernel that starts 10 us after its launch by a clock that is off."""
    for number in range(count):
        at = (number + 1) * SECOND
        start = at + 20_000 + offset_of(number)
        export.range("forward", at, at + 500_000, pid=pid, tid=pid)
        export.kernel(GEMM, at + 10_000, start, start + 50_000, pid=pid, tid=pid, device=device)
    return export


def test_clocks_that_drift_leave_nothing_out(tmp_path: Path) -> None:
    # The GPU's clock loses 0.1 ms a second: 6 ms in a minute.
    (summary,) = summarize(Trace.load(forwards(Export().gpu(), 60, lambda n: -100_000 * n).write(tmp_path / "t")), "t")
    assert summary.coverage is not None
    assert (summary.coverage.kernels, left_out(summary)) == (60, [])


@pytest.mark.parametrize("behind", [5_000_000, 10 * SECOND])
def test_each_device_has_a_clock_of_its_own(tmp_path: Path, behind: int) -> None:
    export = forwards(Export().gpu(), 15, lambda _: 0)
    forwards(export, 10, lambda _: -behind, pid=PID + 1, device=1)
    summaries = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    assert [summary.coverage.kernels for summary in summaries if summary.coverage] == [15, 10]
    assert [left_out(summary) for summary in summaries] == [[], []]


def test_a_long_queue_hides_no_difference_of_clocks(tmp_path: Path) -> None:
    # Five forwards of ten kernels of 5 ms, all launched at once: the median kernel waits for 20 ms. Clocks differ by 3.
    export = Export().gpu()
    for number in range(5):
        at = (number + 1) * SECOND
        export.range("forward", at, at + 100_000_000)
        for i in range(10):
            start = at + 10_000 + i * 5_000_000 - 3_000_000
            export.kernel(GEMM, at + i, start, start + 5_000_000)
    (summary,) = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    forward = summary.phase("forward")
    assert forward is not None
    assert (forward.instances, forward.gpu_busy_ms.mean) == (5, pytest.approx(50))


def test_a_long_kernel_beside_those_of_another_context(tmp_path: Path) -> None:
    """Streams are numbered anew in each context: two of one number may work at once."""
    export = Export().gpu().range("forward", 0, 20 * SECOND).kernel(GEMM, 10, 20, 15 * SECOND)
    for number in range(1, 20):
        export.kernel(ADD, number * SECOND, number * SECOND + 10, number * SECOND + 20)
    (summary,) = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    assert left_out(summary) == []


def test_long_pauses_without_a_session_or_a_call(tmp_path: Path) -> None:
    # A kernel a minute for half an hour, none of them with a launch row.
    export = Export().gpu().range("forward", 0, 1_800 * SECOND)
    for number in range(30):
        export.kernel(GEMM, None, number * 60 * SECOND + 5, number * 60 * SECOND + 10)
    (summary,) = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    assert summary.coverage is not None
    assert (summary.coverage.kernels, left_out(summary)) == (30, [])


def test_the_first_event_of_a_torch_trace_may_be_an_operation_of_no_length(tmp_path: Path) -> None:
    trace = (
        Kineto().gpu().kernel("gemm", 1, 100, 0).launch(1, 100).range("forward", 100, 50).operator("aten::mm", 101, 5)
    )
    (summary,) = summarize(Trace.load(trace.write(tmp_path / "t.json")), "t")
    assert left_out(summary) == []


@pytest.mark.parametrize("end", [2**40, 300 * SECOND])
def test_without_a_session_one_end_far_behind_all_others(tmp_path: Path, end: int) -> None:
    path = three_steps(tmp_path)
    summary = broken(path, f"UPDATE {RANGE} SET end = {end} WHERE start = {STEPS[2] + 700}")
    (said,) = left_out(summary)
    assert "with a time outside the capture, such as `optimizer`" in said


@pytest.mark.parametrize("table", [KERNEL, "CUPTI_ACTIVITY_KIND_RUNTIME"])
def test_nothing_but_ranges_begins_before_the_session(tmp_path: Path, table: str) -> None:
    path = three_steps(tmp_path)
    summary = broken(
        path,
        "CREATE TABLE ANALYSIS_DETAILS (globalVid INTEGER, duration INTEGER, startTime INTEGER, stopTime INTEGER)",
        f"INSERT INTO ANALYSIS_DETAILS VALUES (0, {13 * SECOND}, 0, {13 * SECOND})",
        f"UPDATE {RANGE} SET start = {-5 * SECOND} WHERE start = {STEPS[0]}",
        f"UPDATE {table} SET start = {-5 * SECOND} WHERE rowid = 1",
    )
    (said,) = left_out(summary)
    assert f"1 row of {table} with a time outside the capture" in said


def test_rows_of_a_process_without_an_entry_are_told_of(tmp_path: Path) -> None:
    export = training_step(Export().gpu()).kernel(GEMM, None, 0, 0, pid=PID + 1)
    (said,) = left_out(broken(export.write(tmp_path / "t.sqlite")))
    assert f"1 row of {KERNEL} of process {PID + 1} with no times" in said


def test_a_phase_whose_call_has_no_time_is_partial(tmp_path: Path) -> None:
    path = three_steps(tmp_path)
    summary = broken(path, f"UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = 0 WHERE start = {AT + 350}")
    (said,) = left_out(summary)
    assert "1 row of CUPTI_ACTIVITY_KIND_RUNTIME with no times" in said
    backward = summary.phase("backward")
    assert backward is not None
    # GEMM 200 and ADD 40 follow each other.
    assert (backward.instances, backward.incomplete_instances) == (2, 1)
    assert backward.gpu_busy_ms.mean == pytest.approx(240 / 1e6)


def test_half_of_all_times_are_decades_away(tmp_path: Path) -> None:
    # Of 42 starts (15 kernels, their 15 calls, 12 ranges) 21 are moved by 36 years: nothing lies in the middle.
    path = three_steps(tmp_path)
    moved = f"SET start = start + {2**60}, end = end + {2**60}"
    summary = broken(path, f"UPDATE {KERNEL} {moved}", f"UPDATE {RANGE} {moved} WHERE rowid <= 6")
    assert left_out(summary)
    assert summary.coverage is not None


MS = 10**6


@pytest.mark.parametrize(
    ("launched", "early", "by", "rows"),
    [
        # A hundredth of the launches, and one at the least, may not start more than 1 ms before its launch.
        (15, 1, MS, 0),
        (15, 1, 2 * MS - 1, 1),
        (15, 2, 2 * MS, 0),
        (200, 2, 2 * MS, 2),
        # However many there are, none but a clock's error of 100 ms.
        (15, 2, 100 * MS, 0),
        (15, 2, 199 * MS, 2),
    ],
)
def test_how_far_an_operation_may_lie_before_its_launch(
    launched: int, early: int, by: int, rows: int, tmp_path: Path
) -> None:
    export = Export().range("forward", SECOND, 3 * SECOND)
    for number in range(launched):
        at = SECOND + 1000 * (number + 1)
        start = at - by if number < early else at + 500
        export.kernel(GEMM, at, start, start + 100)
    summary = broken(export.write(tmp_path / "t.sqlite"))
    assert summary.coverage is not None
    assert summary.coverage.kernels == launched - rows
    assert len(left_out(summary)) == (rows > 0)


def test_a_clock_that_is_a_little_behind_is_left_as_it_is(tmp_path: Path) -> None:
    export = Export().range("forward", SECOND, 3 * SECOND)
    for number in range(20):
        at = SECOND + 1000 * (number + 1)
        export.kernel(GEMM, at, at - 50 * MS, at - 50 * MS + 100)
    summary = broken(export.write(tmp_path / "t.sqlite"))
    assert summary.coverage is not None
    assert (summary.coverage.kernels, summary.coverage.shortest_wait_ms) == (20, -50.0)


@pytest.mark.parametrize(
    ("length", "node", "stream", "kept"),
    [
        (16 * MS, None, 7, True),
        (16 * MS + 1, None, 7, False),
        (19 * MS, None, 7, False),
        (19 * MS, 5, 7, True),  # the nodes of a graph overlap
        (19 * MS, None, 8, True),  # nothing follows on its stream
    ],
)
def test_an_operation_that_outlasts_the_next_of_its_stream(
    length: int, node: int | None, stream: int, kept: bool, tmp_path: Path
) -> None:
    # The next one runs from 5 to 6 ms after its start, and is the last of all. More than 10 ms later nothing runs.
    export = Export().range("forward", SECOND, 3 * SECOND)
    export.kernel(GEMM, SECOND + 10, SECOND + 100, SECOND + 100 + length, node=node, stream=stream)
    export.kernel(ADD, SECOND + 20, SECOND + 100 + 5 * MS, SECOND + 100 + 6 * MS)
    summary = broken(export.write(tmp_path / "t.sqlite"))
    assert summary.coverage is not None
    assert summary.coverage.kernels == 1 + kept
