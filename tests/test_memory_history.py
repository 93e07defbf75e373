"""The recorder of a step's memory: for real on the CPU, and the GPU's part on entries as PyTorch writes them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsys_analyzer.analysis.transformer.models import ModelSize
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments import steps
from nsys_analyzer.experiments.memory import TARGET, MemoryCase, MemoryFigures
from nsys_analyzer.runs.rows import written
from profiling_targets import memory_history, memory_recording, transformer
from profiling_targets.harness import allocations, measured
from profiling_targets.memory_history import measure
from profiling_targets.memory_recording import code_of, source_of
from profiling_targets.transformer import Block, Training

TINY = ModelSize("tiny", d_model=32, d_ff=64, num_layers=3, num_heads=2, vocab_size=100)
CASE = MemoryCase(device="cpu", context_length=16, batch_size=2, warmup_steps=1, steps=1)


@pytest.fixture(autouse=True)
def _tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "find_model", lambda _: TINY)


def figures_of(case: MemoryCase) -> dict[str, Any]:
    figures = MemoryFigures()
    measure(case, figures)
    return written(figures)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_layer_keeps_what_its_shapes_say(precision: str, batch_size: int) -> None:
    figures = figures_of(replace(CASE, precision=precision, batch_size=batch_size))
    assert figures["layer_saves_bytes"] == figures["layer_saves_by_shapes_bytes"]
    assert sum(line["bytes"] for line in figures["layer_saves"]) == figures["layer_saves_bytes"]
    assert figures["residual_bytes"] == 4 * batch_size * 16 * 32
    # Beside the layers, the embedding, the final norm and the logits outlive forward.
    assert figures["kept_bytes"] >= 3 * figures["layer_saves_bytes"] + figures["logits_bytes"]


def test_a_full_step_gives_back_what_it_takes() -> None:
    figures = figures_of(CASE)
    phases = {phase["name"]: phase for phase in figures["phases"]}
    assert list(phases) == ["forward", "loss", "backward", "optimizer"]
    assert phases["forward"]["start_bytes"] == phases["optimizer"]["end_bytes"] == figures["base_bytes"]
    # Parameters, gradients and both moments live between steps; 4 bytes of AdamW's step count for each of 3 · 9 + 3.
    parameters = 4 * TINY.parameters
    assert figures["parameter_bytes"] == parameters
    assert figures["moment_bytes"] == 2 * parameters + 4 * 30
    assert figures["base_bytes"] > 4 * parameters
    assert figures["forward_peak_bytes"] >= figures["base_bytes"] + figures["kept_bytes"]
    assert figures["step_peak_bytes"] == max(phase["peak_bytes"] for phase in figures["phases"])
    levels = [level for _, level in figures["timeline_ms_bytes"]]
    assert max(levels) == figures["step_peak_bytes"]
    assert len(levels) <= 1000
    for phase in figures["phases"]:
        assert phase["wall_ms"] > 0


def test_the_recorder_sees_the_peak_of_an_unmarked_forward() -> None:
    case = replace(CASE, mode="forward")
    figures = figures_of(case)
    training = Training(memory_history.config_of(case))
    training.forward()
    with allocations("cpu") as counted:
        training.forward()
    assert figures["forward_peak_bytes"] - figures["base_bytes"] == counted.peak_bytes
    # Under a mode the numbers of the model's code are tensors, too, of a few bytes each.
    assert figures["phases"][0]["allocated_bytes"] == pytest.approx(counted.total_bytes, rel=1e-3)
    assert "layer_saves" not in figures


def test_an_allocation_is_told_its_line() -> None:
    lines = {line["code"].partition("  #")[0]: line["tensors"] for line in figures_of(CASE)["layer_saves"]}
    assert lines["weights = scores.exp()"] == 1
    assert lines["x = x + self.attention(self.attention_norm(x), cos, sin, masked)"] == 1
    assert lines["weights = weights / weights.sum(dim=-1, keepdim=True)"] == 2


def test_the_times_are_of_steps_without_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    forward = Training.forward
    monkeypatch.setattr(Training, "forward", lambda training: (calls.append("forward"), forward(training)))
    figures_of(replace(CASE, mode="forward", warmup_steps=2, steps=3))
    assert len(calls) == 2 + 3 + 2  # warm-up, timed, and of the recorder one before the one that is recorded


def test_a_case_that_cannot_run_here() -> None:
    row = measured(TARGET, replace(CASE, precision="tf32"), measure)
    assert row["status"] == "unsupported"
    with pytest.raises(ConfigurationError, match="at least 1"):
        replace(CASE, warmup_steps=0)


def _line(function: Callable[..., Any], code: str) -> int:
    """The line of the model's file with this code."""
    lines = Path(transformer.__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if code in line and number > _first(function))


def _first(function: Callable[..., Any]) -> int:
    return int(function.__code__.co_firstlineno)


MODEL = Block.forward.__code__.co_filename
NORM, ADD = _line(transformer.RMSNorm.forward, "normed = x32"), _line(Block.forward, "x = x + self.attention(")
IN_NORM = (MODEL, NORM, "forward")
IN_BLOCK = (MODEL, ADD, "forward")
FINAL = (MODEL, _line(transformer.Transformer.forward, "logits: Tensor"), "forward")
MODULE = (str(Path(torch.__file__).parent / "nn" / "modules" / "module.py"), 7, "_call_impl")


