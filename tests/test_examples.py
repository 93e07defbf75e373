"""The committed report of the experiments is what the committed rows make, and its rows break no limit."""

import os
from pathlib import Path

import pytest

from nsys_analyzer.experiments.model import Bench
from nsys_analyzer.experiments.registry import BENCHES
from nsys_analyzer.runs.rows import NAME, read_file
from tests.test_bench_command import invoke

BENCHES_FOLDER = Path(__file__).parent.parent / "examples" / "benches"


def test_the_report_of_the_experiments(tmp_path: Path) -> None:
    done = invoke("report", BENCHES_FOLDER, "-o", tmp_path / "report.md", "--no-figures")
    assert done.exit_code == 0, done.output
    committed = (BENCHES_FOLDER / "report.md").read_text(encoding="utf-8")
    made = (tmp_path / "report.md").read_text(encoding="utf-8")
    kept = [line for line in committed.splitlines() if line and not line.startswith("![")]
    links = os.path.relpath(BENCHES_FOLDER, tmp_path)
    assert [line.replace(f"{links}/", "") for line in made.splitlines() if line] == kept


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: str(bench.name))
def test_every_experiment_was_run_on_a_gpu(bench: Bench) -> None:
    header, rows = read_file(BENCHES_FOLDER / bench.name / NAME)
    assert header["bench"] == bench.name
    assert {row.status for row in rows} <= {"ok", "oom"}
    assert {row.machine.get("gpu") for row in rows} == {"NVIDIA H200"}


def test_no_figure_lies_beyond_its_limit() -> None:
    text = (BENCHES_FOLDER / "report.md").read_text(encoding="utf-8")
    assert "Impossible" not in text
    assert text.count("No figure of this bench lies beyond its limit.") == len(BENCHES)
