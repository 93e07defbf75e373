"""Which kernels of two runs stand for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from nsys_analyzer.analysis.comparison.recorded import RecordedKernel


class Pair(NamedTuple):
    """A kernel before and after; None where one run has none for it."""

    before: RecordedKernel | None
    after: RecordedKernel | None


def match_kernels(before: Sequence[RecordedKernel], after: Sequence[RecordedKernel]) -> tuple[Pair, ...]:
    """Every kernel of both runs once: paired by name and class, then by class and launches a step.

    A matmul in another precision, or of another tile, is another kernel by name, and is launched as often. Of several
    that are launched as often, the longest of both are a pair.
    """
    named = {(one.name, one.kernel_class): one for one in after}
    pairs = [Pair(one, named.pop((one.name, one.kernel_class), None)) for one in before]
    found = [pair for pair in pairs if pair.after]
    left = _by_work(pair.before for pair in pairs if pair.before and not pair.after)
    others = _by_work(named.values())
    for work in dict.fromkeys((*left, *others)):
        found += _in_order(left[work], others[work])
    return tuple(found)


def _by_work(kernels: Iterable[RecordedKernel]) -> defaultdict[tuple[str, float], list[RecordedKernel]]:
    """The kernels by class and launches, the longest first."""
    groups: defaultdict[tuple[str, float], list[RecordedKernel]] = defaultdict(list)
    for one in sorted(kernels, key=lambda one: -one.ms):
        groups[one.kernel_class, round(one.launches, 2)].append(one)
    return groups


def _in_order(before: Sequence[RecordedKernel], after: Sequence[RecordedKernel]) -> Iterator[Pair]:
    paired = min(len(before), len(after))
    yield from (Pair(*pair) for pair in zip(before, after, strict=False))
    yield from (Pair(one, None) for one in before[paired:])
    yield from (Pair(None, one) for one in after[paired:])
