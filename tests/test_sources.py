"""Input formats: a new one is a module with a Source and an entry of SOURCES, and nothing else knows its suffix."""

from __future__ import annotations

import ast
import os
from functools import partial
from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.errors import ExportError, NsysAnalyzerError
from nsys_analyzer.runs.captures import find_traces
from nsys_analyzer.trace import sources
from nsys_analyzer.trace.sources.inputs import check_no_input
from nsys_analyzer.trace.sources.made import origin_rows
from nsys_analyzer.trace.sources.source import Source, WriteExport
from nsys_analyzer.trace.writer import Rows, write_tables
from tests.support.export import MAIN, VM

# --- all of a new format: a line for each range, its start, end and name ---


def read_lines(path: Path, _timeout_s: float | None) -> WriteExport:
    lines = [line.split(maxsplit=2) for line in path.read_text().splitlines()]
    return partial(write_lines, lines, path.stat())


def write_lines(lines: list[list[str]], status: os.stat_result, output: Path) -> None:
    ranges = [(int(start), int(end), 59, VM | MAIN, number) for number, (start, end, _) in enumerate(lines, 1)]
    tables = {
        "NVTX_EVENTS": Rows("start end eventType globalTid textId", ranges),
        "META_DATA_EXPORT": Rows("name value", origin_rows(".lines", status)),
        "StringIds": Rows("id value", [(number, name) for number, (_, _, name) in enumerate(lines, 1)]),
    }
    write_tables(output, tables)


LINES = Source((".lines",), read_lines)


# --- what it is taken for ---


@pytest.fixture
def capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sources, "SOURCES", (*sources.SOURCES, LINES))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "captures" / "small.v2.lines"
    path.parent.mkdir()
    path.write_text("100 300 forward\n300 700 backward\n")
    return path


def test_a_new_format_is_read(capture: Path) -> None:
    trace = Trace.load(capture)
    assert trace.path == capture
    assert trace.ranges.names[trace.ranges.name[1]] == "backward"
    assert (trace.ranges.end - trace.ranges.start).tolist() == [200, 400]


def test_what_it_became_is_kept_and_stands_for_it(capture: Path) -> None:
    assert find_traces([capture.parent]) == [capture]
    export = sources.sqlite_of(capture)
    made = export.stat().st_ino
    assert export == capture.with_name("small.v2.sqlite")
    assert sources.sqlite_of(capture).stat().st_ino == made
    assert find_traces([capture.parent]) == [export]
    with pytest.raises(NsysAnalyzerError, match="which is read"):
        check_no_input(export, [capture])


def test_it_is_made_again_for_another_content(capture: Path) -> None:
    Trace.load(capture)
    capture.write_text("0 1 optimizer\n")
    assert find_traces([capture.parent]) == [capture]
    assert "optimizer" in Trace.load(capture).ranges.names


def test_an_export_is_not_converted(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"run\.sqlite is an export already"):
        sources.convert(tmp_path / "run.sqlite", tmp_path / "other.sqlite")


def test_no_other_module_of_the_room_names_a_suffix() -> None:
    """Only those with a Source do: every other asks them."""
    folder = Path(sources.__file__).parent.parent
    converted = [source for source in sources.SOURCES if source.open]
    suffixes = {suffix for source in converted for suffix in (*source.suffixes, *source.ambiguous_suffixes)}
    naming = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in suffixes
    }
    assert naming == {"sources/nsys_report.py", "sources/kineto/__init__.py"}
