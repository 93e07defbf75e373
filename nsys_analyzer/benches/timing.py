"""Steps of every size over context lengths and modes: time, spread, throughput and memory; and what warm-up does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from nsys_analyzer.analysis.models import find_model
from nsys_analyzer.benches import warmup
from nsys_analyzer.benches.conditions import conditions
from nsys_analyzer.benches.model import Bench, Case, Option, Results, Row, Settings
from nsys_analyzer.benches.physics import physics
from nsys_analyzer.benches.steps import (
    MODES,
    PHASES,
    SHARED,
    each,
    endings,
    flags,
    messages,
    model_name,
    rates,
    residences,
    spread,
    step_case,
    title,
)
from nsys_analyzer.report.model import (
    Bars,
    Block,
    Cell,
    Column,
    Details,
    Figure,
    Lines,
    Paragraph,
    Section,
    Table,
    Unit,
)
from nsys_analyzer.report.units import format_number, milliseconds, percent
from nsys_analyzer.text import marked

_OPTIONS = (
    Option("model", str, ("small", "medium", "large", "xl", "2.7B"), ("small",), "Sizes."),
    Option("context_length", int, (128, 256, 512, 1024), (32, 64), "Tokens of a sequence."),
    Option("mode", MODES, MODES, MODES, "What a step is."),
    Option("batch_size", int, (4,), (1,), "Sequences.", several=False),
    Option("precision", ("fp32", "tf32", "bf16"), ("fp32",), ("fp32",), "bf16 is autocast.", several=False),
    Option("optimizer", ("torch", "plain"), ("torch",), ("torch",), "AdamW of torch.optim, or ours.", several=False),
    *SHARED,
    *warmup.OPTIONS,
)
_DEFINITIONS = marked(
    "*A step* is the phases of its mode, by Python's clock, the device waited for at the end of each phase: *forward* "
    "is the forward pass alone, *forward-backward* adds loss and backward, *train* the optimizer. *CV* is the standard "
    "deviation ÷ mean of the measured steps. *Allocated* is the most memory that tensors took at once, *reserved* what "
    "PyTorch's allocator held for them, both what had been reached where memory ran out; on a CPU neither is counted. "
    "The FLOPs are those of the products, the times hold the elementwise work as well."
)


def _cases(settings: Settings) -> Iterator[Case]:
    """The grid in one process as long as memory lasts, from small to large; then the study."""
    for name in settings["model"]:
        model = find_model(name).name
        for length in settings["context_length"]:
            for mode in settings["mode"]:
                yield step_case(
                    settings, f"{model}, context {length:,}, {mode}", model=model, context_length=length, mode=mode,
                    batch_size=settings["batch_size"], precision=settings["precision"], optimizer=settings["optimizer"],
                )  # fmt: skip
    yield from warmup.cases(settings)


def _section(results: Results) -> Section:
    study = tuple(row for row in results.rows if warmup.VARIABLE in row.environment)
    rows = tuple(row for row in results.rows if warmup.VARIABLE not in row.environment)
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join([*_answers(rows), *warmup.answer(study)])),
        conditions(
            results,
            warmup=f"{each(rows, 'warmup_steps')} steps",
            steps=f"{each(rows, 'steps')} steps, batch {each(rows, 'batch_size')}, {each(rows, 'precision')}, "
            f"attention {each(rows, 'attention')}",
            synchronized="at the end of each phase",
            grad="off in forward alone (no_grad), recorded in the other modes",
        ),
        *flags(results, rows),
        _times(rows),
        *_figures(rows),
        *warmup.study(study),
        Details("Spread of each configuration's steps", (_table(rows, _SPREAD),)),
        Details("Time of each phase", (_phases(rows),)),
        Details("Throughput and memory", (_table(rows, _MEMORY),)),
        *messages(results.rows),
        *physics(results, rates(rows), residences(rows)),
        Paragraph(_DEFINITIONS),
    )
    return Section("bench-timing", "Bench: timing of training steps, and warm-up", blocks)


def _answers(rows: Sequence[Row]) -> Iterator[str]:
    for mode in _modes(rows)[-1:]:
        steps = sorted((row for row in rows if row.ok and row.case["mode"] == mode), key=_step_ms)
        if steps:
            span = dict.fromkeys(f"{milliseconds(_step_ms(row))} ({title(row, rows)})" for row in (steps[0], steps[-1]))
            yield f"Of {len(rows)} configurations {sum(row.ok for row in rows)} were measured."
            yield f"A step takes {' to '.join(span)}."
    ratios = [row.figures["backward_ms"] / row.figures["forward_ms"] for row in rows if "backward_ms" in row.figures]
    if ratios:
        low, high = (format_number(value, "factor") for value in (min(ratios), max(ratios)))
        yield f"Backward takes {low} to {high} the forward pass."
    if varied := [row for row in rows if "step_cv" in row.figures]:
        most = max(varied, key=lambda row: float(row.figures["step_cv"]))
        yield f"Steps vary by {percent(most.figures['step_cv'])} at the most (CV; {title(most, rows)})."
    yield from endings(rows)


def _step_ms(row: Row) -> float:
    return float(row.figures["step_ms"])


def _modes(rows: Sequence[Row]) -> list[str]:
    return [mode for mode in MODES if any(row.case["mode"] == mode for row in rows)]


def _times(rows: Sequence[Row]) -> Table:
    """A line for each model and context length, the modes beside each other; the last mode says the rest."""
    modes = _modes(rows)
    shapes: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        shapes.setdefault((model_name(row, rows), row.case["context_length"]), {})[row.case["mode"]] = row
    last = modes[-1] if modes else ""
    rest: list[tuple[str, Unit, str]] = [
        ("tokens/s", "count", "tokens_per_s"),
        ("peak", "bytes", "peak_allocated_bytes"),
    ]
    rest = [one for one in rest if any(one[2] in row.figures for row in rows)]
    columns = (
        Column("model"), Column("context", "count"), *(Column(f"{mode} ms", "ms") for mode in modes),
        *(Column(f"{words}, {last}", unit) for words, unit, _ in rest),
    )  # fmt: skip
    lines: list[tuple[Cell, ...]] = []
    for (name, length), found in shapes.items():
        times = (_time_or_status(found.get(mode)) for mode in modes)
        figures = found[last].figures if last in found else {}
        lines.append((name, length, *times, *(figures.get(key) for _, _, key in rest)))
    return Table(columns, tuple(lines), "Time of a step by mode, mean ± standard deviation:")


def _time_or_status(row: Row | None) -> Cell:
    if row is None:
        return None
    return spread(row, "step") if row.ok else row.status


_Measures: TypeAlias = tuple[tuple[str, Unit, str], ...]
_SPREAD: _Measures = (
    ("mean ms", "ms", "step_ms"), ("std", "ms", "step_std_ms"), ("min", "ms", "step_min_ms"),
    ("max", "ms", "step_max_ms"), ("median", "ms", "step_median_ms"), ("CV", "percent", "step_cv"),
)  # fmt: skip
_MEMORY: _Measures = (
    ("tokens/s", "count", "tokens_per_s"), ("allocated", "bytes", "peak_allocated_bytes"),
    ("reserved", "bytes", "peak_reserved_bytes"), ("parameters", "bytes", "parameters_bytes"),
    ("gradients", "bytes", "gradients_bytes"), ("states", "bytes", "optimizer_bytes"),
)  # fmt: skip


def _table(rows: Sequence[Row], measures: _Measures) -> Table:
    """A line for each row, with these figures of it (title, unit, key) and its status."""
    shown = [one for one in measures if any(one[2] in row.figures for row in rows)]
    columns = (*_CONFIGURATION, *(Column(words, unit) for words, unit, _ in shown), Column("status"))
    lines = ((*_configuration(row, rows), *(row.figures.get(key) for _, _, key in shown), row.status) for row in rows)
    return Table(columns, tuple(lines))


_CONFIGURATION = (Column("model"), Column("context", "count"), Column("mode"))


def _configuration(row: Row, rows: Sequence[Row]) -> tuple[Cell, ...]:
    return model_name(row, rows), row.case["context_length"], row.case["mode"]


def _phases(rows: Sequence[Row]) -> Table:
    phases = [phase for phase in PHASES if any(f"{phase}_ms" in row.figures for row in rows)]
    columns = (*_CONFIGURATION, *(Column(f"{phase} ms", "ms") for phase in phases))
    lines = ((*_configuration(row, rows), *(spread(row, phase) for phase in phases)) for row in rows if row.ok)
    return Table(columns, tuple(lines))


def _figures(rows: Sequence[Row]) -> Iterator[Figure]:
    """Curves of the last mode, one for each model, and the shares of its phases."""
    for mode in _modes(rows)[-1:]:
        measured = [row for row in rows if row.ok and row.case["mode"] == mode]
        for name, key, words, axis in (
            ("step", "step_ms", "Time of a step", "ms"),
            ("tokens", "tokens_per_s", "Throughput", "tokens/s"),
        ):
            curves: dict[str, list[tuple[float, float | None]]] = {}
            for row in measured:
                point = row.case["context_length"], row.figures[key]
                curves.setdefault(model_name(row, rows), []).append(point)
            if any(len(points) > 1 for points in curves.values()):
                series = tuple((model, tuple(points)) for model, points in curves.items())
                title = f"{words} by context length, {mode}"
                yield Lines(f"timing-{name}", title, series, "context length, tokens", axis, log_x=True, log_y=True)
        if measured:
            yield _phase_bars(measured, rows)


def _phase_bars(measured: Sequence[Row], rows: Sequence[Row]) -> Bars:
    """Shares of the phases at the context length that the most models have, of several the longest."""
    lengths = [row.case["context_length"] for row in measured]
    length = max(lengths, key=lambda one: (lengths.count(one), one))
    shown = [row for row in measured if row.case["context_length"] == length]
    series = tuple(
        (phase, tuple(100 * row.figures[f"{phase}_ms"] / row.figures["step_ms"] for row in shown))
        for phase in PHASES
        if all(f"{phase}_ms" in row.figures for row in shown)
    )
    return Bars(
        "timing-phases", f"Phases of a step, {shown[0].case['mode']}, context {length:,}",
        tuple(model_name(row, rows) for row in shown), series, "% of the step", "stacked",
    )  # fmt: skip


BENCH = Bench(
    "timing",
    "Steps of every size over context lengths and modes: time, spread, tokens/s and memory; and what warm-up does.",
    _OPTIONS,
    lambda settings: tuple(_cases(settings)),
    _section,
    precisions=lambda settings: (settings["precision"],),
)
