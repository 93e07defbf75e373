"""Rows whose times cannot be true: left out, counted, told of, and without effect on any other phase."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.attribution.launches import leave_out_contradictions
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.facts import say, say_all
from nsys_analyzer.text import plain
from tests.support.export import ADD, GEMM, PID, Export, training_step
from tests.support.kineto import Kineto

KERNEL, RANGE = "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"
CALL, COPY, FILL = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("RUNTIME", "MEMCPY", "MEMSET"))
SECOND, MS = 10**9, 10**6
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
    said = [plain(warning, "`") for warning in say_all(summary.warnings)]
    return [warning for warning in said if warning.startswith(("Left out of every figure: ", "Counted "))]


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
    assert any("2 instances of phases left out" in plain(warning) for warning in say_all(after.warnings))


@pytest.fixture
def capture(tmp_path: Path, real_capture: Callable[[str], Path]) -> Path:
    """A real capture to break."""
    return shutil.copyfile(real_capture("train_small256"), tmp_path / "capture.sqlite")


def test_rows_that_stand_there_twice_count_once(capture: Path) -> None:
    before = broken(capture)
    third = "WHERE rowid % 3 = 0"
    after = broken(capture, *(f"INSERT INTO {table} SELECT * FROM {table} {third}" for table in (KERNEL, COPY, FILL)))
    said = left_out(after)
    for table, rows in ((KERNEL, "3,722"), (COPY, "25"), (FILL, "145")):  # of 11,166, 75 and 435
        assert any(f"{rows} rows of {table} with all values of another row" in one for one in said)
    assert (after.phases, after.whole, after.status) == (before.phases, before.whole, "ok")


def test_rows_in_another_order_change_nothing(tmp_path: Path, real_capture: Callable[[str], Path]) -> None:
    """Of 59,404 API calls the cost of recording one is told by the first 20,000."""
    path = shutil.copyfile(real_capture("full_small128"), tmp_path / "capture.sqlite")
    before = broken(path)
    statements = []
    for table in (CALL, KERNEL, COPY, FILL, RANGE):
        statements += [f"CREATE TEMP TABLE {table}_ AS SELECT * FROM {table} ORDER BY start % 1009, start"]
        statements += [f"DELETE FROM {table}", f"INSERT INTO {table} SELECT * FROM {table}_"]
    assert broken(path, *statements) == before


def test_ranges_of_no_duration(capture: Path) -> None:
    chosen = f"(SELECT rowid FROM {RANGE} WHERE text = 'forward' LIMIT 1)"
    after = broken(capture, f"UPDATE {RANGE} SET end = start WHERE rowid = {chosen}")
    assert f"1 row of {RANGE} with no duration, such as `forward`" in left_out(after)[0]
    forward = after.phase("forward")
    assert forward
    assert (forward.instances, forward.kernels_per_instance) == (2, 644)


def chosen(table: str, name: str, skipped: int) -> str:
    """One row, by the start of its name and its place among those of that name."""
    named = f"{table} JOIN StringIds ON id = {'shortName' if table == KERNEL else 'nameId'}"
    return f"(SELECT {table}.rowid FROM {named} WHERE value LIKE '{name}%' ORDER BY start LIMIT 1 OFFSET {skipped})"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"end = end + 1000 * {SECOND} WHERE rowid = {chosen(CALL, 'cudaLaunchKernel_', 500)}", "outside the capture"),
        (f"end = end + 1000 * {SECOND} WHERE rowid = {chosen(CALL, 'cudaMemcpyAsync', 2)}", "outside the capture"),
        (
            "end = start - 1 WHERE nameId IN (SELECT id FROM StringIds WHERE value LIKE '%Sync%')",
            "before the start",
        ),
        # In 100 ms the thread makes some 9,000 calls.
        (f"end = end + 100 * {MS} WHERE rowid = {chosen(CALL, 'cudaLaunchKernel_', 500)}", "after many later calls"),
    ],
)
def test_an_api_call_whose_end_cannot_be_true(capture: Path, statement: str, said: str) -> None:
    before = broken(capture)
    after = broken(capture, f"UPDATE {CALL} SET {statement}")
    (warning,) = left_out(after)
    assert warning.startswith("Counted without a duration: ")
    assert f"with an end {said}, such as correlation ID" in warning
    assert before.step
    assert after.step
    assert (after.step.wall_ms, after.step.compute_ms) == (before.step.wall_ms, before.step.compute_ms)
    assert [one.id for one in after.findings or ()] == [one.id for one in before.findings or ()]


def test_a_kernel_that_lies_over_many_of_its_own_stream(capture: Path) -> None:
    """In the 20 ms that it ends late some 3,000 others begin: it ends where the next one starts, and counts."""
    before = broken(capture)
    late = f"(SELECT rowid FROM {KERNEL} ORDER BY start LIMIT 1 OFFSET 5000)"
    after = broken(capture, f"UPDATE {KERNEL} SET end = end + 20 * {MS} WHERE rowid = {late}")
    told = f"Counted until that start: 1 row of {KERNEL} with an end after the next start on their stream"
    assert left_out(after)[0].startswith(told)
    assert before.step
    assert after.step
    assert (before.step.instances, after.step.instances) == (3, 3)
    # The next one of its stream starts 45 µs behind its true end.
    assert after.step.compute_ms == pytest.approx(before.step.compute_ms, rel=0.002)


PDL = "cudaLaunchKernelExC_v11060"


@pytest.mark.parametrize(
    ("following", "end_us"),
    [
        ([{}], 300),  # the next kernel of the stream starts at 300 µs
        ([{"api": PDL}, {}], 400),  # programmatic launches may begin before; the kernel behind them does not
        ([{"api": PDL}, {"api": PDL}], 5_000),
        ([{"api": "cudaGraphLaunch_v10000", "node": 7}, {"api": "cudaGraphLaunch_v10000", "node": 8}], 5_000),
        ([{"stream": 9}, {"stream": 9}], 5_000),
        ([{"device": 1}, {"device": 1}], 5_000),
        ([{"context": 2}, {"context": 2}], 5_000),  # which has a stream 7 of its own
    ],
)
def test_an_end_behind_the_next_start_of_its_stream(
    tmp_path: Path, following: list[dict[str, Any]], end_us: int
) -> None:
    """A kernel lasts from 200 µs to 5,000, and others of 50 µs start at 300 and 400."""
    export = Export().gpu().kernel(GEMM, 100_000, 200_000, 5_000_000)
    for number, options in enumerate(following, 3):
        export.kernel(ADD, 100_000 + number, number * 100_000, number * 100_000 + 50_000, **options)
    sound, *_ = leave_out_contradictions(Trace.load(export.write(tmp_path / "t.sqlite")))
    assert sound.operations.end[0] == end_us * 1_000
    assert [row.is_shortened for row in sound.left_out] == [True] * (end_us < 5_000)


@pytest.mark.parametrize(("late_us", "end_us"), [(2, 302), (3, 300)])
def test_an_end_in_a_trace_of_pytorch(tmp_path: Path, late_us: int, end_us: int) -> None:
    """PyTorch rounded starts and durations to 1 µs each: 2 µs behind the next start, at 300, may be due to that."""
    trace = Kineto().gpu().launch(1, 100).kernel(GEMM, 1, 200, 100 + late_us)
    sound, *_ = leave_out_contradictions(
        Trace.load(trace.launch(2, 110).kernel(GEMM, 2, 300, 50).write(tmp_path / "t.json"))
    )
    assert (sound.operations.end[0] + 100_000).tolist() == end_us * 1_000  # times count from the first event, at 100


def test_a_step_that_lasts_over_the_next_ones(capture: Path) -> None:
    """The first of three ends with the last: it is left out, and takes the other two with it no more."""
    steps = f"FROM {RANGE} WHERE text = 'step'"
    first = f"(SELECT rowid {steps} ORDER BY start LIMIT 1)"
    after = broken(capture, f"UPDATE {RANGE} SET end = (SELECT max(end) {steps}) WHERE rowid = {first}")
    assert after.step
    assert after.step.instances == 2
    assert "A range `step` has no end, or its end is after the start" in plain(say(after.warnings[0]), "`")


@pytest.mark.parametrize("name", ["   ", "\t\n", "\0gemm"])
def test_names_of_blanks_are_unknown(capture: Path, name: str) -> None:
    after = broken(capture, f"UPDATE StringIds SET value = {' || '.join(f'char({ord(c)})' for c in name)} "
                   "WHERE value LIKE '%gemm%'")  # fmt: skip
    forward = after.phase("forward")
    assert forward
    assert forward.share_of("matmul") is None
    assert any("does not hold the names of" in plain(warning) for warning in say_all(after.warnings))


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


def test_the_first_event_of_a_torch_trace_may_be_an_operation_of_no_length(tmp_path: Path) -> None:
    trace = (
        Kineto().gpu().kernel("gemm", 1, 100, 0).launch(1, 100).range("forward", 100, 50).operator("aten::mm", 101, 5)
    )
    (summary,) = summarize(Trace.load(trace.write(tmp_path / "t.json")), "t")
    assert left_out(summary) == []


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


# --- which rows are left out, and which times may be true

SESSION = "CREATE TABLE ANALYSIS_DETAILS (globalVid INTEGER, duration INTEGER, startTime INTEGER, stopTime INTEGER)"
OF_13_S = (SESSION, f"INSERT INTO ANALYSIS_DETAILS VALUES (0, {13 * SECOND}, 0, {13 * SECOND})")
OUTSIDE = "with a time outside the capture, such as"


@pytest.mark.parametrize(
    ("statements", "said", "kernels"),
    [
        # A call without a time, whose kernel stays without a launch.
        ([f"UPDATE {CALL} SET start = {2**62} WHERE start = {AT + 40}"], f"{CALL} {OUTSIDE} correlation", 15),
        # The session says how long a capture is, unless most rows lie outside of it.
        ([*OF_13_S, f"UPDATE {RANGE} SET end = {15 * SECOND} WHERE start = {AT + 10}"], f"{RANGE} {OUTSIDE}", 15),
        ([SESSION, "INSERT INTO ANALYSIS_DETAILS VALUES (0, 1000, 0, 1000)"], None, 15),
        # Without a session, one end lies far behind all others.
        ([f"UPDATE {RANGE} SET end = {2**40} WHERE start = {STEPS[2] + 700}"], f"{OUTSIDE} `optimizer`", 15),
        ([f"UPDATE {RANGE} SET end = {300 * SECOND} WHERE start = {STEPS[2] + 700}"], f"{OUTSIDE} `optimizer`", 15),
        # Every operation 5 ms before its launch: the GPU's clock is behind the CPU's.
        ([f"UPDATE {KERNEL} SET start = start - 5000000, end = end - 5000000"], None, 15),
        # Nothing but ranges begins before the session.
        *(
            (
                [
                    *OF_13_S, f"UPDATE {RANGE} SET start = {-5 * SECOND} WHERE start = {STEPS[0]}",
                    f"UPDATE {table} SET start = {-5 * SECOND} WHERE rowid = 1",
                ],
                f"1 row of {table} with a time outside the capture",
                kernels,
            )
            for table, kernels in ((KERNEL, 14), (CALL, 15))
        ),
    ],
)  # fmt: skip
def test_rows_that_are_left_out(tmp_path: Path, statements: list[str], said: str | None, kernels: int) -> None:
    path = three_steps(tmp_path)
    before, after = broken(path), broken(path, *statements)
    told = left_out(after)
    assert len(told) == (said is not None)
    assert all(str(said) in one for one in told)
    assert after.coverage is not None
    assert after.coverage.kernels == kernels == len(Trace.load(path).kernels)
    assert figures(after, "backward") == figures(before, "backward")
    assert ("1 kernels have no launch row and stay unattributed." in say_all(after.warnings)) == (CALL in str(said))


def test_half_of_all_times_are_decades_away(tmp_path: Path) -> None:
    # Of 42 starts (15 kernels, their 15 calls, 12 ranges) 21 are moved by 36 years: nothing lies in the middle.
    moved = f"SET start = start + {2**60}, end = end + {2**60}"
    summary = broken(three_steps(tmp_path), f"UPDATE {KERNEL} {moved}", f"UPDATE {RANGE} {moved} WHERE rowid <= 6")
    assert left_out(summary)
    assert summary.coverage is not None


@pytest.mark.parametrize(
    ("shifted", "chosen", "said"),
    [
        # An eighth of all kernels: a clock that is behind would have put nearly all of them before their launches.
        (-900 * MS, "WHERE rowid % 8 = 0", f"1,395 rows of {KERNEL} with a start before the launch"),
        (10 * SECOND, "", f"11,166 rows of {KERNEL} with a time outside the capture"),
    ],
)
def test_many_rows_with_impossible_times(capture: Path, shifted: int, chosen: str, said: str) -> None:
    after = broken(capture, f"UPDATE {KERNEL} SET start = start + {shifted}, end = end + {shifted} {chosen}")
    assert said in left_out(after)[0]
    assert not after.phase("forward")
    assert after.status == ("partial" if chosen else "no_kernels")


Row = tuple[int | None, int, int, dict[str, int]]


def forward(rows: list[Row], folder: Path) -> tuple[CaptureSummary, ...]:
    """Kernels in a forward pass of each process: launch (None: unknown), start and end, and what else tells them."""
    export = Export().gpu()
    for pid in dict.fromkeys(row[3].get("pid", PID) for row in rows):
        export.range("forward", 0, max(row[2] for row in rows) + 2 * SECOND, pid=pid, tid=pid)
    for launch, start, end, more in rows:
        export.kernel(GEMM, launch, start, end, **{"tid": more.get("pid", PID), **more})
    return tuple(summarize(Trace.load(export.write(folder / "t.sqlite")), "t"))


def each_second(count: int, late: Callable[[int], int], **more: int) -> list[Row]:
    """A kernel a second, launched and started 10 µs later by a clock that is off."""
    times = [(number, number * SECOND) for number in range(1, count + 1)]
    return [(at, at + 10_000 + late(number), at + 60_000 + late(number), more) for number, at in times]


def early(launched: int, many: int, by: int) -> list[Row]:
    """Launches 1 µs apart, of which the first ones start before them."""
    times = [(number, SECOND + 1000 * (number + 1)) for number in range(launched)]
    starts = [(at, at - by if number < many else at + 500) for number, at in times]
    return [(at, start, start + 100, {}) for at, start in starts]


def outlasting(length: int, **more: int) -> list[Row]:
    """The second runs from 5 to 6 ms after the first one's start, and is the last of all."""
    first = SECOND + 100
    return [(SECOND, first, first + length, more), (SECOND + 20, first + 5 * MS, first + 6 * MS, {})]


