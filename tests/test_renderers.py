"""The formats of a report: a new one is a module and a row."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import click
import pytest

from nsys_analyzer.analysis.summary.complete import complete_captures
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.cli.report import report
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Answer, Report
from nsys_analyzer.report.renderers import RENDERERS, ReportFormat
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.report.writing import write_report
from nsys_analyzer.text import plain
from nsys_analyzer.trace.trace import Trace
from tests.test_report_command import two_steps


def as_text(built: Report, figures: Mapping[str, str]) -> str:
    """A plain-text format: every answer on a line."""
    del figures
    answers = (block for section in built.sections for block in section.blocks if isinstance(block, Answer))
    return "".join(f"{answer.capture}: {plain(answer.text)}\n" for answer in answers)


def test_a_format_is_a_module_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("plain_text")
    module.render = as_text  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plain_text", module)
    monkeypatch.setitem(RENDERERS, "text", ReportFormat("plain_text", "report.txt"))
    trace = Trace.load(two_steps().write(tmp_path / "train.sqlite"))
    built = build_report(Evidence(complete_captures(summarize(trace, "train")), "nsys-analyze report"))
    write_report("text", built, tmp_path / "answers.txt")
    # 1.0 ms of matmul in a forward of 1.5 ms.
    assert "train: Of the total kernel time, matmul takes 66.7\N{NO-BREAK SPACE}% in forward, " in (
        tmp_path / "answers.txt"
    ).read_text(encoding="utf-8")
    assert not list(tmp_path.glob("*_figures"))


@pytest.mark.parametrize("name", RENDERERS)
def test_every_format_has_its_module(name: str) -> None:
    assert RENDERERS[name].render(Report("Nothing", ()), {})


def test_the_command_offers_every_format() -> None:
    (option,) = (one for one in report.params if one.name == "output_format")
    assert isinstance(option.type, click.Choice)
    assert list(option.type.choices) == list(RENDERERS)
