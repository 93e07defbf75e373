"""Defines the experiment ``flash``: FlashAttention-2 in Triton against unfused attention and PyTorch's SDPA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from nsys_analyzer.experiments.model import (
    AnyRow,
    Bench,
    Results,
    find_figure,
    list_option,
    mean_ms,
    options_of,
    ratio,
    scalar_options,
)
from nsys_analyzer.experiments.passes import TARGET, PassesCase, drawn_width
from nsys_analyzer.experiments.section import (
    format_factor_range,
    format_scientific,
    make_comparison_table,
    make_curves,
    make_rows_table,
)
from nsys_analyzer.report.model import Block, Cell, Details
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import StrOrText, phrase
from nsys_analyzer.trace.schema import MS_PER_S

_IMPLEMENTATIONS = ("flash", "unfused", "sdpa", "sdpa_flash")
PASSES = {"forward": "forward", "backward": "backward", "end_to_end": "end to end"}
_CONTEXTS = tuple(2**power for power in range(7, 17))  # context lengths of 128 to 65,536 tokens
#: FLOPs of each pass for each visible score and each feature of a head. Forward has two matmuls. Backward has five, one
#: of which repeats a matmul of forward.
_FLOPS_PER_SCORE_FEATURE = {"forward": 4, "backward": 10, "end_to_end": 14}
_DEFINITIONS = phrase(
    "*Latency* is the median of do_bench's calls on a GPU, and the mean elsewhere. *End to end* is forward and "
    "backward together. At short contexts the latency is the fixed cost of Python and of launches. *÷ fastest peer* "
    "is flash's time ÷ the shortest time of the other implementations: below 1, flash is faster. *FLOP/s* count the "
    "matmuls of the visible scores: 4·d_head per score forward, and 10·d_head per score backward, which recomputes "
    "the scores. A causal mask leaves S·(S + 1) ÷ 2 of S² scores visible. *Error* is the largest difference from "
    "attention in fp64 ÷ the largest value, over the output and each gradient. An implementation whose error exceeds "
    "the tolerance is not timed."
)


def compute_flops_per_s(row: AnyRow, name: str) -> float | None:
    """Returns the FLOP/s of the matmuls of a pass, or None if the pass was not measured."""
    case, ms = row.case, mean_ms(row, name)
    length = case.context_length
    scores = case.batch_size * case.heads * (length * (length + 1) / 2 if case.causal else length**2)
    return _FLOPS_PER_SCORE_FEATURE[name] * case.d_head * scores / ms * MS_PER_S if ms else None


def compare_with_fastest_peer(rows: dict[str, AnyRow], name: str) -> float | None:
    """Returns the time of flash ÷ the time of the fastest other implementation.

    Args:
        rows: the rows by implementation.
        name: the pass.
    """
    times = [ms for implementation, row in rows.items() if implementation != "flash" and (ms := mean_ms(row, name))]
    return ratio(mean_ms(rows.get("flash"), name), min(times, default=None))


def _write_sentences(results: Results) -> Iterator[StrOrText]:
    """Yields the speed-up of flash over its peers, its FLOP/s, and its memory compared with unfused attention."""
    for precision in dict.fromkeys(row.case.precision for row in results.rows):
        flash_rows = [row for row in results.rows
                      if row.ok and (row.case.implementation, row.case.precision) == ("flash", precision)]  # fmt: skip
        if not flash_rows:
            continue
        for peer, peer_words in (("unfused", "unfused attention"), ("sdpa", "PyTorch's SDPA")):
            gains = [(row.case.context_length, gain) for row in flash_rows
                     if (gain := results.speed_up(row, "end_to_end", implementation=peer))]  # fmt: skip
            if gains:
                longest_context, _ = max(gains)
                at = format_factor_range(gain for length, gain in gains if length == longest_context)
                where = f"At context {longest_context:,} in {precision}, forward and backward"
                yield f"{where}, flash is {at} as fast as {peer_words}."
        rates = [max(compute_flops_per_s(row, name) or 0.0 for row in flash_rows) for name in ("forward", "backward")]
        forward, backward = (format_number(rate, "flop/s") for rate in rates)
        yield f"In {precision} flash reaches {forward} forward and {backward} backward."
        # The memory is compared at the longest context at which both implementations were measured.
        for row in sorted(flash_rows, key=lambda row: -row.case.context_length):
            unfused = find_figure(results.find_row(row, implementation="unfused"), "peak_bytes")
            if unfused and row.figures.peak_bytes:
                unfused_size, flash_size = (format_number(size, "bytes") for size in (unfused, row.figures.peak_bytes))
                where = f"context {row.case.context_length:,} ({precision}, d_head {row.case.d_head})"
                yield (
                    f"At {where}, unfused attention needs {unfused_size} beside its inputs, and flash needs "
                    f"{flash_size}."
                )
                break


def _make_tables_and_charts(results: Results) -> Iterator[Block]:
    """Yields latency and memory end to end, curves over the context length, and details of each pass."""
    rows = results.rows
    implementations = [name for name in _IMPLEMENTATIONS if any(row.case.implementation == name for row in rows)]
    tables = []
    for name, title in PASSES.items():

        def compute_flash_flops_per_s(group: dict[str, AnyRow], name: str = name) -> Cell:
            """Returns the FLOP/s that FlashAttention reaches in a pass."""
            return compute_flops_per_s(group["flash"], name) if "flash" in group else None

        latency = make_comparison_table(
            rows, "implementation", f"Latency {title}:",
            {implementation: (f"{implementation} ms", "ms", f"{name}.ms") for implementation in implementations},
            ("÷ fastest peer", "factor", partial(compare_with_fastest_peer, name=name)),
            ("flash FLOP/s", "flop/s", compute_flash_flops_per_s),
        )  # fmt: skip
        tables.append(latency)
    memory = make_comparison_table(
        rows, "implementation", "Peak memory of forward and backward, without the inputs:",
        {implementation: (implementation, "bytes", "peak_bytes") for implementation in implementations},
    )  # fmt: skip
    yield tables[-1]
    yield memory
    d = drawn_width({row.case.d_head for row in rows})
    for precision in dict.fromkeys(row.case.precision for row in rows):
        drawn_rows = [row for row in rows if (row.case.d_head, row.case.precision) == (d, precision)]
        for name, title in PASSES.items():
            key = f"flash-{precision}-{name.replace('_', '-')}"
            title = f"Latency of attention, {title}, {precision}, d_head {d}"
            yield from make_curves(key, title, drawn_rows, partial(mean_ms, path=name), "ms")
    error_table = make_rows_table(
        rows, "Errors up to context 4,096, and kernels:",
        ("error", "text", lambda row: format_scientific(row.figures.max_error)), ("kernel", "text", "kernel"),
    )  # fmt: skip
    yield Details("Forward, backward, errors and kernels", (*tables[:-1], error_table))


BENCH = Bench(
    name="flash",
    title="FlashAttention-2 against unfused attention and SDPA",
    summary="Compares FlashAttention-2 in Triton with unfused attention and SDPA: latency, memory and FLOP/s.",
    options=(
        list_option(PassesCase, "implementation", _IMPLEMENTATIONS, ("tiled", "unfused", "sdpa")),
        list_option(PassesCase, "precision", ("bf16", "fp32"), ("fp32",)),
        list_option(PassesCase, "d_head", (16, 32, 64, 128), (64,)),
        list_option(PassesCase, "context_length", _CONTEXTS, (128, 256, 512)),
        *scalar_options(PassesCase, "batch_size", "heads", "causal"),
        replace(options_of(PassesCase)["measured_ms"], default=100),
        *scalar_options(PassesCase, "warmup_steps", "steps"),
    ),
    target=TARGET,
    conditions={
        "measured": "each pass for {measured_ms} ms by triton.testing.do_bench on a GPU, else {steps} calls; batch "
        "{batch_size}, {heads} heads, causal {causal}",
        "synchronized": "after each call; on a GPU the L2 cache is cleared before it",
        "gradients": "of queries, keys and values; the backward pass is repeated from one forward pass",
    },
    write_sentences=_write_sentences,
    make_tables_and_charts=_make_tables_and_charts,
    definitions=_DEFINITIONS,
)
