"""Writes the sentences of findings about kernels that could take less time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsys_analyzer.analysis.findings.finding import FindingFigures, FindingTexts
from nsys_analyzer.analysis.findings.kernels import (
    CACHE_COPY_SAVINGS,
    FUSED_ATTENTION_RATIOS,
    FUSED_OPTIMIZER_SAVINGS,
    MAX_FUSED_OPTIMIZER_KERNELS,
    SMALL_GRID_SAVINGS,
    CacheCopiesFigures,
    IdleMultiprocessorsFigures,
    SmallGridsFigures,
    UnfusedAttentionFigures,
    UnfusedOptimizerFigures,
    WaveTailsFigures,
)
from nsys_analyzer.analysis.findings.kernels_without_operators import (
    COPY_CHAIN_SAVINGS,
    SHORTEST_COPY_CHAIN,
    TF32_GAIN_SHARE,
    Fp32MatmulFigures,
    LayoutCopiesFigures,
    UnfusedElementwiseFigures,
)
from nsys_analyzer.report.units import format_count, format_ms, rounded, rounded_percent, shorten_shapes
from nsys_analyzer.trace.schema import US_PER_MS

#: The most characters of a kernel's name in a sentence.
_MAX_NAME_LENGTH = 80


def _say_percent_range(shares: tuple[float, float]) -> str:
    """Returns the bounds of a share: "30 % to 80 %"."""
    return " to ".join(map(rounded_percent, shares))


def _say_time(ms: float, share: float, count: float, noun: str) -> str:
    """Returns the time of some operations per step: "In each step, 30 copies take 4.5 ms (10 % of the step)"."""
    operations = format_count(count, noun)
    take = "takes" if operations.startswith("1\N{NO-BREAK SPACE}") else "take"
    return f"In each step, {operations} {take} {format_ms(ms)} ({rounded_percent(share)} of the step)"


def describe_fp32_matmul(figures: Fp32MatmulFigures) -> FindingTexts:
    """Returns the sentences of the finding on matmuls that could use tensor cores."""
    least, most = figures.speedups
    fp32, tf32, bf16 = (flops / 1e12 for flops in (figures.fp32_flops, figures.tf32_flops, figures.bf16_flops))
    return FindingTexts(
        title="Matmuls run in fp32, without tensor cores",
        evidence=(
            f"{_say_time(figures.ms, figures.share, figures.kernels, 'fp32 matmul kernel')}.",
            f"The peak of the {figures.gpu} is {rounded(fp32)} TFLOP/s in fp32, {rounded(tf32)} in TF32 and "
            f"{rounded(bf16)} in bf16.",
        ),
        derivation=f"The step is replayed with the fp32 matmuls {least:.2g} to {most:.2g} times as fast. The peak in "
        f"TF32 is {tf32 / fp32:.2g} times the peak in fp32, and the replay assumes "
        f"{_say_percent_range(TF32_GAIN_SHARE)} of this gain.",
        remedy=(
            'torch.set_float32_matmul_precision("high")  # TF32: 10 bits of mantissa in the factors',
            "# or, with 7 bits: with torch.autocast('cuda', torch.bfloat16): ...",
        ),
        disproof="After the change, the names of the kernels contain tf32 or bf16. If the step is no shorter then, the "
        "matmuls do not limit it.",
    )


def describe_small_grids(figures: SmallGridsFigures) -> FindingTexts:
    """Returns the sentences of the finding on kernels with fewer blocks than multiprocessors."""
    return FindingTexts(
        title="Kernels are too small to fill the GPU",
        evidence=(
            f"In each step, small kernels take {format_ms(figures.ms)} ({format_count(figures.kernels, 'launch')}). "
            f"These kernels have fewer blocks ({figures.mean_blocks:.0f} on average) than the GPU has multiprocessors "
            f"({figures.multiprocessors}).",
            _say_longest_kernel(figures),
        ),
        derivation=_say_used_multiprocessors(figures),
        remedy=(
            "# a larger batch, or several small problems at once: torch.bmm, torch._foreach_*, streams",
            'model = torch.compile(model, mode="max-autotune")  # tries split-K and smaller tiles',
        ),
        disproof="Double the batch: if these kernels take twice as long, their grids do not limit them.",
    )


def describe_wave_tails(figures: WaveTailsFigures) -> FindingTexts:
    """Returns the sentences of the finding on kernels whose last wave of blocks is only partly full."""
    return FindingTexts(
        title="The last wave of blocks leaves multiprocessors idle",
        evidence=(
            f"In each step, kernels whose blocks run in several waves take {format_ms(figures.ms)} "
            f"({format_count(figures.kernels, 'launch')}). The last wave has too few blocks for the "
            f"{figures.multiprocessors} multiprocessors.",
            f"{_say_longest_kernel(figures)} The GPU runs {figures.blocks_per_wave:,} blocks of this kernel at "
            "once: the registers, threads and shared memory of the blocks limit this number.",
        ),
        derivation=f"{_say_used_multiprocessors(figures)} The lower bound assumes that blocks share the speed of their "
        "multiprocessor. The upper bound assumes that each wave takes the same time.",
        remedy=(
            f"# a batch or a size of a tensor with a multiple of {figures.blocks_per_wave:,} blocks, or a little less",
            'model = torch.compile(model, mode="max-autotune")  # tries tiles of other sizes and split-K',
        ),
        disproof="Reduce the batch until the last wave disappears: if these kernels take as long as before, the last "
        "wave does not limit them.",
    )


def _say_longest_kernel(figures: IdleMultiprocessorsFigures) -> str:
    """Returns sentences that name the kernel with most of the time, and its operator if the operator is known."""
    name, shapes = figures.operator
    launched_by = f" The operator {name} ({shorten_shapes(shapes)}) launches it." if name else ""
    return f"The kernel that takes most of this time is {figures.longest_kernel[:_MAX_NAME_LENGTH]}.{launched_by}"


def _say_used_multiprocessors(figures: IdleMultiprocessorsFigures) -> str:
    """Returns the sentence that states how well the replay assumes that idle multiprocessors are used."""
    limit = ", but the operators take at least their attainable time" if figures.operator[0] else ""
    shares = _say_percent_range(SMALL_GRID_SAVINGS)
    return f"The step is replayed as if {shares} of the time of the idle multiprocessors were used{limit}."


def describe_unfused_attention(figures: UnfusedAttentionFigures) -> FindingTexts:
    """Returns the sentences of the finding on attention in several kernels."""
    most, least = FUSED_ATTENTION_RATIOS
    return FindingTexts(
        title="Attention is not fused",
        evidence=(
            f"In each step, attention takes {format_ms(figures.score_ms)} in "
            f"{format_count(figures.score_kernels, 'kernel')} that read or write its scores, and "
            f"{format_ms(figures.matmul_ms)} in {format_count(figures.matmuls, 'matmul')}.",
        ),
        derivation="The step is replayed without the kernels that read and write the attention scores (softmax, mask, "
        f"scaling), and with {least:g} to {most:g} times the time of the matmuls. A fused kernel computes the same "
        "matmuls, or half of them if a causal mask allows it.",
        remedy=("out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # in bf16 or fp16: FlashAttention",),
        disproof="After the change, the names of the attention kernels contain flash or fmha, and there are no softmax "
        "kernels.",
    )


def describe_unfused_elementwise(figures: UnfusedElementwiseFigures) -> FindingTexts:
    """Returns the sentences of the finding on elementwise kernels that a compiler could fuse."""
    return FindingTexts(
        title="Elementwise kernels are not fused",
        evidence=(
            f"{_say_time(figures.ms, figures.share, figures.kernels, 'small kernel')}, on average "
            f"{rounded(figures.ms / figures.kernels * US_PER_MS)} µs each. These kernels compute elementwise "
            "operations, reductions, norms and casts.",
            f"These kernels form chains with {figures.chain_length:.2g} consecutive kernels per chain on average.",
        ),
        derivation="The step is replayed with each chain fused into one kernel. This kernel takes between the time of "
        "the longest kernel and that of the two longest kernels of the chain. The launches of the other kernels are "
        "saved as well, unless launching limits the step, because compiled code needs CPU time itself.",
        remedy=("model = torch.compile(model)  # or block.compile() for each block: it compiles faster",),
        disproof="After the change, kernels named triton_… replace these kernels. If the step is no shorter then, the "
        "elementwise kernels do not limit it.",
    )


def describe_layout_copies(figures: LayoutCopiesFigures) -> FindingTexts:
    """Returns the sentences of the finding on chains of copies."""
    return FindingTexts(
        title="Chains of redundant copies",
        evidence=(
            f"{_say_time(figures.ms, figures.share, figures.copies, 'copy')}. They form chains of "
            f"{SHORTEST_COPY_CHAIN} or more consecutive copies.",
        ),
        derivation=f"The step is replayed without {_say_percent_range(COPY_CHAIN_SAVINGS)} of the copies, as if one "
        "copy of each chain or none were needed.",
        remedy=(
            "x = x.transpose(1, 2)         # a view: leave .contiguous() out until a kernel asks for it",
            "x = x.to(torch.bfloat16)      # once, not to float32 and back",
        ),
        disproof="Leave the chain out for one run: if the output changes, the copies are not redundant.",
    )


def describe_cache_copies(figures: CacheCopiesFigures) -> FindingTexts:
    """Returns the sentences of the finding on a cache that is copied in each decode step."""
    return FindingTexts(
        title="Decode copies tensors as large as the cache",
        evidence=(
            f"{_say_time(figures.ms, figures.share, figures.copies, 'copy')}. They concatenate tensors or copy them on "
            "the device.",
        ),
        derivation=f"The step is replayed without {_say_percent_range(CACHE_COPY_SAVINGS)} of the copies, as if new "
        "keys and values were written in place.",
        remedy=(
            'model.generate(..., cache_implementation="static")  # room for all tokens, allocated once',
            "cache[:, :, position] = k  # instead of torch.cat((cache, k), 2); or pages, as vLLM and SGLang have",
        ),
        disproof="Decode after a prompt twice as long: if the copies take no longer, they do not copy the cache.",
    )


def describe_unfused_optimizer(figures: UnfusedOptimizerFigures) -> FindingTexts:
    """Returns the sentences of the finding on an optimizer in many kernels."""
    updated = "several parameters each (foreach)" if figures.is_foreach else "one parameter each"
    return FindingTexts(
        title="The optimizer is not fused",
        evidence=(
            f"In each step, the optimizer takes {format_ms(figures.ms)} on the GPU, in "
            f"{format_count(figures.kernels, 'kernel')} that update {updated}.",
        ),
        derivation=f"The step is replayed with {MAX_FUSED_OPTIMIZER_KERNELS} launches in the optimizer instead "
        f"of {figures.kernels:,.0f}, and with {_say_percent_range(FUSED_OPTIMIZER_SAVINGS)} less GPU time of the "
        "optimizer. A fused AdamW reads and writes 7 tensors of the parameters' size. A naive AdamW reads and writes "
        "20 tensors, some of which are in the cache.",
        remedy=("optimizer = torch.optim.AdamW(model.parameters(), lr, fused=True)",),
        disproof="After the change, count the optimizer's kernels: if they are few and the step is no shorter, other "
        "work limits the step.",
    )


TEXTS: dict[type[FindingFigures], Callable[[Any], FindingTexts]] = {
    Fp32MatmulFigures: describe_fp32_matmul,
    UnfusedOptimizerFigures: describe_unfused_optimizer,
    UnfusedAttentionFigures: describe_unfused_attention,
    UnfusedElementwiseFigures: describe_unfused_elementwise,
    LayoutCopiesFigures: describe_layout_copies,
    SmallGridsFigures: describe_small_grids,
    WaveTailsFigures: describe_wave_tails,
    CacheCopiesFigures: describe_cache_copies,
}
