"""Verdicts by unprofiled time, bounds on them under the profiler, and what the profiler is estimated to cost."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.profiler_cost import API_CALL, NVTX_RANGE, OPERATOR, ProfilerCost
from nsys_analyzer.analysis.summary.complete import complete_captures, find_busy_share
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import BusyShare, CaptureSummary, Unprofiled
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.renderers.json_report import report_data
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.report.sections import build_report
from tests.support.export import AUTOGRAD, GEMM, MAIN, Export, global_tid, shared_copy
from tests.support.kineto import Kineto

US, MS = 1_000, 1_000_000
SWEEP = Path(__file__).parents[1] / "examples/sweep"


def forward(busy_ms: float, calls: int = 1, ranges: int = 0) -> Export:
    """A forward of 10 ms: one kernel, so many API calls and so many ranges inside it."""
    export = Export().gpu().range("forward", 0, 10 * MS)
    export.kernel(GEMM, 1_000, 2_000, 2_000 + int(busy_ms * MS))
    for number in range(calls - 1):
        export.call("cudaEventRecord_v3020", 3_000 + number)
    for number in range(ranges):
        export.range("aten::mm", 4_000 + number, 5_000 + number)
    return export


def summary_of(export: Export, tmp_path: Path) -> CaptureSummary:
    (summary,) = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    return summary


def timed(summary: CaptureSummary, **ms: float) -> CaptureSummary:
    return replace(summary, unprofiled=Unprofiled("ok", phases={name: Stats(3, mean) for name, mean in ms.items()}))


def share_of(summary: CaptureSummary, name: str = "forward") -> BusyShare:
    phase = summary.phase(name)
    assert phase is not None
    share = find_busy_share(summary, phase)
    assert share is not None
    return share


def cost_of(summary: CaptureSummary, name: str = "forward") -> ProfilerCost:
    phase = summary.phase(name)
    assert phase is not None
    assert phase.profiler_cost is not None
    return phase.profiler_cost


def shown_of(summary: CaptureSummary, name: str = "forward") -> str:
    """What the report's table of times calls the phase, in its last column."""
    text = render(build_report(Evidence(complete_captures([summary]))), {}).partition("## How long")[2]
    (row,) = (line for line in text.partition("\n## ")[0].splitlines() if line.startswith(f"| {name} "))
    return row.split("|")[-2].strip()


@pytest.mark.parametrize(
    ("unprofiled_ms", "verdict"),
    # 6 ms of work: 92.3, 80.0 and 68.2 %; under the profiler it is 60 % of 10 ms, whatever the unprofiled time says.
    [(6.5, "GPU-bound"), (7.5, "neither"), (8.8, "GPU waits")],
)
def test_a_verdict_rests_on_the_unprofiled_time(tmp_path: Path, unprofiled_ms: float, verdict: str) -> None:
    summary = timed(summary_of(forward(6), tmp_path), forward=unprofiled_ms)
    share = share_of(summary)
    assert share.unprofiled
    assert share.low == share.high == pytest.approx(6 / unprofiled_ms)
    assert share.verdict == shown_of(summary) == verdict


def test_an_unprofiled_time_below_gpu_busy_is_of_other_work(tmp_path: Path) -> None:
    summary = timed(summary_of(forward(6), tmp_path), forward=5.0)
    assert not share_of(summary).unprofiled


def test_under_the_profiler_there_are_two_bounds(tmp_path: Path) -> None:
    # 500 calls of 5.2 us and 100 ranges of 5.2 us: 3.12 ms at most. 3 of 10 ms to 3 of 6.88 ms: 43.6 %.
    summary = summary_of(forward(3, calls=500, ranges=100), tmp_path)
    share = share_of(summary)
    cost = cost_of(summary)
    assert cost.low_ms == pytest.approx(500 * API_CALL.low_us / 1e3 + 100 * NVTX_RANGE.low_us / 1e3)
    assert cost.high_ms == pytest.approx(3.12)
    assert (share.low, share.high) == (pytest.approx(0.3), pytest.approx(3 / 6.88))
    assert share.verdict == "GPU waits"
    assert shown_of(summary) == "GPU waits"
    text = render(build_report(Evidence(complete_captures([summary]))), {}).replace("\xa0", " ")
    assert "| 30.0 % | 43.6 % |" in re.sub(" +", " ", text)


