"""What people use from Python: a trace with its kernel table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsys_analyzer.analysis.frame import kernel_frame
from nsys_analyzer.trace import trace

if TYPE_CHECKING:
    import pandas as pd


class Trace(trace.Trace):
    """An nsys export: ``Trace.load(path).kernels`` is its kernel table.

    For other phase names than the default ones see :func:`nsys_analyzer.analysis.frame.kernel_frame`.
    """

    @property
    def kernels(self) -> pd.DataFrame:
        """One row for each kernel, with its phase, instance, range path and class.

        The columns and their units are ``nsys_analyzer.analysis.frame.COLUMNS``.

        Raises:
            MissingTableError: the export has no GPU activity table.
        """
        return kernel_frame(self)
