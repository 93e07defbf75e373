"""The whole model eager and with torch.compile: time of each phase, and kernels from traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from nsys_analyzer.analysis.transformer.models import find_model, model_from_dimensions
from nsys_analyzer.analysis.transformer.peaks import IDLE
from nsys_analyzer.configuration import DIMENSIONS, Option
from nsys_analyzer.experiments.model import Bench, Profiled, Results, Settings, grid, several, single
from nsys_analyzer.experiments.section import (
    bars,
    extremes,
    factor,
    messages,
    no_cache,
    ratio,
    span,
    spread,
    unsteady,
)
from nsys_analyzer.experiments.steps import (
    PHASES,
    SHARED,
    TARGET,
    StepCase,
    StepRow,
    model_names,
    models,
    step_section,
)
from nsys_analyzer.report.model import Block, Details, Paragraph, Section, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds, percent
from nsys_analyzer.runs.rows import Task, Times
from nsys_analyzer.runs.targets import transformer_targets
from nsys_analyzer.text import Words, phrase

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary

#: Parts of a step whose speed-up is shown.
PARTS = ("forward", "backward + optimizer", "step")
#: In less than so many seconds nothing was compiled.
_TOO_FAST_S = 0.3
#: The first third of warm steps is slower than the last by no more.
_WARM = 0.05
#: Phases that torch.compile changes: differences elsewhere are chance.
_COMPILED = ("forward", "backward")
_MOST_NAMED = 3
_NOTES = {
    "kernel": "Times are those of profiled steps. A fused kernel has one class, that of the reduction in it, where "
    "there is one: what was elementwise or a copy may be found in a softmax, a normalization or a reduction.",
    "operator": "Times are those of profiled steps. On a CPU each stretch of compiled code between two operators of "
    "PyTorch is one row, of class other: the numbers count calls of PyTorch, and not what was fused.",
}
#: On a CPU one narrow layer, its attention PyTorch's: the C++ compiler needs seconds for each kernel.
_ON_CPU: dict[str, Any] = {"attention": "sdpa", "d_model": 256, "d_ff": 1024, "num_layers": 1, "num_heads": 4}
_MOST_PROFILED = 5
_DEFINITIONS = phrase(
    "*Speed-up* is the eager time ÷ the compiled one, each the median of unprofiled steps (of backward + optimizer the "
    "sum of their medians). `torch.compile(model)` compiles forward and backward; loss and optimizer stay eager. "
    "*Compile s* is the first compiled step without the median of the measured ones: it holds the start of PyTorch's "
    "libraries, and in the first row of a process the import of the compiler. *Repaid after* is compile time ÷ what a "
    "step saves."
)


def _cases(settings: Settings) -> Iterator[Task[StepCase]]:
    """Yields everything eager, then everything compiled: a process each, as long as memory lasts."""

    def label(case: StepCase) -> str:
        word = "compiled" if case.compile else "eager"
        return f"{case.model}, context {case.context_length:,}, {case.precision}, {case.mode}, {word}"

    for compiled in (False, True):
        environment = no_cache(settings) if compiled else None
        yield from grid(TARGET, settings, label, environment=environment, compile=(compiled,), model=models(settings))


def _captures(settings: Settings) -> Profiled:
    """Returns a training step of the first models, eager and compiled; the cases time it."""
    first = settings["model"][: settings["profiled_models"]]
    options = {
        "context_length": settings["context_length"], "mode": settings["mode"][-1:],
        "precision": settings["precision"], "batch_size": [settings["batch_size"]],
        "attention": [settings["attention"]], "device": [settings.device], "warmup_steps": [settings["warmup_steps"]],
        "steps": [min(settings["steps"], _MOST_PROFILED)], "compile": [False, True],
    }  # fmt: skip
    changed = {key: value for key in (*DIMENSIONS, "seed") if (value := settings[key])}
    words = [word for key, value in changed.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    targets = []
    for target in transformer_targets(first, options, words):
        size = find_model(str(target.run.model))
        # Its unprofiled run would have told these.
        dimensions: dict[str, Any] = {key: settings[key] or getattr(size, key) for key in DIMENSIONS}
        run = replace(target.run, **dimensions, seed=settings["seed"])
        targets.append(replace(target, timed=False, run=run))
    return Profiled(tuple(targets))


def _section(results: Results) -> Section:
    from nsys_analyzer.report.evidence import kernel_word  # numpy with it, which help must not wait for

    rows = results.rows_of(TARGET)
    pairs, traces = pairs_of(rows), trace_pairs(results.captures)
    word = kernel_word(*(capture for capture in results.captures if capture.whole))
    return step_section(
        "compile",
        "the model eager and compiled",
        results,
        rows,
        answers=(*_answers(pairs), *trace_answers(traces, pairs, word)),
        suspect=_warnings(pairs),
        blocks=(*_blocks(pairs), *_trace_blocks(traces, word), *messages(results.captures, attrgetter("name"))),
        definitions=_DEFINITIONS,
    )


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
        """Returns the sum of the medians of a part's phases, eager and compiled; None where one was not measured."""

        def sum_of(word: str) -> float | None:
            medians = [times.median_ms if (times := self.times(word, phase)) else None for phase in part.split(" + ")]
            known = [median for median in medians if median is not None]
            return sum(known) if len(known) == len(medians) else None

        return sum_of("eager"), sum_of("compiled")

    def times(self, word: str, phase: str) -> Times | None:
        """Returns the times of a phase, None where the row was not measured to its end."""
        row = self.rows.get(word)
        return row.figures.phase(phase) if row and row.ok else None

    def peak(self, word: str) -> int | None:
        """Returns the peak of allocated memory, also of a row that ran out."""
        return self.rows[word].figures.peak_allocated_bytes if word in self.rows else None

    def speed_up(self, part: str) -> float | None:
        """Returns eager time ÷ compiled time."""
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
    """Returns the pairs in the order of the rows."""
    model_name = model_names(rows, beside=("context_length", "mode", "precision", "compile"))
    found: dict[tuple[str, str], dict[str, StepRow]] = {}
    for row in rows:
        case = row.case
        size = model_from_dimensions(*case.size.dimensions).name  # a changed model is named by its dimensions
        name = f"{model_name(row).replace(case.model, size, 1)} {case.precision}, context {case.context_length:,}"
        found.setdefault((name, case.mode), {})["compiled" if case.compile else "eager"] = row
    return [Pair(name, mode, both) for (name, mode), both in found.items()]


