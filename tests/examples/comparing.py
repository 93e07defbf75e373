"""Yields the statements of ``examples/README.md`` about comparisons, with numbers from the runs."""

from __future__ import annotations

import functools
import runpy
import statistics
from collections.abc import Iterator
from typing import Any

from tests.examples.rows import EXAMPLES, percent


@functools.cache
def program() -> dict[str, Any]:
    """What ``examples/comparison.py`` defines."""
    return runpy.run_path(str(EXAMPLES / "comparison.py"))


@functools.cache
def runs() -> tuple[Any, ...]:
    """The committed runs."""
    found: tuple[Any, ...] = program()["rows"]()
    return found


def comparison() -> Iterator[str]:
    """False alarms, what is found of planted changes, and how much a program that launching limits varies."""
    one, every = program(), runs()
    clocks = one["CLOCKS"]
    made = [change for kind in one["PROGRAMS"] for clock in clocks for change in one["pairs"](every, kind, clock)]
    alone = [
        change
        for kind in one["PROGRAMS"]
        for clock in clocks
        for change in one["pairs"](every, kind, clock, between_runs=False)
    ]
    halves = [change for kind in one["PROGRAMS"] for clock in clocks for change in one["halves"](every, kind, clock)]
    called, by_steps = (sum(change.is_change for change in changes) for changes in (made, alone))
    assert not called
    assert not any(change.is_change for change in halves)
    counts = [len(one["of_program"](every, kind)) for kind in one["PROGRAMS"]]
    yield f"{counts[0]} runs of a GPU-bound program and {counts[1]} runs of a launch-bound program"
    yield f"none of {len(made)} pairs of figures, and in none of {len(halves)} pairs of the two halves of a run"
    yield f"from the steps alone reports a change in {by_steps} of the {len(alone)}"
    gpu, launching = one["PROGRAMS"]
    wall = clocks[1]
    found = {share: one["planted"](every, gpu, wall, share) for share in one["shares"](every, gpu)}
    seen = {share: sum(change.is_change for change in changes) for share, changes in found.items()}
    real = {share: percent(one["planted_share"](every, gpu, share), 1) for share in found}
    least, middle, most = found
    yield f"matmuls of {real[least]} of a step are found in {seen[least]} of {len(found[least])} pairs"
    assert (seen[middle], seen[most]) == (len(found[middle]), len(found[most]))
    yield f"those of {real[middle]} and {real[most]} in all pairs"
    missed = [
        change
        for share in one["shares"](every, launching)
        for clock in clocks
        for change in one["planted"](every, launching, clock, share)
    ]
    assert not any(change.is_change for change in missed)
    largest = max(one["shares"](every, launching))
    yield f"up to {percent(one['planted_share'](every, launching, largest), 1)} of a step is found"
    base = one["of_program"](every, launching)
    steps = sorted(statistics.median(row.unprofiled_ms) for row in base)
    yield f"its steps take {steps[0]:.0f} to {steps[-1]:.0f} ms without a profiler from run to run"
    width = one["half_width"](one["pairs"](every, launching, clocks[0]))
    yield f"the interval is ±{percent(width)}"
