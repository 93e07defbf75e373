"""Decoding: its case and figures, and the least that making tokens computes, moves and keeps.

B sequences, S tokens, d = d_model, L layers; a pass is over new tokens behind earlier ones that a cache holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from nsys_analyzer.analysis.transformer.flops import feed_forward_flops, head_flops, projection_flops
from nsys_analyzer.analysis.transformer.models import ModelSize, find_model
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.limits import MinimumMemory, Rate, precision_found
from nsys_analyzer.experiments.model import CaseTarget, Row, Times, option

ATTENTIONS = ("unfused", "sdpa")
#: Lengths are cold that take so many times as long as those that the warm-up has seen.
_COLD = 1.5


@dataclass(frozen=True)
class DecodeCase:
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
    precision: str = option("fp32", "bf16 is that of weights, activations and cache", ("fp32", "tf32", "bf16"))
    attention: str = option("unfused", "unfused (naive), or PyTorch's SDPA", ATTENTIONS)
    cache: bool = option(True, "keep keys and values; without, each token is a pass over the whole sequence")
    seed: int = option(0, "of weights and tokens", least=0)

    def __post_init__(self) -> None:
        if self.cache_length < self.prompt_length + self.tokens - 1:  # the last token is never fed back
            raise ConfigurationError(f"{self.tokens} tokens more do not fit a cache of {self.cache_length}")

    @property
    def size(self) -> ModelSize:
        """The model's dimensions."""
        size = find_model(self.model)
        return replace(size, num_layers=self.num_layers or size.num_layers)


@dataclass
class DecodeFigures:
    """Times of tokens, memory, and the check of the logits.

    Attributes:
        cache_bytes: room for keys and values; 0 without a cache.
        product_bits: bits of the mantissa that matmuls keep of their operands.
        max_error, largest_logit, tolerance: the largest difference of logits with the cache from those of one pass
            over the whole sequence, the largest logit, and the difference that is allowed.
        same_tokens: the share of positions with the same likeliest token.
        first_token: prefill and the choice of a token, of several generations.
        token_times_ms: each token of one generation.
        between_tokens, between_tokens_p95_ms, tokens_per_s: of the tokens after the first, of all sequences.
        generation_tokens_per_s: of the whole generation.
    """

    peak_bytes: int | None = None
    weights_bytes: int | None = None
    cache_bytes: int | None = None
    product_bits: int | None = None
    max_error: float | None = None
    largest_logit: float | None = None
    tolerance: float | None = None
    same_tokens: float | None = None
    first_token: Times | None = None
    token_times_ms: list[float] | None = None
    between_tokens: Times | None = None
    between_tokens_p95_ms: float | None = None
    tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None


TARGET = CaseTarget("profiling_targets.decoding", DecodeCase, DecodeFigures)
DecodeRow: TypeAlias = Row[DecodeCase, DecodeFigures]


def name_of(row: DecodeRow) -> str:
    """Model, precision, attention and cache, for a sentence."""
    return f"{model_of(row)}, {row.case.attention}, {'with' if row.case.cache else 'without'} the cache"


def model_of(row: DecodeRow) -> str:
    """The row's model and precision."""
    layers = f" ({row.case.num_layers} layers)" if row.case.num_layers else ""
    return f"{row.case.model}{layers} {row.case.precision}"


def cold_lengths(row: DecodeRow) -> tuple[float, float] | None:
    """The median ms of a token at lengths that the warm-up had seen and at others, where these are far slower.

    Without a cache each token is a pass over a new length, for which kernels may have to be prepared.
    """
    times, seen = row.figures.token_times_ms or [], row.case.warmup_tokens
    if row.case.cache or not 2 <= seen < len(times):
        return None
    warm, cold = statistics.median(times[1:seen]), statistics.median(times[seen:])
    return (warm, cold) if cold >= _COLD * warm else None


def first_ms(row: DecodeRow) -> float | None:
    """The mean time to first token."""
    return row.figures.first_token.ms if row.figures.first_token else None


def next_ms(row: DecodeRow) -> float | None:
    """The median inter-token latency, None where lengths were cold."""
    return row.figures.between_tokens.median_ms if row.figures.between_tokens and not cold_lengths(row) else None


def tokens_per_s(row: DecodeRow) -> float | None:
    """Tokens after the first in a second, of all sequences; None where lengths were cold."""
    return None if cold_lengths(row) else row.figures.tokens_per_s


def pass_flops(row: DecodeRow, new: int, before: int) -> float:
    """FLOPs of one pass over ``new`` tokens behind ``before`` others, the head at the last token alone.

    Unfused attention computes every score and masks afterwards: 4·B·new·(before + new)·d·L, two matmuls. A fused one
    need not compute what is masked: at the least new·before + new·(new + 1) ÷ 2 of the scores.
    """
    size, batch = row.case.size, row.case.batch_size
    whole = row.case.attention == "unfused"
    scores = new * (before + new) if whole else new * before + new * (new + 1) / 2
    attention: float = 4 * batch * scores * size.d_model * size.num_layers
    layers = projection_flops(size, batch, new) + feed_forward_flops(size, batch, new)
    return attention + layers + head_flops(size, batch, 1)


def token_flops(row: DecodeRow) -> float:
    """FLOPs of a token after the first, on average over the generation."""
    lengths = range(row.case.prompt_length + 1, row.case.prompt_length + row.case.tokens)  # tokens that each sees
    passes = ((1, length - 1) if row.case.cache else (length, 0) for length in lengths)
    return statistics.fmean(pass_flops(row, new, before) for new, before in passes)


def token_bytes(row: DecodeRow) -> float | None:
    """The least bytes that a token after the first moves, on average: weights are read, and what the cache holds.

    Of the embedding, V·d of the weights, a token reads a row, so it is left out. The cache holds keys and values,
    2·L·B·d for each position.
    """
    case, size = row.case, row.case.size
    element = 2 if case.precision == "bf16" else 4
    if row.figures.weights_bytes is None:
        return None
    weights = row.figures.weights_bytes - size.vocab_size * size.d_model * element
    if not case.cache:
        return weights
    positions = case.prompt_length + case.tokens / 2  # the mean of prompt + 1 to prompt + tokens - 1
    return weights + 2 * size.num_layers * case.batch_size * size.d_model * element * positions


def rates(rows: Sequence[DecodeRow]) -> Iterator[Rate]:
    """FLOP/s of prefill, a pass over the prompt, and FLOP/s and bytes/s of the tokens after it."""
    for row in (row for row in rows if row.ok):
        precision = precision_found(row.figures.product_bits, row.case.precision)
        if ms := first_ms(row):
            flops = pass_flops(row, row.case.prompt_length, 0)
            yield Rate(f"prefill of {name_of(row)}", precision, flops, None, ms)
        if times := row.figures.between_tokens:
            yield Rate(f"decode of {name_of(row)}", precision, token_flops(row), token_bytes(row), times.ms)


def minimum_memory(rows: Sequence[DecodeRow]) -> Iterator[tuple[bool, MinimumMemory]]:
    """The peak of each row against weights and cache, by whether there is a cache."""
    for row in (row for row in rows if row.ok):
        figures, parts = row.figures, "weights, cache" if row.case.cache else "weights"
        if figures.peak_bytes and figures.weights_bytes:
            least = figures.weights_bytes + (figures.cache_bytes or 0)
            yield row.case.cache, MinimumMemory(name_of(row), figures.peak_bytes, least, parts)
