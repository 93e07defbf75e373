"""Steps in fp32, TF32 and bf16 autocast: speed, memory, which tensor is in which dtype, and what accumulators lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.models import find_model
from nsys_analyzer.benches import dtypes
from nsys_analyzer.benches.conditions import conditions
from nsys_analyzer.benches.model import Bench, Case, Option, Results, Row, Settings
from nsys_analyzer.benches.physics import physics
from nsys_analyzer.benches.steps import (
    MODES,
    SHARED,
    TARGET,
    cast_bytes,
    each,
    endings,
    flags,
    messages,
    model_name,
    rates,
    residences,
    spread,
    step_case,
)
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.report.model import Bars, Block, Cell, Column, Paragraph, Section, Table
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import emphasis, marked

_PRECISIONS = ("fp32", "tf32", "bf16")
_NAMES = {"tf32": "TF32", "bf16": "bf16 autocast"}
_OPTIONS = (
    Option("model", str, ("small:64", "large:32"), ("small:1",), "Sizes, each with its batch size after a colon."),
    Option("precision", _PRECISIONS, _PRECISIONS, ("fp32", "bf16"), "bf16 is autocast."),
    Option("mode", MODES, MODES[:2], MODES[:2], "What a step is."),
    Option("context_length", int, (256,), (32,), "Tokens of a sequence.", several=False),
    *SHARED,
    *dtypes.OPTIONS,
)
_DEFINITIONS = marked(
    "*Speed-up* and *memory* are against fp32 of the same configuration: its step time ÷ this one's, and this peak of "
    "allocated memory ÷ its; on a CPU memory is not counted. *tf32* lets products of fp32 tensors keep 10 bits of "
    "their operands; *bf16* is autocast: products in bf16, parameters, gradients and what autocast leaves alone in "
    "fp32, the casts a part of the step. Of a row that ran out of memory *peak* is what it had reached. The FLOPs are "
    "those of the products, the times hold the elementwise work as well."
)


def _cases(settings: Settings) -> Iterator[Case]:
    """The precisions of a mode after one another, then dtypes and accumulation."""
    for name, batch in map(_model_and_batch, settings["model"]):
        for mode in settings["mode"]:
            for precision in settings["precision"]:
                yield step_case(
                    settings, f"{name}, batch {batch}, {mode}, {precision}", model=name, batch_size=batch, mode=mode,
                    precision=precision, context_length=settings["context_length"],
                )  # fmt: skip
    yield from dtypes.cases(settings)


def _model_and_batch(text: str) -> tuple[str, int]:
    name, _, batch = text.partition(":")
    if not batch.isdecimal() or int(batch) < 1:
        raise ConfigurationError(f"{text!r} is no model with a batch size", "Write it as small:64")
    return find_model(name).name, int(batch)


def _section(results: Results) -> Section:
    rows = tuple(row for row in results.rows if row.module == TARGET)
    other = tuple(row for row in results.rows if row.module == dtypes.TARGET)
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join([*_answers(rows), *dtypes.answer(other)])),
        conditions(
            results,
            warmup=f"{each(rows, 'warmup_steps')} steps",
            steps=f"{each(rows, 'steps')} steps, batch {each(rows, 'batch_size')}, "
            f"context {each(rows, 'context_length')}, attention {each(rows, 'attention')}",
            synchronized="at the end of each phase",
            grad="off in forward alone (no_grad), recorded in the other modes",
        ),
        *flags(results, rows),
        _times(rows),
        *_casts(rows),
        *_bars(rows),
        *dtypes.blocks(other),
        *messages(rows),
        *physics(results, rates(rows), residences(rows)),
        Paragraph(_DEFINITIONS),
    )
    return Section("bench-precision", "Bench: fp32, TF32 and bf16 autocast", blocks)


def _setup(row: Row, rows: Sequence[Row]) -> str:
    return model_name(row, rows, beside=("mode", "precision"))


def _against_fp32(row: Row, rows: Sequence[Row], key: str) -> float | None:
    """The figure of the same configuration in fp32 ÷ the row's; None where one of them is missing."""
    case = {**row.case, "precision": "fp32"}
    base = next((one for one in rows if one.ok and one.case == case), None)
    if base is None or not row.ok or not base.figures.get(key):
        return None
    return float(base.figures[key] / row.figures[key])


