"""Making tokens with a cache of keys and values and without: time to first token, and inter-token latency.

B sequences, S tokens, d = d_model, L layers; a pass is over new tokens behind earlier ones that a cache holds.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TypeAlias

from nsys_analyzer.analysis.transformer.costs import (
    ELEMENT_BYTES,
    cached_bytes,
    feed_forward_flops,
    head_flops,
    projection_flops,
)
from nsys_analyzer.configuration import ATTENTIONS, PRECISIONS
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import Bench, Results, Settings, grid, option, several, single
from nsys_analyzer.experiments.section import (
    MinimumMemory,
    Rate,
    bars,
    each,
    endings,
    formatted,
    mean_ms,
    precision_found,
    ratio,
    section,
    span,
    spread,
    unsteady,
)
from nsys_analyzer.experiments.steps import OfModel, models
from nsys_analyzer.report.model import Details, Figure, Lines, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import INTER_TOKEN, LEAST_READ, TOKENS_PER_S, TTFT, milliseconds
from nsys_analyzer.runs.rows import CaseTarget, Row, Task, Times
from nsys_analyzer.text import Words, phrase

#: Lengths are cold that take so many times as long as those that the warm-up has seen.
_COLD = 1.5
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


def _cases(settings: Settings) -> Iterator[Task[DecodeCase]]:
    def label(case: DecodeCase) -> str:
        return f"{case.model}, {case.precision}, {case.attention}, cache {'on' if case.cache else 'off'}"

    return grid(TARGET, settings, label, model=models(settings))


def _section(results: Results) -> Section:
    rows = results.rows_of(TARGET)
    groups = _groups_of(rows)
    speed_ups = table(_SPEED_UPS, groups, "Speed-ups, by the cache and by SDPA instead of unfused attention:")
    return section(
        "decode",
        "decoding with and without a cache",
        results,
        rows,
        name_of,
        answers=(*_answers(rows, groups), *endings(rows, name_of)),
        warmup=f"{each(rows, 'warmup_tokens')} tokens, after the check of the logits",
        measured=f"{each(rows, 'tokens')} tokens behind a prompt of {each(rows, 'prompt_length')}, batch "
        f"{each(rows, 'batch_size')}, cache of {each(rows, 'cache_length')}; TTFT five times",
        synchronized="after each token",
        gradients="none (inference_mode)",
        warnings=_warnings(rows),
        blocks=(
            table(_TIMES, rows, _TIMES_CAPTION),
            *([speed_ups] if speed_ups.rows else []),
            *_figures(groups),
            Details("Check of the logits, and memory", (table(_CHECK, rows, _CHECK_CAPTION, names=3),)),
        ),
        definitions=_DEFINITIONS,
        rates=rates(rows),
        memory=minimum_memory(rows),
    )


def name_of(row: DecodeRow) -> str:
    """Returns model, precision, attention and cache, for a sentence."""
    return f"{model_of(row)}, {row.case.attention}, {'with' if row.case.cache else 'without'} the cache"


def model_of(row: DecodeRow) -> str:
    """Returns the row's model and precision."""
    layers = f" ({row.case.num_layers} layers)" if row.case.num_layers else ""
    return f"{row.case.model}{layers} {row.case.precision}"


def cold_lengths(row: DecodeRow) -> tuple[float, float] | None:
    """Returns the median ms of a token at lengths that the warm-up had seen and at others, where these are far slower.

    Without a cache each token is a pass over a new length, for which kernels may have to be prepared.
    """
    times, seen = row.figures.token_times_ms or [], row.case.warmup_tokens
    if row.case.cache or not 2 <= seen < len(times):
        return None
    warm, cold = statistics.median(times[1:seen]), statistics.median(times[seen:])
    return (warm, cold) if cold >= _COLD * warm else None


def first_ms(row: DecodeRow) -> float | None:
    """Returns the mean time to first token."""
    return mean_ms(row, "first_token")


def next_ms(row: DecodeRow) -> float | None:
    """Returns the median inter-token latency, None where lengths were cold."""
    return row.figures.between_tokens.median_ms if row.figures.between_tokens and not cold_lengths(row) else None


def tokens_per_s(row: DecodeRow) -> float | None:
    """Returns tokens after the first in a second, of all sequences; None where lengths were cold."""
    return None if cold_lengths(row) else row.figures.tokens_per_s


