"""``nsys-analyze explain``, from the command line to what it prints."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DATA, Main
from tests.support.export import ADD, GEMM, Export
from tests.support.kineto import Kineto
from tests.test_report_command import MS, two_steps

RealCapture = Callable[[str], Path]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two steps of 12 ms, in each of which the GPU works for 5.5 ms."""
    return two_steps().write(tmp_path / "train.sqlite")


@pytest.fixture
def explain(run_main: Main) -> Callable[..., str]:
    """What the command prints, with single spaces on one line."""

    def run(*arguments: object) -> str:
        outcome = run_main("explain", *arguments)
        assert outcome.code == 0, outcome.err
        return re.sub(r"\s+", " ", outcome.out)

    return run


def test_the_decision_and_the_findings(trace: Path, explain: Callable[..., str]) -> None:
    text = explain(trace)
    assert text.startswith(
        "train NVIDIA H200 · fp32 · 2 training steps · nsys 2025.3 ≈ 10.6 ms a step (10–12, estimated; "
    )
    # a step: 100 × 0.01 + 2 ms of GEMM, 0.5 + 1 + 1 ms of ADD, 10.6 − 5.5 ms without work
    assert "In these ≈ 10.6 ms: M matmul 3 ms 28 % E elementwise 2.5 ms 24 % ░ idle 5.09 ms 48 %" in text
    assert "optimizer 2.000 1.000 0.0 % elementwise add" in text
    assert " Findings 1. The CPU stops launching work: a fix saves " in text
    assert "What share is matmul?" not in text


def test_all_of_the_report(trace: Path, explain: Callable[..., str]) -> None:
    """The answers and what is folded in a report."""
    text = explain(trace, "--all")
    assert text.startswith(explain(trace).rstrip())
    assert "What share is matmul? Matmul is 66.7 % of forward" in text
    assert "a range step. There are 2 steps of 12.0 ms" in text
    parts = "compute: matmul 3.000 25.0 % – compute: elementwise 2.500 20.8 % – idle 6.500 54.2 % 6.500"
    assert parts in text
    assert "total kernel time: the sum of all kernel durations" in text


def test_a_finding_has_lines_to_type(trace: Path, run_main: Main) -> None:
    """Each on a line of its own, however long, so that it can be copied."""
    printed = run_main("explain", trace).out
    (first, *_) = json.loads(run_main("explain", trace, "--format", "json").out)["captures"][0]["findings"]
    assert f"1. {first['title']}: a fix saves " in printed.replace("\n", " ")
    for line in first["remedy"]:
        assert f"    {line}\n" in printed


def test_json_is_that_of_the_report(trace: Path, run_main: Main) -> None:
    (explained,) = json.loads(run_main("explain", trace, "--format", "json").out)["captures"]
    (reported,) = json.loads(run_main("report", trace, "--format", "json").out)["captures"]
    assert {"name", "process", "limits", "step", "findings", "findings_missing"} <= set(explained)
    assert explained == {key: reported[key] for key in explained}


def test_markdown_is_the_report_up_to_the_answers(trace: Path, run_main: Main) -> None:
    """Without a figure."""
    report = run_main("report", trace, "-o", "-").out
    assert run_main("explain", trace, "--format", "markdown").out == report.partition("\n## How long")[0]
    assert "explain --format" not in report


def test_an_unprofiled_time(trace: Path, tmp_path: Path, run_main: Main, explain: Callable[..., str]) -> None:
    csv = tmp_path / "unprofiled.csv"
    csv.write_text("phase,mean_ms\nstep,10.5\n", encoding="utf-8")
    words = (trace, "--csv", csv, "--model", "small", "--context-length", "256")
    # 5.5 of 10.5 ms
    assert "10.5 ms a step (measured; profiled 12) · the GPU works 52 % of it" in explain(*words)
    assert "narrows them" not in explain(*words)
    assert "narrows them: --step-ms N" in explain(trace)
    capture = next(
        one for one in json.loads(run_main("explain", *words, "--format", "json").out)["captures"] if one["step"]
    )
    assert capture["step"]["unprofiled_ms"]["timed"] is True
    for time in ("10.5", "10.5ms", "0.0105 s", "10500us"):
        assert "10.5 ms a step (measured; profiled 12)" in explain(trace, "--step-ms", time)
    assert "'long' is not a time, such as 35 or 35ms" in run_main("explain", trace, "--step-ms", "long").err