def _answers(pairs: Sequence[Pair]) -> Iterator[Words]:
    """Yields the span of speed-ups of a step by mode, the parts inside a training step, and the cost of compiling."""
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
        named = []
        for cost, pair in costs:
            never = ", never repaid" if pair.speed_up("step") else ""
            repaid = f", repaid after {steps:,.0f} steps" if (steps := pair.repaid_after) else never
            named.append((cost, f"{pair.title}{repaid}"))
        yield f"Compiling takes {extremes(named, '{:.1f} s'.format)}."
    every = [gain for pair in pairs if (gain := pair.speed_up("step"))]
    if slower := sum(gain <= 1 for gain in every):
        yield f"Of {len(every)} configurations {slower} are no faster for it."


def _warnings(pairs: Sequence[Pair]) -> Iterator[Words]:
    """Yields pairs of which nothing may have been compiled, and unsteady phases."""
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


class _Phase(NamedTuple):
    pair: Pair
    name: str


_PHASE: tuple[Field[_Phase], ...] = (
    Field("configuration", "text", lambda phase: phase.pair.name),
    Field("mode", "text", lambda phase: phase.pair.mode),
    Field("phase", "text", lambda phase: phase.name),
    Field("eager ms", "ms", lambda phase: spread(phase.pair.times("eager", phase.name))),
    Field("compiled ms", "ms", lambda phase: spread(phase.pair.times("compiled", phase.name))),
    Field("eager median", "ms", lambda phase: phase.pair.ms(phase.name)[0]),
    Field("compiled median", "ms", lambda phase: phase.pair.ms(phase.name)[1]),
    Field("speed-up", "factor", lambda phase: phase.pair.speed_up(phase.name)),
)


def _blocks(pairs: Sequence[Pair]) -> Iterator[Block]:
    """Yields speed-ups, the cost of compiling and peaks of memory; their bars by mode; the time of each phase."""

    def speed_up(part: str, pair: Pair) -> float | None:
        return pair.speed_up(part)

    fields: tuple[Field[Pair], ...] = (
        Field("configuration", "text", lambda pair: pair.name),
        Field("mode", "text", lambda pair: pair.mode),
        *(Field(part, "factor", partial(speed_up, part)) for part in PARTS),
        Field("compile s", "count", lambda pair: pair.compile_s),
        Field("repaid after steps", "count", lambda pair: None if (n := pair.repaid_after) is None else round(n)),
        Field("eager peak", "bytes", lambda pair: pair.peak("eager")),
        Field("compiled peak", "bytes", lambda pair: pair.peak("compiled")),
        Field("status", "text", lambda pair: pair.status),
    )
    yield table(fields, pairs, phrase("Speed-up by `torch.compile`, and what compiling costs:"), names=2)
    for mode in dict.fromkeys(pair.mode for pair in pairs):
        parts = PARTS[:1] if mode == "forward" else PARTS  # there the step is the forward pass
        drawn = [pair for pair in pairs if pair.mode == mode and pair.speed_up("step")]
        values = {(pair.name, part): pair.speed_up(part) for pair in drawn for part in parts}
        yield from bars(f"compile-speed-up-{mode}", f"Speed-up by torch.compile, {mode}", values, "eager ÷ compiled")
    every = [_Phase(pair, name) for pair in pairs for name in (*PHASES, "step")]
    caption = "Mean ± standard deviation of the unprofiled steps, and their medians, which make the speed-up:"
    yield Details("Time of each phase", (table(_PHASE, every, caption, names=3),))


