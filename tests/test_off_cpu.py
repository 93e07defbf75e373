"""Tests whether the program had a CPU during its pauses, according to nsys's context switches."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsys_analyzer.trace.trace import Trace
from tests.conftest import Main
from tests.support.export import AUTOGRAD, MAIN, global_tid
from tests.support.program import Program


def with_pauses(*switches: tuple[float, bool, int]) -> Program:
    """Six steps of 10 ms, each with a launch at 1, 2 and 8 ms, and switches: ms in the step, in or out, and thread."""
    program = Program()
    for step in range(0, 60_000, 10_000):
        program.step(step, step + 9_990)
        for at in (1_000, 2_000, 8_000):
            program.work((step + at, step + at + 10), (step + at + 5, step + at + 905))
        for ms, is_in, tid in switches:
            row = {"start": round((step + ms * 1_000) * 1_000), "cpu": 3, "isSchedIn": int(is_in)}
            program.add("SCHED_EVENTS", **row, globalTid=global_tid(tid))
    return program


def test_stretches_without_a_cpu_by_thread(tmp_path: Path) -> None:
    """Out at 3 and in at 6 ms of each of six steps; another thread is out from 4 ms on to the next step's 1 ms."""
    program = with_pauses((6, True, MAIN), (4, False, AUTOGRAD), (3, False, MAIN), (1, True, AUTOGRAD))
    off = Trace.load(program.write(tmp_path / "t.sqlite")).off_cpu
    ms = {thread: [(int(a), int(b)) for a, b in zip(*pair, strict=True)] for thread, pair in off.items()}
    assert ms == {
        global_tid(MAIN): [(step * 10_000_000 + 3_000_000, step * 10_000_000 + 6_000_000) for step in range(6)],
        global_tid(AUTOGRAD): [(step * 10_000_000 + 4_000_000, step * 10_000_000 + 11_000_000) for step in range(5)],
    }


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        # A pause of 3 ms or more lasts from 2.01 to 8 ms; 3 ms are 50.1 % of it.
        (((3, False, MAIN), (6, True, MAIN)), "runs on no CPU for 50 % of this time"),
        (((1, True, MAIN), (8.5, False, MAIN)), "runs on no CPU for 0 % of this time"),  # between the steps alone
        (((3, False, AUTOGRAD), (6, True, AUTOGRAD)), ""),  # of another thread: nothing is known of this one
        ((), ""),
    ],
)
def test_a_finding_says_for_how_much_of_its_pauses(
    switches: tuple[tuple[float, bool, int], ...], said: str, tmp_path: Path, run_main: Main
) -> None:
    path = with_pauses(*switches).write(tmp_path / "t.sqlite")
    out = " ".join(run_main("explain", path, "--all", "--format", "markdown").out.split())
    assert "The CPU stops launching work" in out
    assert said in out
    assert ("runs on no CPU" in out) is bool(said)
