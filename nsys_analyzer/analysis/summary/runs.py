"""What a run's target timed without the profiler, beside what the trace shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from nsys_analyzer.analysis.summary.statistics import Stats


@dataclass(frozen=True)
class Unprofiled:
    """What the target timed itself, by Python's clock around synchronised phases, where no profiler slowed it.

    Attributes:
        status: "ok", "oom", "failed", "timeout", "missing" or a word of the timings file.
        message: why, where it is not ok.
        phases: phase to its times in ms; a phase that was not timed is not there.
        warmup_steps: steps before the measured ones, None where the file is silent.
        device: "cuda" or "cpu", None where the file is silent.
        peak_memory_bytes: the most memory allocated on the device, None where unknown.
        doubts: phase to the reasons why its time cannot be right; a phase without any is not there.

    """

    status: str
    message: str = ""
    phases: dict[str, Stats] = field(default_factory=dict)
    warmup_steps: int | None = None
    device: str | None = None
    peak_memory_bytes: int | None = None
    doubts: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def typical_ms(self, phase: str) -> float | None:
        """The median time of a phase in ms, the mean where no median is known; None where it was not timed."""
        return self.phases[phase].typical if phase in self.phases else None

    def trusted_ms(self, phase: str) -> float | None:
        """The typical time of a phase in ms, None where it was not timed or where there are doubts: for verdicts."""
        return None if self.doubts.get(phase) else self.typical_ms(phase)
