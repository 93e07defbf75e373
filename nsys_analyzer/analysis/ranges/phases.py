"""The parts of a training step, found by the names of their ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain

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
#: A step without a backward pass, where others have one.
OTHER_STEP = "step without backward"
WARMUP = "warmup"
#: The ranges inside self-attention.
ATTENTION_PARTS = ("attention", "scores", "softmax", "values")

#: The role of a module's range that is not attention.
MODULE = "module"
#: A name so much like that of a phase is a misspelt one.
_MISSPELT = 0.75
#: This class of attention computes its projections itself.
_WITH_PROJECTIONS = "MultiheadAttention"
#: Ranges that PyTorch's profiler and nsys write by themselves.
_FRAMEWORK = re.compile(r"ProfilerStep#|Optimizer\.(?:step|zero_grad)#|torch\.(?:nn|optim|autograd|Tensor)\.")


def is_framework_name(name: str) -> bool:
    """True for the name of a range that a framework writes by itself."""
    return bool(_FRAMEWORK.match(name))


def find_module_role(name: str) -> str | None:
    """The role of a module's range: attention, whose projections are modules inside, or any other; else None."""
    match = MODULE_RANGE_WITH_PATH.fullmatch(name)
    if match is None:
        return None
    *_, word = re.split(r"[/.]", match["path"])
    called = normalize_name(word) in DEFAULT_NAMES["attention"] or match["kind"].endswith("Attention")
    return "attention" if called and match["kind"] != _WITH_PROJECTIONS else MODULE


@dataclass(frozen=True)
class PhaseNames:
    """The range names of each phase: the default ones, but for those in ``extra``.

    Attributes:
        extra: exact names by phase, attention part or phase of the user's own.
        steps: how many steps there are, where nothing tells them; 0 where that was not said.
    """

    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    steps: int = 0

    @staticmethod
    def parse(options: Iterable[str], steps: int = 0) -> PhaseNames:
        """Reads ``forward=NAME`` options; several for one phase add up.

        Raises:
            ConfigurationError: an option without a phase or without a name, or with a phase that seems misspelt.
        """
        extra: dict[str, tuple[str, ...]] = {}
        for option in options:
            phase, separator, name = option.partition("=")
            if not separator or not phase.strip() or not name.strip():
                raise ConfigurationError(f"{option!r} is not PHASE=RANGE", "Write for example forward=model_fwd")
            key = phase.strip().lower()
            if key not in DEFAULT_NAMES and (meant := get_close_matches(key, DEFAULT_NAMES, 1, _MISSPELT)):
                hint = f"Did you mean {meant[0]}={name.strip()}? A phase of your own needs a name that is less like it"
                raise ConfigurationError(f"{key!r} is no phase", hint)
            extra[key] = (*extra.get(key, ()), name.strip())
        return PhaseNames(extra, steps)

    @property
    def leaf_phases(self) -> tuple[str, ...]:
        """The phases that partition a step, in order; the user's own come last."""
        added = [p for p in self.extra if p not in (*LEAF_PHASES, STEP, WARMUP, *ATTENTION_PARTS)]
        return (*LEAF_PHASES, *added)

    def find_roles(self, names: tuple[str, ...]) -> list[str | None]:
        """Returns the phase or attention part of each name, or None."""
        return [self.find_role(name) for name in names] if self.extra else map_by_shape(names, self.find_role)

    def find_role(self, name: str) -> str | None:
        """The phase or attention part that a range of this name is, or None."""
        normal = normalize_name(name)
        by_name = (key for key, names in self.extra.items() if name in names)
        by_counted_name = (STEP for _ in range(strip_counter(name) in self.extra.get(STEP, ())))
        default = (key for key, spellings in DEFAULT_NAMES.items() if key not in self.extra and normal in spellings)
        by_engine = (STEP for _ in range(STEP not in self.extra and parse_served_step(name) is not None))
        scheduled = (
            key for ending, key in PIPELINE_PASS_SUFFIXES.items() if key not in self.extra and name.endswith(ending)
        )
        return next(chain(by_name, by_counted_name, default, by_engine, scheduled), None)
