"""``nsys-analyze explain``, from the command line to what it prints."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Main, Outcome
from tests.support.commands import make_command_test
from tests.support.export import ADD, GEMM, Export
from tests.test_report_command import MS, two_steps

RealCapture = Callable[[str], Path]


def accumulating(*micro_batches: int, pause: int = 0) -> Export:
    """Steps of so many micro-batches: a batch of 1 ms, forward 2, backward 2; then an optimizer of 1 ms.

    The second step is longer by a pause behind its optimizer, ms. Gradients are set to zero in front of each but the
    first micro-batch of all.
    """
    export, at = Export().gpu(), 1
    for number, many in enumerate(micro_batches):
        for _ in range(many):
            export.range("data", at * MS, (at + 1) * MS)
            for phase, begin in (("forward", at + 1), ("backward", at + 3)):
                export.range(phase, begin * MS, (begin + 2) * MS)
                export.kernel(GEMM, begin * MS + 1000, begin * MS + 5000, (begin + 1) * MS + 9000)
            at += 5
        export.range("optimizer", at * MS, (at + 1) * MS).kernel(ADD, at * MS + 1000, at * MS + 5000, at * MS + 9000)
        at += 1 + pause * (number == 1)
        export.range("zero_grad", at * MS - 100_000, at * MS)
    return export


def step_of(ended: Outcome) -> dict[str, Any]:
    step: dict[str, Any] = json.loads(ended.out)["captures"][0]["step"]
    return step


def phase_ms(ended: Outcome) -> dict[str, float]:
    """The time of each phase in a step, with and without work."""
    return {phase["phase"]: phase["compute_ms"] + phase["idle_ms"] for phase in step_of(ended)["phases"]}


test_explain = make_command_test("explain", builders={
    "two_steps": two_steps, "accumulating": accumulating,
    "paused": lambda pause, *micro_batches: accumulating(*micro_batches, pause=pause),
}, figures={
    "phase_ms": phase_ms,
    "phases_minus_step_ms": lambda ended: sum(phase_ms(ended).values()) - step_of(ended)["length_ms"],
    "passes": lambda ended: re.findall(
        r"^\| (\w+) +\| +(\d) \|", ended.out.partition("passes per step")[2], re.MULTILINE
    ),
})  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two steps of 12 ms, in each of which the GPU works for 5.5 ms."""
    return two_steps().write(tmp_path / "train.sqlite")


def test_all_begins_with_what_is_printed_without_it(trace: Path, run_main: Main) -> None:
    assert run_main("explain", trace, "--all").out.startswith(run_main("explain", trace).out.rstrip())


def test_a_finding_has_lines_to_type(trace: Path, run_main: Main) -> None:
    """Each on a line of its own, however long, so that it can be copied."""
    printed = run_main("explain", trace).out
    (first, *_) = json.loads(run_main("explain", trace, "--format", "json").out)["captures"][0]["findings"]
    assert f"1. {first['title']}: a fix saves " in printed.replace("\n", " ")
    for line in first["remedy"]:
        assert f"    {line}\n" in printed


def test_json_is_that_of_the_report(trace: Path, run_main: Main) -> None:
    (explained,) = json.loads(run_main("explain", trace, "--format", "json").out)["captures"]
    (reported,) = json.loads(run_main("report", trace, "--format", "json").out)["captures"]
    assert {"name", "process", "limits", "step", "findings", "findings_missing"} <= set(explained)
    assert explained == {key: reported[key] for key in explained}


def test_markdown_is_the_report_up_to_the_answers(trace: Path, run_main: Main) -> None:
    """Without a figure."""
    report = run_main("report", trace, "-o", "-").out
    assert run_main("explain", trace, "--format", "markdown").out == report.partition("\n## How long")[0]
    assert "explain --format" not in report


def test_a_real_capture(real_capture: RealCapture, run_main: Main) -> None:
    (capture,) = json.loads(run_main("explain", real_capture("train_small256"), "--format", "json").out)["captures"]
    assert capture["findings_missing"] is None
    step: dict[str, Any] = capture["step"]
    assert (step["instances"], step["source"], step["on_gpu_timeline"]) == (3, "range", False)
    parts = ("compute_ms", "exposed_communication_ms", "exposed_copy_ms", "idle_ms")
    assert sum(step[part] for part in parts) == pytest.approx(step["length_ms"])
    assert sum(one["ms"] for one in step["classes"]) == pytest.approx(step["compute_ms"])
    assert sum(one["ms"] for one in step["idle_by_cause"]) == pytest.approx(step["idle_ms"])
    for part in parts:
        assert sum(phase[part] for phase in step["phases"]) == pytest.approx(step[part])
    (device,) = step["devices"]
    assert device == {"device": 0, **{key: step[key] for key in device if key != "device"}}
    # GPU busy of a step is 33.6 ms: MEASURING.md's small model leaves the GPU idle for most of it
    assert step["compute_ms"] == pytest.approx(33.60, abs=0.01)  # of the median step; the others: 33.58 and 33.54
    assert step["unprofiled_ms"]["low"] < step["wall_ms"]["median"]
    assert all(one["step_ms"] == pytest.approx(one["saves_ms"] + one["left_ms"]) for one in capture["findings"])
    first = next(one for one in capture["findings"] if one["id"] == "launch_bound")
    assert first["saves_ms_low"] <= first["saves_ms"] <= first["saves_ms_high"]
    assert first["share_of_step"] == pytest.approx(first["saves_ms"] / first["step_ms"])
