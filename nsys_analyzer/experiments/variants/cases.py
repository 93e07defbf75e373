"""Cases and figures of the experiment ``variants``."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.analysis.transformer.attention_costs import AttentionShape
from nsys_analyzer.experiments.model import CaseTarget, Row, option

#: The variants of attention, in PyTorch's operators; of these, the ones that C++ has for a CPU, forward only.
VARIANTS = ("naive", "blocked", "fused", "tiled", "flash", "torch")
CPP_VARIANTS = ("naive", "blocked", "fused", "flash")


@dataclass(frozen=True)
class VariantsCase:
    """One variant at one shape, (batch_size, heads, context_length, d_head)."""

    device: str
    implementation: str = option("naive", "the variants", VARIANTS)
    batch_size: int = option(1, "batch size")
    heads: int = option(4, "heads")
    context_length: int = option(1024, "tokens")
    d_head: int = option(32, "features of a head")
    precision: str = option("fp32", "of the tensors and matmuls", ("fp32", "bf16"))
    causal: bool = option(False, "with a causal mask")
    backward: bool = option(False, "measure forward and backward too, where the variant has one")
    warmup_steps: int = option(3, "calls before the measured ones; none more of one above a second", cpu=1, least=0)
    steps: int = option(10, "measured calls; at most 3 of one above a second", cpu=5)

    @property
    def shape(self) -> AttentionShape:
        """The shape with its costs."""
        sizes = (self.batch_size, self.heads, self.context_length, self.d_head)
        return AttentionShape(*sizes, self.causal, self.precision)


@dataclass
class VariantPass:
    """Errors, memory and times of one pass; each is None until it is measured.

    Attributes:
        max_error: the largest difference from PyTorch's attention in fp64 ÷ the largest value, the worst tensor's.
        relative_error: ‖difference‖ ÷ ‖exact‖ of the worst tensor.
        peak_bytes, total_bytes: the most memory above the inputs, and the sum of all allocations.
        steps: measured calls; their times are as in ``Times``.
    """

    max_error: float | None = None
    relative_error: float | None = None
    peak_bytes: int | None = None
    total_bytes: int | None = None
    steps: int | None = None
    ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    median_ms: float | None = None
    std_ms: float | None = None
    cv: float | None = None


@dataclass
class VariantsFigures:
    """The passes of a variant, the tolerances of their errors, and the bytes of queries, keys and values."""

    inputs_bytes: int | None = None
    tolerance: float | None = None
    relative_tolerance: float | None = None
    forward: VariantPass | None = None
    forward_backward: VariantPass | None = None


TARGET = CaseTarget("profiling_targets.variants", VariantsCase, VariantsFigures)
VariantsRow = Row[VariantsCase, VariantsFigures]
