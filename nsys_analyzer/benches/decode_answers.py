"""What the rows of decoding say in sentences: speed-ups by the cache and by attention, throughput, bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nsys_analyzer.benches.decode_work import bandwidth_share, model_of, name_of, next_ms, warm_times
from nsys_analyzer.benches.endings import endings
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.report.model import Unit
from nsys_analyzer.report.units import format_number, milliseconds
from nsys_analyzer.text import strong

ATTENTIONS = ("unfused", "sdpa")
#: The rows of one model and precision by attention, and whether there is a cache.
Group = Mapping[tuple[str, bool], Row]


def groups_of(rows: Sequence[Row]) -> dict[str, Group]:
    """The rows of each model and precision, by attention and cache."""
    groups: dict[str, dict[tuple[str, bool], Row]] = {}
    for row in rows:
        groups.setdefault(model_of(row), {})[row.case["attention"], row.case["cache"]] = row
    return dict(groups)


def first_speed_up(group: Group, slow: tuple[str, bool], fast: tuple[str, bool]) -> float | None:
    """How often the first token's time of the one goes into that of the other; None where one is missing."""
    pair = _measured(group, slow, fast)
    return pair[0].figures["first_token_ms"] / pair[1].figures["first_token_ms"] if pair else None


def next_speed_up(group: Group, slow: tuple[str, bool], fast: tuple[str, bool]) -> float | None:
    """As ``first_speed_up``, of a token after the first; of two without the cache, of the same lengths."""
    pair = _measured(group, slow, fast)
    if not pair:
        return None
    warm = max(len(warm_times(row)) for row in pair)
    if warm and not any(row.case["cache"] for row in pair):
        slow_ms, fast_ms = (statistics.median(row.figures["token_times_ms"][1 : warm + 1]) for row in pair)
    else:
        slow_ms, fast_ms = (next_ms(row) for row in pair)
    return slow_ms / fast_ms if slow_ms and fast_ms else None


def _measured(group: Group, *variants: tuple[str, bool]) -> tuple[Row, ...]:
    """The rows of the variants, none where one of them was not measured to its end."""
    rows = tuple(row for variant in variants if (row := group.get(variant)) and row.ok)
    return rows if len(rows) == len(variants) else ()


def warm_note(rows: Iterable[Row]) -> str:
    """Which of the rows stand for their warm lengths alone, for a caption; empty where none does."""
    found = [f"{name_of(row)}: of its {len(warm)} warm lengths" for row in rows if (warm := warm_times(row))]
    return f" ({'; '.join(found)})" if found else ""


def answers(results: Results, groups: Mapping[str, Group]) -> Iterator[str]:
    """The sentences, each where there are rows for it."""
    yield from _of_the_cache(groups)
    yield from _of_attention(groups)
    yield from _of_throughput(results)
    yield from endings(results.rows, name_of)


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
            f"The cache makes a token after the first {_span(found.values(), 'factor')} as fast{note}: {name} with "
            f"{attention} attention needs {milliseconds(cached)} with it, {milliseconds(without)} without."
        )


def cold_lengths(groups: Mapping[str, Group]) -> Iterator[str]:
    """A line for each row without the cache whose lengths were slower where the warm-up had not seen them."""
    for group in groups.values():
        for (attention, _), row in group.items():
            if not (warm := warm_times(row)):
                continue
            cold = statistics.median(row.figures["token_times_ms"][len(warm) + 1 :])
            cached = next_ms(group[attention, True]) if _measured(group, (attention, True)) else None
            then = f", over which the cache would gain {format_number(cold / cached, 'factor')}" if cached else ""
            yield (
                f"{strong('Lengths seen for the first time')}, {name_of(row)}: each token is a new length there, which "
                f"takes {milliseconds(cold)}{then}; it takes {milliseconds(statistics.median(warm))} where the warm-up "
                f"of {row.case['warmup_tokens']} tokens had seen the length. Next ms, tokens/s and speed-ups are of "
                f"the {len(warm)} warm lengths. As many --warmup-tokens as tokens make all of them warm."
            )


def _of_attention(groups: Mapping[str, Group]) -> Iterator[str]:
    said = []
    for words, speed_up in (("the first token", first_speed_up), ("a next one", next_speed_up)):
        speed_ups = [speed_up(group, ("unfused", True), ("sdpa", True)) for group in groups.values()]
        if known := [value for value in speed_ups if value]:
            said.append(f"{words} {_span(known, 'factor')}")
    if said:
        yield f"With the cache PyTorch's own attention makes {' and '.join(said)} as fast as the unfused one."


def _of_throughput(results: Results) -> Iterator[str]:
    cached = [row for row in results.rows if row.ok and row.case["cache"]]
    if cached:
        best = max(cached, key=lambda row: float(row.figures["tokens_per_s"]))
        yield f"The most tokens/s: {best.figures['tokens_per_s']:,.0f} ({name_of(best)})."
    if shares := [share for row in cached if (share := bandwidth_share(results, row)) is not None]:
        yield (
            f"With the cache a next token reads weights and cache at {_span(shares, 'percent')} of the bandwidth of a "
            "large copy; what is missing to 100 % is other work and idle time, which these rows do not tell apart."
        )


def _span(values: Iterable[float], unit: Unit) -> str:
    known = sorted(values)
    low, high = (format_number(known[at], unit) for at in (0, -1))
    return low if low == high else f"{low} to {high}"
