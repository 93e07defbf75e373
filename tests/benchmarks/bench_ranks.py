"""Time and memory of the report of hundreds of ranks, and how often a planted slow rank, link or stage is named.

The ranks are copies of committed captures of real ranks, with clocks of their own and with the planted delay. The
report is made as the command makes it; the names are looked up in the joined ranks of further runs.

    python -m tests.benchmarks.bench_ranks
    python -m tests.benchmarks.bench_ranks --ranks 32 --runs 20
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from nsys_analyzer.analysis.ranks.runs import find_runs
from nsys_analyzer.inputs.captures import read_captures
from nsys_analyzer.report.sections.ranks import describe_late_rank
from nsys_analyzer.text import plain
from tests.benchmarks.bench_report import TOOL, Row, run_well
from tests.support.many_ranks import SOURCES, Plant, make_ranks

PLANTS: tuple[Plant, ...] = ("rank", "link", "stage")


def is_named(folder: Path, plant: Plant, count: int, seed: int) -> bool:
    """Whether the sentence on the latest rank begins with the planted ranks."""
    planted = make_ranks(folder, plant, count, seed)
    (run,) = find_runs(read_captures([folder]))
    names = " and ".join(f"rank {rank}" for rank in planted.ranks)
    return plain(describe_late_rank(run)).lower().startswith(f"{names} ")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=256, help="how many are reported [%(default)s]")
    parser.add_argument("--runs", type=int, default=20, help="how many runs with a planted delay [%(default)s]")
    parser.add_argument("--ranks-of-runs", type=int, default=32, help="how many ranks each of them has [%(default)s]")
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, {options.ranks} ranks")
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as name:
        folder = Path(name)
        for plant in PLANTS:
            captures = folder / plant
            captures.mkdir()
            make_ranks(captures, plant, options.ranks)
            run = run_well([*TOOL, "report", captures, "--no-figures", "--force", "-o", folder / "report.md"])
            print(Row(f"slow {plant}: time", [run.seconds], "s", at_most=60))
            print(Row(f"slow {plant}: peak memory", [run.peak_gb], "GB", at_most=2), flush=True)
            shutil.rmtree(captures)
        named = 0
        for seed in range(options.runs):
            captures = folder / str(seed)
            captures.mkdir()
            named += is_named(captures, PLANTS[seed % len(SOURCES)], options.ranks_of_runs, seed)
            shutil.rmtree(captures)
        print(f"The planted delay is named in {named} of {options.runs} runs of {options.ranks_of_runs} ranks")
    if named < options.runs:
        raise SystemExit("A planted delay is not named")


if __name__ == "__main__":
    main()
