"""Steps in fp32, TF32 and bf16 autocast: speed, memory, which tensor is in which dtype, and what accumulators lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nsys_analyzer.analysis.transformer.models import find_model
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.limits import check_limits
from nsys_analyzer.experiments.model import Bench, Option, Results, Settings, Task, grid, several, single
from nsys_analyzer.experiments.precision import dtypes
from nsys_analyzer.experiments.section import conditions, each, endings, messages, ratio, section, spread
from nsys_analyzer.experiments.steps import (
    MODES,
    PRECISIONS,
    SHARED,
    TARGET,
    StepCase,
    StepFigures,
    StepRow,
    cast_bytes,
    minimum_memory,
    model_names,
    rates,
    titles,
    warnings,
)
from nsys_analyzer.report.model import Bars, Paragraph, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import phrase

_NAMES = {"tf32": "TF32", "bf16": "bf16 autocast"}
_OPTIONS = (
    Option("model", str, ("small:64", "large:32"), ("small:1",), "Sizes, each with its batch size after a colon."),
    several(StepCase, "precision", PRECISIONS, ("fp32", "bf16")),
    several(StepCase, "mode", MODES[:2]),
    single(StepCase, "context_length"),
    *SHARED,
    *dtypes.OPTIONS,
)
_DEFINITIONS = phrase(
    "*Speed-up* and *memory* are against fp32 of the same configuration: its step time ÷ this one's, and this peak of "
    "allocated memory ÷ its; on a CPU memory is not counted. *tf32* lets products of fp32 tensors keep 10 bits of "
    "their operands; *bf16* is autocast: products in bf16, parameters, gradients and what autocast leaves alone in "
    "fp32, the casts a part of the step. Of a row that ran out of memory *peak* is what it had reached. The FLOPs are "
    "those of the products, the times hold the elementwise work as well."
)


def _cases(settings: Settings) -> Iterator[Task[StepCase] | Task[dtypes.DtypesCase]]:
    """The precisions of a mode after one another, then dtypes and accumulation."""
    for name, batch in map(_model_and_batch, settings["model"]):
        yield from grid(
            TARGET, settings, lambda case: f"{case.model}, batch {case.batch_size}, {case.mode}, {case.precision}",
            model=(name,), batch_size=(batch,), mode=settings["mode"], precision=settings["precision"],
        )  # fmt: skip
    yield from dtypes.cases(settings)


def _model_and_batch(text: str) -> tuple[str, int]:
    name, _, batch = text.partition(":")
    if not batch.isdecimal() or int(batch) < 1:
        raise ConfigurationError(f"{text!r} is no model with a batch size", "Write it as small:64")
    return find_model(name).name, int(batch)


def _section(results: Results) -> Section:
    rows, other = results.rows_of(TARGET), results.rows_of(dtypes.TARGET)
    compared = _compare(rows)
    return section(
        "precision",
        "fp32, TF32 and bf16 autocast",
        answers=(*_answers(compared), *endings(rows, titles(rows)), *dtypes.answer(other)),
        conditions=conditions(
            results,
            warmup=f"{each(rows, 'warmup_steps')} steps",
            steps=f"{each(rows, 'steps')} steps, batch {each(rows, 'batch_size')}, "
            f"context {each(rows, 'context_length')}, attention {each(rows, 'attention')}",
            synchronized="at the end of each phase",
            grad="off in forward alone (no_grad), recorded in the other modes",
        ),
        warnings=warnings(results, rows),
        blocks=(
            table(_FIELDS, compared, "Time and memory of a step by precision:", names=3),
            *_casts(compared),
            *_bars(compared),
            *dtypes.blocks(other),
        ),
        lacking=messages(rows, titles(rows)),
        limits=check_limits(results, rates(rows), minimum_memory(rows)),
        definitions=_DEFINITIONS,
    )


@dataclass(frozen=True)
class _Compared:
    """A row, and what it is beside the same configuration in fp32.

    Attributes:
        row: the row.
        setup: the configuration without mode and precision.
        speed_up: the time of a step in fp32 ÷ that of this one; None where one of them is missing.
        memory: the peak of allocated memory ÷ that in fp32.

    """

    row: StepRow
    setup: str
    speed_up: float | None
    memory: float | None


def _compare(rows: Sequence[StepRow]) -> list[_Compared]:
    setup = model_names(rows, beside=("mode", "precision"))
    measured = {row.case: row.figures for row in rows if row.ok}
    found = []
    for row in rows:
        own = measured.get(row.case, StepFigures())
        base = measured.get(replace(row.case, precision="fp32"), StepFigures())
        speed_up = ratio(_step_ms(base), _step_ms(own))
        found.append(_Compared(row, setup(row), speed_up, ratio(own.peak_allocated_bytes, base.peak_allocated_bytes)))
    return found


def _step_ms(figures: StepFigures) -> float | None:
    return figures.step.ms if figures.step else None


_FIELDS: tuple[Field[_Compared], ...] = (
    Field("configuration", "text", lambda one: one.setup),
    Field("mode", "text", lambda one: one.row.case.mode),
    Field("precision", "text", lambda one: one.row.case.precision),
    Field("step ms", "ms", lambda one: spread(one.row.figures.step)),
    Field("speed-up", "factor", lambda one: one.speed_up),
    Field("tokens/s", "count", lambda one: one.row.figures.tokens_per_s),
    Field("peak", "bytes", lambda one: one.row.figures.peak_allocated_bytes),
    Field("memory", "factor", lambda one: one.memory),
    Field("status", "text", lambda one: one.row.status),
)


def _answers(compared: Sequence[_Compared]) -> Iterator[str]:
    """The speed-up of each precision in the last mode."""
    modes = [mode for mode in MODES if any(one.row.case.mode == mode for one in compared)]
    setups: dict[str, list[str]] = {}
    for one in compared:
        case = one.row.case
        if case.mode in modes[-1:] and case.precision != "fp32" and one.speed_up:
            said = f"{_NAMES[case.precision]} {format_number(one.speed_up, 'factor')}"
            setups.setdefault(one.setup, []).append(said)
    if setups:
        each_of = "; ".join(f"{setup}: {', '.join(said)}" for setup, said in setups.items())
        yield f"Speed of {modes[-1]} against fp32: {each_of}."


def _casts(compared: Sequence[_Compared]) -> Iterator[Paragraph]:
    """Why bf16 takes more memory than fp32, where the weights' casts are enough to explain it."""
    more = []
    for one in compared:
        casts, peak = cast_bytes(one.row.case), one.row.figures.peak_allocated_bytes
        if peak and one.memory and one.memory > 1 and casts >= peak * (1 - 1 / one.memory):
            name, times = f"{one.row.case.mode} of {one.setup}", format_number(one.memory, "factor")
            more.append(f"{name} {times} ({format_number(casts, 'bytes')} of casts)")
    if more:
        yield Paragraph(
            phrase(
                "*More memory in bf16 than in fp32*: {}. Autocast keeps its bf16 cast of every weight "
                "until its block ends, or until backward has used it, beside the weight in fp32: more "
                "than it saves where activations are small beside the weights.",
                "; ".join(more),
            )
        )


