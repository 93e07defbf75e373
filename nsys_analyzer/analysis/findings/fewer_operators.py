"""Rules for operators that fewer operators with the same result could replace: chains, copies, and parts of a whole.

The values that operators read and write show which operators follow each other. Each rule consists of a type of figures
and a function that finds them. ``report/finding_texts/operators.py`` makes sentences from the figures.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from nsys_analyzer.analysis.findings.finding import Candidate, Rule, StepsToExplain, saved_launches, saved_work
from nsys_analyzer.analysis.findings.operators import (
    OperatorsFigures,
    describe_calls,
    make_candidate,
    mask_calls,
    name_operator,
)
from nsys_analyzer.analysis.findings.reasons import find_copies, find_unexplained_calls
from nsys_analyzer.analysis.findings.waits import LEAST_IDLE_SHARE, MAJORITY_SHARE
from nsys_analyzer.analysis.operators.chains import FusedKernel, find_chains, find_independent_calls, fuse_chain
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.operators.shape_reasons import ExplainedCalls
from nsys_analyzer.analysis.steps.lines import parse_line
from nsys_analyzer.trace.arrays import Bools
from nsys_analyzer.trace.schema import NS_PER_MS

FusedFunction: TypeAlias = Literal["log_softmax", "softmax", "rms_norm", "gelu"]
#: The smallest and the largest share of the time of copies that is assumed to be saved if they are removed.
COPY_SAVINGS = (0.3, 1.0)
#: The smallest number of equal calls on parts of the data that is reported.
_FEWEST_PARTS = 4
#: Functions of PyTorch, each with the operators of a chain that the function replaces.
_FUSED_FUNCTIONS: Mapping[FusedFunction, frozenset[str]] = {
    "log_softmax": frozenset({"exp", "log", "sum"}),
    "softmax": frozenset({"exp", "sum", "div"}),
    "rms_norm": frozenset({"mean", "rsqrt"}),
    "gelu": frozenset({"tanh", "pow"}),
}
#: Matches the lines of a recompilation: that of the function, and that of the guard that failed in the function.
_GUARD_LINE = re.compile(r"[\w.-]+:\d+ in \w+")
#: Chains are reported by class of modules if the chains of one class make up at least this share of the time that
#: fusing saves in all modules.
_LEAST_SHARE_OF_CLASS = 0.5


@dataclass(frozen=True)
class UnfusedChainsFigures(OperatorsFigures):
    """Chains of operators, each of which one kernel could replace, in one class of modules or one function.

    Attributes:
        place: the class of the modules, or the function outside of modules; empty for the modules of several classes.
        chains: the number of chains.
        longest_chain: the names of the operators in the chain with the most time, in order.
        function: the function of PyTorch that replaces this chain; None if there is none, or if ``place`` is empty.
        moved_bytes: the bytes that the chains read and write.
        needed_bytes: the bytes without the values that only the chain itself reads.
        least_ms: the total time of the longest operator of each chain, or the attainable time of the function that
            replaces the chain, ms; at least the time for ``needed_bytes``.
        two_longest_ms: the total time of the two longest operators of each chain, ms; at least the time for
            ``needed_bytes``.
        saves_launches: whether the saving includes the launches of all operators of a chain but one.
        recompiles: the recompilations of the functions that contain most of the chains' time, by the function and the
            reason, and their number. After some recompilations, torch.compile runs a function without compiling it.
    """

    place: str
    chains: int
    longest_chain: tuple[str, ...]
    function: FusedFunction | None
    moved_bytes: float
    needed_bytes: float
    least_ms: float
    two_longest_ms: float
    saves_launches: bool
    recompiles: tuple[tuple[str, int], ...] = ()


def find_unfused_chains(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds chains of operators that pass over the same data, by class of modules or function.

    One kernel could replace a chain. The kernel takes between the time of the longest operator and that of the two
    longest operators, and at least the time for the values that enter and leave the chain. Each eager model has chains,
    so the finding is common unless a function of PyTorch replaces the chain. Such a function takes at least its
    attainable time.
    """
    operators = steps.operators
    if operators is None or not steps.has_data_flow:
        return
    for place, chains in _group_chains(operators, find_unexplained_calls(operators, steps.reasons)).items():
        calls, totals = np.zeros(len(operators.calls), np.bool_), np.zeros(len(FusedKernel._fields))
        least_ns, most_ns = np.zeros((2, len(calls)))
        functions = [_find_function(operators, chain) if place else None for chain in chains]
        for chain, function in zip(chains, functions, strict=True):
            kernel, ns = fuse_chain(operators, chain), operators.measured_ns[chain]
            if function:
                kernel = kernel._replace(least_ns=min(kernel.least_ns, kernel.attainable_ns))
            calls[chain] = True
            least_ns[chain], most_ns[chain] = ns * (kernel.least_ns / ns.sum()), ns * (kernel.most_ns / ns.sum())
            totals += kernel
        total = FusedKernel(*totals.tolist())
        longest = max(range(len(chains)), key=lambda index: operators.measured_ns[chains[index]].sum())
        figures = UnfusedChainsFigures(
            *describe_calls(steps, calls),
            place=place.rpartition(" ")[2],
            chains=len(chains),
            longest_chain=tuple(name_operator(operators, index) for index in chains[longest]),
            function=functions[longest],
            moved_bytes=total.moved_bytes,
            needed_bytes=total.needed_bytes,
            least_ms=total.least_ns / NS_PER_MS,
            two_longest_ms=total.most_ns / NS_PER_MS,
            saves_launches=steps.idle_share < LEAST_IDLE_SHARE,
            recompiles=_find_recompiles(steps, calls),
        )
        chained = ExplainedCalls(calls, least_ns, most_ns)
        # Compiled code needs CPU time itself. So if launching limits the step, the estimate does not remove launches.
        save = partial(saved_launches, steps) if figures.saves_launches else saved_work
        for candidate in make_candidate(steps, "unfused_chains", figures, chained, save):
            is_common = figures.function is None and not figures.recompiles
            lines = candidate.find_lines(steps)
            ms = sum(line.ms or 0.0 for line in lines)
            guards = [parse_line(_GUARD_LINE.findall(text)[-1], 1.0, ms) for text, _ in figures.recompiles]
            lines = (*filter(None, guards), *lines)
            yield replace(candidate, is_common=is_common, lines=lines if figures.recompiles else candidate.lines)


