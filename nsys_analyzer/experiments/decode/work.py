"""Decoding: its case and figures, and what making tokens must compute, move and keep.

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
from nsys_analyzer.experiments.ceilings import precision_found
from nsys_analyzer.experiments.limits import MinimumMemory, Rate, tightest
from nsys_analyzer.experiments.model import CaseTarget, Results, Row, Times, option

ATTENTIONS = ("unfused", "sdpa")
#: So many times the time of a length that was seen before says that something is prepared for each new one.
_COLD = 1.5


@dataclass(frozen=True)
class DecodeCase:
    """One model, and how its tokens are made.

    Raises:
        ConfigurationError: lengths that do not go together.

    """

    device: str
    model: str = option("small", "small, medium, large, xl, 2.7B, xl-2026 or 10B")
    num_layers: int = option(0, "in place of the model's; 0 is its own", least=0, cpu=2)
    batch_size: int = option(16, "batch size", cpu=2)
    prompt_length: int = option(1024, "tokens of each sequence that are there before the first", cpu=32)
    cache_length: int = option(2048, "positions that the cache has room for", cpu=64)
    tokens: int = option(100, "to make, the first among them", least=3, cpu=10)
    warmup_tokens: int = option(100, "made before anything is timed", cpu=10)
    precision: str = option("fp32", "bf16 is that of weights, activations and cache", ("fp32", "tf32", "bf16"))
    attention: str = option("unfused", "unfused (naive), or PyTorch's own", ATTENTIONS)
    cache: bool = option(True, "keep keys and values; without, each token is a pass over the whole sequence")
    seed: int = option(0, "of weights and tokens", least=0)

    def __post_init__(self) -> None:
        if self.tokens < 3 or self.warmup_tokens < 1 or self.prompt_length < 1:
            raise ConfigurationError("tokens must be at least 3, warmup_tokens and prompt_length at least 1")
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
        peak_bytes: the most memory that tensors took at once.
        weights_bytes: of the model.
        cache_bytes: room for keys and values; 0 without a cache.
        product_bits: bits of the mantissa that matmuls keep of their operands.
        max_error, largest_logit, tolerance: the largest difference of logits with the cache from those of one pass
            over the whole sequence, the largest logit, and the difference that is allowed.
        same_tokens: the share of positions with the same likeliest token.
        first_token: of a generation, several times.
        token_times_ms: each token of one generation.
        between_tokens: of the tokens after the first.
        between_tokens_p95_ms: their 95th percentile.
        tokens_per_s: of the tokens after the first, of all sequences.
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
    """What a row is called in a sentence."""
    return f"{model_of(row)}, {row.case.attention}, {'with' if row.case.cache else 'without'} the cache"


def model_of(row: DecodeRow) -> str:
    """The row's model and precision."""
    layers = f" ({row.case.num_layers} layers)" if row.case.num_layers else ""
    return f"{row.case.model}{layers} {row.case.precision}"


def warm_times(row: DecodeRow) -> tuple[float, ...]:
    """Milliseconds of the tokens after the first that are warm, where the others are far slower; else none.

    Without a cache each token is a pass over a new length: one is warm that the warm-up had seen.
    """
    times, seen = row.figures.token_times_ms or [], row.case.warmup_tokens
    if row.case.cache or not 2 <= seen < len(times):
        return ()
    warm, cold = times[1:seen], times[seen:]
    return tuple(warm) if statistics.median(cold) >= _COLD * statistics.median(warm) else ()


def next_ms(row: DecodeRow) -> float | None:
    """The median time from one token to the next, of warm lengths where others are cold; None where it is missing."""
    if warm := warm_times(row):
        return statistics.median(warm)
    return row.figures.between_tokens.median_ms if row.figures.between_tokens else None


def tokens_per_s(row: DecodeRow) -> float | None:
    """Tokens after the first in a second, of all sequences, and of warm lengths where others are cold."""
    warm = warm_times(row)
    return row.case.batch_size / statistics.fmean(warm) * 1e3 if warm else row.figures.tokens_per_s


def pass_flops(row: DecodeRow, new: int, before: int) -> float:
    """FLOPs of one pass over ``new`` tokens behind ``before`` others, the head at the last token alone.

    Unfused attention computes every score and masks afterwards: 4·B·new·(before + new)·d·L, two products. A fused one
    need not compute what is masked: at the least new·before + new·(new + 1) ÷ 2 of the scores.
    """
    size, batch = row.case.size, row.case.batch_size
    whole = row.case.attention == "unfused"
    scores = new * (before + new) if whole else new * before + new * (new + 1) / 2
    attention: float = 4 * batch * scores * size.d_model * size.num_layers
    layers = projection_flops(size, batch, new) + feed_forward_flops(size, batch, new)
    return attention + layers + head_flops(size, batch, 1)


def token_flops(row: DecodeRow) -> float:
    """FLOPs of a token after the first, on average over the generation, or over its warm lengths."""
    prompt, warm = row.case.prompt_length, warm_times(row)
    tokens = len(warm) + 1 if warm else row.case.tokens
    lengths = range(prompt + 1, prompt + tokens)  # tokens that each of them sees
    passes = ((1, length - 1) if row.case.cache else (length, 0) for length in lengths)
    return statistics.fmean(pass_flops(row, new, before) for new, before in passes)


def token_bytes(row: DecodeRow) -> float | None:
    """The least bytes that a token after the first moves, on average: weights are read, and what the cache holds.

    Of the embedding a token reads a row, so it is left out: V·d of the weights. The cache holds keys and values,
    2·L·B·d for each position; without one nothing but the weights is counted.
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


def bandwidth_share(results: Results, row: DecodeRow) -> float | None:
    """The bandwidth of a token after the first, as a share of what a large copy reached in the same run.

    None where that is unknown, or where the weights are so few that caches may hold them.
    """
    ceiling, times, token = results.ceilings.get(row.case.precision), row.figures.between_tokens, _next_token(row)
    reached = ceiling.figures.copy_bytes_per_s if ceiling else None
    if not reached or not times or token is None or token.memory_bytes is None:
        return None
    return token.memory_bytes / times.ms * 1e3 / reached


def rates(rows: Sequence[DecodeRow]) -> Iterator[Rate]:
    """FLOP/s of the first token, a pass over the prompt, and both rates of those after it."""
    for row in (row for row in rows if row.ok):
        if first := row.figures.first_token:
            flops = pass_flops(row, row.case.prompt_length, 0)
            yield Rate(f"first token of {name_of(row)}", _precision(row), flops, None, first.ms)
        if token := _next_token(row):
            yield token


def _next_token(row: DecodeRow) -> Rate | None:
    warm, times = warm_times(row), row.figures.between_tokens
    if times is None:
        return None
    ms = statistics.fmean(warm) if warm else times.ms
    return Rate(f"next token of {name_of(row)}", _precision(row), token_flops(row), token_bytes(row), ms)


def _precision(row: DecodeRow) -> str:
    """That which matmuls really had."""
    return precision_found(row.figures.product_bits, row.case.precision)


def minimum_memory(rows: Sequence[DecodeRow]) -> tuple[MinimumMemory, ...]:
    """The tightest memory with the cache and without: the peak against weights and cache."""
    return tightest(
        (row.case.cache, MinimumMemory(name_of(row), peak, weights + (row.figures.cache_bytes or 0),
                                       "weights, cache" if row.case.cache else "weights"))
        for row in rows
        if row.ok and (peak := row.figures.peak_bytes) and (weights := row.figures.weights_bytes)
    )  # fmt: skip
