"""The bench of memory: its cases, and its section from hand-made rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nsys_analyzer.experiments.memory import BENCH, TARGET, MemoryFigures
from nsys_analyzer.experiments.model import AnyRow, Results
from nsys_analyzer.experiments.section import make_section
from nsys_analyzer.report.model import Lines, Report
from nsys_analyzer.report.renderers.markdown import render
from tests.support.rows import check, default_settings, figures, page, typed_row

GIB = 2**30


settings = partial(default_settings, BENCH)


def phase(name: str, peak_bytes: int, **changes: Any) -> dict[str, Any]:
    """A phase of 10 ms."""
    known = {
        "name": name, "start_ms": 0.0, "end_ms": 10.0, "start_bytes": GIB, "peak_bytes": peak_bytes,
    }  # fmt: skip
    return {**known, **changes}


def row(mode: str = "train", context_length: int = 256, model: str = "small", **figures: Any) -> AnyRow:
    case = {
        "device": "cuda", "model": model, "context_length": context_length, "mode": mode, "precision": "fp32",
        "num_layers": 0, "batch_size": 4, "warmup_steps": 3,
    }  # fmt: skip
    names = {"forward": 3, "loss": 4, "backward": 5, "optimizer": 4} if mode == "train" else {"forward": 1}
    known: dict[str, Any] = {
        "phases": [phase(name, size * GIB) for name, size in names.items()],
        "step_peak_bytes": max(names.values()) * GIB, "reserved_peak_bytes": 8 * GIB, "base_bytes": GIB,
        "timeline_ms_bytes": [[0.0, GIB], [5.0, 5 * GIB], [10.0, GIB]],
    }  # fmt: skip
    if mode == "train":
        line = {"source": "transformer.py:65 unfused_attention", "code": "weights = scores.exp()  # (B, H, S, S)"}
        kept = {"layer_saves_bytes": 64 * 2**20, "kept_bytes": GIB}
        known |= {**kept, "layer_saves": [{**line, "tensors": 1, "bytes": 64 * 2**20}]}
    return typed_row(TARGET, case, {**known, **figures})


def test_cases_on_a_gpu() -> None:
    cases = BENCH.tasks(settings())
    assert len(cases) == 2 * 3 * 2 * 2  # models, lengths, modes, precisions
    assert cases[0].label == "small, context length 128, forward, fp32"


EQUAL = [
    phase("forward", 4 * GIB),
    phase("loss", 4 * GIB + 8, start_bytes=3 * GIB),
    phase("backward", 4 * GIB + 4, start_bytes=4 * GIB + 4),  # never above where it starts
    phase("optimizer", 3 * GIB),
]


def lost(model: str, status: str, message: str, **figures: Any) -> AnyRow:
    return replace(row(model=model), status=status, message=message, figures=MemoryFigures(**figures))


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        ((row(), row(context_length=512, step_peak_bytes=7 * GIB), row("forward")),
         ["The highest memory is 7.0 GiB: small, context length 512, train, in backward.",
          "The memory of a full step peaks in backward (2 of 2).",
          "A layer saves up to 64.0 MiB of activations for backward (small, context length 256, train).",
          "Nothing ran out of memory."],
         ["Rows without a measurement"]),
        # Of equal peaks the phases count that rise to them.
        ((row(phases=EQUAL), row(phases=[phase("forward", 3 * GIB), *EQUAL[1:]])),
         ["peaks in forward and loss (1 of 2), loss (1 of 2)."], []),
        ((row(), lost("large", "oom", "CUDA out of memory", reserved_peak_bytes=GIB)),
         ["Out of memory: large.", "| large | oom | CUDA out of memory |"], []),
        ((lost("large", "oom", "CUDA out of memory"),), ["Out of memory: large."], []),
        ((row(), lost("large", "failed", "ValueError: no such layer"), lost("xl", "timeout", "more than 600 s")),
         ["Out of time: xl. Failed: large.", "Rows without a measurement: 2",
          "| xl | timeout | more than 600 s |", "| large | failed | ValueError: no such layer |"],
         ["Nothing ran out of memory"]),
        ((row(),), ["| small | 1.0 GiB | 3.0 GiB | 4.0 GiB | 5.0 GiB | 4.0 GiB | 8.0 GiB |"], []),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[AnyRow, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_the_first_timelines_are_seen_at_once() -> None:
    rows = [row(mode, length, model) for model in ("small", "large") for length in (128, 256) for mode in MODES]
    seen = [block.key for block in make_section(BENCH, Results(tuple(rows))).blocks if isinstance(block, Lines)]
    assert seen == ["memory-small-256-train-fp32", "memory-large-256-train-fp32"]
    drawn = figures(BENCH, rows)
    assert list(drawn)[2:] == ["memory-small-256-forward-fp32", "memory-large-256-forward-fp32"]
    every = list(drawn.values())
    assert every[0].series == (("memory", ((0.0, 1.0), (5.0, 5.0), (10.0, 1.0))),)
    assert every[0].spans[0] == ("forward", 0.0, 10.0)
    assert (every[0].y_axis, every[0].steps) == ("GiB", True)


MODES = ("forward", "train")


def test_tables_in_sight_fit_a_page() -> None:
    rows = [row(mode, length, model) for model in ("small", "large") for length in (128, 512) for mode in MODES]
    folded, widest = False, 0
    report = Report("x", (make_section(BENCH, Results(tuple(rows))),))
    for line in render(report, {figure.key: "" for figure in report.figures}).splitlines():
        folded = (folded or line.startswith("<details>")) and not line.startswith("</details>")
        if line.startswith("|") and not folded:
            widest = max(widest, len(line))
    assert 0 < widest <= 120
