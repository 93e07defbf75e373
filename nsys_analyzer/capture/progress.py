"""What runs programs tells this while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nsys_analyzer.capture.process import Ended


@dataclass(frozen=True)
class Progress:
    """Who is told: the name of what is run and what is done with it; and how it ended, after how many seconds."""

    started: Callable[[str, str], None]
    ended: Callable[[str, Ended, float], None]
