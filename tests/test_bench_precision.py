"""The bench of precisions: its cases, and its section from hand-made rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import AnyRow
from nsys_analyzer.experiments.precision import BENCH, DTYPES_TARGET
from nsys_analyzer.experiments.steps import TARGET, StepCase
from nsys_analyzer.report.model import Spread
from nsys_analyzer.runs.rows import written
from tests.support.rows import check, default_settings, figures, page, table, typed_row

GIB = 2**30
BITS = {"fp32": 23, "tf32": 10, "bf16": 7}
CASE = {
    "device": "cuda", "model": "small", "context_length": 256, "batch_size": 64, "mode": "forward-backward",
    "attention": "unfused", "warmup_steps": 5, "steps": 10, "seed": 0,
}  # fmt: skip


def row(
    precision: str, step_ms: float, peak_gib: float = 8, figures: dict[str, Any] | None = None, **case: Any
) -> AnyRow:
    known = {
        "forward_flops": 1e12, "backward_flops": 2e12, "product_bits": BITS[precision], "parameters_bytes": GIB,
        "logits_bytes": GIB, "gradients_bytes": GIB, "optimizer_bytes": 0, "peak_allocated_bytes": peak_gib * GIB,
        "step_ms": step_ms, "step_std_ms": 1.0, "forward_ms": step_ms / 3, "backward_ms": 2 * step_ms / 3,
        "tokens_per_s": 64 * 256e3 / step_ms,
    }  # fmt: skip
    values = {**CASE, "precision": precision, **case}
    return typed_row(TARGET, values, {**known, **(figures or {})})


def lost(precision: str, **case: Any) -> AnyRow:
    return typed_row(TARGET, {**CASE, "precision": precision, **case}, {}, "oom", "CUDA out of memory", {})


def other(figures: dict[str, Any], status: str = "ok", message: str = "", **case: Any) -> AnyRow:
    return typed_row(DTYPES_TARGET, {"device": "cuda", **case}, figures, status, message, machine={})


settings = partial(default_settings, BENCH)


def test_cases_on_a_gpu() -> None:
    cases = BENCH.tasks(settings("cuda"))
    steps = [case for case in cases if case.target == TARGET]
    assert len(steps) == 2 * 2 * 3  # models, modes, precisions
    assert {(case.case.model, case.case.batch_size) for case in steps} == {("small", 64), ("large", 32)}
    assert steps[2].case == StepCase(**{**CASE, "mode": "forward", "precision": "bf16"})
    looks = [case.case.experiment for case in cases if case.target == DTYPES_TARGET]
    assert looks == [*6 * ["dtypes"], "sums"]


def test_a_cpu_is_not_asked_for_tf32() -> None:
    assert not [case for case in BENCH.tasks(settings("cpu")) if "tf32" in written(case.case).values()]


@pytest.mark.parametrize("wrong", ["small", "small:", "small:0", "small:many", ":4"])
def test_a_model_needs_its_batch_size(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no model with a batch size|Unknown model ''"):
        BENCH.tasks(settings("cuda", model=(wrong,)))


TOKENS = 64 * 256e3
PLAIN = {"dtypes": [["fc1 output", "float32"], ["loss", "float32"]]}
CAST = {"dtypes": [["fc1 output", "bfloat16"], ["loss", "float32"]]}
SUMS = {"sum_exact": 10.0, "sum_fp32_of_fp32": 10.001, "sum_fp16_of_fp16": 9.5, "sum_bf16_of_bf16": 4.0,
        "sum_fp32_of_fp16": 10.0021, "sum_fp32_of_fp16_converted": 10.0021}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        ((row("fp32", 300, 8), row("tf32", 150, 8), row("bf16", 75, 6)),
         ["Speed of forward-backward against fp32: small, tf32 2.000×; small, bf16 4.000×."], ["another precision"]),
        ((lost("fp32"), row("bf16", 75), row("fp32", 300, batch_size=32)),
         ["Out of memory: small, batch size 64, fp32."], ["Speed of"]),
        ((row("fp32", 300),
          other(PLAIN, experiment="dtypes", model="toy", precision="fp32"),
          other(CAST, experiment="dtypes", model="toy", precision="bf16"),
          other({}, "unsupported", experiment="dtypes", model="toy", precision="fp16"),
          other(SUMS, experiment="sums", terms=1000)),
         ["Under autocast these stay in fp32: loss.", "| fc1 output | `float32` | `bfloat16` | `unsupported` |",
          "0.01 added 1,000 times gives 9.5 in fp16 and 10.001 in fp32.",
          "| fp16 | fp16 | 9.5 | -5.0e-02 |",  # 9.5 ÷ 10 − 1
          "| fp32 | fp16, converted to fp32 first | 10.0021 | +2.1e-04 |"], []),
        ((row("fp32", 300), other({}, "failed", "a bug", experiment="sums", terms=9)),
         ["| toy | failed | a bug |"], ["one by one"]),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[AnyRow, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_fp32_that_ran_as_tf32_is_flagged() -> None:
    said = page(BENCH, [row("fp32", 300, figures={"product_bits": 10})])
    check(said, ["**Matmuls in another precision than asked for**, in 1 of 1 rows: fp32 kept 10 bits"])


def test_speed_up_and_memory_are_against_fp32() -> None:
    rows = (row("fp32", 300, 8), row("tf32", 150, 8), row("bf16", 75, 6))
    assert table(BENCH, rows).rows == (
        ("small", "fp32", Spread(300, 1), None, TOKENS / 300, 8 * GIB, None),
        ("small", "tf32", Spread(150, 1), 2.0, TOKENS / 150, 8 * GIB, 1.0),
        ("small", "bf16", Spread(75, 1), 4.0, TOKENS / 75, 6 * GIB, 0.75),
    )


def test_figures() -> None:
    drawn = figures(BENCH, (row("fp32", 300), lost("bf16"), row("bf16", 50, 4, mode="forward")))
    assert list(drawn) == ["precision-throughput", "precision-memory"]
    throughput, memory = drawn.values()
    assert throughput.groups == ("small, forward-backward", "small, forward")
    assert throughput.series == (("fp32", (TOKENS / 300, None)), ("bf16", (None, TOKENS / 50)))
    assert memory.series[1] == ("bf16", (None, 4))
