"""What too little warm-up does to a mean and its spread: one configuration, a fresh process for each warm-up."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nsys_analyzer.experiments.model import Option, Settings, Task, grid, single
from nsys_analyzer.experiments.section import spread
from nsys_analyzer.experiments.steps import TARGET, StepCase, StepRow
from nsys_analyzer.report.model import Block, Lines, Paragraph
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, milliseconds, percent
from nsys_analyzer.text import Words, joined, phrase

#: Set for the cases of the study, to its warm-up: cases of other variables run in processes of their own.
VARIABLE = "NSYS_ANALYZE_WARMUP_STUDY"
OPTIONS = (
    Option("study_warmup_steps", int, (0, 1, 2, 5), (0, 1), "Warm-ups of the warm-up study, a process each.", least=0),
    *(
        replace(single(StepCase, name, help), name=f"study_{name}")
        for name, help in (
            ("model", "the model of the study"),
            ("context_length", "tokens of the study's sequences"),
            ("mode", "what a step of the study is"),
        )
    ),
)
#: How many times its process's steady step a step must take to count as slow.
_SLOW = 1.5
#: How far the steady steps of processes may lie apart.
_APART = 0.05
_WHY = (
    "Making the model comes before the first step, so the device has been used already. The first step still loads "
    "kernels and libraries, and takes from the system the memory that later steps use again."
)


def cases(settings: Settings) -> Iterator[Task[StepCase]]:
    """One case for each warm-up, in processes of their own, for only a process's first steps are slow."""
    same = {key: (settings[f"study_{key}"],) for key in ("model", "context_length", "mode")}
    for warmup in settings["study_warmup_steps"]:
        yield from grid(
            TARGET, settings, lambda case: f"warm-up of {case.warmup_steps}", environment={VARIABLE: str(warmup)},
            warmup_steps=(warmup,), **same,
        )  # fmt: skip


@dataclass(frozen=True)
class _Process:
    """The steps of one process, in ms, before the measured ones and measured."""

    row: StepRow
    warmup_steps: int
    mean_ms: float
    warmup_times_ms: list[float]
    times_ms: list[float]

    @property
    def later_ms(self) -> list[float]:
        """The later half of the measured steps, of an odd number with the one in the middle."""
        return self.times_ms[len(self.times_ms) // 2 :]

    @property
    def steady_ms(self) -> float:
        """A step of the process when it is warm: the median of the later half."""
        return statistics.median(self.later_ms)

    @property
    def mean_over_steady(self) -> float:
        """How far the mean is off."""
        return self.mean_ms / self.steady_ms

    @property
    def every_ms(self) -> list[float]:
        """All steps, warm-up included."""
        return [*self.warmup_times_ms, *self.times_ms]

    @property
    def cv(self) -> float | None:
        """Standard deviation ÷ mean of the measured steps."""
        return self.row.figures.step.cv if self.row.figures.step else None


_FIELDS: tuple[Field[_Process], ...] = (
    Field("warm-up steps", "count", lambda one: one.warmup_steps),
    Field("mean ms", "ms", lambda one: spread(one.row.figures.step)),
    Field("CV", "percent", lambda one: one.cv),
    Field("min", "ms", lambda one: min(one.times_ms)),
    Field("max", "ms", lambda one: max(one.times_ms)),
    Field("steady step", "ms", lambda one: one.steady_ms),
    Field("mean ÷ steady", "factor", lambda one: one.mean_over_steady),
)


def study(rows: Sequence[StepRow]) -> Iterator[Block]:
    """Mean, spread and slow steps by warm-up; of fewer than two measured warm-ups nothing."""
    measured = _measured(rows)
    if len(measured) < 2:
        return
    case = measured[-1].row.case
    about = f"{case.mode} steps of {case.model}, context {case.context_length:,}, batch {case.batch_size}"
    caption = phrase("*Warm-up study*: {} measured {}; a fresh process for each warm-up.", case.steps, about)
    yield table(_FIELDS, measured, caption)
    last = len(measured[-1].later_ms)
    steady = phrase("*Steady step*: the median of the last {} measured steps of the same process.", last)
    yield Paragraph(joined(" ", [steady, *_apart(measured), _slow_steps(measured), _WHY]))
    yield _figure(measured, about)


def _measured(rows: Sequence[StepRow]) -> list[_Process]:
    found = [
        _Process(row, row.case.warmup_steps, step.ms, row.figures.warmup_times_ms or [], times)
        for row in rows
        if row.ok and (step := row.figures.step) and (times := row.figures.times_ms)
    ]
    return sorted(found, key=lambda one: one.warmup_steps)


def _apart(measured: Sequence[_Process]) -> Iterator[Words]:
    """That processes differ when warm, where they do: means of two of them tell nothing of warm-up then."""
    low, high = (pick(one.steady_ms for one in measured) for pick in (min, max))
    if high > low * (1 + _APART):
        yield (
            phrase(
                "**Processes differ** by {} in their steady steps ({} to {}): that is not warm-up, so "
                "each mean stands against its own process's steady step.",
                percent(high / low - 1),
                milliseconds(low),
                milliseconds(high),
            )
        )


def answer(rows: Sequence[StepRow]) -> Iterator[str]:
    """The study in a sentence: how far off the mean is with the least warm-up, and what makes it so."""
    measured = _measured(rows)
    if len(measured) < 2:
        return
    least, most = measured[0], measured[-1]
    few, many = (format_number(one.mean_over_steady, "factor") for one in (least, most))
    text = (
        f"With {least.warmup_steps} warm-up steps the mean is {few} the steady step of its process, with "
        f"{most.warmup_steps} {many}"
    )
    if least.cv is not None and most.cv is not None:
        text += f", the CV {percent(least.cv)} instead of {percent(most.cv)}"
    excess = [max(ms - least.steady_ms, 0) for ms in least.times_ms]
    if sum(excess):
        share, first = percent(excess[0] / sum(excess)), milliseconds(least.times_ms[0])
        text += f"; the first measured step ({first}) makes {share} of what is above the steady step"
    yield f"{text}."


def _slow_steps(measured: Sequence[_Process]) -> str:
    """Which steps of a process are slow, counted from its start, warm-up or not."""
    slow = Counter(
        number for one in measured for number, ms in enumerate(one.every_ms, 1) if ms > _SLOW * one.steady_ms
    )  # fmt: skip
    limit = f"{_SLOW} times the steady step"
    if not slow:
        return f"No step of a process took more than {limit}."
    named = ", ".join(f"step {number} in {slow[number]} of {len(measured)} processes" for number in sorted(slow))
    return f"Slower than {limit}, warm-up included: {named}."


def _figure(measured: Sequence[_Process], about: str) -> Lines:
    series = tuple((f"warm-up of {one.warmup_steps}", tuple(enumerate(one.every_ms, 1))) for one in measured)
    return Lines(
        "timing-warmup", f"Every step of each process: {about}", series, "step of the process, warm-up included", "ms",
        log_y=True,
    )  # fmt: skip