def test_a_step_of_another_name(tmp_path: Path, explain: Callable[..., str]) -> None:
    export = Export().gpu()
    for at in (0, 10 * MS):
        export.range("chunk", at, at + 8 * MS).kernel(GEMM, at + MS, at + 2 * MS, at + 4 * MS)
    path = export.write(tmp_path / "t.sqlite")
    text = explain(path)
    assert " · one pass · " in text
    assert " for the whole capture (" in text
    assert "give the range around each step (--step RANGE)" in explain(path, "--all")
    text = explain(path, "--step", "chunk", "--all")
    # 10 ms from start to start; of the last one, 8 ms, it is not known when a next one begins
    assert "compute: matmul 2.000 20.0 % idle 8.000 80.0 % the step 10.00 100.0 %" in text


def test_a_step_that_there_is_not(trace: Path, run_main: Main) -> None:
    outcome = run_main("explain", trace, "--step", "nothere")
    assert (outcome.code, outcome.out) == (1, "")
    (line,) = outcome.err.splitlines()
    assert "No range has the name 'nothere', which the options give to the step" in line


def test_ranges_that_repeat_are_named_where_the_capture_is_one_pass(
    tmp_path: Path, run_main: Main, explain: Callable[..., str]
) -> None:
    """Three micro-batches of 9 ms each, numbered, with a range of 6 ms in it; and one range that occurs once."""
    export = Export().gpu().range("setup", MS, 9 * MS)
    for number in range(3):
        at = 10 * MS * (1 + number)
        export.range(f"micro_step_{number}", at, at + 9 * MS).range("inner", at + MS, at + 7 * MS)
        export.kernel(GEMM, at + MS, at + 2 * MS, at + 4 * MS + number)
    path = export.write(tmp_path / "t.sqlite")
    assert (
        "No range names a step, but these ranges repeat: micro_step, inner; say which one is a step with --step"
        in explain(path)
    )
    assert " · 3 steps · " in explain(path, "--step", "micro_step")
    assert run_main("explain", path, "--step", "no").err.endswith("Ranges that repeat: micro_step, inner\n")


def accumulating(*micro_batches: int, pause: int = 0) -> Export:
    """Steps of so many micro-batches: a batch of 1 ms, forward 2, backward 2; then an optimizer of 1 ms.

    The second step is longer by a pause behind its optimizer, ms. Gradients are set to zero in front of each but the
    first micro-batch of all.
    """
    export, at = Export().gpu(), 1
    for number, many in enumerate(micro_batches):
        for _ in range(many):
            export.range("data", at * MS, (at + 1) * MS)
            for phase, begin in (("forward", at + 1), ("backward", at + 3)):
                export.range(phase, begin * MS, (begin + 2) * MS)
                export.kernel(GEMM, begin * MS + 1000, begin * MS + 5000, (begin + 1) * MS + 9000)
            at += 5
        export.range("optimizer", at * MS, (at + 1) * MS).kernel(ADD, at * MS + 1000, at * MS + 5000, at * MS + 9000)
        at += 1 + pause * (number == 1)
        export.range("zero_grad", at * MS - 100_000, at * MS)
    return export


@pytest.mark.parametrize("pause", [0, 40])
def test_how_often_a_phase_begins_in_a_step(tmp_path: Path, run_main: Main, pause: int) -> None:
    """Six steps of four micro-batches, from one forward pass to the next; with a pause the second is left out.

    Each has four batches, the first of them in front of it.
    """
    path = accumulating(4, 4, 4, 4, 4, 4, pause=pause).write(tmp_path / "t.sqlite")
    step = json.loads(run_main("explain", path, "--format", "json").out)["captures"][0]["step"]
    assert step["instances"] == (5 if pause else 6)
    assert step["passes"] == {"data": 4, "zero_grad": 1, "forward": 4, "backward": 4, "optimizer": 1}
    csv = tmp_path / "unprofiled.csv"
    csv.write_text("phase,mean_ms\ndata,1\nforward,2\nstep,21\n", encoding="utf-8")
    text = run_main("explain", path, "--csv", csv, "--format", "markdown").out
    assert re.findall(r"^\| (\w+) +\| +(\d) \|", text.partition("passes per step")[2], re.MULTILINE) == [
        ("forward", "4"), ("backward", "4"), ("optimizer", "1"), ("data", "4"), ("step", "1"),
    ]  # fmt: skip
    assert "21 ms a step (measured; profiled 21)" in text.replace("\N{NO-BREAK SPACE}", " ")


