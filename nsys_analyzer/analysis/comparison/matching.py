"""Which runs of two folders stand against each other: those of exactly one configuration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nsys_analyzer.analysis.comparison.comparability import CONFIGURATION, differing, value_of
from nsys_analyzer.analysis.comparison.comparison import Difference, Side
from nsys_analyzer.analysis.comparison.recorded import Recorded

#: What runs that stand against each other have in common.
_Key: TypeAlias = "tuple[Any, ...]"


@dataclass(frozen=True)
class Alone:
    """A run that stands against none, the one of the other side that is most like it, and what keeps them apart."""

    run: Recorded
    nearest: Recorded | None
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Matched:
    """The runs of two sides: those that stand against each other, and those of either side that stand against none."""

    pairs: tuple[tuple[Side, Side], ...]
    only_before: tuple[Alone, ...]
    only_after: tuple[Alone, ...]


def match(before: Sequence[Recorded], after: Sequence[Recorded], *, repeats: bool = False) -> Matched:
    """Runs of one configuration, which may be several on a side, are a pair; what is known of one alone keeps apart.

    Two captures are a pair whatever they are, process by process. Runs of which no configuration is known are a pair
    by their name. With ``repeats`` all runs of a side are of one program.
    """
    alone = all(len({run.name for run in side}) == 1 for side in (before, after))
    groups = [_grouped(side, alone=alone, repeats=repeats) for side in (before, after)]
    if alone and all(len(side) == 1 for side in (before, after)):
        return Matched(((Side(tuple(before)), Side(tuple(after))),), (), ())
    shared = [key for key in groups[0] if key in groups[1]]
    left = [[run for key, runs in group.items() if key not in shared for run in runs] for group in groups]
    return Matched(
        tuple((Side(tuple(groups[0][key])), Side(tuple(groups[1][key]))) for key in shared),
        tuple(_alone(run, left[1]) for run in left[0]),
        tuple(_alone(run, left[0]) for run in left[1]),
    )


def _grouped(runs: Sequence[Recorded], *, alone: bool, repeats: bool) -> dict[_Key, list[Recorded]]:
    groups: defaultdict[_Key, list[Recorded]] = defaultdict(list)
    for run in runs:
        process = run.rank if run.rank is not None else run.process
        # As texts: what a file says may be of any type.
        known = tuple(None if (value := value_of(run, key)) is None else str(value) for key in CONFIGURATION)
        # Without a model, what else is known is true of many programs.
        named = known if value_of(run, "model") is not None else (*known, run.name)
        groups[(process,) if alone or repeats else (process, *named)].append(run)
    return groups


def _alone(run: Recorded, others: Sequence[Recorded]) -> Alone:
    found = [(other, tuple(differing(run, other, CONFIGURATION, unknown="unknown"))) for other in others]
    if not found:
        return Alone(run, None, ())
    nearest, differences = min(found, key=lambda one: len(one[1]))
    return Alone(run, nearest, differences)
