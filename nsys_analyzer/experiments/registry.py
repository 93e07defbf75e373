"""The list of the experiments, which loads them all.

How one is added: see ``model``.
"""

from __future__ import annotations

from typing import Any

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments import attention, decode, flash, limits, memory, precision, timing, variants
from nsys_analyzer.experiments import compile as compiled
from nsys_analyzer.experiments.model import Bench, Settings, Task

BENCHES: tuple[Bench, ...] = (
    timing.BENCH,
    precision.BENCH,
    memory.BENCH,
    attention.BENCH,
    variants.BENCH,
    flash.BENCH,
    compiled.BENCH,
    decode.BENCH,
)


def find_bench(name: str) -> Bench:
    """Returns the bench of this name.

    Raises:
        ConfigurationError: there is none.
    """
    for bench in BENCHES:
        if bench.name == name:
            return bench
    raise ConfigurationError(f"Unknown bench {name!r}", f"Known benches: {', '.join(bench.name for bench in BENCHES)}")


def all_cases(bench: Bench, settings: Settings) -> tuple[Task[Any], ...]:
    """Returns the device's ceilings in each precision of the bench, then the bench's own cases; each once."""
    first = (
        Task(limits.TARGET, limits.CeilingsCase(settings.device, precision), f"ceilings in {precision}")
        for precision in bench.precisions(settings)
    )
    return tuple({case.key: case for case in (*first, *bench.cases(settings))}.values())
