"""What the rows of decoding say in sentences: speed-ups by the cache and by attention, throughput, bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nsys_analyzer.benches.decode_work import bandwidth_share, model_of, name_of
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.report.model import Unit
from nsys_analyzer.report.units import format_number, milliseconds

ATTENTIONS = ("unfused", "sdpa")
#: The figure that stands for the time from one token to the next.
NEXT = "between_tokens_median_ms"
#: The rows of one model and precision by attention, and whether there is a cache.
Group = Mapping[tuple[str, bool], Row]
#: So many times the time of a length that was seen before says that something is prepared for each new one.
_COLD = 1.5
_ENDINGS = {
    "oom": "Out of memory", "timeout": "Out of time", "failed": "Failed", "unsupported": "Not supported here",
}  # fmt: skip


def groups_of(rows: Sequence[Row]) -> dict[str, Group]:
    """The rows of each model and precision, by attention and cache."""
    groups: dict[str, dict[tuple[str, bool], Row]] = {}
    for row in rows:
        groups.setdefault(model_of(row), {})[row.case["attention"], row.case["cache"]] = row
    return dict(groups)


def ratio(group: Group, slow: tuple[str, bool], fast: tuple[str, bool], key: str) -> float | None:
    """How often the time of the one goes into that of the other; None where one is missing."""
    times = [row.figures.get(key) if (row := group.get(variant)) and row.ok else None for variant in (slow, fast)]
    return times[0] / times[1] if times[0] and times[1] else None


def answers(results: Results, groups: Mapping[str, Group]) -> Iterator[str]:
    """The sentences, each where there are rows for it."""
    yield from _of_the_cache(groups)
    yield from _of_attention(groups)
    yield from _of_throughput(results)
    for status, words in _ENDINGS.items():
        if ended := [name_of(row) for row in results.rows if row.status == status]:
            yield f"{words}: {'; '.join(ended)}."


def _of_the_cache(groups: Mapping[str, Group]) -> Iterator[str]:
    """The span of the cache's speed-ups, and the two times of the greatest."""
    found = {
        (name, attention): speed_up
        for name, group in groups.items()
        for attention in ATTENTIONS
        if (speed_up := ratio(group, (attention, False), (attention, True), NEXT))
    }
    if found:
        name, attention = max(found, key=lambda key: found[key])
        without, cached = (groups[name][attention, cache].figures[NEXT] for cache in (False, True))
        yield (
            f"The cache makes a token after the first {_span(found.values(), 'factor')} as fast: {name} with "
            f"{attention} attention needs {milliseconds(cached)} with it, {milliseconds(without)} without."
        )


def cold_lengths(groups: Mapping[str, Group]) -> Iterator[str]:
    """A line for each row without the cache whose lengths were slower where the warm-up had not seen them."""
    for group in groups.values():
        for (attention, cache), row in group.items():
            times, seen = row.figures.get("token_times_ms") or (), row.case["warmup_tokens"]
            if cache or not 2 <= seen < len(times):
                continue
            warm, cold = (statistics.median(part) for part in (times[1:seen], times[seen:]))
            if cold < _COLD * warm:
                continue
            cached = group.get((attention, True))
            gain = warm / cached.figures[NEXT] if cached and cached.ok else None
            then = f"; against {milliseconds(warm)} the cache gains {format_number(gain, 'factor')}" if gain else ""
            yield (
                f"**Lengths seen for the first time**, {name_of(row)}: each token is a new length there, which takes "
                f"{milliseconds(cold)}, and {milliseconds(warm)} where the warm-up of {seen} tokens had seen the length"
                f"{then}. A longer --warmup-tokens tells the two apart."
            )


def _of_attention(groups: Mapping[str, Group]) -> Iterator[str]:
    said = []
    for words, key in (("the first token", "first_token_ms"), ("a next one", NEXT)):
        speed_ups = [ratio(group, ("unfused", True), ("sdpa", True), key) for group in groups.values()]
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
            "large copy; what is missing to 100 % is other work, and waiting for launches."
        )


def _span(values: Iterable[float], unit: Unit) -> str:
    known = sorted(values)
    low, high = (format_number(known[at], unit) for at in (0, -1))
    return low if low == high else f"{low} to {high}"
