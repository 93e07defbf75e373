"""Which occurrences of a phase are measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.facts import say_all
from nsys_analyzer.text import plain
from tests.support.export import ADD, AUTOGRAD, GEMM, Export, global_pid, training_step


def summary_of(export: Export, tmp_path: Path) -> CaptureSummary:
    (summary,) = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    return summary


def phase_counts(summary: CaptureSummary) -> dict[str, tuple[int, int, int]]:
    return {p.phase: (p.instances, p.warmup_instances, p.incomplete_instances) for p in summary.phases}


@pytest.mark.parametrize("name", ["warmup", "warm_up", "Warm-up 3"])
def test_instances_inside_warm_up_are_left_out_and_counted(tmp_path: Path, name: str) -> None:
    # Two steps in warm-up [0, 2000), three after it.
    export = Export().thread(AUTOGRAD, "pt_autograd_0").range(name, 0, 2000)
    for step in range(5):
        training_step(export, step * 1000)
    summary = summary_of(export, tmp_path)
    assert phase_counts(summary)["forward"] == (3, 2, 0)
    assert summary.coverage is not None
    # 5 kernels a step, all of them in phases, those of two steps in warm-up.
    assert (summary.coverage.in_phases, summary.coverage.in_warmup) == (25, 10)


def test_warm_up_of_another_thread_of_the_process_counts(tmp_path: Path) -> None:
    export = Export().range("warmup", 0, 1000, tid=101).range("forward", 10, 20).range("forward", 2000, 2010)
    assert phase_counts(summary_of(export.kernel(GEMM, 12, 30, 40), tmp_path))["forward"] == (1, 1, 0)


def test_a_phase_inside_itself_is_one_instance(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).range("forward pass", 10, 90).kernel(GEMM, 20, 30, 40)
    summary = summary_of(export, tmp_path)
    assert phase_counts(summary) == {"forward": (1, 0, 0)}


def test_a_phase_inside_another_is_counted_there_and_said(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).range("loss", 50, 90).kernel(GEMM, 20, 30, 40).kernel(ADD, 60, 70, 80)
    summary = summary_of(export, tmp_path)
    assert phase_counts(summary) == {"forward": (1, 0, 0)}
    assert summary.phases[0].kernels_per_instance == 2
    assert any("`loss` ranges lie inside `forward`" in plain(warning, "`") for warning in say_all(summary.warnings))


def test_a_pushed_phase_that_crosses_another_is_told_of(tmp_path: Path) -> None:
    # Twice `forward` [0, 60) µs ends inside `backward` [50, 100): as ranges that are started and ended (60) it may.
    def warnings(forward: tuple[int, int], kind: int = 59) -> list[str]:
        export = Export().kernel(GEMM, 20, 30, 40)
        for at in (0, 200_000):
            export.range("forward", at + forward[0], at + forward[1], kind=kind)
            export.range("backward", at + 50_000, at + 100_000)
        return [
            plain(warning, "`")
            for warning in say_all(summary_of(export, tmp_path).warnings)
            if "popped" in plain(warning)
        ]

    told = "2 `forward` ranges last into `backward`, which ranges that are pushed and popped cannot do. A pop "
    assert [warning.startswith(told) for warning in warnings((0, 60_000))] == [True]
    assert len(warnings((90_000, 120_000))) == 1  # `backward` ends inside `forward`
    for forward in ((0, 50_000), (0, 50_500), (0, 150_000), (60_000, 90_000)):  # apart, rounded, around it, inside
        assert not warnings(forward)
    assert not warnings((0, 60_000), kind=60)


def test_a_phase_without_an_end_is_no_measurement(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).kernel(GEMM, 20, 30, 40)
    export.range("forward", 200, None).kernel(GEMM, 220, 230, 240)
    summary = summary_of(export, tmp_path)
    assert summary.status == "partial"
    assert phase_counts(summary) == {"forward": (1, 0, 0)}
    assert any("`forward` has no end" in plain(warning, "`") for warning in say_all(summary.warnings))


def test_an_instance_whose_kernels_are_missing_is_no_measurement(tmp_path: Path) -> None:
    # The second forward launches a kernel that the capture lacks.
    export = Export().range("forward", 0, 100).kernel(GEMM, 20, 30, 40)
    export.range("forward", 200, 300).kernel(GEMM, 220, 230, 240)
    export.call("cudaLaunchKernel_v7000", 250)
    summary = summary_of(export, tmp_path)
    assert summary.status == "partial"
    assert phase_counts(summary) == {"forward": (1, 0, 1)}
    assert summary.coverage is not None
    assert summary.coverage.lost_launches == 1


def test_launches_while_a_graph_is_captured_are_not_missing(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100)
    export.call("cudaStreamBeginCapture_v10000", 10)
    export.call("cudaLaunchKernel_v7000", 20)
    export.call("cudaStreamEndCapture_v10000", 30)
    summary = summary_of(export.kernel(GEMM, 40, 50, 60), tmp_path)
    assert summary.status == "ok"
    assert phase_counts(summary) == {"forward": (1, 0, 0)}


def test_a_failed_allocation_with_nothing_after_it_is_out_of_memory(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).kernel(GEMM, 20, 30, 40)
    export.range("backward", 100, 200).kernel(GEMM, 110, 120, 130)
    export.call("cudaMalloc_v3020", 150, result=2)
    summary = summary_of(export, tmp_path)
    assert summary.status == "oom"
    assert phase_counts(summary) == {"forward": (1, 0, 0), "backward": (0, 0, 1)}


def test_an_allocation_that_succeeds_on_retry_is_not(tmp_path: Path) -> None:
    # The caching allocator frees its blocks and asks again.
    export = Export().range("forward", 0, 100)
    export.call("cudaMalloc_v3020", 10, result=2)
    export.call("cudaMalloc_v3020", 12)
    summary = summary_of(export.kernel(GEMM, 20, 30, 40), tmp_path)
    assert summary.status == "ok"
    assert phase_counts(summary) == {"forward": (1, 0, 0)}


def of_two(export: Export, tmp_path: Path) -> tuple[CaptureSummary, CaptureSummary]:
    """The summaries of processes 100 and 200."""
    first, second = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    return (first, second) if first.pid == 100 else (second, first)


def lost(summary: CaptureSummary) -> int:
    assert summary.coverage is not None
    return summary.coverage.lost_launches


def test_only_launches_within_a_capture_run_nothing(tmp_path: Path) -> None:
    # Process 100 captures a graph in [10, 30). Its launches at 5 and 40 lack their kernels, and the one of process
    # 200 at 20; the one at 20 was captured. Nothing ends what begins at 60: the launch at 70 lacks its kernel.
    export = Export().range("forward", 0, 100).kernel(GEMM, 80, 90, 95)
    export.range("forward", 0, 100, tid=200, pid=200).kernel(GEMM, 1, 2, 3, tid=200, pid=200)
    for api, at in (("cudaStreamBeginCapture_v10000", 10), ("cudaStreamEndCapture_v10000", 30)):
        export.call(api, at)
    for at in (5, 20, 40, 70):
        export.call("cudaLaunchKernel_v7000", at)
    export.call("cudaStreamBeginCapture_v10000", 60)
    export.call("cudaLaunchKernel_v7000", 20, tid=200, pid=200)
    first, second = of_two(export, tmp_path)
    assert (lost(first), lost(second)) == (3, 1)
    assert phase_counts(first) == phase_counts(second) == {"forward": (0, 0, 1)}


def test_warm_up_without_an_end_lasts_to_the_end_of_its_process(tmp_path: Path) -> None:
    # It starts at 500, with the second forward.
    export = Export().range("warmup", 500, None)
    for pid in (100, 200):
        for at in (0, 500, 700):
            export.range("forward", at, at + 50, tid=pid, pid=pid).kernel(
                GEMM, at + 5, at + 10, at + 20, tid=pid, pid=pid
            )
    first, second = of_two(export, tmp_path)
    assert phase_counts(first)["forward"] == (1, 2, 0)
    assert phase_counts(second)["forward"] == (3, 0, 0)


def test_a_phase_that_autograds_thread_alone_opens_is_an_instance(tmp_path: Path) -> None:
    export = Export().thread(AUTOGRAD, "pt_autograd_0").range("backward", 0, 100, tid=AUTOGRAD)
    assert phase_counts(summary_of(export.kernel(GEMM, 20, 30, 40, tid=AUTOGRAD), tmp_path)) == {"backward": (1, 0, 0)}


def test_steps_without_a_backward_are_apart_where_others_have_one(tmp_path: Path) -> None:
    # Process 100 trains in its first step and evaluates in the other two; process 200 only ever evaluates.
    export = Export()
    for pid in (100, 200):
        for at in (0, 1000, 2000):
            export.range("step", at, at + 500, tid=pid, pid=pid).kernel(
                GEMM, at + 5, at + 10, at + 20, tid=pid, pid=pid
            )
    export.range("backward", 100, 200).kernel(GEMM, 110, 120, 130)
    first, second = of_two(export, tmp_path)
    assert {p.phase: (p.instances, p.holds_backward) for p in first.phases} == {
        "backward": (1, True), "step": (1, True), "step without backward": (2, False),
    }  # fmt: skip
    assert phase_counts(second) == {"step": (3, 0, 0)}


def test_what_is_open_or_out_of_memory_in_one_process_is_so_in_it_alone(tmp_path: Path) -> None:
    # Process 100 leaves backward and warm-up open; process 200 fails to allocate at 300 and launches nothing more.
    export = Export().range("backward", 200, None).range("warmup", 900, None)
    for pid in (100, 200):
        export.range("forward", 0, 100, tid=pid, pid=pid).kernel(GEMM, 5, 10, 20, tid=pid, pid=pid)
    export.kernel(GEMM, 400, 410, 420)
    export.call("cudaMalloc_v3020", 300, tid=200, pid=200, result=2)
    export.call("cudaFree_v3020", 350, tid=200, pid=200)
    first, second = of_two(export, tmp_path)
    assert (first.status, second.status) == ("partial", "oom")
    attributed = AttributedTrace(Trace.load(tmp_path / "t.sqlite"))
    ours, other = global_pid(100), global_pid(200)
    assert [attributed.find_open_phases(one) for one in (ours, other)] == [("backward",), ()]
    assert [attributed.count_open_warmups(one) for one in (ours, other)] == [1, 0]
    assert [attributed.ran_out_of_memory(one) for one in (ours, other)] == [False, True]


def test_phases_inside_others(tmp_path: Path) -> None:
    # Process 100: two losses lie inside forward, a third one beside it; process 200: two forwards in turn.
    export = Export().range("forward", 0, 100).kernel(GEMM, 5, 10, 20)
    for start, end in ((10, 20), (90, 100), (150, 160)):
        export.range("loss", start, end)
    export.range("forward", 0, 100, tid=200, pid=200).range("forward", 100, 200, tid=200, pid=200)
    attributed = AttributedTrace(Trace.load(export.write(tmp_path / "t.sqlite")))
    ours, other = global_pid(100), global_pid(200)
    assert [attributed.count_nested_phases(one) for one in (ours, other)] == [{("loss", "forward"): 2}, {}]
