"""Defines named figures, and evaluates a figure for one process of a capture.

A figure is a function of a part of a summary, such as a phase, the steps or the findings. The decorator ``figure`` adds
the figure's unit, the arguments of a question, the rows of the capture that the figure rests on, and the reasons why
the figure may be unknown. The conditions under which figures are unknown are listed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

from nsys_analyzer.analysis.counters.figures import CounterRow
from nsys_analyzer.analysis.kernels.class_rules import UNKNOWN
from nsys_analyzer.analysis.kernels.classes import known_classes
from nsys_analyzer.analysis.ranks.run import ParallelRun, RankFigures
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.process import CAUSES
from nsys_analyzer.analysis.steps.step import UnprofiledStep
from nsys_analyzer.analysis.summary.kernel_tables import find_class_share
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.errors import (
    RECORD_COMMAND,
    RECORD_GRAPH_NODES_COMMAND,
    RECORD_ON_GPU_COMMAND,
    CannotAnswerError,
    ConfigurationError,
)
from nsys_analyzer.report.facts import describe_message
from nsys_analyzer.text import plain

#: A number, the lower and the upper bound of a number, or a name.
Value: TypeAlias = float | int | str | tuple[float, float]
Unit: TypeAlias = Literal["ms", "us", "count", "fraction", "bytes", "flop", "tokens/s", "J", "W", "text"]
#: A kind of rows in a capture, such as kernels.
RowKind: TypeAlias = Literal["kernel", "memcpy", "memset", "graph", "range", "memory", "timing", "counter", "snapshot"]

#: The table of nsys that contains each kind of rows, and the category of the events in a PyTorch trace.
_TABLES: dict[RowKind, tuple[str, str]] = {
    "kernel": ("CUPTI_ACTIVITY_KIND_KERNEL", "kernel"), "memcpy": ("CUPTI_ACTIVITY_KIND_MEMCPY", "gpu_memcpy"),
    "memset": ("CUPTI_ACTIVITY_KIND_MEMSET", "gpu_memset"), "graph": ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "kernel"),
    "range": ("NVTX_EVENTS", "user_annotation"), "memory": ("CUDA_GPU_MEMORY_USAGE_EVENTS", "[memory]"),
    "timing": ("timings", ""), "counter": ("GPU_METRICS", ""), "snapshot": ("device_traces", "device_traces"),
}  # fmt: skip
#: The kinds of rows that each group of figures is computed from.
KERNELS: tuple[RowKind, ...] = ("kernel", "graph")
OPERATIONS: tuple[RowKind, ...] = ("kernel", "memcpy", "memset", "graph")


@dataclass(frozen=True)
class Subject:
    """The process of a capture that a question is about, with the arguments of the question."""

    capture: CaptureSummary
    runs: Sequence[ParallelRun]
    arguments: Mapping[str, str]

    @property
    def phase(self) -> PhaseSummary | None:
        """Returns the phase that the question names; if it names none, the whole capture without warm-up."""
        return self.capture.phase(self.arguments["phase"]) if "phase" in self.arguments else self.capture.whole

    @property
    def rank(self) -> RankFigures | None:
        """Returns the rank of the process in its run; None if the process is not one of several ranks."""
        ranks = [rank for run in self.runs for rank in run.ranks if rank.capture == self.capture.name]
        return next((rank for rank in ranks if len(ranks) == 1 or rank.label == self.capture.process), None)


T = TypeVar("T")
Arguments = ParamSpec("Arguments")
#: A function that computes a figure from a part of a summary and the arguments of a question.
Compute: TypeAlias = Callable[Concatenate[T, Arguments], Value | Stats | None]


@dataclass(frozen=True)
class SummaryPart(Generic[T]):
    """A part of a summary that figures are read from.

    Attributes:
        get: returns the part; None if the capture does not have it.
        describe: returns a description of the part's figures, such as "mean of 5 instances of forward".
        explain_missing: returns why a figure is unknown, and the command that would record it.
        optional_arguments: the arguments of a question that select the part.
    """

    get: Callable[[Subject], T | None]
    describe: Callable[[T, Subject], str]
    explain_missing: Callable[[Subject], tuple[str, str]]
    optional_arguments: tuple[str, ...] = ()


class Obstacle(NamedTuple):
    """A condition under which a figure is unknown.

    Attributes:
        applies: tells whether the figure is unknown for the process of a question.
        why: the sentence that explains why the figure is unknown.
        needs: the command that would record the figure.
    """

    applies: Callable[[Subject], object]
    why: str
    needs: str


@dataclass(frozen=True)
class Figure:
    """A figure with a name.

    Attributes:
        unit: the unit of its value.
        doc: the meaning of the figure, as ``ask --list`` prints it.
        needs: the arguments that a question must have. ``compute`` takes them after the part.
        part: the part of the summary that the figure is read from.
        rows: the kinds of rows that the figure rests on.
        obstacles: the conditions under which the figure is unknown.
        count_kernels: returns how many kernels of one instance the figure rests on. It takes the arguments of
            ``compute``. None if the figure rests on all kernels of the phase.
        compute: returns the value, or its statistics; None if it is unknown.
    """

    unit: Unit
    doc: str
    needs: tuple[str, ...]
    part: SummaryPart[Any]
    rows: tuple[RowKind, ...]
    obstacles: tuple[Obstacle, ...]
    count_kernels: Callable[..., float] | None
    compute: Callable[..., Value | Stats | None]

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns the arguments of a question; those in brackets are optional."""
        return (*self.needs, *(f"[{name}]" for name in self.part.optional_arguments))


#: Every figure by its name.
FIGURES: dict[str, Figure] = {}


