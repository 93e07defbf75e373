"""Perfetto traces as Perfetto's own trace processor reads them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.analysis.kernels.labels import make_short_labels
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.export import FORMATS
from nsys_analyzer.export.frame import operation_frame
from nsys_analyzer.export.perfetto import is_ours
from nsys_analyzer.export.writing import Capture, align_captures
from nsys_analyzer.trace.phase_names import PhaseNames
from nsys_analyzer.trace.trace import Trace
from tests.conftest import DATA
from tests.support.export import ADD, AUTOGRAD, GEMM, PID, Export, global_pid, training_step
from tests.support.kineto import Kineto
from tests.support.program import idle_of
from tests.support.ranks import own_captures, write
from tests.support.trace_processor import TraceProcessor, trace_processor

#: Slices of streams and of idle time have an operation's or a cause's name; a track of a thread has none of its own.
SLICES = """
    SELECT slice.*, coalesce(track.name, thread.name) AS track, process.name AS process, parent.name AS parent
    FROM slice JOIN track ON track.id = slice.track_id
    LEFT JOIN track AS parent ON parent.id = track.parent_id
    LEFT JOIN thread_track ON thread_track.id = track.id LEFT JOIN thread USING (utid)
    LEFT JOIN process_track ON process_track.id = track.id
    LEFT JOIN process ON process.upid = coalesce(thread.upid, process_track.upid)
"""


def opened(paths: Sequence[Path], target: Path, **names: Sequence[str]) -> TraceProcessor:
    """The trace of some captures; ``names`` are those of phases' ranges."""
    phases = PhaseNames({phase: tuple(ranges) for phase, ranges in names.items()})
    captures = align_captures([Capture(path, phases) for path in paths], lambda _: None)
    FORMATS["perfetto"].write(captures, target)
    assert is_ours(target)
    return trace_processor(target)


def slices(trace: TraceProcessor, where: str = "1") -> list[tuple[Any, ...]]:
    """Track, name, category, start, duration and depth of some slices."""
    found = trace.query(f"SELECT * FROM ({SLICES}) WHERE {where} ORDER BY ts, depth, track")
    return [tuple(row[key] for key in ("track", "name", "category", "ts", "dur", "depth")) for row in found]


def check_sound(trace: TraceProcessor) -> None:
    """Nothing was lost, nothing stays open."""
    wrong = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value != 0"
    assert trace.query(wrong) == []
    assert trace.query("SELECT count(*) AS open FROM slice WHERE dur < 0") == [{"open": 0}]


def test_a_training_step(step_trace: Path, tmp_path: Path) -> None:
    """The step of ``training_step``, whose times stand there; a launch takes 1 ns, and phases lie in the step."""
    trace = opened([step_trace], tmp_path / "t.pftrace")
    check_sound(trace)
    labels = make_short_labels([GEMM, ADD])
    assert [row[1:] for row in slices(trace, "track = 'stream 7'")] == [
        (labels[GEMM], "matmul", 30, 100, 0),
        (labels[ADD], "elementwise", 130, 20, 0),
        (labels[GEMM], "matmul", 360, 200, 0),
        (labels[ADD], "elementwise", 560, 40, 0),
        (labels[ADD], "elementwise", 720, 80, 0),
    ]
    assert slices(trace, "track = 'python3'") == [
        ("python3", "step", "phase", 0, 1000, 0),
        ("python3", "forward", "phase", 10, 290, 1),
        ("python3", "cudaLaunchKernel", "launch", 20, 1, 2),
        ("python3", "cudaLaunchKernel", "launch", 40, 1, 2),
        ("python3", "backward", "phase", 300, 400, 1),
        ("python3", "optimizer", "phase", 700, 250, 1),
        ("python3", "cudaLaunchKernel", "launch", 710, 1, 2),
    ]
    engine = [(row[1], row[3]) for row in slices(trace, "track = 'pt_autograd_0'")]
    assert engine == [("cudaLaunchKernel", 350), ("cudaLaunchKernel", 400)]
    # The device works for 120 + 240 + 80 ns of 1000.
    assert sum(row[4] for row in slices(trace, "track = 'idle'")) == 1000 - 440
    parents = trace.query(f"SELECT DISTINCT track, parent, process FROM ({SLICES}) ORDER BY track")
    assert parents == [
        {"track": "idle", "parent": "GPU 0 (NVIDIA H200)", "process": "step.sqlite"},
        {"track": "pt_autograd_0", "parent": None, "process": "step.sqlite"},
        {"track": "python3", "parent": None, "process": "step.sqlite"},
        {"track": "stream 7", "parent": "GPU 0 (NVIDIA H200)", "process": "step.sqlite"},
    ]


