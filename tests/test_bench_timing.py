"""The bench of timing: its cases, and its section from hand-made rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import AnyRow
from nsys_analyzer.experiments.steps import TARGET, StepCase
from nsys_analyzer.experiments.timing import BENCH
from nsys_analyzer.report.model import Spread
from tests.support.rows import check, default_settings, figures, page, table, typed_row

GIB = 2**30
CASE = {
    "device": "cuda", "model": "small", "context_length": 256, "batch_size": 4, "mode": "train", "precision": "fp32",
    "attention": "unfused", "warmup_steps": 5, "steps": 10, "seed": 0,
}  # fmt: skip


def row(step_ms: float = 40.0, figures: dict[str, Any] | None = None, **case: Any) -> AnyRow:
    known = {
        "peak_allocated_bytes": 8 * GIB, "step_ms": step_ms, "step_std_ms": step_ms / 100, "step_cv": 0.01,
        "step_min_ms": step_ms, "step_max_ms": step_ms, "step_median_ms": step_ms, "tokens_per_s": 1024e3 / step_ms,
        "forward_ms": step_ms / 4, "loss_ms": step_ms / 8, "backward_ms": step_ms / 2, "optimizer_ms": step_ms / 8,
    }  # fmt: skip
    return typed_row(TARGET, {**CASE, **case}, {**known, **(figures or {})})


def lost(**case: Any) -> AnyRow:
    return typed_row(TARGET, {**CASE, **case}, {}, "oom", "CUDA out of memory")


settings = partial(default_settings, BENCH)


def test_cases_on_a_gpu() -> None:
    cases = BENCH.tasks(settings("cuda"))
    assert len(cases) == 5 * 4 * 3  # sizes, contexts, modes
    assert cases[0].case == StepCase(**{**CASE, "context_length": 128, "mode": "forward"})


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
    assert {"warmup_steps", "seed", "num_layers"} <= zero


def test_an_unknown_model_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigurationError, match="Unknown model 'huge'"):
        BENCH.tasks(settings("cuda", model=("huge",)))


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        ((row(10, mode="forward"), row(40), lost(context_length=1024), row(80, context_length=512)),
         ["3 of 4 configurations were measured.", "Step times vary by 1.0 %",
          "A step takes 40 ms (small, context length 256, train) to 80 ms (small, context length 512, train).",
          "The backward pass takes 2.000× the time of the forward pass.",  # half a step against a quarter
          "Out of memory: small, context length 1,024, train.",
          "| small, context length 1,024, train | oom | CUDA out of memory |"], ["**Unsteady"]),
        ((lost(),), ["Out of memory: small."], ["The backward pass takes"]),
        ((row(400), row(400, {"step_cv": 0.25}, context_length=512)),
         ["**Unsteady times** (CV above 10.0 %): step of small, context length 512: 25.0 %."], []),
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
    found = table(BENCH, (row(40), row(20, precision="tf32"))).rows
    assert [line[:2] for line in found] == [("small", "fp32"), ("small", "tf32")]


def test_figures() -> None:
    rows = (row(40), row(80, context_length=512))
    drawn = figures(BENCH, rows)
    assert list(drawn) == ["timing-step", "timing-phases"]
    assert drawn["timing-step"].series == (("small", ((256, 40), (512, 80))),)
    # forward a quarter, loss and optimizer an eighth each, backward a half
    assert [values for _, values in drawn["timing-phases"].series] == [(25,), (12.5,), (50,), (12.5,)]
