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
from tests.support.commands import section
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


def ended(capture: str, status: str, message: str = "") -> str:
    return f"{capture},2.7B,1024,4,fp32,train,step,5,,,,,,,,{status},{message}\n"


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


# --- timings by capture ---


def test_timings_that_name_their_capture(runs: Path) -> None:
    """Of three captures of one configuration each has its own times, and none those of another one."""
    for name in ("eager", "compiled", "untimed"):
        run_of(runs, name, two_steps(), compile=name == "compiled")
    csv = timings(runs, timed("eager", "forward", 3.2), timed("compiled", "forward", 2.0, peak=1 << 30))
    captures = as_json("--csv", csv)
    assert list(captures) == ["compiled", "eager", "untimed"]
    assert captures["untimed"]["unprofiled"] is None
    assert captures["compiled"]["run"]["compile"] is True
    # forward is 4 ms of wall: 4 ÷ 3.2 − 1 = 25 %, 4 ÷ 2 − 1 = 100 %
    for name, ms, peak, overhead in (("eager", 3.2, 2 << 30, 0.25), ("compiled", 2.0, 1 << 30, 1.0)):
        unprofiled = captures[name]["unprofiled"]
        assert captures[name]["phases"][0]["python_ms"]["mean"] == unprofiled["phases"]["forward"]["mean"] == ms
        assert unprofiled["peak_memory_bytes"] == peak
        assert unprofiled["profiler_overhead"]["forward"] == pytest.approx(overhead)


def test_rows_without_a_present_capture_fit_by_configuration(runs: Path) -> None:
    """A capture that was renamed after it was timed; what it used is no row of its own."""
    run_of(runs, "renamed", two_steps())
    captures = as_json("--csv", timings(runs, timed("before", "forward", 3.2)))
    assert list(captures) == ["renamed"]
    assert captures["renamed"]["phases"][0]["python_ms"]["mean"] == 3.2


# --- the section of unprofiled timings ---


def test_timings_spread_overhead_and_tokens(runs: Path) -> None:
    run_of(runs, "eager", two_steps())
    rows = (("forward", 3.2), ("backward", 5.0), ("step", 10.0))
    whole = as_text("--csv", timings(runs, *(timed("eager", *row) for row in rows)))
    text = section(whole, "How long does each phase take?")
    # 4 × 256 tokens in 10 ms: 102,400 a second; a step is 12 ms under the profiler: 12 ÷ 10 − 1 = 20 %
    assert "102,400 tokens/s, peak memory 2.0 GiB." in text
    assert "**10 ms a step (measured; profiled 12)" in whole
    # span: from 0.1 to 11 ms; busy 1.5 + 3 + 1 ms, 55 % of 10 ms
    step = [
        "step",
        "2",
        "10.0 (9.0 – 11.0)",
        "12.00",
        "10.90",
        "5.500",
        "5.500",
        "20.0 %",
        "55.0 %",
        "55.0 %",
        "GPU waits",
    ]
    assert step in rows_of(section(whole, "How long"))


def test_no_overhead_where_nothing_synchronises(runs: Path) -> None:
    """The kernel of forward ends 8 ms after its range of 2 ms."""
    ms = 1_000_000
    export = Export().gpu().range("forward", 0, 2 * ms).kernel("ampere_sgemm_128x64_tn", ms, 2 * ms, 10 * ms)
    run_of(runs, "eager", export)
    capture = as_json("--csv", timings(runs, timed("eager", "forward", 9.0)))["eager"]
    assert capture["unprofiled"]["profiler_overhead"] == {"forward": None}


def test_how_runs_ended(runs: Path) -> None:
    run_of(runs, "eager", two_steps())
    csv = timings(runs, timed("eager", "step", 10.0), ended("big", "oom"), ended("slow", "timeout", "no end after 9 s"))
    assert captures_table(as_text("--csv", csv))[1:] == [
        ("big", "out of memory"),
        ("slow", "timeout: no end after 9 s"),
    ]


def test_the_step_by_context_length_is_drawn(runs: Path) -> None:
    run_of(runs, "short", context_length=128, profiler="none")
    run_of(runs, "long", context_length=256, profiler="none")
    csv = timings(runs, timed("short", "step", 10.0), timed("long", "step", 21.0))
    report = build_and_write([runs], csv, runs / "report.md", "nsys-analyze run --model small")
    (figure, *_) = report.figures
    assert isinstance(figure, Lines)
    assert figure.series == (("small", ((128, 10.0), (256, 21.0))),)
    assert (runs / "report_figures" / "step.png").is_file()


# --- statuses ---


