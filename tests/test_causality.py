"""Tests rows with impossible times: they are left out, counted and reported, and change no other phase."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.attribution.launches import exclude_impossible_times
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.facts import say, say_all
from nsys_analyzer.text import plain
from tests.support.cases import Capture, make_case_test
from tests.support.export import GEMM, PID, Export, training_step

KERNEL, RANGE = "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"
CALL, COPY, FILL = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("RUNTIME", "MEMCPY", "MEMSET"))
SECOND, MS = 10**9, 10**6


def broken(path: Path, *statements: str) -> CaptureSummary:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    (summary,) = summarize(Trace.load(path), "t")
    return summary


def left_out(summary: CaptureSummary) -> list[str]:
    said = [plain(warning, "`") for warning in say_all(summary.warnings)]
    return [warning for warning in said if warning.startswith(("Left out of every figure: ", "Counted "))]


def phase_figures(summary: CaptureSummary) -> dict[str, object]:
    return {one.phase: (one.wall_ms, one.gpu_busy_ms, one.gpu_span_ms, one.kernels) for one in summary.phases}


@cache
def sound_phases() -> dict[str, object]:
    """Returns the figures of three steps a second apart, in which no time is wrong."""
    export = Export().gpu()
    for at in (10 * SECOND, 11 * SECOND, 12 * SECOND):
        training_step(export, at)
    with tempfile.TemporaryDirectory() as folder:
        return phase_figures(broken(export.write(Path(folder) / "t.sqlite")))


def changed_phases(capture: Capture) -> list[str]:
    """Returns the phases whose figures are not those of three sound steps."""
    figures = phase_figures(capture.summary)
    return [phase for phase, expected in sound_phases().items() if figures.get(phase) != expected]


def first_end(capture: Capture) -> tuple[int, bool]:
    """Returns the end of the first operation, and whether it was brought forward."""
    sound, *_ = exclude_impossible_times(capture.trace)
    return int(sound.operations.end[0]), [row.is_shortened for row in sound.left_out] == [True]


test_causality = make_case_test(
    "causality",
    {
        "left out": lambda capture: left_out(capture.summary),
        "number of left out": lambda capture: len(left_out(capture.summary)),
        "changed phases": changed_phases,
        "rows of the kernel table": lambda capture: len(capture.trace.kernels),
        "end of the first operation": first_end,
    },
)


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


def test_a_step_that_lasts_over_the_next_ones(capture: Path) -> None:
    """The first of three ends with the last: it is left out, and takes the other two with it no more."""
    steps = f"FROM {RANGE} WHERE text = 'step'"
    first = f"(SELECT rowid {steps} ORDER BY start LIMIT 1)"
    after = broken(capture, f"UPDATE {RANGE} SET end = (SELECT max(end) {steps}) WHERE rowid = {first}")
    assert after.step
    assert after.step.instances == 2
    assert "A range `step` has no end, or ends after the next range" in plain(say(after.warnings[0]), "`")


@pytest.mark.parametrize("name", ["   ", "\t\n", "\0gemm"])
def test_names_of_blanks_are_unknown(capture: Path, name: str) -> None:
    after = broken(capture, f"UPDATE StringIds SET value = {' || '.join(f'char({ord(c)})' for c in name)} "
                   "WHERE value LIKE '%gemm%'")  # fmt: skip
    forward = after.phase("forward")
    assert forward
    assert forward.share_of("matmul") is None
    assert any("does not contain the names of" in plain(warning) for warning in say_all(after.warnings))


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
        (early(20, 20, 50 * MS), 0),  # a clock that is a little behind
        (outlasting(5 * MS), 0),
        (outlasting(19 * MS, stream=8), 0),  # nothing follows on its stream
    ],
)
def test_times_that_may_be_true(tmp_path: Path, rows: list[Row], lost: int) -> None:
    summaries = forward(rows, tmp_path)
    assert sum(summary.coverage.kernels for summary in summaries if summary.coverage) == len(rows) - lost
    assert sum(len(left_out(summary)) for summary in summaries) == (lost > 0)
