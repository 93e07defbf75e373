"""Each rule of attribution on a trace of a few rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.errors import MissingTableError
from nsys_analyzer.export.frame import COLUMNS, kernel_frame
from nsys_analyzer.trace.phase_names import PhaseNames
from tests.support.export import ADD, AUTOGRAD, GEMM, MAIN, Export, global_tid, training_step

OTHER_PID = 200


def kernels(export: Export, tmp_path: Path, *options: str) -> pd.DataFrame:
    return kernel_frame(Trace.load(export.write(tmp_path / "t.sqlite")), PhaseNames.parse(options))


def column(frame: pd.DataFrame, name: str) -> list[object]:
    return [None if pd.isna(value) else value for value in frame[name].tolist()]


def test_a_training_step(step_trace: Path) -> None:
    frame = Trace.load(step_trace).kernels
    assert list(frame.columns) == list(COLUMNS)
    assert column(frame, "phase") == ["forward", "forward", "backward", "backward", "optimizer"]
    assert column(frame, "how") == ["same thread"] * 2 + ["other thread"] * 2 + ["same thread"]
    assert column(frame, "range_path") == ["step / forward"] * 2 + ["step / backward"] * 2 + ["step / optimizer"]
    assert column(frame, "duration_ns") == [100, 20, 200, 40, 80]
    assert column(frame, "launch_tid") == [MAIN, MAIN, AUTOGRAD, AUTOGRAD, MAIN]


def test_the_launch_decides_not_the_gpu_time(tmp_path: Path) -> None:
    # Launched inside forward [0, 100) at 90, runs [150, 200) while backward [100, 300) is open.
    export = Export().range("forward", 0, 100).range("backward", 100, 300).kernel(GEMM, 90, 150, 200)
    assert column(kernels(export, tmp_path), "phase") == ["forward"]


def test_autograds_own_ranges_nest_below_the_inherited_stack(tmp_path: Path) -> None:
    export = Export().thread(AUTOGRAD, "pt_autograd_0").range("backward", 0, 100)
    export.range("aten::bmm, seq = 10271, op_id = 88447", 10, 20, tid=AUTOGRAD).kernel(GEMM, 15, 30, 40, tid=AUTOGRAD)
    assert column(kernels(export, tmp_path), "range_path") == ["backward / aten::bmm"]


def test_a_recomputed_forward_on_autograds_thread_belongs_to_backward(tmp_path: Path) -> None:
    # Activation checkpointing runs `forward` again, inside backward, on autograd's thread.
    export = Export().thread(AUTOGRAD, "pt_autograd_0")
    export.range("forward", 0, 50).kernel(GEMM, 10, 11, 12)
    export.range("backward", 50, 100).range("forward", 60, 80, tid=AUTOGRAD).kernel(GEMM, 70, 71, 72, tid=AUTOGRAD)
    frame = kernels(export, tmp_path)
    assert column(frame, "phase") == ["forward", "backward"]
    assert column(frame, "instance") == [0, 0]


def test_a_forward_inside_anothers_backward_is_recomputed_whatever_the_thread_is_called(tmp_path: Path) -> None:
    # The kernels on the second thread are launched at 70 and at 90: with `forward` open there, and with nothing open.
    export = Export().range("step", 0, 100).range("forward", 0, 50).kernel(GEMM, 10, 11, 12)
    export.range("backward", 50, 100).range("forward", 60, 80, tid=AUTOGRAD)
    export.kernel(GEMM, 70, 71, 72, tid=AUTOGRAD).kernel(ADD, 90, 91, 92, tid=AUTOGRAD)
    frame = kernels(export, tmp_path)
    assert column(frame, "phase") == ["forward", "backward", "backward"]
    assert column(frame, "range_path")[1:] == ["step / backward / forward", "step / backward"]
    attributed = AttributedTrace(Trace.load(tmp_path / "t.sqlite"))
    instances = attributed.instances
    assert sorted(instances.phases[code] for code in instances.phase) == ["backward", "forward", "step"]
    assert (
        attributed.instances_of_operations[1] == instances.phase.tolist().index(instances.phases.index("step"))
    ).all()


def test_a_phase_of_a_thread_without_steps_stays_and_is_part_of_the_step(tmp_path: Path) -> None:
    # A replica's thread runs `forward` while the main thread, in its step, is in `loss`.
    export = Export().range("step", 0, 100).range("loss", 0, 60).kernel(ADD, 5, 6, 7)
    export.range("forward", 10, 50, tid=AUTOGRAD).kernel(GEMM, 20, 21, 22, tid=AUTOGRAD)
    export.range("forward", 120, 150, tid=AUTOGRAD).kernel(GEMM, 130, 131, 132, tid=AUTOGRAD)
    assert column(kernels(export, tmp_path), "phase") == ["loss", "forward", "forward"]
    attributed = AttributedTrace(Trace.load(tmp_path / "t.sqlite"))
    assert (attributed.instances_of_operations[1] >= 0).tolist() == [True, True, False]  # no step is open at 130


def test_a_thread_without_a_name_inherits_too(tmp_path: Path) -> None:
    export = Export().range("backward", 0, 100).kernel(GEMM, 15, 30, 40, tid=AUTOGRAD)
    assert column(kernels(export, tmp_path), "how") == ["other thread"]


def test_ranges_that_name_no_phase_are_inherited_by_a_bare_thread(tmp_path: Path) -> None:
    export = Export().range("my model", 0, 100).kernel(GEMM, 15, 30, 40, tid=AUTOGRAD)
    frame = kernels(export, tmp_path)
    assert column(frame, "phase") == [None]
    assert column(frame, "range_path") == ["my model"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (("forward", 0, 100), ("backward", 5, 100), "backward"),
        (("backward", 0, 100), ("forward", 5, 100), "backward"),
        (("forward", 0, 100), ("optimizer", 5, 100), "optimizer"),
        (("optimizer", 0, 100), ("forward", 5, 100), "forward"),
        (("forward", 0, 100), ("forward", 5, 40), "forward"),
    ],
)
def test_of_several_threads_the_one_in_backward_else_the_last_opened(
    tmp_path: Path, first: tuple[str, int, int], second: tuple[str, int, int], expected: str
) -> None:
    export = Export().range(*first, tid=101).range(*second, tid=102).kernel(GEMM, 50, 60, 70, tid=AUTOGRAD)
    export.kernel(GEMM, 20, 60, 70, tid=AUTOGRAD)
    frame = kernels(export, tmp_path)
    assert column(frame, "phase")[1] == expected
    # At 20 both are open; at 50 the second forward of the last case is over.
    assert column(frame, "ambiguous") == [second[2] > 50, True]


def test_a_thread_with_a_phase_of_its_own_keeps_it(tmp_path: Path) -> None:
    export = Export().range("backward", 0, 100).range("optimizer", 0, 100, tid=101).kernel(GEMM, 50, 60, 70, tid=101)
    frame = kernels(export, tmp_path)
    assert column(frame, "phase") == ["optimizer"]
    assert column(frame, "ambiguous") == [False]


def test_correlation_ids_repeat_across_processes(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).range("backward", 0, 100, tid=OTHER_PID, pid=OTHER_PID)
    export.kernel(GEMM, 10, 20, 30, correlation=7)
    export.kernel(ADD, 11, 20, 30, tid=OTHER_PID, pid=OTHER_PID, correlation=7, device=1)
    frame = kernels(export, tmp_path)
    assert column(frame, "phase") == ["forward", "backward"]
    assert column(frame, "pid") == [100, OTHER_PID]


def test_no_process_inherits_from_another(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).kernel(GEMM, 10, 20, 30, tid=OTHER_PID, pid=OTHER_PID)
    assert column(kernels(export, tmp_path), "how") == ["none"]


def test_two_rows_of_one_pair_are_one_launch_the_earliest(tmp_path: Path) -> None:
    # cudaLaunchKernel at 10 in forward, the driver call inside it at 60 in backward: one launch, at 10.
    export = Export().range("forward", 0, 50).range("backward", 50, 100)
    export.call("cuLaunchKernel", 60, correlation=5)
    export.kernel(GEMM, 10, 70, 80, correlation=5)
    frame = kernels(export, tmp_path)
    assert column(frame, "launch_ns") == [10]
    assert column(frame, "phase") == ["forward"]


def test_a_kernel_without_a_launch_row_is_unattributed(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).kernel(GEMM, None, 20, 30).kernel(ADD, 10, 30, 40)
    frame = kernels(export, tmp_path)
    assert column(frame, "how") == ["none", "same thread"]
    assert column(frame, "launch_ns") == [None, 10]


def test_the_kernels_of_a_graph_replay(tmp_path: Path) -> None:
    export = Export().range("forward", 100, 200)
    launch = export.call("cudaGraphLaunch_v10000", 110)
    for node in (1, 2):
        export.kernel(GEMM, None, 120 + node * 10, 125 + node * 10, correlation=launch, node=node)
    frame = kernels(export, tmp_path)
    assert column(frame, "how") == ["graph", "graph"]
    assert column(frame, "phase") == ["forward", "forward"]


def test_a_graphs_nodes_keep_the_ranges_they_were_captured_in(tmp_path: Path) -> None:
    # Node 9 was captured inside softmax and instantiated as node 1 << 32, which nsys writes twice; the replay opens
    # `forward` alone.
    export = Export().range("warmup", 0, 90).range("forward", 5, 80).range("softmax", 10, 20)
    for at, node, original in ((12, 9, None), (84, 1 << 32, None), (85, 1 << 32, 9)):
        export.add(
            "CUDA_GRAPH_NODE_EVENTS", start=at, end=at, globalTid=global_tid(), graphNodeId=node,
            originalGraphNodeId=original,
        )  # fmt: skip
    export.range("forward", 100, 200)
    launch = export.call("cudaGraphLaunch_v10000", 110)
    export.kernel(GEMM, None, 120, 130, correlation=launch, node=1 << 32)
    frame = kernels(export, tmp_path)
    assert column(frame, "range_path") == ["forward / softmax"]
    assert column(frame, "warmup") == [False]


def test_start_end_ranges_and_imported_ranges_count(tmp_path: Path) -> None:
    export = Export()
    for number, kind in enumerate((59, 60, 70, 71)):
        export.range("forward", 100 * number, 100 * number + 50, kind=kind).kernel(GEMM, 100 * number + 10, 20, 30)
    assert column(kernels(export, tmp_path), "instance") == [0, 1, 2, 3]


def test_marks_are_no_ranges(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100, kind=34).kernel(GEMM, 10, 20, 30)
    assert column(kernels(export, tmp_path), "how") == ["none"]


def test_phases_by_option(tmp_path: Path) -> None:
    export = training_step(Export().thread(AUTOGRAD, "pt_autograd_0"))
    export.range("copy in", 960, 990).kernel(ADD, 970, 980, 985)
    frame = kernels(export, tmp_path, "data=copy in")
    assert column(frame, "phase")[-1] == "data"
    assert column(kernels(export, tmp_path), "phase")[-1] == "step"


def test_a_thread_with_a_range_of_its_own_inherits_phases_alone(tmp_path: Path) -> None:
    # `my model` names no phase, so that it is nothing to the thread in `loader`; a thread without ranges takes it.
    export = Export().range("my model", 0, 100).range("loader", 0, 90, tid=101)
    export.kernel(GEMM, 15, 30, 40, tid=101).kernel(GEMM, 16, 40, 50, tid=102)
    frame = kernels(export, tmp_path)
    assert column(frame, "range_path") == ["loader", "loader"]
    assert column(frame, "how") == ["same thread", "other thread"]
    assert column(frame, "launch_tid") == [101, 102]
    export = Export().range("loader", 0, 90, tid=101).range("my model", 5, 100).kernel(GEMM, 15, 30, 40, tid=101)
    assert column(kernels(export, tmp_path), "range_path") == ["loader"]
    # A step is inherited as the phases in it are.
    export = Export().range("step", 0, 100).range("loader", 5, 90, tid=101).kernel(GEMM, 15, 30, 40, tid=101)
    assert column(kernels(export, tmp_path), "range_path") == ["step / loader"]


def test_a_thread_in_no_phase_makes_nothing_ambiguous(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).range("loader", 0, 100, tid=101).kernel(GEMM, 15, 30, 40, tid=102)
    frame = kernels(export, tmp_path)
    assert column(frame, "range_path") == ["forward"]
    assert column(frame, "ambiguous") == [False]


def test_each_node_of_a_graph_has_the_ranges_of_its_own_capture(tmp_path: Path) -> None:
    # Node 1 was captured in scores, node 3 in softmax; the replay holds node 2, too, which nothing tells of, and 4.
    export = Export().range("forward", 0, 50).range("scores", 10, 20).range("softmax", 20, 30)
    for at, node in ((11, 1), (21, 3)):
        export.add("CUDA_GRAPH_NODE_EVENTS", start=at, end=at, globalTid=global_tid(), graphNodeId=node)
    export.range("forward", 100, 200)
    launch = export.call("cudaGraphLaunch_v10000", 110)
    for node in (1, 2, 3, 4):
        export.kernel(GEMM, None, 110 + node, 111 + node, correlation=launch, node=node)
    assert column(kernels(export, tmp_path), "range_path") == [
        "forward / scores", "forward", "forward / softmax", "forward",
    ]  # fmt: skip


def test_a_node_of_a_graph_within_a_graph_was_captured_where_the_first_was(tmp_path: Path) -> None:
    # 5 is a copy of 6, which is a copy of 7, which was captured in softmax.
    export = Export().range("forward", 0, 50).range("softmax", 20, 30)
    for at, node, original in ((25, 7, None), (60, 6, 7), (70, 5, 6)):
        export.add(
            "CUDA_GRAPH_NODE_EVENTS", start=at, end=at, globalTid=global_tid(), graphNodeId=node,
            originalGraphNodeId=original,
        )  # fmt: skip
    export.range("forward", 100, 200)
    launch = export.call("cudaGraphLaunch_v10000", 110)
    export.kernel(GEMM, None, 120, 130, correlation=launch, node=5)
    assert column(kernels(export, tmp_path), "range_path") == ["forward / softmax"]


def test_a_replay_in_no_range_of_the_capture_has_them_all_below_its_own(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 50).range("block", 10, 40).range("softmax", 20, 30)
    export.add("CUDA_GRAPH_NODE_EVENTS", start=25, end=25, globalTid=global_tid(), graphNodeId=3)
    launch = export.range("replay", 100, 200).call("cudaGraphLaunch_v10000", 110)
    export.kernel(GEMM, None, 120, 130, correlation=launch, node=3)
    assert column(kernels(export, tmp_path), "range_path") == ["replay / forward / block / softmax"]


def test_correlation_ids_in_any_order(tmp_path: Path) -> None:
    # The last kernel has the highest ID and no launch row.
    export = Export().range("forward", 0, 100).range("backward", 100, 200)
    for launch, correlation in ((10, 9), (110, 3), (20, 5)):
        export.kernel(GEMM, launch, 300 + launch, 301 + launch, correlation=correlation)
    export.kernel(ADD, None, 400, 410, correlation=12)
    frame = kernels(export, tmp_path)
    assert column(frame, "launch_ns") == [10, 110, 20, None]
    assert column(frame, "phase") == ["forward", "backward", "forward", None]


def test_instances_are_numbered_within_their_phase_and_process(tmp_path: Path) -> None:
    # Each process has two forwards and a backward between them; the last kernel lies outside.
    export = Export()
    for pid in (100, OTHER_PID):
        for at, name in ((0, "forward"), (100, "backward"), (200, "forward")):
            export.range(name, at, at + 50, tid=pid, pid=pid).kernel(GEMM, at + 5, at + 10, at + 20, tid=pid, pid=pid)
    frame = kernels(export.kernel(ADD, 300, 310, 320), tmp_path)
    assert column(frame, "instance") == [0, 0, 1, 0, 0, 1, None]
    assert column(frame, "warmup") == [False] * 7


def test_a_trace_without_kernels_has_no_table(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100)
    with pytest.raises(MissingTableError) as failure:
        kernels(export, tmp_path)
    assert failure.value.hint == "Capture again with --trace=cuda,nvtx"
