"""The bench of attention: its cases, and its section from hand-made rows."""

from dataclasses import replace
from typing import Any

import pytest

from nsys_analyzer.experiments.attention import BENCH
from nsys_analyzer.experiments.model import AnyRow as Row
from nsys_analyzer.experiments.passes import TARGET, PassesCase, PassesFigures
from nsys_analyzer.report.model import Spread
from tests.support.rows import cells, check, default_settings, figures, page, typed_row

CASE = {"device": "cuda", "implementation": "unfused", "heads": 1, "batch_size": 8, "warmup_steps": 3, "steps": 10}


def row(length: int, compiled: bool, forward_ms: float, **figures: Any) -> Row:
    scores = 3 * 8 * length**2 * 4
    known = {
        "forward_ms": forward_ms, "backward_ms": 2 * forward_ms, "peak_bytes": 2 * scores, "inputs_bytes": 1000,
        "before_backward_bytes": scores + 8 * length * 64 * 4, "first_step_ms": 3 * forward_ms + 7,
    }  # fmt: skip
    case = {**CASE, "d_head": 64, "context_length": length, "compile": compiled}
    return typed_row(TARGET, case, {**known, **figures}, machine={"gpu": "NVIDIA H200"})


def lost(length: int, compiled: bool, status: str, message: str) -> Row:
    return replace(row(length, compiled, 1), status=status, message=message, figures=PassesFigures())


EAGER, LONG, COMPILED = row(1024, False, 10), row(4096, False, 160), row(1024, True, 5)


def test_cases() -> None:
    cases = BENCH.tasks(default_settings(BENCH, "cuda"))
    assert len(cases) == 2 * 4 * 5  # eager and compiled, four widths, five lengths
    assert cases[0].case == PassesCase(**CASE, d_head=16, context_length=256, compile=False)
    assert [case.case.compile for case in cases] == [False] * 20 + [True] * 20


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        # 3·S² + 64·S of 4,096 and 1,024 tokens: (3·4096 + 64) ÷ (3·1024 + 64) = 3.938, times 4 → log₄(15.75) = 1.989;
        # 10 ÷ 5 and 160 ÷ 40, forward as backward
        ((EAGER, LONG, COMPILED, row(4096, True, 40)),
         ["to the power 1.99", "2.000× to 4.000× as fast", "Nothing ran out of memory",
          "measured: 10 passes of each shape, batch 8, fp32"], ["Unsteady"]),
        ((EAGER, row(1024, True, 50, forward_cv=0.3)),
         ["**Unsteady times** (CV above 10.0 %): forward of compile on: 30.0 %."], []),
        ((row(1024, False, 0.492, forward_std_ms=0.145), row(1024, True, 0.246)),
         ["| off | 0.492 ± 0.145 | – |", "| on | 0.246 | 2.000× |"], []),
        ((EAGER, lost(16384, False, "oom", "CUDA out of memory")),
         ["Out of memory: context length 16,384.", "| context length 16,384 | oom | CUDA out of memory |"],
         ["Nothing ran out"]),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[Row, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_tables_and_figures() -> None:
    # Compiling took 3 · 5 + 7 ms without the 5 + 10 of a later step.
    compiled = cells(BENCH, [EAGER, COMPILED], "Time")[1]
    assert compiled == {"compile": "on", "forward ms": Spread(5, None), "speed-up": 2.0,
                        "backward ms": Spread(10, None), "compile ms": 7}  # fmt: skip
    saved = 3 * 8 * 1024**2 * 4
    memory = {"compile": "on", "saved for backward": saved + 8 * 1024 * 64 * 4, "peak": 2 * saved}
    assert cells(BENCH, [EAGER, COMPILED], "Memory")[1] == memory
    drawn = figures(BENCH, [EAGER, LONG, COMPILED])  # a single point is no curve
    assert [figure.y_axis for figure in drawn.values()] == ["ms", "ms", "MiB saved for backward"]
    assert drawn["attention-forward"].series == (("compile off", ((1024, 10), (4096, 160))),)
