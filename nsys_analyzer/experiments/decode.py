"""Making tokens with a cache of keys and values and without: time to first token, and inter-token latency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from nsys_analyzer.configuration import ATTENTIONS, PRECISIONS
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import AnyRow, Bench, Results, figure, option, ratio, several, single
from nsys_analyzer.experiments.section import bars, namer, rows_table, span
from nsys_analyzer.experiments.steps import OfModel
from nsys_analyzer.inputs.rows import CaseTarget, Times
from nsys_analyzer.report.model import Block, Details, Lines
from nsys_analyzer.report.units import INTER_TOKEN, LEAST_READ, TOKENS_PER_S, TTFT, format_precise_ms
from nsys_analyzer.text import phrase

_DEFINITIONS = phrase(
    "*TTFT*, the time to first token, is prefill (a pass over the prompt) and the choice of the likeliest token; "
    "*inter-token* is the time from one token to the next, by Python's clock. *tokens/s* counts the tokens after the "
    "first, of all sequences. With the cache a token is a pass over that token alone, which reads the keys and values "
    "of those before it; without, over the whole sequence. *bf16* is that of weights, activations and cache, not "
    "autocast. "
    "The least memory traffic of a token is {}.",
    LEAST_READ,
)


@dataclass(frozen=True)
class DecodeCase(OfModel):
    """One model, and how its tokens are made.

    Raises:
        ConfigurationError: the cache has no room for the tokens.
    """

    device: str
    model: str = option("small", "small, medium, large, xl, 2.7B, xl-2026 or 10B")
    num_layers: int = option(0, "0 is the model's own", least=0, cpu=2)
    batch_size: int = option(16, "batch size", cpu=2)
    prompt_length: int = option(1024, "tokens of each sequence before the first that is made", cpu=32)
    cache_length: int = option(2048, "positions that the cache has room for", cpu=64)
    tokens: int = option(100, "tokens to make, the first among them", least=3, cpu=10)
    warmup_tokens: int = option(100, "tokens made before anything is timed", cpu=10)
    precision: str = option("fp32", "bf16 is that of weights, activations and cache", PRECISIONS)
    attention: str = option("unfused", "unfused (naive), or PyTorch's SDPA", ATTENTIONS)
    cache: bool = option(True, "keep keys and values; without, each token is a pass over the whole sequence")
    seed: int = option(0, "of weights and tokens", least=0)

    def __post_init__(self) -> None:
        if self.cache_length < self.prompt_length + self.tokens - 1:  # the last token is never fed back
            raise ConfigurationError(f"{self.tokens} tokens more do not fit a cache of {self.cache_length}")


@dataclass
class DecodeFigures:
    """Times of tokens, and memory.

    Attributes:
        cache_bytes: room for keys and values; 0 without a cache.
        first_token: prefill and the choice of a token, of several generations.
        token_times_ms: each token of one generation.
        between_tokens, between_tokens_p95_ms, tokens_per_s: of the tokens after the first, of all sequences.
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


def next_ms(row: AnyRow | None) -> float | None:
    """Returns the median inter-token latency, None where it was not measured to its end."""
    return figure(row, "between_tokens.median_ms") if row and row.ok else None


def cache_gain(results: Results, row: AnyRow) -> float | None:
    """Returns the inter-token latency without the cache ÷ that with it."""
    return ratio(next_ms(results.beside(row, cache=False)), next_ms(row))


def sdpa_gain(results: Results, row: AnyRow) -> float | None:
    """Returns the inter-token latency of unfused attention ÷ that of SDPA."""
    return ratio(next_ms(results.beside(row, attention="unfused")), next_ms(row))


