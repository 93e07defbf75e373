"""Measures the training steps of the transformer of ``transformer.py``, phase by phase, from the first step on."""

from __future__ import annotations

import torch

from nsys_analyzer.experiments.steps import TARGET, StepCase, StepFigures
from nsys_analyzer.inputs.rows import Times
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS
from profiling_targets.harness import main, make_config, run_step_ns, synchronize
from profiling_targets.transformer import Training


def measure(case: StepCase, figures: StepFigures) -> None:
    """Measures each phase of each step, after the model has been made.

    On a CPU the peak memory is unknown, because measuring it would make the steps slower.
    """
    phases = Training(make_config(case)).phases()
    synchronize(case.device)  # so that the work that made the model is no part of the first step
    times: dict[str, list[float]] = {}
    for index in range(case.warmup_steps + case.steps):
        step = {phase: ns / NS_PER_MS for phase, ns in run_step_ns(phases, case.device).items()}
        if not index:
            figures.first_step_ms = step["step"]
        for phase, ms in step.items() if index >= case.warmup_steps else ():
            times.setdefault(phase, []).append(ms)
    for phase, values in times.items():
        setattr(figures, phase, Times.of(values))
    figures.tokens_per_s = case.batch_size * case.context_length / Times.of(times["step"]).ms * MS_PER_S
    if case.device == "cuda":
        figures.peak_allocated_bytes = torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    main(TARGET, measure)
