"""What making tokens must compute, move and keep: the claims that the physics check tests.

B sequences, S tokens, d = d_model, L layers; a pass is over new tokens behind earlier ones that a cache holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nsys_analyzer.analysis.flops import feed_forward_flops, head_flops, projection_flops
from nsys_analyzer.analysis.mantissa import PRECISION_BY_BITS
from nsys_analyzer.analysis.models import ModelSize, find_model
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.benches.physics import Rate, Residence

#: So many times the time of a length that was seen before says that something is prepared for each new one.
_COLD = 1.5


def name_of(row: Row) -> str:
    """What a row is called in a sentence."""
    return f"{model_of(row)}, {row.case['attention']}, {'with' if row.case['cache'] else 'without'} the cache"


def model_of(row: Row) -> str:
    """The row's model and precision."""
    layers = f" ({row.case['num_layers']} layers)" if row.case["num_layers"] else ""
    return f"{row.case['model']}{layers} {row.case['precision']}"


def warm_times(row: Row) -> tuple[float, ...]:
    """Milliseconds of the tokens after the first that are warm, where the others are far slower; else none.

    Without a cache each token is a pass over a new length: one is warm that the warm-up had seen.
    """
    times, seen = row.figures.get("token_times_ms") or (), row.case["warmup_tokens"]
    if row.case["cache"] or not 2 <= seen < len(times):
        return ()
    warm, cold = times[1:seen], times[seen:]
    return tuple(warm) if statistics.median(cold) >= _COLD * statistics.median(warm) else ()


def next_ms(row: Row) -> float | None:
    """The median time from one token to the next, of warm lengths where others are cold; None where it is missing."""
    warm = warm_times(row)
    return statistics.median(warm) if warm else row.figures.get("between_tokens_median_ms")


def tokens_per_s(row: Row) -> float | None:
    """Tokens after the first in a second, of all sequences, and of warm lengths where others are cold."""
    warm = warm_times(row)
    return row.case["batch_size"] / statistics.fmean(warm) * 1e3 if warm else row.figures.get("tokens_per_s")


def size_of(row: Row) -> ModelSize:
    """The dimensions of the row's model."""
    size = find_model(row.case["model"])
    return replace(size, num_layers=row.case["num_layers"] or size.num_layers)


def pass_flops(row: Row, new: int, before: int) -> float:
    """FLOPs of one pass over ``new`` tokens behind ``before`` others, the head at the last token alone.

    Unfused attention computes every score and masks afterwards: 4·B·new·(before + new)·d·L, two products. A fused one
    need not compute what is masked: at the least new·before + new·(new + 1) ÷ 2 of the scores.
    """
    size, batch = size_of(row), row.case["batch_size"]
    whole = row.case["attention"] == "unfused"
    scores = new * (before + new) if whole else new * before + new * (new + 1) / 2
    attention: float = 4 * batch * scores * size.d_model * size.num_layers
    layers = projection_flops(size, batch, new) + feed_forward_flops(size, batch, new)
    return attention + layers + head_flops(size, batch, 1)


def token_flops(row: Row) -> float:
    """FLOPs of a token after the first, on average over the generation, or over its warm lengths."""
    prompt, warm = row.case["prompt_length"], warm_times(row)
    tokens = len(warm) + 1 if warm else row.case["tokens"]
    lengths = range(prompt + 1, prompt + tokens)  # tokens that each of them sees
    passes = ((1, length - 1) if row.case["cache"] else (length, 0) for length in lengths)
    return statistics.fmean(pass_flops(row, new, before) for new, before in passes)


def token_bytes(row: Row) -> float:
    """The least bytes that a token after the first moves, on average: weights are read, and what the cache holds.

    Of the embedding a token reads a row, so it is left out: V·d of the weights. The cache holds keys and values,
    2·L·B·d for each position; without one nothing but the weights is counted.
    """
    size, case = size_of(row), row.case
    element = 2 if case["precision"] == "bf16" else 4
    weights: float = row.figures["weights_bytes"] - size.vocab_size * size.d_model * element
    if not case["cache"]:
        return weights
    positions = case["prompt_length"] + case["tokens"] / 2  # the mean of prompt + 1 to prompt + tokens - 1
    cached: float = 2 * size.num_layers * case["batch_size"] * size.d_model * element * positions
    return weights + cached


def bandwidth_share(results: Results, row: Row) -> float | None:
    """The bandwidth of a token after the first, as a share of what a large copy reached in the same run.

    None where that is unknown, or where the weights are so few that caches may hold them.
    """
    ceiling, moved = results.ceilings.get(row.case["precision"]), _next_token(row).memory_bytes
    if ceiling is None or moved is None or "copy_bytes_per_s" not in ceiling.figures:
        return None
    share: float = moved / row.figures["between_tokens_ms"] * 1e3 / ceiling.figures["copy_bytes_per_s"]
    return share


def rates(rows: Sequence[Row]) -> Iterator[Rate]:
    """FLOP/s of the first token, a pass over the prompt, and both rates of those after it."""
    for row in (row for row in rows if row.ok):
        flops = pass_flops(row, row.case["prompt_length"], 0)
        yield Rate(f"first token of {name_of(row)}", _precision(row), flops, None, row.figures["first_token_ms"])
        yield _next_token(row)


def _next_token(row: Row) -> Rate:
    work, warm = (token_flops(row), token_bytes(row)), warm_times(row)
    ms = statistics.fmean(warm) if warm else row.figures["between_tokens_ms"]
    return Rate(f"next token of {name_of(row)}", _precision(row), *work, ms)


def _precision(row: Row) -> str:
    """That which products really had."""
    return PRECISION_BY_BITS.get(row.figures["product_bits"], str(row.case["precision"]))


def residences(rows: Sequence[Row]) -> tuple[Residence, ...]:
    """The tightest memory with the cache and without: the peak against weights and cache."""
    tightest: dict[bool, Residence] = {}
    for row in (row for row in rows if row.ok):
        cached, figures = row.case["cache"], row.figures
        least = figures["weights_bytes"] + figures["cache_bytes"]
        one = Residence(name_of(row), figures["peak_bytes"], least, "weights, cache" if cached else "weights")
        known = tightest.get(cached)
        if known is None or one.measured_bytes * known.must_live_bytes < known.measured_bytes * one.must_live_bytes:
            tightest[cached] = one
    return tuple(tightest.values())
