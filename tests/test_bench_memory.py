"""The bench of memory: its cases, its section from hand-made rows, and one real run of a tiny model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nsys_analyzer.analysis.summary.device_memory import DeviceMemory
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import ModelSize
from nsys_analyzer.experiments import steps
from nsys_analyzer.experiments.memory import BENCH, TARGET, MemoryFigures, MemoryRow
from nsys_analyzer.experiments.model import Results
from nsys_analyzer.report.model import Lines, Report, unfolded
from nsys_analyzer.report.renderers import markdown
from nsys_analyzer.report.renderers.markdown import render
from profiling_targets import memory_history
from tests.support.rows import default_settings, typed_row, unpadded

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


@pytest.fixture(autouse=True)
def _a_wide_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables here are looked at whole."""
    monkeypatch.setattr(markdown, "PAGE", 10_000)


def page(*rows: MemoryRow, **more: Any) -> str:
    section = BENCH.section(Results(rows, **more))
    return render(Report("x", (section,)), {one.key: one.key for one in Report("x", (section,)).figures})


def text(*rows: MemoryRow, **more: Any) -> str:
    return unpadded(page(*rows, **more))


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


def test_the_answers_are_computed() -> None:
    said = text(row(), row(context_length=512, step_peak_bytes=7 * GIB), row("forward"))
    assert "Memory is highest in small 512 train fp32: 7.0 GiB, in backward." in said
    assert "The peak of a full step is in backward (2 of 2)." in said
    assert "A layer saves up to 64.0 MiB of activations for backward (small 256 train fp32), 1.000× the" in said
    # Two phases of each full step and one of forward alone; each waits for 4 of its 10 ms.
    assert "Forward and backward wait for the GPU (5 of 5)." in said
    assert "Nothing ran out of memory." in said


def test_what_limits_a_phase_is_said_of_each() -> None:
    bounds = [phase("forward", 2 * GIB, issue_ms=9.5), phase("backward", 2 * GIB, issue_ms=10.0, allocator_ms=6.0)]
    said = text(row(phases=bounds))
    assert "wait for the host (1 of 2), the allocator (1 of 2)." in said
    assert next(line for line in said.splitlines() if line.endswith("| allocator |")).endswith(
        "| 10.00 | 10.00 | 40.00 | 60.0 % | 0.0 % | allocator |"
    )


def test_the_sawtooth_of_forward_alone() -> None:
    line = next(line for line in text(row("forward")).splitlines() if line.endswith("% | GPU |"))
    # 1e6 and 2e6 bytes in a ms are 1 and 2 GB/s; of 6 ms of issuing 1 in the allocator, of 10 ms 4 of waiting.
    slopes = "| small 256 forward fp32 | forward | 1 GB/s | 2 GB/s | 3 |"
    assert line == f"{slopes} 6.000 | 10.00 | 40.00 | 16.7 % | 40.0 % | GPU |"


def test_the_slopes_of_a_full_step() -> None:
    # Forward issues in 6 ms: from 1 to 3 GB in its first third of 2 ms, from 3.8 to 4 in its last.
    # Backward: the old gradients, 1 GB, go at once at 10 ms; then 3 GB to 1.5 GB in the first third of its 3 ms, and
    # 1.25 to 1 in the last.
    curve = [[0, 10], [2, 30], [4, 38], [6, 40], [10, 30], [11, 15], [12, 12.5], [13, 10]]
    points = [[float(ms), int(level * 10**8)] for ms, level in curve]
    phases = [
        phase("forward", 4 * 10**9, end_ms=9.0, start_bytes=10**9),
        phase("backward", 4 * 10**9, start_ms=9.9, end_ms=20.0, start_bytes=4 * 10**9),
    ]
    said = text(row(timeline_ms_bytes=points, phases=phases, parameter_bytes=10**9))
    forward, backward = (line for line in said.splitlines() if line.endswith("% | GPU |"))
    assert forward.startswith("| small 256 train fp32 | forward | 1 TB/s | 100 GB/s | 6.000 |")
    assert backward.startswith("| small 256 train fp32 | backward | -1.5 TB/s | -250 GB/s | 6.000 |")


def test_equal_peaks_are_of_the_phases_that_rise_to_them() -> None:
    phases = [
        phase("forward", 4 * GIB),
        phase("loss", 4 * GIB + 8, start_bytes=3 * GIB),
        phase("backward", 4 * GIB + 4, start_bytes=4 * GIB + 4),  # never above where it starts
        phase("optimizer", 3 * GIB),
    ]
    in_loss = [{**phases[0], "peak_bytes": 3 * GIB}, *phases[1:]]
    said = text(row(phases=phases), row(phases=in_loss))
    assert "is in forward and loss (1 of 2), loss (1 of 2)." in said


def test_running_out_of_memory_keeps_its_row() -> None:
    lost = replace(
        row(model="large"), status="oom", message="CUDA out of memory", figures=MemoryFigures(parameter_bytes=GIB)
    )
    said = text(row(), lost)
    assert "Out of memory: large 256 train fp32." in said
    assert any(line.startswith("| large 256 train fp32") and "oom" in line for line in said.splitlines())
    assert "Out of memory: large 256 train fp32." in text(lost)


def test_whatever_was_not_measured_says_why() -> None:
    broken = replace(row(model="large"), status="failed", message="ValueError: no such layer", figures=MemoryFigures())
    late = replace(row(model="xl"), status="timeout", message="more than 600 s", figures=MemoryFigures())
    said = text(row(), broken, late)
    assert "Out of time: xl 256 train fp32. Failed: large 256 train fp32." in said
    assert "Nothing ran out of memory" not in said
    assert "What was not measured, and why: 2 rows" in said
    assert "| large 256 train fp32 | failed | ValueError: no such layer |" in said
    assert "| xl 256 train fp32 | timeout | more than 600 s |" in said
    assert "What was not measured" not in text(row())


