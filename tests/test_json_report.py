"""The JSON of a report: written and read by one type."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

import nsys_analyzer
from nsys_analyzer.inputs.saved_reports import read_saved_report
from nsys_analyzer.report.renderers.json_report import captures_data, format_json
from nsys_analyzer.text import Text
from tests.conftest import DATA, ROOT

COMMITTED = sorted(
    path
    for folder in (DATA, ROOT / "examples")
    for pattern in ("**/*.sqlite.xz", "**/capture.sqlite", "**/*.json.gz")
    for path in folder.glob(pattern)
)


@pytest.mark.parametrize("committed", COMMITTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_read_is_written_again(committed: Path, tmp_path: Path) -> None:
    """Byte for byte, with the manifest and the timings beside it; what had spans is plain text then."""
    capture, timings = committed, committed.with_name("timings.csv")
    if committed.suffix != ".sqlite":
        capture, content = tmp_path / committed.name.removesuffix(".xz"), committed.read_bytes()
        capture.write_bytes(lzma.decompress(content) if committed.suffix == ".xz" else content)
    captures = nsys_analyzer.summarize(capture, timings=timings if timings.exists() else ())
    report = tmp_path / "report.json"
    report.write_text(format_json(captures_data(captures)), encoding="utf-8")
    read = read_saved_report(report)
    assert format_json(captures_data(read)) == report.read_text(encoding="utf-8")
    assert not any(isinstance(text, Text) for one in read for text in (*one.warnings, one.findings_missing))
    (first, *_) = json.loads(report.read_text(encoding="utf-8"))["captures"]
    assert (first["gpu"], len(first["phases"])) == (read[0].gpu, len(read[0].phases))
