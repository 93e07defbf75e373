"""Finds the attainable time of an operator on a GPU, from the times of well-shaped operators that were measured.

``attainable_times.csv`` contains the total kernel time of well-shaped operators on an H100 and an H200 by kind,
precision and amount of work: FLOPs for matmul, attention and convolution, bytes for the other kinds. The operators are
those of ``nsys-analyze bench attainable``, in PyTorch 2.11 with CUDA 13. The file contains the fastest operators only:
no measured operator with more work takes less time than a row.

The times of other GPUs are scaled by the peaks in their data sheets.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from nsys_analyzer.analysis.operators.costs import Cost
from nsys_analyzer.analysis.transformer.peaks import Peaks, find_peaks
from nsys_analyzer.trace.arrays import Floats
from nsys_analyzer.trace.metadata import Gpu

_TIMES = Path(__file__).with_name("attainable_times.csv")
#: The GPUs with measured times, by their names in ``Peaks``. Other GPUs are scaled from the first one.
_MEASURED_GPUS = ("H100 80GB HBM3", "H200")
#: The kind whose times bound the memory traffic of every operator.
_MEMORY_KIND = "elementwise"
_NS_PER_US = 1e3


@dataclass(frozen=True)
class _Curve:
    """The shortest times by the amount of work, both in ascending order."""

    amount: Floats
    ns: Floats

    def time_ns(self, amount: float) -> float:
        """Returns the time for an amount of work: interpolated between rows, and proportional beyond the last row."""
        if amount >= self.amount[-1]:
            return float(self.ns[-1] * amount / self.amount[-1])
        return float(np.exp(np.interp(np.log(max(amount, 1.0)), np.log(self.amount), np.log(self.ns))))


@dataclass(frozen=True)
class AttainableRates:
    """The attainable times of operators on one GPU.

    Attributes:
        gpu: the name of the GPU.
        measured_on: the GPU on which the times were measured. If it is another GPU, times are scaled by data sheets.
    """

    gpu: str
    measured_on: str
    _peaks: Peaks = field(repr=False)

    @property
    def is_scaled(self) -> bool:
        """Returns whether the times were measured on another GPU."""
        is_scaled: bool = self.measured_on != self._peaks.name
        return is_scaled

    def time_ns(self, cost: Cost, *, is_backward: bool = False) -> float:
        """Returns the attainable time of an operator, ns; NaN if nothing similar was measured.

        The time is the larger one of the times for the arithmetic and for the memory traffic.

        Args:
            cost: the cost of the operator.
            is_backward: whether the operator is a backward operator, such as ``aten::convolution_backward``.
        """
        curves, reference = _read_curves(self.measured_on), find_peaks(self.measured_on)
        if reference is None or cost.kind == "collective":
            return float("nan")
        kinds = (f"{cost.kind} backward", cost.kind) if is_backward else (cost.kind,)
        compute_ns = 0.0
        if cost.flops and any(kind == cost.kind and precision for kind, precision in curves):
            curve = next((curves[kind, cost.precision] for kind in kinds if (kind, cost.precision) in curves), None)
            peak = self._peaks.flops_per_s.get(cost.precision)
            if curve is None or not peak:
                return float("nan")
            compute_ns = curve.time_ns(cost.flops) * reference.flops_per_s[cost.precision] / peak
        curve = next(curves[kind, ""] for kind in (*kinds, _MEMORY_KIND) if (kind, "") in curves)
        # Data in the L2 cache is faster than memory, but whether an operator finds its data there is not known.
        traffic = curves[_MEMORY_KIND, ""]
        memory_ns = max(curve.time_ns(cost.bytes), cost.bytes * traffic.ns[-1] / traffic.amount[-1])
        return float(max(compute_ns, memory_ns * reference.bytes_per_s / self._peaks.bytes_per_s))


def find_attainable_rates(gpu: Gpu | None) -> AttainableRates | None:
    """Returns the attainable rates of a GPU; None if its peaks are unknown, or for an empty name."""
    peaks = find_peaks(gpu.name if gpu else None)
    if gpu is None or peaks is None:
        return None
    measured_on = peaks.name if peaks.name in _MEASURED_GPUS else _MEASURED_GPUS[0]
    return AttainableRates(gpu.name, measured_on, peaks)


@cache
def _read_curves(gpu: str) -> Mapping[tuple[str, str], _Curve]:
    """Returns the measured times of a GPU by kind and precision. The precision is empty for memory traffic."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with _TIMES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["gpu"] == gpu:
                point = (float(row["amount"]), float(row["microseconds"]) * _NS_PER_US)
                points.setdefault((row["kind"], row["precision"]), []).append(point)
    return {key: _Curve(*np.array(rows).T) for key, rows in points.items()}
