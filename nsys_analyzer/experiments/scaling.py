"""How a figure grows with another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def fitted_exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The exponent p of y = c · xᵖ that fits positive points best, by least squares of log y over log x.

    None below two different x.
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    return statistics.linear_regression(*zip(*logs, strict=True)).slope
