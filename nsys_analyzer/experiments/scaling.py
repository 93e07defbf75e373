"""How a figure grows with another."""

from __future__ import annotations

import math
from collections.abc import Sequence


def fitted_exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The exponent p of y = c · xᵖ that fits best: the slope of the least-squares line through (log x, log y).

    Args:
        points: x and y, both positive.

    Returns:
        None below two different x.
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    return slope
