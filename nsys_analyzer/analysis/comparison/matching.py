"""Which runs of two folders stand against each other: those of exactly one configuration."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from nsys_analyzer.analysis.comparison.comparability import CONFIGURATION, differing, reasons_against_run, value_of
from nsys_analyzer.analysis.comparison.comparison import Difference, Side
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.text import Words

#: The key of a difference in what processes are in their captures.
PROCESS = "process"
#: What runs that stand against each other have in common.
_Key: TypeAlias = "tuple[Any, ...]"


@dataclass(frozen=True)
class Alone:
    """A run that stands against none.

    Attributes:
        nearest: the one of the other side that is most like it; ``differences`` keep them apart.
        reasons: why it cannot be compared with any, a sentence each.
    """

    run: Summary
    nearest: Summary | None
    differences: tuple[Difference, ...]
    reasons: tuple[Words, ...] = ()


@dataclass(frozen=True)
class Matched:
    """The runs of two sides: those that stand against each other, and those of either side that stand against none."""

    pairs: tuple[tuple[Side, Side], ...]
    only_before: tuple[Alone, ...]
    only_after: tuple[Alone, ...]


class _Placed(NamedTuple):
    """A run, and what its process is in its capture."""

    run: Summary
    place: str


def match(before: Sequence[Summary], after: Sequence[Summary], *, repeats: bool = False) -> Matched:
    """Runs of one configuration, which may be several on a side, are a pair; what is known of one alone keeps apart.

    Two captures are a pair whatever they are, process by process: by rank or devices; of processes that share a GPU the
    first is that of the other side where both sides have as many. Runs of which no configuration is known are a pair by
    their name. With ``repeats`` all runs of a side are of one program.
    """
    if len(before) == len(after) == 1:
        return Matched(((Side(tuple(before)), Side(tuple(after))),), (), ())
    alone = all(len({run.name for run in side}) == 1 for side in (before, after))
    groups = [_grouped(list(_placed(side)), by_process=alone or repeats) for side in (before, after)]
    shared = [key for key in groups[0] if key in groups[1]]
    left = [[one for key, runs in group.items() if key not in shared for one in runs] for group in groups]
    return Matched(
        tuple((_side(groups[0][key]), _side(groups[1][key])) for key in shared),
        tuple(_alone(one, left[1]) for one in left[0]),
        tuple(_alone(one, left[0]) for one in left[1]),
    )


def _placed(runs: Sequence[Summary]) -> Iterator[_Placed]:
    """Each run with what tells its process from the others of its capture, and is the same in another capture.

    A process ID is not: of processes that share a GPU that is their number, in the order of their IDs.
    """
    sharing, so_far = Counter(run.name for run in runs if run.shares_gpu), Counter[str]()
    for run in runs:
        place = run.process or ""
        if run.rank is not None:
            place = f"rank {run.rank}"
        elif run.shares_gpu:
            so_far[run.name] += 1
            place = f"{so_far[run.name]} of {sharing[run.name]} that share a GPU"
        yield _Placed(run, place)


def _grouped(runs: Sequence[_Placed], *, by_process: bool) -> dict[_Key, list[_Placed]]:
    groups: defaultdict[_Key, list[_Placed]] = defaultdict(list)
    for one in runs:
        # As texts: what a file says may be of any type.
        known = tuple(None if (value := value_of(one.run, key)) is None else str(value) for key in CONFIGURATION)
        # Without a model, what else is known is true of many programs.
        named = known if value_of(one.run, "model") is not None else (*known, one.run.name)
        groups[(one.place,) if by_process else (one.place, *named)].append(one)
    return groups


def _side(runs: Sequence[_Placed]) -> Side:
    return Side(tuple(one.run for one in runs))


def _alone(one: _Placed, others: Sequence[_Placed]) -> Alone:
    found = [(other.run, tuple(_apart(one, other))) for other in others]
    nearest, differences = min(found, key=lambda each: len(each[1]), default=(None, ()))
    return Alone(one.run, nearest, differences, tuple(reasons_against_run(one.run)))


def _apart(one: _Placed, other: _Placed) -> Iterator[Difference]:
    """What keeps two runs apart."""
    if one.place != other.place:
        yield Difference(PROCESS, *(each.place or "the only one" for each in (one, other)))
    yield from differing(one.run, other.run, CONFIGURATION, unknown="unknown")