def _answers(rows: Sequence[Row]) -> Iterator[str]:
    """The speed-up of each precision in the last mode, then what was not measured."""
    modes = [mode for mode in MODES if any(row.case["mode"] == mode for row in rows)]
    setups: dict[str, list[str]] = {}
    for row in rows:
        speed_up = _against_fp32(row, rows, "step_ms")
        if row.case["mode"] in modes[-1:] and row.case["precision"] != "fp32" and speed_up:
            said = f"{_NAMES[row.case['precision']]} {format_number(speed_up, 'factor')}"
            setups.setdefault(_setup(row, rows), []).append(said)
    if setups:
        each_of = "; ".join(f"{setup}: {', '.join(said)}" for setup, said in setups.items())
        yield f"Speed of {modes[-1]} against fp32: {each_of}."
    yield from endings(rows)


def _times(rows: Sequence[Row]) -> Table:
    peaks = any("peak_allocated_bytes" in row.figures for row in rows)
    memory = (Column("peak", "bytes"), Column("memory", "factor")) if peaks else ()
    columns = (
        Column("configuration"), Column("mode"), Column("precision"), Column("step ms", "ms"),
        Column("speed-up", "factor"), Column("tokens/s", "count"), *memory, Column("status"),
    )  # fmt: skip
    return Table(columns, tuple(_line(row, rows, peaks) for row in rows), "Time and memory of a step by precision:")


def _line(row: Row, rows: Sequence[Row], peaks: bool) -> tuple[Cell, ...]:
    less = _against_fp32(row, rows, "peak_allocated_bytes")
    memory = (row.figures.get("peak_allocated_bytes"), 1 / less if less else None) if peaks else ()
    return (
        _setup(row, rows), row.case["mode"], row.case["precision"], spread(row, "step"),
        _against_fp32(row, rows, "step_ms"), row.figures.get("tokens_per_s"), *memory, row.status,
    )  # fmt: skip


def _casts(rows: Sequence[Row]) -> Iterator[Paragraph]:
    """Why bf16 takes more memory than fp32, where the weights' casts are enough to explain it."""
    more = []
    for row in rows:
        less, casts = _against_fp32(row, rows, "peak_allocated_bytes"), cast_bytes(row)
        if less and less < 1 and casts >= row.figures["peak_allocated_bytes"] * (1 - less):
            name, times = f"{row.case['mode']} of {_setup(row, rows)}", format_number(1 / less, "factor")
            more.append(f"{name} {times} ({format_number(casts, 'bytes')} of casts)")
    if more:
        yield Paragraph(
            f"{emphasis('More memory in bf16 than in fp32')}: {'; '.join(more)}. Autocast keeps its bf16 cast of "
            "every weight until its block ends, or until backward has used it, beside the weight in fp32: more than "
            "it saves where activations are small beside the weights."
        )


def _bars(rows: Sequence[Row]) -> Iterator[Bars]:
    """Throughput and, on a GPU, memory; a group for each configuration and mode, a bar for each precision."""
    groups = tuple(dict.fromkeys((_setup(row, rows), row.case["mode"]) for row in rows))
    for name, key, scale, title, axis in (
        ("throughput", "tokens_per_s", 1, "Throughput by precision", "tokens/s"),
        ("memory", "peak_allocated_bytes", 2**30, "Peak of allocated memory by precision", "GiB"),
    ):
        found = {
            (_setup(row, rows), row.case["mode"], row.case["precision"]): row.figures[key] / scale
            for row in rows
            if row.ok and key in row.figures
        }
        precisions = [one for one in _PRECISIONS if any(key[2] == one for key in found)]
        series = tuple((one, tuple(found.get((*group, one)) for group in groups)) for one in precisions)
        if series:
            yield Bars(f"precision-{name}", title, tuple(", ".join(group) for group in groups), series, axis)


BENCH = Bench(
    "precision",
    "Steps in fp32, TF32 and bf16 autocast: speed, memory, dtypes, and what an accumulator's precision costs.",
    _OPTIONS,
    lambda settings: tuple(_cases(settings)),
    _section,
    precisions=lambda settings: settings["precision"],
)
