"""The parts of a training step, found by the names of their ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nsys_analyzer.errors import ConfigurationError

#: Phases in the order of a training step. ``step`` encloses the others.
LEAF_PHASES = ("forward", "loss", "backward", "optimizer")
STEP = "step"
#: A step without a backward pass, where others have one.
OTHER_STEP = "step without backward"
WARMUP = "warmup"
#: The ranges inside self-attention.
ATTENTION_PARTS = ("attention", "scores", "softmax", "values")

#: The spellings found without options, as ``normalized_name`` writes them.
DEFAULT_NAMES: Mapping[str, tuple[str, ...]] = {
    "forward": (
        "forward", "fwd", "fw", "forward pass", "fwd pass", "forward step", "fwd step", "model forward",
        "forward only", "inference", "inference step",
    ),
    "loss": ("loss", "compute loss", "loss computation", "loss fn", "loss function", "criterion", "cross entropy"),
    "backward": (
        "backward", "bwd", "bw", "backward pass", "bwd pass", "backward step", "bwd step", "loss backward",
        "model backward",
    ),
    "optimizer": (
        "optimizer", "optimiser", "optim", "opt", "optimizer step", "optimiser step", "optim step", "opt step",
        "step optimizer", "optimizer update", "optimizer pass", "adamw", "adamw step", "adam step", "sgd step",
    ),
    STEP: (
        "step", "train step", "training step", "iteration", "iter", "train iteration", "training iteration",
        "profiler step", "profilerstep", "train batch", "training batch",
    ),
    WARMUP: ("warmup", "warm up", "warmup step", "warmup steps", "warm up step", "warm up steps", "warmup iteration",
             "warmup iterations", "warmup phase", "warming up"),
    "attention": (
        "scaled dot product attention", "sdpa", "attention", "self attention", "attn", "causal self attention",
        "multi head attention", "multihead attention", "multi head self attention", "multihead self attention",
    ),
    "scores": (
        "computing attention scores", "attention scores", "compute attention scores", "attn scores", "scores",
        "qk", "qk t", "q k t", "qkt", "qk matmul",
    ),
    "softmax": ("computing softmax", "softmax", "compute softmax", "attention softmax", "attn softmax"),
    "values": (
        "final matmul", "attention output", "attn output", "av", "pv", "av matmul", "pv matmul", "attn v",
        "attention values", "scores v", "computing final matmul",
    ),
}  # fmt: skip

_LONGEST_NAME = 500
_COUNTER = re.compile(r"\d+(\s*(/|of)\s*\d+)?\W*$")


#: Ranges that PyTorch's profiler and nsys write by themselves.
_FRAMEWORK = re.compile(r"ProfilerStep#|Optimizer\.(?:step|zero_grad)#|torch\.(?:nn|optim|autograd|Tensor)\.")


def is_framework_name(name: str) -> bool:
    """Whether a framework wrote a range of this name by itself: no person named a phase with it."""
    return bool(_FRAMEWORK.match(name))


def normalized_name(name: str) -> str:
    """A range's name without case, punctuation and counters: ``Forward_Pass #3`` is ``forward pass``.

    PyTorch's own ``Optimizer.step#AdamW.step`` becomes ``optimizer step``. Of an endless name the start counts.
    """
    name = name[:_LONGEST_NAME]
    text = name.split("#", 1)[0] if name.startswith("Optimizer.") else name.split(",", 1)[0]
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", _COUNTER.sub("", text)).lower()
    return re.sub(r"[\W_]+", " ", text).strip()


@dataclass(frozen=True)
class PhaseNames:
    """Which range names mean which phase.

    Attributes:
        extra: phase (or attention part, or a phase of the user's own) to exact range names; they take the
            place of that phase's default names.

    """

    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def parse(options: Iterable[str]) -> PhaseNames:
        """Reads ``forward=NAME`` options; several for one phase add up.

        Raises:
            ConfigurationError: an option without a phase or without a name.

        """
        extra: dict[str, tuple[str, ...]] = {}
        for option in options:
            phase, separator, name = option.partition("=")
            if not separator or not phase.strip() or not name.strip():
                raise ConfigurationError(f"{option!r} is not PHASE=RANGE", "Write for example forward=model_fwd")
            key = phase.strip().lower()
            extra[key] = (*extra.get(key, ()), name.strip())
        return PhaseNames(extra)

    @property
    def leaf_phases(self) -> tuple[str, ...]:
        """The phases that partition a step, in order; the user's own come last."""
        own = [p for p in self.extra if p not in (*LEAF_PHASES, STEP, WARMUP, *ATTENTION_PARTS)]
        return (*LEAF_PHASES, *own)

    def key_of(self, name: str) -> str | None:
        """The phase or attention part that a range of this name is, or None."""
        for key, names in self.extra.items():
            if name in names:
                return key
        normal = normalized_name(name)
        for key, spellings in DEFAULT_NAMES.items():
            if key not in self.extra and normal in spellings:
                return key
        return None
