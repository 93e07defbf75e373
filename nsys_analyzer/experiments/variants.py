"""Defines the experiment ``variants``: error, time and memory of several implementations of attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from nsys_analyzer.experiments.model import AnyRow, Bench, Results, list_option, ratio, scalar_options
from nsys_analyzer.experiments.passes import TARGET, PassesCase
from nsys_analyzer.experiments.section import (
    format_factor_range,
    format_scientific,
    make_bars,
    make_curves,
    make_row_namer,
    make_rows_table,
)
from nsys_analyzer.report.model import Block, Cell, Details, Paragraph
from nsys_analyzer.text import StrOrText, phrase

_VARIANTS = phrase(
    "*Variants.* naive computes matmul, mask, softmax and matmul over all N² scores. blocked computes the matmuls in "
    "tiles of 256. fused computes blocks of 128 queries, and recomputes their scores in backward. tiled is "
    "FlashAttention-2 with PyTorch's operators, and flash is the same algorithm as Triton kernels. sdpa is PyTorch's "
    "scaled_dot_product_attention. naive, blocked and fused make their mask in each call."
)
_DEFINITIONS = phrase(
    "*Error* is the largest difference from PyTorch's attention in fp64 ÷ the largest value. A variant whose error "
    "exceeds the tolerance is not timed. *Peak* is the peak memory without the inputs. It includes the output and all "
    "temporaries. *Over naive* is the time of naive ÷ the time of the variant. naive and blocked also compute masked "
    "scores, and the other variants skip them."
)


def _write_sentences(results: Results) -> Iterator[StrOrText]:
    """Yields the speed-ups over the implementation ``naive`` without a mask, and the largest errors."""
    rows = results.rows
    gains: dict[str, list[float]] = {}
    for row in rows:
        if not row.case.causal and (gain := results.speed_up(row, "forward", implementation="naive")):
            gains.setdefault(row.case.implementation, []).append(gain)
    if gains:
        words = ", ".join(f"{name} {format_factor_range(factors)}" for name, factors in gains.items())
        yield f"Speed-up over naive, forward, not causal: {words}."
    for precision in dict.fromkeys(row.case.precision for row in rows):
        errors = [error for row in rows if row.case.precision == precision and (error := row.figures.max_error)]
        if errors:
            yield f"The largest error of any variant in {precision} is {max(errors):.1e}."


def _make_tables_and_charts(results: Results) -> Iterator[Block]:
    rows = results.rows
    yield Paragraph(_VARIANTS)

    def compute_speed_up_over_naive(row: AnyRow, name: str) -> Cell:
        """Returns how many times as fast a pass is as the same pass of the implementation ``naive``."""
        return results.speed_up(row, name, implementation="naive")

    forward = make_rows_table(
        rows, "Forward: time (mean ± standard deviation), memory without the inputs, and error:",
        ("ms", "ms", "forward"), ("over naive", "factor", partial(compute_speed_up_over_naive, name="forward")),
        ("peak", "bytes", "forward_peak_bytes"),
        ("error", "text", lambda row: format_scientific(row.figures.max_error)),
    )  # fmt: skip
    end_to_end = make_rows_table(
        rows, "Forward and backward:", ("ms", "ms", "end_to_end"),
        ("over naive", "factor", partial(compute_speed_up_over_naive, name="end_to_end")),
        ("peak", "bytes", "peak_bytes"), status=False,
    )  # fmt: skip
    yield forward
    yield Details("Forward and backward", (end_to_end,))
    for causal, mask in ((False, "not causal"), (True, "causal")):
        drawn_rows = [row for row in rows if row.case.causal == causal]
        shape = make_row_namer(drawn_rows, ["implementation"])
        gains = {(shape(row), row.case.implementation): results.speed_up(row, "forward", implementation="naive")
                 for row in drawn_rows if row.case.implementation != "naive"}  # fmt: skip
        title = f"Speed-up over naive, forward, {mask}"
        key = f"variants-speed-up-{mask.replace(' ', '-')}"
        yield from make_bars(key, title, gains, "time of naive ÷ time of the variant")
    yield from make_curves(
        "variants-memory-by-tokens", "Peak memory of forward by tokens", [row for row in rows if not row.case.causal],
        lambda row: ratio(row.figures.forward_peak_bytes, 2**20), "MiB, without the inputs",
    )  # fmt: skip


BENCH = Bench(
    name="variants",
    title="attention variants, their memory and their time",
    summary="Measures the error, time and memory of six implementations of attention, causal and not causal.",
    options=(
        list_option(PassesCase, "batch_size", (1,)),
        list_option(PassesCase, "heads", (4,)),
        list_option(PassesCase, "context_length", (512, 1024, 2048), (512, 1024)),
        list_option(PassesCase, "d_head", (32,)),
        list_option(PassesCase, "precision", ("fp32",)),
        list_option(
            PassesCase,
            "implementation",
            ("naive", "blocked", "fused", "tiled", "flash", "sdpa"),
            ("naive", "blocked", "fused", "tiled", "sdpa"),
        ),
        list_option(PassesCase, "causal", (False, True)),
        *scalar_options(PassesCase, "warmup_steps", "steps"),
    ),
    target=TARGET,
    conditions={
        "warm-up": "the check of the error, the count of memory, and {warmup_steps} further calls",
        "measured": "{steps} calls",
        "synchronized": "at the end of each call",
        "gradients": "forward under no_grad; backward computes the gradients of q, k and v into new tensors",
    },
    write_sentences=_write_sentences,
    make_tables_and_charts=_make_tables_and_charts,
    definitions=_DEFINITIONS,
)
