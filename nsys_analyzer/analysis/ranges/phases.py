"""Decides from the name of a range which phase of a step, part of attention or module it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.trace.phase_names import (
    DEFAULT_NAMES,
    MODULE_RANGE_WITH_PATH,
    PIPELINE_PASS_SUFFIXES,
    map_by_shape,
    normalize_name,
    parse_served_step,
    strip_counter,
)

#: Phases in the order of a training step. ``step`` encloses the others.
LEAF_PHASES = ("forward", "loss", "backward", "optimizer")
STEP = "step"
#: A step without a backward pass in a process whose other steps have one.
OTHER_STEP = "step without backward"
WARMUP = "warmup"
#: The ranges inside self-attention.
ATTENTION_PARTS = ("attention", "scores", "softmax", "values")

#: The role of a module's range that is not attention.
MODULE = "module"
#: A name is a misspelled phase if its similarity to the name of a phase reaches this ratio.
_MISSPELLING_SIMILARITY = 0.75
#: The class of attention that computes its projections itself, so that its range is more than attention.
_ATTENTION_WITH_PROJECTIONS = "MultiheadAttention"
#: The names of ranges that PyTorch's profiler and nsys write by themselves.
_FRAMEWORK_NAME = re.compile(r"ProfilerStep#|Optimizer\.(?:step|zero_grad)#|torch\.(?:nn|optim|autograd|Tensor)\.")


def is_framework_name(name: str) -> bool:
    """Returns True for the name of a range that a framework writes by itself."""
    return bool(_FRAMEWORK_NAME.match(name))


def find_module_role(name: str) -> str | None:
    """Returns the role of the range of a module: ``attention`` or ``module``; None if it is not a module's range.

    Modules inside attention, such as its projections, have the role ``module``.
    """
    match = MODULE_RANGE_WITH_PATH.fullmatch(name)
    if match is None:
        return None
    *_, last_word = re.split(r"[/.]", match["path"])
    is_attention = normalize_name(last_word) in DEFAULT_NAMES["attention"] or match["kind"].endswith("Attention")
    return "attention" if is_attention and match["kind"] != _ATTENTION_WITH_PROJECTIONS else MODULE


@dataclass(frozen=True)
class PhaseNames:
    """The names that the ranges of each phase have: the default names, except for the phases in ``extra``.

    Attributes:
        extra: exact names by phase, by part of attention, or by a phase that the user defines.
        steps: the number of steps, for a program in which nothing else tells them; 0 if it is not given.
    """

    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    steps: int = 0

    @staticmethod
    def parse(options: Iterable[str], steps: int = 0) -> PhaseNames:
        """Parses options such as ``forward=NAME``; a phase may have several names.

        Raises:
            ConfigurationError: an option lacks a phase or a name, or its phase seems misspelled.
        """
        extra: dict[str, tuple[str, ...]] = {}
        for option in options:
            phase, separator, name = (part.strip() for part in option.partition("="))
            if not separator or not phase or not name:
                raise ConfigurationError(f"{option!r} is not PHASE=RANGE", "Write for example forward=model_fwd")
            phase = phase.lower()
            similar = get_close_matches(phase, DEFAULT_NAMES, 1, _MISSPELLING_SIMILARITY)
            if similar and phase not in DEFAULT_NAMES:
                hint = f"Did you mean {similar[0]}={name}? A phase of your own needs a name that is less similar to it"
                raise ConfigurationError(f"{phase!r} is not a phase", hint)
            extra[phase] = (*extra.get(phase, ()), name)
        return PhaseNames(extra, steps)

    @property
    def leaf_phases(self) -> tuple[str, ...]:
        """The phases that partition a step, in order; phases that the user defines come last."""
        own_phases = [phase for phase in self.extra if phase not in (*LEAF_PHASES, STEP, WARMUP, *ATTENTION_PARTS)]
        return (*LEAF_PHASES, *own_phases)

    def find_roles(self, names: tuple[str, ...]) -> list[str | None]:
        """Returns the phase or part of attention of each range name, or None."""
        return [self.find_role(name) for name in names] if self.extra else map_by_shape(names, self.find_role)

    def find_role(self, name: str) -> str | None:
        """Returns the phase or part of attention that a range of this name is, or None."""
        for role, exact_names in self.extra.items():
            if name in exact_names:
                return role
        if strip_counter(name) in self.extra.get(STEP, ()):
            return STEP
        normal = normalize_name(name)
        for role, spellings in DEFAULT_NAMES.items():
            if role not in self.extra and normal in spellings:
                return role
        if STEP not in self.extra and parse_served_step(name) is not None:
            return STEP
        for suffix, role in PIPELINE_PASS_SUFFIXES.items():
            if role not in self.extra and name.endswith(suffix):
                return role
        return None
