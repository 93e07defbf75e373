"""Tests ``ask`` and ``explain --budget``: answers with their evidence, or the reason why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nsys_analyzer.inputs.saved_reports import read_saved_report
from nsys_analyzer.questions.named_figures import FIGURES
from nsys_analyzer.report.renderers.json_report import in_json
from tests.conftest import DATA, ROOT, Main
from tests.support.export import ADD, GEMM, Export

RealCapture = Callable[[str], Path]
MS = 1_000_000


def two_phases() -> Export:
    """Two steps of 10 ms: forward of 6 ms with 2 ms of GEMM, then 1 ms of ADD by the optimizer."""
    export = Export().gpu()
    for at in (0, 10 * MS):
        export.range("step", at, at + 9 * MS).range("forward", at, at + 6 * MS)
        export.range("optimizer", at + 6 * MS, at + 9 * MS)
        export.kernel(GEMM, at + MS, at + 2 * MS, at + 4 * MS).kernel(ADD, at + 7 * MS, at + 8 * MS, at + 9 * MS)
    return export


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return two_phases().write(tmp_path / "t.sqlite")


# --- ask


@pytest.mark.parametrize(
    ("question", "value"),
    [
        ("gpu_busy_ms phase=forward", 2),
        ("wall_ms phase=forward", 6),
        ("class_share class=matmul", 0.666667),  # 2 of 3 ms
        ("class_ms class=softmax phase=forward", 0),
        ("kernels", 4),  # of the whole capture
        ("kernel_ms kernel=gemm phase=step", 2),
        ("instances phase=forward", 2),
        ("copies phase=forward", 0),
    ],
)
def test_a_figure(question: str, value: float, trace: Path, run_main: Main) -> None:
    outcome = run_main("ask", trace, question, "--format", "json")
    document = json.loads(outcome.out)
    (answer,) = document["answers"]
    assert (outcome.code, answer["figure"], answer["value"]) == (0, question, value)


def test_in_words(trace: Path, run_main: Main) -> None:
    said = run_main("ask", trace, "gpu_busy_ms phase=forward").out
    rests_on = "(2 rows of CUPTI_ACTIVITY_KIND_KERNEL in t.sqlite)"
    assert said == f"gpu_busy_ms phase=forward = 2 ms, median of 2 instances of forward {rests_on}\n"


def test_what_cannot_be_told_has_an_exit_code(trace: Path, run_main: Main) -> None:
    outcome = run_main("ask", trace, "gpu_busy_ms phase=forward", "peak_memory_bytes", "--format", "json")
    assert outcome.code == 4
    answer = json.loads(outcome.out)["answers"][1]
    needs = "nsys-analyze run --memory -- python train.py"
    assert answer["cannot_answer"] == {"why": "Memory was not recorded", "needs": needs}
    outcome = run_main("ask", trace, "wall_ms phase=backward")
    assert outcome.code == 4
    assert "not known. The capture lacks this phase" in outcome.out
    assert "Its phases: forward, optimizer, step" in outcome.out


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("gpu_bus phase=forward", "Did you mean gpu_busy_ms?"),
        ("stepp_ms", "Did you mean step_ms?"),
        ("gpu_busy_ms phases=forward", "Ask for gpu_busy_ms [phase=…]"),
        ("kernel_ms kernel='gemm", "Close the quotation marks"),
        ("class_ms", "class_ms class=… [phase=…]"),
        ("class_ms class=gemm", "There are: matmul, "),
        ("kernel_ms kernel=e", "2 kernels match 'e'"),
    ],
)
def test_what_is_no_question(question: str, said: str, trace: Path, run_main: Main) -> None:
    outcome = run_main("ask", trace, question)
    assert (outcome.code, outcome.out) == (1, "")
    assert said in outcome.err


def test_each_figure_is_listed(run_main: Main) -> None:
    lines = run_main("ask", "--list").out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == list(FIGURES)


def test_a_step_has_one_length(trace: Path, run_main: Main) -> None:
    """The middle of the estimate's bounds; measured, what was measured."""
    estimated, step = json.loads(run_main("ask", trace, "step_estimated_ms", "step_ms", "--format", "json").out)[
        "answers"
    ]
    assert step["value"] == pytest.approx(sum(estimated["value"]) / 2)
    assert step["of"] == "a step without the profiler, estimated"
    (step,) = json.loads(run_main("ask", trace, "step_ms", "--step-ms", "9", "--format", "json").out)["answers"]
    assert (step["value"], step["of"]) == (9, "a step without the profiler")