def _find_recompiles(steps: StepsToExplain, calls: Bools) -> tuple[tuple[str, int], ...]:
    """Returns the recompilations of the functions whose lines have at least half of the time of the given calls."""
    operators, counts = steps.operators, steps.run.compiled.recompiles if steps.run.compiled else {}
    if operators is None or not counts:
        return ()
    ns_of_function = defaultdict[str, float](float)
    for index in np.flatnonzero(calls & (operators.calls.line >= 0)).tolist():
        ns_of_function[_name_function(operators.calls.lines[operators.calls.line[index]])] += operators.measured_ns[
            index
        ]
    recompiled = tuple(row for row in counts.items() if _name_function(row[0]) in ns_of_function)
    ns = sum(ns_of_function[name] for name in {_name_function(text) for text, _ in recompiled})
    return recompiled if ns >= MAJORITY_SHARE * operators.measured_ns[calls].sum() else ()


def _name_function(line: str) -> str:
    """Returns the file without its folder and the function of ``models/gpt.py:12 in forward: a reason``."""
    place, _, function = line.partition(" in ")
    return f"{place.rpartition('/')[2].partition(':')[0]} {function.partition(':')[0].partition(',')[0]}"


def _find_function(operators: PricedOperators, chain: Sequence[int]) -> FusedFunction | None:
    """Returns the function of PyTorch that replaces a chain; None if there is none."""
    names = {name_operator(operators, index) for index in chain}
    return next((function for function, replaced in _FUSED_FUNCTIONS.items() if replaced <= names), None)


def _group_chains(operators: PricedOperators, unexplained: Bools) -> Mapping[str, list[list[int]]]:
    """Returns the chains of the given calls by class of modules, and by function outside of modules.

    If no class has most of the time that fusing saves in modules, all classes are one group with an empty name, because
    torch.compile fuses the chains of all classes together.
    """
    groups, saved_ns = defaultdict[str, list[list[int]]](list), defaultdict[str, float](float)
    copies = find_copies(operators)
    for chain in find_chains(operators, unexplained):
        if copies[chain].all():
            continue
        place, ns = _name_place(operators, chain), operators.measured_ns[chain]
        groups[place].append(chain)
        saved_ns[place] += float(ns.sum() - ns.max())
    classes = [place for place in groups if " " not in place]
    saved_in_classes_ns = [saved_ns[place] for place in classes]
    if classes and max(saved_in_classes_ns) < _LEAST_SHARE_OF_CLASS * sum(saved_in_classes_ns):
        groups[""] = [chain for place in classes for chain in groups.pop(place)]
    return groups


@dataclass(frozen=True)
class CopiesFigures(OperatorsFigures):
    """Operators that copy tensors.

    Attributes:
        place: the class of the modules, or the function outside of modules.
    """

    place: str