def test_steps_of_unlike_many_micro_batches(tmp_path: Path, run_main: Main) -> None:
    """Of five steps the first four count, which have whole windows: (4 + 4 + 3 + 4) ÷ 4."""
    path = accumulating(4, 4, 3, 4, 4).write(tmp_path / "t.sqlite")
    step = json.loads(run_main("explain", path, "--format", "json").out)["captures"][0]["step"]
    assert (step["instances"], step["passes"]["forward"], step["passes"]["optimizer"]) == (5, 3.75, 1)


def test_as_many_steps_as_a_person_says(tmp_path: Path, explain: Callable[..., str]) -> None:
    """Two kernels of 2 ms, launched at 1 and 11 ms: from 1 to 14 ms, of which half is 6.5."""
    export = Export().gpu()
    for at, name in ((0, GEMM), (10 * MS, ADD)):
        export.kernel(name, at + MS, at + 2 * MS, at + 4 * MS)
    text = explain(export.write(tmp_path / "t.sqlite"), "--steps", 2, "--all")
    assert "What counts as a step: one of 2 equal parts of the capture. There are 2" in text
    assert "the step 6.500 100.0 %" in text


def test_without_api_calls(tmp_path: Path, run_main: Main, explain: Callable[..., str]) -> None:
    """What fills a step is known, why it is so is not."""
    path = two_steps(export=Export(("CUPTI_ACTIVITY_KIND_RUNTIME",)).gpu()).write(tmp_path / "t.sqlite")
    text = explain(path)
    assert "12 ms a step under the profiler · the GPU works 46 % of that" in text  # 5.5 ms
    assert "This trace has no API calls. Without API calls, launches and waits are unknown" in text
    assert "Capture with nsys profile --trace=cuda,nvtx." in text
    assert "launching takes time" not in text
    (capture,) = json.loads(run_main("explain", path, "--format", "json").out)["captures"]
    assert capture["findings_missing"].startswith("This trace has no API calls")
    assert (capture["findings"], capture["step"]["unprofiled_ms"]) == (None, None)
    assert capture["step"]["launch_latency_us"] is None


def test_a_capture_of_a_cpu(tmp_path: Path, explain: Callable[..., str], run_main: Main) -> None:
    path = tmp_path / "cpu.pt.trace.json.gz"
    path.write_bytes((DATA / "cpu_train.pt.trace.json.gz").read_bytes())
    # A step of 567.8 ms: the operators' own stretches take 552.0 of it, 97.2 %.
    text = explain(path)
    assert "568 ms a step under the profiler · operators run for 97 % of it" in text
    assert "forward 250.1 244.7 40.8 % aten::mm (15)" in text
    assert "GPU" not in text
    (capture,) = json.loads(run_main("explain", path, "--format", "json").out)["captures"]
    phases = {one["phase"]: one["compute_ms"] + one["idle_ms"] for one in capture["step"]["phases"]}
    assert sum(phases.values()) == pytest.approx(capture["step"]["length_ms"])
    assert phases["backward"] == pytest.approx(271.3, abs=0.05)
    assert capture["findings"] is None
    assert capture["findings_missing"].startswith("The program ran on the CPU")


@pytest.mark.parametrize("style", ["text", "markdown", "json"])
def test_bad_input_is_one_line(tmp_path: Path, run_main: Main, style: str) -> None:
    (tmp_path / "bad.sqlite").write_bytes(b"no database")
    for path in (tmp_path / "bad.sqlite", tmp_path / "absent.sqlite"):
        outcome = run_main("explain", path, "--format", style)
        assert (outcome.code, outcome.out) == (1, "")
        (line,) = outcome.err.splitlines()
        assert line.startswith("Error: ")


