"""What the hooks are asked to do: one JSON object in the environment, which worker processes and launchers inherit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

VARIABLE = "NSYS_ANALYZE_ANNOTATION"


@dataclass(frozen=True)
class Settings:
    """The settings of the hooks.

    Attributes:
        results: the file for the times of steps and phases; None where they are not wanted, as under a profiler.
        warmup, steps: steps before the capture range, and inside.
        steady: whether the warm-up goes on until steps take equally long, for twice as many steps at most.
        modules: whether each call of a module gets a range, in forward and in backward.
        window: whether the hooks open the capture range; a program that does so itself has its own in any case.
        run_to_end: whether the program goes on after the capture range.
        spellings: how the names of phases are written, for ranges of the program's own.
    """

    results: str | None = None
    warmup: int = 5
    steps: int = 10
    steady: bool = False
    modules: bool = False
    window: bool = True
    run_to_end: bool = False
    spellings: dict[str, list[str]] = field(default_factory=dict)

    def written(self) -> str:
        """The value of the environment's variable."""
        return json.dumps(asdict(self))


def read_settings(text: str) -> Settings:
    """The settings in the environment's variable; keys of another release are left alone."""
    values = json.loads(text)
    return Settings(**{name: values[name] for name in Settings.__dataclass_fields__ if name in values})
