"""The hooks in the program's process: what PyTorch does becomes ranges, times and steps.

Loaded by ``injected/sitecustomize.py`` under a name of its own; the settings are in the environment.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import Session


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
    from .settings import VARIABLE, read_settings

    session = Session(read_settings(os.environ[VARIABLE]), sys.modules["torch"])
    atexit.register(session.at_exit)
    return session