def _bars(compared: Sequence[_Compared]) -> Iterator[Bars]:
    """Throughput and, on a GPU, memory; a group for each configuration and mode, a bar for each precision."""
    throughput: dict[tuple[str, str, str], float] = {}
    memory: dict[tuple[str, str, str], float] = {}
    for one in (one for one in compared if one.row.ok):
        bar, figures = (one.setup, one.row.case.mode, one.row.case.precision), one.row.figures
        if figures.tokens_per_s is not None:
            throughput[bar] = figures.tokens_per_s
        if figures.peak_allocated_bytes is not None:
            memory[bar] = figures.peak_allocated_bytes / 2**30
    groups = tuple(dict.fromkeys((one.setup, one.row.case.mode) for one in compared))
    for name, title, axis, found in (
        ("throughput", "Throughput by precision", "tokens/s", throughput),
        ("memory", "Peak of allocated memory by precision", "GiB", memory),
    ):
        precisions = [one for one in PRECISIONS if any(precision == one for _, _, precision in found)]
        series = tuple((one, tuple(found.get((*group, one)) for group in groups)) for one in precisions)
        if series:
            yield Bars(f"precision-{name}", title, tuple(map(", ".join, groups)), series, axis)


BENCH = Bench(
    "precision",
    "Steps in fp32, TF32 and bf16 autocast: speed, memory, dtypes, and what an accumulator's precision costs.",
    _OPTIONS,
    lambda settings: tuple(_cases(settings)),
    _section,
    precisions=lambda settings: settings["precision"],
    targets=(TARGET, dtypes.TARGET),
)