def test_arrows_lead_from_launches_to_kernels(step_trace: Path, tmp_path: Path) -> None:
    """The launches at 20, 40, 350, 400 and 710 start what runs at 30, 130, 360, 560 and 720."""
    trace = opened([step_trace], tmp_path / "t.pftrace")
    pairs = trace.query(
        "SELECT a.ts AS launch, b.ts AS kernel FROM flow JOIN slice a ON a.id = slice_out "
        "JOIN slice b ON b.id = slice_in ORDER BY 1"
    )
    assert [(row["launch"], row["kernel"]) for row in pairs] == [
        (20, 30), (40, 130), (350, 360), (400, 560), (710, 720)
    ]  # fmt: skip


def test_a_label_has_the_full_name_beside_it(step_trace: Path, tmp_path: Path) -> None:
    """That of the GEMM is its own label."""
    trace = opened([step_trace], tmp_path / "t.pftrace")
    full = trace.query(
        "SELECT name, string_value AS full FROM slice JOIN args USING (arg_set_id) WHERE key = 'debug.full_name'"
    )
    assert full == [{"name": make_short_labels([GEMM, ADD])[ADD], "full": ADD}] * 3


def test_details_of_a_kernel(step_trace: Path, tmp_path: Path) -> None:
    """The GEMM of backward: launched at 350 on autograd's thread, started at 360."""
    trace = opened([step_trace], tmp_path / "t.pftrace")
    found = trace.query(
        "SELECT key, coalesce(string_value, int_value) AS value FROM args JOIN slice USING (arg_set_id) "
        "WHERE slice.ts = 360 AND key GLOB 'debug.*'"
    )
    assert {row["key"].removeprefix("debug."): row["value"] for row in found} == {
        "class": "matmul",
        "phase": "backward",
        "range_path": "step / backward",
        "precision": "fp32",
        "launch_latency_ns": 10,
        "instance": 0,
        "correlation_id": 3,
    }


@pytest.mark.parametrize("name", ["train_small256", "graphnode_small256", "graph_small256", "ddp2_small256"])
def test_counts_and_sums_are_those_of_the_table(name: str, real_capture: Callable[[str], Path], tmp_path: Path) -> None:
    path = real_capture(name)
    attributed = AttributedTrace(Trace.load(path))
    frame = operation_frame(attributed)
    sums = frame.groupby("class", observed=True)["duration_ns"].agg(["size", "sum"])
    trace = opened([path], tmp_path / "t.pftrace")
    check_sound(trace)
    found = trace.query(
        f"SELECT category, count(*) AS n, sum(dur) AS ns FROM ({SLICES}) WHERE track GLOB 'stream *' GROUP BY 1"
    )
    assert {row["category"]: (row["n"], row["ns"]) for row in found} == {
        str(kind): (row["size"], row["sum"]) for kind, row in sums.iterrows()
    }
    launched = trace.query("SELECT count(*) AS n FROM flow")[0]["n"]
    assert launched == frame["launch_ns"].notna().sum()
    paths = trace.query(
        f"SELECT string_value AS path, sum(dur) AS ns FROM ({SLICES}) JOIN args USING (arg_set_id) "
        "WHERE key = 'debug.range_path' GROUP BY 1"
    )
    known = frame[frame["range_path"] != ""].groupby("range_path", observed=True)["duration_ns"].sum()
    assert {row["path"]: row["ns"] for row in paths} == known.to_dict()
    idle = trace.query(f"SELECT process, sum(dur) / 1e6 AS ms FROM ({SLICES}) WHERE track = 'idle' GROUP BY 1")
    expected = [
        sum(float((one.end - one.start).sum()) for one in idle_of(attributed, process.global_pid)) / 1e6
        for process in find_processes(attributed.trace)
    ]
    assert sorted(row["ms"] for row in idle) == pytest.approx(sorted(expected))


def test_ranges_that_cross_lie_beside_each_other(tmp_path: Path) -> None:
    """start/end ranges may cross: [0, 100) and [50, 150)."""
    export = Export().range("one", 0, 100, kind=60).range("other", 50, 150, kind=60).range("inside", 60, 70)
    trace = opened([export.write(tmp_path / "t.sqlite")], tmp_path / "t.pftrace")
    check_sound(trace)
    assert [row[1:] for row in slices(trace)] == [
        ("one", "range", 0, 100, 0),
        ("other", "range", 50, 100, 0),
        ("inside", "range", 60, 10, 1),
    ]


