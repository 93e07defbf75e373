"""The bench of timing: its cases, and its section from hand-made rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments import timing
from nsys_analyzer.experiments.model import AnyRow
from nsys_analyzer.experiments.steps import TARGET, StepCase
from nsys_analyzer.experiments.timing import BENCH
from nsys_analyzer.report.model import Spread
from tests.support.rows import check, default_settings, figures, page, table, typed_row

GIB = 2**30
CASE = {
    "device": "cuda", "model": "small", "context_length": 256, "batch_size": 4, "mode": "train", "precision": "fp32",
    "attention": "unfused", "optimizer": "torch", "warmup_steps": 5, "steps": 10, "seed": 0,
}  # fmt: skip


def row(step_ms: float = 40.0, figures: dict[str, Any] | None = None, **case: Any) -> AnyRow:
    known = {
        "forward_flops": 1e12, "backward_flops": 2e12, "product_bits": 23, "parameters_bytes": GIB, "logits_bytes": GIB,
        "gradients_bytes": GIB, "optimizer_bytes": 2 * GIB, "peak_allocated_bytes": 8 * GIB,
        "peak_reserved_bytes": 9 * GIB, "step_ms": step_ms, "step_std_ms": step_ms / 100, "step_cv": 0.01,
        "step_min_ms": step_ms, "step_max_ms": step_ms, "step_median_ms": step_ms, "tokens_per_s": 1024e3 / step_ms,
        "forward_ms": step_ms / 4, "loss_ms": step_ms / 8, "backward_ms": step_ms / 2, "optimizer_ms": step_ms / 8,
        "warmup_times_ms": 5 * [step_ms], "times_ms": 10 * [step_ms],
    }  # fmt: skip
    return typed_row(TARGET, {**CASE, **case}, {**known, **(figures or {})})


def lost(**case: Any) -> AnyRow:
    return typed_row(TARGET, {**CASE, **case}, {"forward_flops": 1}, "oom", "CUDA out of memory")


def studied(warmup_steps: int, times: list[float]) -> AnyRow:
    mean = sum(times) / len(times)
    before = [1000.0, *4 * [20.0]][:warmup_steps]
    figures = {"times_ms": times, "warmup_times_ms": before, "step_median_ms": 20.0, "step_cv": 0.5}
    one = row(mean, figures, warmup_steps=warmup_steps)
    return replace(one, environment={timing.VARIABLE: str(warmup_steps)})


settings = partial(default_settings, BENCH)


def test_cases_on_a_gpu() -> None:
    cases = BENCH.tasks(settings("cuda"))
    assert len(cases) == 5 * 4 * 3 + 4  # sizes, contexts, modes; four warm-ups
    assert cases[0].case == StepCase(**{**CASE, "context_length": 128, "mode": "forward"})
    assert not any(case.environment for case in cases[:60])  # one process as long as memory lasts
    study = cases[60:]
    assert [case.case.warmup_steps for case in study] == [0, 1, 2, 5]
    assert len({tuple(case.environment.items()) for case in study}) == 4  # a process each
    assert all(case.case.steps == 10 and case.case.context_length == 256 for case in study)


def test_dimensions_are_told_where_they_are_given() -> None:
    cases = BENCH.tasks(settings("cuda", d_model=64))
    assert {case.case.d_model for case in cases} == {64}
    assert cases[0].case.num_layers == 0
    assert BENCH.tasks(settings("cpu"))[0].case.num_layers == 2


def test_every_default_is_allowed_on_the_command_line() -> None:
    for one in BENCH.options:
        if one.kind is int:
            for default in (one.default, one.default_on("cpu")):
                assert min(default if one.several else (default,)) >= one.least
    zero = {one.name for one in BENCH.options if one.least == 0}
    assert {"warmup_steps", "study_warmup_steps", "seed", "num_layers"} <= zero


def test_an_unknown_model_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigurationError, match="Unknown model 'huge'"):
        BENCH.tasks(settings("cuda", model=("huge",)))


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        ((row(10, mode="forward"), row(40), lost(context_length=1024), row(80, context_length=512)),
         ["Of 4 configurations 3 were measured.", "Steps vary by 1.0 %",
          "A step takes 40.00 ms (small, context length 256, train) to 80.00 ms (small, context length 512, train).",
          "Backward takes 2.000× the forward pass.",  # half a step against a quarter
          "Out of memory: small, context length 1,024, train.",
          "| small, context length 1,024, train | oom | CUDA out of memory |"], ["in another precision", "**Unsteady"]),
        ((lost(),), ["Out of memory: small."], ["Backward takes"]),
        # (1000 + 9·20) ÷ 10 = 118 without warm-up over its last steps' 20: 5.9 times; all above 20 is the first step
        ((row(), studied(0, [1000.0, *9 * [20.0]]), studied(5, 10 * [20.0])),
         ["5.900× with a warm-up of 0 and 1.000× with a warm-up of 5",
          "the first measured step (1,000.0 ms) makes 100.0 % of",
          "Of 1 configurations 1 were measured."], []),  # the study is no part of the grid
        # A slow process is no warm-up: steady are the last three of five, 42 and 35 ms.
        # mean (315 + 47 + 42 + 41 + 43) ÷ 5 = 97.6, ÷ 42 = 2.324; 35 ÷ 35 = 1, and not 97.6 ÷ 35
        # above 42 ms: 273 + 5 + 0 + 0 + 1 = 279, of which the first makes 273 ÷ 279
        ((row(), studied(0, [315.0, 47.0, 42.0, 41.0, 43.0]), studied(5, [35.0, 36.0, 35.0, 34.0, 35.0])),
         ["2.324× with a warm-up of 0 and 1.000× with a warm-up of 5",
          "the first measured step (315.0 ms) makes 97.8 % of"], []),
        ((row(400, {"product_bits": 10}), row(400, {"step_cv": 0.25}, context_length=512)),
         ["in another precision than asked for**, in 1 of 2 rows: fp32 kept 10 bits.",
          "**Unsteady times**, CV above 10.0 %: step of small, context length 512: 25.0 %."], []),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[AnyRow, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_a_line_for_each_model_and_context() -> None:
    rows = (row(10, mode="forward"), row(40), lost(context_length=1024), row(80, context_length=512))
    assert table(BENCH, rows).rows == (
        ("small", 256, Spread(10, 0.1), Spread(40, 0.4)),
        ("small", 1024, None, "oom"),
        ("small", 512, None, Spread(80, 0.8)),
    )
    found = table(BENCH, (row(40), row(20, precision="tf32", figures={"product_bits": 10}))).rows
    assert [line[:2] for line in found] == [("small", "fp32"), ("small", "tf32")]


def test_figures() -> None:
    rows = (row(40), row(80, context_length=512), studied(0, [1000.0, 20.0]), studied(1, [20.0, 20.0]))
    drawn = figures(BENCH, rows)
    assert list(drawn) == ["timing-step", "timing-phases", "timing-warmup"]
    assert drawn["timing-step"].series == (("small", ((256, 40), (512, 80))),)
    # forward a quarter, loss and optimizer an eighth each, backward a half
    assert [values for _, values in drawn["timing-phases"].series] == [(25,), (12.5,), (50,), (12.5,)]
    assert drawn["timing-warmup"].series[1] == ("warm-up of 1", ((1, 1000), (2, 20), (3, 20)))
