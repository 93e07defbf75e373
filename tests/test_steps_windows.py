"""The steps of a program: by its ranges, its phases, or what repeats, on the CPU's timeline or on the GPU's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsys_analyzer.analysis.steps.summarize import summarize_steps
from nsys_analyzer.analysis.steps.windows import Windows, find_windows
from tests.support.export import ADD, AUTOGRAD, GEMM, PID, SOFTMAX, Export, global_pid, training_step
from tests.support.program import Program, attributed

Bounds = list[tuple[int, int]]


def windows_of(export: Export, folder: Path, pid: int = PID) -> Windows:
    windows = find_windows(attributed(export, folder), global_pid(pid))
    assert windows is not None
    assert len(windows.called) == len(windows) + 1
    return windows


def bounds(windows: Windows) -> Bounds:
    return list(zip(windows.start.tolist(), windows.end.tolist(), strict=True))


def steps(export: Export, count: int, at: int = 0, pid: int = PID, wrap: str | None = "step") -> Export:
    """Training steps of 1,000 ns one behind the other."""
    export.thread(AUTOGRAD, "pt_autograd_0", pid)
    for number in range(count):
        training_step(export, at + number * 1000, pid, wrap=wrap and wrap.format(number))
    return export


@pytest.mark.parametrize(
    ("name", "source", "unit"),
    [
        ("step", "range", "a range step"),
        ("train_step {}", "range", "a range such as train_step 0"),
        ("ProfilerStep#{}", "profiler_step", "a step of PyTorch's profiler"),
    ],
)
def test_ranges_of_steps(tmp_path: Path, name: str, source: str, unit: str) -> None:
    windows = windows_of(steps(Export(), 3, wrap=name), tmp_path)
    assert (windows.source, windows.unit, windows.on_gpu) == (source, unit, False)
    assert bounds(windows) == [(0, 1000), (1000, 2000), (2000, 3000)]
    assert windows.called.tolist() == [0, 1000, 2000, 3000]


def test_between_the_ends_of_optimizers(tmp_path: Path) -> None:
    """Optimizers end at 950, 1950, 2950, 3950: three steps between them."""
    windows = windows_of(steps(Export(), 4, wrap=None), tmp_path)
    assert (windows.source, windows.unit) == ("period", "from one optimizer step's end to the next")
    assert bounds(windows) == [(950, 1950), (1950, 2950), (2950, 3950)]


def test_between_the_starts_of_forward_passes(tmp_path: Path) -> None:
    export = Export()
    for start in (0, 1000, 2000, 3000):
        export.range("forward", start + 10, start + 500).kernel(GEMM, start + 20, start + 30, start + 400)
    windows = windows_of(export, tmp_path)
    assert (windows.source, windows.unit) == ("period", "from one forward pass to the next")
    assert bounds(windows) == [(10, 1010), (1010, 2010), (2010, 3010)]


def repeating(export: Export, units: int, at: int = 0) -> Export:
    """A unit of 1,000 ns: GEMM, ADD, ADD, SOFTMAX, launched at 10, 20, 30, 40 of it."""
    for unit in range(units):
        for place, name in enumerate((GEMM, ADD, ADD, SOFTMAX)):
            start = at + unit * 1000 + place * 200
            export.kernel(name, at + unit * 1000 + 10 * (place + 1), start + 50, start + 150)
    return export


def test_kernels_that_repeat(tmp_path: Path) -> None:
    """Six units without any range: the launches of their first kernels bound five of them."""
    windows = windows_of(repeating(Export(), 6), tmp_path)
    assert (windows.source, windows.unit) == ("period", "a unit of 4 kernels that repeats")
    assert bounds(windows) == [(start, start + 1000) for start in range(10, 5000, 1000)]


def test_kernels_that_repeat_without_launches(tmp_path: Path) -> None:
    """What the GPU's first kernel of each unit begins: a graph's kernels, or those of an export without calls."""
    windows = windows_of(repeating(Export(drop=("CUPTI_ACTIVITY_KIND_RUNTIME",)), 4), tmp_path)
    assert bounds(windows) == [(50, 1050), (1050, 2050), (2050, 3050)]


def test_what_comes_before_the_first_unit_is_no_step(tmp_path: Path) -> None:
    export = Export()
    for number, name in enumerate((SOFTMAX, SOFTMAX, "first", "second")):
        export.kernel(name, number * 10, 100 + number * 10, 105 + number * 10)
    windows = windows_of(repeating(export, 12, at=1000), tmp_path)
    assert bounds(windows)[0] == (1010, 2010)
    assert len(windows) == 11


@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_does_not_repeat_has_no_steps(tmp_path: Path, count: int) -> None:
    """Two units may be a coincidence."""
    trace = attributed(repeating(Export().range("load", 0, 10), count), tmp_path)
    assert find_windows(trace, global_pid()) is None
    assert summarize_steps(trace, global_pid()) is None


def test_kernels_without_an_order_have_no_steps(tmp_path: Path) -> None:
    export = Export()
    for number, name in enumerate([GEMM, ADD, SOFTMAX, ADD, ADD, GEMM, SOFTMAX, GEMM, ADD, SOFTMAX, SOFTMAX, SOFTMAX]):
        export.kernel(name, number * 100, number * 100 + 10, number * 100 + 90)
    assert find_windows(attributed(export, tmp_path), global_pid()) is None


def test_steps_without_a_gpu_are_not_summarized(tmp_path: Path) -> None:
    export = Export().range("step", 0, 100).range("step", 100, 200)
    assert summarize_steps(attributed(export, tmp_path), global_pid()) is None


# --- what is no step


def test_warm_up_is_left_out(tmp_path: Path) -> None:
    assert bounds(windows_of(steps(Export().range("warmup", 0, 2000), 4), tmp_path)) == [(2000, 3000), (3000, 4000)]


def test_a_period_that_holds_warm_up_is_left_out(tmp_path: Path) -> None:
    """Optimizers end at 950 and 1950, then warm-up holds two steps, then three more: [1950, 4950) is no step."""
    export = steps(Export().range("warmup", 2000, 4000), 7, wrap=None)
    assert bounds(windows_of(export, tmp_path)) == [(950, 1950), (4950, 5950), (5950, 6950)]


@pytest.mark.parametrize("wrap", ["step", None])
def test_a_step_whose_kernels_the_capture_lacks_is_left_out(tmp_path: Path, wrap: str | None) -> None:
    """The optimizer of the third of five steps has launched a kernel that the file does not have.

    Without ranges of steps its end bounds none: [1950, 3950) is no step.
    """
    export = steps(Export(), 5, wrap=wrap)
    export.call("cudaLaunchKernel_v7000", 2800)
    expected = [(0, 1000), (1000, 2000), (3000, 4000), (4000, 5000)] if wrap else [(950, 1950), (3950, 4950)]
    assert bounds(windows_of(export, tmp_path)) == expected


def test_steps_without_backward_are_left_out_where_others_have_one(tmp_path: Path) -> None:
    """Evaluation between two training steps."""
    export = steps(Export(), 1).range("step", 1000, 1500).kernel(GEMM, 1010, 1020, 1400)
    assert bounds(windows_of(steps(export, 1, at=2000), tmp_path)) == [(0, 1000), (2000, 3000)]


def test_steps_without_backward_are_steps_where_none_has_one(tmp_path: Path) -> None:
    export = Export()
    for start in (0, 1000):
        export.range("step", start, start + 900).kernel(GEMM, start + 10, start + 20, start + 800)
    assert bounds(windows_of(export, tmp_path)) == [(0, 900), (1000, 1900)]


def test_each_process_has_its_own_steps(tmp_path: Path) -> None:
    export = steps(steps(Export(), 2), 3, at=500, pid=200)
    # ``training_step`` launches from threads of the same numbers.
    assert bounds(windows_of(export, tmp_path)) == [(0, 1000), (1000, 2000)]
    assert bounds(windows_of(export, tmp_path, pid=200)) == [(500, 1500), (1500, 2500), (2500, 3500)]


def test_overlapping_steps_of_two_threads_are_cut(tmp_path: Path) -> None:
    """A step ends where the next one begins, on whichever thread."""
    export = Export().range("step", 0, 100).range("step", 60, 160, tid=7).range("step", 160, 200)
    assert bounds(windows_of(export.kernel(GEMM, 5, 10, 190), tmp_path)) == [(0, 60), (60, 160), (160, 200)]


# --- a program that runs ahead of the GPU


def ahead(count: int = 4) -> Program:
    """Steps that the program launches in 50 µs each, one behind the other, and that take the GPU 300 µs each."""
    program = Program()
    for number in range(count):
        start, begin = number * 50, 20 + number * 300
        program.step(start, start + 50).work((start + 5, start + 9), (begin, begin + 200))
        program.work((start + 10, start + 14), (begin + 200, begin + 300), name=ADD)
    return program


def test_steps_that_the_program_runs_ahead_of_are_the_gpus(tmp_path: Path) -> None:
    """The first begins with its range, each ends with its last kernel: 320, 620, 920, 1220 µs."""
    windows = windows_of(ahead(), tmp_path)
    assert windows.on_gpu
    assert bounds(windows) == [(0, 320_000), (320_000, 620_000), (620_000, 920_000), (920_000, 1_220_000)]
    assert windows.called.tolist() == [0, 50_000, 100_000, 150_000, 200_000]


def test_work_of_before_the_first_step_is_none_of_it(tmp_path: Path) -> None:
    """What was launched before the steps runs until 20 µs: the first begins there."""
    windows = windows_of(ahead().work((-20, -15), (-10, 20)), tmp_path)
    assert bounds(windows)[0] == (20_000, 320_000)


def test_steps_that_the_program_waits_for_are_the_ranges(tmp_path: Path) -> None:
    """A tenth of a step's time at most, 30 of 300 µs: a last kernel may end a little behind its range."""
    program = Program()
    for start in (0, 300, 600):
        program.step(start, start + 300).work((start + 5, start + 9), (start + 31, start + 330))
    windows = windows_of(program, tmp_path)
    assert not windows.on_gpu
    assert bounds(windows) == [(0, 300_000), (300_000, 600_000), (600_000, 900_000)]