def test_the_innermost_line_of_the_model_is_the_source() -> None:
    of_norm = source_of([MODULE, IN_NORM, MODULE, IN_BLOCK, FINAL])
    assert of_norm.line == f"transformer.py:{NORM} forward"
    assert of_norm.in_block
    assert source_of([IN_BLOCK, MODULE, FINAL]).in_block
    assert not source_of([MODULE, IN_NORM, FINAL]).in_block  # the final norm is in no layer
    assert source_of([MODULE]).line == ""
    assert code_of(of_norm.line).startswith("normed = x32")


def _entry(action: str, us: float, size: int, address: int, *frames: tuple[str, int, str]) -> dict[str, Any]:
    """An entry of the allocator's history; those that were recorded without a stack have no frames at all."""
    entry: dict[str, Any] = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": us}
    if frames:
        entry["frames"] = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
    return entry


def _history(began_us: int) -> list[dict[str, Any]]:
    """A cudaMalloc 300 µs after the event before it, a tensor that stays, and one that goes."""
    return [
        _entry("alloc", began_us + 100, 512, 0xA, MODULE, IN_NORM, MODULE, IN_BLOCK),
        _entry("segment_alloc", began_us + 400, 2 << 20, 0xF),
        _entry("alloc", began_us + 450, 1000, 0xB, IN_BLOCK),
        _entry("free_requested", began_us + 500, 512, 0xA),
        _entry("free_completed", began_us + 500, 512, 0xA),
        _entry("snapshot", began_us + 600, 0, 0),
    ]


def test_the_allocators_history_becomes_events() -> None:
    events = memory_recording.reduced(_history(5_000_000), 5_000_000_000)
    assert [(event.ms, event.bytes, event.address) for event in events] == [
        (pytest.approx(0.1), 512, 0xA), (pytest.approx(0.45), 1000, 0xB), (pytest.approx(0.5), -512, 0xA),
    ]  # fmt: skip
    assert [event.source.in_block for event in events] == [True, True, False]


def _snapshot(trace: list[dict[str, Any]]) -> dict[str, Any]:
    block = {"size": 1024, "requested_size": 1000, "address": 0xB, "state": "active_allocated"}
    block["frames"] = [{"filename": MODEL, "line": ADD, "name": "forward"}]
    segment = {"address": 0xB, "total_size": 2 << 20, "stream": 0, "segment_pool_id": (0, 0), "blocks": [block]}
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": {"expandable_segments": False}}


class _Memory:
    """Stands for ``torch.cuda``: a step that allocates as ``_history`` says, and counts as the allocator does."""

    def __init__(self) -> None:
        self.recording: list[Any] = []
        self.trace: list[dict[str, Any]] = []

    def work(self) -> None:
        self.trace = _history(time.time_ns() // 1000)
        time.sleep(0.01)

    def statistics(self) -> dict[str, int]:
        counted = {"requested_bytes": 1512, "allocated_bytes": 2048, "reserved_bytes": 2 << 20}
        peaks = {f"{key}.all.peak": size for key, size in {**counted, "inactive_split_bytes": 512}.items()}
        return {**peaks, "requested_bytes.all.current": 0}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **_: self.recording.append(enabled))
        patch.setattr(torch.cuda.memory, "_snapshot", lambda: _snapshot(self.trace))
        patch.setattr(torch.cuda, "memory_stats", self.statistics)
        for name in ("synchronize", "reset_peak_memory_stats"):
            patch.setattr(torch.cuda, name, lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)


def test_recording_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory = _Memory()
    memory.install(monkeypatch)
    path = tmp_path / "snapshots" / "one.pickle"
    recording = memory_recording.record_on_gpu({"forward": memory.work, "loss": lambda: None}, path)
    assert memory.recording == ["all", None]  # the history ends where the step does
    assert [event.bytes for event in recording.events] == [512, 1000, -512]
    assert [span.name for span in recording.spans] == ["forward", "loss"]
    assert all(0 <= event.ms <= recording.spans[0].end_ms for event in recording.events)
    assert recording.statistics["forward"]["requested_bytes"] == 1512
    assert pickle.loads(path.read_bytes())["device_traces"]


def test_the_history_ends_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    memory = _Memory()
    memory.install(monkeypatch)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        memory_recording.record_on_gpu({"forward": fails}, None)
    assert memory.recording == ["all", None]


def test_the_figures_of_a_gpus_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _Memory()
    memory.install(monkeypatch)
    measured = MemoryFigures()
    recording = memory_recording.record_on_gpu({"forward": memory.work}, None)
    memory_history.add_figures(recording, measured, {"forward": 2.0}, 1)
    figures = written(measured)
    (phase,) = figures["phases"]
    assert figures["forward_peak_bytes"] == phase["peak_bytes"] == 512 + 1000
    assert figures["reserved_peak_bytes"] == 2 << 20
    assert phase["wall_ms"] == 2.0
    assert figures["layer_saves_bytes"] == figures["kept_bytes"] == 1000


def test_the_snapshot_lies_in_the_benchs_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths: list[Path | None] = []
    monkeypatch.setattr(memory_history, "record_on_gpu", lambda _, path: paths.append(path))
    training = Training(memory_history.config_of(CASE))
    case = replace(CASE, device="cuda", snapshot="snapshots/one.pickle")
    memory_history._recorded(case, training)
    monkeypatch.setenv(memory_history.FOLDER, str(tmp_path))
    memory_history._recorded(case, training)
    memory_history._recorded(replace(case, snapshot=""), training)
    assert paths == [Path("snapshots/one.pickle"), tmp_path / "snapshots" / "one.pickle", None]
