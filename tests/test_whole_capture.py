"""What stands outside the phases: the whole capture, warm-up, communication, copies and fills."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.cli.main import cli
from nsys_analyzer.report.facts import say_all
from tests.support.export import ADD, GEMM, SOFTMAX, Export, shared_copy
from tests.support.kineto import Kineto

MS = 1_000_000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def summary_of(export: Export, tmp_path: Path) -> CaptureSummary:
    (summary,) = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    return summary


def answers(export: Export, tmp_path: Path, *options: str) -> str:
    path = export.write(tmp_path / "t.sqlite")
    done = CliRunner().invoke(cli, ["report", str(path), "-o", "-", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return re.sub(" +", " ", done.stdout.replace("\N{NO-BREAK SPACE}", " "))


def optimizer_alone(inside: int = 1) -> Export:
    """What PyTorch writes by itself: GEMMs of 9 ms in no range, then its optimizer with ``inside`` ms of ADD."""
    export = Export().gpu().kernel(GEMM, 10, 20, 20 + 9 * MS)
    export.range("Optimizer.step#AdamW.step", 10 * MS, 12 * MS)
    return export.kernel(ADD, 10 * MS + 10, 10 * MS + 20, 10 * MS + 20 + inside * MS)


def test_an_optimizer_alone_does_not_hide_the_rest(tmp_path: Path) -> None:
    """1 of 10 ms lies in the optimizer: matmul is 0 % of it, and 90 % of the whole."""
    text = answers(optimizer_alone(), tmp_path)
    assert "Matmul is 0.0 % of the optimizer, 90.0 % of the whole capture" in text
    assert "hold 10.0 % of the GPU time (kernels, copies and fills), and no forward is among them" in text
    assert f"`{GEMM}` in the whole capture (90.0 % of the time, 1 launch)." in text
    assert "| whole capture | 1 | – | 11.00 | 10.00 | 10.00 |" in text  # from 0.00002 to 11.00002 ms


def test_a_step_that_holds_all_work_stands_for_the_whole(tmp_path: Path) -> None:
    """1 of 10 ms lies in the optimizer, all 10 in the step: the whole capture would say the same once more."""
    text = answers(optimizer_alone().range("step", 0, 13 * MS), tmp_path)
    assert "Matmul is 0.0 % of the optimizer, 90.0 % of the step" in text
    assert "of the whole capture" not in text
    assert "| whole capture |" not in text


def test_json_says_what_the_phases_hold(tmp_path: Path) -> None:
    path = optimizer_alone().write(tmp_path / "t.sqlite")
    done = CliRunner().invoke(cli, ["report", str(path), "--format", "json"], catch_exceptions=False)
    capture: dict[str, Any] = json.loads(done.stdout)["captures"][0]
    assert capture["phases_suffice"] is False
    assert capture["share_in_phases"] == pytest.approx(0.1)
    assert capture["phases"][0]["inferred"] is True
    assert capture["whole"]["classes"][0] == {
        "class": "matmul", "launches_per_instance": 1, "ms_per_instance": 9, "share": 0.9,
    }  # fmt: skip


def forward(held: int, rest: int) -> Export:
    """A forward of ``held`` ms, and a copy of ``rest`` ms outside it."""
    export = Export().gpu().range("forward", 0, 100 * MS).kernel(GEMM, 10, 20, 20 + held * MS)
    return export.memory("MEMCPY", 101 * MS, 102 * MS, 102 * MS + rest * MS)


@pytest.mark.parametrize(("held", "rest", "suffice"), [(90, 10, True), (89, 11, False)])
def test_phases_with_nine_tenths_of_the_gpu_time_suffice(held: int, rest: int, suffice: bool, tmp_path: Path) -> None:
    summary = summary_of(forward(held, rest), tmp_path)
    assert summary.share_in_phases == pytest.approx(held / 100)
    assert summary.phases_suffice is suffice


@pytest.mark.parametrize(("kernel", "is_model"), [("advec_cell_kernel(int, int, double *)", False), (GEMM, True)])
def test_a_program_without_a_model_is_asked_for_none(tmp_path: Path, kernel: str, is_model: bool) -> None:
    said = answers(Export().gpu().kernel(kernel, 1, 2, MS).kernel(ADD, 3, MS, 2 * MS), tmp_path)
    for words in ("--model", "What share is matmul", "computing softmax"):
        assert (words in said) is is_model, words


def test_warm_up_is_left_out_of_the_whole_and_counted(tmp_path: Path) -> None:
    """3 ms launched in warm-up, by a thread with no range, too; 2 ms of the whole are left."""
    export = Export().gpu().range("warmup", 0, 5 * MS)
    export.kernel(GEMM, 10, 20, 20 + MS).kernel(GEMM, MS, 2 * MS, 4 * MS, tid=77)
    export.kernel(ADD, 6 * MS, 7 * MS, 9 * MS)
    summary = summary_of(export, tmp_path)
    assert summary.whole is not None
    assert summary.coverage is not None
    assert (summary.whole.kernels_per_instance, summary.whole.kernel_time_ms.mean) == (1, 2)
    assert (summary.coverage.kernels, summary.coverage.in_warmup, summary.coverage.warmup_ms) == (3, 2, 3)
    assert any(
        "Launched in warm-up and left out: 2 kernels, 3.00 of 5.00 ms." in warning
        for warning in say_all(summary.warnings)
    )


def test_a_step_around_the_warm_up_leaves_it_out(tmp_path: Path) -> None:
    """The step opens before warm-up; the softmax launched in it is neither the step's nor the whole capture's."""
    export = Export().gpu().range("iteration", 0, 9 * MS).range("warmup", 1, 5 * MS)
    export.kernel(SOFTMAX, 10, 20, 20 + 2 * MS).kernel(GEMM, 6 * MS, 6 * MS, 7 * MS)
    path = export.write(tmp_path / "t.sqlite")
    done = CliRunner().invoke(cli, ["report", str(path), "--format", "json"], catch_exceptions=False)
    capture: dict[str, Any] = json.loads(done.stdout)["captures"][0]
    assert [row["name"] for row in capture["phases"][0]["kernels"]] == [GEMM]
    assert [row["name"] for row in capture["whole"]["kernels"]] == [GEMM]


def test_nothing_but_warm_up(tmp_path: Path) -> None:
    export = Export().gpu().range("warmup", 0, 5 * MS).range("forward", 1, 4 * MS).kernel(GEMM, 10, 20, 20 + MS)
    assert "Every forward is in warm-up" in answers(export, tmp_path)


def with_collective() -> Export:
    """Backward: a GEMM of 3 ms, an ADD of 1 ms, a collective of 6 ms that ends 4 ms after the range."""
    export = Export().gpu().range("forward", 0, 2 * MS).kernel(GEMM, 10, 20, 20 + MS)
    export.range("backward", 2 * MS, 8 * MS).kernel(GEMM, 2 * MS + 10, 3 * MS, 6 * MS)
    export.kernel(ADD, 2 * MS + 20, 6 * MS, 7 * MS).kernel(NCCL, 2 * MS + 30, 6 * MS, 12 * MS, stream=9)
    return export


def test_a_collective_is_no_work(tmp_path: Path) -> None:
    """Of backward's 10 ms 3 are matmul: 30 %, and 3 of 4 ms, 75 %, of what computes."""
    text = answers(with_collective(), tmp_path)
    assert "30.0 % (75.0 % without communication) of backward" in text
    assert f"`{GEMM}` in backward (30.0 % of the time, 1 launch)" in text


