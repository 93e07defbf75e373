"""What a sweep runs: one target for each configuration, or a program of the user's."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsys_analyzer.analysis.models import find_model, mode_from_text
from nsys_analyzer.errors import ConfigurationError

#: The phases that a run of each mode times, in the order of a step.
PHASES = {
    "forward": ("forward", "step"),
    "forward+backward": ("forward", "loss", "backward", "step"),
    "train": ("forward", "loss", "backward", "optimizer", "step"),
}
_DEFAULTS = {"batch_size": 4, "attention": "unfused", "optimizer": "torch", "compile": False, "cuda_graph": False}


@dataclass(frozen=True)
class Target:
    """One program to run and to profile.

    Attributes:
        name: its folder in the output folder.
        program: its command line.
        described: what the manifest says of it before it has run.
        timed: whether it takes ``--results FILE`` and writes its times there, as our own targets do.
    """

    name: str
    program: tuple[str, ...]
    described: Mapping[str, str | int | bool] = field(default_factory=dict)
    timed: bool = False


@dataclass(frozen=True)
class Sweep:
    """The configurations of a sweep: the product of models, context lengths, modes and precisions.

    ``options`` are further options of the target, passed on as they are.
    """

    models: tuple[str, ...]
    context_lengths: tuple[int, ...]
    modes: tuple[str, ...]
    precisions: tuple[str, ...]
    batch_size: int
    warmup_steps: int
    steps: int
    device: str
    attention: str = "unfused"
    optimizer: str = "torch"
    compile: bool = False
    cuda_graph: bool = False
    options: tuple[str, ...] = ()

    def targets(self) -> tuple[Target, ...]:
        """The targets in the order of models, then contexts, modes and precisions; each once.

        Raises:
            ConfigurationError: an unknown model.
        """
        product = itertools.product(self.models, self.context_lengths, self.modes, self.precisions)
        found = {target.name: target for target in (self._target(*one) for one in product)}
        return tuple(found.values())

    def _target(self, model: str, context_length: int, mode: str, precision: str) -> Target:
        described: dict[str, str | int | bool] = {
            "model": find_model(model).name,
            "context_length": context_length,
            "mode": mode_from_text(mode),
            "precision": precision,
            "batch_size": self.batch_size,
            "attention": self.attention,
            "optimizer": self.optimizer,
            "compile": self.compile,
            "cuda_graph": self.cuda_graph,
            "device": self.device,
            "warmup_steps": self.warmup_steps,
            "steps": self.steps,
        }
        program = (sys.executable, "-m", "profiling_targets.transformer", *_arguments(described), *self.options)
        return Target(_name(described), program, described, timed=True)


def _arguments(described: Mapping[str, str | int | bool]) -> list[str]:
    """The target's options for what is described; those with the target's own default are left out."""
    spelled = {**described, "mode": str(described["mode"]).replace("+", "-"), "warmup": described["warmup_steps"]}
    arguments: list[str] = []
    for key, value in spelled.items():
        option = f"--{key.replace('_', '-')}"
        if value is True:
            arguments.append(option)
        elif key != "warmup_steps" and value is not False and _DEFAULTS.get(key) != value:
            arguments += [option, str(value)]
    return arguments


def _name(described: Mapping[str, str | int | bool]) -> str:
    """``small_ctx256_train_fp32``, and what else is not as usual: ``_b8_sdpa_compile``."""
    words = [str(described["model"]), f"ctx{described['context_length']}"]
    words += [str(described["mode"]).replace("+", "-"), str(described["precision"])]
    unusual = {key: described[key] for key, usual in _DEFAULTS.items() if described[key] != usual}
    spelled = {"batch_size": "b{}", "attention": "{}", "optimizer": "{}-optimizer", "compile": "compile"}
    words += [spelled.get(key, key.replace("_", "-")).format(value) for key, value in unusual.items()]
    return "_".join(words)


def program_target(program: Sequence[str], described: Mapping[str, str | int | bool]) -> Target:
    """The target for a program of the user's, called after its script: ``python -u src/train.py`` is ``train``.

    Raises:
        ConfigurationError: no name can be made of it.
    """
    if program[0].startswith("-"):  # a profiler would take it for an option of its own
        raise ConfigurationError(f"{program[0]!r} looks like an option, and is no program", "Name it by its path: ./…")
    script = next((word for word in program if word.endswith(".py")), None)
    module = program[program.index("-m") + 1] if "-m" in program[:-1] else None
    stem = Path(script).stem if script else module or Path(program[0]).name
    name = re.sub(r"[^\w.-]+", "-", stem).strip("-.")
    if not name:
        raise ConfigurationError(f"{program[0]!r} gives no name for a folder", "Name the program by its path")
    return Target(name, tuple(program), dict(described))
