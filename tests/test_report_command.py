"""``nsys-analyze report``, from the command line to the files it leaves."""

import json
import os
import re
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
from tests.conftest import Main, Outcome
from tests.support.commands import make_command_test, section
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


def captures_table(markdown: str) -> list[tuple[str, str]]:
    """Name and status of each row of the conditions' first table."""
    lines = section(markdown, "Conditions").strip().split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    titles, _, *rest = rows
    return [(row[1].replace("<wbr>", ""), row[titles.index("status")]) for row in rest]


def first_capture(ended: Outcome) -> dict[str, Any]:
    capture: dict[str, Any] = json.loads(ended.out)["captures"][0]
    return capture


def warnings_of_timings(ended: Outcome) -> list[str]:
    return [warning for warning in first_capture(ended)["warnings"] if "timings" in warning]


def unprofiled_forward_ms(ended: Outcome) -> dict[str, float | None]:
    """The unprofiled mean of forward of each capture."""
    captures = json.loads(ended.out)["captures"]
    times = {capture["name"]: (capture["unprofiled"] or {}).get("phases", {}).get("forward") for capture in captures}
    return {name: time and time["mean"] for name, time in times.items()}


def forward_ms(ended: Outcome) -> float | None:
    """The unprofiled mean of forward, as its phase has it."""
    python = first_capture(ended)["phases"][0]["python_ms"]
    return python and float(python["mean"])


FIGURES: dict[str, Callable[[Outcome], Any]] = {
    "table": lambda ended: captures_table(ended.out),
    "forward": lambda ended: first_capture(ended)["phases"][0],
    "forward_ms": forward_ms,
    "unprofiled_forward_ms": unprofiled_forward_ms,
    "unprofiled_phases": lambda ended: [*first_capture(ended)["unprofiled"]["phases"]],
    "doubts": lambda ended: [*first_capture(ended)["unprofiled"]["doubts"]],
    "warnings_of_timings": warnings_of_timings,
    "warning_count": lambda ended: len(warnings_of_timings(ended)),
    "last_warning": lambda ended: first_capture(ended)["warnings"][-1],
}
BUILDERS = {"two_steps": two_steps, "two_processes": lambda: two_steps(200, two_steps(100))}
test_report = make_command_test("report", builders=BUILDERS, figures=FIGURES)
test_unprofiled_times = make_command_test("report_times", builders=BUILDERS, figures=FIGURES)


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
        "How far are the times from the hardware's limits?", "What each operator should cost", "Details", "About",
    ]  # fmt: skip
    for part in parts[-2:]:
        assert not re.sub(r"<details>.*?</details>", "", part.partition("\n")[2], flags=re.S).strip()
    assert not re.search(r"</summary>\s*</details>", text)


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


def test_json_into_a_file(folder: Path) -> None:
    assert report("train.sqlite", "--format", "json", "-o", "answers.json") == ""
    data = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    assert data == as_json("train.sqlite")
    assert data == as_json("train.sqlite", "-o", "-")


def test_the_time_of_a_step_by_the_api(folder: Path) -> None:
    diagnosis = summarize(folder / "train.sqlite", step_ms=10.0)[0].diagnosis
    assert diagnosis
    assert diagnosis.is_timed


# --- several captures ---


def test_an_export_beside_its_report_is_one_capture(here: Path) -> None:
    (here / "runs").mkdir()
    (here / "runs/train.nsys-rep").write_bytes(b"a report")
    path = two_steps().write(here / "runs/train.sqlite")
    later = (here / "runs/train.nsys-rep").stat().st_mtime + 60
    os.utime(path, (later, later))
    assert [capture["source"] for capture in as_json("runs")["captures"]] == ["train.sqlite"]


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


# --- what goes wrong ---


def write_bad_files(here: Path) -> None:
    """Writes an existing report beside everything that cannot be read or written."""
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


test_errors = make_command_test("report_errors", prepare=write_bad_files)


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
