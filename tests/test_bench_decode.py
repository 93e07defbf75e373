"""The bench of decoding: its cases, and its section from hand-made rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nsys_analyzer.experiments.decode import (
    BENCH,
    TARGET,
    DecodeCase,
    DecodeFigures,
)
from nsys_analyzer.experiments.model import AnyRow
from nsys_analyzer.inputs.rows import Times
from tests.support.rows import check, default_settings, figures, page, typed_row

SHARED = {
    "device": "cuda", "num_layers": 0, "batch_size": 16, "prompt_length": 1024, "cache_length": 2048, "tokens": 100,
    "seed": 0,
}  # fmt: skip
PARAMETERS = 128_625_408  # of small
CACHE_BYTES = 12 * 2 * 16 * 2048 * 768 * 4  # layers, keys and values, sequences, positions, features, fp32


settings = partial(default_settings, BENCH)


def row(next_ms: float, cache: bool = True, attention: str = "unfused", first_ms: float = 200, **case: Any) -> AnyRow:
    figures = {
        "peak_bytes": 4 * PARAMETERS + CACHE_BYTES + 2**30, "weights_bytes": 4 * PARAMETERS,
        "cache_bytes": CACHE_BYTES if cache else 0,
        "first_token_ms": first_ms, "first_token_std_ms": 1.0, "between_tokens_ms": next_ms,
        "between_tokens_median_ms": next_ms, "between_tokens_p95_ms": 1.1 * next_ms,
        "token_times_ms": [first_ms, *99 * [next_ms]], "tokens_per_s": 16 / next_ms * 1e3,
    }  # fmt: skip
    known = {**SHARED, "model": "small", "precision": "fp32", "attention": attention, "cache": cache,
             "warmup_tokens": 100}  # fmt: skip
    return typed_row(TARGET, {**known, **case}, figures)


def four() -> tuple[AnyRow, ...]:
    return (
        row(10, cache=True), row(400, cache=False),
        row(5, cache=True, attention="sdpa", first_ms=100), row(300, cache=False, attention="sdpa", first_ms=100),
    )  # fmt: skip


def said(*rows: AnyRow) -> str:
    return page(BENCH, rows)


def test_cases() -> None:
    cases = BENCH.tasks(settings("cuda"))
    assert len(cases) == 3 * 2 * 2 * 2  # models, precisions, attentions, cache or not
    assert cases[0].case == DecodeCase(**SHARED, warmup_tokens=100)
    assert (cases[1].case.cache, cases[1].case.warmup_tokens) == (False, 100)
    assert len(BENCH.tasks(settings("cpu"))) == 4


BUSY = replace(row(10), figures=replace(row(10).figures, between_tokens=Times(10, cv=0.3)))
LOST = replace(row(1, cache=False), status="oom", message="CUDA out of memory",
               figures=DecodeFigures(weights_bytes=2**31, peak_bytes=2**32))  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        # 400 ÷ 10 = 40 unfused, 300 ÷ 5 = 60 sdpa; first token 200 ÷ 100, next one with the cache 10 ÷ 5
        (four(), ["40.00× to 60.00× as fast: small, sdpa, cache on needs 5 ms",
                  "prefill 2.000×, inter-token latency 2.000×",
                  "3,200 tokens/s (small, sdpa, cache on)",  # 16 ÷ 5 ms
                  "| 5.500 | 3,200 | 60.00× | 2.000× |", "warm-up: 100 tokens"],
         ["Unsteady"]),
        ((BUSY,), ["**Unsteady times** (CV above 10.0 %): between tokens of small: 30.0 %."], []),
        ((row(10), LOST), ["Out of memory: small, cache off.", "| CUDA out of memory |",
                           "| small | off | 4.0 GiB | 2.0 GiB | – | oom |"], []),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[AnyRow, ...], says: list[str], says_not: list[str]) -> None:
    check(said(*rows), says, says_not)


def test_nothing_measured_says_no_figure() -> None:
    lost = [replace(one, status="failed", message="no", figures=DecodeFigures()) for one in four()]
    assert not figures(BENCH, lost)
    assert "Failed: small, unfused, cache on; " in said(*lost)


def test_figures_show_the_largest_model_that_is_complete() -> None:
    rows = (*four(), row(20, model="large"))
    drawn = figures(BENCH, rows)
    assert list(drawn) == ["decode-token-times", "decode-throughput"]
    lines, bars = drawn.values()
    assert lines.title == "Time of each token, small"
    assert lines.series[0][0] == "unfused, with cache"
    assert lines.series[0][1][:2] == ((1, 200), (2, 10))
    assert bars.groups == ("small", "large")
    assert bars.series[1] == ("unfused, no cache", (16 / 400 * 1e3, None))
