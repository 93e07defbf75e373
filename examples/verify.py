"""Writes ``verify/table.md``: how often ``verify`` reports a change, without any and with a planted one.

``python examples/verify.py`` makes the table of ``verify/repeats.jsonl``; with a number of rounds it measures so many
first, and adds them there. Each round is five programs that were not changed, and one of each planted change.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from nsys_analyzer.analysis.comparison.turns import ProcessPairs, TimedProcess
from nsys_analyzer.capture.targets import Annotation, program_target
from nsys_analyzer.configuration import Run
from nsys_analyzer.verify.turns import Program, take_turns

FOLDER = Path(__file__).parent / "verify"
REPEATS = FOLDER / "repeats.jsonl"
#: The share that is planted, of each of a round.
ROUND = (0.0, 0.03, 0.0, 0.05, 0.0, 0.10, 0.0, 0.0)
PAIRS = 10
_BLOCK = 20
_INTRODUCTION = """# What `nsys-analyze verify` makes of programs that were not changed, and of planted changes

A loop ([program.py](program.py)) of which each step is 100 products of small matrices, and the same loop with more of
them, on a machine of two cores on which others worked at the same time: the load was {load}. Each repeat is what
`verify` does, with up to {pairs} pairs of processes. `python examples/verify.py` makes this page from
[repeats.jsonl](repeats.jsonl), in which every measured block stands.

*Called*: the interval leaves 0 out. *Pairs*: those that were run until the change was known to a quarter of it, or
nothing above 1 % was left to be found; the median, {pairs} being the most. *±*: half the interval in the end, median.
*Inside*: the repeats whose interval holds what was planted.
"""


class Repeat(msgspec.Struct, frozen=True):
    """One comparison of the program with itself, or with a planted change; the blocks of each pair, ms a step."""

    planted: float
    load: float
    pairs: list[tuple[list[float], list[float]]]

    @property
    def turns(self) -> ProcessPairs:
        """Returns the pairs, each block as one step."""
        return ProcessPairs(tuple((TimedProcess(tuple(one)), TimedProcess(tuple(other))) for one, other in self.pairs))


def repeat(planted: float) -> Repeat:
    """Measures the program and a changed one in turns, until that tells enough."""
    programs = []
    for name, share in (("old", 0.0), ("new", planted)):
        words = (sys.executable, str(FOLDER / "program.py"), str(share))
        asked = Annotation(warmup_steps=5, steps=16 * _BLOCK, steps_per_turn=_BLOCK)
        target = program_target(words, Run(), asked)
        programs.append(Program(name, target, Path.cwd()))
    pairs: list[tuple[TimedProcess, TimedProcess]] = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in islice(take_turns(programs, Path(folder), 600), PAIRS):
            pairs.append(pair)
            if ProcessPairs(tuple(pairs)).is_certain_enough:
                break
    blocks = [([*map(rounded, one.blocks_ms)], [*map(rounded, other.blocks_ms)]) for one, other in pairs]
    return Repeat(planted, os.getloadavg()[0], blocks)


def rounded(value: float) -> float:
    """Returns a time in ms to a microsecond."""
    return round(float(value), 3)


def main() -> None:
    """Measures the rounds that are asked for, and writes the table."""
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 0):
        for planted in ROUND:
            with REPEATS.open("ab") as file:
                file.write(msgspec.json.encode(repeat(planted)) + b"\n")
    repeats = [msgspec.json.decode(line, type=Repeat) for line in REPEATS.read_bytes().splitlines()]
    (FOLDER / "table.md").write_text("\n".join(page(repeats)) + "\n", encoding="utf-8")


def page(repeats: list[Repeat]) -> Iterator[str]:
    """Yields the lines of the page."""
    loads = sorted(one.load for one in repeats)
    yield _INTRODUCTION.format(
        load=f"{loads[0]:.1f} to {loads[-1]:.1f}, {statistics.median(loads):.1f} in the middle", pairs=PAIRS
    )
    yield "| planted | repeats | called faster | called slower | pairs | ± | measured, median | inside |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|"
    for planted in sorted({one.planted for one in repeats}):
        changes = [one.turns.change for one in repeats if one.planted == planted]
        shares = [change.share or 0.0 for change in changes]
        called = [(change.is_change and change.ms < 0, change.is_change and change.ms > 0) for change in changes]
        halves = [
            (change.high_share - change.low_share) / 2
            for change in changes
            if change.low_share is not None and change.high_share is not None
        ]
        inside = sum(
            change.low_share <= planted <= change.high_share
            for change in changes
            if change.low_share is not None and change.high_share is not None
        )
        cells = (
            f"{planted:.0%}" if planted else "nothing", len(changes), *map(sum, zip(*called, strict=True)),
            f"{statistics.median(change.before_n or 0 for change in changes):.0f}", f"{statistics.median(halves):.1%}",
            f"{statistics.median(shares):+.1%}", inside,
        )  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