def test_a_phase_that_outlasts_its_range_says_so_beside_its_figures(tmp_path: Path) -> None:
    text = answers(with_collective(), tmp_path)
    assert "the range of backward lasts 6 ms and launches 9 ms of work" in text
    first, times = text.partition("## ")[0], text[text.index("Times: median") :]
    assert "| backward | – | 9.000 | " in first  # the range is no time of the work
    assert re.search(r"\| backward \| 1 \| 6\.000 \| 9\.000 \| 9\.000 \| 10\.00 \|", times)


def test_copies_and_fills_have_rows(tmp_path: Path) -> None:
    """Busy is 3 ms, the kernels 1: the copy's 2 ms stand in the table of kernels, without a share."""
    export = Export().gpu().range("forward", 0, 9 * MS).kernel(GEMM, 10, 20, 20 + MS)
    export.memory("MEMCPY", 2 * MS, 3 * MS, 5 * MS).memory("MEMSET", 6 * MS, 6 * MS + 10, 6 * MS + 1010)
    text = answers(export, tmp_path)
    assert "| `copies of memory` | memory | 2.000 | – |" in text
    assert "| `fills of memory` | memory | 0.001 | – |" in text


def test_a_phase_without_a_gpu_has_no_busy_time(tmp_path: Path) -> None:
    text = answers(Export().range("forward", 0, 2 * MS), tmp_path)
    assert "forward takes 2 ms (no work on the GPU)" in text
    assert "0.000" not in text


def test_half_a_launch(tmp_path: Path) -> None:
    """One GEMM in two forwards: half a launch in each."""
    export = Export().gpu().range("forward", 0, 2 * MS).range("forward", 3 * MS, 5 * MS)
    assert "(100.0 % of the time, 0.5 launches)" in answers(export.kernel(GEMM, 10, 20, 20 + MS), tmp_path)