def test_a_verdict_that_the_profiler_could_flip_is_none(tmp_path: Path) -> None:
    # 1,000 calls of 5.2 us: 5 of 10 ms to 5 of 4.8 ms, more than it is idle: anything up to all of the time.
    summary = summary_of(forward(5, calls=1_000), tmp_path)
    share = share_of(summary)
    assert (share.low, share.high, share.verdict) == (pytest.approx(0.5), 1.0, "undecided")
    assert shown_of(summary) == "undecided"


def test_a_gpu_that_is_busy_even_under_the_profiler_is_bound(tmp_path: Path) -> None:
    summary = summary_of(forward(9.5, calls=500), tmp_path)
    assert share_of(summary).verdict == "GPU-bound"
    assert shown_of(summary) == "GPU-bound"


def test_a_slower_cpu_pays_more_for_each_call(tmp_path: Path) -> None:
    # Launches of 7.8 us, twice those where the costs were measured: 10 calls cost 104 us at most.
    export = Export().gpu().range("forward", 0, 10 * MS)
    for number in range(10):
        export.kernel(GEMM, 1_000 + number, number * MS, number * MS + 300_000)
        export._rows["CUPTI_ACTIVITY_KIND_RUNTIME"][-1]["end"] = 1_000 + number + 7_800
    assert cost_of(summary_of(export, tmp_path)).high_ms == pytest.approx(0.104)


def test_inferred_ranges_cost_nothing(tmp_path: Path) -> None:
    """Three calls and three of a step's ranges are in the file; forward and backward are inferred, not recorded."""
    export = Export().gpu().thread(AUTOGRAD, "pt_autograd_0").range("step", 0, 900)
    export.range("aten::mm, seq = 1", 10, 100).kernel(GEMM, 20, 30, 50)
    export.range("autograd::engine::evaluate_function: MmBackward0, seq = 1", 200, 300, tid=AUTOGRAD)
    export.kernel(GEMM, 220, 230, 280, tid=AUTOGRAD).range("Optimizer.step#SGD.step, op_id = 1", 400, 500)
    summary = summary_of(export.kernel(GEMM, 420, 430, 440), tmp_path)
    assert summary.phase("forward")
    assert cost_of(summary, "step").low_ms == pytest.approx(3 * (API_CALL.low_us + NVTX_RANGE.low_us) / 1e3)


def test_what_was_traced_besides_leaves_no_upper_bound(tmp_path: Path) -> None:
    export = forward(3).add("OSRT_API", id=1, value="")
    share = share_of(summary_of(export, tmp_path))
    assert (share.high, share.verdict) == (1.0, "undecided")
    assert shown_of(summary_of(export, tmp_path)) == "undecided"


def test_a_copy_to_share_tells_what_was_traced_besides(tmp_path: Path) -> None:
    path = forward(3).add("OSRT_API", id=1, value="open(/home/ann)").write(tmp_path / "t.sqlite")
    copied = shared_copy(path, tmp_path / "copy.sqlite")
    (of_trace,), (of_copy,) = summarize(Trace.load(path), "t"), summarize(Trace.load(copied), "t")
    assert share_of(of_copy) == share_of(of_trace)
    assert share_of(of_copy).high == 1.0


def test_operators_of_pytorchs_profiler_cost_time_too(tmp_path: Path) -> None:
    # 200 operators and 1 API call in 1,000 us: 200 · 3.6 + 5.2 = 725.2 us at most.
    trace = Kineto().gpu().range("forward", 100, 1_000)
    for number in range(200):
        trace.operator("aten::mm", 110 + number, 1)
    trace.launch(1, 120).kernel(GEMM, 1, 130, 100)
    (summary,) = summarize(Trace.load(trace.write(tmp_path / "trace.json")), "t")
    assert cost_of(summary).high_ms == pytest.approx(200 * OPERATOR.high_us / 1e3 + 0.0052, abs=0.01)


