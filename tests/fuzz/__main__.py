"""Tries broken, hostile and odd inputs until the time is up: ``python -m tests.fuzz --seconds 600 --seed 1``."""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp

from tests.fuzz import sandbox
from tests.fuzz.cases import KINDS, Bench, Finding, inputs, try_case


def fuzz(
    seconds: float, seed: int, folder: Path, most: int | None = None, kind: str | None = None
) -> tuple[Counter[str], list[Finding]]:
    """Tries cases until the time is up, or so many; the cases by kind, and what was found.

    Args:
        seconds: how long.
        seed: case ``n`` of a seed is always the same.
        folder: an empty folder to work in.
        most: at most so many cases.
        kind: of this kind alone.
    """
    sandbox.warm_up()
    bench = Bench(inputs(folder / "inputs"), folder)
    tried: Counter[str] = Counter()
    found = []
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until and (most is None or number < most):
        of_kind, finding = try_case(bench, seed, number, kind)
        tried[of_kind] += 1
        number += 1
        if finding:
            found.append(finding)
            print(finding, flush=True)
    return tried, found


def main() -> None:
    """The command line: exit code 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None, help="a seed that was printed, to see its cases again")
    parser.add_argument("--kind", choices=list(KINDS), help="cases of this kind alone")
    parser.add_argument("--case", type=int, default=None, help="one case of the seed alone, its input kept")
    given = parser.parse_args()
    seed = secrets.randbits(32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    folder = Path(mkdtemp(prefix="nsys-analyze-fuzz-"))
    if given.case is not None:
        sandbox.warm_up()
        bench = Bench(inputs(folder / "inputs"), folder)
        kind, finding = try_case(bench, seed, given.case, given.kind, keep=True)
        print(kind, finding or "nothing found", folder / "case")
        sys.exit(bool(finding))
    try:
        tried, found = fuzz(given.seconds, seed, folder, kind=given.kind)
    finally:
        shutil.rmtree(folder)
    print(f"{tried.total():,} cases: {', '.join(f'{kind} {count:,}' for kind, count in sorted(tried.items()))}")
    print(f"{len(found)} findings")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
