"""Tests that the length of a step is the same on the terminal, in markdown, on the page and in JSON."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.api import build_report, render, summarize
from nsys_analyzer.questions.ask import ask
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.renderers.terminal import print_first_screen
from nsys_analyzer.report.sections import select_first_screen
from nsys_analyzer.report.units import format_number, rounded, rounded_percent
from tests.conftest import DATA

NAMES = [*sorted(path.name.removesuffix(".sqlite.xz") for path in DATA.glob("*.sqlite.xz")), "cpu_train"]
#: How a profiled length is said: in the first line, in the bar, and where parts add up.
BRIEF = (
    r"profiled ([\d.,]+)\)",
    r"([\d.,]+) ms (?:a step|for the whole capture) under the profiler",
    r"(?:A step|The whole capture), profiled, ([\d.,]+) ms",
)
IN_FULL = (r"the (?:step|capture) ([\d.,]+) 100\.0 ?%",)


@pytest.fixture(params=NAMES)
def capture(request: pytest.FixtureRequest, real_capture: Callable[[str], Path]) -> Path:
    name: str = request.param
    return DATA / f"{name}.pt.trace.json.gz" if name == "cpu_train" else real_capture(name)


def test_every_form_says_the_same_length(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captures = summarize(capture)
    steps = [one.step for one in captures if one.step]
    report = build_report(captures)
    print_first_screen(report, select_first_screen(report))
    page = re.sub(r"<(script|style).*?</\1>", "", render(report, "html"), flags=re.DOTALL)
    forms = {
        "terminal": capsys.readouterr().out,
        "markdown": render(report),
        "page": html.unescape(re.sub(r"<[^>]+>", " ", page)),
    }
    brief, in_full = (
        {rounded(step.length_ms) for step in steps},
        {format_number(step.length_ms, "ms") for step in steps},
    )
    for form, text in forms.items():
        words = re.sub(r"[\s|*]+", " ", text)
        said = {found for pattern in BRIEF for found in re.findall(pattern, words)}
        rows = {found for pattern in IN_FULL for found in re.findall(pattern, words)}
        assert said <= brief, form
        assert rows <= in_full, form
        if form != "terminal":  # of several steps it shows a table
            assert (said, rows) == (brief, in_full), form
        elif len(steps) == 1:
            assert said == brief


def test_what_json_says_of_a_step_adds_up(capture: Path) -> None:
    """The parts to the length, for each device and over the phases; what a finding saves and leaves to the step."""
    data = json.loads(render(build_report(summarize(capture)), "json"))
    for one in data["captures"]:
        step: dict[str, Any] | None = one["step"]
        if step is None:
            continue
        length = pytest.approx(step["length_ms"], rel=1e-9)
        assert sum_parts(step) == length
        assert max(map(sum_parts, step["devices"])) == length
        assert sum(map(sum_parts, step["phases"])) == length
        assert sum(row["ms"] for row in step["classes"]) == pytest.approx(step["compute_ms"])
        assert sum(row["ms"] for row in step["idle_by_cause"]) == pytest.approx(step["idle_ms"])
        assert all(phase["wall_ms"]["median"] == length for phase in one["phases"] if phase["phase"] == "step")
        assert [group["median_ms"] for group in step["groups"] if group["measured"]] == [length]
        shares = [phase["busy_share"] for phase in one["phases"] if phase["phase"] == "step" and phase["busy_share"]]
        assert all(share["low"] == share["high"] == step["busy_share"] for share in shares)
        for finding in one["findings"] or ():
            assert finding["saves_ms"] + finding["left_ms"] == pytest.approx(finding["step_ms"])
            middle = (step["unprofiled_ms"]["low"] + step["unprofiled_ms"]["high"]) / 2
            assert finding["step_ms"] == pytest.approx(middle)


def test_one_share_of_the_gpus_work(capture: Path) -> None:
    """The work of the steps near the median, of the one length that is said: on the screen, in JSON and in answers."""
    captures = summarize(capture)
    for one, asked in zip(captures, ({"process": one.process} if one.process else {} for one in captures), strict=True):
        step = one.step
        if step is None or one.on_cpu:
            continue
        share = min((step.compute_ms + step.exposed_copy_ms + step.exposed_communication_ms) / step.reported_ms, 1)
        assert step.busy_share == pytest.approx(share)
        words = " ".join(("step_busy_share", *(f"{key}='{value}'" for key, value in asked.items())))
        assert ask(Evidence(captures), words).value == pytest.approx(share, rel=1e-5)
        assert f"GPU busy {rounded_percent(share)} of" in render(build_report([one]))


def sum_parts(row: dict[str, Any]) -> float:
    return float(sum(row[f"{part}_ms"] for part in ("compute", "exposed_copy", "exposed_communication", "idle")))
