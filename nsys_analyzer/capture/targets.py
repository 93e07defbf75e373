"""Defines the targets of a sweep: one for each configuration of the transformer, or a program of the user."""

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

#: For each option of a sweep, by its name: the values with which the targets run.
Choices: TypeAlias = Mapping[str, Sequence[Value]]


#: Commands that start Python programs, besides Python itself.
_LAUNCHERS = (
    "torchrun", "accelerate", "deepspeed", "lightning", "fabric", "uv", "poetry", "pdm", "conda", "bash", "sh",
)  # fmt: skip


@dataclass(frozen=True)
class Annotation:
    """The settings with which hooks annotate a program of the user.

    Attributes:
        warmup_steps, steps: the numbers of steps before and inside the capture range.
        opens_window: whether the hooks open the capture range. If a program opens a capture range itself, it replaces
            the range of the hooks.
        run_to_end: whether the program continues after the capture range.
        waits_for_steady_steps: whether the warm-up continues until steps take equally long, but for at most
            twice ``warmup_steps``.
        modules: whether each call of a module gets a range.
        stacks: whether the Python stack of the program is sampled during the recording.
        operators: whether one more step is recorded, in which each operator has a range.
        steps_per_turn: the number of steps that the program runs before the other program of a pair runs the same
            number of steps, or 0 if the program is measured alone. In a pair, losses and batch sizes of the warm-up
            are recorded instead of FLOPs.
    """

    warmup_steps: int
    steps: int
    opens_window: bool = True
    run_to_end: bool = False
    waits_for_steady_steps: bool = False
    modules: bool = False
    stacks: bool = True
    operators: bool = True
    steps_per_turn: int = 0


#: The suffix of a file name if each rank writes its own file. nsys and the hooks replace ``%q{RANK}`` by the rank.
RANK_SUFFIX = "_rank%q{RANK}"


@dataclass(frozen=True)
class Ranks:
    """The processes of a parallel run, each of which is started with a rank.

    Attributes:
        count: the number of processes.
        in_one_capture: whether a single profiler records all ranks into one capture. Otherwise each rank has a capture.
    """

    count: int
    in_one_capture: bool = False


@dataclass(frozen=True)
class Target:
    """One program to run and to profile.

    Attributes:
        name: the name of its folder in the output folder.
        program: its command line.
        run: its configuration.
        timed: whether it takes ``--results FILE`` and writes its times there, as the package's own targets do.
        annotation: the settings of the hooks that annotate and time it, or None if it does so itself.
        ranks: the processes of the program; None if the program is started once.
        unprofiled_steps: the largest number of steps before the capture range, and after it, whose lengths the recorded
            process measures.
        memory: whether a further run records the history of PyTorch's allocator.
        reads_energy: whether the energy of the GPUs is read in further steps of the run without a profiler.
    """

    name: str
    program: tuple[str, ...]
    run: Run
    timed: bool = False
    annotation: Annotation | None = None
    ranks: Ranks | None = None
    unprofiled_steps: int = 0
    memory: bool = False
    reads_energy: bool = True

    @property
    def is_timed(self) -> bool:
        """Whether the target also runs without a profiler, because the target itself or the hooks measure its steps.

        The hooks find the steps of Python programs only. Other programs run once, under the profiler.
        """
        executable = self.program[0]
        times_steps = self.annotation is not None and self.annotation.opens_window
        return self.timed or (times_steps and (is_python(executable) or Path(executable).name in _LAUNCHERS))


def is_python(word: str) -> bool:
    """Returns whether a program, such as ``/usr/bin/python3``, is a Python interpreter."""
    return Path(word).name.startswith("python")


def transformer_targets(
    models: Sequence[str], choices: Choices, extra_arguments: Sequence[str] = ()
) -> tuple[Target, ...]:
    """Returns a target of the transformer for each combination of models and values of options, without duplicates.

    Args:
        models: the names of the models.
        choices: the values of options by name. Options that are not among them have their defaults.
        extra_arguments: further arguments of each command line.

    Raises:
        ConfigurationError: a model is unknown.
    """
    values_of_options = {
        name: choices.get(name) or (option.default,) for name, option in OPTIONS.items() if option.in_run
    }
    targets: dict[str, Target] = {}
    for model, *values in itertools.product(models, *values_of_options.values()):
        run = Run(model=find_model(model).name, **dict(zip(values_of_options, values, strict=True)))
        options = {option: value for name, option in OPTIONS.items() if (value := getattr(run, name)) is not None}
        arguments = [argument for option, value in options.items() for argument in option.arguments(value)]
        program = (sys.executable, "-m", "profiling_targets.transformer", "--model", str(run.model), *arguments)
        name_parts = [part for option, value in options.items() if (part := option.name_part(value))]
        name = "_".join([f"{run.model}_ctx{run.context_length}_{run.mode}_{run.precision}", *name_parts])
        targets[name] = Target(name, (*program, *extra_arguments), run, timed=True)
    return tuple(targets.values())


def capture_stems(ranks: Ranks | None) -> tuple[str, ...]:
    """Returns the names, without suffix, of the captures in a target's folder: one name, or a name for each rank."""
    if ranks is None or ranks.in_one_capture:
        return ("capture",)
    return tuple(f"capture_rank{rank}" for rank in range(ranks.count))


def program_target(
    program: Sequence[str], run: Run, annotation: Annotation | None = None, ranks: Ranks | None = None
) -> Target:
    """Returns the target for a program of the user, named after its script: ``python -u src/train.py`` is ``train``.

    Raises:
        ConfigurationError: the command line gives no name.
    """
    if program[0].startswith("-"):  # a profiler would read it as one of its own options
        raise ConfigurationError(f"{program[0]!r} looks like an option, and is no program", "Name it by its path: ./…")
    script = next((word for word in program if word.endswith(".py")), None)
    module = program[program.index("-m") + 1] if "-m" in program[:-1] else None
    stem = Path(script).stem if script else module or Path(program[0]).name
    name = re.sub(r"[^\w.-]+", "-", stem).strip("-.")
    if not name:
        raise ConfigurationError(f"{program[0]!r} gives no name for a folder", "Name the program by its path")
    return Target(name, tuple(program), run, annotation=annotation, ranks=ranks)
