"""Tests that the report in the repository is the one that the tool writes today: `make examples` renews it."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

from tests.renew_examples import RUN, write_report


def test_the_report_of_the_run(tmp_path: Path) -> None:
    folder = tmp_path / RUN.name
    shutil.copytree(RUN, folder)
    write_report(folder)
    assert (folder / "report.md").read_text() == (RUN / "report.md").read_text()
    figures = {path.name for path in (folder / "report_figures").iterdir()}
    assert figures == {path.name for path in (RUN / "report_figures").iterdir()}


def test_the_run_has_the_timings_of_the_sweep() -> None:
    with (RUN / "timings.csv").open(newline="") as own, (RUN.parent / "timings.csv").open(newline="") as sweep:
        assert list(csv.DictReader(own)) == [row for row in csv.DictReader(sweep) if row["capture"] == RUN.name]
