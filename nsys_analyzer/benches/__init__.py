"""The experiments of ``nsys-analyze bench``, one module each.

Each module has a ``BENCH``: its options, the cases that a target measures, and the section that their rows become.
A new bench is a new module and a row here.
"""

from __future__ import annotations

from nsys_analyzer.benches import attention, compiled, decode, flash, memory, precision, timing, variants
from nsys_analyzer.benches.model import CEILINGS, Bench, Case, Settings
from nsys_analyzer.errors import ConfigurationError

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
    """The bench of this name.

    Raises:
        ConfigurationError: there is none.
    """
    for bench in BENCHES:
        if bench.name == name:
            return bench
    raise ConfigurationError(f"Unknown bench {name!r}", f"Known benches: {', '.join(one.name for one in BENCHES)}")


def all_cases(bench: Bench, settings: Settings) -> tuple[Case, ...]:
    """The device's ceilings in each precision of the bench, then the bench's own cases; each once."""
    ceilings = (
        Case(CEILINGS, {"device": settings.device, "precision": precision}, f"ceilings in {precision}")
        for precision in bench.precisions(settings)
    )
    return tuple({case.key: case for case in (*ceilings, *bench.cases(settings))}.values())
