"""A step has one length: the same number on the terminal, in markdown, on the page and in JSON, for every capture."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.api import build_report, render, summarize
from nsys_analyzer.report.renderers.terminal import print_answers
from nsys_analyzer.report.units import format_number
from tests.conftest import DATA

NAMES = [*sorted(path.name.removesuffix(".sqlite.xz") for path in DATA.glob("*.sqlite.xz")), "cpu_train"]
#: How a profiled length is said: in sentences, in the bar, in the first table of many captures, and where parts add up.
SAID = (
    r"(?:step|capture) takes (?:an estimated )?\S+ [mµ]?s without the profiler, and ([\d.,]+) ms under it",
    r"(?:step|capture) takes ([\d.,]+) ms under the profiler",
    r"(?:A step|The whole capture), ([\d.,]+) ms, profiled",
    r" (?:the step|the capture|a step) ([\d.,]+) (?:ms )?100\.0 ?%",
)


@pytest.fixture(params=NAMES)
def capture(request: pytest.FixtureRequest, real_capture: Callable[[str], Path]) -> Path:
    name: str = request.param
    return DATA / f"{name}.pt.trace.json.gz" if name == "cpu_train" else real_capture(name)


def test_every_form_says_the_same_length(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captures = summarize(capture)
    steps = [one.step for one in captures if one.step]
    report = build_report(captures)
    print_answers(report)
    page = re.sub(r"<(script|style).*?</\1>", "", render(report, "html"), flags=re.DOTALL)
    forms = {
        "terminal": capsys.readouterr().out,
        "markdown": render(report),
        "page": html.unescape(re.sub(r"<[^>]+>", " ", page)),
    }
    lengths = {format_number(step.length_ms, "ms") for step in steps}
    for form, text in forms.items():
        words = re.sub(r"[\s|]+", " ", text)
        said = {found for pattern in SAID for found in re.findall(pattern, words)}
        assert said <= lengths, form
        if form != "terminal":  # which shows several steps as bars, without their lengths
            assert said == lengths, form


def test_what_json_says_of_a_step_adds_up(capture: Path) -> None:
    """The parts to the length, for each device and over the phases; what a finding saves and leaves to the step."""
    data = json.loads(render(build_report(summarize(capture)), "json"))
    for one in data["captures"]:
        step: dict[str, Any] | None = one["step"]
        if step is None:
            continue
        length = pytest.approx(step["length_ms"], rel=1e-9)
        assert parts_of(step) == length
        assert max(map(parts_of, step["devices"])) == length
        assert sum(map(parts_of, step["phases"])) == length
        assert sum(row["ms"] for row in step["classes"]) == pytest.approx(step["compute_ms"])
        assert sum(row["ms"] for row in step["idle_by_cause"]) == pytest.approx(step["idle_ms"])
        assert all(phase["wall_ms"]["median"] == length for phase in one["phases"] if phase["phase"] == "step")
        usual = [group for group in step["groups"] if group["measured"]]
        assert sum(group["median_ms"] * group["steps"] for group in usual) / sum(g["steps"] for g in usual) == length
        for finding in one["findings"] or ():
            assert finding["saves_ms"] + finding["left_ms"] == pytest.approx(finding["step_ms"])
            middle = (step["unprofiled_ms"]["low"] + step["unprofiled_ms"]["high"]) / 2
            assert finding["step_ms"] == pytest.approx(middle)


def parts_of(row: dict[str, Any]) -> float:
    return float(sum(row[f"{part}_ms"] for part in ("compute", "exposed_copy", "exposed_communication", "idle")))
