"""What the rows of decoding say in sentences: speed-ups by the cache and by attention, throughput, bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nsys_analyzer.experiments.decode.work import (
    ATTENTIONS,
    DecodeRow,
    bandwidth_share,
    model_of,
    name_of,
    next_ms,
    warm_times,
)
from nsys_analyzer.experiments.model import Results
from nsys_analyzer.experiments.section import endings, span
from nsys_analyzer.report.units import format_number, milliseconds
from nsys_analyzer.text import Words, phrase

#: The rows of one model and precision by attention, and whether there is a cache.
Group = Mapping[tuple[str, bool], DecodeRow]


def groups_of(rows: Sequence[DecodeRow]) -> dict[str, Group]:
    """The rows of each model and precision, by attention and cache."""
    groups: dict[str, dict[tuple[str, bool], DecodeRow]] = {}
    for row in rows:
        groups.setdefault(model_of(row), {})[row.case.attention, row.case.cache] = row
    return dict(groups)


def first_speed_up(group: Group, slow: tuple[str, bool], fast: tuple[str, bool]) -> float | None:
    """How often the first token's time of the one goes into that of the other; None where one is missing."""
    pair = _measured(group, slow, fast)
    times = [row.figures.first_token for row in pair]
    return times[0].ms / times[1].ms if pair and times[0] and times[1] else None


def next_speed_up(group: Group, slow: tuple[str, bool], fast: tuple[str, bool]) -> float | None:
    """As ``first_speed_up``, of a token after the first; of two without the cache, of the same lengths."""
    pair = _measured(group, slow, fast)
    if not pair:
        return None
    warm = max(len(warm_times(row)) for row in pair)
    if warm and not any(row.case.cache for row in pair):
        slow_ms, fast_ms = (statistics.median((row.figures.token_times_ms or [])[1 : warm + 1]) for row in pair)
    else:
        slow_ms, fast_ms = (next_ms(row) or 0 for row in pair)
    return slow_ms / fast_ms if slow_ms and fast_ms else None


def _measured(group: Group, *variants: tuple[str, bool]) -> tuple[DecodeRow, ...]:
    """The rows of the variants, none where one of them was not measured to its end."""
    rows = tuple(row for variant in variants if (row := group.get(variant)) and row.ok)
    return rows if len(rows) == len(variants) else ()


def warm_note(rows: Iterable[DecodeRow]) -> str:
    """Which of the rows stand for their warm lengths alone, for a caption; empty where none does."""
    found = [f"{name_of(row)}: of its {len(warm)} warm lengths" for row in rows if (warm := warm_times(row))]
    return f" ({'; '.join(found)})" if found else ""


def answers(results: Results, rows: Sequence[DecodeRow], groups: Mapping[str, Group]) -> Iterator[str]:
    """The sentences, each where there are rows for it."""
    yield from _of_the_cache(groups)
    yield from _of_attention(groups)
    yield from _of_throughput(results, rows)
    yield from endings(rows, name_of)


def _of_the_cache(groups: Mapping[str, Group]) -> Iterator[str]:
    """The span of the cache's speed-ups, and the two times of the greatest."""
    found = {
        (name, attention): speed_up
        for name, group in groups.items()
        for attention in ATTENTIONS
        if (speed_up := next_speed_up(group, (attention, False), (attention, True)))
    }
    if found:
        name, attention = max(found, key=lambda key: found[key])
        without, cached = (next_ms(groups[name][attention, cache]) for cache in (False, True))
        note = warm_note(groups[model][attention, False] for model, attention in found)
        yield (
            f"The cache makes a token after the first {span(found.values(), 'factor')} as fast{note}: {name} with "
            f"{attention} attention needs {milliseconds(cached)} with it, {milliseconds(without)} without."
        )


def cold_lengths(groups: Mapping[str, Group]) -> Iterator[Words]:
    """A line for each row without the cache whose lengths were slower where the warm-up had not seen them."""
    for group in groups.values():
        for (attention, _), row in group.items():
            if not (warm := warm_times(row)):
                continue
            cold = statistics.median((row.figures.token_times_ms or [])[len(warm) + 1 :])
            cached = next_ms(group[attention, True]) if _measured(group, (attention, True)) else None
            then = f", over which the cache would gain {format_number(cold / cached, 'factor')}" if cached else ""
            yield (
                phrase(
                    "**Lengths seen for the first time**, {}: each token is a new length there, which "
                    "takes {}{}; it takes {} where the warm-up of {} tokens had seen the length. Next ms,"
                    " tokens/s and speed-ups are of the {} warm lengths. As many --warmup-tokens as "
                    "tokens make all of them warm.",
                    name_of(row),
                    milliseconds(cold),
                    then,
                    milliseconds(statistics.median(warm)),
                    row.case.warmup_tokens,
                    len(warm),
                )
            )


def _of_attention(groups: Mapping[str, Group]) -> Iterator[str]:
    said = []
    for words, speed_up in (("the first token", first_speed_up), ("a next one", next_speed_up)):
        speed_ups = [speed_up(group, ("unfused", True), ("sdpa", True)) for group in groups.values()]
        if known := [value for value in speed_ups if value]:
            said.append(f"{words} {span(known, 'factor')}")
    if said:
        yield f"With the cache PyTorch's own attention makes {' and '.join(said)} as fast as the unfused one."


def _of_throughput(results: Results, rows: Sequence[DecodeRow]) -> Iterator[str]:
    cached = [row for row in rows if row.ok and row.case.cache]
    if made := [(tokens, name_of(row)) for row in cached if (tokens := row.figures.tokens_per_s)]:
        tokens, name = max(made)
        yield f"The most tokens/s: {tokens:,.0f} ({name})."
    if shares := [share for row in cached if (share := bandwidth_share(results, row)) is not None]:
        yield (
            f"With the cache a next token reads weights and cache at {span(shares, 'percent')} of the bandwidth of a "
            "large copy; what is missing to 100 % is other work and idle time, which these rows do not tell apart."
        )
