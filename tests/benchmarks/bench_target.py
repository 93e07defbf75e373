"""What the targets' instrumentation costs, whether their timings are right, and the attention variants in C++.

Steps of one model in one process, in turns: with NVTX ranges, without, and timed by other means (CUDA events on a
GPU; ``timeit`` on a CPU). In turns, since clocks and caches drift by more than the difference.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch

from nsys_analyzer.analysis.transformer.models import find_model
from profiling_targets import attention_variants, harness
from profiling_targets.harness import Config, Phases
from profiling_targets.transformer import Training
from tests.benchmarks.bench_report import Row


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
        harness.step_ns(phases, device)
    for _ in range(rounds):
        for kind, ranges in (("with ranges", True), ("without ranges", False)):
            harness._ranges_wanted = ranges
            for phase, ns in harness.step_ns(phases, device).items():
                times[kind][phase].append(ns / 1e6)
        for phase, ms in _independent(phases, device).items():
            times["independent"][phase].append(ms)
    _print(times, rounds, device)
    for row in attention_rows():
        print(row)


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


def attention_rows(rounds: int = 9) -> list[Row]:
    """The attention variants in C++ at 1,024 tokens, in turns: times, and those of fused and flash over naive's."""
    inputs = [torch.randn(1, 2, 1024, 32) for _ in range(3)]
    names = ("naive", "fused", "flash")
    work = {name: partial(attention_variants.cpp_attention, name, *inputs, False) for name in names}
    turns = [{name: _timer(work[name]) for name in names} for _ in range(rounds + 1)][1:]  # the first one builds
    rows = [Row(f"C++ attention: {name}", [turn[name] for turn in turns], "ms") for name in names]
    ratios = {name: [turn[name] / turn["naive"] for turn in turns] for name in names[1:]}
    return rows + [Row(f"{name} / naive", values, "x", at_most=1) for name, values in ratios.items()]


def _print(times: dict[str, dict[str, list[float]]], rounds: int, device: str) -> None:
    print(f"small on {device}, medians of {rounds} steps in turns, ms")
    for phase in times["with ranges"]:
        medians = {kind: statistics.median(found[phase]) for kind, found in times.items() if phase in found}
        ratio = medians["with ranges"] / medians["without ranges"] - 1
        words = "  ".join(f"{kind} {value:.3f}" for kind, value in medians.items())
        print(f"{phase:10} {words}  ranges cost {ratio:+.2%}")


if __name__ == "__main__":
    main()
