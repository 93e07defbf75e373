"""Defines the experiment ``decode``: time to first token and inter-token latency, with and without a KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nsys_analyzer.configuration import ATTENTION_IMPLEMENTATIONS, PRECISIONS
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import (
    AnyRow,
    Bench,
    Results,
    find_figure,
    list_option,
    option,
    ratio,
    scalar_options,
)
from nsys_analyzer.experiments.section import format_factor_range, make_bars, make_row_namer, make_rows_table
from nsys_analyzer.experiments.steps import TransformerCase
from nsys_analyzer.inputs.rows import CaseTarget, Times
from nsys_analyzer.report.model import Block, Details, Lines
from nsys_analyzer.report.units import INTER_TOKEN_LATENCY, LEAST_READ_DATA, TOKENS_PER_S, TTFT, format_ms
from nsys_analyzer.text import phrase

_DEFINITIONS = phrase(
    "*TTFT*, the time to first token, is prefill (a pass over the prompt) and the choice of the most likely token. "
    "*Inter-token* latency is the time from one token to the next on Python's clock. *tokens/s* counts the tokens of "
    "all sequences after the first token. With the cache, each token needs a pass over that token only, which reads "
    "the keys and values of earlier tokens. Without the cache, each token needs a pass over the whole sequence. "
    "*bf16* means weights, activations and cache in bf16, not autocast. The lower bound of a token's memory traffic "
    "is {}.",
    LEAST_READ_DATA,
)


@dataclass(frozen=True)
class DecodeCase(TransformerCase):
    """A model, and the way in which it generates tokens.

    Raises:
        ConfigurationError: the tokens do not fit into the cache.
    """

    device: str
    model: str = option("small", "small, medium, large, xl, 2.7B, xl-2026 or 10B")
    num_layers: int = option(0, "number of layers; 0 means the number that --model has", least=0, cpu=2)
    batch_size: int = option(16, "batch size", cpu=2)
    prompt_length: int = option(1024, "tokens in the prompt of each sequence", cpu=32)
    cache_length: int = option(2048, "positions in the cache", cpu=64)
    tokens: int = option(100, "tokens to generate, including the first", least=3, cpu=10)
    warmup_tokens: int = option(100, "tokens to generate as a warm-up, which are not measured", cpu=10)
    precision: str = option("fp32", "precision of weights, activations and cache", PRECISIONS)
    attention: str = option("unfused", "naive (unfused) attention, or PyTorch's SDPA", ATTENTION_IMPLEMENTATIONS)
    cache: bool = option(True, "use a KV cache; without it, each token needs a pass over the whole sequence")
    seed: int = option(0, "seed of weights and tokens", least=0)

    def __post_init__(self) -> None:
        # The cache needs no room for the last token, which is never fed back.
        if self.cache_length < self.prompt_length + self.tokens - 1:
            raise ConfigurationError(f"{self.tokens} more tokens do not fit into a cache of {self.cache_length}")


@dataclass
class DecodeFigures:
    """The times per generated token, and the GPU memory that the generation needs.

    Attributes:
        cache_bytes: the size of the KV cache, or 0 without a cache.
        first_token: the time to first token in several generations.
        token_times_ms: the time of each token of one generation.
        between_tokens, between_tokens_p95_ms: the inter-token latency after the first token.
        tokens_per_s: the throughput of all sequences after the first token.
    """

    peak_bytes: int | None = None
    weights_bytes: int | None = None
    cache_bytes: int | None = None
    first_token: Times | None = None
    token_times_ms: list[float] | None = None
    between_tokens: Times | None = None
    between_tokens_p95_ms: float | None = None
    tokens_per_s: float | None = None


TARGET = CaseTarget("profiling_targets.decoding", DecodeCase, DecodeFigures)


def read_latency_ms(row: AnyRow | None) -> float | None:
    """Returns the median inter-token latency in ms, or None if the row was not measured to its end."""
    return find_figure(row, "between_tokens.median_ms") if row and row.ok else None


def compute_speed_up(results: Results, row: AnyRow, **changes: Any) -> float | None:
    """Returns the inter-token latency of the row that differs only in ``changes`` ÷ the latency of this row."""
    return ratio(read_latency_ms(results.find_row(row, **changes)), read_latency_ms(row))


def _write_sentences(results: Results) -> Iterator[str]:
    rows = results.rows
    name, cached_rows = make_row_namer(rows), [row for row in rows if row.case.cache]
    if gains := [(gain, row) for row in cached_rows if (gain := compute_speed_up(results, row, cache=False))]:
        _, best_row = max(gains, key=lambda gain: gain[0])
        times = [
            format_ms(ms) for row in (best_row, results.find_row(best_row, cache=False)) if (ms := read_latency_ms(row))
        ]
        factors = format_factor_range(gain for gain, _ in gains)
        yield (
            f"The cache makes tokens after the first {factors} as fast: {name(best_row)} needs "
            f"{' per token with the cache and '.join(times)} without the cache."
        )
    latency_parts = {
        "prefill": [gain for row in cached_rows if (gain := results.speed_up(row, "first_token", attention="unfused"))],
        INTER_TOKEN_LATENCY: [
            gain for row in cached_rows if (gain := compute_speed_up(results, row, attention="unfused"))
        ],
    }
    if speed_ups := [f"{part} {format_factor_range(gains)}" for part, gains in latency_parts.items() if gains]:
        yield f"Speed-up of PyTorch's SDPA over unfused attention, with the cache: {', '.join(speed_ups)}."
    if rates := [(tokens, name(row)) for row in rows if row.ok and (tokens := row.figures.tokens_per_s)]:
        tokens, configuration = max(rates)
        yield f"The highest throughput is {tokens:,.0f} {TOKENS_PER_S} ({configuration})."


def _make_tables_and_charts(results: Results) -> Iterator[Block]:
    rows = results.rows
    yield make_rows_table(
        rows,
        "Time to first token (mean ± standard deviation), and inter-token latency (median, 95th percentile):",
        (f"{TTFT} ms", "ms", "first_token"),
        ("inter-token ms", "ms", read_latency_ms),
        ("p95", "ms", "between_tokens_p95_ms"),
        (TOKENS_PER_S, "count", "tokens_per_s"),
        ("speed-up by the cache", "factor", lambda row: compute_speed_up(results, row, cache=False)),
        ("speed-up by SDPA", "factor", lambda row: compute_speed_up(results, row, attention="unfused")),
    )
    # The chart shows the model with the most measured rows. If several models have equally many, it shows the largest.
    measured_rows = [row for row in rows if row.figures.token_times_ms]
    group = make_row_namer(measured_rows, ["attention", "cache"])
    counts = Counter(map(group, measured_rows))
    for model in [model for model, count in counts.items() if count == max(counts.values())][-1:]:
        series = tuple((_name_variant(row), tuple(enumerate(row.figures.token_times_ms or [], 1)))
                       for row in measured_rows if group(row) == model)  # fmt: skip
        yield Lines("decode-token-times", f"Time of each token, {model}", series, "token", "ms", log_y=True)
    throughput = {(group(row), _name_variant(row)): row.figures.tokens_per_s for row in measured_rows}
    yield from make_bars("decode-throughput", "Throughput after prefill", throughput, "tokens/s")
    memory = make_rows_table(
        rows, "Peak memory, which includes weights and cache:",
        ("peak", "bytes", "peak_bytes"), ("weights", "bytes", "weights_bytes"), ("cache", "bytes", "cache_bytes"),
    )  # fmt: skip
    yield Details("Memory", (memory,))


def _name_variant(row: AnyRow) -> str:
    return f"{row.case.attention}, {'with' if row.case.cache else 'no'} cache"


BENCH = Bench(
    name="decode",
    title="decoding with and without a cache",
    summary="Measures decoding with and without a KV cache: time to first token and inter-token latency.",
    options=(
        list_option(DecodeCase, "model", ("small", "medium", "large"), ("small",), help="model sizes"),
        list_option(DecodeCase, "precision", ("fp32", "bf16"), ("fp32",)),
        list_option(DecodeCase, "attention", ATTENTION_IMPLEMENTATIONS),
        list_option(DecodeCase, "cache", (True, False)),
        *scalar_options(DecodeCase, "num_layers", "batch_size", "prompt_length", "cache_length", "tokens"),
        *scalar_options(DecodeCase, "warmup_tokens", "seed"),
    ),
    target=TARGET,
    conditions={
        "warm-up": "{warmup_tokens} tokens",
        "measured": "{tokens} tokens after a prompt of {prompt_length}, batch {batch_size}, cache of {cache_length}; "
        "TTFT five times",
        "synchronized": "after each token",
        "gradients": "not recorded (inference_mode)",
    },
    write_sentences=_write_sentences,
    make_tables_and_charts=_make_tables_and_charts,
    definitions=_DEFINITIONS,
)
