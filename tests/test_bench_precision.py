"""The bench of precisions: its cases, its section from hand-made rows, and from real ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import AnyRow, Results, Row
from nsys_analyzer.experiments.precision import BENCH, DTYPES_TARGET, DtypesCase, DtypesFigures
from nsys_analyzer.experiments.section import CeilingsCase, CeilingsFigures
from nsys_analyzer.experiments.steps import TARGET, StepCase
from nsys_analyzer.report.model import Bars, Report, Spread, Table, unfolded
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.runs.rows import written
from tests.support.rows import default_settings, typed_row

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


def other(figures: dict[str, Any], status: str = "ok", **case: Any) -> AnyRow:
    return typed_row(DTYPES_TARGET, {"device": "cuda", **case}, figures, status, machine={})


def blocks(*rows: AnyRow) -> list[Any]:
    return list(unfolded(BENCH.section(Results(rows)).blocks))


def text(*rows: AnyRow, **more: Any) -> str:
    section = BENCH.section(Results(rows, **more))
    return render(Report("x", (section,)), {}).replace("\N{NO-BREAK SPACE}", " ")


settings = partial(default_settings, BENCH)


def test_cases_on_a_gpu() -> None:
    cases = BENCH.cases(settings("cuda"))
    steps = [case for case in cases if case.target == TARGET]
    assert len(steps) == 2 * 2 * 3  # models, modes, precisions
    assert {(case.case.model, case.case.batch_size) for case in steps} == {("small", 64), ("large", 32)}
    assert steps[2].case == StepCase(**{**CASE, "mode": "forward", "precision": "bf16"})
    looks = [case.case.experiment for case in cases if case.target == DTYPES_TARGET]
    assert looks == [*6 * ["dtypes"], "sums", *7 * ["products"]]
    assert BENCH.precisions(settings("cuda")) == ("fp32", "tf32", "bf16")


def test_a_cpu_is_not_asked_for_tf32() -> None:
    assert not [case for case in BENCH.cases(settings("cpu")) if "tf32" in written(case.case).values()]


@pytest.mark.parametrize("wrong", ["small", "small:", "small:0", "small:many", ":4"])
def test_a_model_needs_its_batch_size(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no model with a batch size|Unknown model ''"):
        BENCH.cases(settings("cuda", model=(wrong,)))


def test_speed_up_and_memory_are_against_fp32() -> None:
    rows = (row("fp32", 300, 8), row("tf32", 150, 8), row("bf16", 75, 6))
    table = next(block for block in blocks(*rows) if isinstance(block, Table))
    tokens = 64 * 256e3
    assert table.rows == (
        ("small", "forward-backward", "fp32", Spread(300, 1), 1.0, tokens / 300, 8 * GIB, 1.0, "ok"),
        ("small", "forward-backward", "tf32", Spread(150, 1), 2.0, tokens / 150, 8 * GIB, 1.0, "ok"),
        ("small", "forward-backward", "bf16", Spread(75, 1), 4.0, tokens / 75, 6 * GIB, 0.75, "ok"),
    )
    assert "Speed of forward-backward against fp32: small: TF32 2.000×, bf16 autocast 4.000×." in text(*rows)


def test_without_its_fp32_a_row_has_no_speed_up() -> None:
    rows = (lost("fp32"), row("bf16", 75), row("fp32", 300, batch_size=32))
    table = next(block for block in blocks(*rows) if isinstance(block, Table))
    assert [line[4] for line in table.rows] == [None, None, 1.0]
    assert [line[-1] for line in table.rows] == ["oom", "ok", "ok"]
    said = text(*rows)
    assert "Speed of" not in said
    assert "Out of memory: small, batch size 64, precision fp32, context 256, forward-backward." in said


def test_figures() -> None:
    rows = (row("fp32", 300), lost("bf16"), row("bf16", 50, 4, mode="forward"))
    throughput, memory = (block for block in blocks(*rows) if isinstance(block, Bars))
    assert throughput.groups == ("small, forward-backward", "small, forward")
    tokens = 64 * 256e3
    assert throughput.series == (("fp32", (tokens / 300, None)), ("bf16", (None, tokens / 50)))
    assert (memory.key, memory.series[1]) == ("precision-memory", ("bf16", (None, 4)))


def test_fp32_that_ran_as_tf32_is_flagged() -> None:
    ceiling = Row("ceilings", CeilingsCase("cuda", "fp32"), "ok", "", CeilingsFigures(10))
    said = text(row("fp32", 300, figures={"product_bits": 10}), ceilings={"fp32": ceiling})
    assert "called fp32 ran as TF32" in said
    assert "in 1 of 1 rows: fp32 kept 10 bits" in said


def test_dtypes_and_sums() -> None:
    plain = {"dtypes": [["fc1 output", "float32"], ["loss", "float32"]]}
    cast = {"dtypes": [["fc1 output", "bfloat16"], ["loss", "float32"]]}
    sums = {"sum_exact": 10.0, "sum_fp32_of_fp32": 10.001, "sum_fp16_of_fp16": 9.5, "sum_bf16_of_bf16": 4.0,
            "sum_fp32_of_fp16": 10.0021, "sum_fp32_of_fp16_converted": 10.0021}  # fmt: skip
    said = text(
        row("fp32", 300),
        other(plain, experiment="dtypes", model="toy", precision="fp32"),
        other(cast, experiment="dtypes", model="toy", precision="bf16"),
        other({}, "unsupported", experiment="dtypes", model="toy", precision="fp16"),
        other(sums, experiment="sums", terms=1000),
    )
    assert "Under autocast these stay in fp32: loss." in said
    squeezed = " ".join(said.split())
    assert "| fc1 output | `float32` | `bfloat16` | `unsupported` |" in squeezed
    assert "0.01 added 1,000 times gives 9.5 in fp16 and 10.001 in fp32." in said
    assert "| fp16 | fp16 | 9.5 | -5.0e-02 |" in squeezed  # 9.5 ÷ 10 − 1
    assert "| fp32 | fp16, converted to fp32 first | 10.0021 | +2.1e-04 |" in squeezed


def test_products() -> None:
    found = {"product_error": 4e-4, "rounding_error": 2e-4}
    said = " ".join(
        text(
            row("fp32", 300),
            other(found, experiment="products", precision="fp16", accumulation="reduced", length=16384),
            other({}, "unsupported", experiment="products", precision="fp16", accumulation="fp16", length=16384),
        ).split()
    )
    assert "sums of 16,384 terms" in said
    assert "| fp16 | reduced | 4.00e-04 | 2.00e-04 | 2.000× | ok |" in said
    assert "| fp16 | fp16 | – | – | – | unsupported |" in said


def test_sums_that_were_not_measured_say_so() -> None:
    lacking = Row(DTYPES_TARGET.module, DtypesCase("cuda", "sums", terms=9), "failed", "a bug", DtypesFigures())
    assert "0.01 added 9 times, one by one. Not measured: failed, a bug." in text(row("fp32", 300), lacking)


def test_real_rows() -> None:
    pytest.importorskip("torch", reason="the targets need PyTorch")
    from profiling_targets import dtypes as looks
    from profiling_targets import training_steps
    from profiling_targets.harness import measured

    tiny = {"d_model": 32, "d_ff": 64, "num_heads": 4, "vocab_size": 50, "context_length": 16, "length": 256}
    rows = []
    for case in BENCH.cases(settings("cpu", **tiny)):
        measure: Any = looks.measure if case.target == DTYPES_TARGET else training_steps.measure
        found = measured(case.target, case.case, measure)
        assert found["status"] in ("ok", "unsupported"), found["message"]
        rows.append(
            typed_row(case.target, found["case"], found["figures"], found["status"], found["message"] or "", {})
        )
    said = text(*rows)
    assert "Speed of forward-backward against fp32: small: bf16 autocast" in said
    assert "Under autocast these stay in fp32: parameters," in said
    assert "gives 9.953125 in fp16 and 10.00013 in fp32." in said
