"""``nsys-analyze compare``, from the command line to what it prints and how it ends."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nsys_analyzer
from tests.conftest import Main
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


@pytest.fixture
def compare(run_main: Main) -> Callable[..., str]:
    """What the command prints, with single spaces on one line."""

    def run(*arguments: object) -> str:
        outcome = run_main("compare", *arguments)
        assert outcome.code == 0, outcome.err
        return re.sub(r"\s+", " ", outcome.out)

    return run


def fails(run_main: Main, *arguments: object, code: int = 1) -> str:
    outcome = run_main("compare", *arguments)
    assert (outcome.code, outcome.out) == (code, "")
    return outcome.err


# --- what it prints


def test_the_answer_and_its_tables(before: Path, after: Path, compare: Callable[..., str]) -> None:
    text = compare(before, after)
    assert "before → after Slower: a step takes 6.300 → 6.800 ms under the profiler, +7.9 % (95 % interval " in text
    assert "Compared: 4 steps before, 4 steps after. What explains the change" in text
    assert "compute: matmul 5.000 5.500 +0.500 (" in text
    assert "the step 6.300 6.800 +0.500 (" in text
    assert "forward, GPU busy 6.000 6.500 +8.3 % (" in text


def test_on_80_columns(before: Path, after: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, run_main("compare", before, after).out.splitlines())) <= 80


def test_markdown(before: Path, after: Path, tmp_path: Path, run_main: Main) -> None:
    printed = run_main("compare", before, after, "--format", "markdown").out
    assert printed.startswith("# before → after\n\n**Slower: a step takes 6.300 → 6.800\N{NO-BREAK SPACE}ms under")
    assert re.search(r"^\| compute: matmul +\| +5\.000 \| +5\.500 \|", printed, re.MULTILINE)
    target = tmp_path / "pr.md"
    assert run_main("compare", before, after, "-o", target).out == f"{target}\n"
    assert target.read_text(encoding="utf-8").startswith(printed)
    assert run_main("compare", before, after, "-o", target).code == 0, "it replaces what it wrote"
    target.write_text("mine", encoding="utf-8")
    assert "not written by nsys-analyze" in fails(run_main, before, after, "-o", target)


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


def test_a_limit_for_ci(before: Path, after: Path, run_main: Main) -> None:
    """7.9 % is above 5 %, and not above 10 %; faster is fine."""
    assert run_main("compare", before, after, "--fail-above", "5%").code == 3
    assert run_main("compare", before, after, "--fail-above", "10").code == 0
    assert run_main("compare", after, before, "--fail-above", "5%").code == 0
    assert run_main("compare", before, after).code == 0
    wrong = run_main("compare", before, after, "--fail-above", "x")
    assert (wrong.code, "is not a percentage, such as 5%" in wrong.err) == (2, True)


def test_what_is_refused(before: Path, tmp_path: Path, run_main: Main, compare: Callable[..., str]) -> None:
    other = steps(gpu="NVIDIA A100").write(tmp_path / "other.sqlite")
    empty = Export().gpu().range("step", 0, MS).write(tmp_path / "empty.sqlite")
    partial = steps().range("forward", 100 * MS, None).write(tmp_path / "partial.sqlite")
    for path, said in (
        (empty, "empty contains no kernel"),
        (partial, "partial is partial"),
        (tmp_path / "absent.sqlite", "No such file"),
    ):
        assert said in fails(run_main, before, path)
    said = "before ran on NVIDIA H200, other on NVIDIA A100. To compare them nevertheless, add --force"
    assert said in fails(run_main, before, other, code=4)
    forced = "The sides are compared because of --force, although: - before ran on NVIDIA H200"
    assert forced in compare(before, other, "--force")
    assert "No change: a step takes 6.300 → 6.300 ms under the profiler" in compare(before, before)
    assert "- Both sides are the same capture." in compare(before, before)


def test_a_report_of_an_older_version(before: Path, tmp_path: Path, run_main: Main) -> None:
    report = tmp_path / "old.json"
    run_main("report", before, "--format", "json", "-o", report)
    data = json.loads(report.read_text(encoding="utf-8"))
    del data["captures"][0]["step"]["wall_values_ms"]
    report.write_text(json.dumps(data), encoding="utf-8")
    error = fails(run_main, report, before)
    assert "lacks what a comparison needs" in error
    assert "Write it again: nsys-analyze report CAPTURE --format json -o old.json" in error
    data["captures"][0]["step"]["wall_values_ms"] = [1.0, -1.0]
    report.write_text(json.dumps(data), encoding="utf-8")
    assert "Expected `float` >= 0" in fails(run_main, report, before)
    report.write_text(report.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert "old.json cannot be read" in fails(run_main, report, before)


def test_a_report_holds_its_times(before: Path, after: Path, tmp_path: Path, run_main: Main) -> None:
    report = tmp_path / "after.json"
    run_main("report", after, "--format", "json", "-o", report)
    (tmp_path / "times.csv").write_text("model,phase,mean_ms\nsmall,step,6.5\n", encoding="utf-8")
    error = fails(run_main, before, report, "--csv-after", tmp_path / "times.csv")
    assert f"{report} is a report, which contains its own times. Leave out --csv for it" in error
    assert run_main("compare", before, report, "--csv-before", tmp_path / "times.csv").code == 0


# --- folders


def test_folders_are_matched(tmp_path: Path, run_main: Main, compare: Callable[..., str]) -> None:
    """Two pairs, one of which is refused, and a capture that the other side lacks."""
    for folder, us in (("a", 5_000), ("b", 5_500)):
        (tmp_path / folder).mkdir()
        for length in (128, 256):
            gpu = "NVIDIA A100" if (folder, length) == ("b", 256) else "NVIDIA H200"
            steps(us, gpu=gpu).write(tmp_path / folder / f"small_ctx{length}_train_fp32.sqlite")
    steps().write(tmp_path / "a" / "small_ctx512_train_fp32.sqlite")
    text = compare(tmp_path / "a", tmp_path / "b")
    assert text.startswith("small_ctx128_train_fp32 Slower: ")
    assert (
        "Not compared: - small_ctx256_train_fp32 and small_ctx256_train_fp32: small_ctx256_train_fp32 ran on NV" in text
    )
    assert "small_ctx512_train_fp32 is only before" in text
    assert run_main("compare", tmp_path / "a", tmp_path / "b", "--fail-above", "50%").code == 1, "one has no match"
    forced = compare(tmp_path / "a", tmp_path / "b", "--force")
    assert "pair before after change verdict largest change" in forced
    assert "6.300 6.800 +7.9 % slower compute: matmul, " in forced  # the longer cells are broken
    markdown = run_main("compare", tmp_path / "a", tmp_path / "b", "--force", "--format", "markdown").out
    assert markdown.count("<details><summary>") == 5, "of two pairs, the figures of each, and what the words mean"
    data = json.loads(run_main("compare", tmp_path / "a", tmp_path / "b", "--format", "json").out)
    assert [len(data[key]) for key in ("comparisons", "refused", "unmatched")] == [1, 1, 1]


def test_runs_of_one_program(tmp_path: Path, compare: Callable[..., str]) -> None:
    for folder, times in (("a", (5_000, 5_010, 4_990)), ("b", (5_500, 5_510, 5_490))):
        (tmp_path / folder).mkdir()
        for i, us in enumerate(times):
            steps(us).write(tmp_path / folder / f"run{folder}{i}.sqlite")
    text = compare(tmp_path / "a", tmp_path / "b", "--repeats")
    assert text.startswith("runa0 and 2 more → runb0 and 2 more Slower: ")
    assert "Compared: 3 runs before, 3 runs after." in text


def test_a_bad_file_of_a_folder(tmp_path: Path, run_main: Main, compare: Callable[..., str]) -> None:
    """It keeps its reason, and the others are compared; with a limit for CI that is no success."""
    sides = [tmp_path / folder for folder in ("a", "b")]
    for folder, us in zip(sides, (5_000, 5_500), strict=True):
        folder.mkdir()
        for i in range(2):
            steps(us + i).write(folder / f"run{i}.sqlite")
        (folder / "bad.sqlite").write_text("no database", encoding="utf-8")
    for options in ((), ("--force",)):
        text = compare(*sides, "--repeats", *options)
        assert text.startswith("run0 and 1 more Slower: a step takes 6.3")
        assert "Compared: 2 runs before, 2 runs after." in text
        assert "forward, GPU busy 6.0" in text
        for side, folder in zip(("Before", "After"), sides, strict=True):
            said = f"{side}: bad failed ({folder / 'bad.sqlite'} is not a SQLite file."
            assert "".join(said.split()) in "".join(text.split())  # a long path is broken between lines
    data = json.loads(run_main("compare", *sides, "--repeats", "--format", "json").out)
    assert [(one["side"], one["name"]) for one in data["unmatched"]] == [("before", "bad"), ("after", "bad")]
    assert data["unmatched"][0]["reasons"][0].startswith("bad failed (")
    assert run_main("compare", *sides, "--repeats", "--fail-above", "50%").code == 1
    assert run_main("compare", *sides, "--repeats", "--fail-above", "1%").code == 3
    for i in range(2):
        (sides[1] / f"run{i}.sqlite").write_text("no database", encoding="utf-8")
    assert "None of 3 captures could be read" in fails(run_main, *sides, "--repeats")


@pytest.mark.parametrize(
    ("columns", "rows", "said"),
    [
        # an unprofiled step comes first
        (
            "model,context_length,phase,mean_ms,std_ms,median_ms,steps",
            ("small,256,step,6.1,0.01,6.1,10", "small,256,step,6.6,0.01,6.6,10"),
            (
                "Slower: a step takes 6.100 → 6.600 ms without the profiler, +8.2 % (95 % interval ",
                "A step takes 6.300 → 6.800 ms under the profiler, +7.9 % (95 % interval ",
                "step, without the profiler 6.100 6.600 +8.2 % (",
            ),
        ),
        # an unknown number is not called one step; what tells an interval is asked for
        (
            "model,phase,mean_ms,steps",
            ("small,step,6.1,", "small,step,6.6,10"),
            (
                "Compared: an unknown number of steps before, 10 steps after.",
                "How much the steps vary is not known. Record more steps, or give their number and standard deviation",
            ),
        ),
    ],
)
def test_timings_of_the_sides(
    before: Path, after: Path, tmp_path: Path, compare: Callable[..., str], columns: str, rows: tuple[str, str],
    said: tuple[str, str],
) -> None:  # fmt: skip
    """Those that are named, or those of the folder."""
    files = [tmp_path / "before.csv", tmp_path / "after.csv"]
    for file, row in zip(files, rows, strict=True):
        file.write_text(f"{columns}\n{row}\n", encoding="utf-8")
    given = ("--model", "small", "--context-length", "256")
    text = compare(before, after, "--csv-before", files[0], "--csv-after", files[1], *given)
    assert all(line in text for line in said)
    shutil.copy(files[0], tmp_path / "timings.csv")
    both = "a step takes 6.100 → 6.100 ms without the profiler"
    assert both in compare(before, before, *given)


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
    assert (one.verdict(), finding.finding.id, finding.status) == ("faster", "unfused_elementwise", "gone")
    assert next(part for part in one.step.parts if part.kind == "compute").name == "elementwise"
    assert one.step.after_launches < 0.5 * one.step.before_launches


def test_a_capture_with_more_ranges_than_the_other(real_capture: Callable[[str], Path], run_main: Main) -> None:
    """One was recorded with autograd's ranges: what makes it slower is the profiler, and no change of the program."""
    printed = run_main("compare", real_capture("train_small256"), real_capture("mem_small256")).out
    assert "The profiler slows the two sides down differently" in re.sub(r"\s+", " ", printed)


def test_ranks_are_compared_one_by_one(real_capture: Callable[[str], Path], tmp_path: Path, run_main: Main) -> None:
    report = tmp_path / "ranks.json"
    run_main("report", real_capture("ddp2_small256"), "--format", "json", "-o", report)
    data = json.loads(run_main("compare", report, report, "--format", "json").out)
    pairs = [(one["before"][0]["process"], one["after"][0]["process"]) for one in data["comparisons"]]
    assert len(pairs) == 2
    assert all(before == after for before, after in pairs)


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
