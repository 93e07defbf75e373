"""Shares of a capture: of its kernels' time by kernel and class, and of what its GPU can do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from nsys_analyzer.analysis.kernels.classes import COMMUNICATION, UNKNOWN
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.statistics import ClassRow, KernelRow, share_of, without_communication

#: The classes of kernels that a report singles out.
MATMUL, FUSED = "matmul", "fused attention"
#: What a time is: of a run without the profiler, that of the step estimated, the GPU's work alone, the profiled range.
TimeOf = Literal["unprofiled", "estimated", "gpu_busy", "wall"]


@dataclass(frozen=True)
class Leader:
    """The kernel with the most time of a part of a capture: one that computes, where there is any.

    ``collective`` is the longest collective beside it, whose time is mostly waiting.
    """

    scope: str
    kernel: KernelRow
    collective: KernelRow | None


@dataclass(frozen=True)
class ClassShares:
    """The classes of a part of a capture, longest first, each a share of its total kernel time.

    Attributes:
        kernel_sum_ms: that time; None where an opaque graph hides kernels.
        matmul: its share, and that of what computes; None where kernels without a name may change it.
        unnamed: the share of kernels without a name, whose class is unknown.
    """

    scope: str
    classes: tuple[ClassRow, ...]
    kernel_sum_ms: float | None
    matmul: float | None = field(init=False)
    matmul_without_communication: float | None = field(init=False)
    fused_attention: float = field(init=False)
    unnamed: float = field(init=False)

    def __post_init__(self) -> None:
        """Fills the shares of single classes."""
        vars(self).update(
            matmul=share_of(self.classes, MATMUL),
            matmul_without_communication=share_of(without_communication(self.classes), MATMUL),
            fused_attention=self.of(FUSED),
            unnamed=self.of(UNKNOWN),
        )

    def of(self, name: str) -> float:
        """The share of a class, by the kernels whose names are known."""
        return sum(row.share for row in self.classes if row.kernel_class == name)

    @property
    def communicates(self) -> bool:
        """True where communication is among the classes."""
        return any(row.kernel_class == COMMUNICATION for row in self.classes)

    def computing(self) -> ClassShares:
        """The classes that compute, as shares of their time."""
        return replace(self, classes=without_communication(self.classes))


@dataclass(frozen=True)
class MatmulShare:
    """The share of matmul in each compared phase, in a training step and in a forward pass.

    ``inference_of`` is the forward-only capture of the same configuration that ``inference`` is of, None where it is
    this one.
    """

    phases: tuple[ClassShares, ...]
    step: ClassShares | None
    inference: ClassShares | None
    inference_of: str | None = None

    @property
    def scopes(self) -> tuple[ClassShares, ...]:
        """The phases, and the step where it is none of them."""
        apart = self.step is not None and all(phase.scope != STEP for phase in self.phases)
        return (*self.phases, self.step) if self.step and apart else self.phases

    @property
    def of_all(self) -> ClassShares | None:
        """The classes of a training step, else of the forward pass where that is all there is."""
        return self.step or (self.phases[0] if [one.scope for one in self.phases] == ["forward"] else None)


@dataclass(frozen=True)
class PhaseRate:
    """The FLOPs of the model in one instance of a phase against the time that it takes.

    Attributes:
        mfu: of the peak in the precision that ran; None where that is not known.
        mfu_of_best: of the GPU's highest peak.
    """

    phase: str
    model_flops: int
    ms: float
    time_of: TimeOf
    mfu: float | None
    mfu_of_best: float | None

    @property
    def flops_per_s(self) -> float:
        """Achieved."""
        return self.model_flops / (self.ms / 1e3)


class ClassRate(msgspec.Struct, frozen=True):
    """The work of a class of kernels in one instance of a phase, and its rate while these kernels run.

    Attributes:
        kernel_class: a class, ``ATTENTION_MATMUL`` or a kind of copy.
        bytes: the least that were moved, counted and not measured; of copies, what they moved.
        bytes_per_s: None, too, where it is above the memory's peak: a cache has served part of it.
        peak_flops_per_s: in the precision of these kernels; None where that is not known, and for work without matmuls.
        flops_per_s: achieved; ``share_of_peak`` is of that peak.
    """

    kernel_class: str = msgspec.field(name="class")
    phase: str
    ms: float
    flops: int | float | None = None
    bytes: int | float | None = None
    bytes_per_s: float | None = None
    precision: str | None = None
    peak_flops_per_s: float | None = None
    flops_per_s: float | None = None
    share_of_peak: float | None = None

    def __post_init__(self) -> None:
        """Fills the rates."""
        rate, peak = None if self.flops is None else self.flops / (self.ms / 1e3), self.peak_flops_per_s
        msgspec.structs.force_setattr(self, "flops_per_s", rate)
        msgspec.structs.force_setattr(self, "share_of_peak", rate / peak if rate is not None and peak else None)

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity, FLOP/byte, where neither rate is in doubt."""
        return self.flops / self.bytes if self.flops and self.bytes and self.bytes_per_s else None


@dataclass(frozen=True)
class Limits:
    """What a process achieves of its GPU's peaks; None is unknown, shares are fractions.

    Attributes:
        gpu: its name.
        precision: the one that most of the matmul time ran in.
        roofs: precision to peak FLOP/s, of those that ran.
        tensor_core_share: of the matmul time, by the names of kernels; of ``tensor_core_unknown`` these say nothing.
        missing: what would have to be known: "model", "context length", "batch size", "peaks".
        notes: what the figures leave out, a sentence each.
        doubt: why figures are left out.
        mfu, mfu_of_best, time_of, ms, model_flops: by phase, as of ``PhaseRate``.
    """

    gpu: str
    precision: str | None
    peak_flops: float | None
    best_precision: str | None
    best_peak_flops: float | None
    peak_bytes_per_s: float | None
    source: str | None
    roofs: tuple[tuple[str, float], ...]
    tensor_core_share: float | None
    tensor_core_unknown: float
    mfu: dict[str, float] = field(default_factory=dict)
    mfu_of_best: dict[str, float] = field(default_factory=dict)
    time_of: dict[str, TimeOf] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    model_flops: dict[str, int] = field(default_factory=dict)
    classes: tuple[ClassRate, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    doubt: str | None = None

    @property
    def phases(self) -> tuple[PhaseRate, ...]:
        """The rates of each phase."""
        return tuple(
            PhaseRate(one, self.model_flops[one], ms, self.time_of[one], self.mfu.get(one), self.mfu_of_best.get(one))
            for one, ms in self.ms.items()
        )

    def phase(self, name: str) -> PhaseRate | None:
        """A phase by its name."""
        return next((one for one in self.phases if one.phase == name), None)

    @property
    def chief(self) -> PhaseRate | None:
        """The step, else the first of its phases."""
        return self.phase(STEP) or next(iter(self.phases), None)