def test_slices_that_touch_and_those_of_no_time(tmp_path: Path) -> None:
    """Of one moment, ends come first; a call that takes no time neither ends nor holds another slice."""
    export = Export()
    for start, end in ((10, 20), (20, 30), (30, 40)):
        export.range(f"{start}-{end}", start, end)
        export.kernel(ADD, start, start, end)
    for at in (20, 40):
        export.call("cudaStreamSynchronize", at)
    for row in export._rows["CUPTI_ACTIVITY_KIND_RUNTIME"]:
        row["end"] = row["start"]
    trace = opened([export.write(tmp_path / "t.sqlite")], tmp_path / "t.pftrace")
    check_sound(trace)
    assert [row[1:] for row in slices(trace, "category IN ('range', 'synchronize')")] == [
        ("10-20", "range", 10, 10, 0),
        ("20-30", "range", 20, 10, 0),
        ("cudaStreamSynchronize", "synchronize", 20, 0, 1),
        ("30-40", "range", 30, 10, 0),
        ("cudaStreamSynchronize", "synchronize", 40, 0, 0),
    ]
    assert [row[3:] for row in slices(trace, "track = 'stream 7'")] == [(10, 10, 0), (20, 10, 0), (30, 10, 0)]
    assert trace.query("SELECT count(*) AS n FROM flow") == [{"n": 3}]


def test_kernels_that_overlap_on_a_stream(tmp_path: Path) -> None:
    """As those of a CUDA graph do: each is a slice of its own duration."""
    export = Export().kernel(GEMM, 5, 10, 50).kernel(ADD, 6, 20, 30).kernel(ADD, 7, 40, 60)
    trace = opened([export.write(tmp_path / "t.sqlite")], tmp_path / "t.pftrace")
    check_sound(trace)
    found = slices(trace, "track GLOB 'stream 7*'")
    assert [(row[0], *row[3:]) for row in found] == [
        ("stream 7", 10, 40, 0), ("stream 7 (2)", 20, 10, 0), ("stream 7 (2)", 40, 20, 0)
    ]  # fmt: skip


def test_calls_that_neither_launch_nor_block_are_left_out(tmp_path: Path) -> None:
    """A synchronization is shown however short it is, an event is not, a module that takes 30 µs to load is."""
    export = Export().kernel(ADD, 5, 10, 50)
    export.call("cudaEventRecord_v3020", 100)
    export.call("cudaStreamSynchronize_v3020", 200)
    export.call("cuModuleLoadData", 300)
    export._rows["CUPTI_ACTIVITY_KIND_RUNTIME"][-1]["end"] = 30_300
    trace = opened([export.write(tmp_path / "t.sqlite")], tmp_path / "t.pftrace")
    assert [row[1:5] for row in slices(trace, "track = 'python3'")] == [
        ("cudaLaunchKernel", "launch", 5, 1),
        ("cudaStreamSynchronize", "synchronize", 200, 1),
        ("cuModuleLoadData", "other call", 300, 30_000),
    ]


def test_memory_is_a_counter(tmp_path: Path) -> None:
    """100 bytes are allocated at 10 and 50 at 20; the 100 are freed at 30."""
    export = training_step(Export())
    for start, size, operation in ((20, 50, 0), (10, 100, 0), (30, 100, 1)):
        export.add(
            "CUDA_GPU_MEMORY_USAGE_EVENTS", start=start, globalPid=global_pid(), bytes=size, memKind=2,
            memoryOperationType=operation,
        )  # fmt: skip
    trace = opened([export.write(tmp_path / "t.sqlite")], tmp_path / "t.pftrace")
    found = trace.query("SELECT ts, value, unit, name FROM counter JOIN counter_track t ON t.id = track_id ORDER BY ts")
    assert [(row["ts"], row["value"]) for row in found] == [(10, 100), (20, 150), (30, 50)]
    assert {(row["unit"], row["name"]) for row in found} == {("bytes", "GPU memory allocated")}


