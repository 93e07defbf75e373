"""Finds the attainable time of an operator on a GPU, from the times of well-shaped operators that were measured.

``attainable_times.csv`` contains the total kernel time of well-shaped operators by class, precision and amount of work:
FLOPs for matmul, attention and convolution, bytes for the other kinds. ``nsys-analyze bench attainable`` measures these
operators, and ``docs/make_attainable_times.py`` writes the file from the rows of this experiment.

The times of a GPU without rows follow from the times of the first GPU in the file, by the peaks in both data sheets.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from nsys_analyzer.analysis.operators.costs import Cost
from nsys_analyzer.analysis.transformer.peaks import Peaks, find_peaks
from nsys_analyzer.trace.arrays import Floats
from nsys_analyzer.trace.metadata import Gpu
from nsys_analyzer.trace.operator_calls import Signature, Tensor

TIMES_FILE = Path(__file__).with_name("attainable_times.csv")
#: The kinds whose time may be limited by arithmetic. All kinds may be limited by memory traffic.
COMPUTE_KINDS = ("matmul", "attention", "convolution")
#: The kind whose times bound the memory traffic of every operator.
_MEMORY_KIND = "elementwise"
#: The precisions whose times replace those of a precision that was not measured. For arithmetic, they are scaled by the
#: peaks in data sheets.
_SIMILAR_PRECISIONS = {"fp4": ("fp8", "bf16"), "fp8": ("bf16",), "fp16": ("bf16",), "tf32": ("bf16",)}
#: Attention with heads of at most this size is slower per FLOP, because its exponentials take as long as its matmuls.
_SMALL_HEAD = 64
#: The classes of PyTorch's own operators whose good implementations differ from others of their kind. The parts of a
#: synchronized batch norm are not among them: each of them passes over the data once.
_CLASSES_BY_NAME = {
    "batch norm": re.compile(r"^aten::\w*batch_norm(?!_stats|_elemt|_backward_)"),
    "group norm": re.compile(r"^aten::\w*group_norm"),
    "max pool": re.compile(r"^aten::max_pool"),
}
#: An operator is compared with those that have less work by at most this factor.
_SIMILAR_WORK = 1.5
_NS_PER_US = 1e3


@dataclass(frozen=True)
class Curve:
    """The shortest times of a class of operators by the amount of work, both in ascending order."""

    amount: Floats
    ns: Floats

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Makes the curve of measured amounts and times, in any order.

        An operator does not need more time than one with more work, and not more time than a slightly smaller one in
        proportion. Operators of a class that a GPU executes worse are thus left out.
        """
        amount, ns = np.array(sorted(points), np.float64).T
        ratio = amount[:, np.newaxis] / amount
        is_similar = (ratio >= 1) & (ratio < _SIMILAR_WORK)
        ns = np.where(is_similar, ns * ratio, np.inf).min(axis=1)
        return cls(amount, np.minimum.accumulate(ns[::-1])[::-1])

    def time_ns(self, amount: float) -> float:
        """Returns the time for an amount of work.

        It is interpolated between the measured amounts, proportional beyond the largest one, and constant below the
        smallest one, because a kernel has a shortest time.
        """
        if amount >= self.amount[-1]:
            return float(self.ns[-1] * amount / self.amount[-1])
        return float(np.exp(np.interp(np.log(max(amount, 1.0)), np.log(self.amount), np.log(self.ns))))


