"""``nsys-analyze bench``: what is planned, what is kept, what is refused, and what report makes of it."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nsys_analyzer.cli.main import cli
from nsys_analyzer.cli.run_progress import show_progress
from nsys_analyzer.configuration import Option
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments import benches
from nsys_analyzer.experiments.model import Bench, Results
from nsys_analyzer.experiments.running import BenchPlan, run_bench
from nsys_analyzer.inputs.rows import ROWS_FILE, CaseTarget, Task, read_rows_file, to_json_values
from nsys_analyzer.report.model import Bars, Paragraph
from tests.conftest import ROOT
from tests.support.rows import check, default_settings, unpadded
from tests.support.sweeping import default_signals, wait_for

Run = Callable[..., tuple[str, bool]]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)


TARGET: CaseTarget[Any, Any] = CaseTarget("tests.support.case_target")
BARS = Bars("test-bars", "Bars", ("a", "b"), (("ms", (1.0, 2.0)),), "ms")


def ends(results: Results) -> Iterator[str]:
    yield ", ".join(f"{row.case['ends']} {row.status}" for row in results.rows) + "."


def case(ends: str, number: int = 0) -> Task[Any]:
    return Task(TARGET, {"ends": ends, "number": number}, f"{ends} {number}")


def fake(name: str) -> Bench:
    number = Option((1,), "a number", several=True, name="number")
    return Bench(
        name=name, title="test", summary="A test.", options=(number,), target=TARGET,
        write_sentences=ends, make_tables_and_charts=lambda _: (BARS,),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs cases of a bench into a folder: the first words of its section, and whether it ended well."""

    def started(*cases: Task[Any], name: str = "test", resume: bool | None = None) -> tuple[str, bool]:
        bench = fake(name)
        monkeypatch.setattr(benches, "BENCHES", (fake("test"), fake("other")))
        report, well = run_bench(BenchPlan(bench, cases), tmp_path / "b", 30, resume, show_progress, "bench")
        first = report.sections[0].blocks[0]
        assert isinstance(first, Paragraph)
        return str(first.text).partition(".")[0], well

    return started


def test_what_is_written(run: Run, tmp_path: Path) -> None:
    assert run(case("ok"), case("oom"), case("ok", 2)) == ("ok ok, oom oom, ok ok", True)
    folder = tmp_path / "b"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", ROWS_FILE, "target.log", "test.md", "test_figures",
    ]  # fmt: skip
    assert [row.status for row in read_rows_file(folder / ROWS_FILE)[1]] == ["ok", "oom", "ok"]
    assert "![Bars](test_figures/test-bars.png)" in (folder / "test.md").read_text()


def test_a_failure_is_tried_again_and_the_rest_kept(run: Run, tmp_path: Path) -> None:
    assert run(case("ok"), case("failed")) == ("ok ok, failed failed", False)
    first = read_rows_file(tmp_path / "b" / ROWS_FILE)[1][0].figures["pid"]
    run(case("ok"), case("failed"), case("ok", 2), resume=True)
    rows = read_rows_file(tmp_path / "b" / ROWS_FILE)[1]
    assert [row.status for row in rows] == ["ok", "failed", "ok"]
    assert rows[0].figures["pid"] == first


def test_results_that_are_there_are_not_touched_unasked(run: Run, tmp_path: Path) -> None:
    run(case("ok"))
    before = (tmp_path / "b" / ROWS_FILE).read_text()
    with pytest.raises(ConfigurationError, match=r"already exists\. --resume keeps finished results"):
        run(case("ok"))
    with pytest.raises(ConfigurationError, match=r"holds results of bench test\. Choose another --output-dir"):
        run(case("ok"), name="other", resume=True)
    assert (tmp_path / "b" / ROWS_FILE).read_text() == before
    assert run(case("ok", 7), resume=False) == ("ok ok", True)
    assert [row.case["number"] for row in read_rows_file(tmp_path / "b" / ROWS_FILE)[1]] == [7]


