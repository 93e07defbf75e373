"""The bench of memory: its cases, and its section from hand-made rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nsys_analyzer.analysis.summary.statistics import DeviceMemory
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.experiments.memory import BENCH, TARGET, MemoryFigures, MemoryRow
from nsys_analyzer.experiments.model import Results
from nsys_analyzer.report.model import Lines, Report
from nsys_analyzer.report.renderers.markdown import render
from tests.support.rows import check, default_settings, figures, page, typed_row

GIB = 2**30


settings = partial(default_settings, BENCH)


def phase(name: str, peak_bytes: int, **changes: Any) -> dict[str, Any]:
    """A phase of 10 ms that is issued in 6 of them, of which the allocator takes 1."""
    known = {
        "name": name, "start_ms": 0.0, "end_ms": 10.0, "start_bytes": GIB, "peak_bytes": peak_bytes, "end_bytes": GIB,
        "allocations": 100, "frees": 100, "allocated_bytes": 8 * GIB, "counted_peak_bytes": peak_bytes, "teeth": 3,
        "rise_bytes_per_ms": 1e6, "fall_bytes_per_ms": 2e6, "device_allocations": 0, "device_frees": 0,
        "device_calls_ms": 0, "wall_ms": 10.0, "issue_ms": 6.0, "cold_ms": 40.0, "allocator_ms": 1.0,
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
        "residual_seen_bytes": 4 * 2**20, "step_ms": 30.0, "cold_step_ms": 90.0, "cold_device_calls": 77,
        "phases": [phase(name, size * GIB) for name, size in names.items()],
        **{f"{name}_peak_bytes": size * GIB for name, size in names.items()},
        "step_peak_bytes": max(names.values()) * GIB, "allocated_peak_bytes": 6 * GIB, "reserved_peak_bytes": 8 * GIB,
        "timeline_ms_bytes": [[0.0, GIB], [5.0, 5 * GIB], [10.0, GIB]],
        "largest": [{"source": "", "code": "", "phase": "backward", "bytes": 2**20, "count": 9, "at_peak": 4}],
    }  # fmt: skip
    if mode == "train":
        line = {"source": "transformer.py:65 unfused_attention", "code": "weights = scores.exp()  # (B, H, S, S)"}
        kept = {"layer_saves_bytes": 64 * 2**20, "layer_saves_by_shapes_bytes": 64 * 2**20, "kept_bytes": GIB}
        known |= {**kept, "layer_saves": [{**line, "tensors": 1, "bytes": 64 * 2**20}]}
    return typed_row(TARGET, case, {**known, **figures})


def test_cases_on_a_gpu() -> None:
    cases = BENCH.cases(settings())
    # Two models, each with three lengths in fp32 and the longest in bf16, forward alone and trained.
    assert len(cases) == 2 * (3 + 1) * 2
    assert [case.label for case in cases if case.case.precision == "bf16"] == [
        f"{model}, context 512, {mode}, bf16" for model in ("small", "large") for mode in ("forward", "train")
    ]
    kept = [case.case.snapshot for case in cases if case.case.snapshot]
    assert kept == ["snapshots/small_ctx128_forward_fp32.pickle", "snapshots/small_ctx128_train_fp32.pickle"]


def test_snapshots_of_all_and_of_none() -> None:
    assert all(case.case.snapshot for case in BENCH.cases(settings(snapshots="all")))
    assert not any(case.case.snapshot for case in BENCH.cases(settings(snapshots="none")))


def test_cases_on_a_cpu() -> None:
    cases = BENCH.cases(settings("cpu"))
    assert [case.label for case in cases] == ["small, context 32, forward, fp32", "small, context 32, train, fp32"]
    assert not any(case.case.snapshot for case in cases)
    assert BENCH.captures
    assert BENCH.captures(settings("cpu")).targets == ()


def test_what_is_profiled() -> None:
    assert BENCH.captures
    profiled = BENCH.captures(settings(num_layers=4))
    (target,) = profiled.targets
    assert target.name == "small_ctx512_train_fp32"
    assert target.program[-2:] == ("--num-layers", "4")
    assert profiled.memory


KEPT = replace(row(), case=replace(row().case, snapshot="snapshots/small.pickle"))
DRIVER = "**cudaMalloc in the recorded step**: small 256 train fp32 calls the driver"
# 6 ÷ 8 GiB are handed out of what is reserved; 90 ms ÷ 30 ms with an empty cache, and 77 calls of cudaMalloc.
HELD, COLD_STEP = "5.0 GiB | 6.0 GiB | 8.0 GiB | 75.0 % |", "30.00 | 90.00 | 3.000× | 77 |"
# Forward issues in 6 ms: from 1 to 3 GB in its first third of 2 ms, from 3.8 to 4 in its last.
# Backward: the old gradients, 1 GB, go at once at 10 ms; then 3 GB to 1.5 GB in the first third of its 3 ms, and
# 1.25 to 1 in the last.
CURVE = [(0, 10), (2, 30), (4, 38), (6, 40), (10, 30), (11, 15), (12, 12.5), (13, 10)]
SLOPED = row(
    timeline_ms_bytes=[[float(ms), int(level * 10**8)] for ms, level in CURVE], parameter_bytes=10**9,
    phases=[phase("forward", 4 * 10**9, end_ms=9.0, start_bytes=10**9),
            phase("backward", 4 * 10**9, start_ms=9.9, end_ms=20.0, start_bytes=4 * 10**9)],
)  # fmt: skip
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
        # Two phases of each full step and one of forward alone; each waits for 4 of its 10 ms.
        ((row(), row(context_length=512, step_peak_bytes=7 * GIB), row("forward")),
         ["Memory is highest in small 512 train fp32: 7.0 GiB, in backward.",
          "The peak of a full step is in backward (2 of 2).",
          "A layer saves up to 64.0 MiB of activations for backward (small 256 train fp32), 1.000× the",
          "Forward and backward wait for the GPU (5 of 5).", "Nothing ran out of memory."],
         ["What was not measured", "memory_viz", "cudaMalloc in", "Two counts differ"]),
        ((row(phases=[phase("forward", 2 * GIB, issue_ms=9.5),
                      phase("backward", 2 * GIB, issue_ms=10.0, allocator_ms=6.0)]),),
         ["wait for the host (1 of 2), the allocator (1 of 2).",
          "| 10.00 | 10.00 | 40.00 | 60.0 % | 0.0 % | allocator |"], []),
        # 1e6 and 2e6 bytes in a ms are 1 and 2 GB/s; of 6 ms of issuing 1 in the allocator, of 10 ms 4 of waiting.
        ((row("forward"),), ["| small 256 forward fp32 | forward | 1 GB/s | 2 GB/s | 3 | 6.000 | 10.00 | 40.00 | 16.7 "
                             "% | 40.0 % | GPU |"], []),
        ((SLOPED,), ["| small 256 train fp32 | forward | 1 TB/s | 100 GB/s | 6.000 |",
                     "| small 256 train fp32 | backward | -1.5 TB/s | -250 GB/s | 6.000 |"], []),
        # Of equal peaks the phases count that rise to them.
        ((row(phases=EQUAL), row(phases=[phase("forward", 3 * GIB), *EQUAL[1:]])),
         ["is in forward and loss (1 of 2), loss (1 of 2)."], []),
        ((row(), lost("large", "oom", "CUDA out of memory", parameter_bytes=GIB)),
         ["Out of memory: large 256 train fp32.", "| large 256 train fp32 | – | – | – | – | oom |"], []),
        ((lost("large", "oom", "CUDA out of memory"),), ["Out of memory: large 256 train fp32."], []),
        ((row(), lost("large", "failed", "ValueError: no such layer"), lost("xl", "timeout", "more than 600 s")),
         ["Out of time: xl 256 train fp32. Failed: large 256 train fp32.",
          "What was not measured, and why: 2 rows", "| xl 256 train fp32 | timeout | more than 600 s |",
          "| large 256 train fp32 | failed | ValueError: no such layer |"], ["Nothing ran out of memory"]),
        ((row(base_bytes=GIB, inactive_split_peak_bytes=3 * GIB // 2),),
         [f"| small 256 train fp32 | 1.0 GiB | {HELD} 1.5 GiB | {COLD_STEP}"], []),
        # A row without these figures leaves them out.
        ((row(),), [f"| small 256 train fp32 | {HELD} {COLD_STEP}", "No figure of this bench lies beyond its limit."],
         []),
        ((KEPT,), ["[small.pickle](snapshots/small.pickle)"], []),
        ((row(phases=[phase("forward", GIB, device_allocations=2, device_frees=1, device_calls_ms=1.5)]),),
         [f"{DRIVER} 3 times, in 1.500 ms at most."], []),
        ((row(phases=[phase("forward", GIB, device_allocations=1, device_calls_ms=0.5)]),),
         [f"{DRIVER} 1 time, in 0.500 ms at most."], []),
        ((row(layer_saves_bytes=65 * 2**20, phases=[phase("forward", 3 * GIB, counted_peak_bytes=4 * GIB)]),),
         ["small 256 train fp32, peak of forward: 3.0 GiB recorded, 4.0 GiB expected.",
          "memory that a layer saves: 65.0 MiB recorded, 64.0 MiB expected."], []),
        # Parameters, gradients and moments, ½ + ½ + 1 GiB, with 12 layers of 64 MiB and logits: 2.75 GiB.
        ((row(forward_peak_bytes=11 * GIB // 4 - 2**26),), ["**Impossible memory**: forward, small 256 train fp32"],
         []),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[MemoryRow, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_snapshots_are_linked_from_where_the_section_is_read() -> None:
    check(page(BENCH, [KEPT], folder="bench/memory"), ["[small.pickle](bench/memory/snapshots/small.pickle)"])


def test_the_first_timelines_are_seen_at_once() -> None:
    rows = [row(mode, length, model) for model in ("small", "large") for length in (128, 256) for mode in MODES]
    seen = [block.key for block in BENCH.section(Results(tuple(rows))).blocks if isinstance(block, Lines)]
    assert seen == ["memory-small-256-train-fp32", "memory-large-256-train-fp32"]
    drawn = figures(BENCH, rows)
    assert list(drawn)[2:] == ["memory-small-256-forward-fp32", "memory-large-256-forward-fp32"]
    every = list(drawn.values())
    assert every[0].series == (("memory", ((0.0, 1.0), (5.0, 5.0), (10.0, 1.0))),)
    assert every[0].spans[0] == ("forward", 0.0, 10.0)
    assert (every[0].y_axis, every[0].steps, every[2].y_axis) == ("GiB", True, "MiB")


MODES = ("forward", "train")


def test_the_profilers_view_of_device_memory() -> None:
    memory = DeviceMemory(False, 8 * GIB, 9 * GIB, 3, 1, GIB)
    capture = CaptureSummary("small_ctx512", None, "capture.sqlite", "ok", device_memory=memory)
    table = "| small_ctx512 | cudaMalloc | 8.0 GiB | 9.0 GiB | 3 | 1 |"
    check(page(BENCH, [row()], captures=(capture,)), ["while measuring**: small_ctx512 allocates 3 times", table])
    tensors = replace(capture, device_memory=replace(memory, of_tensors=True))
    check(page(BENCH, [row()], captures=(tensors,)), [], ["while measuring"])


def test_tables_in_sight_fit_a_page() -> None:
    rows = [row(mode, length, model) for model in ("small", "large") for length in (128, 512) for mode in MODES]
    folded, widest = False, 0
    report = Report("x", (BENCH.section(Results(tuple(rows))),))
    for line in render(report, {figure.key: "" for figure in report.figures}).splitlines():
        folded = (folded or line.startswith("<details>")) and not line.startswith("</details>")
        if line.startswith("|") and not folded:
            widest = max(widest, len(line))
    assert 0 < widest <= 120
