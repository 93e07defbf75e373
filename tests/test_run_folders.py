"""The report of a folder of runs: manifests, timings by capture, statuses, recorders, and many captures at once."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import TraceError
from nsys_analyzer.experiments.evidence import make_evidence
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.model import Lines, Report
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.report.writing import write_report
from tests.conftest import Outcome
from tests.support.commands import make_command_test, section
from tests.support.export import Export
from tests.test_report_command import captures_table, two_steps

HEADER = (
    "capture,model,context_length,batch_size,precision,mode,phase,warmup_steps,steps,"
    "mean_ms,std_ms,min_ms,median_ms,max_ms,peak_memory_bytes,status,message\n"
)
MANIFEST = {"model": "small", "context_length": 256, "batch_size": 4, "precision": "fp32", "mode": "train"}


def build_and_write(paths: list[Path], csv: Path | None, output: Path, command: str) -> Report:
    built = build_report(make_evidence(gather(paths, [csv] if csv else []), command))
    write_report("markdown", built, output)
    return built


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def run_of(folder: Path, name: str, export: Export | None = None, **manifest: Any) -> None:
    """One run's folder: its manifest, and its trace where it left one."""
    (folder / name).mkdir()
    values = {"schema_version": 1, **MANIFEST, "status": "ok", "capture": "capture.sqlite", **manifest}
    (folder / name / "manifest.json").write_text(json.dumps(values), encoding="utf-8")
    if export:
        export.write(folder / name / "capture.sqlite")


def timed(capture: str, phase: str, mean: float, peak: int = 2 << 30, mode: str = "train") -> str:
    return f"{capture},small,256,4,fp32,{mode},{phase},5,10,{mean},0.1,{mean - 1},{mean},{mean + 1},{peak},ok,\n"


def timings(folder: Path, *rows: str) -> Path:
    path = folder / "timings.csv"
    path.write_text(HEADER + "".join(rows), encoding="utf-8")
    return path


def as_json(*arguments: object) -> dict[str, dict[str, Any]]:
    words = ["report", *map(str, arguments), "--format", "json"]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return {capture["name"]: capture for capture in json.loads(result.stdout)["captures"]}