def test_report_takes_the_sections_in(run: Run, tmp_path: Path) -> None:
    run(case("ok"), case("oom"))
    for place in (tmp_path, tmp_path / "b"):
        done = invoke("report", place, "-o", tmp_path / "r.md")
        assert done.exit_code == 0, done.output
        text = (tmp_path / "r.md").read_text()
        assert text.startswith(
            "# Experiments on transformers\n\n## Bench: test\n\nok ok, oom oom. Out of memory: case_target.\n\n*Cond"
        )
        assert "![Bars](r_figures/" in text
    data = json.loads(invoke("report", tmp_path / "b", "--format", "json").output)
    assert data["captures"] == []
    assert [row["status"] for row in data["benches"][0]["rows"]] == ["ok", "oom"]


def test_report_puts_benches_behind_captures(run: Run, tmp_path: Path, real_capture: Callable[[str], Path]) -> None:
    run(case("ok"))
    done = invoke("report", real_capture("train_small256"), tmp_path / "b", "-o", tmp_path / "r.md")
    assert done.exit_code == 0, done.output
    titles = [line for line in (tmp_path / "r.md").read_text().splitlines() if line.startswith("## ")]
    assert titles[0] == "## Findings"
    assert titles[-1] == "## Bench: test"


def test_a_damaged_file_ends_no_report_of_others(run: Run, tmp_path: Path, real_capture: Callable[[str], Path]) -> None:
    run(case("ok"))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ROWS_FILE).write_text("{}\n")
    for others in ([tmp_path / "b"], [real_capture("train_small256")]):
        done = invoke("report", *others, tmp_path / "c", "-o", tmp_path / "r.md", "--no-figures")
        assert done.exit_code == 0, done.output
        text = (tmp_path / "r.md").read_text()
        assert "## Bench: c\n\nLeft out: " in text
        assert "was not written by nsys-analyze bench of this version" in text


ROW = {"module": "profiling_targets.attention", "status": "ok", "figures": {},
       "case": {"device": "cpu", "d_head": 8, "context_length": 16, "compile": False}}  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{}], "was not written by nsys-analyze bench of this version"),
        ([{"schema_version": 1, "bench": "of tomorrow"}], r"Unknown bench 'of tomorrow'\. Known benches: "),
        # no figures
        ([{"schema_version": 1, "bench": "attention"}, ROW], "has rows that this version cannot read"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, lines: list[Any], says: str) -> None:
    (tmp_path / ROWS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigurationError, match=says):
        invoke("report", tmp_path, "-o", tmp_path / "r.md")
    assert not (tmp_path / "r.md").exists()


@pytest.mark.parametrize("bench", benches.BENCHES, ids=lambda bench: str(bench.name))
def test_every_case_is_its_own_and_listed(bench: Bench) -> None:
    for device in ("cuda", "cpu"):
        cases = bench.tasks(default_settings(bench, device))
        assert len({one.key for one in cases}) == len({one.label for one in cases}) == len(cases)
        assert {to_json_values(one.case)["device"] for one in cases} == {device}
    lines = invoke("bench", bench.name, "--dry-run", "--device", "cpu").stdout.splitlines()
    assert lines == [one.label for one in cases]


COMMITTED = [path.parent for path in sorted((ROOT / "examples/benches").glob(f"*/{ROWS_FILE}"))]


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: str(folder.name))
def test_what_a_report_says_of_its_rows_is_a_command_of_today(folder: Path) -> None:
    commands = benches.read_finished(folder).commands
    assert commands
    for command in commands:
        done = invoke(*shlex.split(command)[1:], "--device", "cpu", "--dry-run")
        assert done.exit_code == 0, done.output


def test_help_lists_the_defaults_of_both_devices() -> None:
    said = " ".join(invoke("bench", "attention", "--help").output.split())
    assert "Default: 256,1024,4096,8192,16384; 128,256,512 on a CPU." in said


def test_an_unknown_name_is_a_line_of_click_s() -> None:
    done = invoke("bench", "nothing")
    assert done.exit_code == 2
    assert "No such command 'nothing'" in done.output


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nsys_analyzer", "bench", "attention", "--device", "cpu", "--d-head", "8"]
    lengths = ["--context-length", "16,4096", "--compile", "off", "--steps", "1000", "--warmup", "0"]
    process = subprocess.Popen(
        [*command, *lengths, "--output-dir", str(tmp_path / "b")], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=default_signals,
    )  # fmt: skip
    path = tmp_path / "b" / ROWS_FILE
    wait_for(lambda: path.exists() and len(path.read_text().splitlines()) >= 2)  # the header, and the first length
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "--resume" in said.splitlines()[-1]
    assert read_rows_file(path)[1][0].status == "ok"
    assert not list((tmp_path / "b").glob(".*.json*"))


