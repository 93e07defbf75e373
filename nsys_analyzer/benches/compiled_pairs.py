"""The eager and the compiled row of each configuration, what they come to together, and what can be said of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nsys_analyzer.analysis.models import model_from_dimensions
from nsys_analyzer.benches.endings import named
from nsys_analyzer.benches.model import Row
from nsys_analyzer.benches.steps import PHASES, model_name, size_of, spread
from nsys_analyzer.report.model import Bars, Cell, Column, Details, Table
from nsys_analyzer.report.units import format_number, milliseconds, percent
from nsys_analyzer.text import code, marked, strong

#: Parts of a step that are compared, with the phases they consist of.
PARTS = {"forward": ("forward",), "backward + optimizer": ("backward", "optimizer"), "step": ("step",)}
#: In less than so many seconds nothing was compiled.
_TOO_FAST_S = 0.3
_UNSTEADY = 0.1
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
    eager: Row | None
    compiled: Row | None

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

    def measured(self) -> dict[str, Row]:
        """The rows that were measured to their end, by the word for them."""
        both = {"eager": self.eager, "compiled": self.compiled}
        return {word: row for word, row in both.items() if row and row.ok}

    def ms(self, part: str) -> tuple[float | None, float | None]:
        """The median time of one of ``PARTS``, eager and compiled; None where it was not measured to its end."""
        return _ms(self.eager, part), _ms(self.compiled, part)

    def speed_up(self, part: str) -> float | None:
        """Eager time ÷ compiled time."""
        eager, compiled = self.ms(part)
        return eager / compiled if eager and compiled else None

    @property
    def compile_s(self) -> float | None:
        """The first step of the compiled run without the median of the measured ones, in seconds."""
        _, step = self.ms("step")
        if self.compiled is None or step is None:
            return None
        return float(self.compiled.figures["first_step_ms"] - step) / 1e3

    @property
    def repaid_after(self) -> float | None:
        """Steps whose savings make up for compiling; None where a compiled step is no faster."""
        (eager, compiled), compile_s = self.ms("step"), self.compile_s
        if not eager or not compiled or compile_s is None or compiled >= eager:
            return None
        return compile_s * 1e3 / (eager - compiled)


def _ms(row: Row | None, part: str) -> float | None:
    times = [_median_ms(row, phase) for phase in PARTS[part]]
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None


def _median_ms(row: Row | None, phase: str) -> float | None:
    found = row.figures.get(f"{phase}_median_ms") if row and row.ok else None
    return None if found is None else float(found)


def pairs_of(rows: Sequence[Row]) -> list[Pair]:
    """The pairs in the order of the rows."""
    found: dict[tuple[str, str], dict[bool, Row]] = {}
    for row in rows:
        name = f"{_model(row, rows)} {row.case['precision']}, context {row.case['context_length']:,}"
        found.setdefault((name, row.case["mode"]), {})[row.case["compile"]] = row
    return [Pair(name, mode, both.get(False), both.get(True)) for (name, mode), both in found.items()]


def _model(row: Row, rows: Sequence[Row]) -> str:
    """The model as its dimensions call it, and whatever else the rows differ in."""
    own = model_from_dimensions(*size_of(row).dimensions).name
    return model_name(row, rows, _BESIDE).replace(row.case["model"], own, 1)


def answers(pairs: Sequence[Pair]) -> Iterator[str]:
    """The span of speed-ups of a step by mode, what compiling costs, and which part gains most."""
    for mode in dict.fromkeys(pair.mode for pair in pairs):
        gains = [(gain, pair.name) for pair in pairs if pair.mode == mode and (gain := pair.speed_up("step"))]
        said = [f"{format_number(gain, 'factor')} ({name})" for gain, name in sorted(gains)[:: max(len(gains) - 1, 1)]]
        if said:
            yield f"{code('torch.compile')} makes a {mode} step {' to '.join(dict.fromkeys(said))} as fast."
    yield from _parts_answer(pairs)
    yield from _cost_answer(pairs)


def _parts_answer(pairs: Sequence[Pair]) -> Iterator[str]:
    gains = {
        part: [speed_up for pair in pairs if pair.mode != "forward" and (speed_up := pair.speed_up(part))]
        for part in ("forward", "backward + optimizer")
    }
    said = [f"{part} {_span(values, '{:.3f}×')}" for part, values in gains.items() if values]
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


def _span(values: Sequence[float], digits: str) -> str:
    low, high = digits.format(min(values)), digits.format(max(values))
    return low if low == high else f"{low} to {high}"


def flags(pairs: Sequence[Pair]) -> Iterator[str]:
    """What makes a comparison suspect: nothing compiled, an unsteady phase, steps that were not warm."""
    for pair in pairs:
        if pair.compile_s is not None and pair.compile_s < _TOO_FAST_S:
            first = f"The first step of {pair.title} took little more than a later one."
            yield f"{strong('Was anything compiled?')} {first}"
    rows = {f"{pair.title}, {word}": row for pair in pairs for word, row in pair.measured().items()}
    unsteady = [
        f"{phase} of {name} {percent(cv)}"
        for name, row in rows.items()
        for phase in PHASES
        if (cv := row.figures.get(f"{phase}_cv", 0)) > _UNSTEADY
    ]
    if unsteady:
        yield f"{strong('Unsteady phases')}, CV above {percent(_UNSTEADY)}: {named(unsteady)}."
    if cold := [f"{name} ({text})" for name, row in rows.items() if (text := _still_warming(row.figures["times_ms"]))]:
        yield (
            f"{strong('Not warm yet')}: the first third of the measured steps is over {percent(_WARM)} slower than the "
            f"last: {named(cold)}. Warm steps may take less than their median."
        )


def _still_warming(times: Sequence[float]) -> str:
    """Medians of the first and the last third of the steps where the first is slower; else nothing."""
    third = len(times) // 3
    if not third:
        return ""
    first, last = statistics.median(times[:third]), statistics.median(times[-third:])
    return f"{milliseconds(first)}, then {milliseconds(last)}" if first > last * (1 + _WARM) else ""


def speed_ups(pairs: Sequence[Pair]) -> Table:
    """Eager ÷ compiled of each part, and the price."""
    columns = (
        Column("configuration"), Column("mode"), *(Column(part, "factor") for part in PARTS),
        Column("compile s", "count"), Column("repaid after steps", "count"), Column("status"),
    )  # fmt: skip
    rows = tuple(
        (pair.name, pair.mode, *(pair.speed_up(part) for part in PARTS), pair.compile_s, _whole(pair), pair.status)
        for pair in pairs
    )
    return Table(columns, rows, marked("Speed-up by `torch.compile`, and what compiling costs:"))


def _whole(pair: Pair) -> int | None:
    return None if pair.repaid_after is None else round(pair.repaid_after)


def times(pairs: Sequence[Pair]) -> Details:
    """Milliseconds of each phase, eager and compiled."""
    columns = (
        Column("configuration"), Column("mode"), Column("phase"), Column("eager ms", "ms"), Column("compiled ms", "ms"),
        Column("eager median", "ms"), Column("compiled median", "ms"), Column("speed-up", "factor"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for pair in pairs:
        for phase in (*PHASES, "step"):
            both = [spread(row, phase) if row and row.ok else None for row in (pair.eager, pair.compiled)]
            if any(both):
                medians = [_median_ms(row, phase) for row in (pair.eager, pair.compiled)]
                speed_up = medians[0] / medians[1] if medians[0] and medians[1] else None
                rows.append((pair.name, pair.mode, phase, *both, *medians, speed_up))
    caption = "Mean and standard deviation of the unprofiled steps, and their medians, which the speed-up is of:"
    return Details("Time of each phase", (Table(columns, tuple(rows), caption),))


def memory(pairs: Sequence[Pair]) -> Iterator[Details]:
    """The peak of allocated memory, where it was counted."""
    key = "peak_allocated_bytes"
    rows: list[tuple[Cell, ...]] = []
    for pair in pairs:
        eager, compiled = (row.figures.get(key) if row else None for row in (pair.eager, pair.compiled))
        if eager or compiled:
            rows.append((pair.name, pair.mode, eager, compiled, compiled / eager if eager and compiled else None))
    if rows:
        columns = (
            Column("configuration"), Column("mode"), Column("eager", "bytes"), Column("compiled", "bytes"),
            Column("compiled ÷ eager", "factor"),
        )  # fmt: skip
        yield Details("Memory", (Table(columns, tuple(rows), "Peak of allocated memory; what ran out had so much:"),))


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
