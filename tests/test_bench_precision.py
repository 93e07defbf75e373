"""The bench of precisions: its cases, and its section from hand-made rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from nsys_analyzer.experiments.model import AnyRow
from nsys_analyzer.experiments.precision import BENCH
from nsys_analyzer.experiments.steps import TARGET, StepCase
from nsys_analyzer.inputs.rows import to_json_values
from nsys_analyzer.report.model import Spread
from tests.support.rows import check, default_settings, figures, page, table, typed_row

GIB = 2**30
CASE = {
    "device": "cuda", "model": "small", "context_length": 256, "batch_size": 64, "mode": "forward-backward",
    "attention": "unfused", "warmup_steps": 5, "steps": 10, "seed": 0,
}  # fmt: skip


def row(
    precision: str, step_ms: float, peak_gib: float = 8, figures: dict[str, Any] | None = None, **case: Any
) -> AnyRow:
    known = {
        "peak_allocated_bytes": peak_gib * GIB, "step_ms": step_ms, "step_std_ms": 1.0, "forward_ms": step_ms / 3,
        "backward_ms": 2 * step_ms / 3, "tokens_per_s": 64 * 256e3 / step_ms,
    }  # fmt: skip
    values = {**CASE, "precision": precision, **case}
    return typed_row(TARGET, values, {**known, **(figures or {})})


def lost(precision: str, **case: Any) -> AnyRow:
    return typed_row(TARGET, {**CASE, "precision": precision, **case}, {}, "oom", "CUDA out of memory", {})


settings = partial(default_settings, BENCH)


def test_cases_on_a_gpu() -> None:
    cases = BENCH.tasks(settings("cuda"))
    assert len(cases) == 2 * 2 * 3  # models, modes, precisions
    assert cases[2].case == StepCase(**{**CASE, "batch_size": 4, "mode": "forward", "precision": "bf16"})


def test_a_cpu_is_not_asked_for_tf32() -> None:
    assert not [case for case in BENCH.tasks(settings("cpu")) if "tf32" in to_json_values(case.case).values()]


TOKENS = 64 * 256e3


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        ((row("fp32", 300, 8), row("tf32", 150, 8), row("bf16", 75, 6)),
         ["Speed-up over fp32 in mode forward-backward: small, tf32 2.000×; small, bf16 4.000×."], ["Out of memory"]),
        ((lost("fp32"), row("bf16", 75), row("fp32", 300, batch_size=32)),
         ["Out of memory: small, batch size 64, fp32."], ["Speed-up over fp32"]),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[AnyRow, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_speed_up_and_memory_are_against_fp32() -> None:
    rows = (row("fp32", 300, 8), row("tf32", 150, 8), row("bf16", 75, 6))
    assert table(BENCH, rows).rows == (
        ("small", "fp32", Spread(300, 1), None, TOKENS / 300, 8 * GIB, None),
        ("small", "tf32", Spread(150, 1), 2.0, TOKENS / 150, 8 * GIB, 1.0),
        ("small", "bf16", Spread(75, 1), 4.0, TOKENS / 75, 6 * GIB, 0.75),
    )


def test_figures() -> None:
    drawn = figures(BENCH, (row("fp32", 300), lost("bf16"), row("bf16", 50, 4, mode="forward")))
    assert list(drawn) == ["precision-throughput"]
    (throughput,) = drawn.values()
    assert throughput.groups == ("small, forward-backward", "small, forward")
    assert throughput.series == (("fp32", (TOKENS / 300, None)), ("bf16", (None, TOKENS / 50)))
