"""Making tokens with a cache of keys and values and without: time to first token, and inter-token latency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from nsys_analyzer.experiments.decode import work
from nsys_analyzer.experiments.decode.work import ATTENTIONS, TARGET, DecodeCase, DecodeRow, model_of, name_of
from nsys_analyzer.experiments.model import Bench, Results, Settings, Task, grid, several, single
from nsys_analyzer.experiments.section import bars, each, endings, ratio, section, span, spread, unsteady
from nsys_analyzer.experiments.steps import models
from nsys_analyzer.report.model import Details, Figure, Lines, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds
from nsys_analyzer.text import Words, phrase

_OPTIONS = (
    several(DecodeCase, "model", ("small", "medium", "large"), ("small",), help="sizes"),
    several(DecodeCase, "precision", ("fp32", "bf16"), ("fp32",)),
    several(DecodeCase, "attention", ATTENTIONS),
    several(DecodeCase, "cache", (True, False)),
    *single(DecodeCase, "num_layers", "batch_size", "prompt_length", "cache_length", "tokens", "warmup_tokens", "seed"),
)
_DEFINITIONS = phrase(
    "*TTFT*, the time to first token, is prefill (a pass over the prompt) and the choice of the likeliest token; "
    "*inter-token* is the time from one token to the next, by Python's clock. *tokens/s* counts the tokens after the "
    "first, of all sequences. With the cache a token is a pass over that token alone, which reads the keys and values "
    "of those before it; without, over the whole sequence. *bf16* is that of weights, activations and cache, not "
    "autocast. The least memory traffic of a token is every weight but the embedding, and what the cache holds."
)


def _cases(settings: Settings) -> Iterator[Task[DecodeCase]]:
    return grid(
        TARGET, settings, _label, model=models(settings), precision=settings["precision"],
        attention=settings["attention"], cache=settings["cache"],
    )  # fmt: skip


def _label(case: DecodeCase) -> str:
    return f"{case.model}, {case.precision}, {case.attention}, cache {'on' if case.cache else 'off'}"


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
        rates=work.rates(rows),
        memory=work.minimum_memory(rows),
    )


#: Attention, and whether there is a cache.
Variant = tuple[str, bool]


@dataclass(frozen=True)
class Group:
    """The rows of one model and precision."""

    name: str
    rows: Mapping[Variant, DecodeRow]

    def speed_up(self, ms: Callable[[DecodeRow], float | None], slow: Variant, fast: Variant) -> float | None:
        """Time of one variant ÷ that of the other; None where one was not measured to its end."""
        times = [ms(row) if (row := self.rows.get(variant)) and row.ok else None for variant in (slow, fast)]
        return ratio(*times)


def _groups_of(rows: Sequence[DecodeRow]) -> list[Group]:
    groups: dict[str, dict[Variant, DecodeRow]] = {}
    for row in rows:
        groups.setdefault(model_of(row), {})[row.case.attention, row.case.cache] = row
    return [Group(name, variants) for name, variants in groups.items()]


def _cache_speed_up(attention: str, group: Group) -> float | None:
    return group.speed_up(work.next_ms, (attention, False), (attention, True))


def _sdpa_speed_up(ms: Callable[[DecodeRow], float | None], cache: bool, group: Group) -> float | None:
    return group.speed_up(ms, ("unfused", cache), ("sdpa", cache))


def _answers(rows: Sequence[DecodeRow], groups: Sequence[Group]) -> Iterator[str]:
    gains = [
        (gain, group.rows[attention, True], group.rows[attention, False])
        for group in groups
        for attention in ATTENTIONS
        if (gain := _cache_speed_up(attention, group))
    ]
    if gains:
        _, cached, without = max(gains, key=lambda gain: gain[0])
        yield (
            f"With the cache inter-token latency is {span([gain for gain, *_ in gains], 'factor')} shorter: "
            f"{model_of(cached)} with {cached.case.attention} attention needs {milliseconds(work.next_ms(cached))} a "
            f"token with it, {milliseconds(work.next_ms(without))} without."
        )
    parts = []
    for words, ms in (("prefill", work.first_ms), ("inter-token latency", work.next_ms)):
        if known := [gain for group in groups if (gain := _sdpa_speed_up(ms, True, group))]:
            parts.append(f"{words} {span(known, 'factor')}")
    if parts:
        yield f"With the cache, unfused attention ÷ PyTorch's SDPA, in time: {', '.join(parts)}."
    if made := [(tokens, name_of(row)) for row in rows if row.ok and (tokens := work.tokens_per_s(row))]:
        tokens, name = max(made)
        yield f"The highest throughput is {tokens:,.0f} tokens/s ({name})."


def _warnings(rows: Sequence[DecodeRow]) -> Iterator[Words]:
    """Tokens of uneven times, and lengths that the warm-up had not seen."""
    steady = [(row, row.figures.between_tokens) for row in rows if row.ok and not work.cold_lengths(row)]
    yield from unsteady("tokens", {name_of(row): times.cv or 0 for row, times in steady if times})
    for row in rows:
        if medians := work.cold_lengths(row):
            yield phrase(
                "**Lengths seen for the first time**, {}: a token takes {} at a length that the warm-up of {} tokens "
                "had seen, {} at another. Its inter-token latency, tokens/s and speed-ups are left "
                "out; as many `--warmup-tokens` as `--tokens` make all lengths warm.",
                name_of(row), milliseconds(medians[0]), row.case.warmup_tokens, milliseconds(medians[1]),
            )  # fmt: skip


def _error(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"


_NAMES: tuple[Field[DecodeRow], ...] = (
    Field("model", "text", model_of),
    Field("attention", "text", lambda row: row.case.attention),
    Field("cache", "text", lambda row: "yes" if row.case.cache else "no"),
)
_TIMES: tuple[Field[DecodeRow], ...] = (
    *_NAMES,
    Field("TTFT ms", "ms", lambda row: spread(row.figures.first_token)),
    Field("inter-token ms", "ms", work.next_ms),
    Field("p95", "ms", lambda row: None if work.cold_lengths(row) else row.figures.between_tokens_p95_ms),
    Field("tokens/s", "count", work.tokens_per_s),
    Field("status", "text", lambda row: row.status),
)
_TIMES_CAPTION = "Time to first token (mean ± standard deviation), and inter-token latency (median, 95th percentile):"
_CHECK: tuple[Field[DecodeRow], ...] = (
    *_NAMES,
    Field("largest error", "text", lambda row: _error(row.figures.max_error)),
    Field("allowed", "text", lambda row: _error(row.figures.tolerance)),
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
    Field("model", "text", lambda one: one.name),
    *(Field(f"cache: {attention}", "factor", partial(_cache_speed_up, attention)) for attention in ATTENTIONS),
    Field("sdpa: TTFT", "factor", partial(_sdpa_speed_up, work.first_ms, True)),
    Field("sdpa: inter-token, cache", "factor", partial(_sdpa_speed_up, work.next_ms, True)),
    Field("sdpa: inter-token, no cache", "factor", partial(_sdpa_speed_up, work.next_ms, False)),
)


def _figures(groups: Sequence[Group]) -> Iterator[Figure]:
    """Each token's time of the model with the most measured rows, the largest of those; and tokens/s of all."""
    measured = {
        (group.name, f"{row.case.attention}, {'with' if row.case.cache else 'no'} cache"): row
        for group in groups
        for row in group.rows.values()
        if row.figures.token_times_ms
    }
    counts = Counter(model for model, _ in measured)
    for shown in [model for model, count in counts.items() if count == max(counts.values())][-1:]:
        times = {name: one.figures.token_times_ms or [] for (model, name), one in measured.items() if model == shown}
        series = tuple((name, tuple(enumerate(values, 1))) for name, values in times.items())
        yield Lines("decode-token-times", f"Time of each token, {shown}", series, "token", "ms", log_y=True)
    throughput = {bar: work.tokens_per_s(one) for bar, one in measured.items()}
    yield from bars("decode-throughput", "Throughput after prefill", throughput, "tokens/s")


BENCH = Bench(
    "decode",
    "Decoding with and without a cache of keys and values: time to the first token, and between tokens.",
    _OPTIONS,
    lambda settings: tuple(_cases(settings)),
    _section,
    precisions=lambda settings: settings["precision"],
    targets=(TARGET,),
)
