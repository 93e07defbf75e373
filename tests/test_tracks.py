"""The tracks of the measured steps: every moment once, and the same figures as the steps' summaries."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps import tracks as recording
from nsys_analyzer.analysis.steps.groups import find_steps
from nsys_analyzer.analysis.steps.tracks import MAX_OPERATIONS_OF_TRACKS, Stream, Tracks, record_tracks
from nsys_analyzer.analysis.steps.windows import find_bounds_near_median
from nsys_analyzer.trace.columns import KERNEL, MemoryUses
from tests.conftest import DATA
from tests.support.export import ADD, AUTOGRAD, GEMM, Export, training_step
from tests.support.program import summary_of_steps, three_steps, work_of


def tracks_of(path: Path, most: int = MAX_OPERATIONS_OF_TRACKS) -> list[tuple[AttributedTrace, Tracks]]:
    """The tracks of each process that has any."""
    attributed = AttributedTrace(Trace.load(path))
    processes = [process.global_pid for process in find_processes(attributed.trace)]
    with_steps = [process for process in processes if find_steps(attributed, process)]
    return [(attributed, record_tracks(*work_of(attributed, process), most)) for process in with_steps]


def streams(tracks: Tracks) -> list[Stream]:
    return [track for track in tracks.tracks if isinstance(track, Stream)]


def test_boxes_of_a_step(tmp_path: Path) -> None:
    export = Export().gpu()
    export.range("step", 1000, 9000)
    export.range("forward", 1100, 4000)
    export.kernel(GEMM, 1200, 2000, 3500)  # launched at 1200, runs from 2000 to 3500
    export.kernel(ADD, 1300, 3500, 3600)
    ((_, tracks),) = tracks_of(export.write(tmp_path / "one.sqlite"))
    assert (tracks.origin_ns, tracks.duration_ns, tracks.steps) == (1000, 8000, ((0, 8000),))
    ranges, stream, idle = (next(t for t in tracks.tracks if t.kind == kind) for kind in ("ranges", "stream", "idle"))
    assert [tracks.names[code] for code in ranges.name] == ["step", "forward"]
    assert (ranges.start.tolist(), ranges.duration.tolist(), ranges.depth.tolist()) == ([0, 100], [8000, 2900], [0, 1])
    assert isinstance(stream, Stream)
    assert (stream.start.tolist(), stream.duration.tolist()) == ([1000, 2500], [1500, 100])  # since 1000
    assert stream.wait.tolist() == [2000 - 1200, 3500 - 1300]
    assert [tracks.groups[code] for code in stream.group] == ["matmul", "elementwise"]
    assert [tracks.phases[code] for code in stream.phase] == ["forward", "forward"]
    assert [tracks.paths[code] for code in stream.path] == ["step / forward"] * 2
    assert stream.thread.tolist() == [0, 0]
    # Before the first kernel, and behind the last: 2000 − 1000 and 9000 − 3600.
    assert (idle.start.tolist(), idle.duration.tolist()) == ([0, 2600], [1000, 5400])


def test_steps_in_which_no_operation_runs(real_capture: Callable[[str], Path]) -> None:
    """All kernels of each process run before its steps."""
    found = tracks_of(real_capture("nccl_init"))
    assert [streams(tracks) for _, tracks in found] == [[], []]


@pytest.mark.parametrize(
    "name", ["train_small256", "ddp2_small256", "graphnode_small256", "mem_small256", "llama_bf16"]
)
def test_tracks_say_what_the_steps_do(real_capture: Callable[[str], Path], name: str) -> None:
    """The idle time of the main device is that of the steps, and each operation of them is there once."""
    for attributed, tracks in tracks_of(real_capture(name)):
        steps = summary_of_steps(attributed, tracks.global_pid)
        assert steps is not None
        assert len(tracks.steps) == steps.instances
        (idle,) = (track for track in tracks.tracks if track.kind == "idle")
        # The parts of a step are those of the steps near the median, and idle time makes up for what these differ by.
        bounds = np.array(tracks.steps)
        shortest, longest = find_bounds_near_median(bounds[:, 1] - bounds[:, 0])
        near = (bounds[:, 1] - bounds[:, 0] >= shortest) & (bounds[:, 1] - bounds[:, 0] <= longest)
        in_near = near[np.searchsorted(bounds[:, 0], idle.start, side="right") - 1]
        ms = np.bincount(idle.group, idle.duration * in_near, len(tracks.groups)) / near.sum() / 1e6
        makes_up = steps.idle_ms / ms.sum()
        assert makes_up == pytest.approx(1, abs=0.02)
        by_cause = {tracks.groups[code]: ms[code] * makes_up for code in np.flatnonzero(ms)}
        assert by_cause == pytest.approx({cause.cause: cause.ms for cause in steps.causes}, abs=1e-6)
        operations = attributed.trace.operations
        inside = (operations.process == tracks.global_pid) & (operations.end > tracks.origin_ns)
        inside &= operations.start < tracks.origin_ns + tracks.duration_ns
        assert sum(len(stream.start) for stream in streams(tracks)) == inside.sum()
        assert (
            sum(stream.duration.sum() for stream in streams(tracks))
            == (operations.end - operations.start)[inside].sum()
        )
        kernels = sum((stream.wait != NONE).sum() for stream in streams(tracks))
        assert kernels >= 0.99 * (inside & (operations.kind == KERNEL)).sum()


def test_what_is_on_the_critical_path_is_marked(tmp_path: Path) -> None:
    """The program waits for each matmul; it goes on long after each addition has ended."""
    program = three_steps((GEMM, 0, 6, 46), (ADD, 60, 66, 70), waits=(5, 50))
    ((_, tracks),) = tracks_of(program.write(tmp_path / "t.sqlite"))
    (stream,) = streams(tracks)
    assert stream.critical.tolist() == [True, False] * 2  # of the third step the end is not known


def test_operators_on_the_cpu_are_no_work_of_a_gpu(tmp_path: Path) -> None:
    """They fill a track of their own, and neither block the program nor let a device idle."""
    ((attributed, tracks),) = tracks_of(Path(shutil.copy(DATA / "cpu_train.pt.trace.json.gz", tmp_path)))
    assert tracks.on_cpu
    assert [track.title for track in tracks.tracks] == ["CPU: main thread", "CPU: operators"]
    assert [track.kind for track in tracks.tracks] == ["ranges", "stream"]
    assert len(tracks.tracks[1].start) <= len(attributed.trace.operations)


def test_threads_that_launch_nothing_come_last(tmp_path: Path) -> None:
    """Workers stand below the GPU, and by their IDs where they have one name."""
    export = training_step(Export().gpu().thread(AUTOGRAD, "pt_autograd_0").thread(201, "worker").thread(202, "worker"))
    export.range("mul_backward", 340, 420, tid=AUTOGRAD)
    for tid in (202, 201):
        export.range("load", 100, 200, tid=tid).range("decode", 210, 290, tid=tid)
    ((_, tracks),) = tracks_of(export.write(tmp_path / "workers.sqlite"))
    assert [track.title for track in tracks.tracks] == [
        "CPU: main thread", "CPU: thread pt_autograd_0", "GPU stream 7", "GPU idle",
        "CPU: thread worker 201", "CPU: thread worker 202",
    ]  # fmt: skip
    (stream,) = streams(tracks)
    assert stream.thread.tolist() == [0, 0, 1, 1, 0]  # backward's two by autograd


def test_requests_lie_below_the_steps_that_serve_them(tmp_path: Path) -> None:
    """In as many rows as there are requests at once: the third, from 100 on, takes the row of the first, until 90."""
    export = Export().gpu()
    for number, (start, end) in enumerate([(0, 90), (5, 199), (100, 190)]):
        export.range(f"request {number}", start, end, kind=60)
    for start in (0, 100):
        export.range("decode bs=4 toks=4", start, start + 90).kernel(GEMM, start + 10, start + 20, start + 80)
    ((_, tracks),) = tracks_of(export.write(tmp_path / "served.sqlite"))
    steps, *_, requests = tracks.tracks
    assert [tracks.names[code] for code in steps.name] == ["decode bs=4 toks=4"] * 2
    assert (requests.title, steps.depth.tolist(), requests.depth.tolist()) == ("CPU: requests", [0, 0], [0, 1, 0])
    assert [tracks.paths[code] for code in streams(tracks)[0].path] == ["decode bs=4 toks=4"] * 2


def test_memory_that_was_recorded_is_a_curve(step_trace: Path) -> None:
    trace = Trace.load(step_trace)
    (process,) = find_processes(trace)
    whole = record_tracks(*work_of(AttributedTrace(trace), process.global_pid), 1_000)
    assert [len(one) for one in whole.memory] == [0, 0]
    begins = whole.origin_ns
    start, changes = np.array([begins - 10, begins + 5, begins + 8]), np.array([100, 50, -50])
    uses = MemoryUses(start, np.full(3, process.global_pid), changes, np.full(3, -1))
    attributed = AttributedTrace(replace(trace, memory=uses))
    tracks = record_tracks(*work_of(attributed, process.global_pid), 1_000)
    # 100 bytes before the step begins, 50 more 5 ns into it, and 50 less 3 ns later.
    assert [one.tolist() for one in tracks.memory] == [[0, 5, 8], [100, 150, 100]]


def test_memory_that_does_not_change_is_a_level_line(step_trace: Path) -> None:
    trace = Trace.load(step_trace)
    (process,) = find_processes(trace)
    whole = record_tracks(*work_of(AttributedTrace(trace), process.global_pid), 1_000)

    def memory(*starts: int) -> list[list[int]]:
        """The curve of 100 bytes allocated at each moment since the steps began."""
        start, count = np.array(starts) + whole.origin_ns, len(starts)
        uses = MemoryUses(start, np.full(count, process.global_pid), np.full(count, 100), np.full(count, -1))
        attributed = AttributedTrace(replace(trace, memory=uses))
        tracks = record_tracks(*work_of(attributed, process.global_pid), 1_000)
        return [one.tolist() for one in tracks.memory]

    assert memory(-20, -10) == [[0], [200]]
    assert memory(whole.duration_ns + 10) == [[], []]  # nothing yet


def test_of_a_long_capture_some_steps_are_shown(real_capture: Callable[[str], Path]) -> None:
    path = real_capture("train_small256")
    ((_, whole),) = tracks_of(path)
    ((_, some),) = tracks_of(path, most=8_000)  # of 11,676 in three steps: two of them
    assert (len(whole.steps), whole.left_out) == (3, "")
    assert (len(some.steps), some.left_out) == (2, "2 of 3 steps are shown")
    assert sum(len(one.start) for one in streams(some)) < sum(len(one.start) for one in streams(whole))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_depths_keep_intervals_apart(spans: list[tuple[int, int]]) -> None:
    """Whatever crosses whatever: two of one depth have no moment in common, and no depth is left out."""
    ordered = sorted((start, -(start + length)) for start, length in spans)
    start, end = np.array([[one for one, _ in ordered], [-one for _, one in ordered]], np.int64).reshape(2, -1)
    depths = recording._find_depths(start, end)
    for depth in range(int(depths.max(initial=0)) + 1):
        chosen = depths == depth
        assert (start[chosen][1:] >= end[chosen][:-1]).all()
    assert all(depths[i] == 0 or (depths[:i] == depths[i] - 1).any() for i in range(len(depths)))
