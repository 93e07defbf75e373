"""``nsys-analyze report``, from the command line to the files it leaves."""

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nsys_analyzer import summarize
from nsys_analyzer.cli.main import cli
from nsys_analyzer.inputs import captures
from nsys_analyzer.report.renderers import RENDERERS
from tests.conftest import Main
from tests.support.export import ADD, AUTOGRAD, GEMM, Export

RealCapture = Callable[[str], Path]
MS = 1_000_000
PNG = b"\x89PNG\r\n\x1a\n"
HEADER = "model,context_length,batch_size,precision,mode,phase,steps,mean_ms,std_ms,status\n"

OLD = f"# the old report\n\n{RENDERERS['markdown'].mark}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def folder(here: Path) -> Path:
    """The working folder, with a capture of two steps: train.sqlite."""
    two_steps().write(here / "train.sqlite")
    return here


def report(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["report", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: object) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(report(*arguments, "--format", "json"))
    return data


def two_steps(pid: int = 100, export: Export | None = None) -> Export:
    """Two steps of 12 ms, one behind the other.

    forward [0, 4) ms: 100 GEMMs of 0.01 ms and an ADD of 0.5 ms: sum and busy 1.5 ms, matmul 66.7 %
    backward [4, 10) ms: a GEMM of 2 ms and an ADD of 1 ms, launched by autograd: 3 ms, matmul 66.7 %
    optimizer [10, 12) ms: an ADD of 1 ms
    """
    export = export or Export().gpu()
    export.thread(AUTOGRAD, "pt_autograd_0", pid)
    for at in (0, 12 * MS):
        export.range("step", at, at + 12 * MS, pid=pid)
        export.range("forward", at, at + 4 * MS, pid=pid)
        for i in range(100):
            start = at + 100_000 + i * 10_000
            export.kernel(GEMM, start - 5_000, start, start + 10_000, pid=pid)
        export.kernel(ADD, at + 2 * MS, at + 2 * MS + 100, at + 2 * MS + 500_100, pid=pid)
        export.range("backward", at + 4 * MS, at + 10 * MS, pid=pid)
        export.kernel(GEMM, at + 5 * MS, at + 5 * MS + 10, at + 7 * MS + 10, AUTOGRAD, pid)
        export.kernel(ADD, at + 7 * MS, at + 7 * MS + 20, at + 8 * MS + 20, AUTOGRAD, pid)
        export.range("optimizer", at + 10 * MS, at + 12 * MS, pid=pid)
        export.kernel(ADD, at + 10 * MS + 5, at + 10 * MS + 10, at + 11 * MS + 10, pid=pid)
    return export


def section(markdown: str, title: str) -> str:
    """The text below the first heading, or inside the first fold, whose title holds these words."""
    start = re.search(rf"^(?:## |<details>)[^\n]*{re.escape(title)}[^\n]*\n", markdown, re.M)
    assert start, f"{title!r} is no title of: {re.findall('^(?:##|<details>).*', markdown, re.M)}"
    rest = markdown[start.end() :]
    if start[0].startswith("## "):
        return re.split(r"^## ", rest, maxsplit=1, flags=re.M)[0]
    depth = 1
    for mark in re.finditer("<(/?)details>", rest):
        depth += -1 if mark[1] else 1
        if depth == 0:
            return rest[: mark.start()]
    pytest.fail(f"{title} is not closed")


def captures_table(markdown: str) -> list[tuple[str, str]]:
    """Name and status of each row of the conditions' first table."""
    lines = section(markdown, "Conditions").strip().split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    titles, _, *rest = rows
    return [(row[1].replace("<wbr>", ""), row[titles.index("status")]) for row in rest]


# --- what it writes ---


@pytest.mark.parametrize(
    ("options", "name"), [((), "report"), (("-o", "out/deep/answers.md", "--force"), "out/deep/answers")]
)
def test_a_report_stands_beside_its_figure_and_is_replaced(folder: Path, options: tuple[str, ...], name: str) -> None:
    page, figures = folder / f"{name}.md", folder / f"{name}_figures"
    out = report("train.sqlite", *options)
    assert out.endswith(f"\n{name}.md\n")
    assert "≈ 10.6" in out  # the first screen
    assert "Findings" not in out
    assert {*page.parent.iterdir()} - {folder / "train.sqlite"} == {page, figures}
    (link,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert [page.parent / link] == [*figures.iterdir()]
    assert (page.parent / link).read_bytes().startswith(PNG)
    first = page.read_bytes()
    report("train.sqlite", *options)
    assert page.read_bytes() == first


def test_the_figures_of_the_report_are_right(folder: Path) -> None:
    report("train.sqlite", "--no-figures")
    text = (folder / "report.md").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    shown = re.sub(" +", " ", text)
    # span of forward: from 0.1 ms to 2.5001 ms
    # 101 API calls of 5.2 us are 0.525 ms at most: 1.5 of 4 to 1.5 of 3.475 ms; in backward two of 6 ms
    for phase in ("| forward | 2 | 4.000 | 2.400 | 1.500 | 1.500 | 37.5 % | 43.2 % | GPU waits |",
                  "| backward | 2 | 6.000 | 3.000 | 3.000 | 3.000 | 50.0 % | 50.1 % | GPU waits |"):  # fmt: skip
        assert phase in section(shown, "How long does each phase take?")
    # 1.0 of 1.5 ms, 2 of 3 ms, 0 of 1 ms; (1 + 2 + 0) of 5.5 ms
    assert (
        "Matmul is 66.7 % of forward, 66.7 % of backward, 0.0 % of the optimizer, 54.5 % of the training step" in text
    )
    # GEMM: 100 × 0.01 + 2 ms; ADD: 0.5 + 1 + 1 ms; without work: 12 − 5.5 ms
    fills = section(shown, "What fills a step")
    assert (
        "| compute: matmul | 3.000 | 25.0 % | – |\n| compute: elementwise | 2.500 | 20.8 % | – |\n"
        "| idle | 6.500 | 54.2 % | 6.500 |" in fills
    )


def test_what_comes_first(folder: Path) -> None:
    """The decision above every title, then findings, then the answers; all else is folded; nothing is empty."""
    text = report(folder / "train.sqlite", "-o", "-", "--no-figures").replace("\N{NO-BREAK SPACE}", " ")
    first, *parts = re.split(r"^## ", text, flags=re.M)
    assert first.startswith("# train\n\nNVIDIA H200 · fp32 · 2 training steps · nsys 2025.3\n\n**≈ 10.6 ms a step (")
    assert "Do first" in first
    assert "The model, context length and batch size are not known" in first
    assert len(first.splitlines()) <= 35
    assert [part.partition("\n")[0] for part in parts] == [
        "Findings", "How long does each phase take?", "Which kernel takes the most time?",
        "Which other kernels and classes take much time?", "What share is matmul?",
        "How far are the times from the hardware's limits?", "Details", "About",
    ]  # fmt: skip
    for part in parts[-2:]:
        assert not re.sub(r"<details>.*?</details>", "", part.partition("\n")[2], flags=re.S).strip()
    assert not re.search(r"</summary>\s*</details>", text)


def test_a_dash_prints(folder: Path) -> None:
    printed = report("train.sqlite", "-o", "-")
    assert printed.startswith("# ")
    assert "![" not in printed
    assert [path.name for path in folder.iterdir()] == ["train.sqlite"]


def test_a_page_is_opened(folder: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it is written; a name with what a URL has no place for is escaped."""
    opened: list[tuple[str, bool]] = []

    def browser(url: str) -> bool:
        opened.append((url, (folder / "a page#1.html").exists()))
        return True

    monkeypatch.setattr(webbrowser, "open", browser)
    done = run_main("report", "train.sqlite", "--format", "html", "--open", "--no-figures", "-o", "a page#1.html")
    assert done.code == 0, done.err
    assert opened == [((folder / "a page#1.html").as_uri(), True)]
    assert opened[0][0].endswith("/a%20page%231.html")
    assert "browser" not in done.err


@pytest.mark.skipif(os.name == "nt", reason="the browser is a shell script")
def test_the_users_browser_is_opened(folder: Path) -> None:
    browser = folder / "browser.sh"
    browser.write_text('#!/bin/sh\nprintf %s "$1" > opened\n')
    browser.chmod(0o755)
    subprocess.run(
        [sys.executable, "-m", "nsys_analyzer", "report", "train.sqlite", "--format", "html", "--open"],
        env={**os.environ, "BROWSER": f"{browser} %s"}, check=True, capture_output=True,
    )  # fmt: skip
    assert (folder / "opened").read_text() == (folder / "report.html").as_uri()


def test_if_no_browser_can_be_opened_the_page_is_named(
    folder: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _: False)
    done = run_main("report", "train.sqlite", "--format", "html", "--open", "--no-figures")
    assert done.code == 0
    assert done.err == "No browser could be opened. Open report.html in one.\n"
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("given", [(), ("--format", "json"), ("--format", "html", "-o", "-")])
def test_only_a_page_can_be_opened(here: Path, run_main: Main, given: tuple[str, ...]) -> None:
    """Said before anything is read or written."""
    done = run_main("report", "capture.sqlite", "--open", *given)
    assert done.code == 2
    error = " ".join(done.err.split())
    assert "--open shows a page in a browser: it needs --format html, and a file instead of -o -." in error
    assert not list(here.iterdir())


def test_no_figures(folder: Path) -> None:
    report("train.sqlite", "--no-figures")
    assert "![" not in (folder / "report.md").read_text(encoding="utf-8")
    assert not (folder / "report_figures").exists()


def test_the_command_makes_the_report_again(here: Path, run_main: Main) -> None:
    """Without the folders of the machine it was made on, and the same the second time."""
    path = two_steps().write(here / "my capture.sqlite")
    arguments = ("report", path, "-o", here / "answers.md", "--no-figures", "--phase-name", "forward=my fwd")
    assert run_main(*arguments).code == 0
    text = (here / "answers.md").read_text(encoding="utf-8")
    assert "nsys-analyze report 'my capture.sqlite' -o answers.md --no-figures --phase-name 'forward=my fwd'" in text
    assert str(here) not in text
    assert run_main(*arguments).code == 0
    assert (here / "answers.md").read_text(encoding="utf-8") == text


def test_no_two_figures_share_a_file(here: Path) -> None:
    """The same file name in two folders: two captures, told apart in tables, answers and figures."""
    for folder in ("before", "after"):
        (here / folder).mkdir()
        two_steps().write(here / folder / "train.sqlite")
    report("before/train.sqlite", "after/train.sqlite")
    text = (here / "report.md").read_text(encoding="utf-8")
    assert captures_table(text) == [("after/train", "ok"), ("before/train", "ok")]
    links = re.findall(r"\]\((report_figures/[^)]+)\)", text)
    assert len(links) == len(set(links)) == 2


# --- JSON ---

STATS = {"n", "mean", "std", "min", "median", "max"}
CAPTURE = {
    "name", "process", "source", "status", "gpu", "profiler", "conditions", "phases", "top_kernels", "matmul",
    "attention", "peak_memory_bytes", "coverage", "warnings",
}  # fmt: skip
PHASE = {
    "phase", "range", "instances", "warmup_instances", "kernels_per_instance", "wall_ms",
    "gpu_span_ms", "gpu_busy_ms", "kernel_sum_ms", "python_ms", "classes", "kernels",
}  # fmt: skip
KERNEL = {"name", "label", "class", "launches_per_instance", "ms_per_instance", "avg_us", "share"}
CLASS = {"class", "launches_per_instance", "ms_per_instance", "share"}
COVERAGE = {"kernels", "attributed", "in_phases", "unattributed", "kernel_ms", "attributed_ms"}


def test_how_often_a_phase_runs_in_a_step(real_capture: RealCapture) -> None:
    """Two micro-batches are one step; where each phase runs once, no column says so."""
    text = re.sub(" +", " ", report(real_capture("accumulate_tf32"), "-o", "-", "--no-figures"))
    assert "| phase | passes per step | profiled ms |" in text
    assert all(row in text for row in ("| forward | 2 |", "| backward | 2 |", "| optimizer | 1 |"))
    assert "passes per step" not in report(real_capture("train_small256"), "-o", "-", "--no-figures")


def test_json_schema(real_capture: RealCapture) -> None:
    data = as_json(real_capture("train_small256"))
    assert data["schema_version"] == 1
    (capture,) = data["captures"]
    assert set(capture) >= CAPTURE
    assert (capture["name"], capture["process"], capture["status"]) == ("train_small256", None, "ok")
    assert (capture["gpu"], capture["source"]) == ("NVIDIA H200", "train_small256.sqlite")
    assert set(capture["coverage"]) >= COVERAGE
    assert set(capture["attention"]) >= {"softmax_ms", "matmul_ms", "runtime_ratio", "flop_ratio"}
    assert [phase["phase"] for phase in capture["phases"]] == ["forward", "loss", "backward", "optimizer", "step"]
    for phase in capture["phases"]:
        assert set(phase) >= PHASE
        assert phase["python_ms"] is None
        for clock in ("wall_ms", "gpu_span_ms", "gpu_busy_ms", "kernel_sum_ms"):
            assert set(phase[clock]) == STATS
        times = [kernel["ms_per_instance"] for kernel in phase["kernels"]]
        assert times == sorted(times, reverse=True)
        assert all(set(kernel) == KERNEL for kernel in phase["kernels"])
        assert all(set(row) == CLASS for row in phase["classes"])
        assert sum(kernel["share"] for kernel in phase["kernels"]) == pytest.approx(1)
        assert sum(times) == pytest.approx(phase["kernel_sum_ms"]["mean"])
    label_of = {kernel["name"]: kernel["label"] for phase in capture["phases"] for kernel in phase["kernels"]}
    assert len(set(label_of.values())) == len(label_of)


def test_json_values(folder: Path) -> None:
    (capture,) = as_json(folder / "train.sqlite")["captures"]
    forward = capture["phases"][0]
    assert (forward["phase"], forward["range"], forward["instances"]) == ("forward", "forward", 2)
    assert forward["kernels_per_instance"] == 101
    assert forward["wall_ms"] == {"n": 2, "mean": 4.0, "std": 0.0, "min": 4.0, "median": 4.0, "max": 4.0}
    assert forward["gpu_busy_ms"]["mean"] == pytest.approx(1.5)
    gemm = forward["kernels"][0]
    assert (gemm["name"], gemm["class"], gemm["launches_per_instance"]) == (GEMM, "matmul", 100)
    assert [gemm["ms_per_instance"], gemm["avg_us"], gemm["share"]] == pytest.approx([1.0, 10.0, 2 / 3])
    assert capture["attention"] is None
    # twice 100 + 1 + 2 + 1 kernels of 5.5 ms
    assert {key: capture["coverage"][key] for key in COVERAGE} == pytest.approx(
        {"kernels": 208, "attributed": 208, "in_phases": 208, "unattributed": 0, "kernel_ms": 11, "attributed_ms": 11}
    )
    assert capture["profiler_version"] == "2025.3.2.0"


def test_json_holds_the_answers(folder: Path) -> None:
    """Forward and backward have 1.0 and 2.0 ms of matmul in 1.5 and 3.0 ms; the step 3.0 in 5.5, and 2.5 of ADD."""
    (capture,) = as_json(folder / "train.sqlite")["captures"]
    leaders = {one["scope"]: one["kernel"] for one in capture["top_kernels"]}
    assert list(leaders) == ["forward", "backward", "forward+backward"]
    assert {one["name"] for one in leaders.values()} == {GEMM}
    assert [one["share"] for one in leaders.values()] == pytest.approx([2 / 3] * 3)
    matmul = capture["matmul"]
    assert {one["scope"]: one["matmul"] for one in matmul["phases"]} == pytest.approx(
        {"forward": 2 / 3, "backward": 2 / 3, "optimizer": 0}
    )
    assert (matmul["step"]["scope"], matmul["inference_of"]) == ("training step", None)
    assert (matmul["step"]["matmul"], matmul["inference"]["matmul"]) == pytest.approx((3 / 5.5, 2 / 3))
    assert capture["conditions"]["platform"] == "CUDA"
    assert capture["peak_memory_bytes"] is None


def test_json_into_a_file(folder: Path) -> None:
    assert report("train.sqlite", "--format", "json", "-o", "answers.json") == ""
    data = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    assert data == as_json("train.sqlite")
    assert data == as_json("train.sqlite", "-o", "-")


# --- several captures ---

ORDER = ["small_ctx128", "small_ctx256", "medium_ctx128"]


def test_a_folder_in_order_of_model_and_context(here: Path) -> None:
    folder = here / "captures"
    folder.mkdir()
    for name in ORDER:
        two_steps().write(folder / f"{name}.sqlite")
    captures = as_json("captures")["captures"]
    assert [capture["name"] for capture in captures] == ORDER
    assert [c["configuration"]["model"] for c in captures] == ["small", "small", "medium"]
    named = [folder / f"{name}.sqlite" for name in reversed(ORDER)]
    assert [capture["name"] for capture in as_json(*named)["captures"]] == ORDER


def test_a_folder_of_folders(here: Path) -> None:
    """One folder for each run, each trace called `capture`: the folder names the run."""
    for name in ORDER:
        (here / "runs" / name).mkdir(parents=True)
        two_steps().write(here / "runs" / name / "capture.sqlite")
    assert [capture["name"] for capture in as_json("runs")["captures"]] == ORDER


def test_an_export_beside_its_report_is_one_capture(here: Path) -> None:
    (here / "runs").mkdir()
    (here / "runs/train.nsys-rep").write_bytes(b"a report")
    path = two_steps().write(here / "runs/train.sqlite")
    later = (here / "runs/train.nsys-rep").stat().st_mtime + 60
    os.utime(path, (later, later))
    assert [capture["source"] for capture in as_json("runs")["captures"]] == ["train.sqlite"]


def test_a_file_given_twice_is_one_capture(folder: Path) -> None:
    assert len(as_json(folder / "train.sqlite", ".", "./train.sqlite")["captures"]) == 1


def test_a_run_out_of_memory_keeps_a_row(here: Path) -> None:
    two_steps().write(here / "small_ctx128.sqlite")
    run = here / "2.7B_ctx512"
    run.mkdir()
    manifest = {"model": "2.7B", "context_length": 512, "status": "oom", "message": "CUDA out of memory"}
    (run / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (row,) = [c for c in as_json(".")["captures"] if c["status"] != "ok"]
    assert (row["name"], row["status"], row["message"]) == ("2.7B_ctx512", "oom", "CUDA out of memory")
    assert (row["phases"], row["attention"], row["coverage"], row["gpu"]) == ([], None, None, None)
    assert captures_table(report(".", "-o", "-")) == [
        ("small_ctx128", "ok"),
        ("2.7B_ctx512", "out of memory"),
    ]


def test_only_a_run_out_of_memory(here: Path) -> None:
    (here / "large_ctx1024.manifest.json").write_text('{"status": "oom"}', encoding="utf-8")
    text = report(".", "-o", "-")
    assert captures_table(text) == [("large_ctx1024", "out of memory")]
    assert "\nout of memory\n\n**There is no capture of this run.**\n" in text


def test_a_damaged_capture_among_good_ones(here: Path, run_main: Main) -> None:
    whole = two_steps().write(here / "small_ctx128.sqlite").read_bytes()
    (here / "small_ctx256.sqlite").write_bytes(whole[: len(whole) // 2])
    (here / "notes.sqlite").write_bytes(b"no database at all")
    outcome = run_main("report", ".", "--no-figures")
    assert (outcome.code, outcome.err) == (0, "")
    text = (here / "report.md").read_text(encoding="utf-8")
    table = dict(captures_table(text))
    assert list(table) == ["small_ctx128", "small_ctx256", "notes"]  # what is not known comes last
    assert table["small_ctx128"] == "ok"
    assert table["small_ctx256"] == "failed"
    assert table["notes"] == "failed"
    assert "notes.sqlite is not a SQLite file" in section(text, " warning")
    assert "small_ctx256.sqlite is damaged" in section(text, " warning")


@pytest.mark.parametrize(("words", "variable"), [((), None), (("--debug",), None), ((), "1")])
def test_a_bug_shows_its_traceback_where_that_is_asked(
    here: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], variable: str | None
) -> None:
    def broken(trace: Any, title: str, *others: Any, **more: Any) -> Any:
        if title != "c":
            raise KeyError("x")
        return whole(trace, title, *others, **more)

    whole = captures.summarize

    monkeypatch.setenv("NSYS_ANALYZE_DEBUG", variable or "")
    monkeypatch.setattr(captures, "summarize", broken)
    for name in ("a", "b", "c"):
        two_steps().write(here / f"{name}.sqlite")
    outcome = run_main(*words, "report", ".", "--no-figures")
    assert outcome.code == 0
    assert outcome.err.count('raise KeyError("x")') == (2 if words or variable else 0)
    text = (here / "report.md").read_text(encoding="utf-8")
    assert "a.sqlite cannot be read: KeyError, 'x'. Please report this with the traceback that " in text


def test_two_processes_are_two_entries(here: Path) -> None:
    export = two_steps(200, two_steps(100))
    export.write(here / "ddp.sqlite")
    captures = as_json("ddp.sqlite")["captures"]
    assert [(c["name"], c["process"], c["pid"]) for c in captures] == [
        ("ddp", "pid 100", 100),
        ("ddp", "pid 200", 200),
    ]
    assert [c["coverage"]["kernels"] for c in captures] == [208, 208]
    assert [c["phases"][0]["kernels_per_instance"] for c in captures] == [101, 101]
    assert captures_table(report("ddp.sqlite", "-o", "-")) == [("ddp pid 100", "ok"), ("ddp pid 200", "ok")]


# --- phases ---


def test_a_trace_without_phases_still_reports(here: Path) -> None:
    Export().gpu().range("my work", 0, MS).kernel(GEMM, 10, 20, 20 + MS).write(here / "trace.sqlite")
    text = report("trace.sqlite", "-o", "-").replace("\N{NO-BREAK SPACE}", " ")
    assert 'torch.cuda.nvtx.range("forward")' in section(text, " warning")
    assert "`my work`" in section(text, " warning")
    assert f"`{GEMM}` in the whole capture (100.0 % of the time, 1 launch)." in section(text, "Which kernel")


def test_a_phase_by_name(here: Path) -> None:
    export = Export().gpu().range("model_fwd", 0, 2 * MS).kernel(GEMM, 10, 20, 20 + MS)
    export.range("tokens", 3 * MS, 4 * MS).kernel(ADD, 3 * MS + 1, 3 * MS + 2, 3 * MS + 102)
    export.write(here / "trace.sqlite")
    (capture,) = as_json("trace.sqlite", "--phase-name", "forward=model_fwd", "--phase-name", "data=tokens")["captures"]
    assert [(p["phase"], p["range"], p["kernels_per_instance"]) for p in capture["phases"]] == [
        ("forward", "model_fwd", 1),
        ("data", "tokens", 1),
    ]


def test_the_configuration_from_options(here: Path) -> None:
    two_steps().write(here / "trace.sqlite")
    options = ("--model", "2.7b", "--context-length", 512, "--batch-size", 4, "--precision", "bf16")
    (capture,) = as_json("trace.sqlite", *options)["captures"]
    known = capture["configuration"]
    assert [known[key] for key in ("model", "context_length", "batch_size", "precision", "source")] == [
        "2.7B", 512, 4, "bf16", "command line",
    ]  # fmt: skip


# --- timings of unprofiled runs ---


@pytest.fixture
def timed(here: Path) -> Path:
    """A capture with timings: forward 3.2 ms (profiled 4), backward 5 ms (profiled 6), and a run out of memory."""
    two_steps().write(here / "small_ctx256.sqlite")
    rows = (
        "small,256,4,fp32,train,forward,10,3.2,0.1,ok\n"
        "small,256,4,fp32,train,backward,10,5.0,0.2,ok\n"
        "2.7B,512,4,fp32,train,forward,10,,,oom\n"
    )
    (here / "timings.csv").write_text(HEADER + rows, encoding="utf-8")
    return here


def captures_with_times(folder: Path, timings: str, *paths: str) -> list[dict[str, Any]]:
    """The captures in a report with these unprofiled times."""
    (folder / "timings.csv").write_text(timings, encoding="utf-8")
    captures: list[dict[str, Any]] = as_json(*paths, "--csv", "timings.csv")["captures"]
    return captures


def forward_of(captures: list[dict[str, Any]]) -> tuple[float | None, list[str]]:
    """The unprofiled mean of the first capture's forward, and the warnings that speak of timings."""
    python = captures[0]["phases"][0]["python_ms"]
    return python and python["mean"], [line for line in captures[0]["warnings"] if "timings" in line]


def test_python_clock_and_overhead(timed: Path) -> None:
    text = report("small_ctx256.sqlite", "--csv", timed / "timings.csv", "-o", "-").replace("\N{NO-BREAK SPACE}", " ")
    # 4 ÷ 3.2 - 1 = 25 %; 6 ÷ 5 - 1 = 20 %; 1.5 of 3.2 ms, 3 of 5 ms
    shown = re.sub(" +", " ", section(text, "<summary>small_ctx256"))
    assert "| forward | 2 | 3.200 | 4.000 | 2.400 | 1.500 | 1.500 | 25.0 % | 46.9 % | 46.9 % | GPU waits |" in shown
    assert "| backward | 2 | 5.000 | 6.000 | 3.000 | 3.000 | 3.000 | 20.0 % | 60.0 % | 60.0 % | GPU waits |" in shown
    assert (
        "**Under the profiler forward takes 4 ms (GPU busy 1.5 ms), backward takes 6 ms" in shown
    )  # optimizer: untimed
    phases = as_json("small_ctx256.sqlite", "--csv", "timings.csv")["captures"][0]["phases"]
    assert phases[0]["python_ms"] == {"n": 10, "mean": 3.2, "std": 0.1, "min": None, "median": None, "max": None}
    assert [phase["python_ms"] is None for phase in phases] == [False, False, True, True]


def test_the_folder_of_the_timings(timed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(timed.parent)
    captures = as_json("--csv", "work/timings.csv")["captures"]
    assert [(c["name"], c["status"]) for c in captures] == [("small_ctx256", "ok"), ("2.7B_ctx512_b4_fp32", "oom")]


def test_only_another_precision_ran_out_of_memory(here: Path) -> None:
    """One row for it, whatever the modes, and for what was only timed; none for what has a capture."""
    two_steps().write(here / "small_ctx256_bf16.sqlite")
    rows = (
        "small,256,4,fp32,train,forward,10,,,oom\n"
        "small,256,4,fp32,forward,forward,10,,,oom\n"
        "small,256,4,bf16,train,forward,10,,,oom\n"
        "small,512,4,fp32,train,forward,10,9.0,,ok\n"
    )
    captures = captures_with_times(here, HEADER + rows)
    assert [(c["name"], c["status"], c["configuration"]["precision"]) for c in captures] == [
        ("small_ctx256_b4_fp32", "oom", "fp32"),
        ("small_ctx256_bf16", "ok", "bf16"),
        ("small_ctx512_b4_fp32_train", "not_profiled", "fp32"),
    ]


def test_timings_of_another_configuration(timed: Path) -> None:
    (timed / "timings.csv").write_text(HEADER + "xl,1024,4,fp32,train,forward,10,3.2,0.1,ok\n", encoding="utf-8")
    text = report("small_ctx256.sqlite", "--csv", "timings.csv", "-o", "-")
    assert "timings.csv has no times, or several times, for this capture" in text


TWO_CONDITIONS = (
    "model,context_length,precision,compile,phase,mean_ms,std_ms\n"
    "small,256,fp32,False,forward,3.2,0.1\n"
    "small,256,fp32,True,forward,2.1,0.1\n"
    "small,256,bf16,False,forward,2.5,0.1\n"
)


def test_rows_of_two_conditions_are_not_chosen_from(timed: Path) -> None:
    """Of conditions that no kernel tells."""
    rows = TWO_CONDITIONS.replace("precision", "optimizer").replace("compile", "attention")
    mean, (warning,) = forward_of(captures_with_times(timed, rows, "small_ctx256.sqlite"))
    assert mean is None
    assert warning.startswith("timings.csv: ")
    assert "attention (False, True), optimizer (fp32, bf16)" in warning
    assert "give a file with only the rows of this run" in warning
    text = report("small_ctx256.sqlite", "--csv", "timings.csv", "-o", "-")
    assert "attention (False, True)" in section(text, " warning")


def test_rows_that_fit_a_capture_are_no_other_runs(timed: Path) -> None:
    """Of an unknown context they may be the capture's: only the other model is a run without a capture."""
    rows = "small,False,3.2\nsmall,True,2.1\nxl,False,90\n"
    captures = captures_with_times(timed, "model,compile,forward_ms\n" + rows)
    assert [capture["name"] for capture in captures] == ["small_ctx256", "xl_ctx?"]


def test_the_run_says_which_row(timed: Path) -> None:
    manifest = {"model": "small", "context_length": 256, "precision": "fp32", "compile": True, "mode": "train"}
    (timed / "small_ctx256.manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert forward_of(captures_with_times(timed, TWO_CONDITIONS, "small_ctx256.sqlite")) == (2.1, [])


def test_conditions_that_were_only_timed_have_rows_of_their_own(timed: Path) -> None:
    rows = "".join(f"small,512,fp32,{row}\n" for row in ("False,sdpa,9", "True,sdpa,6", "False,flex,10", "True,flex,7"))
    _, *captures = captures_with_times(timed, f"model,context_length,precision,compile,attention,forward_ms\n{rows}")
    assert {c["name"]: c["unprofiled"]["phases"]["forward"]["mean"] for c in captures} == {
        "small_ctx512_fp32_sdpa": 9.0,
        "small_ctx512_fp32_compiled_sdpa": 6.0,
        "small_ctx512_fp32_flex": 10.0,
        "small_ctx512_fp32_compiled_flex": 7.0,
    }


def test_a_file_for_each_phase(timed: Path) -> None:
    (timed / "timings.csv").unlink()
    (timed / "forward.csv").write_text("forward_ms\n3.2\n", encoding="utf-8")
    (timed / "backward.csv").write_text("phase,mean_ms\nbackward,5.0\n", encoding="utf-8")
    options = ("--csv", "forward.csv", "--csv", "backward.csv")
    capture = as_json("small_ctx256.sqlite", *options)["captures"][0]
    means = {phase: stats["mean"] for phase, stats in capture["unprofiled"]["phases"].items()}
    assert means == {"forward": 3.2, "backward": 5.0}


def test_the_time_of_a_step(timed: Path, run_main: Main) -> None:
    """10 ms, where it takes 12 under the profiler: an unprofiled time of the phase step, in doubt below 5.5."""
    (timed / "timings.csv").unlink()
    (capture,) = as_json("small_ctx256.sqlite", "--step-ms", "10")["captures"]
    step = {"n": None, "mean": 10.0, "std": None, "min": None, "median": None, "max": None}
    assert capture["unprofiled"]["phases"] == {"step": step}
    assert (capture["step"]["unprofiled_ms"]["timed"], capture["step"]["unprofiled_ms"]["low"]) == (True, 10.0)
    assert summarize(timed / "small_ctx256.sqlite", step_ms=10.0)[0].diagnosis.is_timed  # type: ignore[union-attr]
    text = report("small_ctx256.sqlite", "--step-ms", "10", "-o", "-")
    assert "**10 ms a step (measured; profiled 12)" in text.replace("\N{NO-BREAK SPACE}", " ")
    assert "Timed in a separate run" not in text
    (doubted,) = as_json("small_ctx256.sqlite", "--step-ms", "5")["captures"]
    assert doubted["warnings"][-1].startswith("--step-ms: the time of step, 5.000 ms, is not trusted")
    two_steps().write(timed / "other.sqlite")
    ended = run_main("report", "small_ctx256.sqlite", "other.sqlite", "--step-ms", "10")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "these are 2 captures. Give the times of each by --csv" in ended.err


@pytest.mark.parametrize(
    ("mean", "std", "reason"),
    [
        # forward: wall 4 ms, GPU busy 1.5 ms
        ("3.2", "3.3", "its standard deviation, 3.300 ms, exceeds its mean"),
        ("1.4", "0.01", "the GPU is busy for longer, 1.500 ms"),
        ("4.3", "0.1", "the phase is shorter under the profiler, 4.000 ms"),
        ("1.4", "0.08", ""),  # 0.1 ms less than busy: within 0.08 ms and 3 % of 1.5 ms
        ("4.2", "0.1", ""),  # 0.2 ms more than wall: within 0.1 ms and 3 % of 4.2 ms
    ],
)
def test_times_that_cannot_be_right_are_flagged(timed: Path, mean: str, std: str, reason: str) -> None:
    rows = f"small,256,4,fp32,train,backward,10,5.0,0.2,ok\nsmall,256,4,fp32,train,forward,10,{mean},{std},ok\n"
    captures = captures_with_times(timed, HEADER + rows, "small_ctx256.sqlite")
    unprofiled, (_, warnings) = captures[0]["unprofiled"], forward_of(captures)
    assert unprofiled["phases"]["forward"]["mean"] == float(mean)
    assert list(unprofiled["doubts"]) == (["forward"] if reason else [])
    if not reason:
        assert warnings == []
        return
    (warning,) = warnings
    assert warning.startswith(f"timings.csv, line 3: the time of forward, {float(mean):.3f} ms,")
    assert reason in warning
    assert reason in section(report("small_ctx256.sqlite", "--csv", "timings.csv", "-o", "-"), " warning")


def test_one_stall_is_no_doubt_about_a_median(timed: Path) -> None:
    """Nine steps of 3.0 ms and one of 18: their mean is 4.5 ms, their deviation 4.7, their median 3.0."""
    rows = "small,256,4,fp32,train,forward,10,4.5,4.7,3.0,ok\n"
    header = HEADER.replace("status", "median_ms,status")
    assert captures_with_times(timed, header + rows, "small_ctx256.sqlite")[0]["unprofiled"]["doubts"] == {}


def test_a_time_of_several_phases_is_compared_with_their_sum(timed: Path) -> None:
    """GPU busy of forward and backward: 1.5 + 3 = 4.5 ms; of the step, with the optimizer, 5.5 ms."""
    rows = "small,256,4,fp32,train,forward+backward,10,4,0,ok\nsmall,256,4,fp32,train,step,10,5,0,ok\n"
    _, warnings = forward_of(captures_with_times(timed, HEADER + rows, "small_ctx256.sqlite"))
    busy = [re.search(r"busy for longer, ([\d.]+) ms", line) for line in warnings]
    assert [found and found[1] for found in busy] == ["4.500", "5.500"]


def test_a_deviation_above_the_mean_without_a_capture(timed: Path) -> None:
    captures = captures_with_times(timed, HEADER + "xl,512,4,fp32,train,forward,10,50,99,ok\n")
    assert "deviation, 99.000 ms" in captures[1]["warnings"][0]


# --- what goes wrong ---


@pytest.fixture
def bad_files(here: Path) -> Path:
    """A working folder with an existing report beside everything that cannot be read or written."""
    whole = two_steps().write(here / "good.sqlite").read_bytes()
    (here / "cut.sqlite").write_bytes(whole[: len(whole) // 2])
    (here / "text.sqlite").write_text("no database\n", encoding="utf-8")
    (here / "empty.sqlite").touch()
    (here / "folder").mkdir()
    (here / "file").write_text("a file", encoding="utf-8")
    (here / "bad.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    Export().write(here / "nothing.sqlite")
    for ending in ("tar", "tar.gz"):
        with tarfile.open(here / f"traces.{ending}", f"w:{ending[4:]}") as archive:
            archive.add(here / "text.sqlite")
    for name in ("t.pftrace", "host.xplane.pb", "snapshot.pickle"):
        (here / name).write_bytes(b"\n\x20P\x01Z\x04")
    (here / "report.md").write_text(OLD, encoding="utf-8")
    return here


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("absent.sqlite", "absent.sqlite: No such file"),
        ("empty.sqlite", "empty.sqlite is empty"),
        ("text.sqlite", "text.sqlite is not a SQLite file"),
        ("traces.tar.gz", "traces.tar.gz is compressed or an archive (gzip). Unpack it"),
        ("traces.tar", "traces.tar is compressed or an archive (tar). Unpack it"),
        ("cut.sqlite", "cut.sqlite is damaged or truncated"),
        (
            "t.pftrace",
            "is a trace in Perfetto's own format. With PyTorch's profiler, write a Chrome trace: prof.export_",
        ),
        ("host.xplane.pb", "it is an XPlane file, which the profilers of TensorFlow and JAX write. Record the program"),
        (
            "snapshot.pickle",
            "it is a pickle file, such as a memory snapshot of PyTorch (see https://pytorch.org/memory_viz)",
        ),
        ("nothing.sqlite", "--trace=cuda,nvtx"),
        ("folder", "folder holds no trace"),
        ("cut.sqlite text.sqlite", "None of 2 captures could be read"),
        ("good.sqlite --csv absent.csv", "absent.csv: cannot be read"),
        ("good.sqlite --csv bad.csv", "bad.csv"),
        ("good.sqlite --csv folder", "folder"),
        ("good.sqlite --phase-name forward", "is not PHASE=RANGE"),
        ("good.sqlite --model huge", "Unknown model 'huge'. Known models: small"),
        ("good.sqlite --model larg", "Did you mean 'large'? Known models: small"),
        ("good.sqlite -o folder", "folder is a folder"),
        ("good.sqlite -o file/report.md", "file/report.md cannot be written"),
        ("good.sqlite -o file/below/report.md", "file/below/report.md cannot be written"),
        ("good.sqlite --format json -o folder", "folder is a folder"),
        ("good.sqlite --format json -o file/report.json", "cannot be written"),
    ],
)
def test_one_line_and_exit_code_1(bad_files: Path, run_main: Main, arguments: str, said: str) -> None:
    before = sorted(bad_files.rglob("*"))
    outcome = run_main("report", *shlex.split(arguments))
    assert (outcome.code, outcome.out) == (1, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("Error: ")
    assert said in line
    assert (bad_files / "report.md").read_text(encoding="utf-8") == OLD
    assert sorted(bad_files.rglob("*")) == before  # nothing half-made is left


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "Give a trace"),
        ("good.sqlite --colour", "No such option"),
        ("good.sqlite --format pdf", "'pdf'"),
        ("good.sqlite --context-length 0", "--context-length"),
        ("good.sqlite --batch-size many", "--batch-size"),
        ("good.sqlite --csv bad.csv --step-ms 10", "give only one of them"),
        ("good.sqlite --step-ms nan", "nan is not a time"),
    ],
)
def test_usage_errors_exit_with_2(bad_files: Path, run_main: Main, arguments: str, said: str) -> None:
    outcome = run_main("report", *shlex.split(arguments))
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    assert "Traceback" not in outcome.err
    assert (bad_files / "report.md").read_text(encoding="utf-8") == OLD


def test_a_report_in_a_subprocess(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "nsys_analyzer", "report", "train.sqlite"],
        capture_output=True, text=True, encoding="utf-8", check=False, env={**os.environ, "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("report.md\n")
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "nsys-analyze report train.sqlite" in text
    assert len(list((folder / "report_figures").glob("*.png"))) == 1


def test_a_terminal_without_utf_8(folder: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-m", "nsys_analyzer", "report", "train.sqlite", "--no-figures"],
        capture_output=True, env=environment, check=False,
    )  # fmt: skip
    assert b"Traceback" not in done.stderr
    assert done.returncode == 0
    assert "\N{NO-BREAK SPACE}ms" in (folder / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["train.sqlite", "timings.csv", "capture.nsys-rep"])
def test_no_report_is_written_over_an_input(folder: Path, run_main: Main, name: str) -> None:
    before = (folder / "train.sqlite").read_bytes()
    for output_format in ("markdown", "json"):
        outcome = run_main("report", "train.sqlite", "--no-figures", "--format", output_format, "-o", name)
        assert outcome.code == 1
        assert "has the name of an input" in outcome.err
    assert (folder / "train.sqlite").read_bytes() == before
    assert {path.name for path in folder.iterdir()} == {"train.sqlite"}


def test_the_suffix_says_the_format(folder: Path, run_main: Main) -> None:
    for name, start in (("r.md", "# "), ("r.html", "<!doctype html>"), ("r.JSON", "{")):
        assert run_main("report", "train.sqlite", "--no-figures", "-o", name).code == 0
        assert (folder / name).read_text(encoding="utf-8").lower().startswith(start)
    for words in (("-o", "r.parquet"), ("-o", "r.csv"), ("-o", "x.html", "--format", "json")):
        ended = run_main("report", "train.sqlite", *words)
        assert (ended.code, "Name another file with -o" in ended.err) == (1, True)
        assert not (folder / words[1]).exists()


def test_an_option_does_not_make_a_file_name_believed(here: Path) -> None:
    """The kernels contradict the name's model, with `--batch-size` as without."""
    two_steps().write(here / "xl_ctx256.sqlite")
    for options in ((), ("--batch-size", "4")):
        text = report("xl_ctx256.sqlite", *options, "-o", "-")
        assert "The name is ignored" in text
        assert "1,998,235,200" not in text


def test_a_phase_that_no_range_is_called(folder: Path) -> None:
    text = report(folder / "train.sqlite", "--phase-name", "forward=nosuch", "-o", "-")
    assert "No range is called `nosuch`" in section(text, " warning")


@pytest.mark.parametrize(
    ("name", "timings", "options", "expected"),
    [
        # Nothing names the capture's precision, but its only GEMM is an sgemm.
        ("small_ctx256", "model,context_length,precision,phase,mean_ms\nsmall,256,bf16,forward,4\n"
         "small,256,fp32,forward,8\n", (), 8),
        # A table without a model takes the option.
        ("run", "phase,mean_ms\nforward,5\n", ("--model", "small", "--context-length", "256"), 5),
    ],
)  # fmt: skip
def test_the_kernels_or_an_option_tell_which_row_is_the_captures(
    here: Path, name: str, timings: str, options: tuple[str, ...], expected: float
) -> None:
    export = Export().gpu().range("forward", 0, 9_000_000).kernel(GEMM, 10, 20, 2_000_020)
    export.write(here / f"{name}.sqlite")
    captures = captures_with_times(here, timings, f"{name}.sqlite", *options)
    (capture,) = (capture for capture in captures if capture["name"] == name)
    assert capture["unprofiled"]["phases"]["forward"]["mean"] == expected
