"""Making tokens with a cache of keys and values and without: the first token, and those after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from nsys_analyzer.experiments.decode.answers import (
    Group,
    answers,
    cold_lengths,
    first_speed_up,
    groups_of,
    next_speed_up,
    warm_note,
)
from nsys_analyzer.experiments.decode.work import (
    ATTENTIONS,
    TARGET,
    DecodeCase,
    DecodeRow,
    minimum_memory,
    model_of,
    name_of,
    next_ms,
    rates,
    tokens_per_s,
    warm_times,
)
from nsys_analyzer.experiments.limits import check_limits
from nsys_analyzer.experiments.model import Bench, Results, Settings, Task, grid, several, single
from nsys_analyzer.experiments.section import conditions, each, messages, precision_warnings, section, spread, unsteady
from nsys_analyzer.experiments.steps import models
from nsys_analyzer.report.model import Bars, Cell, Details, Figure, Lines, Section, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import phrase

_OPTIONS = (
    several(DecodeCase, "model", ("small", "medium", "large"), ("small",), "Sizes"),
    several(DecodeCase, "precision", ("fp32", "bf16"), ("fp32",)),
    several(DecodeCase, "attention", ATTENTIONS),
    several(DecodeCase, "cache", (True, False)),
    *(
        single(DecodeCase, name)
        for name in ("num_layers", "batch_size", "prompt_length", "cache_length", "tokens", "warmup_tokens", "seed")
    ),
)
#: A 95th percentile so often the median says that something else was at work.
_FAR = 1.5
_DEFINITIONS = phrase(
    "*First token* is the pass over the prompt and the choice of the likeliest token; *next* is the time from one "
    "token to the one after it, by Python's clock, of a whole generation. *tokens/s* counts those after the first, of "
    "all sequences. With the cache a token is a pass over that token alone, which reads the keys and values of those "
    "before it; without, over the whole sequence. The head runs at the last position alone in both. *bf16* is that of "
    "weights, activations and cache, not autocast. A token must read every weight but the embedding, and what the "
    "cache holds: that is its least memory traffic."
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
    groups = groups_of(rows)
    return section(
        "decode",
        "decoding with and without a cache",
        answers=answers(results, rows, groups),
        conditions=conditions(
            results,
            warmup=f"{each(rows, 'warmup_tokens')} tokens, after the check of the logits",
            steps=f"{each(rows, 'tokens')} tokens behind a prompt of {each(rows, 'prompt_length')}, batch "
            f"{each(rows, 'batch_size')}, cache of {each(rows, 'cache_length')}; the first token five times",
            synchronized="after each token",
            grad="none (inference_mode)",
        ),
        warnings=(
            *precision_warnings(results),
            *unsteady("tokens", _slow(rows), _FAR, "95th percentile ÷ median", "factor"),
            *cold_lengths(groups),
        ),
        blocks=(
            table(_TIMES, rows, _TIMES_CAPTION),
            *_speed_ups(groups),
            *_figures(groups),
            Details("Check of the logits, and memory", (table(_CHECK, rows, _CHECK_CAPTION, names=3),)),
        ),
        lacking=messages(rows, name_of),
        limits=check_limits(results, tuple(rates(rows)), minimum_memory(rows)),
        definitions=_DEFINITIONS,
    )


def _slow(rows: Sequence[DecodeRow]) -> dict[str, float]:
    """The 95th percentile ÷ median of each row; one with cold lengths is named by itself."""
    return {
        name_of(row): p95 / median
        for row in rows
        if row.ok and not warm_times(row) and (p95 := row.figures.between_tokens_p95_ms) and (median := next_ms(row))
    }


def _cache(row: DecodeRow) -> str:
    return "yes" if row.case.cache else "no"


def _status(row: DecodeRow) -> str:
    warm = len(warm_times(row))
    return f"{row.status}, next of {warm} warm lengths" if warm else row.status


_NAMES: tuple[Field[DecodeRow], ...] = (
    Field("model", "text", model_of),
    Field("attention", "text", lambda row: row.case.attention),
    Field("cache", "text", _cache),
)
_TIMES: tuple[Field[DecodeRow], ...] = (
    *_NAMES,
    Field("first token ms", "ms", lambda row: spread(row.figures.first_token)),
    Field("next ms", "ms", next_ms),
    Field("p95", "ms", lambda row: None if warm_times(row) else row.figures.between_tokens_p95_ms),
    Field("tokens/s", "count", tokens_per_s),
    Field("status", "text", _status),
)
_TIMES_CAPTION = "Time to the first token (mean and standard deviation), and between tokens (median, 95th percentile):"


def _error(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"


_CHECK: tuple[Field[DecodeRow], ...] = (
    *_NAMES,
    Field("largest error", "text", lambda row: _error(row.figures.max_error)),
    Field("allowed", "text", lambda row: _error(row.figures.tolerance)),
    Field("same tokens", "percent", lambda row: row.figures.same_tokens),
    Field("peak", "bytes", lambda row: row.figures.peak_bytes),
    Field("weights", "bytes", lambda row: row.figures.weights_bytes),
    Field("room", "bytes", lambda row: row.figures.cache_bytes),
)
_CHECK_CAPTION = (
    "Logits with the cache against one pass over the whole sequence: the largest difference, and the share of "
    "positions with the same likeliest token; the peak of memory, and in it the weights and the cache's room:"
)


@dataclass(frozen=True)
class _Named:
    """The rows of one model and precision."""

    name: str
    rows: Group


def _cache_speed_up(attention: str, one: _Named) -> Cell:
    return next_speed_up(one.rows, (attention, False), (attention, True))


def _sdpa_speed_up(cache: bool, one: _Named) -> Cell:
    return next_speed_up(one.rows, ("unfused", cache), ("sdpa", cache))


_SPEED_UPS: tuple[Field[_Named], ...] = (
    Field("model", "text", lambda one: one.name),
    *(Field(f"cache: {attention}", "factor", partial(_cache_speed_up, attention)) for attention in ATTENTIONS),
    Field("sdpa: first token", "factor", lambda one: first_speed_up(one.rows, ("unfused", True), ("sdpa", True))),
    Field("sdpa: next, cache", "factor", partial(_sdpa_speed_up, True)),
    Field("sdpa: next, no cache", "factor", partial(_sdpa_speed_up, False)),
)


def _speed_ups(groups: Mapping[str, Group]) -> Iterator[Table]:
    note = warm_note(row for group in groups.values() for row in group.values())
    same = "; of two without the cache, of the same lengths" if note else ""
    caption = f"Speed-ups: by the cache between tokens, and by PyTorch's own attention{note}{same}:"
    found = table(_SPEED_UPS, (_Named(*one) for one in groups.items()), caption)
    if found.rows:
        yield found


def _figures(groups: Mapping[str, Group]) -> Iterator[Figure]:
    """Each token's time of the model that was measured most completely, the largest of those; and tokens/s of all."""
    variants = [(attention, cache) for attention in ATTENTIONS for cache in (True, False)]
    words = {variant: f"{variant[0]}, {'with' if variant[1] else 'no'} cache" for variant in variants}
    measured = {
        name: {variant: row for variant, row in group.items() if row.figures.token_times_ms}
        for name, group in groups.items()
    }
    measured = {name: group for name, group in measured.items() if group}
    if not measured:
        return
    most = max(len(group) for group in measured.values())
    *_, shown = (name for name, group in measured.items() if len(group) == most)
    series = tuple(
        (words[v], tuple(enumerate(times, start=1)))
        for v in variants
        if (row := measured[shown].get(v)) and (times := row.figures.token_times_ms)
    )
    yield Lines("decode-token-times", f"Time of each token, {shown}", series, "token", "ms", log_y=True)
    bars = tuple(
        (
            words[v],
            tuple(tokens_per_s(row) if (row := group.get(v)) else None for group in measured.values()),
        )
        for v in variants
    )
    title = f"Tokens after the first{warm_note(row for group in measured.values() for row in group.values())}"
    yield Bars("decode-throughput", title, tuple(measured), bars, "tokens/s")


BENCH = Bench(
    "decode",
    "Decoding with and without a cache of keys and values: time to the first token, and between tokens.",
    _OPTIONS,
    lambda settings: tuple(_cases(settings)),
    _section,
    precisions=lambda settings: settings["precision"],
    targets=(TARGET,),
)