def test_a_warm_up_range_inside_a_phase_is_left_out_of_it(tmp_path: Path) -> None:
    """A forward around a whole script: 3 ms of its 4 were launched in warm-up."""
    export = Export().gpu().range("forward", 0, 9 * MS).range("warmup", 10, 5 * MS).kernel(GEMM, 20, 30, 30 + 3 * MS)
    summary = summary_of(export.kernel(ADD, 6 * MS, 7 * MS, 8 * MS), tmp_path)
    forward = summary.phase("forward")
    assert forward is not None
    assert (forward.kernels_per_instance, forward.kernel_time_ms.mean) == (1, 1)
    assert summary.share_in_phases == 1


def test_a_range_of_no_length_lies_in_no_phase(tmp_path: Path) -> None:
    export = Export().gpu().range("loss", 50, 50).range("optimizer", 300, 400).kernel(ADD, 310, 320, 330)
    assert not any("lie inside" in warning for warning in say_all(summary_of(export, tmp_path).warnings))


def test_the_span_of_a_capture_with_warm_up_inside_is_not_known(tmp_path: Path) -> None:
    """A copy before warm-up and a kernel after it: 2 ms of work, in a span that holds warm-up's."""
    export = Export().gpu().memory("MEMCPY", 0, 10, 10 + MS).range("warmup", 2 * MS, 90 * MS)
    export.kernel(GEMM, 3 * MS, 4 * MS, 80 * MS).kernel(ADD, 95 * MS, 96 * MS, 97 * MS)
    text = answers(export, tmp_path)
    assert "| whole capture | 2.000 | 0.0 % |" in text
    assert "GPU span ms" not in text


def test_a_step_that_alone_was_timed_has_a_verdict(tmp_path: Path) -> None:
    export = Export().gpu().range("step", 0, 9 * MS).range("forward", 0, 8 * MS).kernel(GEMM, 10, 20, 20 + 2 * MS)
    (tmp_path / "timings.csv").write_text("model,context_length,phase,mean_ms\nsmall,256,step,8.0\n", encoding="utf-8")
    text = answers(
        export, tmp_path, "--csv", str(tmp_path / "timings.csv"), "--model", "small", "--context-length", "256"
    )
    assert "| step | 1 | 8.000 | 9.000 | 2.000 | 2.000 | 2.000 |" in text
    assert "12.5 % | 25.0 % | 25.0 % | GPU waits |" in text  # 9 ÷ 8 − 1; 2 of 8 ms
    assert "no timing" not in text


def test_a_loader_before_the_first_call_is_a_part_of_the_capture(tmp_path: Path) -> None:
    """50 ms of loading from 1 on, and 5 ms of work behind it: 55 ms; the span of the recording makes it 60."""
    trace = Kineto().gpu().range("enumerate(DataLoader)#_Iter.__next__", 1_000, 50_000)
    trace.launch(1, 51_000).kernel(GEMM, 1, 51_010, 4_990)
    (summary,) = summarize(Trace.load(trace.write(tmp_path / "t.json")), "t")
    assert summary.step is not None
    assert (summary.step.is_pass, summary.step.length_ms) == (True, 55.0)
    assert {cause.cause: cause.ms for cause in summary.step.causes} == {"data": 50.0, "launch": 0.01}
    trace.add("Trace", "PyTorch Profiler (0)", 500, 60_000, pid="Spans", tid="PyTorch Profiler")
    for path in (trace.write(tmp_path / "t.json"), shared_copy(tmp_path / "t.json", tmp_path / "copy.sqlite")):
        (summary,) = summarize(Trace.load(path), "t")
        assert summary.step is not None
        assert summary.step.length_ms == 60.0


def test_the_step_without_what_the_profiler_notes(tmp_path: Path) -> None:
    """Steps of 10 ms: kernels run [0.2, 1.7), [4.1, 7.1) and on to 9.9; the second's launch takes from 1.0 to 4.0.

    The profiler notes 3.0 ms in that launch. Without it the second kernel starts at 1.7, 2.4 ms earlier: 7.6 ms.
    """
    trace = Kineto().gpu()
    for number in range(5):
        at = number * 10_000
        trace.range(f"ProfilerStep#{number}", at, 10_000)
        for place, (called, lasts, ran, ms) in enumerate(
            [(100, 5, 200, 1_500), (990, 3_030, 4_100, 3_000), (4_040, 5, 7_100, 2_800)]
        ):
            trace.add("cuda_runtime", "cudaLaunchKernel", at + called, lasts, correlation=3 * number + place + 1)
            trace.kernel(GEMM, 3 * number + place + 1, at + ran, ms)
        trace.add("overhead", "Activity Buffer Request", at + 1_000, 3_000, pid=-1, tid=0)
        trace.add("cuda_runtime", "cudaDeviceSynchronize", at + 4_100, 5_800, correlation=90 + number)
    path = trace.write(tmp_path / "t.json")
    done = CliRunner().invoke(cli, ["ask", str(path), "step_estimated_ms", "--format", "json"], catch_exceptions=False)
    assert json.loads(done.stdout)["answers"][0]["value"] == pytest.approx([7.6, 7.6], abs=0.05)
