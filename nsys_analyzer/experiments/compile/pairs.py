"""The eager and the compiled row of each configuration, what they come to together, and what can be said of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from nsys_analyzer.analysis.transformer.models import model_from_dimensions
from nsys_analyzer.experiments.model import Times
from nsys_analyzer.experiments.section import named, ratio, span, spread, unsteady
from nsys_analyzer.experiments.steps import PHASES, StepRow, model_names
from nsys_analyzer.report.model import Bars, Details, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, milliseconds, percent
from nsys_analyzer.text import Words, phrase

#: Parts of a step that are compared, with the phases they consist of.
PARTS = {"forward": ("forward",), "backward + optimizer": ("backward", "optimizer"), "step": ("step",)}
#: In less than so many seconds nothing was compiled.
_TOO_FAST_S = 0.3
#: How much slower the first steps may be than the last, for the process to count as warm.
_WARM = 0.05
_BESIDE = ("context_length", "mode", "precision", "compile")


@dataclass(frozen=True)
class Pair:
    """One configuration, eager and compiled.

    Attributes:
        name: model, precision and context length.
        mode: the phases of its step.
        eager, compiled: the rows; None where it was not asked for.

    """

    name: str
    mode: str
    eager: StepRow | None
    compiled: StepRow | None

    @property
    def title(self) -> str:
        """What it is called in a sentence."""
        return f"{self.name}, {self.mode}"

    @property
    def status(self) -> str:
        """How the two ended, in a word where they ended alike."""
        words = {name: row.status for name, row in (("eager", self.eager), ("compiled", self.compiled)) if row}
        if len(set(words.values())) == 1:
            return next(iter(words.values()))
        return ", ".join(f"{name} {status}" for name, status in words.items())

    def measured(self) -> dict[str, StepRow]:
        """The rows that were measured to their end, by the word for them."""
        both = {"eager": self.eager, "compiled": self.compiled}
        return {word: row for word, row in both.items() if row and row.ok}

    def ms(self, part: str) -> tuple[float | None, float | None]:
        """The median time of one of ``PARTS``, eager and compiled; None where it was not measured to its end."""
        return _ms(self.eager, part), _ms(self.compiled, part)

    def speed_up(self, part: str) -> float | None:
        """Eager time ÷ compiled time."""
        eager, compiled = self.ms(part)
        return ratio(eager, compiled)

    @property
    def compile_s(self) -> float | None:
        """The first step of the compiled run without the median of the measured ones, in seconds."""
        _, step = self.ms("step")
        if self.compiled is None or step is None:
            return None
        first = self.compiled.figures.first_step_ms
        return None if first is None else (first - step) / 1e3

    @property
    def peaks(self) -> tuple[int | None, int | None]:
        """The peak of allocated memory in bytes, eager and compiled, as far as it was reached."""
        eager, compiled = (row.figures.peak_allocated_bytes if row else None for row in (self.eager, self.compiled))
        return eager, compiled

    @property
    def repaid_after(self) -> float | None:
        """Steps whose savings make up for compiling; None where a compiled step is no faster."""
        (eager, compiled), compile_s = self.ms("step"), self.compile_s
        if not eager or not compiled or compile_s is None or compiled >= eager:
            return None
        return compile_s * 1e3 / (eager - compiled)


def _ms(row: StepRow | None, part: str) -> float | None:
    times = [_median_ms(row, phase) for phase in PARTS[part]]
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None


def _times(row: StepRow | None, phase: str) -> Times | None:
    return row.figures.phase(phase) if row and row.ok else None


def _median_ms(row: StepRow | None, phase: str) -> float | None:
    times = _times(row, phase)
    return times.median_ms if times else None


def pairs_of(rows: Sequence[StepRow]) -> list[Pair]:
    """The pairs in the order of the rows."""
    named_as = model_names(rows, beside=("context_length", "mode", "precision", "compile"))
    found: dict[tuple[str, str], dict[bool, StepRow]] = {}
    for row in rows:
        case = row.case
        own = model_from_dimensions(*case.size.dimensions).name  # as its dimensions call it
        name = f"{named_as(row).replace(case.model, own, 1)} {case.precision}, context {case.context_length:,}"
        found.setdefault((name, case.mode), {})[case.compile] = row
    return [Pair(name, mode, both.get(False), both.get(True)) for (name, mode), both in found.items()]


def answers(pairs: Sequence[Pair]) -> Iterator[Words]:
    """The span of speed-ups of a step by mode, what compiling costs, and which part gains most."""
    for mode in dict.fromkeys(pair.mode for pair in pairs):
        gains = [(gain, pair.name) for pair in pairs if pair.mode == mode and (gain := pair.speed_up("step"))]
        said = [f"{format_number(gain, 'factor')} ({name})" for gain, name in sorted(gains)[:: max(len(gains) - 1, 1)]]
        if said:
            yield phrase("`torch.compile` makes a {} step {} as fast.", mode, " to ".join(dict.fromkeys(said)))
    yield from _parts_answer(pairs)
    yield from _cost_answer(pairs)


def _parts_answer(pairs: Sequence[Pair]) -> Iterator[str]:
    gains = {
        part: [speed_up for pair in pairs if pair.mode != "forward" and (speed_up := pair.speed_up(part))]
        for part in ("forward", "backward + optimizer")
    }
    said = [f"{part} {span(values, 'factor')}" for part, values in gains.items() if values]
    if said:
        yield f"Inside a training step: {', '.join(said)}; the optimizer is not compiled."


def _cost_answer(pairs: Sequence[Pair]) -> Iterator[str]:
    costs = sorted((cost, _cost(pair, cost)) for pair in pairs if (cost := pair.compile_s) is not None)
    if costs:
        yield f"Compiling takes {' to '.join(dict.fromkeys((costs[0][1], costs[-1][1])))}."
    gains = [gain for pair in pairs if (gain := pair.speed_up("step"))]
    if slower := sum(gain <= 1 for gain in gains):
        yield f"Of {len(gains)} configurations {slower} are no faster for it."


def _cost(pair: Pair, compile_s: float) -> str:
    """The cost of one configuration and the steps that make up for it, for they belong together."""
    repaid, known = pair.repaid_after, pair.speed_up("step") is not None
    after = f", repaid after {repaid:,.0f} steps" if repaid else ", never repaid" if known else ""
    return f"{compile_s:.1f} s ({pair.title}{after})"


def warnings(pairs: Sequence[Pair]) -> Iterator[Words]:
    """What makes a comparison suspect: nothing compiled, an unsteady phase, steps that were not warm."""
    for pair in pairs:
        if pair.compile_s is not None and pair.compile_s < _TOO_FAST_S:
            first = f"The first step of {pair.title} took little more than a later one."
            yield phrase("**Was anything compiled?** {}", first)
    rows = {f"{pair.title}, {word}": row for pair in pairs for word, row in pair.measured().items()}
    spreads = {f"{phase} of {name}": _times(row, phase) for name, row in rows.items() for phase in PHASES}
    yield from unsteady("phases", {name: times.cv or 0 for name, times in spreads.items() if times})
    warming = {name: _still_warming(row.figures.times_ms or ()) for name, row in rows.items()}
    if cold := [f"{name} ({text})" for name, text in warming.items() if text]:
        yield (
            phrase(
                "**Not warm yet**: the first third of the measured steps is over {} slower than the last:"
                " {}. Warm steps may take less than their median.",
                percent(_WARM),
                named(cold),
            )
        )


def _still_warming(times: Sequence[float]) -> str:
    """Medians of the first and the last third of the steps where the first is slower; else nothing."""
    third = len(times) // 3
    if not third:
        return ""
    first, last = statistics.median(times[:third]), statistics.median(times[-third:])
    return f"{milliseconds(first)}, then {milliseconds(last)}" if first > last * (1 + _WARM) else ""


_CONFIGURATION: tuple[Field[Pair], ...] = (
    Field("configuration", "text", lambda pair: pair.name),
    Field("mode", "text", lambda pair: pair.mode),
)


def speed_ups(pairs: Sequence[Pair]) -> Table:
    """Eager ÷ compiled of each part, and the price."""
    fields: tuple[Field[Pair], ...] = (
        *_CONFIGURATION,
        *(Field(part, "factor", partial(_speed_up, part)) for part in PARTS),
        Field("compile s", "count", lambda pair: pair.compile_s),
        Field("repaid after steps", "count", lambda pair: None if (n := pair.repaid_after) is None else round(n)),
        Field("status", "text", lambda pair: pair.status),
    )
    return table(fields, pairs, phrase("Speed-up by `torch.compile`, and what compiling costs:"), names=2)


def _speed_up(part: str, pair: Pair) -> float | None:
    return pair.speed_up(part)


def times(pairs: Sequence[Pair]) -> Details:
    """Milliseconds of each phase, eager and compiled."""
    phases = [
        _Phase(pair, phase, _times(pair.eager, phase), _times(pair.compiled, phase))
        for pair in pairs
        for phase in (*PHASES, "step")
    ]
    caption = "Mean and standard deviation of the unprofiled steps, and their medians, which the speed-up is of:"
    return Details("Time of each phase", (table(_PHASE, phases, caption, names=3),))


@dataclass(frozen=True)
class _Phase:
    """A phase of a pair."""

    pair: Pair
    name: str
    eager: Times | None
    compiled: Times | None

    @property
    def medians(self) -> tuple[float | None, float | None]:
        """Medians in ms, eager and compiled."""
        eager, compiled = (times.median_ms if times else None for times in (self.eager, self.compiled))
        return eager, compiled


_PHASE: tuple[Field[_Phase], ...] = (
    Field("configuration", "text", lambda one: one.pair.name),
    Field("mode", "text", lambda one: one.pair.mode),
    Field("phase", "text", lambda one: one.name),
    Field("eager ms", "ms", lambda one: spread(one.eager)),
    Field("compiled ms", "ms", lambda one: spread(one.compiled)),
    Field("eager median", "ms", lambda one: one.medians[0]),
    Field("compiled median", "ms", lambda one: one.medians[1]),
    Field("speed-up", "factor", lambda one: ratio(*one.medians)),
)


_MEMORY: tuple[Field[Pair], ...] = (
    *_CONFIGURATION,
    Field("eager", "bytes", lambda pair: pair.peaks[0]),
    Field("compiled", "bytes", lambda pair: pair.peaks[1]),
    Field("compiled ÷ eager", "factor", lambda pair: ratio(*reversed(pair.peaks))),
)


def memory(pairs: Sequence[Pair]) -> Iterator[Details]:
    """The peak of allocated memory, where it was counted."""
    if any(peak for pair in pairs for peak in pair.peaks):
        caption = "Peak of allocated memory; what ran out had so much:"
        yield Details("Memory", (table(_MEMORY, pairs, caption, names=2),))


def bars(pairs: Sequence[Pair]) -> Iterator[Bars]:
    """Speed-ups of the configurations, mode by mode."""
    for mode in dict.fromkeys(pair.mode for pair in pairs):
        drawn = [pair for pair in pairs if pair.mode == mode and pair.speed_up("step")]
        parts = [part for part in PARTS if any(pair.speed_up(part) for pair in drawn)]
        if mode == "forward":
            parts = parts[:1]  # the step is the forward pass
        if drawn:
            series = tuple((part, tuple(pair.speed_up(part) for pair in drawn)) for part in parts)
            title = f"Speed-up by torch.compile, {mode}"
            yield Bars(f"compile-speed-up-{mode}", title, tuple(p.name for p in drawn), series, "eager ÷ compiled")
