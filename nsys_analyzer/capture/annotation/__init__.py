"""Annotates a PyTorch program from outside: ranges around its steps and phases, their times, and the capture range.

``injected`` is a folder for ``PYTHONPATH``, through which Python loads ``hooks`` in the program's process. The
program's Python may be another one, without this package: ``hooks`` needs nothing but PyTorch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from nsys_analyzer.capture.annotation.hooks import VARIABLE
from nsys_analyzer.runs.targets import Annotation
from nsys_analyzer.trace.phase_names import DEFAULT_NAMES

_PHASES = ("step", "forward", "loss", "backward", "optimizer")


def annotating(asked: Annotation | None, results: Path | None = None) -> dict[str, str]:
    """Returns variables for a program, and for all that it starts; none without an annotation.

    Args:
        asked: what to annotate.
        results: the file for the times of steps and phases, without a profiler.
    """
    if asked is None:
        return {}
    settings = {
        **asdict(asked),
        "results": str(results.absolute()) if results else None,
        "spellings": {phase: list(DEFAULT_NAMES[phase]) for phase in _PHASES},
    }
    folder = str(Path(__file__).with_name("injected"))
    before = os.environ.get("PYTHONPATH")
    return {VARIABLE: json.dumps(settings), "PYTHONPATH": f"{folder}{os.pathsep}{before}" if before else folder}
