"""Reads the committed rows of ``examples/``, from which the numbers of ``examples/README.md`` are computed."""

from __future__ import annotations

import csv
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from nsys_analyzer import Trace
from nsys_analyzer.analysis.transformer.models import MODEL_SIZES
from nsys_analyzer.experiments.model import AnyRow as Row
from nsys_analyzer.inputs.rows import ROWS_FILE, read_rows_file
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
SWEEP, BENCHES = EXAMPLES / "sweep", EXAMPLES / "benches"
DIMENSIONS = {model.name: model for model in MODEL_SIZES}
SIZES = ("small", "medium", "large", "xl", "2.7B")
COUNTS = ("no", "one", "two", "three", "four", "five", "six")
GIB, MIB, GB = 2**30, 2**20, 10**9


def millis(value: float) -> str:
    """Four digits, and at least one behind the point: 28.57, 133.4, 1,104.8."""
    return f"{value:,.{max(1, 3 - math.floor(math.log10(value)))}f}"


def percent(share: float, digits: int = 0, sign: str = "") -> str:
    """A share, for a sentence: ``37 %``, with a sign where one is asked for."""
    return f"{share * 100:{sign}.{digits}f} %".replace("-", "−")


def span(values: Sequence[float], digits: int = 0) -> str:
    """The least and the largest value, for a sentence: ``5 to 7``."""
    return f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"


# --- the sweep: unprofiled times in timings.csv, the captures' figures in captures.csv


def capture(model: str, context: int, precision: str = "fp32", mode: str = "train", suffix: str = "") -> str:
    """The name of a configuration of the sweep."""
    return f"{model}_ctx{context}_{mode}_{precision}{suffix}"


@functools.cache
def timings() -> tuple[dict[str, str], ...]:
    """The rows of ``sweep/timings.csv``: one for each configuration and phase."""
    with (SWEEP / "timings.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def timing(name: str, phase: str = "step") -> dict[str, str]:
    """The row of a phase of one configuration."""
    (row,) = (row for row in timings() if (row["capture"], row["phase"]) == (name, phase))
    return row


def mean_ms(name: str, phase: str = "step") -> float:
    """The unprofiled mean of a phase."""
    return float(timing(name, phase)["mean_ms"])


def peak_gib(name: str) -> float:
    """The peak of allocated memory of a configuration."""
    return int(timing(name)["peak_memory_bytes"]) / GIB


def sweep_column(column: str) -> dict[str, float]:
    """A column of ``sweep/captures.csv`` by capture; empty cells left out. It is what was kept of most captures."""
    with (SWEEP / "captures.csv").open(encoding="utf-8", newline="") as file:
        return {row["capture"]: float(row[column]) for row in csv.DictReader(file) if row[column]}


def manifests(folder: Path) -> list[dict[str, Any]]:
    """The manifests of the captures that are committed in a folder."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("manifest.json"))]


# --- the experiments


@functools.cache
def rows_of(bench: str) -> tuple[Row, ...]:
    """All rows of an experiment."""
    return read_rows_file(BENCHES / bench / ROWS_FILE)[1]


def rows(bench: str, target: str, **case: Any) -> list[Row]:
    """The rows of a target of an experiment that have all these options."""
    return [
        row
        for row in rows_of(bench)
        if row.module == f"profiling_targets.{target}"
        and all(row.case.get(name) == value for name, value in case.items())
    ]


def row(bench: str, target: str, **case: Any) -> Row:
    """The one row with these options."""
    (found,) = rows(bench, target, **case)
    return found


def ceilings(figure: str, precision: str) -> list[float]:
    """What a large matmul or a large copy reached, in each experiment that measured it, in TFLOP/s or TB/s."""
    found = [row for bench in BENCHES.glob("*/bench.jsonl") for row in rows(bench.parent.name, "ceilings")]
    return [one.figures[figure] / 1e12 for one in found if one.case["precision"] == precision]


@functools.cache
def compile_kernels(precision: str, compiled: bool) -> pd.DataFrame:
    """The kernels of one of the compile experiment's captures."""
    name = f"small_ctx256_train_{precision}{'_compile' if compiled else ''}"
    return Trace.load(BENCHES / "compile" / "captures" / name / "capture.sqlite").kernels
