"""Configurations measured eager and compiled: speed-ups, compile time, memory, and what makes them suspect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

from nsys_analyzer.analysis.transformer.models import model_from_dimensions
from nsys_analyzer.experiments.section import bars, extremes, factor, ratio, span, spread, unsteady
from nsys_analyzer.experiments.steps import PHASES, StepRow, model_names
from nsys_analyzer.report.model import Bars, Details, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds
from nsys_analyzer.runs.rows import Times
from nsys_analyzer.text import Words, phrase

#: Parts of a step whose speed-up is shown.
PARTS = ("forward", "backward + optimizer", "step")
#: In less than so many seconds nothing was compiled.
_TOO_FAST_S = 0.3
#: The first third of warm steps is slower than the last by no more.
_WARM = 0.05


@dataclass(frozen=True)
class Pair:
    """One configuration: its model, precision and context length, its mode, and its rows, "eager" and "compiled"."""

    name: str
    mode: str
    rows: Mapping[str, StepRow]

    @property
    def title(self) -> str:
        """Name and mode, for a sentence."""
        return f"{self.name}, {self.mode}"

    @property
    def status(self) -> str:
        """How the two ended, in a word where they ended alike."""
        if len(ends := {row.status for row in self.rows.values()}) == 1:
            return ends.pop()
        return ", ".join(f"{word} {row.status}" for word, row in self.rows.items())

    def ms(self, part: str) -> tuple[float | None, float | None]:
        """The sum of the medians of a part's phases, eager and compiled; None where one was not measured to its end."""
        return self._ms("eager", part), self._ms("compiled", part)

    def _ms(self, word: str, part: str) -> float | None:
        medians = [times.median_ms if (times := self.times(word, phase)) else None for phase in part.split(" + ")]
        known = [median for median in medians if median is not None]
        return sum(known) if len(known) == len(medians) else None

    def times(self, word: str, phase: str) -> Times | None:
        """The times of a phase, None where the row was not measured to its end."""
        row = self.rows.get(word)
        return row.figures.phase(phase) if row and row.ok else None

    def peak(self, word: str) -> int | None:
        """The peak of allocated memory, also of a row that ran out."""
        return self.rows[word].figures.peak_allocated_bytes if word in self.rows else None

    def speed_up(self, part: str) -> float | None:
        """Eager time ÷ compiled time."""
        return ratio(*self.ms(part))

    @property
    def compile_s(self) -> float | None:
        """The first step of the compiled run without the median of the measured ones, in seconds."""
        _, step = self.ms("step")
        first = self.rows["compiled"].figures.first_step_ms if "compiled" in self.rows else None
        return None if first is None or step is None else (first - step) / 1e3

    @property
    def repaid_after(self) -> float | None:
        """Steps whose savings make up for compiling; None where a compiled step is no faster."""
        (eager, compiled), compile_s = self.ms("step"), self.compile_s
        if not eager or not compiled or compile_s is None or compiled >= eager:
            return None
        return compile_s * 1e3 / (eager - compiled)


def pairs_of(rows: Sequence[StepRow]) -> list[Pair]:
    """The pairs in the order of the rows."""
    model_name = model_names(rows, beside=("context_length", "mode", "precision", "compile"))
    found: dict[tuple[str, str], dict[str, StepRow]] = {}
    for row in rows:
        case = row.case
        size = model_from_dimensions(*case.size.dimensions).name  # a changed model is named by its dimensions
        name = f"{model_name(row).replace(case.model, size, 1)} {case.precision}, context {case.context_length:,}"
        found.setdefault((name, case.mode), {})["compiled" if case.compile else "eager"] = row
    return [Pair(name, mode, both) for (name, mode), both in found.items()]


def answers(pairs: Sequence[Pair]) -> Iterator[Words]:
    """The span of speed-ups of a step by mode, the parts inside a training step, and the cost of compiling."""
    for mode in dict.fromkeys(pair.mode for pair in pairs):
        gains = [(gain, pair.name) for pair in pairs if pair.mode == mode and (gain := pair.speed_up("step"))]
        if gains:
            yield phrase("`torch.compile` makes a {} step {} as fast.", mode, extremes(gains, factor))
    by_part = {
        part: [gain for pair in pairs if pair.mode != "forward" and (gain := pair.speed_up(part))] for part in PARTS[:2]
    }
    if spans := [f"{part} {span(gains, 'factor')}" for part, gains in by_part.items() if gains]:
        yield f"Inside a training step: {', '.join(spans)}; the optimizer is not compiled."
    if costs := [(cost, pair) for pair in pairs if (cost := pair.compile_s) is not None]:
        named = [(cost, f"{pair.title}{_repaid(pair)}") for cost, pair in costs]
        yield f"Compiling takes {extremes(named, '{:.1f} s'.format)}."
    every = [gain for pair in pairs if (gain := pair.speed_up("step"))]
    if slower := sum(gain <= 1 for gain in every):
        yield f"Of {len(every)} configurations {slower} are no faster for it."