def as_text(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["report", *map(str, arguments), "-o", "-"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.replace("\N{NO-BREAK SPACE}", " ")


def rows_of(text: str) -> list[list[str]]:
    """The cells of every table's rows, heads included."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|:")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def cpu_export() -> Export:
    """What the torch recorder writes on a machine without a GPU."""
    export = two_steps(export=Export())
    export.add("TARGET_INFO_GPU", id=0, name="CPU", totalMemory=0, smCount=0)
    rows = export._rows["META_DATA_EXPORT"]
    rows[0]["value"] = "2.13.0"
    rows.append({"name": "EXPORT_PRODUCT_NAME", "value": "torch.profiler"})
    return export


def torch_of(ended: Outcome) -> str:
    """The version of PyTorch in the first table of the conditions."""
    titles, row = rows_of(section(ended.out, "Conditions"))[2:4]
    return dict(zip(titles, row, strict=True))["torch"]


test_run_folders = make_command_test(
    "run_folders", builders={"two_steps": two_steps, "cpu_steps": cpu_export},
    figures={"table": lambda ended: captures_table(ended.out), "torch": torch_of},
)  # fmt: skip


def test_the_step_by_context_length_is_drawn(runs: Path) -> None:
    run_of(runs, "short", context_length=128, profiler="none")
    run_of(runs, "long", context_length=256, profiler="none")
    csv = timings(runs, timed("short", "step", 10.0), timed("long", "step", 21.0))
    report = build_and_write([runs], csv, runs / "report.md", "nsys-analyze run --model small")
    (figure, *_) = report.figures
    assert isinstance(figure, Lines)
    assert figure.series == (("small", ((128, 10.0), (256, 21.0))),)
    assert (runs / "report_figures" / "step.png").is_file()


@pytest.mark.parametrize("what", ["its list", "a file in it"])
def test_a_subfolder_that_cannot_be_read_costs_itself(what: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        run_of(runs, name, two_steps())
    iterdir, is_file = Path.iterdir, Path.is_file

    def denied(path: Path) -> None:
        if path.is_relative_to(runs / "b"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    if what == "its list":
        monkeypatch.setattr(Path, "iterdir", lambda path: denied(path) or iterdir(path))
    monkeypatch.setattr(Path, "is_file", lambda path: denied(path) or is_file(path))
    assert captures_table(as_text(runs)) == [("a", "ok"), ("b", "failed")]
    message = as_json(runs)["b"]["message"]
    assert message == f"{runs}/b cannot be read (Permission denied). Make it readable: chmod u+rx {runs}/b"
    (runs / "a/capture.sqlite").unlink()
    (runs / "a/manifest.json").unlink()
    with pytest.raises(TraceError, match=r"None of 1 captures could be read; the first: .*/b cannot be read"):
        as_text(runs)


def test_links_that_lead_nowhere_and_a_malformed_manifest_cost_themselves(runs: Path) -> None:
    run_of(runs, "a", two_steps())
    run_of(runs, "b", status="oom", message="CUDA out of memory")
    (runs / "b/manifest.json").write_text("{", encoding="utf-8")
    (runs / "circle.sqlite").symlink_to("circle.sqlite")
    (runs / "gone.sqlite").symlink_to("/no/such/place.sqlite")
    (runs / "circle").symlink_to("circle")
    ends = {name: status.partition(":")[0] for name, status in captures_table(as_text(runs))}
    assert ends == {"a": "ok", "b": "failed", "circle": "failed", "gone": "failed"}
    assert "not JSON" in as_json(runs)["b"]["message"]


# --- recorders ---


def test_a_capture_of_the_cpu_says_so(runs: Path) -> None:
    run_of(runs, "laptop", cpu_export(), device="cpu", profiler="torch")
    text = as_text(runs)
    assert "\n\nCPU · fp32 · small, context 256, batch 4 · 2 training steps · PyTorch 2.13\n\n" in text
    # 1.5 + 3 + 1 of 12 ms
    assert "**12 ms a step under the profiler · operators run for 46 % of the step**" in text
    assert "forward takes 4 ms (operators run for 1.5 ms)." in section(text, "How long")
    assert "The GPU waits" not in text
    assert "Estimated cost" not in text
    assert section(text, "Which operator takes the most time?")
    assert rows_of(section(text, "How long"))[0][-3:] == [
        "operator span ms",
        "operators busy ms",
        "total operator time ms",
    ]
    conditions = rows_of(section(text, "Conditions"))
    assert dict(zip(conditions[2], conditions[3], strict=True))["GPU"] == "none (CPU)"


def test_the_command_that_made_the_report(runs: Path) -> None:
    run_of(runs, "a", two_steps())
    build_and_write([runs], None, runs / "report.md", "nsys-analyze run --model small,medium")
    text = section((runs / "report.md").read_text(encoding="utf-8"), "How this report was made")
    assert "# this report\nnsys-analyze run --model small,medium" in text


# --- many captures ---


def test_many_captures_are_rows_first_and_answers_folded(runs: Path) -> None:
    names = [f"run{i}" for i in range(8)]
    for name in names:
        run_of(runs, name, two_steps())
    csv = timings(runs, *(timed(name, "step", 10.0) for name in names))
    build_and_write([runs], csv, runs / "report.md", "nsys-analyze run")
    text = (runs / "report.md").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    open_text = re.sub(r"<details>.*?</details>", "", text, flags=re.S)
    # busy 1.5 + 3 + 1 of the 10 ms of an unprofiled step; matmul 1 + 2 of 5.5 ms; all ended well, so no column says so
    titles, *rows = rows_of(open_text)
    shown = [dict(zip(titles, row, strict=True)) for row in rows[:8]]
    assert [row["capture"] for row in shown] == names
    assert "status" not in titles
    assert {row["Step ms"] for row in shown} == {"10.00"}
    assert {row["GPU works"] for row in shown} == {"55.0 %"}
    assert {row["Matmul's share of kernel time"] for row in shown} == {"54.5 %"}
    assert "10 ms a step" not in open_text
    for name in names:
        assert "**10 ms a step (measured; profiled 12)" in section(text, f"<summary>{name}<")


@pytest.mark.parametrize("named", ["", "first", "first/capture.sqlite"])
@pytest.mark.parametrize("kept", ["timings.csv", "manifest.json"])
def test_unprofiled_times_are_used_whichever_file_or_folder_is_named(runs: Path, named: str, kept: str) -> None:
    """A step of the first capture takes 3 ms without the profiler, by the folder's table or by the manifest alone.

    The second capture's 7 ms are those of a row that was not asked for, and of no row of the report.
    """
    for name, ms in (("first", 3.0), ("second", 7.0)) if kept == "timings.csv" else (("first", 3.0),):
        by_manifest = {"timings": {"status": "ok", "times_ms": {"step": [ms, ms]}}} if kept == "manifest.json" else {}
        run_of(runs, name, two_steps(), **by_manifest)
    if kept == "timings.csv":
        timings(runs, timed("first", "step", 3.0), timed("second", "step", 7.0))
    captures = gather([runs / named]).captures
    assert [one.name for one in captures] == (["first", "second"] if kept == "timings.csv" and not named else ["first"])
    assert captures[0].unprofiled
    assert captures[0].unprofiled.typical_ms("step") == 3.0
