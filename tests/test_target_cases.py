"""Targets that measure cases: the row of every end a case can come to."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.experiments.model import option
from nsys_analyzer.inputs.rows import CaseTarget
from profiling_targets.harness import NotHereError, main, measure_case


@dataclass(frozen=True)
class Case:
    device: str
    side: int = option(4, "of the square")
    ends: str = option("well", "how", ("well", "oom", "oddly", "elsewhere"))
    doubled: bool = option(False, "twice as large")


@dataclass
class Figures:
    area: int | None = None
    ratio: float | None = None


TARGET = CaseTarget("tests.test_target_cases", Case, Figures)


def measure(case: Case, figures: Figures) -> None:
    """Computes an area."""
    figures.area = case.side**2 * (2 if case.doubled else 1)
    if case.ends == "oom":
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB\nand more lines")
    if case.ends == "oddly":
        raise ValueError("a bug")
    if case.ends == "elsewhere":
        raise NotHereError("needs a GPU")
    figures.ratio = float("nan")


def test_a_row_is_json() -> None:
    row = measure_case(TARGET, Case("cpu", side=3), measure)
    assert json.loads(json.dumps(row, allow_nan=False))["figures"] == {"area": 9, "ratio": None}  # a NaN is none
    assert row["machine"]["torch"]


@pytest.mark.parametrize(
    ("ends", "status", "message"),
    [
        ("oom", "oom", "CUDA out of memory. Tried to allocate 20.00 GiB and more lines"),
        ("elsewhere", "unsupported", "needs a GPU"),
        ("oddly", "failed", "ValueError: a bug"),
    ],
)
def test_what_was_measured_before_the_end_stays(
    ends: str, status: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = measure_case(TARGET, Case("cpu", ends=ends), measure)
    assert (row["status"], row["message"], row["figures"]) == (status, message, {"area": 16})
    assert ("Traceback" in capsys.readouterr().err) == (status == "failed")


def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    given, rows = tmp_path / "cases.json", tmp_path / "rows.jsonl"
    given.write_text(json.dumps([{"device": "cpu", **case} for case in cases]))
    monkeypatch.setattr(sys, "argv", ["target", "--cases", str(given), "--rows", str(rows)])
    main(TARGET, measure)
    return [json.loads(line) for line in rows.read_text().splitlines()]


def test_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = many(tmp_path, monkeypatch, {"side": 1}, {"side": 2, "ends": "elsewhere"}, {"side": 3})
    assert [row["status"] for row in rows] == ["ok", "unsupported", "ok"]
    assert rows[0]["case"] == {"device": "cpu", "side": 1, "ends": "well", "doubled": False}


def test_out_of_memory_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        many(tmp_path, monkeypatch, {"side": 1}, {"ends": "oom"}, {"side": 3})
    assert ended.value.code == 1
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok", "oom"]
