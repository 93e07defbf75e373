"""The warm-up study: how too little warm-up changes mean and spread, with a fresh process for each warm-up."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nsys_analyzer.experiments.model import Settings, Task, grid, options_of, several
from nsys_analyzer.experiments.section import factor, spread
from nsys_analyzer.experiments.steps import TARGET, StepCase, StepRow
from nsys_analyzer.report.model import Block, Lines, Paragraph
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds, percent
from nsys_analyzer.runs.rows import Times
from nsys_analyzer.text import phrase

#: The environment variable of the study's cases: cases of other variables run in processes of their own.
VARIABLE = "NSYS_ANALYZE_WARMUP_STUDY"
_SHARED = {"model": "the study's model", "context_length": "tokens of its sequences", "mode": "the phases of its steps"}
OPTIONS = (
    several(
        StepCase, "warmup_steps", (0, 1, 2, 5), (0, 1),
        name="study_warmup_steps", help="warm-ups of the warm-up study, a process each",
    ),
    *(replace(options_of(StepCase)[name], name=f"study_{name}", help=help) for name, help in _SHARED.items()),
)  # fmt: skip
#: A step is slow that takes so many times its process's steady step.
_SLOW = 1.5
_DEFINITION = (
    "{} *Steady step* is the median of the later half of a process's measured steps; *mean ÷ steady* compares each "
    "process with itself, for processes differ. The model is made before the first step, so the device is in use "
    "already; the first step still loads kernels and libraries, and allocates the memory that later steps use again."
)


def cases(settings: Settings) -> Iterator[Task[StepCase]]:
    """One case for each warm-up, in processes of their own, for only a process's first steps are slow."""
    same = {key: (settings[f"study_{key}"],) for key in _SHARED}
    for warmup in settings["study_warmup_steps"]:
        yield from grid(
            TARGET, settings, lambda case: f"warm-up of {case.warmup_steps}", environment={VARIABLE: str(warmup)},
            warmup_steps=(warmup,), **same,
        )  # fmt: skip


@dataclass(frozen=True)
class _Process:
    """The steps of one process: statistics, and times in ms."""

    warmup_steps: int
    step: Times
    warmup_times_ms: list[float]
    times_ms: list[float]

    @property
    def steady_ms(self) -> float:
        """The median of the later half of the measured steps; of an odd number, with the one in the middle."""
        return statistics.median(self.times_ms[len(self.times_ms) // 2 :])

    @property
    def mean_over_steady(self) -> float:
        """The error of the mean, as a factor."""
        return self.step.ms / self.steady_ms

    @property
    def all_ms(self) -> list[float]:
        """All steps, warm-up included."""
        return [*self.warmup_times_ms, *self.times_ms]


_FIELDS: tuple[Field[_Process], ...] = (
    Field("warm-up steps", "count", lambda one: one.warmup_steps),
    Field("mean ms", "ms", lambda one: spread(one.step)),
    Field("CV", "percent", lambda one: one.step.cv),
    Field("min", "ms", lambda one: min(one.times_ms)),
    Field("max", "ms", lambda one: max(one.times_ms)),
    Field("steady step", "ms", lambda one: one.steady_ms),
    Field("mean ÷ steady", "factor", lambda one: one.mean_over_steady),
)


def study(rows: Sequence[StepRow]) -> Iterator[Block]:
    """Mean, spread and slow steps by warm-up; nothing of fewer than two measured warm-ups."""
    measured = _measured(rows)
    if len(measured) < 2:
        return
    case = rows[-1].case
    about = f"{case.mode} steps of {case.model}, context {case.context_length:,}, batch {case.batch_size}"
    caption = phrase("*Warm-up study*: {} measured {}; a fresh process for each warm-up.", case.steps, about)
    yield table(_FIELDS, measured, caption)
    yield Paragraph(phrase(_DEFINITION, _slow_steps(measured)))
    series = tuple((f"warm-up of {one.warmup_steps}", tuple(enumerate(one.all_ms, 1))) for one in measured)
    title, axis = f"Every step of each process: {about}", "step of the process, warm-up included"
    yield Lines("timing-warmup", title, series, axis, "ms", log_y=True)


def _measured(rows: Sequence[StepRow]) -> list[_Process]:
    found = [
        _Process(row.case.warmup_steps, step, row.figures.warmup_times_ms or [], times)
        for row in rows
        if row.ok and (step := row.figures.step) and (times := row.figures.times_ms)
    ]
    return sorted(found, key=lambda one: one.warmup_steps)


def answer(rows: Sequence[StepRow]) -> Iterator[str]:
    """The error of the mean with the least and the most warm-up, and the first step's part in it."""
    measured = _measured(rows)
    if len(measured) < 2:
        return
    least, most = measured[0], measured[-1]
    errors = [f"{factor(one.mean_over_steady)} with a warm-up of {one.warmup_steps}" for one in (least, most)]
    yield f"The mean step ÷ the steady step of the process is {' and '.join(errors)}."
    excess = [max(ms - least.steady_ms, 0) for ms in least.times_ms]
    if sum(excess):
        share, first = percent(excess[0] / sum(excess)), milliseconds(least.times_ms[0])
        yield f"With a warm-up of {least.warmup_steps}, the first measured step ({first}) makes {share} of the excess."


def _slow_steps(measured: Sequence[_Process]) -> str:
    """Names the slow steps by their number in the process, warm-up included."""
    numbered = [(number, ms / one.steady_ms) for one in measured for number, ms in enumerate(one.all_ms, 1)]
    slow = Counter(number for number, times in numbered if times > _SLOW)
    if not slow:
        return f"No step of a process took more than {_SLOW} times its steady step."
    steps = ", ".join(f"step {number} in {slow[number]} of {len(measured)} processes" for number in sorted(slow))
    return f"Slower than {_SLOW} times the steady step, warm-up included: {steps}."