def figure(
    part: SummaryPart[T], unit: Unit, *, needs: tuple[str, ...] = (), rows: tuple[RowKind, ...] = KERNELS,
    obstacles: tuple[Obstacle, ...] = (), count_kernels: Callable[Concatenate[T, Arguments], float] | None = None,
) -> Callable[[Compute[T, Arguments]], Compute[T, Arguments]]:  # fmt: skip
    """Registers a function as a figure. Its name is the figure's name, and its docstring is the figure's meaning.

    Args:
        part: the part of a summary that the function takes.
        unit: the unit of the value.
        needs: the arguments that a question must have; the function takes them after the part.
        rows, obstacles, count_kernels: the attributes of the ``Figure``.
    """

    def register(compute: Compute[T, Arguments]) -> Compute[T, Arguments]:
        """Registers the figure in ``FIGURES``, under the name of the function."""
        doc = (compute.__doc__ or "").removeprefix("Returns ")
        doc = f"{doc[:1].upper()}{doc[1:]}"
        FIGURES[compute.__name__] = Figure(unit, doc, needs, part, rows, obstacles, count_kernels, compute)
        return compute

    return register


def evaluate(figure: Figure, subject: Subject) -> tuple[Value, str, str, int]:
    """Evaluates a figure for one process of a capture.

    Returns the value, its description such as "median of 5 instances of forward", the names of the tables (or of the
    categories of events) that the value rests on, and the number of rows that it rests on.

    Raises:
        CannotAnswerError: the capture does not contain the figure.
        ConfigurationError: the question names a class, cause, kernel or module that does not exist.
    """
    capture = subject.capture
    if capture.whole is None:
        why = plain(describe_message(capture) or capture.findings_missing or "The capture could not be read", "`")
        raise CannotAnswerError(why.removesuffix("."), RECORD_COMMAND)
    for obstacle in figure.obstacles:
        if obstacle.applies(subject):
            raise CannotAnswerError(obstacle.why, obstacle.needs)
    part = figure.part.get(subject)
    if part is None:
        raise CannotAnswerError(*figure.part.explain_missing(subject))
    arguments = [subject.arguments[name] for name in figure.needs]
    for name, values in (("class", known_classes()), ("cause", CAUSES)):
        if name in figure.needs and subject.arguments[name] not in values:
            raise ConfigurationError(
                f"There is no {name} {subject.arguments[name]!r}", f"There are: {', '.join(values)}"
            )
    computed_value = figure.compute(part, *arguments)
    value = computed_value.typical if isinstance(computed_value, Stats) else computed_value
    if value is None:
        raise CannotAnswerError(*figure.part.explain_missing(subject))
    reference = figure.part.describe(part, subject)
    if isinstance(computed_value, Stats) and computed_value.median is not None:
        reference = reference.replace("mean of", "median of")
    phase = subject.phase or capture.whole
    kernels = figure.count_kernels(part, *arguments) if figure.count_kernels else phase.kernels_per_instance
    counts: dict[str, float] = {row.kind: row.operations_per_instance * phase.instances for row in phase.memory}
    counts |= {"kernel": kernels * phase.instances, "range": phase.instances, "memory": capture.memory_events}
    counts["counter"] = part.samples if isinstance(part, CounterRow) else 0
    counts["snapshot"] = capture.memory.events if capture.memory else 0
    counts["timing"] = computed_value.n or 1 if isinstance(computed_value, Stats) else 1
    kinds = [kind for kind in figure.rows if counts.get(kind)] or figure.rows[:1]
    return value, reference, _name_tables(kinds, capture), round(sum(counts.get(kind, 0) for kind in kinds))


def _name_tables(kinds: Sequence[RowKind], capture: CaptureSummary) -> str:
    """Returns the names of the tables with these kinds of rows: ``CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY``."""
    if ".json" not in capture.source or tuple(kinds) == ("timing",):
        return ", ".join(_TABLES[kind][0] for kind in kinds).replace(", CUPTI_ACTIVITY_KIND", ", ")
    categories = ("cpu_op" if capture.on_cpu and kind == "kernel" else _TABLES[kind][1] for kind in kinds)
    return f"traceEvents: {', '.join(categories)}"


# --- conditions under which figures are unknown


def find_unprofiled_step(subject: Subject) -> UnprofiledStep | None:
    """Returns the length of the process's step without the profiler; None if it is unknown."""
    return subject.capture.step.unprofiled_ms if subject.capture.step else None


def _is_timed(subject: Subject) -> bool:
    """Tells whether the step was timed without the profiler."""
    step = find_unprofiled_step(subject)
    return step is not None and step.timed


ON_CPU = Obstacle(lambda subject: subject.capture.on_cpu, "The program ran on the CPU", RECORD_ON_GPU_COMMAND)
OPAQUE_GRAPHS = Obstacle(
    lambda subject: subject.phase and subject.phase.opaque,
    "CUDA graphs hide kernels in this capture",
    RECORD_GRAPH_NODES_COMMAND,
)
UNNAMED_KERNELS = Obstacle(
    lambda subject: subject.phase and find_class_share(subject.phase.classes, UNKNOWN) is None,
    "The capture contains kernels without a name",
    "nsys export --type sqlite REPORT",
)
NOT_TIMED = Obstacle(
    lambda subject: not _is_timed(subject), "The step was not timed without the profiler", RECORD_COMMAND
)
TIMED = Obstacle(
    _is_timed,
    "The step was timed without the profiler, so it has no estimate",
    "nsys-analyze ask CAPTURE step_unprofiled_ms",
)
DOUBTFUL_TIME = Obstacle(
    lambda subject: subject.capture.unprofiled and subject.capture.unprofiled.doubts.get(subject.arguments["phase"]),
    "The times without the profiler cannot be right",
    RECORD_COMMAND,
)
