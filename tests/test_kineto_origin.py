"""Tests that reading a database beside a trace changes neither of them."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from nsys_analyzer.cli.main import cli
from tests.support.export import Export
from tests.support.kineto import Kineto


@pytest.fixture
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace of PyTorch's profiler, and beside it an export of that name with changes in its write-ahead log."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, made = tmp_path / "captures", tmp_path / "made.sqlite"
    folder.mkdir()
    Export().range("forward", 0, 100).write(made)
    with closing(sqlite3.connect(made)) as connection:
        connection.execute("PRAGMA journal_mode=wal")
        connection.execute("CREATE TABLE later (a)")
        connection.commit()
        for ending in ("", "-wal"):  # while it is open: closing would take the changes in
            shutil.copy(f"{made}{ending}", folder / f"step.sqlite{ending}")
    trace = Kineto().range("forward", 0, 100).operator("aten::mm", 10, 20)
    trace.write(folder / "step.pt.trace.json")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_report_leaves_the_log_of_a_database(captures: Path, tmp_path: Path) -> None:
    before = contents(captures)
    assert before["step.sqlite-wal"]
    report = tmp_path / "report.md"
    for _ in range(2):  # the second time over the older report
        done = CliRunner().invoke(cli, ["report", str(captures), "-o", str(report), "--no-figures"])
        assert report.exists(), done.output
        assert contents(captures) == before
