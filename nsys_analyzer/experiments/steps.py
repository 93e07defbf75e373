"""Training steps: the case and figures of their target, which three experiments measure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nsys_analyzer.analysis.transformer.models import ModelSize, find_model
from nsys_analyzer.configuration import ATTENTIONS, DIMENSIONS, MODES, PRECISIONS
from nsys_analyzer.experiments.model import option, single
from nsys_analyzer.inputs.rows import CaseTarget, Times
from nsys_analyzer.text import phrase

PHASES = ("forward", "loss", "backward", "optimizer")
#: Conditions of every bench of training steps.
HOW = {
    "warm-up": "{warmup_steps} steps",
    "measured": "{steps} steps, batch {batch_size}, context {context_length}, {precision}, {attention} attention",
    "synchronized": "at the end of each phase",
    "gradients": "off in forward alone (no_grad), recorded in the other modes",
}


class OfModel:
    """A case that is of a transformer."""

    model: str

    @property
    def size(self) -> ModelSize:
        """The model's dimensions, or the case's own where it has some that are not 0."""
        own: dict[str, Any] = {name: value for name in DIMENSIONS if (value := getattr(self, name, 0))}
        return replace(find_model(self.model), **own)


@dataclass(frozen=True)
class StepCase(OfModel):
    """One configuration of the transformer, and how many steps of it."""

    device: str
    model: str = option("small", "small, medium, large, xl, 2.7B, xl-2026 or 10B")
    d_model: int = option(0, "0 is the model's own", least=0)
    d_ff: int = option(0, "0 is the model's own", least=0)
    num_layers: int = option(0, "0 is the model's own", least=0, cpu=2)
    num_heads: int = option(0, "0 is the model's own", least=0)
    vocab_size: int = option(0, "0 is the model's own", least=0)
    context_length: int = option(256, "tokens of a sequence", cpu=32)
    batch_size: int = option(4, "batch size", cpu=1)
    mode: str = option("train", "the phases of a step: forward; loss and backward too; the optimizer too", MODES)
    precision: str = option("fp32", "bf16 is autocast", PRECISIONS)
    attention: str = option("unfused", "unfused (naive), or PyTorch's SDPA", ATTENTIONS)
    compile: bool = option(False, "torch.compile the model")
    warmup_steps: int = option(5, "steps before the measured ones", least=0, cpu=1)
    steps: int = option(10, "measured steps", cpu=2)
    seed: int = option(0, "of weights and tokens", least=0)


@dataclass
class StepFigures:
    """Times and memory of the steps of one configuration; ``first_step_ms`` is the very first, with its warm-up."""

    first_step_ms: float | None = None
    forward: Times | None = None
    loss: Times | None = None
    backward: Times | None = None
    optimizer: Times | None = None
    step: Times | None = None
    tokens_per_s: float | None = None
    peak_allocated_bytes: int | None = None


TARGET = CaseTarget("profiling_targets.training_steps", StepCase, StepFigures)
DEFINITIONS = phrase(
    "*A step* is the phases of its mode, by Python's clock, which waits for the device at the end of each phase: "
    "*forward* is the forward pass alone, *forward-backward* adds loss and backward, *train* the optimizer. *CV* is "
    "standard deviation ÷ mean of the measured steps. *Peak* is the most memory of tensors; on a CPU it is not counted."
)
#: Options of every bench of training steps that each case of it shares; on a CPU two layers are enough.
SHARED = single(StepCase, "attention", *DIMENSIONS, "warmup_steps", "steps", "seed")
