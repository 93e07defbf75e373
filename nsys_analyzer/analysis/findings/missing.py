"""The reasons why findings are missing, a type for each; ``report/finding_texts`` puts them into words."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.analysis.facts import FactOrText


@dataclass(frozen=True)
class MissingReason:
    """The reason why some findings of a capture are missing, or all of them: the base of a type for each reason."""


# --- The steps were replayed, but no saving can be derived.


@dataclass(frozen=True)
class EarlierWork(MissingReason):
    """The steps contain GPU work that was launched before them."""


@dataclass(frozen=True)
class ReplayDiffers(MissingReason):
    """The replayed steps are longer or shorter than the recorded ones; ``error`` is the ratio of their lengths − 1."""

    error: float


@dataclass(frozen=True)
class ColdStart(MissingReason):
    """The only pass starts up the program.

    Attributes:
        start_up_ms: the time of the calls that start it up.
        total_ms: the time of all calls.
        calls: the calls that start it up and the time of each, ms, the longest first.
    """

    start_up_ms: float
    total_ms: float
    calls: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class RecordsGraphs(MissingReason):
    """The program captures CUDA graphs, and captured operations do not run during the capture."""


@dataclass(frozen=True)
class OutOfMemory(MissingReason):
    """The program ran out of memory; ``message`` says where, and is empty if that is unknown."""

    message: FactOrText


# --- The steps cannot be replayed, or not all of the capture is known.


@dataclass(frozen=True)
class RanOnCpu(MissingReason):
    """The program ran on the CPU, where no findings are looked for."""


@dataclass(frozen=True)
class NoCapture(MissingReason):
    """There is no capture of the run; ``message`` says why, if that is known."""

    message: FactOrText | None


@dataclass(frozen=True)
class LostKernels(MissingReason):
    """This many launches of kernels were recorded, but none of the kernels."""

    launches: int


@dataclass(frozen=True)
class NoKernels(MissingReason):
    """No kernel was recorded; ``by_torch`` tells whether PyTorch's profiler made the capture."""

    by_torch: bool


@dataclass(frozen=True)
class IdleSteps(MissingReason):
    """Nothing runs on the GPU during the steps."""


@dataclass(frozen=True)
class NoApiCalls(MissingReason):
    """The trace has no API calls; ``by_torch`` tells whether PyTorch's profiler made the capture."""

    by_torch: bool


@dataclass(frozen=True)
class TooFewCalls(MissingReason):
    """The capture holds too few API calls of whole steps."""


@dataclass(frozen=True)
class HiddenInGraphs(MissingReason):
    """Kernels inside CUDA graphs were not recorded; ``share`` is their share of the GPU's compute time."""

    share: float
