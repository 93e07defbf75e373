"""Making tokens with a cache of keys and values and without: the first token, and those after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nsys_analyzer.analysis.models import find_model
from nsys_analyzer.benches.conditions import conditions, precision_warnings
from nsys_analyzer.benches.decode_answers import (
    ATTENTIONS,
    Group,
    answers,
    cold_lengths,
    first_speed_up,
    groups_of,
    next_speed_up,
    warm_note,
)
from nsys_analyzer.benches.decode_work import (
    model_of,
    name_of,
    next_ms,
    rates,
    residences,
    tokens_per_s,
    warm_times,
)
from nsys_analyzer.benches.endings import messages
from nsys_analyzer.benches.model import Bench, Case, Option, Results, Row, Settings
from nsys_analyzer.benches.physics import physics
from nsys_analyzer.report.model import (
    Bars,
    Block,
    Cell,
    Column,
    Details,
    Figure,
    Lines,
    Listing,
    Paragraph,
    Section,
    Spread,
    Table,
)
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import marked, strong

_TARGET = "profiling_targets.decoding"
_OPTIONS = (
    Option("model", str, ("small", "medium", "large"), ("small",), "Sizes."),
    Option("precision", ("fp32", "tf32", "bf16"), ("fp32", "bf16"), ("fp32",), "bf16: of weights and cache too."),
    Option("attention", ATTENTIONS, ATTENTIONS, ATTENTIONS, "Written out, or PyTorch's own."),
    Option("cache", ("on", "off"), ("on", "off"), ("on", "off"), "Keep keys and values, or pass over all again."),
    Option("num_layers", int, (0,), (2,), "In place of the model's; 0 for its own.", several=False, least=0),
    Option("batch_size", int, (16,), (2,), "Sequences.", several=False),
    Option("prompt_length", int, (1024,), (32,), "Tokens of each that are there before the first.", several=False),
    Option("cache_length", int, (2048,), (64,), "Positions that the cache has room for.", several=False),
    Option("tokens", int, (100,), (10,), "To make, the first among them.", several=False, least=3),
    Option("warmup_tokens", int, (100,), (10,), "To make before anything is timed.", several=False),
    Option("seed", int, (0,), (0,), "Of weights and tokens.", several=False, least=0),
)
#: A 95th percentile so often the median says that something else was at work.
_FAR = 1.5
_SHARED = ("num_layers", "batch_size", "prompt_length", "cache_length", "tokens", "seed")
_DEFINITIONS = marked(
    "*First token* is the pass over the prompt and the choice of the likeliest token; *next* is the time from one "
    "token to the one after it, by Python's clock, of a whole generation. *tokens/s* counts those after the first, of "
    "all sequences. With the cache a token is a pass over that token alone, which reads the keys and values of those "
    "before it; without, over the whole sequence. The head runs at the last position alone in both. *bf16* is that of "
    "weights, activations and cache, not autocast. A token must read every weight but the embedding, and what the "
    "cache holds: that is its least memory traffic."
)


def _cases(settings: Settings) -> tuple[Case, ...]:
    same: dict[str, Any] = {"device": settings.device, **{key: settings[key] for key in _SHARED}}
    return tuple(
        Case(
            _TARGET,
            {
                **same, "model": find_model(model).name, "precision": precision, "attention": attention,
                "cache": cache == "on", "warmup_tokens": settings["warmup_tokens"],
            },
            f"{model}, {precision}, {attention}, cache {cache}",
        )
        for model in settings["model"]
        for precision in settings["precision"]
        for attention in settings["attention"]
        for cache in settings["cache"]
    )  # fmt: skip


def _section(results: Results) -> Section:
    rows, groups = results.rows, groups_of(results.rows)
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join(answers(results, groups))),
        conditions(
            results,
            warmup=f"{_each(rows, 'warmup_tokens')} tokens, after the check of the logits",
            steps=f"{_each(rows, 'tokens')} tokens behind a prompt of {_each(rows, 'prompt_length')}, batch "
            f"{_each(rows, 'batch_size')}, cache of {_each(rows, 'cache_length')}; the first token five times",
            synchronized="after each token",
            grad="none (inference_mode)",
        ),
        *(
            [Listing(flags)]
            if (flags := (*precision_warnings(results), *_unsteady(rows), *cold_lengths(groups)))
            else []
        ),
        _times(rows),
        *_speed_ups(groups),
        *_figures(groups),
        Details("Check of the logits, and memory", (_check(rows),)),
        *messages(rows, name_of),
        *physics(results, tuple(rates(rows)), residences(rows)),
        Paragraph(_DEFINITIONS),
    )
    return Section("bench-decode", "Bench: decoding with and without a cache", blocks)


def _each(rows: Sequence[Row], key: str) -> str:
    return ", ".join(f"{value:,}" for value in dict.fromkeys(row.case[key] for row in rows))


def _unsteady(rows: Sequence[Row]) -> Iterator[str]:
    """A line for the rows whose slow tokens are far from the usual ones; cold lengths have a line of their own."""
    steady = [row for row in rows if row.ok and not warm_times(row)]
    slow = {name_of(row): row.figures["between_tokens_p95_ms"] / next_ms(row) for row in steady}
    far = {name: ratio for name, ratio in slow.items() if ratio > _FAR}
    if far:
        worst = max(far, key=lambda name: far[name])
        yield (
            f"{strong('Unsteady tokens')} in {len(far)} of {len(rows)} rows: the 95th percentile is up to "
            f"{format_number(far[worst], 'factor')} the median ({worst}). Was the machine busy?"
        )


def _times(rows: Sequence[Row]) -> Table:
    columns = (
        Column("model"), Column("attention"), Column("cache"), Column("first token ms", "ms"), Column("next ms", "ms"),
        Column("p95", "ms"), Column("tokens/s", "count"), Column("status"),
    )  # fmt: skip
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        figures, cached = row.figures, "yes" if row.case["cache"] else "no"
        first, warm = figures.get("first_token_ms"), len(warm_times(row))
        cells.append((
            model_of(row), row.case["attention"], cached,
            None if first is None else Spread(first, figures.get("first_token_std_ms")), next_ms(row),
            None if warm else figures.get("between_tokens_p95_ms"), tokens_per_s(row),
            f"{row.status}, next of {warm} warm lengths" if warm else row.status,
        ))  # fmt: skip
    caption = "Time to the first token (mean and standard deviation), and between tokens (median, 95th percentile):"
    return Table(columns, tuple(cells), caption)


def _speed_ups(groups: Mapping[str, Group]) -> Iterator[Table]:
    columns = (
        Column("model"), Column("cache: unfused", "factor"), Column("cache: sdpa", "factor"),
        Column("sdpa: first token", "factor"), Column("sdpa: next, cache", "factor"),
        Column("sdpa: next, no cache", "factor"),
    )  # fmt: skip
    rows = tuple(
        (
            name,
            *(next_speed_up(group, (attention, False), (attention, True)) for attention in ATTENTIONS),
            first_speed_up(group, ("unfused", True), ("sdpa", True)),
            *(next_speed_up(group, ("unfused", cache), ("sdpa", cache)) for cache in (True, False)),
        )
        for name, group in groups.items()
    )
    if any(cell is not None for row in rows for cell in row[1:]):
        note = warm_note(row for group in groups.values() for row in group.values())
        same = "; of two without the cache, of the same lengths" if note else ""
        caption = f"Speed-ups: by the cache between tokens, and by PyTorch's own attention{note}{same}:"
        yield Table(columns, rows, caption)


def _figures(groups: Mapping[str, Group]) -> Iterator[Figure]:
    """Each token's time of the model that was measured most completely, the largest of those; and tokens/s of all."""
    variants = [(attention, cache) for attention in ATTENTIONS for cache in (True, False)]
    words = {variant: f"{variant[0]}, {'with' if variant[1] else 'no'} cache" for variant in variants}
    measured = {
        name: {variant: row for variant, row in group.items() if row.figures.get("token_times_ms")}
        for name, group in groups.items()
    }
    measured = {name: group for name, group in measured.items() if group}
    if not measured:
        return
    most = max(len(group) for group in measured.values())
    *_, shown = (name for name, group in measured.items() if len(group) == most)
    curves = {words[v]: row.figures["token_times_ms"] for v in variants if (row := measured[shown].get(v))}
    series = tuple((name, tuple(enumerate(times, start=1))) for name, times in curves.items())
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


def _check(rows: Sequence[Row]) -> Table:
    columns = (
        Column("model"), Column("attention"), Column("cache"), Column("largest error"), Column("allowed"),
        Column("same tokens", "percent"), Column("peak", "bytes"), Column("weights", "bytes"), Column("room", "bytes"),
    )  # fmt: skip
    cells = tuple(
        (
            model_of(row), row.case["attention"], "yes" if row.case["cache"] else "no",
            *(f"{value:.1e}" if (value := row.figures.get(key)) is not None else None
              for key in ("max_error", "tolerance")),
            *(row.figures.get(key) for key in ("same_tokens", "peak_bytes", "weights_bytes", "cache_bytes")),
        )
        for row in rows
    )  # fmt: skip
    caption = (
        "Logits with the cache against one pass over the whole sequence: the largest difference, and the share of "
        "positions with the same likeliest token; the peak of memory, and in it the weights and the cache's room:"
    )
    return Table(columns, cells, caption)


BENCH = Bench(
    "decode",
    "Decoding with and without a cache of keys and values: time to the first token, and between tokens.",
    _OPTIONS,
    _cases,
    _section,
    precisions=lambda settings: settings["precision"],
)