def test_a_folder(tmp_path: Path, explain: Callable[..., str]) -> None:
    for name in ("train", "again"):
        two_steps().write(tmp_path / f"{name}.sqlite")
    text = explain(tmp_path)
    assert re.search(
        r"again Step ms 10.59 What to do first The CPU stops launching work Saves ms 1.9 .*train Step", text
    )
    assert "2 of 2 profiled captures: The CPU stops launching work (a fix saves 1.9–3.4 ms per step)." in text
    assert "Findings The CPU stops launching work: 2 captures, 25 % of the step" in text
    assert "failed" not in text
    (tmp_path / "bad.sqlite").write_bytes(b"no database")
    assert re.search(r"1 of 3 captures did not finish: bad \(failed: ", explain(tmp_path))


def test_without_kernels(tmp_path: Path, run_main: Main, explain: Callable[..., str]) -> None:
    export = Export().gpu()
    for at in (0, 10 * MS):
        export.range("step", at, at + 8 * MS)
    path = export.write(tmp_path / "t.sqlite")
    text = explain(path)
    assert "No kernel was recorded. Capture with nsys profile --trace=cuda,nvtx around steps that run on" in text
    assert "No steps were found" not in text
    (capture,) = json.loads(run_main("explain", path, "--format", "json").out)["captures"]
    assert capture["findings_missing"].startswith("No kernel was recorded.")


@pytest.mark.parametrize("api", ["cudaLaunchKernel", "cuLaunchKernelEx"])
def test_launches_without_a_kernel_are_of_a_gpu(
    tmp_path: Path, run_main: Main, explain: Callable[..., str], api: str
) -> None:
    trace = Kineto().range("step", 0, 95).operator("aten::mm", 0, 90).launch(1, 10, api=api).launch(2, 20, api=api)
    path = trace.write(tmp_path / "t.json")
    text = explain(path)
    assert "2 kernel launches and no kernel were recorded: the GPU's records were dropped or cut off." in text
    assert "CPU" not in text
    assert "activities=" not in text  # the calls show that this was asked for
    assert "dropped or cut off. Record again, with a warm-up" in run_main("ask", path, "step_compute_ms").out
    # A call that puts no work on a GPU does not make the program one of a GPU.
    path = Kineto().operator("aten::mm", 0, 90).launch(1, 10, api="cudaDeviceSynchronize").write(tmp_path / "c.json")
    assert "The program ran on the CPU" in explain(path)


def test_a_real_capture(real_capture: RealCapture, run_main: Main) -> None:
    (capture,) = json.loads(run_main("explain", real_capture("train_small256"), "--format", "json").out)["captures"]
    assert capture["findings_missing"] is None
    step: dict[str, Any] = capture["step"]
    assert (step["instances"], step["source"], step["on_gpu_timeline"]) == (3, "range", False)
    parts = ("compute_ms", "exposed_communication_ms", "exposed_copy_ms", "idle_ms")
    assert sum(step[part] for part in parts) == pytest.approx(step["length_ms"])
    assert sum(one["ms"] for one in step["classes"]) == pytest.approx(step["compute_ms"])
    assert sum(one["ms"] for one in step["idle_by_cause"]) == pytest.approx(step["idle_ms"])
    for part in parts:
        assert sum(phase[part] for phase in step["phases"]) == pytest.approx(step[part])
    (device,) = step["devices"]
    assert device == {"device": 0, **{key: step[key] for key in device if key != "device"}}
    # GPU busy of a step is 33.6 ms: MEASURING.md's small model leaves the GPU idle for most of it
    assert step["compute_ms"] == pytest.approx(33.60, abs=0.01)  # of the median step; the others: 33.58 and 33.54
    assert step["unprofiled_ms"]["low"] < step["wall_ms"]["median"]
    assert all(one["step_ms"] == pytest.approx(one["saves_ms"] + one["left_ms"]) for one in capture["findings"])
    first = next(one for one in capture["findings"] if one["id"] == "launch_bound")
    assert first["saves_ms_low"] <= first["saves_ms"] <= first["saves_ms_high"]
    assert first["share_of_step"] == pytest.approx(first["saves_ms"] / first["step_ms"])
