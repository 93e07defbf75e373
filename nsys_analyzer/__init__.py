"""Answers from Nsight Systems captures of transformers.

``load("capture.sqlite").kernels`` is the kernel table as a pandas DataFrame, and
``render(build_report(summarize("capture.sqlite")))`` the report; ``compare("before.sqlite", "after.sqlite")`` is what
changed between two runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsys_analyzer.api import Trace, build_report, compare, load, render, summarize, what_if

__version__ = "0.2.0"
__all__ = ["Trace", "__version__", "build_report", "compare", "load", "render", "summarize", "what_if"]


def __getattr__(name: str) -> Any:
    """Loads what is in ``__all__`` when it is first asked for: ``nsys-analyze --help`` needs no numpy."""
    if name in __all__:
        from nsys_analyzer import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
