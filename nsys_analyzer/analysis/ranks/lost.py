"""Where one rank loses time to another: its own time by phase and part, less that of the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from nsys_analyzer.analysis.modules.module import Modules
from nsys_analyzer.analysis.ranks.run import LostTime, Part, RankFigures
from nsys_analyzer.analysis.steps.step import DeviceSteps
from nsys_analyzer.analysis.summary.summary import CaptureSummary

Key = TypeVar("Key", bound=Hashable)

#: What makes up so much of a part explains it.
_EXPLAINS = 0.5


@dataclass(frozen=True)
class Losses:
    """The own time that a rank loses to another one.

    Attributes:
        rows: by phase and part, the largest first.
        slowed_ms: of the other rank: by how much its own work took longer because its collectives waited beside it.
    """

    rows: tuple[LostTime, ...]
    slowed_ms: float


def find_losses(slow: tuple[RankFigures, CaptureSummary], fast: tuple[RankFigures, CaptureSummary]) -> Losses | None:
    """The own time of a rank less that of a faster one, ms of a step; None where a step is not known.

    The rows less what slowed the faster one down add up to what their steps differ by without exposed waiting, as far
    as all steps were looked at. A collective that waits occupies a part of the GPU: kernels beside it take longer than
    on the rank that is waited for, as far as collectives waited beside other work.
    """
    devices = [_device(figures, capture) for figures, capture in (slow, fast)]
    if devices[0] is None or devices[1] is None:
        return None
    here, there = devices[0], devices[1]
    less = _less(_own(here), _own(there))
    slowed = _slowed(less, fast[0])
    transfers = (slow[0].exposed_transfer_ms or 0.0) - (fast[0].exposed_transfer_ms or 0.0)
    rows = [LostTime(phase, part, ms) for (phase, part), ms in less.items()]
    rows = sorted((*rows, LostTime("", "transferring", transfers)), key=lambda row: -row.ms)
    return Losses(tuple(_with_reasons(rows, here, there, slow[1].modules, fast[1].modules)), slowed)


def _slowed(less: dict[tuple[str, Part], float], fast: RankFigures) -> float:
    """What slowed the faster rank's kernels down, ms, which is taken off the losses.

    In a phase in which they take longer, as far as its other parts do not make up for it: kernels that take longer
    leave less time in which the GPU is idle.
    """
    left = (fast.waiting_ms or 0.0) - (fast.exposed_waiting_ms or 0.0)
    slowed = 0.0
    for phase in dict.fromkeys(phase for phase, _ in less):
        parts = [key for key in less if key[0] == phase]
        compute, all_ms = less.get((phase, "compute"), 0.0), sum(less[key] for key in parts)
        ms = min(max(-compute, 0.0), max(-all_ms, 0.0), left)
        if ms:
            less[phase, "compute"] += ms
            slowed, left = slowed + ms, left - ms
    return slowed


def _device(figures: RankFigures, capture: CaptureSummary) -> DeviceSteps | None:
    devices = capture.step.devices if capture.step else ()
    return next((one for one in devices if one.device == figures.device), None)


def _own(device: DeviceSteps) -> dict[tuple[str, Part], float]:
    """The time of a device but for communication, by phase and part."""
    own: dict[tuple[str, Part], float] = {}
    for one in device.phases:
        own[one.phase, "compute"] = one.compute_ms
        own[one.phase, "copies"] = one.exposed_copy_ms
        own[one.phase, "idle"] = one.idle_ms
    return own


def _less(one: Mapping[Key, float], other: Mapping[Key, float]) -> dict[Key, float]:
    keys = dict.fromkeys((*one, *other))
    return {key: ms for key in keys if (ms := one.get(key, 0.0) - other.get(key, 0.0))}


def _with_reasons(
    rows: Sequence[LostTime], here: DeviceSteps, there: DeviceSteps, modules: Modules | None, others: Modules | None
) -> Iterator[LostTime]:
    """The rows, of which the largest in compute and the largest in idle time get what explains most of them."""
    classes = _less(*({one.kernel_class: one.ms for one in device.classes} for device in (here, there)))
    own = _less(*(dict(_by_module(tree)) for tree in (modules, others)))
    idle = ({(row.cause, row.range or ""): row.ms for row in device.idle_by_cause} for device in (here, there))
    causes = _less(*idle)
    seen: set[Part] = set()
    for row in rows:
        first = row.part not in seen
        seen.add(row.part)
        if first and row.part == "idle" and (cause := _most(row.ms, causes)):
            yield replace(row, cause=cause[0], range=cause[1])
        elif first and row.part == "compute":
            yield replace(row, kernel_class=_most(row.ms, classes) or "", module=_most(row.ms, own) or "")
        else:
            yield row


def _most(ms: float, less: Mapping[Key, float]) -> Key | None:
    """The key of the largest difference, where it explains the loss."""
    largest = max(less, key=lambda key: less[key], default=None)
    return largest if largest is not None and less[largest] >= _EXPLAINS * ms > 0 else None


def _by_module(modules: Modules | None) -> Iterator[tuple[str, float]]:
    for one in modules.modules if modules else ():
        yield one.path, one.own_forward_ms + one.own_backward_ms
