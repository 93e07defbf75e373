"""The hooks in the program's process: what PyTorch does becomes ranges, times and steps.

Loaded by ``injected/sitecustomize.py`` under a name of its own. What they are asked to do is one JSON object in the
environment, which worker processes and launchers inherit: the attributes of ``runs.targets.Annotation``; ``results``,
the file for the times of steps and phases, None where they are not wanted, as under a profiler; and ``spellings``, how
the names of phases are written, for ranges of the program's own.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import Session

#: The variable of the environment that holds it.
VARIABLE = "NSYS_ANALYZE_ANNOTATION"


def hook(name: str) -> None:
    """Hooks a module that this process has imported: PyTorch, or the one of transformers that generates."""
    from .patches import patch, patch_generation

    if name == "torch":
        patch(_session())
    else:
        patch_generation(_session(), sys.modules[name])


def watch() -> None:
    """Looks at the program's ranges again: a recorder has taken the place of the functions that write them."""
    _session().ranges.watch()


@functools.cache
def _session() -> Session:
    from .session import Session

    session = Session(SimpleNamespace(**json.loads(os.environ[VARIABLE])), sys.modules["torch"])
    atexit.register(session.at_exit)
    return session
