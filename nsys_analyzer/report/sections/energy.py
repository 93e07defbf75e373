"""Reports the energy of a step and the cost of tokens, which were measured without the profiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.summary.summary import CaptureSummary, StepEnergy, TokenCost
from nsys_analyzer.configuration import GpuEnergy
from nsys_analyzer.report.model import Answer, Block, Field, Paragraph, Table, make_table
from nsys_analyzer.report.units import format_ms
from nsys_analyzer.text import NO_BREAK_SPACE, join_names, rounded
from nsys_analyzer.trace.phase_names import STEP
from nsys_analyzer.trace.schema import MS_PER_S

_HOW_MEASURED = (
    "Each GPU counts its energy. The counter was read 20 times per second, while steps ran after the measured steps in "
    "a separate run without a profiler. The error is the largest that the updates of the counter can cause: the "
    "longest time between two updates × the power."
)
_HOW_PHASES_ARE_MEASURED = (
    "The power of a phase is that between updates of the counter inside the phase. The error is the standard error "
    "over its instances. Phases that last for only a few updates are part of the rest."
)
#: The report states the length of the steps whose energy was read if it differs from the timed steps by more than this
#: share.
_NOTABLE_DIFFERENCE = 0.1


def answer_energy(capture: CaptureSummary) -> Iterator[Block]:
    """Yields the energy of a step and of a token, the cost of tokens, and, to be folded, each GPU and each phase."""
    energy, title = capture.energy, capture.title
    sentences = [_describe_energy(energy)] if energy else []
    sentences += [_describe_cost(capture.cost)] if capture.cost else []
    if sentences:
        yield Answer(" ".join(sentences), title)
    if energy is None:
        return
    yield tabulate_gpus(energy.gpus, title)
    for gpu in energy.gpus:
        if rows := list_phase_joules(gpu):
            phase_fields: tuple[Field[PhaseJoules], ...] = (
                Field("phase", "text", lambda row: row[0]),
                Field("W", "count", lambda row: row[1]),
                Field("± W", "count", lambda row: row[2]),
                Field("J per step", "ms", lambda row: row[3]),
            )
            yield make_table(phase_fields, rows, f"The phases of a step on GPU {gpu.index}:", capture=title)
            yield Paragraph(_HOW_PHASES_ARE_MEASURED, title)
    yield Paragraph(_HOW_MEASURED, title)
    step_ms = MS_PER_S * energy.gpus[0].seconds / energy.steps
    timed_ms = capture.unprofiled.trusted_ms(STEP) if capture.unprofiled else None
    if timed_ms and abs(step_ms - timed_ms) > _NOTABLE_DIFFERENCE * timed_ms:
        lengths = f"{format_ms(step_ms)} in the mean, and the timed steps {format_ms(timed_ms)}"
        yield Paragraph(f"The steps whose energy was read took {lengths}: they may do other work.", title)


_GPU_FIELDS: tuple[Field[GpuEnergy], ...] = (
    Field("GPU", "text", lambda row: f"{row.index}: {row.gpu}"),
    Field("rank", "count", lambda row: row.rank),
    Field("steps", "count", lambda row: row.steps),
    Field("s", "ms", lambda row: row.seconds),
    Field("J per step", "ms", lambda row: row.joules / row.steps),
    Field("± J", "ms", lambda row: row.error_joules / row.steps),
    Field("W", "count", lambda row: round(row.joules / row.seconds)),
    Field("idle W", "count", lambda row: None if row.idle_watts is None else round(row.idle_watts)),
    Field("clock MHz", "count", lambda row: row.clock_mhz),
    Field("highest clock MHz", "count", lambda row: row.max_clock_mhz),
    Field("limited by power", "percent", lambda row: row.limits.get("power")),
    Field("limited by heat", "percent", lambda row: row.limits.get("heat")),
)


def tabulate_gpus(gpus: Sequence[GpuEnergy], title: str, caption: str = "") -> Table:
    """Returns the table of the energy of each GPU."""
    return make_table(_GPU_FIELDS, gpus, caption, capture=title)


def describe_energy_of_ranks(energies: Sequence[StepEnergy]) -> str:
    """Returns the sentence on the energy of a step on the GPUs of all ranks."""
    joules, watts = sum(energy.joules for energy in energies), sum(energy.watts for energy in energies)
    gpus = sum(len(energy.gpus) for energy in energies)
    return (
        f"Without the profiler, a step takes {rounded(joules)}{NO_BREAK_SPACE}J on {gpus} GPUs together, which is "
        f"{rounded(watts)}{NO_BREAK_SPACE}W."
    )


#: A phase with its power and the error of its power in W, and its energy in a step in J.
PhaseJoules = tuple[str, float | None, float | None, float]


def list_phase_joules(gpu: GpuEnergy) -> list[PhaseJoules]:
    """Returns the phases of a step with their energy, and the rest of the step; nothing if no phase is known."""
    rows: list[PhaseJoules] = [
        (name, phase.watts, phase.error_watts, phase.watts * phase.seconds_per_step)
        for name, phase in gpu.phases.items()
    ]
    rest_joules = gpu.joules / gpu.steps - sum(row[3] for row in rows)
    return [*rows, ("rest of the step", None, None, rest_joules)] if rows else []


def format_joules(energy: StepEnergy) -> str:
    """Returns the energy of a step with its unit: 35.1 J."""
    return f"{rounded(energy.joules)}{NO_BREAK_SPACE}J"


def _describe_energy(energy: StepEnergy) -> str:
    """Returns the sentences on the energy of a step and of a token."""
    gpus = "the GPU" if len(energy.gpus) == 1 else f"{len(energy.gpus)} GPUs"
    sentence = (
        f"Without the profiler, a step takes {format_joules(energy)} (±{NO_BREAK_SPACE}{rounded(energy.error_joules)}"
        f"{NO_BREAK_SPACE}J) on {gpus}, which is {rounded(energy.watts)}{NO_BREAK_SPACE}W"
    )
    if energy.idle_watts is not None:
        sentence += f"; idle before the program, it was {rounded(energy.idle_watts)}{NO_BREAK_SPACE}W"
    if energy.joules_per_token is None:
        return f"{sentence}."
    token_joules = energy.joules_per_token
    per_token = f"{rounded(token_joules)}{NO_BREAK_SPACE}J"
    if token_joules < 1:
        per_token = f"{rounded(1000 * token_joules)}{NO_BREAK_SPACE}mJ"
    return f"{sentence}. A token takes {per_token}."


def _describe_cost(cost: TokenCost) -> str:
    """Returns the sentence on the cost of a million tokens, with its parts if there are two."""
    parts = [
        f"{rounded(part)} for {name}"
        for name, part in (("electricity", cost.electricity), ("the time of the GPU", cost.gpu_time))
        if part is not None
    ]
    if len(parts) == 1:
        return f"A million tokens cost {parts[0]}."
    return f"A million tokens cost {rounded(cost.total)}: {join_names(parts)}."
