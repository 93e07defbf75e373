"""Records the memory of one step of a transformer, event by event, and says what held it.

``python -m profiling_targets.memory_history --model small --snapshot memory.pickle`` prints the figures; on a GPU the
snapshot is for the viewer at pytorch.org/memory_viz. The transformer is that of ``transformer.py``.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nsys_analyzer.analysis.transformer.costs import layer_saved_bytes, residual_bytes
from nsys_analyzer.capture.jobs import FOLDER
from nsys_analyzer.experiments.memory import TARGET, MemoryCase, MemoryFigures
from profiling_targets.config import config_of
from profiling_targets.harness import Phases, main, step_ns, synchronize
from profiling_targets.memory_recording import Recording, record_on_cpu, record_on_gpu
from profiling_targets.memory_timeline import add_figures
from profiling_targets.transformer import Training

_CALLS, _ROUNDS = 1_000, 5
_FP32 = 4


def measure(case: MemoryCase, figures: MemoryFigures) -> None:
    """Times the phases, then records the memory of one more step and reduces it to figures."""
    size, shape = case.size, (case.batch_size, case.context_length)
    figures.parameter_bytes = _FP32 * size.parameters
    figures.logits_bytes = _FP32 // (2 if case.precision == "bf16" else 1) * shape[0] * shape[1] * size.vocab_size
    figures.residual_bytes = residual_bytes(size, *shape)
    if case.trains:
        by_shapes = layer_saved_bytes(size, *shape, case.precision, case.device == "cuda")
        figures.layer_saves_by_shapes_bytes = by_shapes
    training = Training(config_of(case))
    phases = training.phases()
    for _ in range(case.warmup_steps):
        step_ns(phases, case.device)
    figures.moment_bytes = sum(moment.untyped_storage().nbytes() for moment in _moments(training))
    times = _times_ms(phases, case.device, case.steps)
    figures.step_ms = sum(wall for wall, _ in times.values())
    figures.cached_call_us = _cached_call_us(case)
    recording = _recorded(case, training)
    add_figures(recording, figures, times, figures.cached_call_us, size.num_layers if case.trains else None)
    if case.device == "cuda":
        # The last of all: an empty cache takes some steps to settle again, which no other figure may see.
        _add_cold(phases, figures)


def _times_ms(phases: Phases, device: str, steps: int) -> dict[str, tuple[float, float]]:
    """Returns each phase's median time to its synchronized end, and to the moment when all its work was issued."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in phases}
    for _ in range(steps):
        for name, phase in phases.items():
            before = time.perf_counter_ns()
            phase()
            issued = time.perf_counter_ns()
            synchronize(device)
            times[name].append(((time.perf_counter_ns() - before) / 1e6, (issued - before) / 1e6))
    medians = {name: [statistics.median(part) for part in zip(*pairs, strict=True)] for name, pairs in times.items()}
    return {name: (wall, issue) for name, (wall, issue) in medians.items()}


def _add_cold(phases: Phases, figures: MemoryFigures) -> None:
    """Adds the times of a step whose allocator has nothing in its cache, and its calls to the device."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    cold_ms = {name: ns / 1e6 for name, ns in step_ns(phases, "cuda").items()}
    figures.cold_device_calls = torch.cuda.memory_stats()["segment.all.allocated"] - before
    figures.cold_step_ms = cold_ms["step"]
    figures.phases = [replace(phase, cold_ms=cold_ms[phase.name]) for phase in figures.phases or []]


def _cached_call_us(case: MemoryCase) -> float:
    """Times how the allocator hands out a residual stream and takes it back, the call from Python included."""
    shape = (case.batch_size, case.context_length, case.size.d_model)
    rounds = []
    for _ in range(_ROUNDS):
        before = time.perf_counter_ns()
        for _ in range(_CALLS):
            torch.empty(shape, device=case.device)
        rounds.append((time.perf_counter_ns() - before) / _CALLS / 1e3)
    return min(rounds)


def _moments(training: Training) -> Iterator[Tensor]:
    """Yields the optimizer's tensors beside the parameters, on their device: of AdamW two for each."""
    for parameter, state in training.optimizer.state.items():
        yield from (
            tensor for tensor in state.values() if isinstance(tensor, Tensor) and tensor.device == parameter.device
        )


def _living(training: Training) -> Iterator[Tensor]:
    """Yields all tensors that outlive a step."""
    yield from training.parameters
    yield from training.model.buffers()
    yield from (parameter.grad for parameter in training.parameters if parameter.grad is not None)
    yield from _moments(training)
    yield from (training.tokens, training.targets, training.logits, training.value)


def _recorded(case: MemoryCase, training: Training) -> Recording:
    """Records one more step; a snapshot's relative path begins in the bench's folder, or in the working directory."""
    if case.device == "cpu":
        return record_on_cpu(training.phases(), lambda: _living(training))
    path = Path(os.environ.get(FOLDER, "")) / case.snapshot if case.snapshot else None
    return record_on_gpu(training.phases(), path)


if __name__ == "__main__":
    sys.exit(main(TARGET, measure))
