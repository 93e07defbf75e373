"""Tests traces of PyTorch's profiler: the conversion of each event, and machines without a GPU."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.kernels.classes import classify
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranks.runs import find_runs
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import NsysAnalyzerError, TraceError
from nsys_analyzer.export.frame import kernel_frame, operation_frame
from nsys_analyzer.inputs.traces import find_traces
from nsys_analyzer.trace.columns import COPY_KINDS
from nsys_analyzer.trace.kineto import find_own_stretches, is_operator, read_tables
from nsys_analyzer.trace.reader import write_sqlite
from nsys_analyzer.trace.sources import open_capture
from tests.conftest import DATA
from tests.support.cases import Capture, make_case_test
from tests.support.export import ADD, Export
from tests.support.kineto import AUTOGRAD, MAIN, PID, Kineto

VM = 1 << 48
GEMM = "ampere_sgemm_128x64_tn"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def loaded(trace: Kineto, tmp_path: Path) -> Trace:
    return Trace.load(trace.write(tmp_path / "t.json"))


def gpu_step() -> Kineto:
    """Forward [100, 200) launches a GEMM at 110 that runs [120, 150); backward [200, 400) one at 250 from autograd's
    thread that runs [260, 320), and a copy at 330 that runs [340, 345).
    """
    trace = Kineto(cuda_driver_version=13000, torch_version="2.9.0", driver_version="580.1").gpu()
    trace.thread(MAIN, f"thread {MAIN} (python)").thread(AUTOGRAD, f"thread {AUTOGRAD} (pt_autograd_0)")
    trace.thread(7, "stream 7 ", pid=0)
    trace.range("forward", 100, 100).operator("aten::mm", 105, 20).launch(1, 110).kernel(GEMM, 1, 120, 30)
    trace.range("backward", 200, 200).operator("aten::mm", 245, 20, tid=AUTOGRAD)
    trace.launch(2, 250, tid=AUTOGRAD, api="cuLaunchKernelEx").kernel(GEMM, 2, 260, 60, stream=9)
    trace.launch(3, 330, api="cudaMemcpyAsync").copy("Memcpy DtoH (Device -> Pinned)", 3, 340, 5, size=64)
    return trace


def local_threads(threads: np.ndarray[Any, Any]) -> list[int]:
    """Returns the numbers of threads within the process."""
    return [thread - (VM | PID << 24) for thread in threads.tolist()]


def ranges_of(capture: Capture) -> list[tuple[str, int, int]]:
    ranges = capture.trace.ranges
    return list(
        zip([ranges.names[code] for code in ranges.name], ranges.start.tolist(), ranges.end.tolist(), strict=True)
    )


def operations_of(capture: Capture) -> list[tuple[str, int, int]]:
    operations = capture.trace.operations
    names = [operations.names[code] for code in operations.name]
    return list(zip(names, operations.start.tolist(), operations.end.tolist(), strict=True))


test_kineto = make_case_test(
    "kineto",
    {
        "operations": lambda capture: capture.trace.operations,
        "operations with names": operations_of,
        "stretches of the graph": lambda capture: [
            (start, end) for name, start, end in operations_of(capture) if name == "CompiledFxGraph"
        ],
        "launches in order": lambda capture: sorted(capture.trace.launches.start.tolist()),
        "kinds of operations": lambda capture: [
            str(capture.trace.operations.describe(index)) for index in range(len(capture.trace.operations))
        ],
        "kinds of copies": lambda capture: [COPY_KINDS[kind] for kind in capture.trace.operations.copy],
        "processes of operations": lambda capture: {
            process - VM >> 24 for process in capture.trace.operations.process.tolist()
        },
        "launches": lambda capture: capture.trace.launches,
        "threads of launches": lambda capture: local_threads(capture.trace.launches.thread),
        "ranges": ranges_of,
        "threads of ranges": lambda capture: local_threads(capture.trace.ranges.thread),
        "operators": lambda capture: [capture.trace.operators.names[name] for name in capture.trace.operators.name],
        "threads of operators": lambda capture: local_threads(capture.trace.operators.thread),
        "kernels": lambda capture: {name: column.tolist() for name, column in kernel_frame(capture.trace).items()},
        "metadata": lambda capture: capture.trace.metadata,
        "thread names": lambda capture: set(capture.trace.metadata.thread_names.values()),
        "gpu": lambda capture: capture.trace.metadata.gpu(PID, 0),
        "collectives": lambda capture: capture.trace.nccl_calls,
        "memory": lambda capture: capture.trace.memory,
        "rows of the whole capture": lambda capture: {
            row.name: (row.launches_per_instance, row.ms_per_instance) for row in capture.summary.whole.kernels
        },
        "launches in a step": lambda capture: {row.name: row.launches for row in capture.summary.step.kernels},
        "diagnostics": lambda capture: [
            (message.severity, message.text.partition(".")[0]) for message in capture.trace.metadata.diagnostics
        ],
    },
)


# --- a trace with a GPU ------------------------------------------------------------------------------------------


def with_modules(trace: Kineto) -> Kineto:
    """With a call of a model at [101, 196), of a module in it at [103, 130), and of other Python code around them."""
    trace.add("python_function", "train.py(3): step", 90, 400).module("Step_0", 101, 95).module("Loss_1", 103, 27)
    return trace.add("python_function", "torch/nn/modules/module.py(1782): _call_impl", 102, 90)


def test_calls_of_modules_change_no_figure_of_a_phase(tmp_path: Path) -> None:
    plain, modules = (summarize(loaded(trace, tmp_path), "t")[0] for trace in (gpu_step(), with_modules(gpu_step())))
    assert modules.phases == plain.phases  # the events whose recording costs time among them


def test_two_ranks_of_the_profiler_have_sizes_and_bandwidth(tmp_path: Path) -> None:
    """In µs of a step: an all-reduce of 4 MB, on rank 0 [200, 400), of which it waits until 300, on rank 1 [300, 400).

    2 × 1/2 × 4 MB in 100 µs are 40 GB/s.
    """
    found: list[CaptureSummary] = []
    for rank in (0, 1):
        trace = Kineto(distributedInfo={"backend": "nccl", "rank": rank, "world_size": 2}).gpu()
        for step in range(3):
            at = 1000 * step
            begun = at + 200 + 100 * rank
            trace.range(f"ProfilerStep#{step}", at, 1000).launch(10 + step, at + 100)
            trace.collective("allreduce", 10 + step, begun, at + 400 - begun, 1_000_000, 1_000_000, "Float", 2)
        found += summarize(Trace.load(trace.write(tmp_path / f"{rank}.json")), str(rank))
    (run,) = find_runs(found)
    (row,) = run.collectives
    assert (row.kind, row.bytes, row.ranks) == ("all-reduce", 4_000_000, 2)
    assert row.bus_bytes_per_s == pytest.approx(40e9)
    assert [one.waiting_ms for one in run.ranks] == pytest.approx([0.1, 0])


def test_nanoseconds_of_times_since_1970_are_kept(tmp_path: Path) -> None:
    # A double of this size has steps of 0.25 us.
    text = Kineto().kernel(GEMM, 1, 111, 222).launch(1, 333).text()
    text = text.replace("111", "1700000000000000.123").replace("222", "0.007").replace("333", "1700000000000000.001")
    (tmp_path / "t.json").write_text(text)
    operations = Trace.load(tmp_path / "t.json").operations
    assert (operations.start.tolist(), operations.end.tolist()) == ([122], [129])


def test_several_processes_are_refused(tmp_path: Path) -> None:
    trace = Kineto().operator("aten::mm", 0, 1, pid=5).operator("aten::mm", 0, 1, pid=6)
    with pytest.raises(TraceError, match=r"t\.json contains 2 processes. Give one trace for each rank"):
        loaded(trace, tmp_path)


def test_ids_that_do_not_fit_are_folded_and_never_collide(tmp_path: Path) -> None:
    ids = [5, 1, (1 << 24) + 5, 1 << 31, "Trace 1", -3]
    trace = Kineto()
    for tid in ids:
        trace.operator("aten::mm", 0, 1, pid=5, tid=tid)
    threads = loaded(trace, tmp_path).operators.thread.tolist()
    assert len(set(threads)) == len(ids)
    assert threads[:2] == [VM | 5 << 24 | 5, VM | 5 << 24 | 1]
    assert all(0 <= thread - (VM | 5 << 24) < 1 << 24 for thread in threads)


@pytest.mark.parametrize("streams", [(94557849032768, 94557849099520), (2**31, 2**32), (-1, 2**63 - 1), (1, 2**64 - 1)])
def test_streams_are_addresses_of_64_bits(streams: tuple[int, int], tmp_path: Path) -> None:
    trace = Kineto().gpu("AMD Instinct MI300X")
    for number, stream in enumerate(streams, 1):
        trace.launch(number, 10 * number, api="hipLaunchKernel").kernel(GEMM, number, 50, 30, stream=stream)
    path = trace.write(tmp_path / "t.json")
    signed = [stream - 2**64 if stream >= 2**63 else stream for stream in streams]
    assert Trace.load(path).operations.stream.tolist() == signed
    frame = operation_frame(AttributedTrace(Trace.load(path)))
    assert frame["stream"].tolist() == signed
    write_sqlite(read_tables(path), tmp_path / "n.sqlite")
    assert Trace.load(tmp_path / "n.sqlite").operations.stream.tolist() == signed


def test_a_report_is_the_same_whatever_numbers_streams_have(tmp_path: Path) -> None:
    """Five steps of 10 ms: a matmul of 6 ms, and on another stream 20 kernels of 0.24 ms beneath it."""
    reports = []
    for main, side in ((7, 20), (94557849032768, 94557849099520)):
        trace = Kineto().gpu()
        for step in range(5):
            at, first = 10_000 * step, 100 * step + 1
            trace.range(f"ProfilerStep#{step}", at, 10_000).launch(first, at + 100)
            trace.kernel(GEMM, first, at + 200, 6000, stream=main)
            for number in range(20):
                trace.launch(first + 1 + number, at + 110 + 8 * number)
                trace.kernel(ADD, first + 1 + number, at + 210 + 250 * number, 240, stream=side)
            trace.launch(first + 50, at + 7000, api="cudaDeviceSynchronize")
        command = ["report", str(trace.write(tmp_path / "t.json")), "--format", "json", "-o", "-"]
        reports.append(json.loads(CliRunner().invoke(cli, command, catch_exceptions=False).stdout)["captures"])
    assert reports[0] == reports[1]
    (capture,) = reports[1]
    assert set(capture["step"]["busy_values_ms"]) == {6.0}
    assert "unfused_elementwise" not in [finding["id"] for finding in capture["findings"]]


# --- a trace without a GPU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("aten::mm", True),
        ("mkldnn::_linear_pointwise", True),
        ("aten::_softmax_backward_data", True),
        ("graph_0_cpp_fused_add_1", True),
        ("## Call CompiledFxGraph fknygjiei2yah ##", True),
        ("autograd::engine::evaluate_function: MmBackward0", False),
        ("torch::autograd::AccumulateGrad", False),
        ("MmBackward0", False),
        ("CompiledFunctionBackward", False),
        ("Torch-Compiled Region: 0/0", False),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", False),
        ("detach", False),
    ],
)
def test_what_is_an_operator(name: str, operator: bool) -> None:
    assert is_operator(name) is operator


@st.composite
def trees(draw: st.DrawFn, longest_overhang: int) -> list[tuple[int, int]]:
    """Intervals of one thread: nested, but for those that outlive their parent by an overhang."""

    def inside(start: int, end: int, depth: int) -> Iterator[tuple[int, int]]:
        cuts = sorted(draw(st.lists(st.integers(start, end), max_size=6)))
        for left, right in zip(cuts[::2], cuts[1::2], strict=False):
            yield left, right + draw(st.integers(0, longest_overhang))
            if depth:
                yield from inside(left, right, depth - 1)

    return sorted(inside(0, draw(st.integers(0, 200)), 3), key=lambda one: (one[0], -one[1]))


@given(trees(longest_overhang=2))
def test_stretches_are_disjoint_and_lie_within_the_operators(intervals: list[tuple[int, int]]) -> None:
    found = find_own_stretches(intervals)
    assert len(found) == len(intervals)
    for (start, end), own in zip(intervals, found, strict=True):
        assert all(start <= left < right <= end for left, right in own)
    laid = sorted(one for own in found for one in own)
    assert all(left[1] <= right[0] for left, right in pairwise(laid))


@given(trees(longest_overhang=0))
def test_own_times_add_up_to_the_time_in_which_any_operator_runs(intervals: list[tuple[int, int]]) -> None:
    covered = {moment for start, end in intervals for moment in range(start, end)}
    assert sum(right - left for own in find_own_stretches(intervals) for left, right in own) == len(covered)


# --- a real trace, by the recorder: one training step on the CPU, d_model 256, 2 layers, batch 4 of 64 tokens ----


@pytest.fixture
def cpu_train(tmp_path: Path) -> Path:
    source = DATA / "cpu_train.pt.trace.json.gz"
    (tmp_path / source.name).write_bytes(source.read_bytes())
    return tmp_path / source.name


def test_matmuls_of_a_real_step_are_counted_right(cpu_train: Path) -> None:
    (summary,) = summarize(Trace.load(cpu_train), "cpu")

    def matmuls(phase: str) -> float:
        found = summary.phase(phase)
        assert found
        return sum(row.launches_per_instance for row in found.kernels if row.name in ("aten::mm", "aten::bmm"))

    # 9 matmuls in each of 2 layers, and the head; each has two in backward.
    assert matmuls("forward") == 9 * 2 + 1
    assert matmuls("backward") == 2 * (9 * 2 + 1)
    assert matmuls("optimizer") == 0


def test_classes_of_a_real_step_are_known(cpu_train: Path) -> None:
    trace = Trace.load(cpu_train)
    operations = trace.operations
    durations = dict.fromkeys(operations.names, 0)
    for code, duration in zip(operations.name.tolist(), (operations.end - operations.start).tolist(), strict=True):
        durations[operations.names[code]] += duration
    unknown = sum(duration for name, duration in durations.items() if classify(name) == "other")
    assert unknown < 0.02 * sum(durations.values())


def test_a_real_step_adds_up(cpu_train: Path) -> None:
    (summary,) = summarize(Trace.load(cpu_train), "cpu")
    step = summary.phase("step")
    assert step
    assert step.kernel_time_ms.mean <= step.wall_ms.mean
    phases = [summary.phase(name) for name in ("forward", "loss", "backward", "optimizer")]
    assert sum(phase.kernel_time_ms.mean for phase in phases if phase) == pytest.approx(step.kernel_time_ms.mean)
    backward = summary.phase("backward")
    assert backward
    assert backward.kernel_time_ms.mean > 0.8 * backward.wall_ms.mean


# --- what is no such trace ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"no json", "is not JSON"),
        (Kineto().operator("aten::mm", 0, 1).text().encode()[:-30], "is not JSON, or only a part of it"),
        (gzip.compress(gpu_step().text().encode())[:-50], "is damaged or truncated"),
        (b"\x1f\x8bgarbage", "is damaged or truncated"),
        (b"[1, 2]", "no events of PyTorch's profiler of 1.8 or later: "),
        # torch.autograd.profiler wrote no category before.
        (b'[{"ph": "X", "name": "aten::mm", "pid": "CPU functions", "ts": 1, "dur": 2}]', "profiler of 1.8 or later"),
        (Kineto().operator("aten::mm", 0, 1).array().encode()[:-9], "is not JSON, or only a part of it"),
        (b'{"captures": []}', "it has no traceEvents"),
        (b'{"traceEvents": {}}', "it has no traceEvents"),
        (b'{"traceEvents": [{"ph": "X", "cat": "toplevel", "name": "a", "ts": 1}]}', "no events of PyTorch's profiler"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a"}]}', "profiler of 1.8 or later: "),
        (Kineto().add("xpu_runtime", "enqueue", 0, 1).text().encode(), r"from an unsupported device \(xpu_runtime\)"),
        (Kineto().add("mtia_ccp_events", "fc", 0, 1).text().encode(), r"unsupported device \(mtia_ccp_events\)"),
        (Kineto().range("forward", 0, 1).text().encode(), "neither operators nor kernels"),
    ],
)
def test_bad_input_is_one_clear_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        open_capture(path)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [path]


# --- in the commands -----------------------------------------------------------------------------------------------


def test_a_folder_holds_each_trace_once_and_no_other_json(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.pt.trace.json", "c.pt.trace.json.gz", "d10.json", "d2.json"):
        gpu_step().write(tmp_path / name)
    # As HTA writes them; a report; an execution trace; what cannot be looked into.
    (tmp_path / "e.json").write_text('{"distributedInfo": {"rank": 0},\n  "traceEvents": [')
    (tmp_path / "report.json").write_text('{"schema_version": 1, "captures": []}')
    (tmp_path / "et.json").write_text('{"schema": "1.1.0-chakra.0.0.4", "nodes": []}')
    (tmp_path / "f.json").mkdir()
    os.mkfifo(tmp_path / "g.json")
    found = [path.name for path in find_traces([tmp_path])]
    assert found == ["a.json.gz", "b.pt.trace.json", "c.pt.trace.json.gz", "d2.json", "d10.json", "e.json"]


def test_an_export_of_nsys_of_that_name_is_another_capture(tmp_path: Path) -> None:
    gpu_step().write(tmp_path / "run.json.gz")
    (tmp_path / "run.nsys-rep").write_bytes(b"report")
    export = Export().kernel(GEMM, 1, 2, 3).write(tmp_path / "run.sqlite")
    assert [path.name for path in find_traces([tmp_path])] == ["run.json.gz", "run.sqlite"]
    os.utime(export, (0, 0))
    assert [path.name for path in find_traces([tmp_path])] == ["run.json.gz", "run.nsys-rep"]


@pytest.mark.parametrize("command", ["report", "kernels", "info"])
def test_commands_open_a_trace(command: str, cpu_train: Path) -> None:
    options = ["-o", "-"] if command == "report" else []
    result = CliRunner().invoke(cli, [command, str(cpu_train), *options], catch_exceptions=False)
    assert result.exit_code == 0
    assert {"report": "# cpu_train", "kernels": "aten::mm", "info": "NVTX_EVENTS: 14"}[command] in result.output


@pytest.mark.parametrize("name", ["t.json.gz", "T.JSON.GZ", "t.pt.trace.json"])
def test_a_report_is_not_written_over_a_trace(name: str, tmp_path: Path) -> None:
    trace = gpu_step().write(tmp_path / "t.json.gz")
    before = trace.read_bytes()
    with pytest.raises(NsysAnalyzerError, match=r"has the name of an input|ends in \.gz"):
        CliRunner().invoke(cli, ["report", str(trace), "-o", str(tmp_path / name)], catch_exceptions=False)
    assert trace.read_bytes() == before
