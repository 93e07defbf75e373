"""What traces of eager and compiled steps show: kernels per step before and after, and which classes shrank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.summary.verdicts import IDLE
from nsys_analyzer.report.model import Bars, Block, Details, Paragraph, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds, percent

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
    from nsys_analyzer.experiments.compile.pairs import Pair

_PHASES = ("forward", "loss", "backward", "optimizer", "step")
#: Phases that torch.compile changes: differences elsewhere are chance.
_COMPILED = ("forward", "backward")
_NAMED = 3
#: A class that changes by less than this share of the eager kernel time is not named.
_NOTABLE = 0.01
_UNFOLDED = 1
_PROFILED = "Times are those of profiled steps."
_FUSED = (
    "A fused kernel has one class, that of the reduction in it, where there is one: work that was elementwise or a "
    "copy may be found in a softmax, a normalization or a reduction afterwards."
)
_STRETCHES = (
    "On a CPU compiled code runs inside calls of compiled graphs, and each stretch of it between two operators of "
    "PyTorch is one row, of class other: the numbers say how often PyTorch was called, and not what was fused."
)


@dataclass(frozen=True)
class TracePair:
    """Traces of one configuration, eager and compiled."""

    name: str
    eager: CaptureSummary
    compiled: CaptureSummary

    def phase(self, name: str) -> tuple[PhaseSummary, PhaseSummary] | None:
        """The phase in both; None where one of them has no measured instance of it."""
        eager, compiled = self.eager.phase(name), self.compiled.phase(name)
        return (eager, compiled) if eager and compiled else None


@dataclass(frozen=True)
class ClassChange:
    """One class of kernels in the compiled phases: milliseconds and launches per step; 0 without a kernel."""

    kernel_class: str
    eager_ms: float
    compiled_ms: float
    eager_launches: float
    compiled_launches: float

    @property
    def ms(self) -> float:
        """Compiled − eager."""
        return self.compiled_ms - self.eager_ms


def trace_pairs(captures: Sequence[CaptureSummary]) -> list[TracePair]:
    """The pairs whose two steps were measured."""
    found: dict[str, dict[bool, CaptureSummary]] = {}
    for capture in captures:
        if capture.run and capture.phase("step"):
            found.setdefault(_configuration_name(capture), {})[bool(capture.run.compile)] = capture
    return [TracePair(name, both[False], both[True]) for name, both in found.items() if len(both) == 2]


def _configuration_name(capture: CaptureSummary) -> str:
    known = capture.configuration
    if known is None or known.model is None:
        return capture.name.replace("_compile", "")
    return f"{known.model.name} {known.precision}, context {known.context_length:,}, {known.mode}"


def class_changes(pair: TracePair) -> list[ClassChange]:
    """The classes of forward and backward of one step, the one that shrank most first."""
    eager, compiled = _by_class(pair.eager), _by_class(pair.compiled)
    changes = [
        ClassChange(name, *(rows.get(name, (0.0, 0.0))[at] for at in (0, 1) for rows in (eager, compiled)))
        for name in dict.fromkeys((*eager, *compiled))
    ]
    return sorted(changes, key=lambda change: change.ms)


def _by_class(capture: CaptureSummary) -> dict[str, tuple[float, float]]:
    """Milliseconds and launches of each class in the compiled phases of one step."""
    found: dict[str, tuple[float, float]] = {}
    for phase in filter(None, map(capture.phase, _COMPILED)):
        for row in phase.classes:
            ms, launches = found.get(row.kernel_class, (0.0, 0.0))
            found[row.kernel_class] = ms + row.ms_per_instance, launches + row.launches_per_instance
    return found


def answers(pairs: Sequence[TracePair], word: str) -> Iterator[str]:
    """How the kernels of each pair's step fell, and which classes of forward and backward shrank and grew most."""
    for pair in pairs[:_NAMED]:
        both = pair.phase("step")
        assert both
        changes = class_changes(pair)
        least = _NOTABLE * sum(change.eager_ms for change in changes)
        shrank = [change for change in changes if change.ms < -least][:_NAMED]
        grew = [change for change in reversed(changes) if change.ms > least][:_NAMED]
        eager, compiled = (phase.kernels_per_instance for phase in both)
        says = f"In the traces of {pair.name}, {word}s per step go from {eager:,.0f} to {compiled:,.0f}"
        parts = [f"{verb} {_listed(found)}" for verb, found in (("less", shrank), ("more", grew)) if found]
        yield f"{says}; in forward and backward {'; '.join(parts) or 'no class changes by more than a percent'}."


