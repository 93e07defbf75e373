"""Tests ``ask`` and ``explain --budget``: answers with their evidence, or the reason why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nsys_analyzer.inputs.saved_reports import read_saved_report
from nsys_analyzer.questions.named_figures import FIGURES
from nsys_analyzer.report.renderers.json_report import format_json
from tests.conftest import DATA, ROOT, Main, Outcome
from tests.support.commands import make_command_test
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


def middle_of_first(ended: Outcome) -> float:
    """The middle of the bounds that the first answer gives, less the second answer."""
    bounds, middle = (answer["value"] for answer in json.loads(ended.out)["answers"])
    return float(sum(bounds) / 2 - middle)


test_ask = make_command_test("ask", builders={"two_phases": two_phases}, figures={
    "middle_of_first": middle_of_first,
    "captures": lambda ended: sorted({one["evidence"]["capture"] for one in json.loads(ended.out)["answers"]}),
    "answer_keys": lambda ended: sorted(json.loads(ended.out)["cannot_answer"]),
})  # fmt: skip


def test_each_figure_is_listed(run_main: Main) -> None:
    lines = run_main("ask", "--list").out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == list(FIGURES)


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
    assert json.loads(format_json({"a": "\\udce9 \U0001f600 \udce9"})) == {"a": "\\udce9 \U0001f600 \ufffd"}


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
