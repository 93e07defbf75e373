"""A whole experiment, as one is added: its case, figures, target and what is said of its rows. It counts primes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nsys_analyzer.experiments.model import Bench, Results, list_option, option
from nsys_analyzer.experiments.section import make_rows_table
from nsys_analyzer.inputs.rows import CaseTarget
from nsys_analyzer.report.model import Block


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


def _write_sentences(results: Results) -> Iterator[str]:
    yield f"Up to {max(row.figures.primes_count or 0 for row in results.rows)} primes."


def _make_tables_and_charts(results: Results) -> Iterator[Block]:
    yield make_rows_table(results.rows, "Primes:", ("primes", "count", "primes_count"))


BENCH = Bench(
    name="primes",
    title="primes",
    summary="How many primes there are.",
    options=(list_option(PrimesCase, "limit", (10, 100)),),
    target=TARGET,
    write_sentences=_write_sentences,
    make_tables_and_charts=_make_tables_and_charts,
)


def measure(case: PrimesCase, figures: PrimesFigures) -> None:
    """Counts primes."""
    figures.primes_count = sum(all(n % d for d in range(2, n)) for n in range(2, case.limit))


if __name__ == "__main__":
    from profiling_targets.harness import main

    main(TARGET, measure)
