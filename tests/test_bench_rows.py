"""Rows of experiments whose figures are not what their targets write: one line of error, or a report without them."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.benches import BENCHES, read_finished
from nsys_analyzer.experiments.model import Bench
from nsys_analyzer.inputs.rows import ROWS_FILE
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.renderers.markdown import render

FOLDER = Path(__file__).parent.parent / "examples" / "benches"


@pytest.mark.parametrize("wrong", ["\0", None], ids=repr)
@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: str(bench.name))
def test_a_figure_that_is_none(tmp_path: Path, bench: Bench, wrong: Any) -> None:
    """In all rows, one figure after the other."""
    header, *rows = (FOLDER / bench.name / ROWS_FILE).read_text(encoding="utf-8").splitlines()
    measured = [json.loads(row) for row in rows]
    names = sorted({name for row in measured for name in row.get("figures", {})})
    assert names
    for name in names:
        changed = [{**row, "figures": {**row["figures"], name: wrong}} if name in row.get("figures", {}) else row
                   for row in measured]  # fmt: skip
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        (tmp_path / ROWS_FILE).write_text("\n".join([header, *map(json.dumps, changed)]), encoding="utf-8")
        with suppress(ConfigurationError):
            assert render(Report("", (read_finished(tmp_path).section,)), {})
