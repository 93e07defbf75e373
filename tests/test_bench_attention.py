"""The bench of attention: its cases, its section from hand-made rows, and what its target says is saved."""

from dataclasses import replace
from typing import Any

import pytest

from nsys_analyzer.experiments.attention import BENCH, TARGET, AttentionCase, AttentionFigures
from nsys_analyzer.experiments.model import AnyRow as Row
from nsys_analyzer.experiments.results import all_cases
from nsys_analyzer.report.model import Spread
from profiling_targets.attention import saved_tensors
from profiling_targets.attention_variants import Passes, later_keys
from profiling_targets.harness import allocations
from profiling_targets.transformer import unfused_attention
from tests.support.rows import COLD, cells, check, default_settings, figures, page, typed_row

CASE = {"device": "cuda", "batch_size": 8, "precision": "fp32", "warmup_steps": 5, "steps": 100}


def row(length: int, compiled: bool, forward_ms: float, **figures: Any) -> Row:
    scores = 3 * 8 * length**2 * 4
    known = {
        "forward_ms": forward_ms, "backward_ms": 2 * forward_ms, "peak_bytes": 2 * scores, "inputs_bytes": 1000,
        "before_backward_bytes": scores + 8 * length * 64 * 4, "first_step_ms": 3 * forward_ms + 7,
        "compiled_graphs": 1,
    }  # fmt: skip
    case = {**CASE, "d": 64, "context_length": length, "compile": compiled}
    return typed_row(TARGET, case, {**known, **figures}, machine={"gpu": "NVIDIA H200"})


def lost(length: int, compiled: bool, status: str, message: str) -> Row:
    return replace(row(length, compiled, 1), status=status, message=message, figures=AttentionFigures())


EAGER, LONG, COMPILED = row(1024, False, 10), row(4096, False, 160), row(1024, True, 5)
UNSTEADY = (EAGER, LONG, row(1024, True, 50, forward_cv=0.3), row(4096, True, 40))


def test_cases() -> None:
    cases = all_cases(BENCH, default_settings(BENCH, "cuda"))
    assert len(cases) == 1 + 2 * 4 * 5  # the ceilings; eager and compiled, four widths, five lengths
    assert cases[1].case == AttentionCase(**CASE, d=16, context_length=256, compile=False)
    assert [case.environment for case in (cases[1], cases[-1])] == [{}, COLD]  # eager first, compiled last
    assert not any(case.environment for case in all_cases(BENCH, default_settings(BENCH, "cpu")))


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        # 3·S² + 64·S of 4,096 and 1,024 tokens: (3·4096 + 64) ÷ (3·1024 + 64) = 3.938, times 4 → log₄(15.75) = 1.989;
        # 10 ÷ 5 and 160 ÷ 40, forward as backward
        ((EAGER, LONG, COMPILED, row(4096, True, 40)),
         ["to the power 1.99", "2.000× to 4.000× as fast", "No shape ran out of memory",
          "| saved for backward at d 64, context 1,024 |"], ["Unsteady", "Nothing was compiled"]),
        # 10 ÷ 50 = 0.2 of forward is left out; of the steady ones 20 ÷ 100 and 160 ÷ 40 are the ends
        (UNSTEADY, ["0.200× to 4.000× as fast",
                    "**Unsteady passes**, CV above 10.0 %: d 64, context 1,024, compiled, forward: 30.0 %."], []),
        (tuple(row(1024, on, 10 - on, forward_cv=0.2, backward_cv=0.2) for on in (False, True)), [], ["as fast"]),
        ((row(1024, False, 0.492, forward_std_ms=0.145), row(1024, True, 0.246)),
         ["| eager | 0.492 ± 0.145 | – |", "| compiled | 0.246 | 2.000× |"], []),
        ((EAGER, COMPILED), ["2.000×", "from PyTorch's cache"], []),
        # of two environments the later row counts: 10 ÷ 4
        ((EAGER, COMPILED, replace(row(1024, True, 4), environment=COLD)), ["2.500×", "without a cache"], ["2.000×"]),
        ((EAGER, row(1024, True, 9, compiled_graphs=0)), ["Nothing was compiled"], []),
        ((EAGER, lost(16384, False, "oom", "CUDA out of memory")),
         ["Out of memory: d 64, context 16,384.", "| 64 | 16,384 | eager | – | – | oom |", "| CUDA out of memory |"],
         []),
        ((EAGER, lost(1024, True, "failed", "no compiler")),
         ["Failed: d 64, context 1,024, compiled.", "| d 64, context 1,024, compiled | failed | no compiler |"],
         ["No shape ran out of memory"]),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[Row, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_tables_and_figures() -> None:
    # Without an eager row there is no speed-up; compiling took 3 · 5 + 7 ms without the 5 + 10 of a later step.
    shape = {"d": 64, "context": 1024, "code": "compiled"}
    times = {"forward ms": Spread(5, None), "backward ms": Spread(10, None), "compile ms": 7, "status": "ok"}
    assert cells(BENCH, [COMPILED], "Time") == [{**shape, **times}]
    saved = 3 * 8 * 1024**2 * 4
    memory = {"inputs": 1000, "saved for backward": saved + 8 * 1024 * 64 * 4, "peak": 2 * saved}
    assert cells(BENCH, [COMPILED], "Memory") == [{**shape, **memory}]
    drawn = figures(BENCH, [EAGER, LONG, COMPILED])  # a single point is no curve
    assert [figure.y_axis for figure in drawn.values()] == ["ms", "ms", "MiB saved for backward"]
    assert drawn["attention-forward"].series == (("eager", ((1024, 10), (4096, 160))),)


def test_what_is_saved_is_freed_again() -> None:
    masked = later_keys(16, 16, "cpu")
    passes = Passes.random(lambda q, k, v: unfused_attention(q, k, v, masked), (2, 16, 4), "cpu")
    with allocations("cpu") as counted:
        saved = saved_tensors(passes.forward)
    # the scores, their exponentials and the weights, (B, S, S) each
    assert ([2, 16, 16], "float32", 3, 3 * 2 * 16**2 * 4) in saved
    assert counted.total_bytes > 3 * 2 * 16**2 * 4
    assert counted.alive_bytes == 0
