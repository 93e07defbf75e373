"""The environment in which a program annotates itself."""

from __future__ import annotations

import os
from pathlib import Path

from nsys_analyzer.capture.annotation import injected
from nsys_analyzer.capture.annotation.hooks.settings import VARIABLE, Settings
from nsys_analyzer.runs.targets import Annotation
from nsys_analyzer.trace.phase_names import DEFAULT_NAMES

_PHASES = ("step", "forward", "loss", "backward", "optimizer")


def annotating(asked: Annotation | None, results: Path | None = None) -> dict[str, str]:
    """Variables for a program, and for all that it starts; none without an annotation.

    Args:
        asked: what to annotate.
        results: the file for the times of steps and phases, without a profiler.
    """
    if asked is None:
        return {}
    settings = Settings(
        results=str(results.absolute()) if results else None,
        warmup=asked.warmup_steps,
        steps=asked.steps,
        window=asked.window,
        run_to_end=asked.run_to_end,
        steady=asked.steady,
        modules=asked.modules,
        spellings={phase: list(DEFAULT_NAMES[phase]) for phase in _PHASES},
    )
    folder = str(Path(str(injected.__file__)).parent)
    before = os.environ.get("PYTHONPATH")
    return {VARIABLE: settings.written(), "PYTHONPATH": f"{folder}{os.pathsep}{before}" if before else folder}
