"""Cases and figures of the experiment ``flash``."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.analysis.transformer.attention_costs import AttentionShape
from nsys_analyzer.experiments.model import CaseTarget, Row, option

IMPLEMENTATIONS = ("flash", "unfused", "sdpa", "sdpa_flash")


@dataclass(frozen=True)
class FlashCase:
    """One implementation and shape: queries, keys and values of (batch_size, heads, context_length, d_head)."""

    device: str
    implementation: str = option(
        "flash",
        "ours (flash), unfused, PyTorch's choice (sdpa), its FlashAttention backend (sdpa_flash)",
        IMPLEMENTATIONS,
    )
    precision: str = option("bf16", "of the tensors and matmuls", ("bf16", "fp32"))
    d_head: int = option(64, "features of a head: 16, 32, 64 or 128")
    context_length: int = option(1024, "tokens", least=2)
    batch_size: int = option(1, "batch size")
    heads: int = option(8, "heads", cpu=2)
    causal: bool = option(True, "with a causal mask")
    fp32_products: str = option(
        "tf32x3", "of our kernels in fp32: three matmuls in TF32, as SDPA's do, or true fp32", ("tf32x3", "ieee")
    )
    warmup_ms: int = option(25, "milliseconds of do_bench's warm-up, on a GPU", least=0)
    measured_ms: int = option(100, "milliseconds that do_bench measures for, on a GPU; more for five calls")
    warmup_steps: int = option(1, "calls before the measured ones, without do_bench", least=0)
    steps: int = option(3, "measured calls without do_bench: on a CPU, and of passes longer than 100 ms")

    @property
    def shape(self) -> AttentionShape:
        """The shape with its costs."""
        sizes = (self.batch_size, self.heads, self.context_length, self.d_head)
        return AttentionShape(*sizes, self.causal, self.precision)


@dataclass
class FlashTimes:
    """Latency of a pass: median, extremes, the timer, and do_bench's measuring time."""

    ms: float
    min_ms: float | None = None
    max_ms: float | None = None
    timer: str = "do_bench"
    measured_ms: float | None = None


@dataclass
class FlashFigures:
    """Error, latency and memory of an implementation.

    Attributes:
        inputs_bytes: queries, keys, values, and the gradient of the output.
        max_error: the largest difference from unfused attention in fp32 ÷ its largest number, the worst tensor's.
        end_to_end: forward and backward measured as one.
        peak_bytes: of forward and backward above the inputs.
        kernel: the name of what ran.
    """

    inputs_bytes: int | None = None
    max_error: float | None = None
    forward: FlashTimes | None = None
    peak_bytes: int | None = None
    kernel: str | None = None
    backward: FlashTimes | None = None
    end_to_end: FlashTimes | None = None


TARGET = CaseTarget("profiling_targets.flash", FlashCase, FlashFigures)
FlashRow = Row[FlashCase, FlashFigures]