def test_a_name_that_is_no_utf_8_stands_in_json(trace: Path, tmp_path: Path, run_main: Main) -> None:
    """Byte E9 is a letter in Latin-1 and half of one in UTF-8; JSON holds neither, and is read back."""
    path = tmp_path / "caf\udce9.sqlite"
    path.write_bytes(trace.read_bytes())
    (tmp_path / "text").write_text("gpu = NVIDIA H200", encoding="utf-8")
    answers = json.loads(run_main("ask", path, "gpu", "--format", "json").out)["answers"]
    assert answers[0]["evidence"]["capture"] == "caf\ufffd.sqlite"
    for words in (("check", path, tmp_path / "text"), ("explain", path, "--budget", "500"), ("kernels", path)):
        assert "\\ud" not in run_main(*words, "--format", "json").out
    run_main("report", path, "-o", tmp_path / "report.json", "--format", "json")
    (capture,) = read_saved_report(tmp_path / "report.json")
    assert capture.name == "caf\ufffd"
    assert json.loads(in_json({"a": "\\udce9 \U0001f600 \udce9"})) == {"a": "\\udce9 \U0001f600 \ufffd"}


# --- explain --budget, and what is not known elsewhere


@pytest.mark.parametrize("budget", [200, 1000, 2000, 100_000])
def test_a_budget_holds(budget: int, real_capture: RealCapture, run_main: Main) -> None:
    out = run_main("explain", real_capture("train_small256"), "--format", "json", "--budget", budget).out
    document = json.loads(out)
    assert len(out.encode()) <= budget
    figures = [one["figure"] for one in document["answers"]]
    order = ["step_estimated_ms", "step_profiled_ms", "saves_ms finding=launch_bound"]
    assert figures[:3] == order[: len(figures)]
    assert (document["left_out"] == 0) is (budget == 100_000)
    if budget == 100_000:
        missing = {one["cannot_answer"]["needs"] for one in document["answers"] if "cannot_answer" in one}
        assert "nsys-analyze run --modules -- python train.py" in missing


def test_a_budget_is_of_json(trace: Path, run_main: Main) -> None:
    assert "--budget needs --format json" in run_main("explain", trace, "--budget", 500).err


def test_captures_of_one_file_name_are_told_apart(trace: Path, tmp_path: Path, run_main: Main) -> None:
    for name in ("before", "after"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "capture.sqlite").write_bytes(trace.read_bytes())
    out = run_main("explain", tmp_path / "runs", "--format", "json", "--budget", 1000).out
    sources = {one["evidence"]["capture"] for one in json.loads(out)["answers"]}
    assert sources == {"before/capture.sqlite", "after/capture.sqlite"}


def test_a_report_says_what_its_captures_lack(real_capture: RealCapture, run_main: Main) -> None:
    needs = {}
    for path in (real_capture("graph_small256"), DATA / "cpu_train.pt.trace.json.gz", real_capture("train_small256")):
        (capture,) = json.loads(run_main("explain", path, "--format", "json").out)["captures"]
        needs[capture["name"]] = capture.get("cannot_answer", {}).get("needs")
    assert needs == {
        "graph_small256": "nsys-analyze run --nsys-option=--cuda-graph-trace=node -- python train.py",
        "cpu_train": "nsys-analyze run -- python train.py, on a machine with a GPU",
        "train_small256": None,
    }


def test_captures_that_match_in_nothing_have_no_comparison(real_capture: RealCapture, run_main: Main) -> None:
    outcome = run_main("compare", real_capture("train_small256"), real_capture("nccl_init"), "--format", "json")
    assert json.loads(outcome.out)["cannot_answer"]["why"].startswith("No run of one side has exactly the")


@pytest.mark.parametrize("words", [("what-if", "--launches", "0"), ("kernels",)])
def test_other_commands_say_it_alike(words: tuple[str, ...], tmp_path: Path, run_main: Main) -> None:
    path = Export().range("forward", 0, 10).write(tmp_path / "ranges.sqlite")
    command, *options = words
    outcome = run_main(command, path, *options, "--format", "json")
    assert outcome.code == 1
    assert set(json.loads(outcome.out)["cannot_answer"]) == {"why", "needs"}


def test_documents_are_those_of_the_schema(real_capture: RealCapture, tmp_path: Path, run_main: Main) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "docs" / "answers.schema.json").read_text(encoding="utf-8"))
    claims = "gpu_busy_ms phase=forward = 3 ms\nA step would take 1 ms.\nIn these 3 ms:"
    (tmp_path / "claims.txt").write_text(claims, encoding="utf-8")
    capture = real_capture("graph_small256")
    for words in (
        ("ask", capture, "gpu_busy_ms phase=forward", "top_kernel", "busy_share phase=forward"),
        ("check", capture, tmp_path / "claims.txt"),
        ("explain", capture, "--budget", 100_000),
        ("what-if", DATA / "cpu_train.pt.trace.json.gz", "--launches", 0),
    ):
        jsonschema.validate(json.loads(run_main(*words, "--format", "json").out), schema)
