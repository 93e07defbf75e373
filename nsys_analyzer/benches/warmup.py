"""What too little warm-up does to a mean and its spread: one configuration, a fresh process for each warm-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from nsys_analyzer.benches.model import Case, Option, Row, Settings
from nsys_analyzer.benches.steps import MODES, spread, step_case
from nsys_analyzer.report.model import Block, Column, Lines, Paragraph, Table
from nsys_analyzer.report.units import format_number, milliseconds, percent

#: Set for the cases of the study, to its warm-up: cases of other variables run in processes of their own.
VARIABLE = "NSYS_ANALYZE_WARMUP_STUDY"
OPTIONS = (
    Option("study_warmup_steps", int, (0, 1, 2, 5), (0, 1), "Warm-ups of the warm-up study, a process each.", least=0),
    Option("study_model", str, ("small",), ("small",), "The model of the study.", several=False),
    Option("study_context_length", int, (256,), (32,), "Tokens of the study's sequences.", several=False),
    Option("study_mode", MODES, ("train",), ("train",), "What a step of the study is.", several=False),
)
#: How many times the steady median a step must take to count as slow.
_SLOW = 1.5
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
    case, most = measured[-1].case, measured[-1].case["warmup_steps"]
    about = f"{case['mode']} steps of {case['model']}, context {case['context_length']:,}, batch {case['batch_size']}"
    columns = (
        Column("warm-up steps", "count"), Column("mean ms", "ms"), Column("CV", "percent"), Column("min", "ms"),
        Column("max", "ms"), Column("median", "ms"), Column(f"mean ÷ mean of {most}", "factor"),
    )  # fmt: skip
    table = tuple(
        (
            row.case["warmup_steps"], spread(row, "step"), row.figures.get("step_cv"),
            *(row.figures[f"step_{key}_ms"] for key in ("min", "max", "median")),
            row.figures["step_ms"] / measured[-1].figures["step_ms"],
        )
        for row in measured
    )  # fmt: skip
    yield Table(columns, table, f"*Warm-up study*: {case['steps']} measured {about}; a fresh process for each warm-up.")
    yield Paragraph(f"{_slow_steps(measured)} {_WHY}")
    yield _figure(measured, about)


def _measured(rows: Sequence[Row]) -> list[Row]:
    return sorted((row for row in rows if row.ok), key=lambda row: int(row.case["warmup_steps"]))


def answer(rows: Sequence[Row]) -> Iterator[str]:
    """The study in a sentence: how far off the mean is with the least warm-up, and what makes it so."""
    measured = _measured(rows)
    if len(measured) < 2:
        return
    least, most = measured[0], measured[-1]
    factor = least.figures["step_ms"] / most.figures["step_ms"]
    few, many = (row.case["warmup_steps"] for row in (least, most))
    steady = most.figures["step_median_ms"]
    excess = [max(ms - steady, 0) for ms in least.figures["times_ms"]]
    text = f"With {few} warm-up steps the mean is {format_number(factor, 'factor')} that with {many}"
    if "step_cv" in least.figures and "step_cv" in most.figures:
        text += f", the CV {percent(least.figures['step_cv'])} instead of {percent(most.figures['step_cv'])}"
    if sum(excess):
        first = milliseconds(least.figures["times_ms"][0])
        text += (
            f"; the first measured step ({first}) makes {percent(excess[0] / sum(excess))} of what is above the median"
        )
    yield f"{text}."


def _slow_steps(measured: Sequence[Row]) -> str:
    """Which steps of a process are slow, counted from its start, warm-up or not."""
    steady = measured[-1].figures["step_median_ms"]
    slow = Counter(
        number for row in measured for number, ms in enumerate(_every_step(row), 1) if ms > _SLOW * steady
    )  # fmt: skip
    limit = f"{_SLOW} times the steady median, {milliseconds(steady)}"
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
