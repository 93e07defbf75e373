"""What the repository shows of a run is what the tool writes today, all of one run: `make examples` renews it."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

from PIL import Image

from tests.renew_examples import ANSWERS, DIGEST, README, RUN, digest, write_report


def test_the_report_and_the_answers_of_the_run(tmp_path: Path) -> None:
    folder = tmp_path / RUN.name
    shutil.copytree(RUN, folder)
    answers = write_report(folder)
    assert (folder / "report.md").read_text() == (RUN / "report.md").read_text()
    figures = {path.name for path in (folder / "report_figures").iterdir()}
    assert figures == {path.name for path in (RUN / "report_figures").iterdir()}
    assert ANSWERS.findall(README.read_text()) == [answers]


def test_the_picture_is_of_the_report() -> None:
    with Image.open(RUN / "report.png") as picture:
        assert picture.info[DIGEST] == digest(RUN / "report.md")


def test_the_run_has_the_timings_of_the_sweep() -> None:
    with (RUN / "timings.csv").open(newline="") as own, (RUN.parent / "timings.csv").open(newline="") as sweep:
        assert list(csv.DictReader(own)) == [row for row in csv.DictReader(sweep) if row["capture"] == RUN.name]
