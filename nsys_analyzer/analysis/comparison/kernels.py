"""Which kernels of two runs stand for each other."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from nsys_analyzer.analysis.steps.step import KernelTime
from nsys_analyzer.analysis.summary.statistics import MATMUL

#: Class, layout of the operands, and launches a step.
_Work: TypeAlias = "tuple[str, str, float]"
#: Whether each operand is transposed (t) or not (n), and with a third letter the result, in the names of cuBLAS and
#: CUTLASS: ``sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8``, ``nvjet_sm90_tst_96x64_64x10_1x2_h_bz_TNN``.
_LAYOUT = re.compile(r"_([nt]{2})[nt]?(?![a-z0-9])", re.IGNORECASE)


class Pair(NamedTuple):
    """A kernel before and after; None where one run has none for it."""

    before: KernelTime | None
    after: KernelTime | None


def match_kernels(before: Sequence[KernelTime], after: Sequence[KernelTime]) -> tuple[Pair, ...]:
    """Every kernel of both runs once: paired by name and class, then by class, layout of operands and launches a step.

    A matmul in another precision, or of another tile, is another kernel by name. It is launched as often, and has the
    same operands transposed: others than the gradient of its input or of its weight. Of several such kernels the
    longest of both runs are a pair. The grid is no measure of the shape: persistent kernels have about a block for each
    multiprocessor, whatever the shape, and a tile, or a split of the sum, changes that of the others.
    """
    named = {(one.name, one.kernel_class): one for one in after}
    pairs = [Pair(one, named.pop((one.name, one.kernel_class), None)) for one in before]
    found = [pair for pair in pairs if pair.after]
    left = _by_work(pair.before for pair in pairs if pair.before and not pair.after)
    others = _by_work(named.values())
    for work in dict.fromkeys((*left, *others)):
        found += _in_order(left[work], others[work])
    return tuple(found)


def _by_work(kernels: Iterable[KernelTime]) -> defaultdict[_Work, list[KernelTime]]:
    """The kernels by what they do, the longest first."""
    groups: defaultdict[_Work, list[KernelTime]] = defaultdict(list)
    for one in sorted(kernels, key=lambda one: -one.ms):
        groups[one.kernel_class, _layout(one), round(one.launches, 2)].append(one)
    return groups


def _layout(kernel: KernelTime) -> str:
    """Which operands a matmul takes transposed: nn, nt, tn or tt; empty where its name does not say."""
    found = _LAYOUT.search(kernel.name) if kernel.kernel_class == MATMUL else None
    return found[1].lower() if found else ""


def _in_order(before: Sequence[KernelTime], after: Sequence[KernelTime]) -> Iterator[Pair]:
    paired = min(len(before), len(after))
    yield from (Pair(*pair) for pair in zip(before, after, strict=False))
    yield from (Pair(one, None) for one in before[paired:])
    yield from (Pair(None, one) for one in after[paired:])
