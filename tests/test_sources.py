"""Input formats: how the format of a file is recognized, and that no other module depends on the formats."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import nsys_analyzer
from nsys_analyzer import Trace
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.inputs.traces import find_traces
from nsys_analyzer.trace import sources
from nsys_analyzer.trace.sources import check_output_is_no_input, estimate_size
from tests.support.export import Export
from tests.support.new_format import LINES

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
    assert estimate_size(capture) == 3 * capture.stat().st_size


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


def test_no_other_module_depends_on_a_suffix() -> None:
    """Except for the profilers, which write such files, every module of the package asks the formats for suffixes."""
    folder = Path(nsys_analyzer.__file__).parent
    suffixes = {suffix for source in (sources.NSYS_REPORT, sources.KINETO) for suffix in source.suffixes} - {".json"}
    naming = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in suffixes
    }
    assert naming == {"trace/sources.py", "capture/profilers.py"}
