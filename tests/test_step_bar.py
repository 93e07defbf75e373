"""Steps as bars on the terminal: their parts, their cells, and how they look with color and without."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.color import Color
from rich.console import Console

from nsys_analyzer.analysis.ranks.run import ParallelRun, RankFigures
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.groups import StepGroup
from nsys_analyzer.analysis.steps.step import ClassTime, DeviceSteps, StepSummary
from nsys_analyzer.report.model import StepBars
from nsys_analyzer.report.palette import CLASS_COLORS, PART_COLORS
from nsys_analyzer.report.renderers.step_bar import PART_LETTERS, distribute_cells, draw_bars
from nsys_analyzer.report.sections.bars import IDLE, MAX_RANK_BARS, MIN_PART_SHARE, make_rank_bars, make_step_bars

TIMES = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=20)


def step_of(*devices: DeviceSteps) -> StepSummary:
    return StepSummary(
        **vars(devices[0]), instances=1, source="range", unit="a range step", on_gpu_timeline=False, length_ms=100.0,
        wall_ms=Stats(1, 100.0, None, 100.0, 100.0, 100.0), wall_values_ms=(100.0,), busy_values_ms=(100.0,),
        groups=(StepGroup("usual", 1, 100.0, True),), devices=devices,
    )  # fmt: skip


def device_of(number: int, idle: float, *, copies: float = 0.0, **classes: float) -> DeviceSteps:
    times = tuple(ClassTime(name, ms) for name, ms in classes.items())
    return DeviceSteps(sum(classes.values()), copies, 0.0, idle, number, times, (), ())


def rank_of(number: int, compute: float, idle: float, own: float | None = None) -> RankFigures:
    """A rank that waits for 8 ms and transfers for 2 ms, as far as that is known."""
    stats = Stats(1, own, None, own, own, own) if own is not None else None
    known = own is not None
    return RankFigures(
        f"rank {number}", number, number, "run", "run.sqlite", number, Stats(1, 100.0, None, 100.0, 100.0, 100.0),
        compute, 0.0, 10.0, 10.0, idle, 0.0, own_ms=stats,
        exposed_waiting_ms=8.0 if known else None, exposed_transfer_ms=2.0 if known else None,
    )  # fmt: skip


def run_of(*ranks: RankFigures, slowest: int | None = 0) -> ParallelRun:
    return ParallelRun("run", (), len(ranks), (), 1, ranks, (), slowest)


def lines_of(bars: StepBars | None, width: int, *, colored: bool = False, encoding: str = "utf-8") -> list[str]:
    assert bars
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    system = "truecolor" if colored else None
    screen = Console(file=file, width=width, force_terminal=colored, color_system=system, no_color=False)  # type: ignore[arg-type]
    lines = list(draw_bars(bars, screen))
    assert all(line.cell_len <= width for line in lines)
    return [line.plain for line in lines]


@given(TIMES, st.integers(0, 300))
def test_the_cells_add_up(values: list[float], width: int) -> None:
    found, total = distribute_cells(values, width), sum(values)
    assert sum(found) == (width if total > 0 else 0)
    assert all(one >= 0 for one in found)
    if total <= 0:
        return
    seen = [count for value, count in zip(values, found, strict=True) if value >= MIN_PART_SHARE * total]
    assert sum(count > 0 for count in seen) >= min(len(seen), width)
    # Rounded, and moved by no more than the cells that small parts were given.
    given_to_small = sum(count == 1 and value / total * width < 1 for value, count in zip(values, found, strict=True))
    for value, count in zip(values, found, strict=True):
        assert abs(count - value / total * width) < 1 + given_to_small


def test_the_largest_remainders_are_rounded_up() -> None:
    assert distribute_cells([5.5, 2.4, 2.1], 10) == [6, 2, 2]
    # 2 % of 10 cells is a fifth of one, and it has one: from the part that has most above its due
    assert distribute_cells([97, 2, 1], 10) == [8, 1, 1]
    assert distribute_cells([99.5, 0.5], 10) == [10, 0]
    assert distribute_cells([1, 1, 1], 2) == [1, 1, 0]
    assert distribute_cells([0.0, 0.0], 10) == [0, 0]


def test_letters_of_parts_differ() -> None:
    assert PART_LETTERS.keys() == CLASS_COLORS.keys() | PART_COLORS.keys()
    assert len(set(PART_LETTERS.values())) == len(PART_LETTERS)
    assert not {"+", ".", " "} & set(PART_LETTERS.values())


def test_a_bar_without_color() -> None:
    """Of 100 ms on 100 cells; two classes of 0.9 ms are one part of 1.8 cells."""
    bars = make_step_bars(step_of(device_of(0, 30.2, matmul=50.0, softmax=18.0, random=0.9, embedding=0.9)), "train")
    assert bars
    assert bars.parts == ("matmul", "softmax", "2 smaller parts", IDLE)
    bar, *legend = lines_of(bars, 100)
    shade = "\N{LIGHT SHADE}"
    assert bar == "".join(
        (
            *("M" * 21, " matmul ", "M" * 21),  # 50
            *("SSSS", " softmax ", "SSSSS"),  # 18
            "++",
            *(shade * 12, " idle ", shade * 12),  # 30
        )
    )
    assert legend == [
        "In these 100 ms:  M matmul 50 ms 50 %  S softmax 18 ms 18 %  + 2 smaller parts 1.8 ms 2 %",
        f"{shade} idle 30.2 ms 30 %",
    ]
    assert lines_of(bars, 100, encoding="ascii")[0].endswith("............ idle ............")


def test_what_takes_no_time_is_in_no_legend() -> None:
    """Sums of times are not exact: a difference of 7e-15 ms is none, and of a busy step nothing is idle."""
    bars = make_step_bars(step_of(device_of(0, 0.0, copies=7.11e-15, matmul=50.0)), "train")
    assert bars
    assert bars.parts == ("matmul", IDLE)
    assert lines_of(bars, 60)[1:] == ["In these 100 ms:  M matmul 50 ms 100 %"]


def test_a_bar_with_color() -> None:
    bars = make_step_bars(step_of(device_of(0, 40.0, copies=10.0, matmul=50.0)), "train")
    assert bars
    screen = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor", no_color=False)
    bar = next(iter(draw_bars(bars, screen)))
    assert bar.plain == f"{' matmul '.center(50)}{'P'.center(10)}{' idle '.center(40, chr(0x2591))}"
    backgrounds = [style.bgcolor for span in bar.spans if (style := screen.get_style(str(span.style))).bgcolor]
    assert backgrounds == [Color.parse(CLASS_COLORS["matmul"]), Color.parse(PART_COLORS["exposed copies"])]
    assert [(span.start, span.end) for span in bar.spans] == [(0, 50), (50, 60), (60, 100)]


def test_a_bar_of_each_device_on_one_scale() -> None:
    """The second step is half as long: with 80 cells between labels of 7 and times of 8 it has 40."""
    bars = make_step_bars(step_of(device_of(0, 50.0, matmul=50.0), device_of(1, 10.0, matmul=40.0)), "train")
    first, second, legend = lines_of(bars, 95)
    assert first.startswith("GPU 0  MMM")
    assert first.endswith("\N{LIGHT SHADE}  100 ms")
    assert len(first) == len(second) == 95
    assert len(second[7:].rstrip("ms .0123456789")) == 40
    assert second.endswith("   50 ms")
    assert legend == "In a step:  M matmul 40–50 ms  \N{LIGHT SHADE} idle 10–50 ms"


def test_no_bar_where_nothing_runs() -> None:
    assert make_step_bars(step_of(device_of(0, 100.0)), "train") is None
    assert make_rank_bars(run_of(rank_of(0, 50.0, 40.0))) is None  # of one rank, which its capture's bar shows


def test_the_bars_of_ranks() -> None:
    waits = make_rank_bars(run_of(rank_of(0, 50.0, 40.0, 92.0), rank_of(1, 60.0, 30.0, 92.0)))
    assert waits
    assert waits.parts == ("compute", "waiting", "transferring", IDLE)
    assert [row.ms for row in waits.rows] == [(50.0, 8.0, 2.0, 40.0), (60.0, 8.0, 2.0, 30.0)]
    unknown = make_rank_bars(run_of(rank_of(0, 50.0, 40.0), rank_of(1, 60.0, 30.0)))
    assert unknown
    assert unknown.parts == ("compute", "exposed communication", IDLE)


def test_of_many_ranks_those_at_the_ends() -> None:
    """Rank n has n ms of own time, but rank 20, which has most of all."""
    ranks = [rank_of(n, 50.0, 40.0, 1000.0 if n == 20 else float(n)) for n in range(40)]
    bars = make_rank_bars(run_of(*ranks, slowest=20))
    assert bars
    assert [row.label for row in bars.rows] == [f"rank {n}" for n in (0, 1, 2, 3, 4, 5, 20, 35, 36, 37, 38, 39)]
    assert (
        lines_of(bars, 80)[-1]
        == f"The report lists {40 - MAX_RANK_BARS} more ranks, with own times between those of the ranks above."
    )
    unknown = make_rank_bars(run_of(*(replace(one, own_ms=None) for one in ranks), slowest=None))
    assert unknown
    assert unknown.note == "The report lists 28 more ranks."


@pytest.mark.parametrize("width", [1, 5, 20, 80, 100, 160])
def test_no_bar_is_wider_than_its_screen(width: int) -> None:
    bars = make_rank_bars(run_of(*(rank_of(n, 50.0 + n, 40.0, 92.0) for n in range(3))))
    assert bars
    screen = Console(file=io.StringIO(), width=width)
    first, second, third, *_ = draw_bars(bars, screen)
    assert max(first.cell_len, second.cell_len, third.cell_len) <= width
    assert third.cell_len == width  # the longest