@pytest.mark.parametrize(
    ("rows", "lost"),
    [
        # The GPU's clock loses 0.1 ms a second: 6 ms in a minute.
        (each_second(60, lambda number: -100_000 * number), 0),
        # Each device has a clock of its own.
        *(
            (each_second(15, lambda _: 0) + each_second(10, lambda _, by=by: -by, pid=PID + 1, device=1), 0)  # type: ignore[misc]
            for by in (5 * MS, 10 * SECOND)
        ),
        # Five times ten kernels launched at once: the median kernel waits for 20 ms. Clocks differ by 3.
        (
            [
                (at * SECOND + i, at * SECOND + (5 * i - 3) * MS, at * SECOND + (5 * i + 2) * MS, {})
                for at in range(1, 6)
                for i in range(10)
            ],
            0,
        ),
        # Streams are numbered anew in each context: two of one number may work at once.
        ([(10, 20, 15 * SECOND, {"context": 2}), *each_second(19, lambda _: 0)], 0),
        # A kernel a minute for half an hour, none of them with a launch row.
        ([(None, number * 60 * SECOND + 5, number * 60 * SECOND + 10, {}) for number in range(30)], 0),
        # A hundredth of the launches, and one at the least, may not start more than 1 ms before its launch.
        (early(15, 1, MS), 0),
        (early(15, 1, 2 * MS - 1), 1),
        (early(15, 2, 2 * MS), 0),
        (early(200, 2, 2 * MS), 2),
        # However many there are, none but a clock's error of 100 ms.
        (early(15, 2, 100 * MS), 0),
        (early(15, 2, 199 * MS), 2),
        (outlasting(5 * MS), 0),
        (outlasting(19 * MS, stream=8), 0),  # nothing follows on its stream
    ],
)
def test_times_that_may_be_true(tmp_path: Path, rows: list[Row], lost: int) -> None:
    summaries = forward(rows, tmp_path)
    assert sum(summary.coverage.kernels for summary in summaries if summary.coverage) == len(rows) - lost
    assert sum(len(left_out(summary)) for summary in summaries) == (lost > 0)


def test_a_clock_that_is_a_little_behind_is_left_as_it_is(tmp_path: Path) -> None:
    (summary,) = forward(early(20, 20, 50 * MS), tmp_path)
    assert summary.coverage is not None
    assert summary.coverage.kernels == 20
