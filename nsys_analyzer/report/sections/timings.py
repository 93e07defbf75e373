"""How long the target takes without the profiler, and what the profiler adds."""

from __future__ import annotations

from functools import partial

from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Unprofiled
from nsys_analyzer.report.evidence import FEW, Evidence, ended, spread, typical
from nsys_analyzer.report.model import Answer, Block, Cell, Paragraph, Section, Table
from nsys_analyzer.report.sections.sweep import draw_over_context, over_sweep
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, milliseconds, signed_percent
from nsys_analyzer.text import Words, joined, phrase

_TITLE = "Timings of unprofiled runs"
_STEP = "step"
_BY_TARGET = phrase(
    "The target timed itself with `time.perf_counter()`. The device is synchronised at the end of each phase, so a "
    "phase's time includes its GPU work."
)
_BY_HOOKS = phrase(
    "A program of yours was timed from outside, and nothing waits for the GPU inside a step: CUDA events time a "
    "phase's work, from the end of the work before it to its own end; on a CPU `time.perf_counter()` does."
)
_GIVEN = "The time of a step without the profiler is what the call says (`--step-ms`)."
_OTHER_WORDS = phrase(
    "*Tokens/s*: batch size × context length ÷ step time. *Peak memory*: the most memory allocated on the device."
)
_FIELDS: tuple[Field[tuple[str, Stats]], ...] = (
    Field("phase", "text", lambda row: row[0]),
    Field("n", "count", lambda row: row[1].n),
    Field("mean ms", "ms", lambda row: spread(row[1])),
    Field("median ms (min – max)", "ms", lambda row: typical(row[1])),
)


def answer(evidence: Evidence) -> Section:
    """The phases by model and context, then each capture with its spread, and a figure of the step."""
    timed = [(c, c.unprofiled) for c in evidence.captures if c.unprofiled and c.unprofiled.phases]
    blocks: list[Block] = []
    for phase in ("forward", "backward"):
        title = f"{phase.capitalize()} ms without the profiler"
        blocks += over_sweep(evidence, partial(unprofiled_ms, phase), "ms", title, f"unprofiled-{phase}")
    blocks += over_sweep(evidence, _peak_memory, "bytes", "Peak memory", "peak-memory")
    for capture, unprofiled in timed:
        blocks += [_answer(capture, unprofiled), _table(capture, unprofiled)]
    given = evidence.timings == "--step-ms"
    blocks += [Paragraph(phrase(_GIVEN) if given else _conditions(timed))] if timed else []
    if len(evidence.captures) <= FEW:
        phase = _STEP if any(_STEP in unprofiled.phases for _, unprofiled in timed) else "forward"
        title = f"Unprofiled time of one {phase}"
        blocks += draw_over_context(evidence.captures, partial(unprofiled_ms, phase), "ms", title, "unprofiled-times")
    return Section("timings", _TITLE, tuple(blocks), "unprofiled")


def unprofiled_ms(phase: str, capture: CaptureSummary) -> float | None:
    """The typical time of a phase without the profiler."""
    return capture.unprofiled.typical_ms(phase) if capture.unprofiled else None


def _peak_memory(capture: CaptureSummary) -> Cell:
    unprofiled = capture.unprofiled
    return (unprofiled.peak_memory_bytes or ended(unprofiled)) if unprofiled else None


def _answer(capture: CaptureSummary, unprofiled: Unprofiled) -> Answer:
    """Every phase, tokens per second and peak memory; in short the step and what the profiler adds to it."""
    phases = {phase: times for phase in unprofiled.phases if (times := unprofiled.typical_ms(phase)) is not None}
    said = [f"{phase} {milliseconds(ms)}" for phase, ms in phases.items()]
    tokens, peak = unprofiled.tokens_per_second, unprofiled.peak_memory_bytes
    rest = [f"{tokens:,.0f} tokens/s"] if tokens else []
    rest += [f"peak memory {format_number(peak, 'bytes')}"] if peak else []
    short = [f"{_STEP} {milliseconds(phases[_STEP])}"] if _STEP in phases else said
    costs = [(phase, cost) for phase in phases if (cost := unprofiled.profiler_overhead.get(phase)) is not None]
    overhead = "".join(f"; profiler: {phase} {signed_percent(cost)}" for phase, cost in costs[-1:])
    hooks = capture.run.hooks_ms if capture.run else None
    of_hooks = f" The hooks took {milliseconds(hooks)} of the CPU's time in a step." if hooks is not None else ""
    return Answer(capture.title, f"{', '.join((*said, *rest))}.{of_hooks}", f"{', '.join((*short, *rest))}{overhead}")


def _table(capture: CaptureSummary, unprofiled: Unprofiled) -> Table:
    caption = "Each phase without the profiler, mean ± standard deviation over n measured steps:"
    return table(_FIELDS, unprofiled.phases.items(), caption, capture=capture.title)


def _conditions(captures: list[tuple[CaptureSummary, Unprofiled]]) -> Words:
    """How the times were taken, as the timings and the runs say."""
    timed = [unprofiled for _, unprofiled in captures]
    by_hooks = [capture.run is not None and capture.run.timed_by == "hooks" for capture, _ in captures]
    how = [*([] if all(by_hooks) else [_BY_TARGET]), *([_BY_HOOKS] if any(by_hooks) else []), _OTHER_WORDS]
    warmup = sorted({one.warmup_steps for one in timed if one.warmup_steps is not None})
    steps = sorted({stats.n for one in timed for stats in one.phases.values() if stats.n is not None})
    devices = sorted({one.device for one in timed if one.device})
    known = [
        *([f"{_either(steps)} measured step{'' if steps == [1] else 's'}"] if steps else []),
        *([f"after {_either(warmup)} warm-up step{'' if warmup == [1] else 's'}"] if warmup else []),
        *([f"on {' and '.join(devices)}"] if devices else []),
    ]
    return phrase(
        "Each in a run of its own without the profiler{}. {}",
        f": {' '.join(known)}" if known else "",
        joined(" ", how),
    )


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]} to {numbers[-1]}"
