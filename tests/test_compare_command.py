"""``nsys-analyze compare``, from the command line to what it prints and how it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import nsys_analyzer
from tests.conftest import Main
from tests.support.commands import make_command_test
from tests.support.export import ADD, GEMM, Export
from tests.support.packed import EXAMPLES, unpack, unpack_fault

MS = 1_000_000
COMPILED = EXAMPLES / "benches" / "compile" / "captures"


def steps(matmul_us: int = 5_000, count: int = 4, gpu: str = "NVIDIA H200") -> Export:
    """Steps of 1 ms of an ADD, a GEMM, and 0.1 ms without work before, between and behind them."""
    export = Export().gpu(name=gpu)
    length = 1_300_000 + matmul_us * 1_000
    for i in range(count):
        at = i * length
        export.range("step", at, at + length)
        export.range("forward", at, at + length)
        export.kernel(ADD, at + 10_000, at + 100_000, at + 100_000 + MS)
        export.kernel(GEMM, at + 20_000, at + 1_200_000, at + 1_200_000 + matmul_us * 1_000)
    return export


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return steps().write(tmp_path / "before.sqlite")


@pytest.fixture
def after(tmp_path: Path) -> Path:
    """The GEMM takes 0.5 ms longer: 6.8 ms a step instead of 6.3, 7.9 %."""
    return steps(5_500).write(tmp_path / "after.sqlite")


def fails(run_main: Main, *arguments: object, code: int = 1) -> str:
    outcome = run_main("compare", *arguments)
    assert (outcome.code, outcome.out) == (code, "")
    return outcome.err


test_compare = make_command_test("compare", builders={"steps": steps}, figures={
    "folds": lambda ended: ended.out.count("<details><summary>"),
    "sizes": lambda ended: {key: len(json.loads(ended.out)[key]) for key in ("comparisons", "refused", "unmatched")},
})  # fmt: skip


# --- what it prints


def test_on_80_columns(before: Path, after: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, run_main("compare", before, after).out.splitlines())) <= 80


def test_a_markdown_file_begins_with_what_is_printed(before: Path, after: Path, tmp_path: Path, run_main: Main) -> None:
    run_main("compare", before, after, "-o", tmp_path / "pr.md")
    printed = run_main("compare", before, after, "--format", "markdown").out
    assert (tmp_path / "pr.md").read_text(encoding="utf-8").startswith(printed)


def test_json_of_captures_and_of_their_reports(before: Path, after: Path, tmp_path: Path, run_main: Main) -> None:
    """The comparison of two reports is that of their captures, to the last bit."""
    reports = []
    for path in (before, after):
        reports.append(tmp_path / f"{path.stem}.json")
        assert run_main("report", path, "--format", "json", "-o", reports[-1]).code == 0
    data = json.loads(run_main("compare", before, after, "--format", "json").out)
    assert data == json.loads(run_main("compare", *reports, "--format", "json").out)
    (one,) = data["comparisons"]
    assert one["verdict"] == "slower"
    assert one["step"]["wall"]["ms"] == pytest.approx(0.5)
    assert one["step"]["parts"][0]["kernels"][0]["change"]["ms"] == pytest.approx(0.5)
    assert (one["phases"][0]["phase"], one["phases"][0]["synchronized"]) == ("forward", True)


# --- how it ends


def test_a_report_of_an_older_version(before: Path, tmp_path: Path, run_main: Main) -> None:
    report = tmp_path / "old.json"
    run_main("report", before, "--format", "json", "-o", report)
    data = json.loads(report.read_text(encoding="utf-8"))
    del data["captures"][0]["step"]["wall_values_ms"]
    report.write_text(json.dumps(data), encoding="utf-8")
    error = fails(run_main, report, before)
    assert "lacks figures that a comparison needs" in error
    assert "Write it again: nsys-analyze report CAPTURE --format json -o old.json" in error
    data["captures"][0]["step"]["wall_values_ms"] = [1.0, -1.0]
    report.write_text(json.dumps(data), encoding="utf-8")
    assert "Expected `float` >= 0" in fails(run_main, report, before)
    report.write_text(report.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert "old.json cannot be read" in fails(run_main, report, before)


# --- real pairs: what it says first is what was changed


@pytest.mark.parametrize(
    ("fault", "finding", "part"),
    [
        ("loader", "data_loading", ("idle", "data")),
        ("item", "host_sync", None),
        ("empty_cache", "allocator", ("idle", "allocator")),
        ("collector", "host_stall", ("idle", "host")),
        ("checkpoint", "device_to_host_copy", ("exposed copies", "")),
        ("casts", "layout_copies", None),
        ("eager", "unfused_elementwise", ("compute", "elementwise")),
    ],
)
def test_a_fault_that_is_gone(fault: str, finding: str, part: tuple[str, str] | None, tmp_path: Path) -> None:
    """The captures of faults of the control's size, against the control."""
    (one,) = nsys_analyzer.compare(unpack_fault(fault, tmp_path), unpack_fault("none", tmp_path)).compared
    assert one.findings
    assert (one.findings[0].finding.id, one.findings[0].status) == (finding, "gone")
    assert one.step
    if part:
        assert (one.step.parts[0].kind, one.step.parts[0].name) == part
        assert one.verdict() == "faster"


