"""Tests that the library gives the same answers as the command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import nsys_analyzer
from nsys_analyzer import build_report, render, summarize
from nsys_analyzer.api import load
from nsys_analyzer.cli.main import cli
from tests.notebook import NOTEBOOK, outputs
from tests.test_report_command import two_steps

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r"```python\n(from nsys_analyzer import .*?)```", re.DOTALL)


def test_the_json_is_that_of_the_command(real_capture: Callable[[str], Path]) -> None:
    path = real_capture("train_small256")
    done = CliRunner().invoke(cli, ["report", str(path), "--format", "json"])
    assert render(build_report(summarize(path)), "json") == done.stdout


def test_the_markdown_is_that_of_the_command_but_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = two_steps().write(tmp_path / "train.sqlite")
    said = CliRunner().invoke(cli, ["report", str(path), "-o", "-"]).stdout
    told = render(build_report(summarize(path)))
    made = r"<details><summary>How this report was made</summary>\n\n```sh\n# this report\n.*?```\n\n</details>\n\n"
    assert re.sub(made, "", said, flags=re.DOTALL) == told


def test_what_is_given_counts(tmp_path: Path) -> None:
    path = two_steps().write(tmp_path / "a.sqlite")
    csv = tmp_path / "t.csv"
    csv.write_text("model,phase,mean_ms\nsmall,forward,3.5\n", encoding="utf-8")
    (capture,) = summarize(path, timings=csv, phases={"forward": ["optimizer"]}, model="small", context_length=256)
    assert capture.configuration is not None
    assert (capture.configuration.context_length, capture.phase("forward") is not None) == (256, True)
    assert capture.phase("optimizer") is None  # its ranges are forward's
    assert capture.unprofiled is not None
    assert capture.unprofiled.typical_ms("forward") == 3.5


def test_the_kernels_are_a_data_frame(tmp_path: Path) -> None:
    assert len(load(str(two_steps().write(tmp_path / "a.sqlite"))).kernels) == 208


def test_all_is_there_and_nothing_else() -> None:
    assert all(hasattr(nsys_analyzer, name) for name in nsys_analyzer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = nsys_analyzer.other


def test_the_example_of_the_docs(tmp_path: Path, real_capture: Callable[[str], Path]) -> None:
    (example,) = EXAMPLE.findall((ROOT / "docs" / "python.md").read_text(encoding="utf-8"))
    shutil.copyfile(real_capture("train_small256"), tmp_path / "capture.sqlite")
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    busy, *_ = (line for line in done.stdout.splitlines() if re.fullmatch(r"\d+\.\d+", line))
    assert float(busy) == pytest.approx(19.21, abs=0.01)  # as docs/nsys_stats.md says of this capture
    assert json.loads(done.stdout[done.stdout.index("\n{") :])["captures"][0]["configuration"]["batch_size"] == 4


def test_two_captures_are_compared(real_capture: Callable[[str], Path]) -> None:
    path = real_capture("train_small256")
    (one,) = nsys_analyzer.compare(path, path).compared
    assert one.same
    assert one.verdict() == "no change"


def test_what_a_notebook_shows(real_capture: Callable[[str], Path]) -> None:
    """One line each, and the report's sections without a script; a name of somebody else's stays text."""
    path = real_capture("train_small256")
    (capture,) = summarize(path)
    report, found = build_report([capture]), nsys_analyzer.compare(path, path)
    for value, line, section in (
        (capture, r"<CaptureSummary train_small256: ok, steps 3 × \d+\.\d\d ms profiled, \d+ phases>", "decision"),
        (report, r"<Report train_small256: decision, findings, .*about>", "about"),
        (found, r"<Comparisons \[<Comparison .*>\], 0 refused, 0 unmatched>", "comparison"),
        (found.compared[0], r"<Comparison \S+ → \S+: no change, step (\S+) → \1 ms>", "comparison"),
    ):
        assert re.fullmatch(line, repr(value))
        html = value._repr_html_()
        assert (f'<section id="{section}"' in html, "<script" in html, ":root" in html) == (True, False, False)
    hostile = replace(report, title="<script>alert(1)</script>")
    assert "<script" not in hostile._repr_html_()


def test_the_notebook_shows_what_its_cells_answer(tmp_path: Path) -> None:
    """``python -m tests.notebook`` writes it anew."""
    cells = [one for one in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if one["cell_type"] == "code"]
    shown = ["".join(cell["outputs"][0]["data"]["text/plain"]) for cell in cells]
    assert [one["text/plain"] for one in outputs(["".join(cell["source"]) for cell in cells], tmp_path)] == shown
    assert sum("text/html" in cell["outputs"][0]["data"] for cell in cells) >= 2
