"""Writes ``comparison/table.md``: how often a comparison reports a change, without any and with a planted one.

``python examples/comparison.py`` reads ``comparison/runs.jsonl``, and writes the table. With the folder of captures
that ``comparison/record.sh`` made, it first makes the runs from them.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import msgspec

from nsys_analyzer import summarize
from nsys_analyzer.analysis.comparison.change import CPU_SPREAD, Change, Estimate, SerialCorrelation
from nsys_analyzer.analysis.comparison.estimates import RunSpread
from nsys_analyzer.analysis.steps.step import StepSummary

FOLDER = Path(__file__).parent / "comparison"
PROGRAMS = {"gpu_bound": "the GPU is the limit", "launch_bound": "launching is the limit"}
SPREAD = RunSpread(CPU_SPREAD)
_INTRODUCTION = (
    "Two programs ([program.py](program.py)) ran side by side on two H200s of a shared host, 30 steps a run, each run",
    "in a process of its own: timed without a profiler, then recorded with nsys ([record.sh](record.sh), which was",
    "stopped when its time was up). `python examples/comparison.py` writes this page from [runs.jsonl](runs.jsonl).",
    "",
    "*called changed*: the 95% interval leaves out 0, though nothing was changed: between each two runs of the program",
    "as it is, and between the two halves of every run. *by steps alone*: by an interval that knows nothing of what",
    "runs differ by. *±*: half of the interval's width, median. What runs differ by (0.25% of the GPU's work, 25% of",
    "the time that it waits) was set with these runs at hand.",
)


class Row(msgspec.Struct, frozen=True):
    """A run that was timed without a profiler, and recorded.

    Attributes:
        program: its kind.
        planted: the share of a step that was asked for.
        planted_ms: what was planted in the recorded run: the time of the matmuls in it, or of the CPU's loop.
        unprofiled_ms: its steps without a profiler, in a process of their own.
        step: the steps of the recorded run, without kernels, phases, and places of idle time.
    """

    name: str
    program: str
    planted: float
    planted_ms: float
    unprofiled_ms: tuple[float, ...]
    step: StepSummary


class Clock(msgspec.Struct, frozen=True):
    """A figure of a run that is compared: its name, its values, and what it differs by from run to run."""

    name: str
    values: Callable[[Row], Sequence[float]]
    spread_ms: Callable[[StepSummary, float], float]


CLOCKS = (
    Clock("step, without the profiler", lambda row: row.unprofiled_ms, SPREAD.of_step),
    Clock("step, under it", lambda row: row.step.wall_values_ms, SPREAD.of_step),
    Clock("GPU busy", lambda row: row.step.busy_values_ms, lambda step, _: SPREAD.of_busy(step)),
)


def main() -> None:
    """Makes the rows where a folder is given, writes the table, and prints it."""
    if len(sys.argv) > 2:
        sys.exit("Give the folder of the captures, or nothing: python examples/comparison.py captures")
    if len(sys.argv) == 2:
        lines = b"\n".join(msgspec.json.encode(row) for row in collected(Path(sys.argv[1])))
        (FOLDER / "runs.jsonl").write_bytes(lines + b"\n")
    text = "\n".join(page(rows())) + "\n"
    (FOLDER / "table.md").write_text(text, encoding="utf-8")
    print(text)


def rows() -> tuple[Row, ...]:
    """The committed runs."""
    lines = (FOLDER / "runs.jsonl").read_bytes().splitlines()
    return tuple(msgspec.json.decode(line, type=Row) for line in lines)


def collected(folder: Path) -> Iterator[Row]:
    """The rows of the captures of a folder."""
    for program in PROGRAMS:
        timed = {}
        for line in (folder / f"{program}.jsonl").read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            if not one["profiled"]:
                timed[one["name"]] = one
        runs = {name: summarize(folder / f"{name}.sqlite")[0].step for name in timed}
        known = {kernel for name, step in runs.items() if not timed[name]["planted"] for kernel in _kernels(step)}
        for name, step in runs.items():
            assert step
            extra_ms = sum(ms for kernel, ms in _kernels(step).items() if kernel not in known)
            if program == "launch_bound":
                extra_ms = timed[name]["extra_ms"]
            yield Row(name, program, timed[name]["planted"], extra_ms, timed[name]["steps_ms"], _without_kernels(step))


def _kernels(step: StepSummary | None) -> dict[str, float]:
    return {one.name: one.ms for one in step.kernels} if step else {}


def _without_kernels(step: StepSummary) -> StepSummary:
    return replace(step, kernels=(), phases=(), idle_by_cause=(), devices=())


def change(clock: Clock, before: Row, after: Row, *, between_runs: bool = True) -> Change:
    """The change of a clock from one run to another; without what runs differ by, by their steps alone."""
    figures = []
    for row in (before, after):
        figure = Estimate.of_values(clock.values(row))
        figures.append(figure.with_run_error(between_runs * clock.spread_ms(row.step, figure.ms)))
    return Change.of(figures[0], figures[1], SerialCorrelation.of(clock.values(before), clock.values(after)))


def of_halves(clock: Clock, row: Row) -> Change:
    """The change of a clock from the first half of a run to the second."""
    values = clock.values(row)
    middle = len(values) // 2
    halves = values[:middle], values[middle : 2 * middle]
    figures = [Estimate.of_values(half) for half in halves]
    estimates = [figure.with_run_error(clock.spread_ms(row.step, figure.ms)) for figure in figures]
    return Change.of(*estimates, SerialCorrelation.of(*halves))


def of_program(every: Sequence[Row], program: str, planted: float | None = 0.0) -> list[Row]:
    """The runs of a program with so much planted; of None with any."""
    return [row for row in every if row.program == program and planted in (None, row.planted)]


def pairs(every: Sequence[Row], program: str, clock: Clock, *, between_runs: bool = True) -> list[Change]:
    """The changes of each pair of runs of a program as it is."""
    return [change(clock, *two, between_runs=between_runs) for two in combinations(of_program(every, program), 2)]


def planted(every: Sequence[Row], program: str, clock: Clock, share: float) -> list[Change]:
    """The changes from each run of a program as it is to each with so much planted."""
    return [change(clock, *two) for two in product(of_program(every, program), of_program(every, program, share))]


def halves(every: Sequence[Row], program: str, clock: Clock) -> list[Change]:
    """The changes from the first half of each run of a program to its second."""
    return [of_halves(clock, row) for row in of_program(every, program, None)]


def half_width(changes: Sequence[Change]) -> float:
    """Half of the width of the intervals, as a share of what was before, median."""
    found = ((one.low_share, one.high_share) for one in changes)
    return statistics.median((high - low) / 2 for low, high in found if low is not None and high is not None)


def shares(every: Sequence[Row], program: str) -> list[float]:
    """The shares of a step that were planted, as they were asked for."""
    return sorted({row.planted for row in every if row.program == program and row.planted})


def planted_share(every: Sequence[Row], program: str, share: float) -> float:
    """What was planted where a share was asked for, as a share of the median step under the profiler."""
    base = statistics.median(statistics.median(CLOCKS[1].values(row)) for row in of_program(every, program))
    return statistics.median(row.planted_ms for row in of_program(every, program, share)) / base


def page(every: Sequence[Row]) -> Iterator[str]:
    """The lines of the page."""
    yield "# What `nsys-analyze compare` makes of runs of one program, and of planted changes"
    yield ""
    yield from _INTRODUCTION
    yield ""
    yield "| program | figure | runs | pairs called changed | the same by steps alone | halves called changed | ± |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for program, words in PROGRAMS.items():
        for clock in CLOCKS:
            found, alone = pairs(every, program, clock), pairs(every, program, clock, between_runs=False)
            cells = (_rate(found), _rate(alone), _rate(halves(every, program, clock)), f"{half_width(found):.1%}")
            runs = len(of_program(every, program))
            yield f"| {words} | {clock.name} | {runs} | {' | '.join(cells).replace('%', ' %')} |"
    yield ""
    yield "| program | planted | that is, of a step | figure | found | its change, median |"
    yield "|---|---:|---:|---|---:|---:|"
    for program, words in PROGRAMS.items():
        for share, clock in product(shares(every, program), CLOCKS):
            found = planted(every, program, clock, share)
            median = round(statistics.median(one.share or 0.0 for one in found), 3) + 0.0  # no minus before a zero
            cells = (f"{share:.0%}", f"{planted_share(every, program, share):.1%}", clock.name, _rate(found))
            yield f"| {words} | {' | '.join(cells)} | {median:+.1%} |".replace("%", " %").replace("-", "−")


def _rate(changes: Sequence[Change]) -> str:
    return f"{sum(one.is_change for one in changes)} of {len(changes)}"


if __name__ == "__main__":
    main()
