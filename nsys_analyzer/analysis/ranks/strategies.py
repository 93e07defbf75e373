"""How a run shares its work between GPUs, from the pattern of its collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from nsys_analyzer.analysis.intervals.timeline import NONE
from nsys_analyzer.analysis.ranks.member import COLLECTIVE_KINDS, Member
from nsys_analyzer.trace.arrays import distinct_rows

DATA_PARALLEL, SHARDED, PIPELINE = "data parallel (DDP)", "fully sharded (FSDP)", "pipeline parallel"
#: A message of so few bytes carries a loss, a norm or a flag, not activations, gradients or weights.
_SMALL = 4096

#: Without sizes, collectives that are so much rarer than the usual ones are taken to be such, too.
_RARE = 0.1


def name_strategies(members: Sequence[Member]) -> tuple[str, ...]:
    """The ways in which the members share the work, that of each communicator; empty where none can be told."""
    patterns: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for member in members:
        collectives = member.collectives
        counted = (collectives.step != NONE) & ((collectives.bytes < 0) | (collectives.bytes > _SMALL))
        columns = collectives.communicator, collectives.kind, collectives.phase
        chosen = [column[counted] for column in columns]
        first, pattern = distinct_rows(*chosen)
        times = np.bincount(pattern, minlength=len(first))
        sized = bool((collectives.bytes[counted] >= 0).all())
        least = 0 if sized else _RARE * times.max(initial=0)
        usual = first[times >= least]
        for communicator, kind, phase in zip(*(column[usual].tolist() for column in chosen), strict=True):
            name = collectives.names[phase] if phase != NONE else ""
            # One communicator may use several streams: those without an ID are looked at together.
            patterns[max(communicator, 0)].add((COLLECTIVE_KINDS[kind], name))
    found = dict.fromkeys(name for pattern in patterns.values() if (name := _strategy(pattern)))
    if len(members) > 1 and len({(member.capture, member.process) for member in members}) == 1:
        return ("several GPUs in one process",)
    return tuple(found)


def _strategy(pattern: set[tuple[str, str]]) -> str:
    """What the collectives of one communicator, by kind and phase, are for."""
    phases: dict[str, set[str]] = defaultdict(set)
    for kind, phase in pattern:
        phases[kind].add("forward" if phase == "loss" else phase)
    if "send/receive" in phases:
        return PIPELINE
    if "all-to-all" in phases:
        return "expert parallel"
    if "all-gather" in phases and "reduce-scatter" in phases:
        if "forward" in phases["reduce-scatter"]:
            return "tensor parallel, with its sequence"
        return "sharded optimizer (ZeRO)" if phases["all-gather"] == {"optimizer"} else SHARDED
    if "all-reduce" in phases:
        reduced = phases["all-reduce"]
        if reduced & {"forward"}:
            return "tensor parallel"
        return DATA_PARALLEL if "backward" in reduced else "data or tensor parallel"
    return ""
