"""Declares the case and the figures of a training step, which three experiments measure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nsys_analyzer.analysis.transformer.models import ModelSize, find_model
from nsys_analyzer.configuration import ATTENTION_IMPLEMENTATIONS, DIMENSIONS, MODES, PRECISIONS
from nsys_analyzer.experiments.model import option, scalar_options
from nsys_analyzer.inputs.rows import CaseTarget, Times
from nsys_analyzer.text import phrase

PHASES = ("forward", "loss", "backward", "optimizer")
#: The conditions that the report of each experiment on training steps states.
STEP_CONDITIONS = {
    "warm-up": "{warmup_steps} steps",
    "measured": "{steps} steps, batch {batch_size}, context {context_length}, {precision}, {attention} attention",
    "synchronized": "at the end of each phase",
    "gradients": "not recorded in mode forward (no_grad), recorded in the other modes",
}


class TransformerCase:
    """A case that measures a transformer."""

    model: str

    @property
    def size(self) -> ModelSize:
        """The dimensions of the model. A dimension of the case that is not 0 replaces that of the model."""
        given_dimensions: dict[str, Any] = {name: value for name in DIMENSIONS if (value := getattr(self, name, 0))}
        return replace(find_model(self.model), **given_dimensions)


@dataclass(frozen=True)
class StepCase(TransformerCase):
    """A configuration of the transformer, and the number of its steps that are measured."""

    device: str
    model: str = option("small", "small, medium, large, xl, 2.7B, xl-2026 or 10B")
    d_model: int = option(0, "width of the residual stream; 0 means the width that --model has", least=0)
    d_ff: int = option(0, "width of the feed-forward layer; 0 means the width that --model has", least=0)
    num_layers: int = option(0, "number of layers; 0 means the number that --model has", least=0, cpu=2)
    num_heads: int = option(0, "number of attention heads; 0 means the number that --model has", least=0)
    vocab_size: int = option(0, "size of the vocabulary; 0 means the size that --model has", least=0)
    context_length: int = option(256, "tokens in a sequence", cpu=32)
    batch_size: int = option(4, "batch size", cpu=1)
    mode: str = option("train", "phases of a step: forward, also loss and backward, or also the optimizer", MODES)
    precision: str = option("fp32", "precision; bf16 uses autocast", PRECISIONS)
    attention: str = option("unfused", "naive (unfused) attention, or PyTorch's SDPA", ATTENTION_IMPLEMENTATIONS)
    compile: bool = option(False, "compile the model with torch.compile")
    warmup_steps: int = option(5, "warm-up steps, which are not measured", least=0, cpu=1)
    steps: int = option(10, "measured steps", cpu=2)
    seed: int = option(0, "seed of weights and tokens", least=0)


@dataclass
class StepFigures:
    """The times and the memory of the steps of a configuration.

    ``first_step_ms`` is the time of the first step of the process, with one-time work such as compilation.
    """

    first_step_ms: float | None = None
    forward: Times | None = None
    loss: Times | None = None
    backward: Times | None = None
    optimizer: Times | None = None
    step: Times | None = None
    tokens_per_s: float | None = None
    peak_allocated_bytes: int | None = None


TARGET = CaseTarget("profiling_targets.training_steps", StepCase, StepFigures)
STEP_DEFINITIONS = phrase(
    "*A step* consists of the phases of its mode. Python's clock times it, and waits for the device at the end of each "
    "phase. The mode *forward* is the forward pass only, *forward-backward* adds loss and backward, and *train* adds "
    "the optimizer. *CV* is the standard deviation of the measured steps ÷ their mean. *Peak* is the peak memory of "
    "tensors, which is not counted on a CPU."
)
#: Options that all cases of an experiment on training steps share.
SHARED_OPTIONS = scalar_options(StepCase, "attention", *DIMENSIONS, "warmup_steps", "steps", "seed")
