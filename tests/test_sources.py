"""Input formats: a new one is a function that opens its files, and an entry of SOURCES."""

from __future__ import annotations

import ast
from pathlib import Path

import pyarrow as pa
import pytest

from nsys_analyzer import Trace
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.inputs.traces import find_traces
from nsys_analyzer.trace import sources
from nsys_analyzer.trace.reader import ArrowReader
from nsys_analyzer.trace.sources import Source, check_output_is_no_input
from tests.support.export import MAIN, VM, Export

# --- all of a new format: a line for each range, its start, end and name ---


def open_lines(path: Path) -> ArrowReader:
    lines = [line.split(maxsplit=2) for line in path.read_text().splitlines()]
    starts, ends, names = zip(*lines, strict=True)
    number = list(range(len(lines)))
    ranges = {"start": [*map(int, starts)], "end": [*map(int, ends)], "globalTid": [VM | MAIN] * len(lines)}
    tables = {"NVTX_EVENTS": {**ranges, "textId": number}, "StringIds": {"id": number, "value": list(names)}}
    return ArrowReader(path, {name: pa.table(columns) for name, columns in tables.items()})


LINES = Source((".lines",), open_lines)


# --- what it is taken for ---


@pytest.fixture
def capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sources, "SOURCES", (*sources.SOURCES, LINES))
    path = tmp_path / "captures" / "small.v2.lines"
    path.parent.mkdir()
    path.write_text("100 300 forward\n300 700 backward\n")
    return path


def test_a_new_format_is_read(capture: Path) -> None:
    trace = Trace.load(capture)
    assert trace.path == capture
    assert trace.ranges.names[trace.ranges.name[1]] == "backward"
    assert (trace.ranges.end - trace.ranges.start).tolist() == [200, 400]
    assert find_traces([capture.parent]) == [capture]


def test_no_input_is_written_over_by_whatever_name(capture: Path) -> None:
    other = Export().kernel("gemm", 1, 2, 3).write(capture.with_name("small.v2.sqlite"))
    (capture.parent / "link").symlink_to(capture)
    (capture.parent / "hard").hardlink_to(capture)
    for output in (capture, capture.parent / "link", capture.parent / "hard", other):
        for read in (capture, capture.parent):
            with pytest.raises(NsysAnalyzerError, match=r"is the input itself|, which is read"):
                check_output_is_no_input(output, [read])
    check_output_is_no_input(capture.with_name("absent.sqlite"), [capture])
    (capture.parent / "report.md").touch()
    check_output_is_no_input(capture.parent / "report.md", [capture, capture.parent])


def test_no_other_module_of_the_room_names_a_suffix() -> None:
    """Only those with a Source do: every other asks them."""
    folder = Path(sources.__file__).parent
    made = (sources.NSYS_REPORT, sources.KINETO)
    suffixes = {suffix for source in made for suffix in source.suffixes}
    naming = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in suffixes
    }
    assert naming == {"sources.py"}