def test_times_before_the_session(tmp_path: Path) -> None:
    """Perfetto's times have no sign: the first one becomes 0."""
    export = Export().range("early", -500, -100).kernel(ADD, -400, -300, 200)
    trace = opened([export.write(tmp_path / "t.sqlite")], tmp_path / "t.pftrace")
    assert [row[1:5] for row in slices(trace, "track = 'python3'")] == [
        ("early", "range", 0, 400), ("cudaLaunchKernel", "launch", 100, 1)
    ]  # fmt: skip
    assert [row[3:5] for row in slices(trace, "track = 'stream 7'")] == [(200, 500)]


def test_operators_of_a_profiler_of_pytorch(tmp_path: Path) -> None:
    """They are no ranges there, and are shown, too: aten::mm [10, 30) us in a range [0, 50)."""
    kineto = Kineto().gpu().range("forward", 0, 50).operator("aten::mm", 10, 20)
    path = kineto.write(tmp_path / "t.pt.trace.json")
    trace = opened([path], tmp_path / "t.pftrace")
    assert [row[1:] for row in slices(trace, "category IN ('phase', 'operator')")] == [
        ("forward", "phase", 0, 50_000, 0), ("aten::mm", "operator", 10_000, 20_000, 1)
    ]  # fmt: skip


def test_a_program_on_the_cpu(tmp_path: Path) -> None:
    """Its operators stand for kernels; the device that they would run on is the CPU, and does not idle."""
    path = Path(shutil.copy(DATA / "cpu_train.pt.trace.json.gz", tmp_path))
    trace = opened([path], tmp_path / "t.pftrace")
    check_sound(trace)
    tracks = trace.query(f"SELECT DISTINCT track, parent FROM ({SLICES}) WHERE parent IS NOT NULL")
    assert tracks == [{"track": "stream 0", "parent": "CPU"}]


def ranks(folder: Path, offset: int) -> list[Path]:
    """Two ranks, the clock of the second one ahead by ``offset``; an all-reduce ends on both at once in every step."""
    pair = own_captures(2, offsets=(0, offset))
    for rank in pair:
        for step in range(6):
            at = step * 10_000
            rank.step(at, at + 9_000).kernel(at + 100, at + 2_000 + 500 * rank.number)
            rank.collective("all-reduce", at + 2_600 + 100 * rank.number, at + 5_000)
    return write(pair, folder)


@pytest.mark.parametrize("offset", [0, 3_000_000, -3_000_000])
def test_ranks_are_on_one_clock(tmp_path: Path, offset: int) -> None:
    trace = opened(ranks(tmp_path, offset), tmp_path / "t.pftrace")
    check_sound(trace)
    ends = trace.query(
        f"SELECT process, ts + dur AS at FROM ({SLICES}) WHERE category = 'communication' ORDER BY process, ts"
    )
    by_rank = [[row["at"] for row in ends if row["process"].startswith(f"rank {number}")] for number in (0, 1)]
    assert len(by_rank[0]) == 6
    assert by_rank[0] == by_rank[1]
    assert np.diff(by_rank[0]).tolist() == [10_000] * 5


def test_processes_of_one_id(tmp_path: Path) -> None:
    """Two captures of two machines may have a process of one ID, and a thread: each keeps its slices."""
    paths = []
    for name in ("one", "other"):
        export = training_step(Export().thread(AUTOGRAD, "pt_autograd_0"))
        paths.append(export.range(name, 2_000, 2_100).write(tmp_path / f"{name}.sqlite"))
    said: list[str] = []
    captures = align_captures([Capture(path, PhaseNames()) for path in paths], said.append)
    assert said == ["Not aligned by collectives, so each starts at its own time 0: one.sqlite, other.sqlite"]
    FORMATS["perfetto"].write(captures, tmp_path / "t.pftrace")
    trace = trace_processor(tmp_path / "t.pftrace")
    check_sound(trace)
    found = trace.query(f"SELECT process, count(*) AS n FROM ({SLICES}) GROUP BY 1 ORDER BY 1")
    assert [row["process"] for row in found] == ["one.sqlite", f"other.sqlite (pid {PID})"]
    assert found[0]["n"] == found[1]["n"]
    assert trace.query("SELECT count(DISTINCT utid) AS n FROM thread_track") == [{"n": 4}]
    assert trace.query("SELECT count(*) AS n FROM flow") == [{"n": 10}]


def test_a_capture_without_gpu_work(tmp_path: Path) -> None:
    path = Export().range("forward", 10, 20).write(tmp_path / "t.sqlite")
    trace = opened([path], tmp_path / "t.pftrace")
    assert [row[1:] for row in slices(trace)] == [("forward", "phase", 10, 10, 0)]
