"""A whole experiment, as one is added: its case and figures, its target and its section. It counts primes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from nsys_analyzer.experiments.model import Bench, Results, grid, option, require, several
from nsys_analyzer.report.model import Paragraph, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.runs.rows import CaseTarget


@dataclass(frozen=True)
class PrimesCase:
    """One count."""

    device: str
    limit: int = option(100, "count the primes below this")


@dataclass
class PrimesFigures:
    """How many there are."""

    primes_count: int | None = None


TARGET = CaseTarget("tests.support.new_experiment", PrimesCase, PrimesFigures)


def _section(results: Results) -> Section:
    rows = results.rows_of(TARGET)
    columns = (
        Field("limit", "count", lambda row: row.case.limit),
        Field("primes", "count", lambda row: row.figures.primes_count),
    )
    most = max(require(row.figures.primes_count) for row in rows)
    return Section("bench-primes", "Primes", (Paragraph(f"Up to {most} primes."), table(columns, rows, "Primes:")))


BENCH = Bench(
    "primes",
    "How many primes there are.",
    (several(PrimesCase, "limit", (10, 100)),),
    lambda settings: tuple(grid(TARGET, settings, lambda case: f"below {case.limit}")),
    _section,
    precisions=lambda _: (),
    targets=(TARGET,),
)


def measure(case: PrimesCase, figures: PrimesFigures) -> None:
    """Counts primes."""
    figures.primes_count = sum(all(n % d for d in range(2, n)) for n in range(2, case.limit))


if __name__ == "__main__":
    from profiling_targets.harness import main

    sys.exit(main(TARGET, measure))
