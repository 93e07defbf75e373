"""Traces of PyTorch's profiler: what becomes of each event, and of a machine without a GPU."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.kernels.classes import classify
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranks.join import find_runs
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


# --- a trace with a GPU ------------------------------------------------------------------------------------------


def test_every_gpu_operation_has_its_times_place_and_launch(tmp_path: Path) -> None:
    trace = loaded(gpu_step(), tmp_path)
    operations = trace.operations
    # Times from the first event, forward at 100 us: the GEMM at 120 us starts at 20 us = 20,000 ns.
    assert operations.start.tolist() == [20_000, 160_000, 240_000]
    assert operations.end.tolist() == [50_000, 220_000, 245_000]
    assert operations.kind.tolist() == [0, 0, 1]
    assert operations.stream.tolist() == [7, 9, 7]
    assert operations.correlation.tolist() == [1, 2, 3]
    assert operations.process.tolist() == [VM | PID << 24] * 3
    assert operations.names == (GEMM,)
    assert trace.launches.start.tolist() == [10_000, 150_000, 230_000]
    assert trace.launches.thread.tolist() == [VM | PID << 24 | tid for tid in (MAIN, AUTOGRAD, MAIN)]


def test_only_annotations_of_threads_are_ranges(tmp_path: Path) -> None:
    trace = loaded(gpu_step().add("python_function", "train.py(3): step", 90, 400), tmp_path)
    assert [trace.ranges.names[code] for code in trace.ranges.name] == ["forward", "backward"]
    assert trace.ranges.end.tolist() == [100_000, 300_000]


def with_modules(trace: Kineto) -> Kineto:
    """With a call of a model at [101, 196), of a module in it at [103, 130), and of other Python code around them."""
    trace.add("python_function", "train.py(3): step", 90, 400).module("Step_0", 101, 95).module("Loss_1", 103, 27)
    return trace.add("python_function", "torch/nn/modules/module.py(1782): _call_impl", 102, 90)


def test_calls_of_modules_are_ranges_of_their_thread(tmp_path: Path) -> None:
    ranges = loaded(with_modules(gpu_step()), tmp_path).ranges
    columns = (ranges.name.tolist(), ranges.start.tolist(), ranges.end.tolist())
    # Times from the first event that is kept, forward at 100 us.
    assert [(ranges.names[code], start, end) for code, start, end in zip(*columns, strict=True)] == [
        ("forward", 0, 100_000),
        ("backward", 100_000, 300_000),
        ("nn.Module: Step_0", 1_000, 96_000),
        ("nn.Module: Loss_1", 3_000, 30_000),
    ]
    assert set(ranges.thread.tolist()) == {VM | PID << 24 | MAIN}


def test_calls_of_modules_lie_on_the_path_of_a_kernel_and_root_calls_are_passes(tmp_path: Path) -> None:
    frame = kernel_frame(loaded(with_modules(gpu_step()), tmp_path))
    assert frame["range_path"].tolist() == ["forward / nn.Module: Step_0 / nn.Module: Loss_1", "backward"]
    trace = Kineto().gpu().module("Step_0", 0, 100).operator("aten::mm", 5, 20).launch(1, 10).kernel(GEMM, 1, 15, 4)
    trace.module("Warmup_0", 200, 90).launch(2, 210).kernel(GEMM, 2, 220, 4).launch(3, 300).kernel(GEMM, 3, 310, 4)
    (summary,) = summarize(loaded(trace, tmp_path), "t")
    assert summary.coverage is not None
    # Two of three kernels are launched in calls of models, whatever these are called, one pass; none is in warm-up.
    assert (summary.coverage.attributed, summary.coverage.in_phases, summary.coverage.in_warmup) == (2, 2, 0)
    assert [(phase.phase, phase.instances) for phase in summary.phases if phase.phase != "step"] == [("forward", 1)]


def test_calls_of_modules_change_no_figure_of_a_phase(tmp_path: Path) -> None:
    plain, modules = (summarize(loaded(trace, tmp_path), "t")[0] for trace in (gpu_step(), with_modules(gpu_step())))
    assert modules.phases == plain.phases  # the events whose recording costs time among them


def test_backward_is_what_autograds_thread_launched(tmp_path: Path) -> None:
    (summary,) = summarize(loaded(gpu_step(), tmp_path), "t")
    backward = summary.phase("backward")
    assert backward
    assert backward.kernel_time_ms.mean == pytest.approx(60e-3)  # [260, 320) us


def test_the_conditions_are_those_that_the_trace_tells(tmp_path: Path) -> None:
    metadata = loaded(gpu_step(), tmp_path).metadata
    assert (metadata.profiler, metadata.profiler_version) == ("torch", "2.9.0")
    assert (metadata.runtime, metadata.driver) == ("13.0", "580.1")
    gpu = metadata.gpu(PID, 0)
    assert gpu
    assert (gpu.name, gpu.memory_bytes, gpu.sm_count) == ("NVIDIA H100", 80 << 30, 132)
    assert set(metadata.thread_names.values()) == {"python", "pt_autograd_0"}


def test_copies_and_fills_keep_their_size_and_kind(tmp_path: Path) -> None:
    trace = Kineto().launch(1, 0).copy("Memcpy HtoD (Pageable -> Device)", 1, 5, 1, size=4096)
    trace.launch(2, 10).copy("Memset (Device)", 2, 15, 1, size=512).copy("Memcpy PtoP (Device -> Device)", 3, 20, 1, 8)
    operations = loaded(trace, tmp_path).operations
    assert [operations.describe(index) for index in range(3)] == ["memcpy", "memcpy", "memset"]
    assert operations.size.tolist() == [4096, 8, 512]
    assert [COPY_KINDS[kind] for kind in operations.copy] == ["pageable to device", "other", "other"]


#: Of a collective: its name, elements that a rank puts in and gets out, their type, ranks, and the message in bytes.
COLLECTIVES: tuple[tuple[str, int, int, str, int, int], ...] = (
    ("allreduce", 1000, 1000, "Float", 2, 4000),
    ("broadcast", 1000, 1000, "Byte", 2, 1000),
    ("_allgather_base", 1000, 4000, "BFloat16", 4, 2000),  # what one rank puts in
    ("_reduce_scatter_base", 4000, 1000, "Double", 4, 8000),  # what one rank gets
    ("gather", 1000, 0, "Float", 4, 4000),  # on a rank that gets nothing
    ("all_to_allv", 4000, 4000, "Half", 4, 2000),  # to each of four
    ("allreduce", 1000, 1000, "Quaternion", 2, -1),
    ("allreduce", 0, 0, "Float", 2, -1),
)


def noted(collective: tuple[str, int, int, str, int, int]) -> dict[str, Any]:
    """The arguments of a collective's kernel."""
    names = "Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size"
    return {**dict(zip(names, collective, strict=False)), "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_keeps_its_message(collective: tuple[str, int, int, str, int, int], tmp_path: Path) -> None:
    trace = gpu_step().launch(7, 390, api="cudaLaunchKernelExC")
    trace.kernel("ncclDevKernel_Any()", 7, 392, 5, stream=20, **noted(collective))
    calls = loaded(trace, tmp_path).nccl_calls
    name, *_, ranks, size = collective
    assert (calls.names, calls.bytes.tolist(), calls.ranks.tolist()) == ((name,), [size], [ranks])
    assert calls.start.tolist() == [290_000]  # its launch at 390 us, 290 after the first event


def test_a_graph_says_nothing_of_each_of_its_collectives(tmp_path: Path) -> None:
    """Two kernels of one launch: nothing tells in which order what they note belongs to them."""
    trace = gpu_step().launch(7, 390, api="cudaGraphLaunch")
    for start in (392, 394):
        trace.kernel("ncclDevKernel_Any()", 7, start, 1, stream=20, **noted(COLLECTIVES[0]))
    assert not len(loaded(trace, tmp_path).nccl_calls)


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
            all_reduce = noted(("allreduce", 1_000_000, 1_000_000, "Float", 2, 0))
            trace.kernel("ncclDevKernel_AllReduce()", 10 + step, begun, at + 400 - begun, stream=20, **all_reduce)
        found += summarize(Trace.load(trace.write(tmp_path / f"{rank}.json")), str(rank))
    (run,) = find_runs(found)
    (row,) = run.collectives
    assert (row.kind, row.bytes, row.ranks) == ("all-reduce", 4_000_000, 2)
    assert row.bus_bytes_per_s == pytest.approx(40e9)
    assert [one.waiting_ms for one in run.ranks] == pytest.approx([0.1, 0])


def test_kernels_of_a_graph_share_the_launch_of_its_replay(tmp_path: Path) -> None:
    trace = Kineto().launch(9, 0, api="cudaGraphLaunch")
    for node in (1, 2):
        trace.kernel(GEMM, 9, 10 * node, 5, **{"graph id": 4, "graph node id": (4 << 32) + node})
    operations = loaded(trace, tmp_path).operations
    assert operations.correlation.tolist() == [9, 9]
    assert operations.graph_node.tolist() == [(4 << 32) + 1, (4 << 32) + 2]


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


def test_memory_events_tell_allocations_from_releases(tmp_path: Path) -> None:
    trace = gpu_step().memory(512, 130, device=0, allocated=512).memory(-512, 140, device=0, allocated=0)
    trace.memory(99, 150, device=-1, allocated=99)  # the host's: no memory of a GPU
    memory = loaded(trace, tmp_path).memory
    assert memory
    assert (memory.bytes.tolist(), memory.alive.tolist()) == ([512, -512], [512, 0])


@pytest.mark.parametrize("thread", [MAIN, str(MAIN)])
def test_categories_in_capitals_are_read(thread: Any, tmp_path: Path) -> None:
    """As PyTorch up to 1.12 wrote them: ranges are operators there, a stream's thread and other threads are texts."""
    trace = Kineto().add("Operator", "ProfilerStep#5", 90, 100, tid=thread)
    trace.add("Operator", "aten::detach_", 100, 9, tid=thread).add("Operator", "detach_", 101, 2, tid=thread)
    trace.add("Operator", "AddmmBackward", 120, 9, tid=thread)
    trace.add("Runtime", "cudaLaunchKernel", 121, 1, tid=thread, correlation=1)
    trace.add("Kernel", GEMM, 130, 5, 0, "stream 7", device=0, stream=7, correlation=1)
    trace.add("Memcpy", "Memcpy HtoD (Pageable -> Device)", 140, 5, 0, "stream 7", stream=7, bytes=64)
    trace.add("Memset", "Memset (Device)", 150, 5, 0, "stream 7", stream=7, bytes=8)
    found = loaded(trace, tmp_path)
    assert found.operations.kind.tolist() == [0, 1, 2]
    assert found.operations.stream.tolist() == [7, 7, 7]
    assert [found.ranges.names[name] for name in found.ranges.name] == ["ProfilerStep#5"]
    operators = found.operators
    assert [operators.names[name] for name in operators.name] == ["aten::detach_", "detach_", "AddmmBackward"]
    assert {*operators.thread.tolist(), *found.launches.thread.tolist()} == {VM | PID << 24 | MAIN}


# --- a trace without a GPU ---------------------------------------------------------------------------------------


def test_an_operator_is_a_kernel_by_its_own_time(tmp_path: Path) -> None:
    trace = Kineto().range("forward", 0, 100)
    # linear [10, 90) calls mm [20, 70): its own time is 10 + 20 = 30 us, in one launch.
    trace.operator("aten::linear", 10, 80).operator("MmBackward0", 15, 60).operator("aten::mm", 20, 50)
    found = loaded(trace, tmp_path)
    operations = found.operations
    named = [operations.names[code] for code in operations.name]
    spans = list(zip(named, operations.start.tolist(), operations.end.tolist(), strict=True))
    assert spans == [
        ("aten::linear", 10_000, 20_000), ("aten::linear", 70_000, 90_000), ("aten::mm", 20_000, 70_000),
    ]  # fmt: skip
    assert operations.continues.tolist() == [0, 1, 0]
    (summary,) = summarize(found, "cpu")
    assert summary.whole is not None
    rows = {row.name: (row.launches_per_instance, row.ms_per_instance) for row in summary.whole.kernels}
    assert rows == {"aten::mm": (1, 0.05), "aten::linear": (1, 0.03)}
    assert summary.step is not None
    assert {row.name: row.launches for row in summary.step.kernels} == {"aten::mm": 1, "aten::linear": 1}
    assert found.launches.start.tolist() == [10_000, 20_000]
    gpu = found.metadata.gpu(PID, 0)
    assert gpu
    assert (gpu.name, gpu.memory_bytes, gpu.sm_count) == ("CPU", 0, 0)


def test_compiled_code_is_a_row_for_each_of_its_stretches(tmp_path: Path) -> None:
    # The graph [0, 100) calls matmuls at [20, 50) and [60, 80): 20 + 10 + 20 us are its own, and none is lost.
    trace = Kineto().operator("## Call CompiledFxGraph fknygjiei2yah ##", 0, 100)
    trace.operator("extern_kernels::mm", 20, 30).operator("aten::mm", 60, 20)
    found = loaded(trace, tmp_path)
    operations = found.operations
    of_graph = [operations.names[code] == "CompiledFxGraph" for code in operations.name]
    assert operations.start[of_graph].tolist() == [0, 50_000, 80_000]
    assert operations.end[of_graph].tolist() == [20_000, 60_000, 100_000]
    assert sorted(found.launches.start.tolist()) == [0, 20_000, 50_000, 60_000, 80_000]
    assert found.metadata.diagnostics == ()


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        (Kineto().operator("aten::linear", 10, 80).operator("aten::mm", 20, 50), []),
        (Kineto().gpu().operator("aten::mm", 0, 1), ["The machine has a GPU, but the trace contains no GPU work"]),
    ],
)
def test_what_the_times_of_a_cpu_lack_is_told(trace: Kineto, told: list[str], tmp_path: Path) -> None:
    diagnostics = loaded(trace, tmp_path).metadata.diagnostics
    assert [message.text.startswith(start) for message, start in zip(diagnostics, told, strict=True)] == [True] * len(
        told
    )
    assert {message.severity for message in diagnostics} <= {2}


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
