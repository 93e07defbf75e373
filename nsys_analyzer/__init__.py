"""Answers from Nsight Systems captures of transformers.

``Trace.load("capture.sqlite").kernels`` is the kernel table as a pandas DataFrame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsys_analyzer.api import Trace

__version__ = "0.1.0"
__all__ = ["Trace", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads ``Trace`` when it is first asked for: ``nsys-analyze --help`` needs no numpy."""
    if name == "Trace":
        from nsys_analyzer.api import Trace

        return Trace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
