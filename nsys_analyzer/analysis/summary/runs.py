"""The times that a run's target took itself, without the profiler."""

from __future__ import annotations

from dataclasses import dataclass, field

from nsys_analyzer.analysis.summary.statistics import Stats


@dataclass(frozen=True)
class Unprofiled:
    """Times by Python's clock around synchronised phases, where no profiler slowed them; None is unknown.

    Attributes:
        status: "ok", "oom", "failed", "timeout", "missing" or a word of the timings file; ``message`` says why.
        phases: phase to its times in ms.
        device: "cuda" or "cpu".
        doubts: phase to the reasons why its time cannot be right.
    """

    status: str
    message: str = ""
    phases: dict[str, Stats] = field(default_factory=dict)
    warmup_steps: int | None = None
    device: str | None = None
    peak_memory_bytes: int | None = None
    doubts: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def typical_ms(self, phase: str) -> float | None:
        """The median time of a phase in ms, else the mean; None where it was not timed."""
        return self.phases[phase].typical if phase in self.phases else None

    def trusted_ms(self, phase: str) -> float | None:
        """The typical time of a phase in ms; None where it was not timed or is in doubt."""
        return None if self.doubts.get(phase) else self.typical_ms(phase)
