"""Whether a phase is GPU-bound or the GPU waits for the CPU, in words, with the thresholds and what it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.profiler_cost import API_CALL, NVTX_RANGE, OPERATOR, ProfilerCost
from nsys_analyzer.analysis.summary.summary import BusyShare, CaptureSummary, PhaseSummary
from nsys_analyzer.analysis.transformer.peaks import GPU_BOUND, IDLE
from nsys_analyzer.report.units import counted, milliseconds, percent
from nsys_analyzer.text import Words, phrase

_BUSY, _IDLE = (f"{threshold:.0%}".replace("%", "\N{NO-BREAK SPACE}%") for threshold in (GPU_BOUND, IDLE))
_NOT_SYNCHRONISED = "Not synchronised, GPU work goes on after the range, idle time is unknown"
_ON_GPU = "Ranges on the GPU's timeline last as long as the GPU's work, idle time is unknown"


def busy_of(capture: CaptureSummary) -> float | None:
    """GPU busy ÷ the unprofiled time of the step, on a GPU."""
    step = capture.phase(STEP)
    share = step.busy_share if step else None
    return share.low if share and share.unprofiled else None


def verdicts(capture: CaptureSummary, phases: Sequence[PhaseSummary]) -> str:
    """Each phase under the heading of its verdict, empty on a CPU."""
    if capture.on_cpu:
        return ""
    found: dict[str, list[str]] = {}
    for phase in phases:
        share = phase.busy_share
        if share is None:
            heading, said = _ON_GPU if capture.ranges_on_gpu else _NOT_SYNCHRONISED, phase.phase
        else:
            heading, said = _heading(share), f"{phase.phase} ({_figures(share)})"
        found.setdefault(heading, []).append(said)
    return " ".join(f"{heading}: {', '.join(named)}." for heading, named in found.items())


def _heading(share: BusyShare) -> str:
    time = "unprofiled time" if share.unprofiled else "time"
    also = "" if share.unprofiled else ", under the profiler and also without its estimated cost"
    if share.verdict == "GPU-bound":
        return (
            f"GPU-bound, busy for {_BUSY} or more of the {time}{'' if share.unprofiled else ' even under the profiler'}"
        )
    if share.verdict == "GPU waits":
        # Launching is one cause of idle time among several, and a busy share tells none of them from the others.
        causes = "for launches, Python or blocking calls: which of them is not analysed"
        return f"The GPU waits for the CPU ({causes}) and is idle for {_IDLE} or more of the {time}{also}"
    limits = f"GPU-bound (busy for {_BUSY} or more of the {time}) {{}} waiting for the CPU (idle for {_IDLE} or more)"
    if share.verdict == "neither":
        return f"Neither {limits.format('nor')}{also}"
    return f"Undecided by times under the profiler: {limits.format('or')}, or neither"


def _figures(share: BusyShare) -> str:
    idle_ms = share.wall_ms - share.busy_ms
    if share.unprofiled:
        return f"{percent(share.low)} busy of {milliseconds(share.wall_ms)}, {milliseconds(max(idle_ms, 0.0))} idle"
    low, high = percent(share.low), percent(share.high)
    busy = low if low == high else f"{low} to {high}"
    if share.verdict != "undecided":
        return f"{busy} busy, at most {milliseconds(idle_ms)} idle"
    if share.profiler_ms is None or share.profiler_cost is None:
        return (
            f"at least {percent(share.low)} busy of {milliseconds(share.wall_ms)}, what the profiler added is unknown"
        )
    return (
        f"{busy} busy: of its {milliseconds(share.wall_ms)} the profiler may have added up to "
        f"{milliseconds(share.profiler_ms)}, by {_events(share.profiler_cost)}"
    )


def _events(cost: ProfilerCost) -> str:
    numbers = ((API_CALL, cost.api_calls), (NVTX_RANGE, cost.nvtx_ranges), (OPERATOR, cost.operators))
    return ", ".join(counted(number, recorded.event) for recorded, number in numbers if number)


def how_costs_are_estimated(captures: Iterable[CaptureSummary]) -> tuple[Words, ...]:
    """The costs of events, where a verdict rests on them."""
    shares = [phase.busy_share for capture in captures for phase in capture.phases if phase.instances]
    if not any(share and not share.unprofiled for share in shares):
        return ()
    costs = ", ".join(
        f"{one.low_us} to {one.high_us} µs for each {one.event}" for one in (API_CALL, NVTX_RANGE, OPERATOR)
    )
    return (
        phrase(
            "*The profiler's estimated cost*: {} of PyTorch's profiler, as measured elsewhere; API calls cost more "
            "where launches take longer than there. The GPU hides this cost while it has work left, so it is the most "
            "that the profiler can have added. Of two busy shares the first is GPU busy ÷ profiled wall time, the "
            "second leaves this cost out of the wall time. Profiled wall time is not a benchmark; unprofiled times "
            "(`--csv`) decide.",
            costs,
        ),
    )