# In µs, and none at 0: that is no time.
launches = st.lists(
    st.tuples(st.integers(950, 1500), st.integers(0, 400), st.integers(1, 300), st.integers(7, 9)), max_size=15
)
ranges = st.lists(
    st.tuples(st.integers(1000, 1400), st.integers(1, 100), st.integers(100, 102)), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


@settings(max_examples=100)
@given(ranges, launches)
def test_steps_are_in_order_and_do_not_overlap(
    folder: Path, rows: list[tuple[int, int, int]], launched: list[tuple[int, int, int, int]]
) -> None:
    program = Program()
    for start, length, thread in rows:
        program.open("step", start, start + length, thread)
    for called, latency, length, stream in launched:
        program.work((called, called), (called + latency, called + latency + length), tid=100 + stream, stream=stream)
    windows = windows_of(program, folder)
    assert (windows.end > windows.start).all()
    assert (windows.start[1:] >= windows.end[:-1]).all()
    assert (np.diff(windows.called) > 0).all()
    if windows.on_gpu:
        starts = {start * 1000 for start, _, _ in rows}  # where a step begins behind all of that
        ends = [(called * 1000, (called + latency + length) * 1000) for called, latency, length, _ in launched]
        for i, begin in enumerate(windows.called[:-1].tolist()):
            # From the end of the step before, and of what was launched before this one.
            before = [end for called, end in ends if called < begin] + windows.end[:i].tolist()
            assert i == 0 or windows.start[i] == max(before, default=begin) or windows.start[i] in starts
    else:
        assert set(windows.start.tolist()) <= {start * 1000 for start, _, _ in rows}