def pass_flops(row: DecodeRow, new: int, before: int) -> float:
    """Returns FLOPs of one pass over ``new`` tokens behind ``before`` others, the head at the last token alone.

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
    """Returns FLOPs of a token after the first, on average over the generation."""
    lengths = range(row.case.prompt_length + 1, row.case.prompt_length + row.case.tokens)  # tokens that each sees
    passes = ((1, length - 1) if row.case.cache else (length, 0) for length in lengths)
    return statistics.fmean(pass_flops(row, new, before) for new, before in passes)


def token_bytes(row: DecodeRow) -> float | None:
    """Returns the least bytes that a token after the first moves, on average: the weights, and what the cache holds.

    Of the embedding, V·d of the weights, a token reads a row, so it is left out. The cache holds keys and values,
    2·L·B·d for each position.
    """
    case, size = row.case, row.case.size
    element = ELEMENT_BYTES[case.precision]
    if row.figures.weights_bytes is None:
        return None
    weights = row.figures.weights_bytes - size.vocab_size * size.d_model * element
    if not case.cache:
        return weights
    positions = case.prompt_length + case.tokens / 2  # the mean of prompt + 1 to prompt + tokens - 1
    return weights + cached_bytes(size, case.batch_size * positions, element)


def rates(rows: Sequence[DecodeRow]) -> Iterator[Rate]:
    """Yields FLOP/s of prefill, a pass over the prompt, and FLOP/s and bytes/s of the tokens after it."""
    for row in (row for row in rows if row.ok):
        precision = precision_found(row.figures.product_bits, row.case.precision)
        if ms := first_ms(row):
            flops = pass_flops(row, row.case.prompt_length, 0)
            yield Rate(f"prefill of {name_of(row)}", precision, flops, None, ms)
        if times := row.figures.between_tokens:
            yield Rate(f"decode of {name_of(row)}", precision, token_flops(row), token_bytes(row), times.ms)


def minimum_memory(rows: Sequence[DecodeRow]) -> Iterator[tuple[bool, MinimumMemory]]:
    """Yields the peak of each row against weights and cache, by whether there is a cache."""
    for row in (row for row in rows if row.ok):
        figures, parts = row.figures, "weights, cache" if row.case.cache else "weights"
        if figures.peak_bytes and figures.weights_bytes:
            least = figures.weights_bytes + (figures.cache_bytes or 0)
            yield row.case.cache, MinimumMemory(name_of(row), figures.peak_bytes, least, parts)


#: Attention, and whether there is a cache.
Variant = tuple[str, bool]


@dataclass(frozen=True)
class Group:
    """The rows of one model and precision."""

    name: str
    rows: Mapping[Variant, DecodeRow]

    def speed_up(self, ms: Callable[[DecodeRow], float | None], slow: Variant, fast: Variant) -> float | None:
        """Returns time of one variant ÷ that of the other; None where one was not measured to its end."""
        return ratio(*(ms(row) if (row := self.rows.get(variant)) and row.ok else None for variant in (slow, fast)))

    def cache_speed_up(self, attention: str) -> float | None:
        """Returns the inter-token latency without the cache ÷ that with it."""
        return self.speed_up(next_ms, (attention, False), (attention, True))

    def sdpa_speed_up(self, ms: Callable[[DecodeRow], float | None], cache: bool) -> float | None:
        """Returns a time of unfused attention ÷ that of SDPA."""
        return self.speed_up(ms, ("unfused", cache), ("sdpa", cache))


def _groups_of(rows: Sequence[DecodeRow]) -> list[Group]:
    groups: dict[str, dict[Variant, DecodeRow]] = {}
    for row in rows:
        groups.setdefault(model_of(row), {})[row.case.attention, row.case.cache] = row
    return [Group(name, variants) for name, variants in groups.items()]


def _answers(rows: Sequence[DecodeRow], groups: Sequence[Group]) -> Iterator[str]:
    gains = [
        (gain, group.rows[attention, True], group.rows[attention, False])
        for group in groups
        for attention in ATTENTIONS
        if (gain := group.cache_speed_up(attention))
    ]
    if gains:
        _, cached, without = max(gains, key=lambda gain: gain[0])
        yield (
            f"With the cache inter-token latency is {span([gain for gain, *_ in gains], 'factor')} shorter: "
            f"{model_of(cached)} with {cached.case.attention} attention needs {milliseconds(next_ms(cached))} a "
            f"token with it, {milliseconds(next_ms(without))} without."
        )
    parts = []
    for words, ms in (("prefill", first_ms), (INTER_TOKEN, next_ms)):
        if known := [gain for group in groups if (gain := group.sdpa_speed_up(ms, True))]:
            parts.append(f"{words} {span(known, 'factor')}")
    if parts:
        yield f"With the cache, unfused attention ÷ PyTorch's SDPA, in time: {', '.join(parts)}."
    if made := [(tokens, name_of(row)) for row in rows if row.ok and (tokens := tokens_per_s(row))]:
        tokens, name = max(made)
        yield f"The highest throughput is {tokens:,.0f} {TOKENS_PER_S} ({name})."


def _warnings(rows: Sequence[DecodeRow]) -> Iterator[Words]:
    """Yields tokens of uneven times, and lengths that the warm-up had not seen."""
    steady = [(row, row.figures.between_tokens) for row in rows if row.ok and not cold_lengths(row)]
    yield from unsteady("tokens", {name_of(row): times.cv or 0 for row, times in steady if times})
    for row in rows:
        if medians := cold_lengths(row):
            yield phrase(
                "**Lengths seen for the first time**, {}: a token takes {} at a length that the warm-up of {} tokens "
                "had seen, {} at another. Its inter-token latency, tokens/s and speed-ups are left "
                "out; as many `--warmup-tokens` as `--tokens` make all lengths warm.",
                name_of(row), milliseconds(medians[0]), row.case.warmup_tokens, milliseconds(medians[1]),
            )  # fmt: skip


_NAMES: tuple[Field[DecodeRow], ...] = (
    Field("model", "text", model_of),
    Field("attention", "text", lambda row: row.case.attention),
    Field("cache", "text", lambda row: "yes" if row.case.cache else "no"),
)
_TIMES: tuple[Field[DecodeRow], ...] = (
    *_NAMES,
    Field(f"{TTFT} ms", "ms", lambda row: spread(row.figures.first_token)),
    Field("inter-token ms", "ms", next_ms),
    Field("p95", "ms", lambda row: None if cold_lengths(row) else row.figures.between_tokens_p95_ms),
    Field(TOKENS_PER_S, "count", tokens_per_s),
    Field("status", "text", lambda row: row.status),
)
_TIMES_CAPTION = "Time to first token (mean ± standard deviation), and inter-token latency (median, 95th percentile):"
_CHECK: tuple[Field[DecodeRow], ...] = (
    *_NAMES,
    Field("largest error", "text", lambda row: formatted(row.figures.max_error, ".1e")),
    Field("allowed", "text", lambda row: formatted(row.figures.tolerance, ".1e")),
    Field("same tokens", "percent", lambda row: row.figures.same_tokens),
    Field("peak", "bytes", lambda row: row.figures.peak_bytes),
    Field("weights", "bytes", lambda row: row.figures.weights_bytes),
    Field("cache", "bytes", lambda row: row.figures.cache_bytes),
)
_CHECK_CAPTION = (
    "Logits with the cache against one pass over the whole sequence: the largest difference, and the share of "
    "positions with the same likeliest token. Peak memory, and in it weights and cache:"
)
_SPEED_UPS: tuple[Field[Group], ...] = (
    Field("model", "text", lambda group: group.name),
    *(Field(f"cache: {attention}", "factor", methodcaller("cache_speed_up", attention)) for attention in ATTENTIONS),
    Field("sdpa: TTFT", "factor", lambda group: group.sdpa_speed_up(first_ms, True)),
    Field("sdpa: inter-token, cache", "factor", lambda group: group.sdpa_speed_up(next_ms, True)),
    Field("sdpa: inter-token, no cache", "factor", lambda group: group.sdpa_speed_up(next_ms, False)),
)


def _figures(groups: Sequence[Group]) -> Iterator[Figure]:
    """Yields each token's time of the model with the most measured rows, the largest of those; and tokens/s of all."""
    measured = {
        (group.name, f"{row.case.attention}, {'with' if row.case.cache else 'no'} cache"): row
        for group in groups
        for row in group.rows.values()
        if row.figures.token_times_ms
    }
    counts = Counter(model for model, _ in measured)
    for shown in [model for model, count in counts.items() if count == max(counts.values())][-1:]:
        times = {name: row.figures.token_times_ms or [] for (model, name), row in measured.items() if model == shown}
        series = tuple((name, tuple(enumerate(values, 1))) for name, values in times.items())
        yield Lines("decode-token-times", f"Time of each token, {shown}", series, "token", "ms", log_y=True)
    throughput = {bar: tokens_per_s(row) for bar, row in measured.items()}
    yield from bars("decode-throughput", "Throughput after prefill", throughput, "tokens/s")


BENCH = Bench(
    "decode",
    "Decoding with and without a cache of keys and values: time to the first token, and between tokens.",
    (
        several(DecodeCase, "model", ("small", "medium", "large"), ("small",), help="sizes"),
        several(DecodeCase, "precision", ("fp32", "bf16"), ("fp32",)),
        several(DecodeCase, "attention", ATTENTIONS),
        several(DecodeCase, "cache", (True, False)),
        *single(DecodeCase, "num_layers", "batch_size", "prompt_length", "cache_length", "tokens"),
        *single(DecodeCase, "warmup_tokens", "seed"),
    ),
    lambda settings: tuple(_cases(settings)),
    _section,
    targets=(TARGET,),
)