def test_statuses_of_runs(runs: Path) -> None:
    """Without a trace; with one that timed out; with a torn one: what a run says outranks what its trace cannot."""
    run_of(runs, "a", profiler="none")
    run_of(runs, "b", status="timeout", message="no end after 600 s")
    run_of(runs, "c", profiler="nsys")
    run_of(runs, "d", status="failed", message="exit code 1: ImportError")
    run_of(runs, "e", two_steps(), status="timeout", message="no end after 9 s")
    run_of(runs, "f", status="failed", message="killed")
    (runs / "f/capture.sqlite").write_bytes(b"half a trace")
    captures = as_json(runs)
    ends = {
        "a": ("not_profiled", None), "b": ("timeout", "no end after 600 s"), "c": ("failed", "its trace is missing"),
        "d": ("failed", "exit code 1: ImportError"), "e": ("timeout", "no end after 9 s"), "f": ("failed", "killed"),
    }  # fmt: skip
    assert {name: (capture["status"], capture["message"]) for name, capture in captures.items()} == ends
    words = [(name, status.replace("_", " "), message) for name, (status, message) in ends.items()]
    shown = [(name, f"{status}: {message}" if message else status) for name, status, message in words]
    assert captures_table(as_text(runs)) == shown
    assert captures["e"]["phases"][0]["instances"] == 2
    assert "is not a SQLite file" in captures["f"]["warnings"][0]


def test_a_long_message_is_cut_in_the_table_and_whole_among_the_warnings(runs: Path) -> None:
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9 GiB"
    run_of(runs, "a", status="failed", message=said)
    text = as_text(runs)
    ((_, status),) = captures_table(text)
    assert status.startswith("failed: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert status.endswith("…")
    assert said in section(text, " warning")


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


def test_timings_alone(tmp_path: Path) -> None:
    """No trace and no manifest."""
    text = as_text("--csv", timings(tmp_path, timed("", "forward", 3.2), timed("", "backward", 5.0)))
    assert captures_table(text) == [("small_ctx256_b4_fp32_train", "not profiled")]
    assert ["forward", "3.200"] in [row[:2] for row in rows_of(text)]


def test_a_missing_trace_is_an_error_with_timings_too(tmp_path: Path) -> None:
    csv = timings(tmp_path, timed("", "forward", 3.2))
    with pytest.raises(TraceError, match="No such file"):
        build_and_write([tmp_path / "absent.sqlite"], csv, tmp_path / "report.md", "")


def test_timings_without_a_row(runs: Path) -> None:
    """A program of one's own times nothing: the file of its run has a header alone."""
    run_of(runs, "a", two_steps())
    timings(runs)
    build_and_write([runs], None, runs / "report.md", "nsys-analyze run -- python train.py")
    text = (runs / "report.md").read_text(encoding="utf-8")
    assert captures_table(text) == [("a", "ok")]
    assert "Timed in a separate run" not in text


# --- recorders ---


def cpu_export() -> Export:
    """What the torch recorder writes on a machine without a GPU."""
    export = two_steps(export=Export())
    export.add("TARGET_INFO_GPU", id=0, name="CPU", totalMemory=0, smCount=0)
    rows = export._rows["META_DATA_EXPORT"]
    rows[0]["value"] = "2.13.0"
    rows.append({"name": "EXPORT_PRODUCT_NAME", "value": "torch.profiler"})
    return export


def test_a_capture_of_the_cpu_says_so(runs: Path) -> None:
    run_of(runs, "laptop", cpu_export(), device="cpu", profiler="torch")
    text = as_text(runs)
    assert "\n\nCPU · fp32 · small, context 256, batch 4 · 2 training steps · PyTorch 2.13\n\n" in text
    # 1.5 + 3 + 1 of 12 ms
    assert "**12 ms a step under the profiler · operators run for 46 % of it**" in text
    assert "forward takes 4 ms (operators 1.5 ms), " in section(text, "How long")
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


def test_profilers_by_name(runs: Path) -> None:
    run_of(runs, "laptop", cpu_export())
    run_of(runs, "server", two_steps())
    captures = as_json(runs)
    keys = ("profiler", "profiler_version")
    assert [captures["laptop"][key] for key in keys] == ["torch", "2.13.0"]
    assert [captures["server"][key] for key in keys] == ["nsys", "2025.3.2.0"]


def test_what_a_run_was_asked_for(runs: Path) -> None:
    asked = {"attention": "sdpa", "compile": True, "cuda_graph": False, "seed": 0}
    run_of(runs, "a", two_steps(), torch="2.13.0", **asked)
    rows = rows_of(section(as_text(runs), "Conditions"))
    (at,) = (i for i, row in enumerate(rows) if "compiled" in row)
    assert rows[at] == ["capture", "precision", "attention", "compiled", "CUDA graph", "seed"]
    assert rows[at + 1] == ["a", "fp32", "sdpa", "yes", "no", "0"]
    assert dict(zip(rows[2], rows[3], strict=True))["torch"] == "2.13.0"


def test_the_commands_that_made_the_captures(runs: Path) -> None:
    run_of(runs, "a", two_steps(), command="nsys profile -o capture python train.py --model small")
    run_of(runs, "b", two_steps(), command="nsys profile -o capture python train.py --model other")
    text = section(as_text(runs), "How this report was made")
    assert "# the capture a\nnsys profile -o capture python train.py" in text
    assert "--sample=none" not in text
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
