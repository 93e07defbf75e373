"""Defines the experiment ``compile``: the time of each phase, eager and with torch.compile, and the compile time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from nsys_analyzer.experiments.model import AnyRow, Bench, Results, find_figure, list_option, ratio, scalar_options
from nsys_analyzer.experiments.section import (
    format_extremes,
    group_rows,
    make_bars,
    make_comparison_table,
    make_row_namer,
)
from nsys_analyzer.experiments.steps import PHASES, SHARED_OPTIONS, STEP_CONDITIONS, TARGET, StepCase
from nsys_analyzer.report.model import Block, Details
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import StrOrText, phrase
from nsys_analyzer.trace.schema import MS_PER_S

#: The parts of a step whose speed-up the report shows.
PARTS = ("forward", "backward", "step")
_MODE_NAMES = {False: "eager", True: "compiled"}
#: The defaults of options on a CPU: one narrow layer with PyTorch's SDPA, because a CPU needs seconds to compile a
#: kernel.
_CPU_DEFAULTS: dict[str, Any] = {"attention": "sdpa", "d_model": 256, "d_ff": 1024, "num_layers": 1, "num_heads": 4}
_DEFINITIONS = phrase(
    "*Speed-up* is the eager time ÷ the compiled time, each the median of unprofiled steps. `torch.compile(model)` "
    "compiles forward and backward. Loss and optimizer stay eager. *Compile s* is the first compiled step minus the "
    "median of the measured steps. It includes the start of PyTorch's libraries, and in the first row of a process the "
    "import of the compiler. *Repaid after* is the compile time ÷ the time that each step saves. To see which kernels "
    "changed, use `nsys-analyze run` with and without `--compile`, then `nsys-analyze compare`."
)


def compute_speed_up(pair: dict[bool, AnyRow], part: str) -> float | None:
    """Returns the eager time of a part ÷ its compiled time.

    Args:
        pair: the eager row (False) and the compiled row (True).
        part: forward, backward or step.
    """
    eager_ms, compiled_ms = (find_figure(pair.get(key), f"{part}.median_ms") for key in (False, True))
    return ratio(eager_ms, compiled_ms)


def compute_compile_s(pair: dict[bool, AnyRow]) -> float | None:
    """Returns the compile time in seconds: the first step of the compiled run minus its median step."""
    first_step_ms, step = (find_figure(pair.get(True), name) for name in ("first_step_ms", "step.median_ms"))
    return None if first_step_ms is None or step is None else (first_step_ms - step) / MS_PER_S


def count_steps_to_repay(pair: dict[bool, AnyRow]) -> int | None:
    """Returns the number of compiled steps that save the compile time, or None if compiled steps are not faster."""
    gain, seconds = compute_speed_up(pair, "step"), compute_compile_s(pair)
    if seconds is None or not gain or gain <= 1:
        return None
    eager_ms, compiled_ms = (pair[key].figures.step.median_ms for key in (False, True))
    saved_ms: float = eager_ms - compiled_ms
    return round(seconds * MS_PER_S / saved_ms)


def _write_sentences(results: Results) -> Iterator[StrOrText]:
    """Yields the range of speed-ups of each part of a step, and the compile time."""
    rows = results.rows
    name, pairs = make_row_namer(rows, ["compile"]), group_rows(rows, "compile")
    for part in reversed(PARTS):
        gains = [(gain, name(pair[True])) for pair in pairs if (gain := compute_speed_up(pair, part))]
        if gains:
            text = format_extremes(gains, lambda gain: format_number(gain, "factor"))
            yield phrase("`torch.compile` makes {} {} as fast.", "a step" if part == "step" else part, text)
    if costs := [(seconds, pair) for pair in pairs if (seconds := compute_compile_s(pair)) is not None]:
        described_costs = []
        for seconds, pair in costs:
            steps = count_steps_to_repay(pair)
            repaid = f"repaid after {steps:,} steps" if steps else "never repaid"
            described_costs.append((seconds, f"{name(pair[True])}, {repaid}"))
        yield f"Compiling takes {format_extremes(described_costs, '{:.1f} s'.format)}."


def _make_tables_and_charts(results: Results) -> Iterator[Block]:
    """Yields the speed-ups and the compile time, their bars, and the time of each phase."""
    rows = results.rows

    yield make_comparison_table(
        rows, "compile", phrase("Speed-up by `torch.compile`, and the compile time:"),
        {compiled: (f"{word} peak", "bytes", "peak_allocated_bytes") for compiled, word in _MODE_NAMES.items()},
        *((part, "factor", partial(compute_speed_up, part=part)) for part in PARTS),
        ("compile s", "count", compute_compile_s), ("repaid after steps", "count", count_steps_to_repay),
    )  # fmt: skip
    name = make_row_namer(rows, ["compile"])
    pairs = [pair for pair in group_rows(rows, "compile") if True in pair]
    gains = {(name(pair[True]), part): compute_speed_up(pair, part) for pair in pairs for part in PARTS}
    yield from make_bars("compile-speed-up", "Speed-up by torch.compile", gains, "eager ÷ compiled")
    times = [
        make_comparison_table(
            rows, "compile", f"{phase}:", {False: ("eager ms", "ms", phase), True: ("compiled ms", "ms", phase)}
        )
        for phase in (*PHASES, "step")
    ]
    yield Details("Time of each phase, mean ± standard deviation", tuple(times))


BENCH = Bench(
    name="compile",
    title="the model eager and compiled",
    summary="Measures the speed-up of each phase by torch.compile, and the time that the compilation takes.",
    options=(
        list_option(StepCase, "compile", (False, True)),
        list_option(StepCase, "model", ("small", "medium", "large"), ("small",), help="model sizes"),
        list_option(StepCase, "context_length", (256,), (32,)),
        list_option(StepCase, "precision", ("fp32", "bf16"), ("fp32",)),
        list_option(StepCase, "mode", ("forward", "train"), ("train",), choices=("forward", "train")),
        *scalar_options(StepCase, "batch_size"),
        *(
            replace(option, default_on_cpu=_CPU_DEFAULTS.get(option.name, option.default_on_cpu))
            for option in SHARED_OPTIONS
        ),
    ),
    target=TARGET,
    conditions={**STEP_CONDITIONS, "compiled": "without a cache, on a GPU"},
    write_sentences=_write_sentences,
    make_tables_and_charts=_make_tables_and_charts,
    definitions=_DEFINITIONS,
)
