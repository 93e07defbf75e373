"""Which steps are measured: not a long first one, not those of other work; and what a step's length is.

Steps of one program differ: the first one starts things up, some wait for a batch, some hold an evaluation. What is
alike is a group, with a count; a length that is given for all of them must not hide one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.intervals.timeline import NONE
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.windows import Windows, find_windows
from nsys_analyzer.trace.arrays import Ints

GroupKind = Literal["usual", "longer", "shorter", "other work", "first", "last"]

#: A step that takes so many times the median of the others, or so much less, is unlike them.
_UNUSUAL = 1.5
#: Where what lies between steps takes more than this share of one, a last step is not whole.
_BETWEEN = 0.1
#: Steps that last longer or shorter with the same work are part of a step's length from this share of the steps on.
_MANY = 0.25
#: Between steps of different work there is a gap of this factor; of more where there are few operations or little time.
_GAP, _FEW, _SHORT_NS = 1.5, 20, 50_000


@dataclass(frozen=True)
class StepGroup:
    """Steps that are alike.

    Attributes:
        kind: "usual"; "longer" or "shorter" than these with the same work; "other work"; "first", left out as start-up;
            "last", left out since the time from it to the next one is not known.
        median_ms: their length.
        measured: whether they are part of the figures.
    """

    kind: GroupKind
    steps: int
    median_ms: float
    measured: bool


@dataclass(frozen=True)
class Steps:
    """The steps of a process.

    Attributes:
        windows: those that are measured.
        number: shape (measured steps,), the place of each among ``every``, from 0.
        every: all that were recorded.
        groups: the usual ones first.
    """

    windows: Windows
    number: Ints
    every: Windows
    groups: tuple[StepGroup, ...]

    @property
    def length_ms(self) -> float:
        """The length of a step: the median of each group that is measured, the mean of these by their counts."""
        measured = [group for group in self.groups if group.measured]
        return sum(one.median_ms * one.steps for one in measured) / sum(one.steps for one in measured)

    @property
    def start_up(self) -> tuple[int, int] | None:
        """When the program began a first step that is left out, and when the next one; None where none is."""
        is_left_out = any(group.kind == "first" for group in self.groups)
        return (int(self.every.called[0]), int(self.every.left[0])) if is_left_out else None


def find_steps(attributed: AttributedTrace, process: int) -> Steps | None:
    """The steps of a process by its global ID; None where nothing of it ran on a device."""
    every = find_windows(attributed, process)
    if every is None:
        return None
    kinds = np.array(_kinds(attributed, process, every), np.object_)
    length = every.end - every.start
    usual = np.sort(length[kinds == "usual"])[((kinds == "usual").sum() - 1) // 2]
    is_longer, is_shorter = length > _UNUSUAL * usual + _SHORT_NS, length < usual / _UNUSUAL - _SHORT_NS
    kinds[(kinds == "usual") & is_longer], kinds[(kinds == "usual") & is_shorter] = "longer", "shorter"
    if kinds[-1] == "shorter" and every.source in ("phases", "repetition"):
        kinds[-1] = "last"
    groups, measured = [], np.zeros(len(every), np.bool_)
    for kind in dict.fromkeys(kinds.tolist()):
        chosen = kinds == kind
        many = int(chosen.sum())
        counts = kind == "usual" or (kind in ("longer", "shorter") and many >= _MANY * len(every))
        measured |= chosen & counts
        groups.append(StepGroup(kind, many, float(np.median(length[chosen])) / 1e6, counts))
    order: tuple[GroupKind, ...] = ("usual", "longer", "shorter", "other work", "first", "last")
    groups.sort(key=lambda group: order.index(group.kind))
    return Steps(every.select(measured), np.flatnonzero(measured), every, tuple(groups))


def _kinds(attributed: AttributedTrace, process: int, every: Windows) -> list[GroupKind]:
    """The kind of each step by its work: the usual one is that of most steps."""
    length = every.end - every.start
    launches, compute = _work(attributed, process, every)
    kinds: list[GroupKind] = ["usual"] * len(every)
    if len(every) < 2 or every.source == "said":
        return kinds
    own = np.maximum(every.ended - every.called, every.end - every.left)  # without what lies between steps
    is_long = own[0] > _UNUSUAL * np.median(own[1:])
    is_other_work = compute[0] > _UNUSUAL * np.median(compute[1:])
    first = int(is_long and (_trains(attributed, process) or not is_other_work))
    between = np.median((every.left - every.ended)[first:-1]) if len(every) > first + 1 else 0
    last = len(every) - int(between > _BETWEEN * np.median(length[first:]) and every.left[-1] == every.ended[-1])
    some = slice(first, last)
    key = _clusters(launches[some] + _FEW) * len(every) + _clusters(compute[some] + _SHORT_NS)
    most = max(np.unique(key).tolist(), key=lambda one: ((key == one).sum(), length[some][key == one].sum()))
    usual = np.median(own[some][key == most])
    like = (own <= _UNUSUAL * usual) & (own >= usual / _UNUSUAL)
    alike = like[some] | (key == most)  # work of other streams may fall into a neighbouring step
    kinds[some] = ["usual" if one else "other work" for one in alike.tolist()]
    kinds[:first], kinds[last:] = ["first"] * first, ["last"] * (len(every) - last)
    return kinds


def _trains(attributed: AttributedTrace, process: int) -> bool:
    """Whether a process has a phase of training; inference may begin with a long prompt."""
    instances = attributed.instances
    training = [instances.phases.index(name) for name in ("backward", "optimizer")]
    return bool((np.isin(instances.phase, training) & (instances.process == process)).any())


def _work(attributed: AttributedTrace, process: int, every: Windows) -> tuple[Ints, Ints]:
    """Shape (steps,) each: the operations that each step launches, and how long all but collectives take, ns."""
    operations, attribution, kernels = attributed.trace.operations, attributed.attribution, attributed.kernels
    waits = np.array([*(name == COMMUNICATION for name in kernels.classes), False])[kernels.code]
    mine = np.flatnonzero((operations.process == process) & ~waits)
    placed = attribution.thread[mine] != NONE
    if placed.any():  # the rest was launched before the recording began
        mine, placed = mine[placed], placed[placed]
    time = np.where(placed, attribution.time[mine], operations.start[mine])
    order = np.argsort(time, kind="stable")
    ns = np.append(0, np.cumsum((operations.end - operations.start)[mine[order]]))
    first, behind = (np.searchsorted(time[order], bound) for bound in (every.called, every.left))
    return behind - first, ns[behind] - ns[first]


def _clusters(values: Ints) -> Ints:
    """The group of each value, from the smallest on: between two groups there is a gap."""
    order = np.argsort(values, kind="stable")
    group = np.append(0, np.cumsum(values[order][1:] > _GAP * values[order][:-1]))
    found = np.empty(len(values), np.int64)
    found[order] = group
    return found