def test_what_the_allocator_held() -> None:
    figures = {"base_bytes": GIB, "inactive_split_peak_bytes": 3 * GIB // 2}
    # 6 ÷ 8 GiB are handed out of what is reserved; 90 ms ÷ 30 ms with an empty cache, and 77 calls of cudaMalloc.
    held = "5.0 GiB | 6.0 GiB | 8.0 GiB | 75.0 % |"
    cold = "30.00 | 90.00 | 3.000× | 77 |"
    assert f"| small 256 train fp32 | 1.0 GiB | {held} 1.5 GiB | {cold}" in text(row(**figures))
    # A row without these figures leaves them out.
    assert f"| small 256 train fp32 | {held} {cold}" in text(row())


def test_the_first_timelines_are_seen_at_once() -> None:
    rows = [row(mode, length, model) for model in ("small", "large") for length in (128, 256) for mode in MODES]
    section = BENCH.section(Results(tuple(rows)))
    seen = [block.key for block in section.blocks if isinstance(block, Lines)]
    assert seen == ["memory-small-256-train-fp32", "memory-large-256-train-fp32"]
    every = [block for block in unfolded(section.blocks) if isinstance(block, Lines)]
    assert [figure.key for figure in every[2:]] == ["memory-small-256-forward-fp32", "memory-large-256-forward-fp32"]
    assert every[0].series == (("memory", ((0.0, 1.0), (5.0, 5.0), (10.0, 1.0))),)
    assert every[0].spans[0] == ("forward", 0.0, 10.0)
    assert (every[0].y_axis, every[0].steps, every[2].y_axis) == ("GiB", True, "MiB")


MODES = ("forward", "train")


def test_snapshots_are_linked_from_where_the_section_is_read() -> None:
    kept = replace(row(), case=replace(row().case, snapshot="snapshots/small.pickle"))
    assert "[small.pickle](snapshots/small.pickle)" in text(kept)
    assert "[small.pickle](bench/memory/snapshots/small.pickle)" in text(kept, folder="bench/memory")
    assert "memory_viz" not in text(row())


def test_the_driver_in_the_recorded_step_is_flagged() -> None:
    busy = row(phases=[phase("forward", GIB, device_allocations=2, device_frees=1, device_calls_ms=1.5)])
    flag = "**cudaMalloc in the recorded step**: small 256 train fp32 calls the driver"
    assert f"{flag} 3 times, in 1.500 ms at most." in text(busy)
    once = row(phases=[phase("forward", GIB, device_allocations=1, device_calls_ms=0.5)])
    assert f"{flag} 1 time, in 0.500 ms at most." in text(once)
    assert "cudaMalloc in" not in text(row())


def test_counts_that_differ_are_flagged() -> None:
    one = row(layer_saves_bytes=65 * 2**20, phases=[phase("forward", 3 * GIB, counted_peak_bytes=4 * GIB)])
    said = text(one)
    assert "small 256 train fp32, peak of forward: 3.0 GiB recorded, 4.0 GiB expected." in said
    assert "memory that a layer saves: 65.0 MiB recorded, 64.0 MiB expected." in said
    assert "Two counts differ" not in text(row())


def test_less_than_the_minimum_is_impossible() -> None:
    # Parameters, gradients and moments, ½ + ½ + 1 GiB, with 12 layers of 64 MiB and logits: 2.75 GiB.
    assert "**Impossible memory**: forward, small 256 train fp32" in text(row(forward_peak_bytes=11 * GIB // 4 - 2**26))
    assert "No figure of this bench lies beyond its limit." in text(row())


def test_the_profilers_view_of_device_memory() -> None:
    memory = DeviceMemory(False, 8 * GIB, 9 * GIB, 3, 1, GIB)
    capture = CaptureSummary("small_ctx512", None, "capture.sqlite", "ok", device_memory=memory)
    said = text(row(), captures=(capture,))
    assert "cudaMalloc while measuring**: small_ctx512 allocates 3 times" in said
    table = next(line for line in said.splitlines() if line.startswith("| small_ctx512"))
    assert [cell.strip() for cell in table.split("|")[2:7]] == ["cudaMalloc", "8.0 GiB", "9.0 GiB", "3", "1"]
    tensors = replace(capture, device_memory=replace(memory, of_tensors=True))
    assert "while measuring" not in text(row(), captures=(tensors,))


def test_tables_in_sight_fit_a_page() -> None:
    rows = [row(mode, length, model) for model in ("small", "large") for length in (128, 512) for mode in MODES]
    folded, widest = False, 0
    for line in page(*rows).splitlines():
        folded = (folded or line.startswith("<details>")) and not line.startswith("</details>")
        if line.startswith("|") and not folded:
            widest = max(widest, len(line))
    assert 0 < widest <= 120


def test_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from profiling_targets.harness import measured

    tiny = ModelSize("small", d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=100)
    monkeypatch.setattr(steps, "find_model", lambda _: tiny)
    rows = []
    for case in BENCH.cases(settings("cpu", num_layers=0)):
        found = measured(TARGET, case.case, memory_history.measure)
        rows.append(typed_row(TARGET, found["case"], found["figures"], found["status"], machine=found["machine"]))
    said = text(*rows)
    assert [one.status for one in rows] == ["ok", "ok"]
    assert "1.000× the bytes of their shapes" in said
    assert "A CPU has no caching allocator" in said
    assert "Two counts differ" not in said
    assert "Impossible" not in said
    assert "reserved" not in said
