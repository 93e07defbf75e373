"""Tests that a new option of the transformer target needs one field, and then appears everywhere."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest

from nsys_analyzer import configuration
from nsys_analyzer.cli.run import run
from nsys_analyzer.configuration import DIMENSIONS, OPTIONS, Options, Run, manifest_values

ROOT = Path(__file__).parent.parent
FIELD = '    dropout: float | Unknown = option(0.0, "Share of activations that are dropped.")\n'
TINY = "--d-model 16 --d-ff 32 --num-layers 1 --num-heads 2 --vocab-size 50"


def test_a_new_option_is_one_field(tmp_path: Path) -> None:
    """From the command line through sweep, target, manifest and timings to the report."""
    pytest.importorskip("torch")
    for package in ("nsys_analyzer", "profiling_targets"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    module = tmp_path / "nsys_analyzer/configuration.py"
    before, line, after = module.read_text().partition("    device: str | Unknown")
    module.write_text(f"{before}{FIELD}{line}{after}")
    words = "run --dropout 0.5 --profiler none --device cpu --context-length 8 --warmup 0 --steps 1 --target-option"
    command = [sys.executable, "-m", "nsys_analyzer", *words.split(), TINY]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (place,) = (path.parent for path in tmp_path.glob("runs/*/manifest.json"))
    assert place.name == "small_ctx8_train_fp32_dropout-0.5"
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["dropout"] == 0.5  # as the target says that it ran, too
    assert "--dropout 0.5" in manifest["command"]
    with (tmp_path / "runs/timings.csv").open() as file:
        assert {row["dropout"] for row in csv.DictReader(file)} == {"0.5"}
    header, _, row = (
        [cell.strip() for cell in line.split("|")]
        for line in (tmp_path / "runs/report.md").read_text().partition("The options of each run")[2].splitlines()[2:5]
    )
    assert row[header.index("dropout")] == "0.5"


def test_every_option_of_a_sweep_is_on_the_command_line() -> None:
    offered = {word for option in run.params if isinstance(option, click.Option) for word in option.opts}
    assert {one.flag for one in OPTIONS.values() if one.in_run} <= offered
    assert "--seed" not in offered  # --target-option passes it on


@pytest.mark.parametrize(
    ("name", "value", "words", "in_a_name"),
    [
        ("context_length", 256, ["--context-length", "256"], ""),  # a CPU has another default
        ("precision", "fp32", ["--precision", "fp32"], ""),
        ("batch_size", 4, [], ""),
        ("batch_size", 8, ["--batch-size", "8"], "b8"),
        ("attention", "sdpa", ["--attention", "sdpa"], "sdpa"),
        ("cuda_graph", True, ["--cuda-graph"], "cuda-graph"),
        ("cuda_graph", False, [], ""),
        ("warmup_steps", 0, ["--warmup", "0"], ""),
        ("seed", 3, ["--seed", "3"], "seed-3"),
    ],
)
def test_how_an_option_is_spelled(name: str, value: configuration.Value, words: list[str], in_a_name: str) -> None:
    assert (OPTIONS[name].arguments(value), OPTIONS[name].name_part(value)) == (words, in_a_name)


def test_what_is_not_known_is_none() -> None:
    names = [one.name for one in fields(Options)]
    assert names == list(OPTIONS)
    assert {getattr(Run(), name) for name in (*names, *DIMENSIONS)} == {None}
    assert manifest_values(Run(compile=False, seed=0)) == {
        "schema_version": 1,
        "status": "ok",
        "compile": False,
        "seed": 0,
    }
