"""Where one rank loses time to another: its own time by phase and part, less that of the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeVar

from nsys_analyzer.analysis.modules.module import Modules
from nsys_analyzer.analysis.ranks.run import LostTime, Part, RankFigures
from nsys_analyzer.analysis.steps.step import DeviceSteps
from nsys_analyzer.analysis.summary.summary import CaptureSummary

Key = TypeVar("Key", bound=Hashable)

#: What makes up so much of a part explains it.
_EXPLAINS = 0.5


def lost_time(
    slow: tuple[RankFigures, CaptureSummary], fast: tuple[RankFigures, CaptureSummary]
) -> tuple[LostTime, ...]:
    """The own time of a rank less that of a faster one, by phase and part, the largest loss first.

    The parts add up to the difference of their mean own times, as far as all steps were looked at.
    """
    devices = [_device(figures, capture) for figures, capture in (slow, fast)]
    if devices[0] is None or devices[1] is None:
        return ()
    here, there = devices[0], devices[1]
    transfers = (slow[0].exposed_transfer_ms or 0.0) - (fast[0].exposed_transfer_ms or 0.0)
    rows = [
        LostTime(phase, part, ms, **_why(part, ms, here, there, slow[1].modules, fast[1].modules))
        for (phase, part), ms in _less(_own(here), _own(there)).items()
    ]
    return tuple(sorted((*rows, LostTime("", "transferring", transfers)), key=lambda row: -row.ms))


def _device(figures: RankFigures, capture: CaptureSummary) -> DeviceSteps | None:
    devices = capture.step.devices if capture.step else ()
    return next((one for one in devices if one.device == figures.device), None)


def _own(device: DeviceSteps) -> dict[tuple[str, Part], float]:
    """The time of a device but for communication, by phase and part."""
    own: dict[tuple[str, Part], float] = {}
    for one in device.phases:
        own[one.phase, "compute"] = one.parts.compute_ms
        own[one.phase, "copies"] = one.parts.exposed_copy_ms
        own[one.phase, "idle"] = one.parts.idle_ms
    return own


def _less(one: Mapping[Key, float], other: Mapping[Key, float]) -> dict[Key, float]:
    keys = dict.fromkeys((*one, *other))
    return {key: ms for key in keys if (ms := one.get(key, 0.0) - other.get(key, 0.0))}


def _why(
    part: Part, ms: float, here: DeviceSteps, there: DeviceSteps, modules: Modules | None, others: Modules | None
) -> dict[str, Any]:
    """What explains most of a loss: a class of kernels and a module, or a cause of idle time and its range."""
    if part == "idle":
        causes = [{(row.cause, row.range): row.ms for row in device.idle} for device in (here, there)]
        cause = _most(ms, _less(*causes))
        return {"cause": cause[0], "range": cause[1]} if cause else {}
    if part == "compute":
        kernel_class = _most(ms, _less(*({one.kernel_class: one.ms for one in d.classes} for d in (here, there))))
        module = _most(ms, _less(*(dict(_by_module(tree)) for tree in (modules, others))))
        return {"kernel_class": kernel_class or "", "module": module or ""}
    return {}


def _most(ms: float, less: Mapping[Key, float]) -> Key | None:
    """The key of the largest difference, where it explains the loss."""
    largest = max(less, key=lambda key: less[key], default=None)
    return largest if largest is not None and less[largest] >= _EXPLAINS * ms > 0 else None


def _by_module(modules: Modules | None) -> Iterator[tuple[str, float]]:
    for one in modules.modules if modules else ():
        yield one.path, one.own_forward_ms + one.own_backward_ms
