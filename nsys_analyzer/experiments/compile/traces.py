"""Kernels of a step in traces of eager and compiled runs: how many there are, and how long each class takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nsys_analyzer.analysis.summary.verdicts import IDLE
from nsys_analyzer.experiments.section import bars
from nsys_analyzer.report.model import Block, Details, Paragraph, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds, percent

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
    from nsys_analyzer.experiments.compile.pairs import Pair

_PHASES = ("forward", "loss", "backward", "optimizer", "step")
#: Phases that torch.compile changes: differences elsewhere are chance.
_COMPILED = ("forward", "backward")
_MOST_NAMED = 3
_NOTES = {
    "kernel": "Times are those of profiled steps. A fused kernel has one class, that of the reduction in it, where "
    "there is one: what was elementwise or a copy may be found in a softmax, a normalization or a reduction.",
    "operator": "Times are those of profiled steps. On a CPU each stretch of compiled code between two operators of "
    "PyTorch is one row, of class other: the numbers count calls of PyTorch, and not what was fused.",
}


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
    changes = []
    for name in dict.fromkeys((*eager, *compiled)):
        (eager_ms, eager_launches), (compiled_ms, launches) = eager.get(name, (0, 0)), compiled.get(name, (0, 0))
        changes.append(ClassChange(name, eager_ms, compiled_ms, eager_launches, launches))
    return sorted(changes, key=lambda change: change.ms)


def _by_class(capture: CaptureSummary) -> dict[str, tuple[float, float]]:
    """Milliseconds and launches of each class in the compiled phases of one step."""
    found: dict[str, tuple[float, float]] = {}
    for phase in filter(None, map(capture.phase, _COMPILED)):
        for row in phase.classes:
            ms, launches = found.get(row.kernel_class, (0.0, 0.0))
            found[row.kernel_class] = ms + row.ms_per_instance, launches + row.launches_per_instance
    return found


def answers(traces: Sequence[TracePair], pairs: Sequence[Pair], word: str) -> Iterator[str]:
    """How the kernels of a step fell, which classes shrank most, and how busy the GPU is."""
    by_title = {pair.title: pair for pair in pairs}
    for trace in traces[:_MOST_NAMED]:
        steps = trace.phase("step")
        assert steps
        eager, compiled = (step.kernels_per_instance for step in steps)
        shrank = [
            f"{change.kernel_class} ({milliseconds(change.eager_ms)} to {milliseconds(change.compiled_ms)})"
            for change in class_changes(trace)[:_MOST_NAMED]
            if change.ms < 0
        ]
        yield (
            f"In the traces of {trace.name}, {word}s per step go from {eager:,.0f} to {compiled:,.0f}; in forward and "
            f"backward less {', '.join(shrank) or 'of no class'}."
        )
        if word == "kernel" and trace.name in by_title:
            yield from _busy_shares(by_title[trace.name], *steps)


def _busy_shares(pair: Pair, eager: PhaseSummary, compiled: PhaseSummary) -> Iterator[str]:
    """The GPU's busy share of the unprofiled step, eager and compiled, and whether fewer launches gain as well."""
    steps, busy = pair.ms("step"), (eager.gpu_busy_ms.median, compiled.gpu_busy_ms.median)
    shares = [of_gpu / step for of_gpu, step in zip(busy, steps, strict=True) if of_gpu and step]
    if len(shares) < 2:
        return
    text = (
        f"The GPU is busy for {percent(shares[0])} of the unprofiled eager step ({milliseconds(steps[0])}) and for "
        f"{percent(shares[1])} of the compiled one ({milliseconds(steps[1])})"
    )
    faster = (pair.speed_up("step") or 0) > 1
    waits = (
        f"; in both it waits for the CPU (idle for {percent(IDLE)} or more), which launches fewer kernels when compiled"
    )
    yield f"{text}{waits if faster and 1 - max(shares) >= IDLE else ''}."


def blocks(pairs: Sequence[TracePair], word: str) -> Iterator[Block]:
    """Kernels of each phase and classes of each pair, before and after."""
    if not pairs:
        return
    yield _kernels(pairs, word)
    first, *others = pairs
    yield _classes(first, word)
    yield from (Details(f"Classes of {pair.name}", (_classes(pair, word),)) for pair in others)
    changes = sorted(class_changes(first), key=lambda change: -change.eager_ms)
    values = {("eager", change.kernel_class): change.eager_ms for change in changes}
    values |= {("compiled", change.kernel_class): change.compiled_ms for change in changes}
    title = f"Classes in forward and backward, {first.name}"
    yield from bars("compile-classes", title, values, "ms per step", "stacked")
    yield Paragraph(_NOTES[word])


class _Phase(NamedTuple):
    pair: str
    name: str
    eager: PhaseSummary
    compiled: PhaseSummary


def _kernels(pairs: Sequence[TracePair], word: str) -> Table:
    rows = [_Phase(pair.name, name, *both) for pair in pairs for name in _PHASES if (both := pair.phase(name))]
    fields: tuple[Field[_Phase], ...] = (
        Field("configuration", "text", lambda one: one.pair),
        Field("phase", "text", lambda one: one.name),
        Field(f"eager {word}s", "count", lambda one: one.eager.kernels_per_instance),
        Field("compiled", "count", lambda one: one.compiled.kernels_per_instance),
        Field(f"eager {word} ms", "ms", lambda one: one.eager.kernel_time_ms.mean),
        Field("compiled", "ms", lambda one: one.compiled.kernel_time_ms.mean),
    )
    return table(fields, rows, f"{word.capitalize()}s of each phase and their total time, from traces:", names=2)


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
