"""The bench of attention variants: its cases, its section from hand-made rows, its target."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import AnyRow as Row
from nsys_analyzer.experiments.model import Results
from nsys_analyzer.experiments.results import all_cases
from nsys_analyzer.experiments.variants import BENCH, TARGET, VariantsCase
from nsys_analyzer.report.model import Bars, Lines, Report, Section, Spread, Table, unfolded
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.runs.rows import typed
from tests.support.rows import default_settings

CASE = {
    "device": "cuda", "batch_size": 1, "heads": 4, "context_length": 1024, "d_head": 32, "precision": "fp32",
    "causal": False, "backward": True, "warmup_steps": 3, "steps": 10,
}  # fmt: skip
INPUTS = 3 * 4 * 1024 * 32 * 4


settings = partial(default_settings, BENCH, "cpu")


def row(implementation: str, forward_ms: float, peak_bytes: int = INPUTS, figures: Any = None, **case: Any) -> Row:
    known = {
        "inputs_bytes": INPUTS, "tolerance": 2e-5, "forward_max_error": 1e-6,
        "forward_peak_bytes": peak_bytes, "forward_total_bytes": 2 * peak_bytes,
        "forward_ms": forward_ms, "forward_std_ms": 0.5, "forward_min_ms": forward_ms, "forward_max_ms": forward_ms,
    }  # fmt: skip
    values = {**CASE, "implementation": implementation, **case}
    return Row("profiling_targets.variants", values, "ok", "", {**known, **(figures or {})}, {"gpu": "NVIDIA H200"})


def on_the_cpu(one: Row) -> Row:
    return Row(one.module, {**one.case, "device": "cpu"}, one.status, one.message, one.figures, {})


def section(*rows: Row) -> Section:
    """The section of rows as the file holds them."""
    return BENCH.section(Results(tuple(typed(row, TARGET) for row in rows)))


def text(*rows: Row) -> str:
    return render(Report("x", (section(*rows),)), {})


def table(caption: str, *rows: Row) -> tuple[Any, ...]:
    return _table(caption, *rows).rows


def _table(caption: str, *rows: Row) -> Table:
    blocks = unfolded(section(*rows).blocks)
    return next(one for one in blocks if isinstance(one, Table) and str(one.caption).startswith(caption))


def by_column(caption: str, *rows: Row) -> list[dict[str, Any]]:
    """The cells of each row of a table by the titles of its columns."""
    found = _table(caption, *rows)
    return [dict(zip([column.title for column in found.columns], cells, strict=True)) for cells in found.rows]


def test_cases() -> None:
    cases = all_cases(BENCH, settings(shape=("1x4x1024x32", "64x32x4096x128:bf16"), implementation=("naive", "flash")))
    assert len(cases) == 2 + 2 * 2 * 2  # ceilings in two precisions; two shapes, two variants, causal and not
    assert [case.case.precision for case in cases[:2]] == ["fp32", "bf16"]
    assert cases[-1].case == VariantsCase(
        device="cpu", implementation="flash", batch_size=64, heads=32, context_length=4096,
        d_head=128, precision="bf16", causal=True, backward=False, warmup_steps=1, steps=5,
    )  # fmt: skip
    assert cases[-1].label == "flash at 64×32×4,096×128 bf16, causal"


@pytest.mark.parametrize("shape", ["1x4x1024", "1x4x1024x32:fp16", "0x4x1024x32", "1x4x-8x32"])
def test_what_is_no_shape(shape: str) -> None:
    with pytest.raises(ConfigurationError, match="is no shape"):
        BENCH.cases(settings(shape=(shape,)))


def test_speed_ups_and_causal() -> None:
    rows = (
        row("naive", 30), row("naive", 30.5, causal=True), row("flash", 10), row("flash", 5, causal=True),
        row("naive", 60, d_head=64), row("flash", 12, d_head=64),
    )  # fmt: skip
    said = text(*rows)
    assert "Speed-up over naive, forward, not causal: flash 3.000× to 5.000×." in said  # 30 ÷ 10 and 60 ÷ 12
    assert "Speed-up over naive, forward, causal" not in said  # naive's mask is in it
    assert "fused make their mask in each call" in said
    on_cpu = text(*(on_the_cpu(one) for one in rows))
    assert "Speed-up over naive, forward, causal: flash 6.100×." in on_cpu  # 30.5 ÷ 5
    assert "C++" in on_cpu
    assert "The largest error of any variant in fp32 is 1.0e-06 (tolerance 2e-05)." in said
    cells = by_column("Forward:", *rows)[3]
    assert (cells["shape"], cells["variant"], cells["mask"]) == ("1×4×1,024×32 fp32", "flash", "causal")
    assert (cells["over naive"], cells["without mask ÷ causal"], cells["status"]) == (
        6.1,
        2.0,
        "ok",
    )  # 30.5 ÷ 5, 10 ÷ 5


def test_memory() -> None:
    full, causal = by_column("Forward:", row("naive", 30, 4 * INPUTS), row("naive", 31, 5 * INPUTS, causal=True))
    assert (full["peak"], full["allocated"], full["peak ÷ inputs"]) == (4 * INPUTS, 8 * INPUTS, 4.0)
    assert (causal["peak"], causal["allocated"]) == (5 * INPUTS, 10 * INPUTS)


def test_growth_is_fitted() -> None:
    rows = [
        row(name, ms * factor**power, peak * factor**power, context_length=512 * factor)
        for name, ms, peak, power in (("naive", 1.0, 2**22, 2), ("flash", 0.5, 2**18, 1))
        for factor in (1, 2, 4)
    ]
    # naive four times as much from step to step: the power 2; flash twice: the power 1
    assert "grows with the tokens to the power: naive 2.00, flash 1.00." in text(*rows)
    caption = "Growth from 512 to 2,048 tokens (1 × 4 heads, d 32, fp32"
    assert table(caption, *rows) == (("naive", "2.00", "2.00"), ("flash", "1.00", "1.00"))
    lines = [block for block in section(*rows).blocks if isinstance(block, Lines)]
    assert lines[0].series[0] == ("naive", ((512, 4.0), (1024, 16.0), (2048, 64.0)))  # MiB


def test_growth_leaves_out_what_does_not_grow() -> None:
    rows = [row("tiled", 1, 1_000_000 + 500 * n, context_length=n) for n in (512, 1024, 2048)]
    # the differences 256,000 and 512,000 double with the tokens, the bytes do not: 1.256, 1.512 and 2.024 MB
    assert table("Growth", *rows)[0][1] == "1.00"
    assert table("Growth", *rows[1:])[0][1] == "0.42"  # of two lengths log2(2.024 ÷ 1.512)


def test_each_pass_has_its_own_status() -> None:
    lost = row("naive", 30)
    lost = Row(lost.module, lost.case, "oom", "", lost.figures, {})  # forward was measured, backward was not
    early = Row(lost.module, {**lost.case, "causal": True}, "oom", "", {}, {})
    rows = (lost, early, row("flash", 1, figures={"forward_backward_ms": 4.0}))
    assert [cells["status"] for cells in by_column("Forward:", *rows)] == ["ok", "oom", "ok"]
    assert [cells["status"] for cells in by_column("Forward and backward:", *rows)] == ["oom", "oom", "ok"]
    assert "Out of memory: naive at 1×4×1,024×32 fp32, backward only; naive at 1×4×1,024×32 fp32, causal." in text(
        *rows
    )


def test_out_of_memory_keeps_its_row_and_what_was_measured() -> None:
    whole = row("naive", 30)
    lost = Row(whole.module, whole.case, "oom", "CUDA out of memory", whole.figures, whole.machine)
    said = text(lost, row("flash", 10))
    assert "Out of memory: naive at 1×4×1,024×32 fp32, backward only." in said
    (forward,) = by_column("Forward:", lost)
    assert (forward["ms"], forward["over naive"], forward["status"]) == (Spread(30, 0.5), 1.0, "ok")
    both = by_column("Forward and backward:", lost, row("flash", 10, figures={"forward_backward_ms": 30}))
    assert (both[0]["ms"], both[0]["status"]) == (None, "oom")
    assert "No variant ran out of memory." in text(row("flash", 10))


def test_forward_and_backward_have_their_tables() -> None:
    both = {"forward_backward_ms": 40.0, "forward_backward_std_ms": 1.0, "forward_backward_max_error": 2e-6,
            "forward_backward_peak_bytes": 7 * INPUTS, "forward_backward_total_bytes": 9 * INPUTS}  # fmt: skip
    rows = (row("naive", 30, figures={**both, "forward_backward_ms": 100.0}), row("flash", 10, figures=both))
    flash = by_column("Forward and backward:", *rows)[1]
    assert (flash["over naive"], flash["peak"], flash["allocated"]) == (2.5, 7 * INPUTS, 9 * INPUTS)  # 100 ÷ 40
    assert table("Largest error", *rows)[0] == ("naive", "fp32", 1, "1.0e-06", "2.0e-06", "2e-05")
    assert "2.0e-06 (tolerance" in text(*rows)


def test_what_failed_says_why() -> None:
    wrong = Row("profiling_targets.variants", row("blocked", 1).case, "failed", "WrongResultError: 0.5",
                {"forward_max_error": 0.5, "tolerance": 2e-5})  # fmt: skip
    said = text(row("naive", 30), row("fused", 31), row("flash", 30), wrong)
    assert "Failed: blocked at 1×4×1,024×32 fp32." in said
    assert "| WrongResultError: 0.5 |" in said
    assert "Failed" not in text(row("naive", 30), row("fused", 29))


def test_rates_and_memory_beyond_the_hardware_limit() -> None:
    # 4·d·H·N² = 4·32·4·1024² FLOPs in 0.001 ms are 5.4e14 a second: beyond an H200's 67 TFLOP/s in fp32.
    assert "Impossible rate" in text(row("flash", 0.001))
    assert "Impossible rate" not in text(row("flash", 1.0))
    # PyTorch's makes three in TF32: as many FLOPs in 0.0035 ms are 1.5e14, three times that 4.6e14 below 4.95e14
    assert "Impossible rate" not in text(row("torch", 0.0035))
    assert "Impossible rate" in text(row("torch", 0.0031))  # 5.2e14, in all three
    # naive must hold 4·1024² scores and 4·1024·32 outputs of 4 bytes, 17,301,504 in all.
    assert "Impossible memory" in text(row("naive", 1.0, 16_000_000))
    assert "Impossible memory" not in text(row("naive", 1.0, 17_301_504))


def test_figures() -> None:
    blocks = section(row("naive", 30), row("flash", 10)).blocks
    figures = {block.key: block for block in blocks if isinstance(block, Bars)}
    assert list(figures) == ["variants-speed-up-not-causal"]
    assert figures["variants-speed-up-not-causal"].series == (("flash", (3.0,)),)


def test_a_section_without_any_figure() -> None:
    lost = Row("profiling_targets.variants", row("naive", 1).case, "timeout", "after 60 s")
    said = text(lost)
    assert "Out of time: naive at 1×4×1,024×32 fp32." in said
    assert "| after 60 s |" in said


def measured(**changes: Any) -> dict[str, Any]:
    pytest.importorskip("torch", reason="the targets need PyTorch")
    from profiling_targets import harness, variants

    small = {"device": "cpu", "context_length": 48, "d_head": 8, "warmup_steps": 0, "steps": 2}
    return harness.measured(TARGET, VariantsCase(**{**small, **changes}), variants.measure)


def test_a_wrong_variant_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the targets need PyTorch")
    from profiling_targets import variants

    monkeypatch.setitem(variants.IMPLEMENTATIONS, "torch", lambda *tensors: tensors[2].clone())
    found = measured(implementation="torch")
    assert found["status"] == "failed"
    assert "forward_max_error is" in found["message"]
    assert found["figures"]["forward_max_error"] > found["figures"]["tolerance"]
    assert "forward_ms" not in found["figures"]


def test_an_error_of_one_small_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="the targets need PyTorch")
    from profiling_targets import variants

    def wrong(q: Any, k: Any, v: Any, causal: bool) -> Any:
        k = k.detach() + (k - k.detach()) * (1 + 1.5e-5)  # the gradient of k alone is larger, by a 67,000th
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    monkeypatch.setitem(variants.IMPLEMENTATIONS, "torch", wrong)
    found = measured(implementation="torch", backward=True)
    assert found["figures"]["forward_backward_max_error"] < found["figures"]["tolerance"]
    assert found["figures"]["forward_backward_relative_error"] == pytest.approx(1.5e-5, rel=0.1)
    assert "forward_backward_relative_error is 1.5e-05, and the tolerance 1e-05" in found["message"]


def test_a_zero_gradient_is_not_divided_by() -> None:
    figures = measured(implementation="torch", context_length=1, backward=True)["figures"]  # those of q and k are zero
    assert figures["forward_backward_relative_error"] <= figures["relative_tolerance"]


def test_relative_errors_are_shown_where_they_are() -> None:
    known = {"forward_relative_error": 3e-7, "forward_backward_relative_error": 4e-7, "relative_tolerance": 1e-5}
    expected = ("flash", "fp32", 1, "1.0e-06", "2e-05", "3.0e-07", "4.0e-07", "1e-05")
    assert table("Largest error", row("flash", 1, figures=known)) == (expected,)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_result_that_is_no_number_is_wrong(monkeypatch: pytest.MonkeyPatch, broken: float) -> None:
    pytest.importorskip("torch", reason="the targets need PyTorch")
    from profiling_targets import variants

    monkeypatch.setitem(variants.IMPLEMENTATIONS, "torch", lambda *tensors: tensors[2] + broken)
    assert measured(implementation="torch")["status"] == "failed"


def test_a_long_call_is_timed_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the targets need PyTorch")
    from profiling_targets import variants

    monkeypatch.setattr(variants, "_LONG_MS", 0.0)
    assert measured(implementation="torch", steps=9)["figures"]["forward_steps"] == 3
    monkeypatch.setattr(variants, "_LONG_MS", 1e9)
    assert measured(implementation="torch", steps=9)["figures"]["forward_steps"] == 9


def test_backward_where_there_is_one() -> None:
    figures = measured(implementation="tiled", backward=True, causal=True)["figures"]
    assert figures["forward_backward_max_error"] < figures["tolerance"]
    assert figures["forward_backward_peak_bytes"] > figures["forward_peak_bytes"]
    assert measured(implementation="torch", precision="bf16")["figures"]["inputs_bytes"] == 3 * 4 * 48 * 8 * 2
    assert measured(implementation="naive", precision="bf16")["status"] == "unsupported"


def test_heads_of_a_large_shape_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="the targets need PyTorch")
    from profiling_targets import variants

    monkeypatch.setattr(variants, "_CHECKED_SCORES", 3 * 48**2)
    q = torch.randn(1, 7, 48, 8)
    assert (variants.checked_heads(q)[0] == q[0, [0, 3, 6]]).all()  # three of seven, with the first and the last


@pytest.mark.slow
def test_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the targets need PyTorch")
    same = {**CASE, "device": "cpu", "context_length": 80, "backward": False, "warmup_steps": 0, "steps": 2}
    names = ("naive", "blocked", "fused", "flash", "torch")
    cases = [{**same, "implementation": name, "causal": causal} for name in names for causal in (False, True)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    program = [sys.executable, "-m", "profiling_targets.variants", "--cases", "cases.json", "--rows", "rows.jsonl"]
    subprocess.run(program, cwd=tmp_path, check=True, capture_output=True)
    rows = [
        Row("profiling_targets.variants", **json.loads(line))
        for line in (tmp_path / "rows.jsonl").read_text().splitlines()
    ]
    assert [one.case for one in rows] == cases
    if {one.status for one in rows[:8]} == {"unsupported"}:
        pytest.skip(rows[0].message)
    assert {one.status for one in rows} == {"ok"}
    # output and scores: 4 heads · 80 · (32 + 80) numbers of 4 bytes
    assert rows[0].figures["forward_peak_bytes"] == 4 * 80 * (32 + 80) * 4
    assert len(by_column("Forward:", *rows)) == len(rows)
