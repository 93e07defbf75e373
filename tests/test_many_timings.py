"""Timing tables of many rows: read once for each kind of row, with the results of reading each row by itself."""

import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings import Selection, Timings, layouts, read_timings


def read(tmp_path: Path, text: str, skip: int | None = None) -> Timings:
    path = tmp_path / "timings.csv"
    path.write_text(text, encoding="utf-8")
    return read_timings(path, selection=Selection(skip=skip))


def iterations(count: int) -> str:
    rows = (f"small,{128 * (1 + i % 4)},{('forward', 'backward')[i // 4 % 2]},{i // 8},{i}.5\n" for i in range(count))
    return "model,context_length,phase,iteration,ms\n" + "".join(rows)


@pytest.mark.parametrize("count", [80, 800])
def test_a_description_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """However many rows there are: eight phases and context lengths."""
    described: list[int] = []
    whole = layouts.Timing
    monkeypatch.setattr(layouts, "Timing", lambda *own, **more: (described.append(1), whole(*own, **more))[1])
    timings = read(tmp_path, iterations(count))
    assert len(described) == 8
    assert [row.line for row in timings.rows] == list(range(2, 10))
    assert [row.steps for row in timings.rows] == [count // 8] * 8


@pytest.mark.parametrize("cell", ["x", "-3", "1e99", "2.5 parsecs"])
def test_a_bad_number_among_many(tmp_path: Path, cell: str) -> None:
    lines = iterations(2_000).splitlines()
    lines[1_500] = lines[1_500].rsplit(",", 1)[0] + f",{cell}"
    with pytest.raises(TimingsError, match=f"line 1501, column 'ms': '{cell}'"):
        read(tmp_path, "\n".join(lines))


def test_rows_of_one_run_that_say_different_things(tmp_path: Path) -> None:
    """Steps, statuses and cells of several forms: each row counts as it would alone, in the order of the file."""
    rows = "small,0,OOM,10\nsmall,1,0.02 s,10\nsmall,2,30,20\nsmall,3,,20\nsmall,4,25 ± 5,10\n"
    (row,) = read(tmp_path, "model,iteration,forward_ms,steps\n" + rows).rows
    assert (row.mean_ms, row.min_ms, row.max_ms, row.std_ms) == (25.0, 20.0, 30.0, 5.0)
    assert (row.line, row.iteration, row.steps) == (3, 1, 40)  # a row with a deviation is of several steps


def test_a_number_that_is_no_usual_one_has_no_deviation(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "model,forward_ms\nsmall,1_0\n").rows
    assert (row.mean_ms, row.std_ms) == (10.0, None)


def test_numbers_of_each_row_are_its_own(tmp_path: Path) -> None:
    rows = "".join(f"small,2025-06-{day},{day}.5,{day}000\n" for day in (12, 14, 13))
    (row,) = read(tmp_path, "model,date,forward_ms,peak_memory_bytes\n" + rows).rows
    assert (row.line, row.mean_ms, row.peak_memory_bytes) == (3, 14.5, 14_000)


def test_numbers_that_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "timings.csv"
    path.write_text("model,iteration,forward_ms\nsmall,1,10\nsmall,2,20\nsmall,3,30\n", encoding="utf-8")
    (row,) = read_timings(path, selection=Selection.parse(["iteration=2"], None, None)).rows
    assert (row.line, row.mean_ms) == (3, 20.0)
    with pytest.raises(TimingsError, match="column 'iteration': no row has '4'") as error:
        read_timings(path, selection=Selection.parse(["iteration=4"], None, None))
    assert error.value.hint == "Give one of '1', '2', '3'"


def test_warm_up_alone(tmp_path: Path) -> None:
    path = tmp_path / "timings.csv"
    path.write_text("model,is_warmup,forward_ms\nsmall,true,10\nsmall,true,20\n", encoding="utf-8")
    for where in ([], ["model=small"]):
        with pytest.raises(TimingsError, match="every row is warm-up"):
            read_timings(path, selection=Selection.parse(where, None, None))


_TIMES = {"10.25": 10.25, "20.5 ms": 20.5, "0.03 s": 30.0, "1e1": 10.0, " 7 ": 7.0, "OOM": None, "": None, "nan": None}


@given(st.lists(st.sampled_from(sorted(_TIMES)), min_size=2, max_size=30), st.sampled_from([None, 0, 1]), st.randoms())
@settings(max_examples=100, deadline=None)
def test_iterations_of_any_form(
    tmp_path_factory: pytest.TempPathFactory, cells: list[str], skip: int | None, chance: random.Random
) -> None:
    """In any order of the file, the statistics are those of the numbers in the cells."""
    numbered = list(enumerate(cells))
    chance.shuffle(numbered)
    text = "model,iteration,forward_ms\n" + "".join(f"small,{number},{cell}\n" for number, cell in numbered)
    (row,) = read(tmp_path_factory.mktemp("many"), text, skip).rows
    kept = list(enumerate(cells))[skip or 0 :]
    timed = [(number, ms) for number, cell in kept if (ms := _TIMES[cell]) is not None]
    values = [ms for _, ms in timed]
    if not values:
        assert (row.mean_ms, row.iteration) == (None, kept[0][0])
        return
    assert (row.mean_ms, row.median_ms) == (statistics.fmean(values), statistics.median(values))
    assert (row.min_ms, row.max_ms, row.steps) == (min(values), max(values), len(values))
    assert (row.iteration, row.line) == (timed[0][0], 2 + [number for number, _ in numbered].index(timed[0][0]))


def test_memory_is_bounded(tmp_path: Path) -> None:
    """100 thousand rows in 150 megabytes beside the imports."""
    path = tmp_path / "timings.csv"
    path.write_text(iterations(100_000), encoding="utf-8")
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "import pandas\n"
        "from nsys_analyzer.runs.timings import read_timings\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        "limit = pages * resource.getpagesize() + 150_000_000\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "print(len(read_timings(Path(sys.argv[1])).rows))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("8\n", "")
