"""The bench of memory: its cases, and its section from hand-made rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nsys_analyzer.experiments.memory import BENCH, TARGET, MemoryFigures, MemoryRow
from nsys_analyzer.experiments.model import Results
from nsys_analyzer.experiments.section import make_section
from nsys_analyzer.report.model import Lines, Report
from nsys_analyzer.report.renderers.markdown import render
from tests.support.rows import check, default_settings, figures, page, typed_row

GIB = 2**30


settings = partial(default_settings, BENCH)


def phase(name: str, peak_bytes: int, **changes: Any) -> dict[str, Any]:
    """A phase of 10 ms."""
    known = {
        "name": name, "start_ms": 0.0, "end_ms": 10.0, "start_bytes": GIB, "peak_bytes": peak_bytes, "end_bytes": GIB,
        "allocations": 100, "frees": 100, "allocated_bytes": 8 * GIB, "wall_ms": 10.0,
    }  # fmt: skip
    return {**known, **changes}


def row(mode: str = "train", context_length: int = 256, model: str = "small", **figures: Any) -> MemoryRow:
    case = {
        "device": "cuda", "model": model, "context_length": context_length, "mode": mode, "precision": "fp32",
        "num_layers": 0, "batch_size": 4, "warmup_steps": 3, "steps": 5, "snapshot": "",
    }  # fmt: skip
    names = {"forward": 3, "loss": 4, "backward": 5, "optimizer": 4} if mode == "train" else {"forward": 1}
    known: dict[str, Any] = {
        "parameter_bytes": GIB // 2, "moment_bytes": GIB, "logits_bytes": 2**20, "residual_bytes": 4 * 2**20,
        "step_ms": 30.0,
        "phases": [phase(name, size * GIB) for name, size in names.items()],
        **{f"{name}_peak_bytes": size * GIB for name, size in names.items()},
        "step_peak_bytes": max(names.values()) * GIB, "allocated_peak_bytes": 6 * GIB, "reserved_peak_bytes": 8 * GIB,
        "timeline_ms_bytes": [[0.0, GIB], [5.0, 5 * GIB], [10.0, GIB]],
    }  # fmt: skip
    if mode == "train":
        line = {"source": "transformer.py:65 unfused_attention", "code": "weights = scores.exp()  # (B, H, S, S)"}
        kept = {"layer_saves_bytes": 64 * 2**20, "layer_saves_by_shapes_bytes": 64 * 2**20, "kept_bytes": GIB}
        known |= {**kept, "layer_saves": [{**line, "tensors": 1, "bytes": 64 * 2**20}]}
    return typed_row(TARGET, case, {**known, **figures})


def test_cases_on_a_gpu() -> None:
    cases = BENCH.tasks(settings())
    # Two models, each with three lengths in fp32 and the longest in bf16, forward alone and trained.
    assert len(cases) == 2 * (3 + 1) * 2
    assert [case.label for case in cases if case.case.precision == "bf16"] == [
        f"{model}, context length 512, {mode}, bf16" for model in ("small", "large") for mode in ("forward", "train")
    ]
    kept = [case.case.snapshot for case in cases if case.case.snapshot]
    assert kept == ["snapshots/small_ctx128_forward_fp32.pickle", "snapshots/small_ctx128_train_fp32.pickle"]


def test_snapshots_of_all_and_of_none() -> None:
    assert all(case.case.snapshot for case in BENCH.tasks(settings(snapshots="all")))
    assert not any(case.case.snapshot for case in BENCH.tasks(settings(snapshots="none")))


def test_cases_on_a_cpu() -> None:
    cases = BENCH.tasks(settings("cpu"))
    assert [case.label for case in cases] == [
        "small, context length 32, forward, fp32",
        "small, context length 32, train, fp32",
    ]
    assert not any(case.case.snapshot for case in cases)


KEPT = replace(row(), case=replace(row().case, snapshot="snapshots/small.pickle"))
EQUAL = [
    phase("forward", 4 * GIB),
    phase("loss", 4 * GIB + 8, start_bytes=3 * GIB),
    phase("backward", 4 * GIB + 4, start_bytes=4 * GIB + 4),  # never above where it starts
    phase("optimizer", 3 * GIB),
]


def lost(model: str, status: str, message: str, **figures: Any) -> MemoryRow:
    return replace(row(model=model), status=status, message=message, figures=MemoryFigures(**figures))


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        ((row(), row(context_length=512, step_peak_bytes=7 * GIB), row("forward")),
         ["Memory is highest in small, context length 512, train: 7.0 GiB, in backward.",
          "The peak of a full step is in backward (2 of 2).",
          "A layer saves up to 64.0 MiB of activations for backward (small, context length 256, train), 1.000× the",
          "Nothing ran out of memory."],
         ["What was not measured", "memory_viz"]),
        # Of equal peaks the phases count that rise to them.
        ((row(phases=EQUAL), row(phases=[phase("forward", 3 * GIB), *EQUAL[1:]])),
         ["is in forward and loss (1 of 2), loss (1 of 2)."], []),
        ((row(), lost("large", "oom", "CUDA out of memory", parameter_bytes=GIB)),
         ["Out of memory: large.", "| large | oom | CUDA out of memory |"], []),
        ((lost("large", "oom", "CUDA out of memory"),), ["Out of memory: large."], []),
        ((row(), lost("large", "failed", "ValueError: no such layer"), lost("xl", "timeout", "more than 600 s")),
         ["Out of time: xl. Failed: large.", "What was not measured, and why: 2 rows",
          "| xl | timeout | more than 600 s |", "| large | failed | ValueError: no such layer |"],
         ["Nothing ran out of memory"]),
        ((row(base_bytes=GIB, inactive_split_peak_bytes=3 * GIB // 2),),
         ["| small | 1.0 GiB | 5.0 GiB | 6.0 GiB | 8.0 GiB | 1.5 GiB | 30.00 |"], []),
        # A row without these figures leaves them out.
        ((row(),), ["| small | 5.0 GiB | 6.0 GiB | 8.0 GiB | 30.00 |"], []),
        ((KEPT,), ["[small.pickle](snapshots/small.pickle)"], []),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[MemoryRow, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_snapshots_are_linked_from_where_the_section_is_read() -> None:
    check(page(BENCH, [KEPT], folder="bench/memory"), ["[small.pickle](bench/memory/snapshots/small.pickle)"])


def test_the_first_timelines_are_seen_at_once() -> None:
    rows = [row(mode, length, model) for model in ("small", "large") for length in (128, 256) for mode in MODES]
    seen = [block.key for block in make_section(BENCH, Results(tuple(rows))).blocks if isinstance(block, Lines)]
    assert seen == ["memory-small-256-train-fp32", "memory-large-256-train-fp32"]
    drawn = figures(BENCH, rows)
    assert list(drawn)[2:] == ["memory-small-256-forward-fp32", "memory-large-256-forward-fp32"]
    every = list(drawn.values())
    assert every[0].series == (("memory", ((0.0, 1.0), (5.0, 5.0), (10.0, 1.0))),)
    assert every[0].spans[0] == ("forward", 0.0, 10.0)
    assert (every[0].y_axis, every[0].steps, every[2].y_axis) == ("GiB", True, "MiB")


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
