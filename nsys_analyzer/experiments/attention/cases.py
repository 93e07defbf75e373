"""Cases and figures of the experiment ``attention``."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.analysis.transformer.attention_costs import AttentionShape
from nsys_analyzer.experiments.model import CaseTarget, Row, Times, option


@dataclass(frozen=True)
class AttentionCase:
    """One shape of causal attention without heads: queries, keys and values of (batch_size, context_length, d) each."""

    device: str
    batch_size: int = option(8, "batch size")
    context_length: int = option(1024, "tokens")
    d: int = option(64, "features of queries, keys and values")
    compile: bool = option(False, "with torch.compile (on), or eager (off)")
    precision: str = option("fp32", "of the matmuls", ("fp32", "tf32"))
    warmup_steps: int = option(5, "steps before the measured ones", cpu=2, least=0)
    steps: int = option(100, "measured forward and backward passes", cpu=10)

    @property
    def shape(self) -> AttentionShape:
        """The shape with its costs; the tensors are fp32."""
        return AttentionShape(self.batch_size, 1, self.context_length, self.d, True, self.precision)

    @property
    def name(self) -> str:
        """The case in a sentence."""
        return f"d {self.d}, context {self.context_length:,}{', compiled' if self.compile else ''}"


@dataclass
class AttentionFigures:
    """Times of forward and backward, and memory above the inputs.

    Attributes:
        product_bits: bits of the mantissa that matmuls keep: the precision that they really have.
        first_step_ms: the first forward and backward, with compilation.
        inputs_bytes: queries, keys, values, mask, and the gradient of the output.
        before_backward_bytes: allocated between forward and backward.
        forward_peak_bytes, peak_bytes: the peak of forward, and of forward and backward.
        saved: shape, dtype, number and bytes of the tensors that are saved for backward.
    """

    product_bits: int | None = None
    first_step_ms: float | None = None
    compiled_graphs: int | None = None
    inputs_bytes: int | None = None
    before_backward_bytes: int | None = None
    forward_peak_bytes: int | None = None
    peak_bytes: int | None = None
    saved: list[tuple[list[int], str, int, int]] | None = None
    forward: Times | None = None
    backward: Times | None = None


TARGET = CaseTarget("profiling_targets.attention", AttentionCase, AttentionFigures)
AttentionRow = Row[AttentionCase, AttentionFigures]
