"""The committed example is what the tool writes today: `make examples` renews it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
OPTIONS = ["--batch-size", "4", "--precision", "fp32", "-o", "train_small256.md"]


def test_the_example_report(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "train_small256.sqlite", tmp_path)
    command = [sys.executable, "-m", "nsys_analyzer", "report", "train_small256.sqlite", *OPTIONS]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    written = tmp_path / "train_small256.md"
    assert written.read_text() == (EXAMPLES / written.name).read_text()
    figures = {path.name for path in (tmp_path / "train_small256_figures").iterdir()}
    assert figures == {path.name for path in (EXAMPLES / "train_small256_figures").iterdir()}
