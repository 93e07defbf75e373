"""Analyzes Nsight Systems and PyTorch profiler captures of transformers.

``load("capture.sqlite").kernels`` is the kernel table as a pandas DataFrame.
``render(build_report(summarize("capture.sqlite")))`` is the report.
``compare("before.sqlite", "after.sqlite")`` is the comparison of two runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsys_analyzer.api import Trace, build_report, compare, load, render, summarize, what_if

__version__ = "0.2.0"
__all__ = ["Trace", "__version__", "build_report", "compare", "load", "render", "summarize", "what_if"]


def __getattr__(name: str) -> Any:
    """Imports a name of ``__all__`` when it is first used, so that ``nsys-analyze --help`` does not import numpy."""
    if name in __all__:
        from nsys_analyzer import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