#: The curves of a GPU by class and precision. A class that only transfers data also has a curve for unknown precisions,
#: from the times of all precisions.
_Curves: TypeAlias = Mapping[tuple[str, str], Curve]


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

    def time_ns(self, cost: Cost, signature: Signature | None = None) -> float:
        """Returns the attainable time of an operator, ns; NaN if nothing similar was measured.

        The time is the larger one of the times for the arithmetic and for the memory traffic.

        Args:
            cost: the cost of the operator.
            signature: the operator and its tensors, which select the class of similar operators within its kind.
        """
        reference = find_peaks(self.measured_on)
        if reference is None or cost.kind == "collective":
            return float("nan")
        curves, classes = _read_times()[self.measured_on], find_classes(cost, signature)
        # A GPU that is half as fast takes as long as the reference takes for twice the work. Thus the shortest time of
        # a kernel is not scaled.
        transferred_bytes = cost.bytes * reference.bytes_per_s / self._peaks.bytes_per_s
        # The measured operators find data of up to the size of the L2 cache in it. An operator of a program may have to
        # read them from memory, so its time is at least the time at the bandwidth of large elementwise operators.
        traffic = curves[_MEMORY_KIND, ""]
        memory_ns = transferred_bytes * float(traffic.ns[-1] / traffic.amount[-1])
        similar_precisions = (cost.precision, *_SIMILAR_PRECISIONS.get(cost.precision, ()))
        if cost.kind not in COMPUTE_KINDS or not cost.flops:
            keys = ((name, x) for name in (*classes, _MEMORY_KIND) for x in (*similar_precisions, ""))
            return max(memory_ns, curves[next(key for key in keys if key in curves)].time_ns(transferred_bytes))
        peak = self._peaks.flops_per_s.get(cost.precision)
        key = next(((name, x) for name in classes for x in similar_precisions if (name, x) in curves), None)
        if key is None or not peak:
            return float("nan")
        return max(memory_ns, curves[key].time_ns(cost.flops * reference.flops_per_s[key[1]] / peak))

    def find_limit(self, cost: Cost, signature: Signature) -> str:
        """Returns what limits an operator that takes its attainable time: ``FLOPs`` or ``memory``."""
        has_arithmetic = cost.kind in COMPUTE_KINDS and cost.flops > 0
        is_limited_by_flops = self.time_ns(cost._replace(bytes=0.0), signature) == self.time_ns(cost, signature)
        return "FLOPs" if has_arithmetic and is_limited_by_flops else "memory"


def find_attainable_rates(gpu: Gpu | None) -> AttainableRates | None:
    """Returns the attainable rates of a GPU; None if its peaks are unknown, or for an empty name."""
    peaks = find_peaks(gpu.name if gpu else None)
    if gpu is None or peaks is None:
        return None
    times = _read_times()
    return AttainableRates(gpu.name, peaks.name if peaks.name in times else next(iter(times)), peaks)


def find_classes(cost: Cost, signature: Signature | None = None) -> tuple[str, ...]:
    """Returns the classes of similar operators that an operator belongs to, the most similar one first.

    The last class is the kind of the operator. Backward operators have classes of their own. Further classes divide
    the kinds in which good implementations differ: attention by the size of its heads, norms by what they normalize,
    and reductions by whether they pool images.
    """
    name = signature.name if signature else ""
    similar: str = cost.kind
    if cost.kind == "attention" and signature:
        head_size = next((x.shape[-1] for x in signature.inputs if isinstance(x, Tensor) and len(x.shape) > 2), 0)
        similar = f"attention with heads of {'64' if head_size <= _SMALL_HEAD else '128'}"
    else:
        similar = next((words for words, pattern in _CLASSES_BY_NAME.items() if pattern.search(name)), similar)
    suffixes = (" backward", "") if "backward" in name else ("",)
    return tuple(dict.fromkeys(f"{family}{suffix}" for family in (similar, cost.kind) for suffix in suffixes))


@cache
def _read_times() -> Mapping[str, _Curves]:
    """Returns the curves of each measured GPU."""
    points: dict[str, dict[tuple[str, str], list[tuple[float, float]]]] = {}
    with TIMES_FILE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            point = (float(row["amount"]), float(row["microseconds"]) * _NS_PER_US)
            of_class = points.setdefault(row["gpu"], {})
            of_class.setdefault((row["class"], row["precision"]), []).append(point)
            if not row["class"].startswith(COMPUTE_KINDS):
                of_class.setdefault((row["class"], ""), []).append(point)
    return {gpu: {key: Curve.of(rows) for key, rows in classes.items()} for gpu, classes in points.items()}
