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
    DecodeRow,
    cold_lengths,
    minimum_memory,
    next_ms,
    pass_flops,
    token_bytes,
    token_flops,
)
from nsys_analyzer.experiments.results import all_cases
from nsys_analyzer.experiments.section import CeilingsCase, CeilingsFigures
from nsys_analyzer.runs.rows import Row, Times
from tests.support.rows import check, default_settings, figures, page, typed_row

SHARED = {
    "device": "cuda", "num_layers": 0, "batch_size": 16, "prompt_length": 1024, "cache_length": 2048, "tokens": 100,
    "seed": 0,
}  # fmt: skip
PARAMETERS = 128_625_408  # of small
CACHE_BYTES = 12 * 2 * 16 * 2048 * 768 * 4  # layers, keys and values, sequences, positions, features, fp32


settings = partial(default_settings, BENCH)


def row(
    next_ms: float, cache: bool = True, attention: str = "unfused", first_ms: float = 200, **case: Any
) -> DecodeRow:
    precision = case.get("precision", "fp32")
    figures = {
        "peak_bytes": 4 * PARAMETERS + CACHE_BYTES + 2**30, "weights_bytes": 4 * PARAMETERS,
        "cache_bytes": CACHE_BYTES if cache else 0, "product_bits": 7 if precision == "bf16" else 23,
        "max_error": 1e-6, "largest_logit": 3.0, "tolerance": 3e-4, "same_tokens": 1.0,
        "first_token_ms": first_ms, "first_token_std_ms": 1.0, "between_tokens_ms": next_ms,
        "between_tokens_median_ms": next_ms, "between_tokens_p95_ms": 1.1 * next_ms,
        "token_times_ms": [first_ms, *99 * [next_ms]], "tokens_per_s": 16 / next_ms * 1e3,
    }  # fmt: skip
    known = {**SHARED, "model": "small", "precision": "fp32", "attention": attention, "cache": cache,
             "warmup_tokens": 100}  # fmt: skip
    return typed_row(TARGET, {**known, **case}, figures)


def four() -> tuple[DecodeRow, ...]:
    return (
        row(10, cache=True), row(400, cache=False),
        row(5, cache=True, attention="sdpa", first_ms=100), row(300, cache=False, attention="sdpa", first_ms=100),
    )  # fmt: skip


def ceilings(bytes_per_s: float = 4e12) -> dict[str, Row[CeilingsCase, CeilingsFigures]]:
    case = CeilingsCase("cuda", "fp32")
    figures = CeilingsFigures(copy_bytes_per_s=bytes_per_s, product_flops_per_s=5e13, product_bits=23)
    return {"fp32": Row("profiling_targets.ceilings", case, "ok", "", figures, {"gpu": "NVIDIA H200"})}


def said(*rows: DecodeRow) -> str:
    return page(BENCH, rows, ceilings=ceilings())


def test_cases() -> None:
    cases = all_cases(BENCH, settings("cuda"))
    assert len(cases) == 2 + 3 * 2 * 2 * 2  # ceilings in two precisions; models, precisions, attentions, cache or not
    assert cases[2].case == DecodeCase(**SHARED, warmup_tokens=100)
    assert (cases[3].case.cache, cases[3].case.warmup_tokens) == (False, 100)
    assert len(all_cases(BENCH, settings("cpu"))) == 1 + 4


def cold_row(**case: Any) -> DecodeRow:
    """50 ms a token, but 20 ms where the warm-up had seen the length: the first token, and four behind it."""
    cold = row(50, cache=False, warmup_tokens=5, **case)
    return replace(cold, figures=replace(cold.figures, token_times_ms=[200.0, *4 * [20.0], *95 * [50.0]]))


def test_lengths_that_the_warm_up_had_not_seen_are_flagged_and_left_out() -> None:
    cold = cold_row()
    assert (cold_lengths(cold), next_ms(cold)) == ((20, 50), None)
    text = said(row(5), cold, row(5, attention="sdpa"), row(30, cache=False, attention="sdpa", warmup_tokens=5))
    assert "takes 20.00 ms at a length that the warm-up of 5 tokens had seen, 50.00 ms at another" in text
    assert "| small fp32 | 6.000× | 1.000× | 1.000× |" in text  # 30 ÷ 5
    steady = row(50, cache=False, warmup_tokens=5)
    assert (cold_lengths(steady), next_ms(steady)) == (None, 50)  # all of them take 50
    growing = replace(steady, figures=replace(steady.figures, token_times_ms=[200.0, *4 * [40.0], *95 * [59.0]]))
    assert cold_lengths(growing) is None  # 59 < 1.5 · 40: longer sequences take longer