def compile_pair(before: str, after: str) -> Any:
    (one,) = nsys_analyzer.compare(*(COMPILED / f"small_ctx256_train_{name}" for name in (before, after))).compared
    return one


def test_fp32_against_bf16() -> None:
    """The matmuls take a third of their time; the steps of this small model wait for launches in their place."""
    one = compile_pair("fp32", "bf16")
    assert [(each.key, each.before, each.after) for each in one.differences] == [("precision", "fp32", "bf16")]
    assert (one.findings[0].finding.id, one.findings[0].status) == ("fp32_matmul", "gone")
    matmul = next(part for part in one.step.parts if part.kind == "compute")
    assert (matmul.name, matmul.change.is_change, matmul.change.ms < 0) == ("matmul", True, True)
    paired = [each for each in matmul.kernels if each.before_name and each.after_name]
    assert sum(each.change.before_ms for each in paired) > 0.3 * matmul.change.before_ms, "kernels stand for each other"
    for each in paired:  # with the same operands transposed
        operands = re.findall(r"_(nn|nt|tn)[nt]?(?![a-z])", f"{each.before_name} {each.after_name}".lower())
        assert not operands or (len(operands), len(set(operands))) == (2, 1)


def test_eager_against_compiled() -> None:
    one = compile_pair("fp32", "fp32_compile")
    assert [(each.key, each.before, each.after) for each in one.differences] == [("compile", "off", "on")]
    finding = one.findings[0]
    assert (one.verdict(), finding.finding.id, finding.status) == ("faster", "unfused_attention", "gone")
    assert next(part for part in one.step.parts if part.kind == "compute").name == "elementwise"
    assert one.step.after_launches < 0.5 * one.step.before_launches


def test_models_without_a_module_in_common_are_refused(run_main: Main, tmp_path: Path) -> None:
    """Programs whose manifests name no model, but the modules whose FLOPs were counted; each is its own run."""
    for name in ("gan", "vision"):
        for ending in ("sqlite.xz", "manifest.json"):
            unpack(EXAMPLES / "programs" / "captures" / f"{name}.{ending}", tmp_path)
    outcome = run_main("compare", tmp_path / "gan.sqlite", tmp_path / "vision.sqlite")
    assert outcome.code == 1
    assert "The models of gan and vision have no module in common" in outcome.err
    folder = run_main("compare", tmp_path, tmp_path, "--format", "json")
    assert [one["before"][0]["name"] for one in json.loads(folder.out)["comparisons"]] == ["gan", "vision"]
