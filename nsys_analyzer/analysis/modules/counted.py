"""The FLOPs of modules, as they were counted while the program ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from nsys_analyzer.analysis.modules.calls import path_of
from nsys_analyzer.analysis.modules.module import DIRECTIONS, Module, Modules, Work
from nsys_analyzer.configuration import CountedFlops

_BACKWARD = ("backward", "recomputed")


def with_flops(modules: Modules, counted: CountedFlops) -> Modules:
    """The modules of steps with the FLOPs that were counted in one step, those of the modules inside included.

    A forward pass that runs again in backward is work of backward.
    """
    if modules.per != "step":
        return modules
    flops: dict[str, dict[str, float]] = {way: defaultdict(float) for way in DIRECTIONS}
    for name, by_phase in counted.modules.items():
        words = path_of(name.rpartition(": ")[0])
        for phase, count in by_phase.items():
            way = flops["backward" if phase in _BACKWARD else "forward"]
            for length in range(1, len(words) + 1):
                way[".".join(words[:length])] += count
    return replace(modules, modules=tuple(_with(one, flops) for one in modules.modules))


def _with(module: Module, flops: Mapping[str, Mapping[str, float]]) -> Module:
    def work(name: str, before: Work) -> Work:
        return replace(before, flops=flops[name].get(module.path, before.flops))

    return replace(module, forward=work("forward", module.forward), backward=work("backward", module.backward))