def _repaid(pair: Pair) -> str:
    if repaid := pair.repaid_after:
        return f", repaid after {repaid:,.0f} steps"
    return ", never repaid" if pair.speed_up("step") else ""


def warnings(pairs: Sequence[Pair]) -> Iterator[Words]:
    """Pairs of which nothing may have been compiled, and unsteady phases."""
    for pair in pairs:
        if pair.compile_s is not None and pair.compile_s < _TOO_FAST_S:
            yield phrase("**Was anything compiled?** The first step of {} took little more than others.", pair.title)
    variations = {
        f"{phase} of {pair.title}, {word}": times.cv or 0
        for pair in pairs
        for word in pair.rows
        for phase in PHASES
        if (times := pair.times(word, phase))
    }
    yield from unsteady("phases", variations)
    for pair in pairs:
        for word, row in pair.rows.items():
            steps = row.figures.times_ms or []
            third = len(steps) // 3
            if third and (first := median(steps[:third])) > (1 + _WARM) * (last := median(steps[-third:])):
                yield phrase(
                    "**Not warm yet**: the first third of the steps of {}, {}, is slower than the last: {}, then {}.",
                    pair.title, word, milliseconds(first), milliseconds(last),
                )  # fmt: skip


_CONFIGURATION: tuple[Field[Pair], ...] = (
    Field("configuration", "text", lambda pair: pair.name),
    Field("mode", "text", lambda pair: pair.mode),
)


def speed_ups(pairs: Sequence[Pair]) -> Table:
    """Eager ÷ compiled of each part, the cost of compiling, and peaks of memory."""
    fields: tuple[Field[Pair], ...] = (
        *_CONFIGURATION,
        *(Field(part, "factor", partial(_speed_up, part)) for part in PARTS),
        Field("compile s", "count", lambda pair: pair.compile_s),
        Field("repaid after steps", "count", lambda pair: None if (n := pair.repaid_after) is None else round(n)),
        Field("eager peak", "bytes", lambda pair: pair.peak("eager")),
        Field("compiled peak", "bytes", lambda pair: pair.peak("compiled")),
        Field("status", "text", lambda pair: pair.status),
    )
    return table(fields, pairs, phrase("Speed-up by `torch.compile`, and what compiling costs:"), names=2)


def _speed_up(part: str, pair: Pair) -> float | None:
    return pair.speed_up(part)


class _Phase(NamedTuple):
    pair: Pair
    name: str


_PHASE: tuple[Field[_Phase], ...] = (
    Field("configuration", "text", lambda one: one.pair.name),
    Field("mode", "text", lambda one: one.pair.mode),
    Field("phase", "text", lambda one: one.name),
    Field("eager ms", "ms", lambda one: spread(one.pair.times("eager", one.name))),
    Field("compiled ms", "ms", lambda one: spread(one.pair.times("compiled", one.name))),
    Field("eager median", "ms", lambda one: one.pair.ms(one.name)[0]),
    Field("compiled median", "ms", lambda one: one.pair.ms(one.name)[1]),
    Field("speed-up", "factor", lambda one: one.pair.speed_up(one.name)),
)


def phases(pairs: Sequence[Pair]) -> Details:
    """Milliseconds of each phase, eager and compiled."""
    every = [_Phase(pair, name) for pair in pairs for name in (*PHASES, "step")]
    caption = "Mean ± standard deviation of the unprofiled steps, and their medians, which make the speed-up:"
    return Details("Time of each phase", (table(_PHASE, every, caption, names=3),))


def speed_up_bars(pairs: Sequence[Pair]) -> Iterator[Bars]:
    """Speed-ups of the configurations, mode by mode."""
    for mode in dict.fromkeys(pair.mode for pair in pairs):
        parts = PARTS[:1] if mode == "forward" else PARTS  # there the step is the forward pass
        drawn = [pair for pair in pairs if pair.mode == mode and pair.speed_up("step")]
        values = {(pair.name, part): pair.speed_up(part) for pair in drawn for part in parts}
        yield from bars(f"compile-speed-up-{mode}", f"Speed-up by torch.compile, {mode}", values, "eager ÷ compiled")
