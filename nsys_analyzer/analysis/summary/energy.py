"""Computes the energy and the cost of a step and of a token from the energy that a run recorded."""

from __future__ import annotations

from dataclasses import replace

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.summary.summary import CaptureSummary, StepEnergy, TokenCost
from nsys_analyzer.configuration import GpuEnergy, Prices
from nsys_analyzer.trace.phase_names import STEP
from nsys_analyzer.trace.schema import MS_PER_S

_JOULES_PER_KWH, _SECONDS_PER_HOUR, _TOKENS = 3.6e6, 3600, 1_000_000
#: A warning is given if power or heat limits the clock in at least this share of the readings.
_NOTABLE_LIMITED_SHARE = 0.1


def add_energy(capture: CaptureSummary, prices: Prices) -> CaptureSummary:
    """Returns a capture with the energy of its steps, the cost of its tokens, and warnings on limited clocks.

    A call that generates several tokens is not one step, so its energy is not used.
    """
    rows = capture.run.energy if capture.run and capture.run.energy and not capture.times_calls else ()
    gpus = tuple(row for row in rows if row.rank in (None, capture.rank))
    energy = _sum_gpus(gpus, capture.tokens_per_step) if gpus else None
    warnings = [
        Fact("clock_limited", gpu=row.gpu, cause=cause, share=share, clock_mhz=row.clock_mhz, max_mhz=row.max_clock_mhz)
        for row in gpus
        for cause, share in row.limits.items()
        if share >= _NOTABLE_LIMITED_SHARE
    ]
    capture = replace(capture, energy=energy, warnings=(*capture.warnings, *warnings))
    capture = replace(capture, cost=_find_cost(capture, prices))
    limits_w = _find_power_limits(energy, capture.step) if energy and capture.step else None
    if limits_w is None or capture.diagnosis is None:
        return capture
    findings = tuple(_add_joules(finding, *limits_w) for finding in capture.diagnosis.findings)
    diagnosis = replace(capture.diagnosis, findings=findings)
    return replace(capture, diagnosis=diagnosis, findings=findings if capture.findings else capture.findings)


def _sum_gpus(gpus: tuple[GpuEnergy, ...], tokens: int) -> StepEnergy:
    """Returns the energy of a step on all GPUs of a process."""
    joules = sum(row.joules / row.steps for row in gpus)
    idle_watts = [row.idle_watts for row in gpus if row.idle_watts is not None]
    return StepEnergy(
        joules=joules,
        error_joules=sum(row.error_joules / row.steps for row in gpus),
        watts=sum(row.joules / row.seconds for row in gpus),
        idle_watts=sum(idle_watts) if len(idle_watts) == len(gpus) else None,
        steps=gpus[0].steps,
        joules_per_token=joules / tokens if tokens else None,
        gpus=gpus,
    )


def _find_power_limits(energy: StepEnergy, step: StepSummary) -> tuple[float, float] | None:
    """Returns the power of the idle GPU and of the working GPU, W; None if one of them is not known.

    The mean power is assumed to be that of a GPU which works for its busy share of the step and is idle otherwise. A
    program that waits keeps clocks high, so the idle power is a lower bound, and the power while the GPU works an upper
    bound.
    """
    idle_w, busy_share = energy.idle_watts, step.busy_share
    if idle_w is None or not busy_share or energy.watts <= idle_w:
        return None
    return idle_w, idle_w + (energy.watts - idle_w) / busy_share


def _add_joules(finding: Finding, least_w: float, most_w: float) -> Finding:
    """Returns a finding with the bounds of the energy that it saves: the bounds of the saved time × the given power."""
    low, high = finding.saves_ms_low / MS_PER_S * least_w, finding.saves_ms_high / MS_PER_S * most_w
    return replace(finding, saves_joules=(low, high))


def _find_cost(capture: CaptureSummary, prices: Prices) -> TokenCost | None:
    """Returns the cost of a million tokens; None if neither the cost of electricity nor that of GPU time is known."""
    energy, unprofiled, tokens = capture.energy, capture.unprofiled, capture.tokens_per_step
    step_ms = unprofiled.trusted_ms(STEP) if unprofiled else None
    if not tokens or capture.times_calls:
        return None
    electricity = gpu_time = None
    if energy and prices.per_kwh is not None:
        electricity = energy.joules / _JOULES_PER_KWH * prices.per_kwh * _TOKENS / tokens
    if step_ms and prices.per_hour is not None:
        gpus = len(energy.gpus) if energy else 1
        gpu_time = gpus * step_ms / MS_PER_S / _SECONDS_PER_HOUR * prices.per_hour * _TOKENS / tokens
    known_parts = [part for part in (electricity, gpu_time) if part is not None]
    return TokenCost(electricity, gpu_time, sum(known_parts)) if known_parts else None
