"""Attention in several ways with the same result: error, time and memory of each, and its gain over the naive one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from nsys_analyzer.experiments.model import AnyRow, Bench, Results, ratio, several, single
from nsys_analyzer.experiments.passes import TARGET, PassesCase
from nsys_analyzer.experiments.section import bars, curves, namer, rows_table, scientific, span
from nsys_analyzer.report.model import Block, Cell, Details, Paragraph
from nsys_analyzer.text import StrOrText, phrase

_VARIANTS = phrase(
    "*Variants.* naive is matmul, mask, softmax, matmul over all N² scores; blocked makes the matmuls in tiles of 256; "
    "fused goes by blocks of 128 queries, whose scores backward recomputes; tiled is FlashAttention-2 in PyTorch's "
    "operators, flash the same as Triton kernels; sdpa is PyTorch's scaled_dot_product_attention. Naive, blocked and "
    "fused make their mask in each call."
)
_DEFINITIONS = phrase(
    "*Error* is the largest difference from PyTorch's attention in fp64 ÷ the largest value. A variant above its "
    "tolerance is not timed. *Peak* is the most memory at once above the inputs, with the output and every "
    "temporary. *Over naive* is naive's time ÷ the variant's; "
    "naive and blocked compute what the mask hides, the others skip it."
)


def _answers(results: Results) -> Iterator[StrOrText]:
    """Yields gains over naive without a mask, and the largest errors."""
    rows = results.rows
    gains: dict[str, list[float]] = {}
    for row in rows:
        if not row.case.causal and (gain := results.gain(row, "forward", implementation="naive")):
            gains.setdefault(row.case.implementation, []).append(gain)
    if gains:
        words = ", ".join(f"{name} {span(factors)}" for name, factors in gains.items())
        yield f"Speed-up over naive, forward, not causal: {words}."
    for precision in dict.fromkeys(row.case.precision for row in rows):
        errors = [error for row in rows if row.case.precision == precision and (error := row.figures.max_error)]
        if errors:
            yield f"The largest error of any variant in {precision} is {max(errors):.1e}."


def _blocks(results: Results) -> Iterator[Block]:
    rows = results.rows
    yield Paragraph(_VARIANTS)

    def over_naive(row: AnyRow, name: str) -> Cell:
        return results.gain(row, name, implementation="naive")

    forward = rows_table(
        rows, "Forward: time, mean ± standard deviation, memory above the inputs, and error:",
        ("ms", "ms", "forward"), ("over naive", "factor", partial(over_naive, name="forward")),
        ("peak", "bytes", "forward_peak_bytes"), ("error", "text", lambda row: scientific(row.figures.max_error)),
    )  # fmt: skip
    both = rows_table(
        rows, "Forward and backward:", ("ms", "ms", "end_to_end"),
        ("over naive", "factor", partial(over_naive, name="end_to_end")), ("peak", "bytes", "peak_bytes"), status=False,
    )  # fmt: skip
    yield forward
    yield Details("Forward and backward", (both,))
    for causal, mask in ((False, "not causal"), (True, "causal")):
        shown = [row for row in rows if row.case.causal == causal]
        shape = namer(shown, ["implementation"])
        gains = {(shape(row), row.case.implementation): results.gain(row, "forward", implementation="naive")
                 for row in shown if row.case.implementation != "naive"}  # fmt: skip
        title = f"Speed-up over naive, forward, {mask}"
        yield from bars(f"variants-speed-up-{mask.replace(' ', '-')}", title, gains, "naive's time ÷ the variant's")
    yield from curves(
        "variants-memory-by-tokens", "Peak memory of forward by tokens", [row for row in rows if not row.case.causal],
        lambda row: ratio(row.figures.forward_peak_bytes, 2**20), "MiB above the inputs",
    )  # fmt: skip


BENCH = Bench(
    name="variants",
    title="attention variants, their memory and their time",
    summary="Attention naive, blocked, fused, flash and PyTorch's own: error, time and memory, causal and not.",
    options=(
        several(PassesCase, "batch_size", (1,)),
        several(PassesCase, "heads", (4,)),
        several(PassesCase, "context_length", (512, 1024, 2048), (512, 1024)),
        several(PassesCase, "d_head", (32,)),
        several(PassesCase, "precision", ("fp32",)),
        several(
            PassesCase,
            "implementation",
            ("naive", "blocked", "fused", "tiled", "flash", "sdpa"),
            ("naive", "blocked", "fused", "tiled", "sdpa"),
        ),
        several(PassesCase, "causal", (False, True)),
        *single(PassesCase, "warmup_steps", "steps"),
    ),
    target=TARGET,
    how={
        "warm-up": "the check, the count of memory, and {warmup_steps} more of each call",
        "measured": "{steps} of each call",
        "synchronized": "at the end of each call",
        "gradients": "forward under no_grad, backward to q, k and v into fresh tensors",
    },
    answers=_answers,
    blocks=_blocks,
    definitions=_DEFINITIONS,
)