def _answers(results: Results) -> Iterator[str]:
    rows = results.rows
    name, cached = namer(rows), [row for row in rows if row.case.cache]
    if gains := [(gain, row) for row in cached if (gain := cache_gain(results, row))]:
        _, best = max(gains, key=lambda gain: gain[0])
        without = next_ms(results.beside(best, cache=False))
        yield (
            f"With the cache inter-token latency is {span(gain for gain, _ in gains)} shorter: {name(best)} needs "
            f"{format_precise_ms(next_ms(best))} a token, {format_precise_ms(without)} without."
        )
    parts = {
        "prefill": [gain for row in cached if (gain := results.gain(row, "first_token", attention="unfused"))],
        INTER_TOKEN: [gain for row in cached if (gain := sdpa_gain(results, row))],
    }
    if known := [f"{words} {span(gains)}" for words, gains in parts.items() if gains]:
        yield f"With the cache, unfused attention ÷ PyTorch's SDPA, in time: {', '.join(known)}."
    if made := [(tokens, name(row)) for row in rows if row.ok and (tokens := row.figures.tokens_per_s)]:
        tokens, which = max(made)
        yield f"The highest throughput is {tokens:,.0f} {TOKENS_PER_S} ({which})."


def _blocks(results: Results) -> Iterator[Block]:
    rows = results.rows
    yield rows_table(
        rows,
        "Time to first token (mean ± standard deviation), and inter-token latency (median, 95th percentile):",
        (f"{TTFT} ms", "ms", "first_token"),
        ("inter-token ms", "ms", next_ms),
        ("p95", "ms", "between_tokens_p95_ms"),
        (TOKENS_PER_S, "count", "tokens_per_s"),
        ("by the cache", "factor", lambda row: cache_gain(results, row)),
        ("by SDPA", "factor", lambda row: sdpa_gain(results, row)),
    )
    # Each token's time of the model with the most measured rows, the largest of those; and tokens/s of all.
    measured = [row for row in rows if row.figures.token_times_ms]
    group = namer(measured, ["attention", "cache"])
    counts = Counter(map(group, measured))
    for shown in [model for model, count in counts.items() if count == max(counts.values())][-1:]:
        series = tuple((_variant(row), tuple(enumerate(row.figures.token_times_ms or [], 1)))
                       for row in measured if group(row) == shown)  # fmt: skip
        yield Lines("decode-token-times", f"Time of each token, {shown}", series, "token", "ms", log_y=True)
    throughput = {(group(row), _variant(row)): row.figures.tokens_per_s for row in measured}
    yield from bars("decode-throughput", "Throughput after prefill", throughput, "tokens/s")
    memory = rows_table(
        rows, "Peak memory, and in it weights and cache:",
        ("peak", "bytes", "peak_bytes"), ("weights", "bytes", "weights_bytes"), ("cache", "bytes", "cache_bytes"),
    )  # fmt: skip
    yield Details("Memory", (memory,))


def _variant(row: AnyRow) -> str:
    return f"{row.case.attention}, {'with' if row.case.cache else 'no'} cache"


BENCH = Bench(
    name="decode",
    title="decoding with and without a cache",
    summary="Decoding with and without a cache of keys and values: time to the first token, and between tokens.",
    options=(
        several(DecodeCase, "model", ("small", "medium", "large"), ("small",), help="sizes"),
        several(DecodeCase, "precision", ("fp32", "bf16"), ("fp32",)),
        several(DecodeCase, "attention", ATTENTIONS),
        several(DecodeCase, "cache", (True, False)),
        *single(DecodeCase, "num_layers", "batch_size", "prompt_length", "cache_length", "tokens"),
        *single(DecodeCase, "warmup_tokens", "seed"),
    ),
    target=TARGET,
    how={
        "warm-up": "{warmup_tokens} tokens",
        "measured": "{tokens} tokens behind a prompt of {prompt_length}, batch {batch_size}, cache of {cache_length}; "
        "TTFT five times",
        "synchronized": "after each token",
        "gradients": "none (inference_mode)",
    },
    answers=_answers,
    blocks=_blocks,
    definitions=_DEFINITIONS,
)
