"""Questions over committed captures: ``ask`` answers 46 as plain SQL does, and abstains from 18."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nsys_analyzer.experiments.evidence import make_evidence
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.questions.ask import ask
from nsys_analyzer.report.evidence import Evidence
from tests.agent.truth import Capture, Times, Trace
from tests.conftest import DATA, ROOT

QUESTIONS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "questions.json").read_text(encoding="utf-8"))
ANSWERED = [one for one in QUESTIONS if "truth" in one]
#: An answer has six digits.
DIGITS = 1e-5
#: Bytes of an answer at most, and of all of them in the mean: a few of them hold a kernel's name.
MOST, USUAL = 520, 280


@pytest.fixture(scope="module")
def place(real_capture: Callable[[str], Path]) -> Callable[[str], Path]:
    """Where a capture of a question lies."""

    def path_of(name: str) -> Path:
        if name.startswith("examples/"):
            return ROOT / name
        return DATA / "cpu_train.pt.trace.json.gz" if name == "cpu_train" else real_capture(name)

    return path_of


@pytest.fixture(scope="module")
def evidence(place: Callable[[str], Path]) -> Callable[[str], Evidence]:
    return cache(lambda name: make_evidence(gather((place(name),))))


@pytest.fixture(scope="module")
def truth(place: Callable[[str], Path]) -> Callable[[str, int | None], Any]:
    @cache
    def of(name: str, device: int | None) -> Any:
        path = place(name)
        if path.is_dir():
            return Times(path / "timings.csv")
        return Trace(path) if name == "cpu_train" else Capture(path, device)

    return of


@pytest.mark.parametrize("one", ANSWERED, ids=lambda one: f"{one['capture']}: {one['ask']}")
def test_an_answer_is_that_of_plain_sql(
    one: dict[str, Any], evidence: Callable[[str], Evidence], truth: Callable[[str, int | None], Any]
) -> None:
    answer = ask(evidence(one["capture"]), one["ask"])
    device = int(one["ask"].partition("'device ")[2][:1] or -1)
    name, *words = one["truth"]
    expected = getattr(truth(one["capture"], None if device < 0 else device), name)(*words)
    assert answer.cannot_answer is None
    assert answer.value == (expected if isinstance(expected, str) else pytest.approx(expected, rel=DIGITS))
    assert answer.unit
    assert answer.of
    assert answer.evidence.table
    assert answer.evidence.rows > 0 or name == "peak_memory"


@pytest.mark.parametrize(
    "one", [one for one in QUESTIONS if "needs" in one], ids=lambda one: f"{one['capture']}: {one['ask']}"
)
def test_what_cannot_be_told_is_not_answered(one: dict[str, Any], evidence: Callable[[str], Evidence]) -> None:
    answer = ask(evidence(one["capture"]), one["ask"])
    assert answer.value is None
    assert answer.cannot_answer is not None
    assert answer.cannot_answer.why
    assert one["needs"] in answer.cannot_answer.needs


def test_an_answer_is_short(evidence: Callable[[str], Evidence]) -> None:
    sizes = [len(msgspec.json.encode(ask(evidence(one["capture"]), one["ask"]))) for one in QUESTIONS]
    print(f"{len(sizes)} answers: {sum(sizes) / len(sizes):.0f} bytes in the mean, {max(sizes)} at most")
    assert (len(sizes), len(ANSWERED)) == (64, 46)
    assert max(sizes) <= MOST
    assert sum(sizes) / len(sizes) <= USUAL


@pytest.mark.parametrize(
    ("question", "operations"),
    [
        ("gpu_busy_ms phase=forward", ("KERNEL", "MEMCPY", "MEMSET")),
        ("kernels phase=backward", ("KERNEL",)),
        ("copy_ms phase=backward", ("MEMCPY",)),
    ],
)
def test_the_rows_of_an_answer_are_those_of_its_table(
    question: str, operations: tuple[str, ...], evidence: Callable[[str], Evidence],
    truth: Callable[[str, int | None], Any],
) -> None:  # fmt: skip
    phase = question.partition("phase=")[2]
    rows = sum(map(len, truth("train_small256", None).inside(phase, *operations)))
    assert ask(evidence("train_small256"), question).evidence.rows == rows
