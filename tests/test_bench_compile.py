"""The bench of torch.compile: its cases, and its section from hand-made rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nsys_analyzer.experiments.compile import BENCH, compile_s, repaid_after, speed_up
from nsys_analyzer.experiments.model import AnyRow
from nsys_analyzer.experiments.steps import TARGET, StepCase, StepFigures
from tests.support.rows import cells, check, default_settings, figures, page, typed_row

PARTED = ("forward", "loss", "backward", "optimizer", "step")
CASE = {
    "device": "cuda", "attention": "unfused", "warmup_steps": 5, "steps": 10, "seed": 0, "model": "small",
    "context_length": 256, "precision": "fp32", "mode": "train", "batch_size": 4,
}  # fmt: skip
LARGE = {"model": "large"}


settings = partial(default_settings, BENCH)


def row(compiled: bool, step_ms: float, changes: dict[str, Any] | None = None, **figures: Any) -> AnyRow:
    """Forward is 0.3 of a step, loss 0.1, backward 0.4, optimizer 0.2; the first step takes 20 s more."""
    known: dict[str, Any] = {
        "forward_ms": 0.3 * step_ms, "loss_ms": 0.1 * step_ms, "backward_ms": 0.4 * step_ms,
        "optimizer_ms": 0.2 * step_ms, "step_ms": step_ms, "step_std_ms": 1.0, "first_step_ms": 20_000 + step_ms,
        "peak_allocated_bytes": 2**32,
    }  # fmt: skip
    known |= figures
    known = {**{f"{key[:-3]}_median_ms": ms for key, ms in known.items() if key[:-3] in PARTED}, **known}
    case = {**CASE, "compile": compiled, **(changes or {})}
    return typed_row(TARGET, case, known)


def test_cases_are_eager_first_then_compiled() -> None:
    cases = BENCH.tasks(settings())
    assert len(cases) == 2 * 3 * 2 * 2  # eager and compiled, three models, two precisions, two modes
    assert [case.case.compile for case in cases] == [False] * 12 + [True] * 12
    assert cases[1].case == StepCase(**CASE)
    assert cases[13].label == "compile on, small, context length 256, fp32, train"


def test_on_a_cpu_one_narrow_layer() -> None:
    cases = BENCH.tasks(settings("cpu"))
    assert [case.case.compile for case in cases] == [False, True]
    assert [getattr(cases[0].case, key) for key in ("d_model", "d_ff", "num_layers", "num_heads")] == [256, 1024, 1, 4]


LOST = replace(
    row(True, 1), status="oom", message="CUDA out of memory", figures=StepFigures(peak_allocated_bytes=2**33)
)


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        # small 100 ÷ 80, large 50 ÷ 20; phases are shares of the step, so that each is as much faster
        # 20 s of compiling: 20,000 ÷ (100 - 80) = 1,000 steps; 20,000 ÷ (50 - 20) = 667
        ((row(False, 100), row(True, 80), row(False, 50, LARGE), row(True, 20, LARGE)),
         ["makes a step 1.250× (small) to 2.500× (large) as fast", "makes forward 1.250× (small) to 2.500× (large)",
          "Compiling takes 20.0 s (large, repaid after 667 steps) to 20.0 s (small, repaid after 1,000 steps)."],
         ["Unsteady"]),
        ((row(False, 100), row(True, 125)), ["0.800×", "Compiling takes 20.0 s (small, never repaid)."], []),
        # the cheaper one, 10 s, saves 5 ms: 2,000 steps; the dearer one, 20 s, saves 20 ms: 1,000
        ((row(False, 100), row(True, 80), row(False, 55, LARGE), row(True, 50, LARGE, first_step_ms=10_050)),
         ["10.0 s (large, repaid after 2,000 steps) to 20.0 s (small"], []),
        ((row(False, 28), row(True, 15, step_cv=0.2, loss_cv=0.3)),
         ["**Unsteady times** (CV above 10.0 %): step of small, compile on: 20.0 %. Other"], []),
        # memory is known even so
        ((row(False, 100), LOST), ["| small | 4.0 GiB | 8.0 GiB |", "CUDA out of memory"], []),
        ((row(True, 80),), ["Nothing ran out of memory."], ["as fast"]),  # against no eager row
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[AnyRow, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_a_pair() -> None:
    # a slow step or two lift the mean to 90, the median stays: 100 ÷ 80
    pair = {False: row(False, 100), True: row(True, 90, step_median_ms=80)}
    assert speed_up(pair, "step") == 1.25
    assert compile_s(pair) == pytest.approx(20.01)  # 20,090 - 80 ms
    assert repaid_after(pair) == 1000  # 20,010 ÷ 20 is 1,000.5
    assert (speed_up({False: row(False, 100)}, "step"), compile_s({False: row(False, 1)})) == (None, None)


def test_the_table_and_its_bars() -> None:
    rows = (row(False, 100), row(True, 80))
    (line,) = cells(BENCH, rows, "Speed-up")
    gains = {"model": "small", "forward": 1.25, "backward": 1.25, "step": 1.25}
    assert line.items() >= {**gains, "compile s": 20.0, "repaid after steps": 1000}.items()
    bars = figures(BENCH, rows)["compile-speed-up"]
    assert bars.groups == ("small",)
    assert bars.series == (("forward", (1.25,)), ("backward", (1.25,)), ("step", (1.25,)))