def test_work_that_outlasts_its_range_has_no_share_but_by_an_unprofiled_time(tmp_path: Path) -> None:
    export = Export().gpu().range("forward", 0, 1 * MS).kernel(GEMM, 1_000, 2_000, 2 * MS)
    summary = summary_of(export, tmp_path)
    assert find_busy_share(summary, summary.phases[0]) is None
    text = render(build_report(Evidence(complete_captures([summary]))), {}).replace("\xa0", " ")
    assert "the range of forward lasts 1 ms and launches 2 ms of GPU work" in text
    assert "verdict |" not in text
    assert share_of(timed(summary, forward=2.5)).low == pytest.approx(1.998 / 2.5)


def test_the_json_has_the_share_and_its_verdict(tmp_path: Path) -> None:
    summary = summary_of(forward(6), tmp_path)
    for capture, unprofiled in ((summary, False), (timed(summary, forward=8.8), True)):
        data = report_data(Report("", (), complete_captures([capture])))["captures"][0]["phases"][0]["busy_share"]
        assert data["unprofiled"] is unprofiled
        assert data["verdict"] == "GPU waits"


def test_calls_of_other_processes_cost_this_one_nothing(tmp_path: Path) -> None:
    export = forward(3, calls=10)
    for number in range(50):
        export.call("cudaEventRecord_v3020", 3_000 + number, pid=200)
    export.add("ThreadNames", nameId=1, globalTid=global_tid(MAIN, 200))
    (summary,) = (s for s in summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t") if s.pid == 100)
    assert cost_of(summary).low_ms == pytest.approx(10 * API_CALL.low_us / 1e3)


def test_autograd_annotations_are_an_overhead_not_a_verdict(real_capture: Callable[[str], Path]) -> None:
    # The same kernels twice; with autograd's ranges a step takes 154 ms, without them 80 (medians).
    annotated, plain = (
        summarize(Trace.load(real_capture(name)), name)[0] for name in ("mem_small256", "train_small256")
    )
    ours, theirs = share_of(annotated, "step"), share_of(plain, "step")
    assert ours.busy_ms == pytest.approx(theirs.busy_ms, rel=0.01)
    assert (round(ours.wall_ms), round(theirs.wall_ms)) == (154, 80)
    assert (ours.verdict, theirs.verdict) == ("undecided", "GPU waits")
    # What was seen to be added lies between the differences of the two estimates.
    high, low = cost_of(annotated, "step"), cost_of(plain, "step")
    assert high.low_ms - low.low_ms < ours.wall_ms - theirs.wall_ms < high.high_ms - low.high_ms


def unprofiled_times(name: str) -> Iterator[tuple[str, float]]:
    with (SWEEP / "timings.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["capture"] == name and row["mean_ms"]:
                yield row["phase"], float(row["mean_ms"])


@pytest.mark.parametrize(
    "name",
    ["small_ctx256_train_fp32", "small_ctx512_forward_fp32", "small_ctx512_train_bf16",
     "small_ctx512_train_fp32_compile"],
)  # fmt: skip
def test_what_the_bounds_decide_the_unprofiled_times_of_the_sweep_confirm(name: str) -> None:
    (summary,) = summarize(Trace.load(SWEEP / name / "capture.sqlite"), name)
    times = dict(unprofiled_times(name))
    decided = 0
    for phase in summary.phases:
        profiled = share_of(summary, phase.phase)
        known = share_of(timed(summary, **{phase.phase: times[phase.phase]}), phase.phase)
        assert known.unprofiled
        if profiled.verdict != "undecided":
            decided += 1
            assert profiled.verdict == known.verdict, phase.phase
    assert decided
