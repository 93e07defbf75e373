"""Finds operators that one operator could replace: chains that pass over the same data, and calls on parts of the data.

The values that the operators read and write show which operators follow each other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nsys_analyzer.analysis.operators.costs import Cost
from nsys_analyzer.analysis.operators.operands import Call
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.trace.arrays import Bools
from nsys_analyzer.trace.operator_calls import OperatorCalls

#: The kinds of operators that pass over their data, so that one kernel can replace several of them.
_FUSIBLE_KINDS = ("elementwise", "copy", "softmax", "norm", "reduction", "cross entropy", "embedding")
#: The kinds of operators that add no time to a kernel that reads and writes their data anyway.
_SINGLE_PASS_KINDS = ("elementwise", "copy")
#: Matches operators that no compiler fuses with their neighbors: kernels of a compiler, and gradients of embeddings.
_UNFUSIBLE = re.compile(r"^triton::|embedding_\w*backward")


class FusedKernel(NamedTuple):
    """The kernel that could replace a chain of calls.

    Attributes:
        least_ns, most_ns: the least and the most time of the kernel: that of the longest call of the chain, and of the
            two longest calls, but at least the time for ``needed_bytes``, ns.
        attainable_ns: the attainable time of the kernel: the time for ``needed_bytes``, but at least the attainable
            time of each norm and reduction, which may pass over the data several times, ns.
        moved_bytes: the bytes that the calls of the chain read and write.
        needed_bytes: the bytes without the values that only the chain itself reads.
    """

    least_ns: float
    most_ns: float
    attainable_ns: float
    moved_bytes: float
    needed_bytes: float


def fuse_chain(operators: PricedOperators, chain: Sequence[int]) -> FusedKernel:
    """Returns the kernel that could replace a chain. It takes no longer than the calls of the chain."""
    ns = np.sort(operators.measured_ns[chain])
    attainable_ns = np.fmin(operators.attainable_ns[chain], operators.measured_ns[chain])
    costs = [operators.costs[operators.calls.signature[index]] for index in chain]
    passes_once = np.array([bool(cost and cost.kind in _SINGLE_PASS_KINDS) for cost in costs])
    moved_bytes, needed_bytes = count_chain_bytes(operators, chain)
    needed_ns = operators.rates.time_ns(Cost("copy", "", 0, needed_bytes)) if operators.rates else 0.0

    def limit_ns(kernel_ns: float, calls_ns: float) -> float:
        """Returns the time of the kernel, but at least that for the needed bytes, and at most that of the calls, ns."""
        return min(max(float(kernel_ns), needed_ns), float(calls_ns))

    return FusedKernel(
        least_ns=limit_ns(ns[-1], ns.sum()),
        most_ns=limit_ns(ns[-2:].sum(), ns.sum()),
        attainable_ns=limit_ns(np.where(passes_once, 0.0, attainable_ns).max(), attainable_ns.sum()),
        moved_bytes=moved_bytes,
        needed_bytes=needed_bytes,
    )


def find_chains(operators: PricedOperators, selected: Bools) -> Iterator[list[int]]:
    """Yields chains: fusible calls of one pass that are connected, because a call reads what another call has written.

    Only the selected calls are in chains. Calls are in one chain only if they have equal depths; see ``_find_depths``.
    """
    calls, costs = operators.calls, operators.costs
    can_fuse = [
        bool(cost and cost.kind in _FUSIBLE_KINDS and not _UNFUSIBLE.search(signature.name))
        for signature, cost in zip(calls.signatures, costs, strict=True)
    ]
    is_fusible = np.array([*can_fuse, False])[calls.signature] & ~calls.in_phase("optimizer")
    has_work = operators.measured_ns > 0
    depth = _find_depths(calls, has_work & ~is_fusible)
    places = list(zip(calls.phase.tolist(), calls.instance.tolist(), depth, strict=True))
    chain_of_call, writer = dict[int, list[int]](), dict[int, int]()
    for index in np.flatnonzero(has_work & is_fusible & selected).tolist():
        chain = chain_of_call[index] = [index]
        for earlier_call in (writer[value] for value in calls.reads[index] if value in writer):
            earlier = chain_of_call[earlier_call]
            if earlier is not chain and places[earlier_call] == places[index]:
                shorter, chain = sorted((earlier, chain), key=len)
                chain += shorter
                chain_of_call.update(dict.fromkeys(shorter, chain))
        writer.update(dict.fromkeys(calls.writes[index], index))
    distinct = {id(chain): sorted(chain) for chain in chain_of_call.values() if len(chain) > 1}
    yield from distinct.values()


def _find_depths(calls: OperatorCalls, is_barrier: Bools) -> list[int]:
    """Returns the depth of each call: the greatest possible number of barriers, such as matmuls, before it.

    If a barrier reads the result of one call, and another call needs the result of the barrier, the other call has a
    greater depth. So calls with equal depths can run in one kernel.
    """
    barriers = is_barrier.astype(np.int64).tolist()
    least_depths, depth_of_value = list[int](), dict[int, int]()
    for barrier, reads, writes in zip(barriers, calls.reads, calls.writes, strict=True):
        least_depths.append(max((depth_of_value.get(value, 0) for value in reads), default=0) + barrier)
        depth_of_value.update(dict.fromkeys(writes, least_depths[-1]))
    passes = list(zip(calls.phase.tolist(), calls.instance.tolist(), strict=True))
    greatest_depths, greatest_depth_of_value = least_depths.copy(), dict[tuple[int, tuple[int, int]], int]()
    for index in range(len(greatest_depths) - 1, -1, -1):
        readers = [greatest_depth_of_value.get((value, passes[index])) for value in calls.writes[index]]
        greatest_depths[index] = min((depth for depth in readers if depth is not None), default=least_depths[index])
        for value in calls.reads[index]:
            key, depth = (value, passes[index]), greatest_depths[index] - barriers[index]
            greatest_depth_of_value[key] = min(greatest_depth_of_value.get(key, depth), depth)
    return greatest_depths


def count_chain_bytes(operators: PricedOperators, chain: Sequence[int]) -> tuple[float, float]:
    """Returns the bytes that a chain reads and writes, and those without the values that only the chain reads.

    A value that enters the chain is needed once, even if several of its operators read it.
    """
    calls, members = operators.calls, set(chain)
    costs = [operators.costs[calls.signature[index]] for index in chain]
    moved_bytes = sum(cost.bytes for cost in costs if cost)
    read_bytes, written_bytes = defaultdict[int, float](float), dict[int, float]()
    for index in chain:
        operands = Call(calls.signatures[calls.signature[index]])
        largest = max((operands.count_bytes([tensor]) for tensor in operands.tensors()), default=0.0)
        for value in calls.reads[index]:
            read_bytes[value] += min(operators.value_bytes.get(value, 0.0), largest)
        written_bytes |= {value: operators.value_bytes.get(value, 0.0) for value in calls.writes[index]}
    saved_bytes = 0.0
    for value, read in read_bytes.items():
        if value in written_bytes:
            is_needed = value in calls.lasting or not members.issuperset(calls.readers[value])
            saved_bytes += read + (0.0 if is_needed else written_bytes[value])
        else:
            saved_bytes += max(read - operators.value_bytes.get(value, read), 0.0)
    return moved_bytes, max(moved_bytes - saved_bytes, 0.0)


def find_independent_calls(operators: PricedOperators, selected: Bools) -> list[list[int]]:
    """Returns groups of calls of one operator at one line and in one module that do not need each other's results.

    The calls of a group could be one call on all of their data. Only the selected calls are in groups.
    """
    calls = operators.calls
    groups = defaultdict[tuple[str, int, int, int], list[int]](list)
    for index in np.flatnonzero(selected).tolist():
        name = calls.signatures[calls.signature[index]].name
        groups[name, int(calls.module[index]), int(calls.line[index]), int(calls.phase[index])].append(index)
    parts = {index: number for number, members in enumerate(groups.values()) if len(members) > 1 for index in members}
    dependent, groups_before = set[int](), dict[int, int]()  # bit n is set if a value depends on group n
    for index, (reads, writes) in enumerate(zip(calls.reads, calls.writes, strict=True)):
        before = 0
        for value in reads:
            before |= groups_before.get(value, 0)
        if index in parts:
            if before >> parts[index] & 1:
                dependent.add(parts[index])
            before |= 1 << parts[index]
        groups_before.update(dict.fromkeys(writes, before))
    return [members for number, members in enumerate(groups.values()) if len(members) > 1 and number not in dependent]