FORGOT = replace(row(10), figures=replace(row(10).figures, peak_bytes=4 * PARAMETERS))
BUSY = replace(row(10), figures=replace(row(10).figures, between_tokens=Times(10, cv=0.3)))
LOST = replace(row(1, cache=False), status="oom", message="CUDA out of memory",
               figures=DecodeFigures(weights_bytes=2**31, peak_bytes=2**32))  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        # 400 ÷ 10 = 40 unfused, 300 ÷ 5 = 60 sdpa; first token 200 ÷ 100, next one with the cache 10 ÷ 5
        (four(), ["40.00× to 60.00× shorter: small fp32 with sdpa attention needs 5.000 ms",
                  "prefill 2.000×, inter-token latency 2.000×",
                  "3,200 tokens/s (small fp32, sdpa, with the cache)",  # 16 ÷ 5 ms
                  "| small fp32 | 40.00× | 60.00× | 2.000× | 2.000× | 1.333× |", "warm-up: 100 tokens"],
         ["Impossible", "Unsteady"]),
        # 4·(128,625,408 - 7,680,000) + 2·12·16·768·4·(1024 + 50) = 483,781,632 + 1,266,941,952 bytes in 10 ms
        ((row(10),), ["| 175 GB/s | 4 TB/s | 4.8 TB/s | 3.6 % |"], []),
        # 1.75 GB in 0.3 ms are 5.8 TB/s, and an H200 has 4.8; in 0.4 ms 4.4
        ((row(0.3),), ["Impossible rate"], []),
        ((row(0.4),), [], ["Impossible rate"]),
        ((FORGOT,), ["Impossible memory"], []),
        ((BUSY,), ["**Unsteady tokens**, CV above 10.0 %: small fp32, unfused, with the cache: 30.0 %."], []),
        ((row(10), LOST), ["Out of memory: small fp32, unfused, without the cache.", "| CUDA out of memory |",
                           "| small fp32 | unfused | no | – | – | – | – | oom |",
                           "| small fp32 | unfused | no | – | – | – | 4.0 GiB | 2.0 GiB | – |"], []),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[DecodeRow, ...], says: list[str], says_not: list[str]) -> None:
    check(said(*rows), says, says_not)


def test_the_work_of_a_pass() -> None:
    tiny = {"num_layers": 1, "batch_size": 1}
    # one layer of small: 8·d² + 6·d·d_ff a token, the head 2·d·V once
    layer, head = 8 * 768**2 + 6 * 768 * 3072, 2 * 768 * 10_000
    whole, causal = (row(1, attention=attention, **tiny) for attention in ("unfused", "sdpa"))
    assert pass_flops(whole, 3, 0) == 3 * layer + head + 4 * 9 * 768  # 3 · 3 scores
    assert pass_flops(causal, 3, 0) == 3 * layer + head + 4 * 6 * 768  # 1 + 2 + 3 of them
    assert pass_flops(whole, 1, 5) == pass_flops(causal, 1, 5) == layer + head + 4 * 6 * 768


def test_the_work_of_a_token_after_the_first() -> None:
    lengths = {"num_layers": 1, "batch_size": 1, "prompt_length": 10, "tokens": 4}  # three tokens, which see 11, 12, 13
    cached, whole = row(1, **lengths), row(1, cache=False, **lengths)
    assert token_flops(cached) == pass_flops(cached, 1, 11)  # the mean: 12 tokens, itself the last
    assert token_flops(whole) == sum(pass_flops(whole, length, 0) for length in (11, 12, 13)) / 3
    weights = 4 * (PARAMETERS - 10_000 * 768)  # all but the embedding
    assert token_bytes(whole) == weights
    assert token_bytes(cached) == weights + 2 * 12 * 768 * 4  # keys and values of 12 positions


def test_the_least_memory() -> None:
    found = list(minimum_memory((row(10, cache=False), row(10), FORGOT)))
    assert [(cache, memory.parts) for cache, memory in found] == [
        (False, "weights"), (True, "weights, cache"), (True, "weights, cache"),
    ]  # fmt: skip
    assert found[2][1].measured_bytes == 4 * PARAMETERS


def test_nothing_measured_says_no_figure() -> None:
    lost = [replace(one, status="failed", message="no", figures=DecodeFigures()) for one in four()]
    assert not figures(BENCH, lost)
    assert "Failed: small fp32, unfused, with the cache; " in said(*lost)


def test_figures_show_the_largest_model_that_is_complete() -> None:
    rows = (*four(), row(20, model="large"))
    drawn = figures(BENCH, rows)
    assert list(drawn) == ["decode-token-times", "decode-throughput"]
    lines, bars = drawn.values()
    assert lines.title == "Time of each token, small fp32"
    assert lines.series[0][0] == "unfused, with cache"
    assert lines.series[0][1][:2] == ((1, 200), (2, 10))
    assert bars.groups == ("small fp32", "large fp32")
    assert bars.series[1] == ("unfused, no cache", (16 / 400 * 1e3, None))
