"""What too little warm-up does to a mean and its spread: one configuration, a fresh process for each warm-up."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from nsys_analyzer.benches.model import Case, Option, Row, Settings
from nsys_analyzer.benches.steps import MODES, spread, step_case
from nsys_analyzer.report.model import Block, Column, Lines, Paragraph, Table
from nsys_analyzer.report.units import format_number, milliseconds, percent
from nsys_analyzer.text import emphasis, strong

#: Set for the cases of the study, to its warm-up: cases of other variables run in processes of their own.
VARIABLE = "NSYS_ANALYZE_WARMUP_STUDY"
OPTIONS = (
    Option("study_warmup_steps", int, (0, 1, 2, 5), (0, 1), "Warm-ups of the warm-up study, a process each.", least=0),
    Option("study_model", str, ("small",), ("small",), "The model of the study.", several=False),
    Option("study_context_length", int, (256,), (32,), "Tokens of the study's sequences.", several=False),
    Option("study_mode", MODES, ("train",), ("train",), "What a step of the study is.", several=False),
)
#: How many times its process's steady step a step must take to count as slow.
_SLOW = 1.5
#: How far the steady steps of processes may lie apart.
_APART = 0.05
_WHY = (
    "Making the model comes before the first step, so the device has been used already. The first step still loads "
    "kernels and libraries, and takes from the system the memory that later steps use again."
)


def cases(settings: Settings) -> Iterator[Case]:
    """One case for each warm-up, in processes of their own, for only a process's first steps are slow."""
    model, length, mode = (settings[f"study_{key}"] for key in ("model", "context_length", "mode"))
    for warmup in settings["study_warmup_steps"]:
        yield step_case(
            settings, f"warm-up of {warmup}", {VARIABLE: str(warmup)},
            model=model, context_length=length, mode=mode, batch_size=settings["batch_size"],
            precision=settings["precision"], optimizer=settings["optimizer"], warmup_steps=warmup,
        )  # fmt: skip


def study(rows: Sequence[Row]) -> Iterator[Block]:
    """Mean, spread and slow steps by warm-up; of fewer than two measured warm-ups nothing."""
    measured = _measured(rows)
    if len(measured) < 2:
        return
    case = measured[-1].case
    about = f"{case['mode']} steps of {case['model']}, context {case['context_length']:,}, batch {case['batch_size']}"
    columns = (
        Column("warm-up steps", "count"), Column("mean ms", "ms"), Column("CV", "percent"), Column("min", "ms"),
        Column("max", "ms"), Column("steady step", "ms"), Column("mean ÷ steady", "factor"),
    )  # fmt: skip
    table = tuple(
        (
            row.case["warmup_steps"], spread(row, "step"), row.figures.get("step_cv"), row.figures["step_min_ms"],
            row.figures["step_max_ms"], _steady_ms(row), _mean_over_steady(row),
        )
        for row in measured
    )  # fmt: skip
    yield Table(
        columns,
        table,
        f"{emphasis('Warm-up study')}: {case['steps']} measured {about}; a fresh process for each warm-up.",
    )
    last = len(_last(measured[-1]))
    steady = f"{emphasis('Steady step')}: the median of the last {last} measured steps of the same process."
    yield Paragraph(" ".join([steady, *_apart(measured), _slow_steps(measured), _WHY]))
    yield _figure(measured, about)


def _measured(rows: Sequence[Row]) -> list[Row]:
    return sorted((row for row in rows if row.ok), key=lambda row: int(row.case["warmup_steps"]))


def _last(row: Row) -> list[float]:
    """The later half of the measured steps, of an odd number with the one in the middle."""
    times: list[float] = row.figures["times_ms"]
    return times[len(times) // 2 :]


def _steady_ms(row: Row) -> float:
    return statistics.median(_last(row))


def _mean_over_steady(row: Row) -> float:
    return float(row.figures["step_ms"]) / _steady_ms(row)


def _apart(measured: Sequence[Row]) -> Iterator[str]:
    """That processes differ when warm, where they do: means of two of them tell nothing of warm-up then."""
    low, high = (pick(map(_steady_ms, measured)) for pick in (min, max))
    if high > low * (1 + _APART):
        yield (
            f"{strong('Processes differ')} by {percent(high / low - 1)} in their steady steps ({milliseconds(low)} to "
            f"{milliseconds(high)}): that is not warm-up, so each mean stands against its own process's steady step."
        )


def answer(rows: Sequence[Row]) -> Iterator[str]:
    """The study in a sentence: how far off the mean is with the least warm-up, and what makes it so."""
    measured = _measured(rows)
    if len(measured) < 2:
        return
    least, most = measured[0], measured[-1]
    few, many = (row.case["warmup_steps"] for row in (least, most))
    factors = [format_number(_mean_over_steady(row), "factor") for row in (least, most)]
    text = f"With {few} warm-up steps the mean is {factors[0]} the steady step of its process, with {many} {factors[1]}"
    if "step_cv" in least.figures and "step_cv" in most.figures:
        text += f", the CV {percent(least.figures['step_cv'])} instead of {percent(most.figures['step_cv'])}"
    times = least.figures["times_ms"]
    excess = [max(ms - _steady_ms(least), 0) for ms in times]
    if sum(excess):
        share = percent(excess[0] / sum(excess))
        text += f"; the first measured step ({milliseconds(times[0])}) makes {share} of what is above the steady step"
    yield f"{text}."


def _slow_steps(measured: Sequence[Row]) -> str:
    """Which steps of a process are slow, counted from its start, warm-up or not."""
    slow = Counter(
        number for row in measured for number, ms in enumerate(_every_step(row), 1) if ms > _SLOW * _steady_ms(row)
    )  # fmt: skip
    limit = f"{_SLOW} times the steady step"
    if not slow:
        return f"No step of a process took more than {limit}."
    named = ", ".join(f"step {number} in {slow[number]} of {len(measured)} processes" for number in sorted(slow))
    return f"Slower than {limit}, warm-up included: {named}."


def _every_step(row: Row) -> list[float]:
    return [*row.figures["warmup_times_ms"], *row.figures["times_ms"]]


def _figure(measured: Sequence[Row], about: str) -> Lines:
    series = tuple(
        (f"warm-up of {row.case['warmup_steps']}", tuple(enumerate(_every_step(row), 1))) for row in measured
    )
    return Lines(
        "timing-warmup", f"Every step of each process: {about}", series, "step of the process, warm-up included", "ms",
        log_y=True,
    )  # fmt: skip
