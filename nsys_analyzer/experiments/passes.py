"""Declares the case and the figures of the passes of attention, which three experiments measure."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.experiments.model import option
from nsys_analyzer.inputs.rows import CaseTarget, Times

#: ``flash`` needs a GPU. The last two implementations are part of PyTorch.
IMPLEMENTATIONS = ("unfused", "naive", "blocked", "fused", "tiled", "flash", "sdpa", "sdpa_flash")


@dataclass(frozen=True)
class PassesCase:
    """An implementation of attention, and the shape (batch_size, heads, context_length, d_head) of q, k and v."""

    device: str
    implementation: str = option("naive", "implementations of attention", IMPLEMENTATIONS)
    compile: bool = option(False, "run unfused attention with torch.compile (on) or eagerly (off)")
    precision: str = option("fp32", "precision of tensors and matmuls", ("fp32", "bf16"))
    batch_size: int = option(1, "batch size")
    heads: int = option(8, "number of heads", spelling="num-heads")
    context_length: int = option(1024, "tokens in a sequence")
    d_head: int = option(64, "features of a head; the implementation flash supports 16, 32, 64 and 128")
    causal: bool = option(True, "use a causal mask")
    measured_ms: int = option(
        0, "time in ms for which Triton's do_bench measures on a GPU; 0 measures --steps calls instead", least=0
    )
    warmup_steps: int = option(
        3, "warm-up calls before the measured calls, if Triton's do_bench does not measure", cpu=1, least=0
    )
    steps: int = option(10, "measured calls, unless do_bench of Triton measures", cpu=5)


@dataclass
class PassesFigures:
    """Error, times and memory of an implementation. Memory is measured on a GPU and excludes the inputs.

    Attributes:
        first_step_ms: the first forward and backward pass, including compilation.
        max_error: the largest difference from attention in fp64 ÷ the largest value, for the tensor with the largest
            such ratio.
        forward: the forward pass without gradients.
        backward: the backward pass, repeated from one forward pass.
        end_to_end: the forward and the backward pass together.
        forward_peak_bytes: the peak memory of the forward pass.
        before_backward_bytes: the memory that is allocated between the forward and the backward pass.
        peak_bytes: the peak memory of both passes.
        kernel: the kernel that PyTorch's scaled_dot_product_attention chose.
    """

    first_step_ms: float | None = None
    inputs_bytes: int | None = None
    max_error: float | None = None
    forward_peak_bytes: int | None = None
    before_backward_bytes: int | None = None
    peak_bytes: int | None = None
    kernel: str | None = None
    forward: Times | None = None
    backward: Times | None = None
    end_to_end: Times | None = None


TARGET = CaseTarget("profiling_targets.attention", PassesCase, PassesFigures)


def drawn_width(widths: set[int]) -> int:
    """Returns the d_head that the charts show: 64 if it was measured, else the largest measured d_head."""
    return 64 if 64 in widths else max(widths)
