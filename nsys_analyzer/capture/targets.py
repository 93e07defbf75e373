"""The targets of a sweep: one for each configuration, or a program of the user's."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from nsys_analyzer.analysis.transformer.models import find_model
from nsys_analyzer.configuration import OPTIONS, Run, Value
from nsys_analyzer.errors import ConfigurationError

#: The values of each option that a sweep takes, by the option's name.
Choices: TypeAlias = Mapping[str, Sequence[Value]]


#: Commands that start Python programs.
_LAUNCHERS = (
    "torchrun", "accelerate", "deepspeed", "lightning", "fabric", "uv", "poetry", "pdm", "conda", "bash", "sh",
)  # fmt: skip


@dataclass(frozen=True)
class Annotation:
    """How a program of the user's is annotated from outside.

    Attributes:
        warmup_steps, steps: steps before the capture range, and inside.
        window: whether the annotation opens the capture range; a program that does so itself has its own.
        run_to_end: whether the program goes on after the capture range.
        steady: whether the warm-up goes on until steps take equally long, for twice as many steps at most.
        modules: whether each call of a module gets a range.
        stacks: whether the program's stack is sampled while it is recorded.
        block: after so many of the steps another program may have its turn; 0 where none is measured beside it. With
            it the losses and the rows of batches of the warm-up are kept, in place of its FLOPs.
    """

    warmup_steps: int
    steps: int
    window: bool = True
    run_to_end: bool = False
    steady: bool = False
    modules: bool = False
    stacks: bool = True
    block: int = 0


#: What is put behind a file's name where each rank of a run writes its own; nsys spells it so, too.
OF_RANK = "_rank%q{RANK}"


@dataclass(frozen=True)
class Ranks:
    """The processes that train together in one run, started with a rank each.

    Attributes:
        count: how many they are.
        one_report: whether one profiler records all of them into one capture; otherwise each has its own.
    """

    count: int
    one_report: bool = False


@dataclass(frozen=True)
class Target:
    """One program to run and to profile; ``name`` is its folder in the output folder.

    A ``timed`` program takes ``--results FILE`` and writes its times there, as our own targets do; one with an
    ``annotation`` is timed by that. One with ``ranks`` is started once for each.
    """

    name: str
    program: tuple[str, ...]
    run: Run
    timed: bool = False
    annotation: Annotation | None = None
    ranks: Ranks | None = None

    @property
    def is_timed(self) -> bool:
        """Returns whether it runs without a profiler, too: it times itself, or its annotation times some of its steps.

        A program that is not Python's has no steps to find, and runs once.
        """
        first = self.program[0]
        some_steps = self.annotation is not None and self.annotation.window
        return self.timed or (some_steps and (is_python(first) or Path(first).name in _LAUNCHERS))


def is_python(word: str) -> bool:
    """Tells whether the first word of a command line starts Python itself."""
    return Path(word).name.startswith("python")


def transformer_targets(models: Sequence[str], choices: Choices, more: Sequence[str] = ()) -> tuple[Target, ...]:
    """Returns the transformer in each combination of models and options, in the order of both, each once.

    Options without ``choices`` have their defaults; ``more`` are further words of the command line.

    Raises:
        ConfigurationError: an unknown model.
    """
    every = {name: choices.get(name) or (one.default,) for name, one in OPTIONS.items() if one.in_run}
    targets = (
        _target(Run(model=find_model(model).name, **dict(zip(every, values, strict=True))), more)
        for model, *values in itertools.product(models, *every.values())
    )
    return tuple({target.name: target for target in targets}.values())


def _target(run: Run, more: Sequence[str]) -> Target:
    asked = {one: value for name, one in OPTIONS.items() if (value := getattr(run, name)) is not None}
    words = [word for one, value in asked.items() for word in one.arguments(value)]
    program = (sys.executable, "-m", "profiling_targets.transformer", "--model", str(run.model), *words, *more)
    unusual = [word for one, value in asked.items() if (word := one.name_part(value))]
    name = "_".join([f"{run.model}_ctx{run.context_length}_{run.mode}_{run.precision}", *unusual])
    return Target(name, program, run, timed=True)


def capture_stems(ranks: Ranks | None) -> tuple[str, ...]:
    """Returns the names, without suffix, of the captures that a profiler leaves in a target's folder, by rank."""
    if ranks is None or ranks.one_report:
        return ("capture",)
    return tuple(f"capture_rank{rank}" for rank in range(ranks.count))


def program_target(
    program: Sequence[str], run: Run, annotation: Annotation | None = None, ranks: Ranks | None = None
) -> Target:
    """Returns the target for a program of the user's, called after its script: ``python -u src/train.py`` is ``train``.

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
    return Target(name, tuple(program), run, annotation=annotation, ranks=ranks)
