"""The bench of FlashAttention: its cases, and its section from hand-made rows."""

from __future__ import annotations

from typing import Any

import pytest

from nsys_analyzer.experiments.flash import BENCH, flops_per_s
from nsys_analyzer.experiments.model import AnyRow
from nsys_analyzer.experiments.passes import TARGET, PassesCase
from tests.support.rows import check, default_settings, figures, page, typed_row

CASE = {"device": "cuda", "batch_size": 1, "heads": 8, "causal": True,
        "measured_ms": 100, "warmup_steps": 3, "steps": 10}  # fmt: skip


def row(implementation: str, length: int, end_to_end_ms: float, **changes: Any) -> AnyRow:
    case = {**CASE, "implementation": implementation, "precision": "bf16", "d_head": 64, "context_length": length}
    figures = {"forward_ms": end_to_end_ms / 4, "backward_ms": end_to_end_ms, "end_to_end_ms": end_to_end_ms,
               "peak_bytes": 2**30, "kernel": implementation}  # fmt: skip
    status, message = changes.pop("status", "ok"), changes.pop("message", "")
    case |= {key: changes.pop(key) for key in tuple(changes) if key in case}
    return typed_row(TARGET, case, {**figures, **changes} if status == "ok" else changes, status, message)


def test_cases() -> None:
    cases = BENCH.tasks(default_settings(BENCH, "cuda"))
    assert len(cases) == 4 * 2 * 4 * 10  # implementations, precisions, widths, lengths
    shape = {"precision": "bf16", "d_head": 16, "context_length": 128}
    assert cases[0].case == PassesCase(**{**CASE, **shape, "implementation": "flash"})
    assert len(BENCH.tasks(default_settings(BENCH, "cpu"))) == 3 * 3


FP32 = {"precision": "fp32"}


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        # At 4,096 tokens 20 ÷ 9 and 12 ÷ 9; at 128 tokens 3 ÷ 1 of the fastest peer
        ((row("flash", 128, 3), row("unfused", 128, 2), row("sdpa", 128, 1),
          row("flash", 4096, 9), row("unfused", 4096, 20), row("sdpa", 4096, 12), row("sdpa_flash", 4096, 18)),
         ["At context 4,096 in bf16, forward and backward, flash is 2.222× as fast as unfused attention.",
          "flash is 1.333× as fast as PyTorch's SDPA.", "| 128 | 3.000 | 2.000 | 1.000 | – | 3.000× |",
          "Nothing ran out of memory."], []),
        ((row("unfused", 128, 1.0, **FP32, max_error=0.0), row("flash", 128, 1.0, **FP32, max_error=3e-6)),
         ["| unfused | 0.0e+00 | unfused |", "| flash | 3.0e-06 | flash |"], []),
        ((row("flash", 65536, 30.0), row("unfused", 65536, 0, status="oom", message="CUDA out of memory."),
          row("unfused", 32768, 9.0), row("flash", 32768, 3.0, peak_bytes=2**20)),
         ["Out of memory: unfused, context length 65,536.",
          "At context 32,768 (bf16, d_head 64), unfused attention needs 1.0 GiB beside its inputs, and flash "
          "needs 1.0 MiB.",
          "| unfused, context length 65,536 | oom | CUDA out of memory. |", "| 65,536 | 30.00 | oom | – |"], []),
        ((row("sdpa", 128, 1.0), row("flash", 128, 0, status="failed", message="RuntimeError: wrong by 1.0e+00")),
         ["Failed: flash.", "| RuntimeError: wrong by 1.0e+00 |"], ["as fast as"]),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[AnyRow, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_flops() -> None:
    # 8·4096·4097 ÷ 2 = 67,125,248 scores of 4·64 FLOPs forward, 10·64 backward
    one = row("flash", 4096, 1.0)
    assert flops_per_s(one, "forward") == 4 * 64 * 67_125_248 / 0.25e-3
    assert flops_per_s(one, "backward") == 10 * 64 * 67_125_248 / 1e-3
    assert flops_per_s(row("flash", 4096, 1.0, causal=False), "end_to_end") == 14 * 64 * 8 * 4096**2 / 1e-3


def test_figures() -> None:
    rows = (row("flash", 256, 2.0), row("flash", 128, 1.0), row("flash", 128, 9.0, d_head=128), row("sdpa", 128, 3.0))
    drawn = figures(BENCH, rows)
    assert list(drawn) == ["flash-bf16-forward", "flash-bf16-backward", "flash-bf16-end-to-end"]
    *_, figure = drawn.values()
    assert figure.series == (("flash", ((128, 1.0), (256, 2.0))),)  # a single point is no curve
    assert (figure.log_x, figure.log_y, figure.y_axis) == (True, True, "ms")
