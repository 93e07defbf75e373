"""Measures the cost of the targets' instrumentation, and checks their times.

Steps of one model in one process, in turns: with NVTX ranges, without, and timed by other means (CUDA events on a
GPU; ``timeit`` on a CPU). In turns, since clocks and caches drift by more than the difference.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from collections import defaultdict
from collections.abc import Callable

import torch

from nsys_analyzer.analysis.transformer.models import find_model
from profiling_targets import harness
from profiling_targets.harness import Config, Phases
from profiling_targets.transformer import Training


def main() -> None:
    """Prints the medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="steps of each kind. Default: 200, 5 on a CPU")
    parser.add_argument("--context-length", type=int, default=256)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rounds = given.rounds or (200 if device == "cuda" else 5)
    phases = Training(Config(find_model("small"), context_length=given.context_length, device=device)).phases()
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(min(rounds, 10)):
        harness.run_step_ns(phases, device)
    for _ in range(rounds):
        for kind, ranges in (("with ranges", True), ("without ranges", False)):
            harness._ranges_enabled = ranges
            for phase, ns in harness.run_step_ns(phases, device).items():
                times[kind][phase].append(ns / 1e6)
        for phase, ms in _independent(phases, device).items():
            times["independent"][phase].append(ms)
    _print(times, rounds, device)


def _independent(phases: Phases, device: str) -> dict[str, float]:
    """Milliseconds by phase, by a clock that is not the harness's."""
    return {name: _events(phase) if device == "cuda" else _timer(phase) for name, phase in phases.items()}


def _events(phase: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    phase()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _timer(phase: Callable[[], None]) -> float:
    return timeit.timeit(phase, number=1) * 1e3


def _print(times: dict[str, dict[str, list[float]]], rounds: int, device: str) -> None:
    print(f"small on {device}, medians of {rounds} steps in turns, ms")
    for phase in times["with ranges"]:
        medians = {kind: statistics.median(found[phase]) for kind, found in times.items() if phase in found}
        ratio = medians["with ranges"] / medians["without ranges"] - 1
        words = "  ".join(f"{kind} {value:.3f}" for kind, value in medians.items())
        print(f"{phase:10} {words}  ranges cost {ratio:+.2%}")


if __name__ == "__main__":
    main()
