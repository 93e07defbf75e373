"""Tests programs without annotations: the hooks find their steps and phases, and do not change their behavior."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.capture.profilers import make_hook_variables
from nsys_analyzer.trace.trace import Trace
from tests.support.annotated import ASKED, LONGEST_S, ProgramCase, read_programs, run

pytestmark = pytest.mark.slow  # each runs a program with PyTorch

pytest.importorskip("torch", reason="the hooks are those of PyTorch")


@pytest.mark.parametrize("case", read_programs("annotated_programs")[0], ids=lambda case: str(case.name))
def test_an_annotated_program(case: ProgramCase, tmp_path: Path) -> None:
    case.check(tmp_path)


def test_the_programs_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("print('own')")
    before = make_hook_variables(ASKED)["PYTHONPATH"]
    ran = run(tmp_path, "print('program')", afresh=True, PYTHONPATH=f"{before}{os.pathsep}{tmp_path / 'own'}")
    assert ran.out == "own\nprogram\n"


def recorded(folder: Path, *words: str) -> CaptureSummary:
    """What the torch recorder and the hooks make of our target."""
    command = [sys.executable, "-m", "nsys_analyzer.capture.recorder", "--output", str(folder / "trace.json.gz"), "--"]
    target = ["-m", "profiling_targets.transformer", "--model", "small", "--num-layers", "2", "--context-length", "16"]
    done = subprocess.run(
        [*command, *target, "--steps", "2", "--warmup", "2", "--device", "cpu", *words],
        capture_output=True, text=True, timeout=LONGEST_S, env={**os.environ, **make_hook_variables(ASKED)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (summary,) = summarize(Trace.load(folder / "trace.json.gz"), folder.name)
    return summary


@pytest.mark.nightly
def test_the_same_kernels_as_with_the_programs_own_ranges(tmp_path: Path) -> None:
    """Our target without its ranges, and with them: then no range of the hooks stands beside one of its own."""
    found = {}
    for name, words in (("own", []), ("hooked", ["--no-ranges"])):
        (tmp_path / name).mkdir()
        found[name] = recorded(tmp_path / name, *words)
    for phase in ("forward", "backward", "optimizer"):
        own, hooked = (
            {row.name: row.launches_per_instance for row in one.phase(phase).kernels}  # type: ignore[union-attr]
            for one in (found["own"], found["hooked"])
        )
        assert own
        assert own == hooked
    step = found["own"].phase("step")
    assert step is not None
    assert step.instances + step.warmup_instances == 2  # on a busy machine the first may be a slow start