_TINY = "--d-model 32 --d-ff 64 --num-heads 4 --vocab-size 50"
#: Each bench on a small model: its options, how many rows there are, what its section says and says
#: not, and a figure.
_QUICK: dict[str, tuple[str, int, list[str], list[str], str]] = {
    "timing": (
        f"{_TINY} --context-length 8,16", 2 * 3, ["6 of 6 configurations were measured."], [], "timing-step",
    ),
    "precision": (
        f"{_TINY} --context-length 16", 2 * 2, ["Speed-up over fp32 in mode forward-backward: small, bf16"], [],
        "precision-throughput",
    ),
    "attention": (
        "--d-head 8 --context-length 32,64 --steps 2 --warmup 0", 2 * 2, ["Nothing ran out of memory."], [],
        "attention-forward",
    ),
    "variants": (
        "--num-heads 2 --d-head 16 --context-length 64,128 --steps 2", 2 * 5 * 2, ["Nothing ran out of memory."], [],
        "variants-speed-up-causal",
    ),
    "flash": (
        "--d-head 8 --context-length 32,64 --steps 1", 2 * 3,
        ["Nothing ran out of memory."], [], "flash-fp32-end-to-end",
    ),
    # What is compiled is the model itself: the compiler would take half a minute.
    "compile": (
        f"{_TINY} --context-length 16", 2, ["Compiling takes"], [], "compile-speed-up",
    ),
    "decode": (
        "--num-layers 1 --batch-size 1 --prompt-length 8 --cache-length 16 --tokens 4 --warmup-tokens 1 "
        "--attention sdpa", 2, ["The highest throughput is"], [], "decode-token-times",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", _QUICK)
def test_on_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the targets need PyTorch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    options, count, says, says_not, figure = _QUICK[name]
    done = invoke("bench", name, *options.split(), "--device", "cpu")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "bench" / name
    _, rows = read_rows_file(folder / ROWS_FILE)
    assert [row.status for row in rows] == ["ok"] * count
    check(unpadded((folder / f"{name}.md").read_text(encoding="utf-8")), ["*Conditions.* Device: CPU", *says], says_not)
    assert (folder / f"{name}_figures" / f"{figure}.png").stat().st_size > 1000


def test_memory_needs_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the targets need PyTorch")
    options = "--device cpu --num-layers 1 --context-length 8 --mode train --precision fp32"
    assert invoke("bench", "memory", *options.split(), "--output-dir", tmp_path / "b").exit_code == 0
    check(
        (tmp_path / "b/memory.md").read_text(encoding="utf-8"),
        ["Only the allocator of a GPU keeps a history of memory"],
    )


def test_a_resume_on_another_device_is_refused(run: Run) -> None:
    run(Task(TARGET, {"ends": "ok", "device": "cuda"}, "one"))
    with pytest.raises(ConfigurationError, match=r"was measured on another --device\. Use it, or another --output-dir"):
        run(Task(TARGET, {"ends": "ok", "device": "cpu"}, "other"), resume=True)


@pytest.mark.parametrize("left", ["", "{", '{"module": "profi'])
def test_a_resume_of_what_was_cut_in_its_first_lines(left: str, run: Run, tmp_path: Path) -> None:
    run(case("ok"))
    path = tmp_path / "b" / ROWS_FILE
    header = path.read_text().splitlines()[0]
    path.write_text(f"{header}\n{left}" if left != "{" else header[:20])
    assert run(case("ok"), case("ok", 2), resume=True) == ("ok ok, ok ok", True)
    assert len(read_rows_file(path)[1]) == 2


def test_a_report_of_nothing_measured_yet(run: Run, tmp_path: Path) -> None:
    run(case("ok"))
    path = tmp_path / "b" / ROWS_FILE
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert invoke("report", tmp_path / "b", "-o", tmp_path / "r.md").exit_code == 0
    assert "Nothing was measured yet" in (tmp_path / "r.md").read_text()