def find_copied_tensors(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds operators that only copy tensors, by class of modules or function.

    A step needs at most one of several consecutive copies. A copy between other operators belongs to the chain of these
    operators, which ``find_unfused_chains`` reports.
    """
    operators = steps.operators
    if operators is None or not steps.has_data_flow:
        return
    copies, unexplained = find_copies(operators), find_unexplained_calls(operators, steps.reasons)
    least, most = COPY_SAVINGS
    least_ns, most_ns = operators.measured_ns * (1 - most), operators.measured_ns * (1 - least)
    groups, in_chain = defaultdict[str, list[int]](list), np.zeros(len(copies), np.bool_)
    for chain in find_chains(operators, unexplained):
        in_chain[chain] = True
        if copies[chain].all():
            ns = operators.measured_ns[chain]
            most_ns[chain] = ns * (ns.max() / ns.sum())
            groups[_name_place(operators, chain)] += chain
    for index in np.flatnonzero(unexplained & copies & ~in_chain).tolist():
        groups[_name_place(operators, [index])].append(index)
    for place, members in groups.items():
        explained = ExplainedCalls(mask_calls(len(copies), members), least_ns, most_ns)
        figures = CopiesFigures(*describe_calls(steps, explained.calls), place=place.rpartition(" ")[2])
        yield from make_candidate(steps, "copied_tensors", figures, explained)


@dataclass(frozen=True)
class SplitOperatorsFigures(OperatorsFigures):
    """Operators that run on many parts of their data, although no part needs the result of another part.

    Attributes:
        parts: the number of calls of each operator, which could be one call.
        merged_ms: the total attainable time of the operators if each ran in one call, ms.
    """

    parts: int
    merged_ms: float


def find_split_operators(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds operators that could run once on all of their data, one finding per number of parts.

    One call on all data has a shorter attainable time than the calls on parts only if the parts are small. The launches
    of all calls but one are saved in any case.
    """
    operators = steps.operators
    if operators is None or operators.rates is None or not steps.has_data_flow:
        return
    calls, costs = operators.calls, operators.costs
    unexplained = find_unexplained_calls(operators, steps.reasons)
    unexplained &= ~calls.in_phase("optimizer") & operators.is_priced
    groups_of_parts = defaultdict[int, list[list[int]]](list)
    for members in find_independent_calls(operators, unexplained):
        if len(members) >= _FEWEST_PARTS:
            groups_of_parts[len(members)].append(members)
    for parts, groups in groups_of_parts.items():
        mask, saved_ns, merged_ns = np.zeros(len(calls), np.bool_), np.zeros(len(calls)), 0.0
        for members in groups:
            signature = calls.signatures[calls.signature[members[0]]]
            estimates = [cost for index in members if (cost := costs[calls.signature[index]])]
            total = estimates[0]._replace(
                flops=sum(cost.flops for cost in estimates), bytes=sum(cost.bytes for cost in estimates)
            )
            separate_ns, together_ns = operators.attainable_ns[members].sum(), operators.rates.time_ns(total, signature)
            mask[members], merged_ns = True, merged_ns + together_ns
            saved_ns[members] = operators.measured_ns[members] * np.clip(1 - together_ns / separate_ns, 0.0, 1.0)
        figures = SplitOperatorsFigures(*describe_calls(steps, mask), parts=parts, merged_ms=merged_ns / NS_PER_MS)
        operations = operators.operations_of(mask)
        work_share = operators.spread(saved_ns / np.maximum(operators.measured_ns, 1.0), default=0.0)
        changes = tuple(
            saved_launches(steps, operations * (1 - 1 / parts), work_share, is_limited=is_limited)
            for is_limited in (True, False)
        )
        lines = operators.lines_of(operators.measured_ns * mask)
        yield Candidate("split_operators", figures, changes, None, operations, lines, saves_launches=True)


def _name_place(operators: PricedOperators, chain: Sequence[int]) -> str:
    """Returns the class of the outermost module with calls of a chain; outside of modules, the file and the function.

    The longest call of the chain decides whether the chain is outside of modules.
    """
    calls, longest = operators.calls, max(chain, key=lambda index: operators.measured_ns[index])
    if calls.module[longest] >= 0:
        modules = [calls.modules[calls.module[index]] for index in chain if calls.module[index] >= 0]
        return str(min(modules, key=lambda name: name.count(".") + name.count("/"))).rpartition(": ")[2]
    file, _, function = calls.lines[calls.line[longest]].partition(":") if calls.line[longest] >= 0 else ("", "", "")
    return f"{file} {function.partition(' in ')[2]}"


#: The rules of this file. If two findings save equal time, the finding of the earlier rule comes first.
RULES: tuple[Rule, ...] = (find_unfused_chains, find_copied_tensors, find_split_operators)
