"""The bench of attention variants: its cases, and its section from hand-made rows."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nsys_analyzer.experiments.model import AnyRow
from nsys_analyzer.experiments.passes import TARGET, PassesCase, PassesFigures
from nsys_analyzer.experiments.variants import BENCH
from nsys_analyzer.report.model import Spread
from tests.support.rows import cells, check, default_settings, figures, page, typed_row

CASE = {
    "device": "cuda", "batch_size": 1, "heads": 4, "context_length": 1024, "d_head": 32, "precision": "fp32",
    "causal": False, "warmup_steps": 3, "steps": 10,
}  # fmt: skip
MIB = 2**20
BOTH = {"end_to_end_ms": 40.0, "end_to_end_std_ms": 1.0, "peak_bytes": 7 * MIB}
settings = partial(default_settings, BENCH, "cpu")


def row(implementation: str, forward_ms: float, peak_bytes: int = MIB, more: Any = None, **case: Any) -> AnyRow:
    known = {
        "max_error": 1e-6, "forward_peak_bytes": peak_bytes,
        "forward_ms": forward_ms, "forward_std_ms": 0.5, "forward_min_ms": forward_ms, "forward_max_ms": forward_ms,
    }  # fmt: skip
    values = {**CASE, "implementation": implementation, **case}
    machine = {"gpu": "NVIDIA H200"} if values["device"] == "cuda" else {}
    return typed_row(TARGET, values, {**known, **(more or {})}, machine=machine)


def ended(one: AnyRow, status: Any, message: str = "", figures: PassesFigures | None = None) -> AnyRow:
    return replace(one, status=status, message=message, figures=figures or one.figures)


def compared() -> tuple[AnyRow, ...]:
    times = [("naive", 30, False, 32), ("naive", 30.5, True, 32), ("flash", 10, False, 32), ("flash", 5, True, 32),
             ("naive", 60, False, 64), ("flash", 12, False, 64)]  # fmt: skip
    return tuple(row(name, ms, causal=causal, d_head=d) for name, ms, causal, d in times)


#: Forward was measured, backward was not; and of the causal one nothing.
LOST = ended(row("naive", 30), "oom", "CUDA out of memory")
EARLY = ended(row("naive", 30, causal=True), "oom", "", PassesFigures())


def test_cases() -> None:
    cases = BENCH.tasks(settings(context_length=(512, 4096), implementation=("naive", "flash")))
    assert len(cases) == 2 * 2 * 2  # two lengths, two variants, causal and not
    assert cases[-1].case == PassesCase(
        device="cpu", implementation="flash", batch_size=1, heads=4, context_length=4096, d_head=32, causal=True,
        warmup_steps=1, steps=5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        # 30 ÷ 10 and 60 ÷ 12
        (compared(), ["Speed-up over naive, forward, not causal: flash 3.000× to 5.000×.",
                      "fused make their mask in each call", "Nothing ran out of memory.",
                      "The largest error of any variant in fp32 is 1.0e-06."], ["Failed"]),
        ((LOST, EARLY, row("flash", 10)), ["Out of memory: naive, causal off; naive, causal on."], []),
        ((row("naive", 30), ended(row("blocked", 1), "failed", "ArithmeticError: 0.5", PassesFigures())),
         ["Failed: blocked.", "| ArithmeticError: 0.5 |"], []),
        ((ended(row("naive", 1), "timeout", "after 60 s", PassesFigures()),), ["Out of time: attention."], []),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: list[AnyRow], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_the_passes_side_by_side() -> None:
    found = cells(BENCH, compared(), "Forward:")[3]
    # 30.5 ÷ 5
    assert found.items() >= {"implementation": "flash", "causal": "on", "over naive": 6.1, "d head": 32}.items()
    rows = (row("naive", 30, more={**BOTH, "end_to_end_ms": 100.0}), row("flash", 10, more=BOTH))
    flash = cells(BENCH, rows, "Forward and backward:")[1]
    assert (flash["over naive"], flash["peak"]) == (2.5, 7 * MIB)  # 100 ÷ 40
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
