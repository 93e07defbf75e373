"""Each rule of attribution on a trace of a few rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.frame import COLUMNS, kernel_frame
from nsys_analyzer.analysis.phases import PhaseNames
from tests.export import ADD, AUTOGRAD, GEMM, MAIN, Export, training_step

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
            "CUDA_GRAPH_NODE_EVENTS", start=at, end=at, globalTid=(1 << 48) | (100 << 24) | MAIN, graphNodeId=node,
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
