"""Attention alone: the case and figures of its target, which three experiments measure."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.experiments.model import option
from nsys_analyzer.inputs.rows import CaseTarget, Times

#: ``flash`` needs a GPU; the last two are PyTorch's own.
IMPLEMENTATIONS = ("unfused", "naive", "blocked", "fused", "tiled", "flash", "sdpa", "sdpa_flash")


@dataclass(frozen=True)
class PassesCase:
    """One implementation and shape: queries, keys and values of (batch_size, heads, context_length, d_head)."""

    device: str
    implementation: str = option("naive", "the implementations", IMPLEMENTATIONS)
    compile: bool = option(False, "unfused attention with torch.compile (on), or eager (off)")
    precision: str = option("fp32", "of the tensors and matmuls", ("fp32", "bf16"))
    batch_size: int = option(1, "batch size")
    heads: int = option(8, "heads", spelling="num-heads")
    context_length: int = option(1024, "tokens")
    d_head: int = option(64, "features of a head; flash takes 16, 32, 64 or 128")
    causal: bool = option(True, "with a causal mask")
    measured_ms: int = option(0, "milliseconds that do_bench measures for, on a GPU; 0 takes steps", least=0)
    warmup_steps: int = option(3, "calls before the measured ones, without do_bench", cpu=1, least=0)
    steps: int = option(10, "measured calls, without do_bench", cpu=5)


@dataclass
class PassesFigures:
    """Error, times and memory of an implementation; memory is above the inputs, on a GPU.

    Attributes:
        first_step_ms: the first forward and backward, with compilation.
        max_error: the largest difference from attention in fp64 ÷ its largest number, the worst tensor's.
        forward, backward, end_to_end: forward without gradients, backward again and again from one forward, both.
        forward_peak_bytes, before_backward_bytes, peak_bytes: the peak of forward, what is allocated between forward
            and backward, and the peak of both.
        kernel: of PyTorch's own what it chose.
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
    """Returns the width of heads that figures show: 64, or the largest."""
    return 64 if 64 in widths else max(widths)