def shares(traces: Sequence[TracePair], pairs: Sequence[Pair]) -> Iterator[str]:
    """How busy the GPU is in the unprofiled step before and after: whether less work or fewer launches gain."""
    rows = {pair.title: pair for pair in pairs}
    for trace in traces[:_NAMED]:
        phases, pair = trace.phase("step"), rows.get(trace.name)
        walls = pair.ms("step") if pair else (None, None)
        busy = [phase.gpu_busy_ms.median for phase in phases or ()]
        if phases and walls[0] and walls[1] and busy[0] and busy[1]:
            yield _share(trace.name, phases, (busy[0], busy[1]), (walls[0], walls[1]))


def _share(
    name: str, phases: tuple[PhaseSummary, PhaseSummary], busy: tuple[float, float], walls: tuple[float, float]
) -> str:
    eager, compiled = (works / wall for works, wall in zip(busy, walls, strict=True))
    step, both = " to ".join(map(milliseconds, walls)), " to ".join(map(milliseconds, busy))
    text = (
        f"In {name}, the GPU is busy for {percent(eager)} of the unprofiled eager step and for {percent(compiled)} of "
        f"the compiled one: the step goes from {step}, GPU busy from {both}"
    )
    if 1 - max(eager, compiled) >= IDLE and walls[1] < walls[0]:
        before, after = (phase.kernels_per_instance for phase in phases)
        text += (
            f"; the GPU waits for the CPU in both (idle for {percent(IDLE)} or more), and the CPU has fewer kernels to "
            f"launch ({before:,.0f} to {after:,.0f})"
        )
    return f"{text}."


def _listed(changes: Sequence[ClassChange]) -> str:
    return ", ".join(
        f"{change.kernel_class} ({milliseconds(change.eager_ms)} to {milliseconds(change.compiled_ms)})"
        for change in changes
    )


def blocks(pairs: Sequence[TracePair], captures: Sequence[CaptureSummary], word: str) -> Iterator[Block]:
    """Kernels of each phase before and after, the classes of each pair, and what could not be profiled."""
    if pairs:
        yield _kernels(pairs, word)
        for number, pair in enumerate(pairs):
            classes = _classes(pair, word)
            yield classes if number < _UNFOLDED else Details(f"Classes of {pair.name}", (classes,))
        yield _figure(pairs[0])
        yield Paragraph(f"{_PROFILED} {_FUSED if word == 'kernel' else _STRETCHES}")
    if lacking := [capture for capture in captures if capture.status != "ok"]:
        yield Details(f"What was not profiled, and why: {len(lacking)} captures", (table(_LACKING, lacking),))


_LACKING: tuple[Field[CaptureSummary], ...] = (
    Field("capture", "text", lambda one: one.name),
    Field("status", "text", lambda one: one.status),
    Field("message", "text", lambda one: one.message),
)


def _kernels(pairs: Sequence[TracePair], word: str) -> Table:
    rows = [_Compared(pair.name, phase, *both) for pair in pairs for phase in _PHASES if (both := pair.phase(phase))]
    fields: tuple[Field[_Compared], ...] = (
        Field("configuration", "text", lambda one: one.pair),
        Field("phase", "text", lambda one: one.phase),
        Field(f"eager {word}s", "count", lambda one: one.eager.kernels_per_instance),
        Field("compiled", "count", lambda one: one.compiled.kernels_per_instance),
        Field(f"eager {word} ms", "ms", lambda one: one.eager.kernel_sum_ms.mean),
        Field("compiled", "ms", lambda one: one.compiled.kernel_sum_ms.mean),
    )
    return table(fields, rows, f"{word.capitalize()}s of each phase and the sum of their times, from traces:", names=2)


@dataclass(frozen=True)
class _Compared:
    """A phase of a pair, eager and compiled."""

    pair: str
    phase: str
    eager: PhaseSummary
    compiled: PhaseSummary


def _classes(pair: TracePair, word: str) -> Table:
    fields: tuple[Field[ClassChange], ...] = (
        Field(f"{word} class", "text", lambda one: one.kernel_class),
        Field("eager ms", "ms", lambda one: one.eager_ms),
        Field("compiled ms", "ms", lambda one: one.compiled_ms),
        Field("difference", "ms", lambda one: one.ms),
        Field("eager launches", "count", lambda one: one.eager_launches),
        Field("compiled launches", "count", lambda one: one.compiled_launches),
    )
    caption = f"Classes in forward and backward of {pair.name}, the one that shrank most first:"
    return table(fields, class_changes(pair), caption)


def _figure(pair: TracePair) -> Bars:
    changes = sorted(class_changes(pair), key=lambda change: -change.eager_ms)
    series = tuple((change.kernel_class, (change.eager_ms, change.compiled_ms)) for change in changes)
    title = f"Classes in forward and backward, {pair.name}"
    return Bars("compile-classes", title, ("eager", "compiled"), series, "ms per step", "stacked")