@dataclass(frozen=True)
class TracePair:
    """Traces of one configuration, eager and compiled."""

    name: str
    eager: CaptureSummary
    compiled: CaptureSummary

    def phase(self, name: str) -> tuple[PhaseSummary, PhaseSummary] | None:
        """Returns the phase in both; None where one of them has no measured instance of it."""
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
    """Returns the pairs whose two steps were measured."""
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
    """Returns the classes of forward and backward of one step, the one that shrank most first."""
    eager, compiled = _by_class(pair.eager), _by_class(pair.compiled)
    changes = []
    for name in dict.fromkeys((*eager, *compiled)):
        (eager_ms, eager_launches), (compiled_ms, launches) = eager.get(name, (0, 0)), compiled.get(name, (0, 0))
        changes.append(ClassChange(name, eager_ms, compiled_ms, eager_launches, launches))
    return sorted(changes, key=lambda change: change.ms)


def _by_class(capture: CaptureSummary) -> dict[str, tuple[float, float]]:
    """Returns milliseconds and launches of each class in the compiled phases of one step."""
    found: dict[str, tuple[float, float]] = {}
    for phase in filter(None, map(capture.phase, _COMPILED)):
        for row in phase.classes:
            ms, launches = found.get(row.kernel_class, (0.0, 0.0))
            found[row.kernel_class] = ms + row.ms_per_instance, launches + row.launches_per_instance
    return found


def trace_answers(traces: Sequence[TracePair], pairs: Sequence[Pair], word: str) -> Iterator[str]:
    """Yields how the kernels of a step fell, which classes shrank most, and how busy the GPU is."""
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
    """Yields the GPU's busy share of the unprofiled step, eager and compiled, and whether fewer launches gain too."""
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


def _trace_blocks(pairs: Sequence[TracePair], word: str) -> Iterator[Block]:
    """Yields kernels of each phase and classes of each pair, before and after."""
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


class _TracedPhase(NamedTuple):
    pair: str
    name: str
    eager: PhaseSummary
    compiled: PhaseSummary


def _kernels(pairs: Sequence[TracePair], word: str) -> Table:
    rows = [
        _TracedPhase(pair.name, name, *both)
        for pair in pairs
        for name in (*PHASES, "step")
        if (both := pair.phase(name))
    ]
    fields: tuple[Field[_TracedPhase], ...] = (
        Field("configuration", "text", lambda phase: phase.pair),
        Field("phase", "text", lambda phase: phase.name),
        Field(f"eager {word}s", "count", lambda phase: phase.eager.kernels_per_instance),
        Field("compiled", "count", lambda phase: phase.compiled.kernels_per_instance),
        Field(f"eager {word} ms", "ms", lambda phase: phase.eager.kernel_time_ms.mean),
        Field("compiled", "ms", lambda phase: phase.compiled.kernel_time_ms.mean),
    )
    return table(fields, rows, f"{word.capitalize()}s of each phase and their total time, from traces:", names=2)


def _classes(pair: TracePair, word: str) -> Table:
    fields: tuple[Field[ClassChange], ...] = (
        Field(f"{word} class", "text", lambda change: change.kernel_class),
        Field("eager ms", "ms", lambda change: change.eager_ms),
        Field("compiled ms", "ms", lambda change: change.compiled_ms),
        Field("difference", "ms", lambda change: change.ms),
        Field("eager launches", "count", lambda change: change.eager_launches),
        Field("compiled launches", "count", lambda change: change.compiled_launches),
    )
    caption = f"Classes in forward and backward of {pair.name}, the one that shrank most first:"
    return table(fields, class_changes(pair), caption)


BENCH = Bench(
    "compile",
    "The whole model eager and with torch.compile: speed-up of each phase, compile time, and kernels from traces.",
    (
        several(StepCase, "model", ("small", "medium", "large"), ("small",), help="sizes"),
        several(StepCase, "context_length", (256,), (32,)),
        several(StepCase, "precision", ("fp32", "bf16"), ("fp32",)),
        several(StepCase, "mode", ("forward", "train"), ("train",), choices=("forward", "train")),
        *single(StepCase, "batch_size"),
        Option(1, "how many models are profiled, the first ones", least=0, name="profiled_models"),
        *(replace(option, default_on_cpu=_ON_CPU.get(option.name, option.default_on_cpu)) for option in SHARED),
    ),
    lambda settings: tuple(_cases(settings)),
    _section,
    _captures,
    targets=(TARGET,),
)
