"""The bench of attention variants: its cases, its section from hand-made rows, its target."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from nsys_analyzer.errors import ConfigurationError  # noqa: E402
from nsys_analyzer.experiments.model import AnyRow  # noqa: E402
from nsys_analyzer.experiments.variants import BENCH, TARGET, VariantsCase, VariantsFigures  # noqa: E402
from nsys_analyzer.report.model import Spread  # noqa: E402
from profiling_targets import harness, variants  # noqa: E402
from tests.support.rows import cells, check, default_settings, figures, page, typed_row  # noqa: E402

CASE = {
    "device": "cuda", "batch_size": 1, "heads": 4, "context_length": 1024, "d_head": 32, "precision": "fp32",
    "causal": False, "backward": True, "warmup_steps": 3, "steps": 10,
}  # fmt: skip
INPUTS = 3 * 4 * 1024 * 32 * 4
BOTH = {"forward_backward_ms": 40.0, "forward_backward_std_ms": 1.0, "forward_backward_max_error": 2e-6,
        "forward_backward_peak_bytes": 7 * INPUTS, "forward_backward_total_bytes": 9 * INPUTS}  # fmt: skip
settings = partial(default_settings, BENCH, "cpu")


def row(implementation: str, forward_ms: float, peak_bytes: int = INPUTS, more: Any = None, **case: Any) -> AnyRow:
    known = {
        "inputs_bytes": INPUTS, "tolerance": 2e-5, "forward_max_error": 1e-6,
        "forward_peak_bytes": peak_bytes, "forward_total_bytes": 2 * peak_bytes,
        "forward_ms": forward_ms, "forward_std_ms": 0.5, "forward_min_ms": forward_ms, "forward_max_ms": forward_ms,
    }  # fmt: skip
    values = {**CASE, "implementation": implementation, **case}
    machine = {"gpu": "NVIDIA H200"} if values["device"] == "cuda" else {}
    return typed_row(TARGET, values, {**known, **(more or {})}, machine=machine)


def ended(one: AnyRow, status: Any, message: str = "", **figures: Any) -> AnyRow:
    return replace(one, status=status, message=message, figures=VariantsFigures(**figures) if figures else one.figures)


def compared() -> tuple[AnyRow, ...]:
    times = [("naive", 30, False, 32), ("naive", 30.5, True, 32), ("flash", 10, False, 32), ("flash", 5, True, 32),
             ("naive", 60, False, 64), ("flash", 12, False, 64)]  # fmt: skip
    return tuple(row(name, ms, causal=causal, d_head=d) for name, ms, causal, d in times)


#: Forward was measured, backward was not; and of the causal one nothing.
LOST = ended(row("naive", 30), "oom", "CUDA out of memory")
EARLY = ended(row("naive", 30, causal=True), "oom", tolerance=2e-5)


def test_cases() -> None:
    cases = BENCH.tasks(settings(shape=("1x4x1024x32", "64x32x4096x128:bf16"), implementation=("naive", "flash")))
    assert len(cases) == 2 * 2 * 2  # two shapes, two variants, causal and not
    assert cases[-1].case == VariantsCase(
        device="cpu", implementation="flash", batch_size=64, heads=32, context_length=4096,
        d_head=128, precision="bf16", causal=True, backward=False, warmup_steps=1, steps=5,
    )  # fmt: skip
    assert cases[-1].label == "flash, causal on, batch size 64, heads 32, context length 4,096, d head 128, bf16"


@pytest.mark.parametrize("shape", ["1x4x1024", "1x4x1024x32:fp16", "0x4x1024x32", "1x4x-8x32"])
def test_what_is_no_shape(shape: str) -> None:
    with pytest.raises(ConfigurationError, match="is no shape"):
        BENCH.tasks(settings(shape=(shape,)))


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        # 30 ÷ 10 and 60 ÷ 12
        (compared(), ["Speed-up over naive, forward, not causal: flash 3.000× to 5.000×.",
                      "fused make their mask in each call", "Nothing ran out of memory.",
                      "The largest error of any variant in fp32 is 1.0e-06 (tolerance 2e-05)."], ["Failed"]),
        ((LOST, EARLY, row("flash", 10)), ["Out of memory: naive, causal off; naive, causal on."], []),
        ((row("naive", 30, more=BOTH),), ["2.0e-06 (tolerance"], []),
        ((row("naive", 30), ended(row("blocked", 1), "failed", "WrongResultError: 0.5", tolerance=2e-5)),
         ["Failed: blocked.", "| WrongResultError: 0.5 |"], []),
        ((ended(row("naive", 1), "timeout", "after 60 s", tolerance=2e-5),), ["Out of time: variants."], []),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: list[AnyRow], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_the_passes_side_by_side() -> None:
    found = cells(BENCH, compared(), "Forward:")[3]
    # 30.5 ÷ 5
    assert found.items() >= {"implementation": "flash", "causal": "on", "over naive": 6.1, "d head": 32}.items()
    (full,) = cells(BENCH, [row("naive", 30, 4 * INPUTS)], "Forward:")
    assert (full["peak"], full["allocated"], full["peak ÷ inputs"]) == (4 * INPUTS, 8 * INPUTS, 4.0)
    rows = (row("naive", 30, more={**BOTH, "forward_backward_ms": 100.0}), row("flash", 10, more=BOTH))
    flash = cells(BENCH, rows, "Forward and backward:")[1]
    assert (flash["over naive"], flash["peak"], flash["allocated"]) == (2.5, 7 * INPUTS, 9 * INPUTS)  # 100 ÷ 40
    assert flash["error"] == "2.0e-06"
    kept = cells(BENCH, (LOST, EARLY), "Forward:")
    assert [(one["causal"], one["ms"], one["status"]) for one in kept] == [
        ("off", Spread(30, 0.5), "oom"),
        ("on", None, "oom"),
    ]


def test_figures() -> None:
    rows = [row("naive", factor**2, 2**22 * factor**2, context_length=512 * factor) for factor in (1, 2, 4)]
    memory = figures(BENCH, rows)["variants-memory-by-tokens"]
    assert memory.series[0][1] == ((512, 4.0), (1024, 16.0), (2048, 64.0))  # MiB
    (drawn,) = figures(BENCH, (row("naive", 30), row("flash", 10))).items()
    assert (drawn[0], drawn[1].series) == ("variants-speed-up-not-causal", (("flash", (3.0,)),))


def measured(**changes: Any) -> dict[str, Any]:
    small = {"device": "cpu", "context_length": 48, "d_head": 8, "warmup_steps": 0, "steps": 2}
    return harness.measured(TARGET, VariantsCase(**{**small, **changes}), variants.measure)


@pytest.mark.parametrize(
    ("wrong", "is_above"), [(lambda v: v.clone(), True), (lambda v: v + float("nan"), False),
                            (lambda v: v + float("inf"), False)],
)  # fmt: skip
def test_a_wrong_variant_is_not_timed(wrong: Any, is_above: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(variants.IMPLEMENTATIONS, "torch", lambda *tensors: wrong(tensors[2]))
    found = measured(implementation="torch")
    assert found["status"] == "failed"
    assert "forward_max_error is" in found["message"]
    assert "forward_ms" not in found["figures"]
    assert not is_above or found["figures"]["forward_max_error"] > found["figures"]["tolerance"]


def test_an_error_of_one_small_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Any, k: Any, v: Any, causal: bool) -> Any:
        k = k.detach() + (k - k.detach()) * (1 + 1.5e-5)  # the gradient of k alone is larger, by a 67,000th
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    monkeypatch.setitem(variants.IMPLEMENTATIONS, "torch", wrong)
    found = measured(implementation="torch", backward=True)
    assert found["figures"]["forward_backward_max_error"] < found["figures"]["tolerance"]
    assert found["figures"]["forward_backward_relative_error"] == pytest.approx(1.5e-5, rel=0.1)
    assert "forward_backward_relative_error is 1.5e-05, and the tolerance 1e-05" in found["message"]


@pytest.mark.parametrize(("long_ms", "steps"), [(0.0, 3), (1e9, 9)])
def test_a_long_call_is_timed_three_times(long_ms: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_LONG_MS", long_ms)
    assert measured(implementation="torch", steps=9)["figures"]["forward_steps"] == steps


def test_backward_where_there_is_one() -> None:
    figures = measured(implementation="tiled", backward=True, causal=True)["figures"]
    assert figures["forward_backward_max_error"] < figures["tolerance"]
    assert figures["forward_backward_peak_bytes"] > figures["forward_peak_bytes"]
    # Of one token the gradients of q and k are zero: nothing is divided by them.
    figures = measured(implementation="torch", context_length=1, backward=True)["figures"]
    assert figures["forward_backward_relative_error"] <= figures["relative_tolerance"]
    assert measured(implementation="torch", precision="bf16")["figures"]["inputs_bytes"] == 3 * 4 * 48 * 8 * 2
    assert measured(implementation="flash")["status"] == "unsupported"  # Triton has no CPU


def test_heads_of_a_large_shape_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_CHECKED_SCORES", 3 * 48**2)
    q = torch.randn(1, 7, 48, 8)
    assert (variants.checked_heads(q)[0] == q[0, [0, 3, 6]]).all()  # three of seven, with the first and the last
