"""Rules for operators that take longer than they should, or whose work a step does not need.

These rules know no faults. They compare the time of each operator with its attainable time, and follow the values that
operators read and write. A test of the shapes tells the reason where it can. Each rule consists of a type of figures
and a function that finds them. ``report/finding_texts/operators.py`` makes sentences from the figures.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from nsys_analyzer.analysis.findings.finding import (
    Candidate,
    FindingFigures,
    ReplayChange,
    Rule,
    StepsToExplain,
    saved_launches,
    saved_work,
)
from nsys_analyzer.analysis.findings.kernels import find_unfused_scores
from nsys_analyzer.analysis.findings.padding import find_padding
from nsys_analyzer.analysis.findings.waits import LEAST_IDLE_SHARE
from nsys_analyzer.analysis.operators.account import describe_shapes
from nsys_analyzer.analysis.operators.chains import count_chain_bytes, find_chains, find_independent_calls
from nsys_analyzer.analysis.operators.costs import Cost
from nsys_analyzer.analysis.operators.memory_formats import find_image_formats
from nsys_analyzer.analysis.operators.operands import Call
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.operators.redundancy import Redundancy, count_recomputed_bytes
from nsys_analyzer.analysis.operators.shape_reasons import (
    ExplainedCalls,
    explain_calls,
    find_misaligned_sizes,
    find_needed_calls,
    pad_size,
)
from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.trace.arrays import Bools, Floats
from nsys_analyzer.trace.operator_calls import Signature
from nsys_analyzer.trace.schema import NS_PER_MS

#: Operators are examined only if they could save at least this share of a step.
_LEAST_SHARE_OF_STEP = 0.02
#: The maximum number of operators that a finding names.
_MAX_OPERATORS = 3
#: The smallest and the largest share of the time above the attainable time that is saved if no test tells the reason.
SLOW_OPERATOR_SAVINGS = (0.0, 1.0)
#: The same shares if a test tells the reason.
KNOWN_REASON_SAVINGS = (0.3, 1.0)
#: An operator consists of many kernels if a call launches at least this number.
_MANY_KERNELS = 4
#: Small grids are the reason if they take at least this share of the time.
_MOST = 0.5
#: The smallest and the largest share of the time of copies that is saved without them.
COPY_SAVINGS = (0.3, 1.0)
#: The fewest equal calls on parts of the data that are reported.
_FEWEST_PARTS = 4
#: Chains are reported by class of modules if fusing the chains of one class saves at least this share of all modules.
_LEAST_SHARE_OF_CLASS = 0.5
#: Matches reductions whose second argument contains the dimensions.
_REDUCTION = re.compile(r"::(sum|mean|amax|amin|max|min|var|_softmax|_log_softmax)$")


@dataclass(frozen=True)
class OperatorTime:
    """The calls of one operator with tensors of the same shapes, per step.

    Attributes:
        operator: the name of the operator without its namespace.
        shapes: the shapes and the type of its tensors.
        calls: the number of calls.
        ms: the measured time, ms.
        attainable_ms: the attainable time, ms; NaN if it is unknown.
    """

    operator: str
    shapes: str
    calls: int
    ms: float
    attainable_ms: float


@dataclass(frozen=True)
class OperatorsFigures(FindingFigures):
    """The operators of a finding, per step.

    Attributes:
        calls: the number of calls with work.
        ms: their measured time, ms.
        attainable_ms: their attainable time, ms; NaN if it is unknown.
        share: the measured time as a share of the step without the profiler.
        operators: the operators with the most time above their attainable time.
        module: the class of the module with the most time; empty outside of modules.
    """

    calls: int
    ms: float
    attainable_ms: float
    share: float
    operators: tuple[OperatorTime, ...]
    module: str


# --- redundant work


@dataclass(frozen=True)
class RedundantWorkFigures(OperatorsFigures):
    """The work of one kind that a step does not need; see ``Redundancy``.

    Attributes:
        kind: the kind.
        modules: the number of modules that run again or in vain, without the modules inside of them.
        kept_bytes: the bytes of the recomputed values that memory would keep otherwise; 0 if they are unknown.
    """

    kind: Redundancy
    modules: int
    kept_bytes: float = 0.0


def find_redundant_work(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds work that a step does not need: recomputed, repeated, undone or unused work, and forward passes in vain."""
    operators = steps.operators
    if operators is None:
        return
    for kind, calls in operators.redundant.items():
        operations = operators.operations_of(calls)
        if not steps.study.work_ms(operations):
            continue
        outer = _find_outer_modules(operators, calls)
        module = Counter(name.rpartition(": ")[2] for name in outer).most_common(1)[0][0] if outer else ""
        described = _describe(steps, calls)._replace(module=module)
        kept_bytes = count_recomputed_bytes(operators.calls) if kind == "recomputed" and operators.calls.reads else 0.0
        figures = RedundantWorkFigures(*described, kind=kind, modules=len(outer), kept_bytes=kept_bytes)
        lines: tuple[Line, ...] = ()
        if samples := steps.study.call_samples:
            if kind == "recomputed":
                lines = samples.find_callers(f"{module}.forward")
            elif kind == "no_backward":
                lines = samples.find_first_line(steps.study.calls_of(operations), steps.study.work_ms(operations))
        changes = tuple(_without_calls(steps, operations, prepares=prepares) for prepares in (False, True))
        yield Candidate(f"{kind}_work", figures, changes, None, operations, lines, is_redundant=True)


def _find_outer_modules(operators: PricedOperators, calls: Bools) -> list[str]:
    """Returns the modules that make the given calls, without the modules that are inside of others."""
    names = [
        operators.calls.modules[index] for index in np.unique(operators.calls.module[calls]).tolist() if index >= 0
    ]
    paths = [name.partition(":")[0] for name in names]
    return [
        name
        for name, path in zip(names, paths, strict=True)
        if not any(path.startswith((f"{outer}.", f"{outer}/")) for outer in paths)
    ]


def _without_calls(steps: StepsToExplain, operations: Bools, *, prepares: bool) -> ReplayChange:
    """Returns a change that removes operations and the time in which the program launches them.

    The time from the launch of an operation to the next launch is removed if the next launch is removed, too. Else,
    the usual time of a launch is removed.

    Args:
        steps: the steps.
        operations: shape (operations,), True for the removed operations.
        prepares: whether the program prepares the removed work before its first launch, so that only the usual time of
            a launch remains there, and whether pauses between its launches are part of it.
    """
    calls, launch = len(steps.study.calls), steps.study.replay.launch
    launched, removed = np.bincount(launch, minlength=calls), np.bincount(launch[operations], minlength=calls)
    launching = np.flatnonzero(launched)
    is_removed = np.append(removed[launching] == launched[launching], False)
    position = np.searchsorted(launching, np.arange(calls), side="right")
    is_inside = is_removed[position - 1] & is_removed[position]
    is_before = is_removed[position] & ~is_inside
    remove_launches = saved_launches(steps, operations.astype(np.float64))

    def change(replay: Replay) -> Replay:
        """Returns the steps without the operations and without the time in which the program launches them."""
        changed = remove_launches(replay)
        cpu_ns = np.where(is_inside, replay.pause_ns, changed.cpu_ns)
        if not prepares:
            return replace(changed, cpu_ns=cpu_ns)
        limit_ns = np.where(is_inside, 0.0, np.where(is_before, replay.median_launch_ns, np.inf))
        return replace(changed, cpu_ns=np.minimum(cpu_ns, limit_ns), pause_ns=np.minimum(replay.pause_ns, limit_ns))

    return change


# --- operators above their attainable time, by a reason that the shapes tell


def _unexplained_calls(operators: PricedOperators) -> Bools:
    """Returns True for each call with work that a step needs, if neither its shapes nor another rule tell a reason."""
    unexplained = find_needed_calls(operators)
    for reason in explain_calls(operators).values():
        unexplained &= ~reason.calls
    # Another rule reports unfused attention.
    unexplained &= operators.measure_ns(find_unfused_scores(operators.study)) == 0
    return unexplained


@dataclass(frozen=True)
class MisalignedFigures(OperatorsFigures):
    """Operators whose matrices are misaligned.

    Attributes:
        sizes: each size that makes matrices misaligned, and the size after padding.
        padded_ms: the attainable time with the padded sizes, ms.
    """

    sizes: tuple[tuple[int, int], ...]
    padded_ms: float


def find_misaligned_operators(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds operators with a size that is no multiple of what tensor cores need, one finding per line."""
    operators = steps.operators
    if operators is None:
        return
    explained = explain_calls(operators)["alignment"]
    for calls in _groups_by_line(operators, explained.calls):
        signatures = np.unique(operators.calls.signature[calls]).tolist()
        sizes = set[int]().union(
            *(find_misaligned_sizes(operators.calls.signatures[index], operators.costs[index]) for index in signatures)
        )
        figures = MisalignedFigures(
            *_describe(steps, calls),
            sizes=tuple((size, pad_size(size)) for size in sorted(sizes)),
            padded_ms=float(explained.least_ns[calls].sum()) / NS_PER_MS,
        )
        yield from _make_candidate(steps, "misaligned_operators", figures, replace(explained, calls=calls))


@dataclass(frozen=True)
class MemoryFormatFigures(OperatorsFigures):
    """Operators on images that are stored by channel (NCHW).

    Attributes:
        origin: the operator after which most of these images are stored by channel; empty if no convolution has images
            in channels_last.
    """

    origin: str


def find_memory_format(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds operators on images that are not stored as channels_last, and the line after which they are not."""
    operators = steps.operators
    explained = explain_calls(operators)["memory_format"] if operators else None
    if operators is None or explained is None or not explained.calls.any():
        return
    formats = find_image_formats(operators.calls)
    origin_ns, calls = np.zeros(len(operators.calls)), explained.calls
    if formats.is_mixed:
        saved_ns = operators.measured_ns - explained.least_ns
        np.add.at(origin_ns, formats.origin[calls], saved_ns[calls])
    origin = _operator_name(operators, int(np.argmax(origin_ns))) if formats.is_mixed else ""
    figures = MemoryFormatFigures(*_describe(steps, calls), origin=origin)
    for candidate in _make_candidate(steps, "memory_format", figures, explained):
        yield replace(candidate, lines=operators.lines_of(origin_ns) or candidate.lines)


@dataclass(frozen=True)
class Fp32OperatorsFigures(OperatorsFigures):
    """Operators that multiply in fp32.

    Attributes:
        tf32_ms, bf16_ms: their attainable times in TF32 and in bf16, ms.
    """

    tf32_ms: float
    bf16_ms: float


def find_fp32_operators(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds matmuls, convolutions and attention that multiply in fp32 without tensor cores."""
    if steps.operators and (explained := explain_calls(steps.operators)["precision"]).calls.any():
        times_ms = (float(ns[explained.calls].sum()) / NS_PER_MS for ns in (explained.most_ns, explained.least_ns))
        figures = Fp32OperatorsFigures(*_describe(steps, explained.calls), *times_ms)
        yield from _make_candidate(steps, "fp32_operators", figures, explained)


# --- chains of operators that pass over the same data


@dataclass(frozen=True)
class UnfusedChainsFigures(OperatorsFigures):
    """Chains of operators that one kernel could do, at the lines of one class or function.

    Attributes:
        place: the class of the modules, or the function outside of modules; empty for the modules of several classes.
        chains: the number of chains.
        longest_chain: the names of the operators in the chain with the most time, in order.
        moved_bytes: the bytes that the chains read and write.
        needed_bytes: the bytes without the values that only the chain itself reads.
        longest_ms, two_longest_ms: the total time of the longest operator and of the two longest operators of each
            chain, or the time for ``needed_bytes`` if it is longer, ms.
        saves_launches: whether the launches of the other operators are saved as well.
    """

    place: str
    chains: int
    longest_chain: tuple[str, ...]
    moved_bytes: float
    needed_bytes: float
    longest_ms: float
    two_longest_ms: float
    saves_launches: bool


def find_unfused_chains(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds chains of operators that pass over the same data, by class of modules or function.

    Of a chain, one kernel remains. It takes between the time of the longest and of the two longest operators, and at
    least the time for the values that enter and leave the chain.
    """
    operators = steps.operators
    if operators is None or not steps.has_data_flow:
        return
    for place, chains in _group_chains(operators).items():
        calls, totals = np.zeros(len(operators.calls), np.bool_), np.zeros(4)
        least_ns, most_ns = np.zeros((2, len(calls)))
        for chain in chains:
            calls[chain] = True
            ns = operators.measured_ns[chain]
            moved_bytes, needed_bytes = count_chain_bytes(operators, chain)
            needed_ns = operators.rates.time_ns(Cost("copy", "", 0, needed_bytes)) if operators.rates else 0.0
            left_ns = [min(max(float(np.sort(ns)[-count:].sum()), needed_ns), ns.sum()) for count in (1, 2)]
            least_ns[chain], most_ns[chain] = (ns * (remaining_ns / ns.sum()) for remaining_ns in left_ns)
            totals += (moved_bytes, needed_bytes, *left_ns)
        longest_chain = max(chains, key=lambda chain: operators.measured_ns[chain].sum())
        figures = UnfusedChainsFigures(
            *_describe(steps, calls),
            place=place.rpartition(" ")[2],
            chains=len(chains),
            longest_chain=tuple(_operator_name(operators, index) for index in longest_chain),
            moved_bytes=totals[0],
            needed_bytes=totals[1],
            longest_ms=totals[2] / NS_PER_MS,
            two_longest_ms=totals[3] / NS_PER_MS,
            saves_launches=steps.idle_share < LEAST_IDLE_SHARE,
        )
        chained = ExplainedCalls(calls, least_ns, most_ns)
        # Compiled code needs CPU time itself. So if launching limits the step, the estimate does not remove launches.
        save = partial(saved_launches, steps) if figures.saves_launches else saved_work
        yield from _make_candidate(steps, "unfused_chains", figures, chained, save)


def _group_chains(operators: PricedOperators) -> Mapping[str, list[list[int]]]:
    """Returns the chains of each class of modules, and of each function outside of modules.

    If no class has most of the time that fusing saves in modules, the classes are one group with an empty name, because
    one compiler fuses all of them.
    """
    groups, saved_ns = defaultdict[str, list[list[int]]](list), defaultdict[str, float](float)
    copies = _copies(operators)
    for chain in find_chains(operators, _unexplained_calls(operators)):
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

    Of copies that follow each other, one or none is needed. Copies among other operators belong to the chains of these.
    """
    operators = steps.operators
    if operators is None or not steps.has_data_flow:
        return
    copies, unexplained = _copies(operators), _unexplained_calls(operators)
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
        explained = ExplainedCalls(_mask(len(copies), members), least_ns, most_ns)
        figures = CopiesFigures(*_describe(steps, explained.calls), place=place.rpartition(" ")[2])
        yield from _make_candidate(steps, "copied_tensors", figures, explained)


def _copies(operators: PricedOperators) -> Bools:
    """Returns True for each call that only copies tensors; shape (calls,)."""
    is_copy = [
        bool(cost and cost.kind == "copy" and Call(signature).tensors())
        for signature, cost in zip(operators.calls.signatures, operators.costs, strict=True)
    ]
    copies: Bools = np.array([*is_copy, False])[operators.calls.signature]
    return copies


@dataclass(frozen=True)
class SplitOperatorsFigures(OperatorsFigures):
    """Operators that run on many parts of their data, none of which needs the result of another part.

    Attributes:
        parts: the number of calls that could be one call.
        merged_ms: the attainable time of the operators if they were one call each, ms.
    """

    parts: int
    merged_ms: float


def find_split_operators(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds operators that could run once on all of their data, one finding per number of parts.

    The attainable time of one call and of all calls differ for small operators only. Launches are saved as well.
    """
    operators = steps.operators
    if operators is None or operators.rates is None or not steps.has_data_flow:
        return
    calls, costs, unexplained = operators.calls, operators.costs, _unexplained_calls(operators)
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
        figures = SplitOperatorsFigures(*_describe(steps, mask), parts=parts, merged_ms=merged_ns / NS_PER_MS)
        operations = operators.operations_of(mask)
        work_share = operators.spread(saved_ns / np.maximum(operators.measured_ns, 1.0), default=0.0)
        changes = tuple(
            saved_launches(steps, operations * (1 - 1 / parts), work_share, is_limited=is_limited)
            for is_limited in (True, False)
        )
        lines = operators.lines_of(operators.measured_ns * mask)
        yield Candidate("split_operators", figures, changes, None, operations, lines)


# --- operators above their attainable time for no reason that the shapes tell


@dataclass(frozen=True)
class SlowOperatorsFigures(OperatorsFigures):
    """Operators that take longer than their attainable time.

    Attributes:
        kernels_per_call: the mean number of operations that a call launches.
        small_grid_share: the share of the time in kernels with fewer blocks than the GPU has multiprocessors.
        reduces_apart: whether the operator with the most excess reduces elements that are not stored one after the
            other.
        is_efficient_attention: whether this operator is PyTorch's memory-efficient attention.
        gpu: the name of the GPU.
    """

    kernels_per_call: float
    small_grid_share: float
    reduces_apart: bool
    is_efficient_attention: bool
    gpu: str

    @property
    def savings(self) -> tuple[float, float]:
        """Returns the smallest and the largest share of the excess that is saved."""
        has_reason = self.has_many_kernels or self.has_small_grids or self.reduces_apart or self.is_efficient_attention
        return KNOWN_REASON_SAVINGS if has_reason else SLOW_OPERATOR_SAVINGS

    @property
    def has_many_kernels(self) -> bool:
        """Returns whether a call consists of many kernels."""
        return self.kernels_per_call >= _MANY_KERNELS

    @property
    def has_small_grids(self) -> bool:
        """Returns whether kernels that do not fill the GPU take most of the time."""
        return self.small_grid_share >= _MOST


def find_slow_operators(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds operators that take longer than their attainable time for no other reason, one finding per line."""
    operators, study = steps.operators, steps.study
    if operators is None or operators.rates is None:
        return
    unexplained = _unexplained_calls(operators)
    calls = unexplained & (operators.excess_ns > 0) & ~_copies(operators)
    for chain in find_chains(operators, unexplained) if steps.has_data_flow else ():
        calls[chain] = False
    measured_ns, excess_ns = operators.measured_ns, operators.excess_ns
    for group in _groups_by_line(operators, calls):
        operations = operators.operations_of(group)
        is_small = operations & (study.operations.size < (study.gpu.sm_count if study.gpu else 0))
        longest = operators.calls.signatures[operators.calls.signature[int(np.argmax(excess_ns * group))]]
        figures = SlowOperatorsFigures(
            *_describe(steps, group),
            kernels_per_call=operations.sum() / study.steps / max(int(group.sum()), 1),
            small_grid_share=study.work_ms(is_small) / max(study.work_ms(operations), 1e-9),
            reduces_apart=_reduces_apart(longest),
            is_efficient_attention="_efficient_attention" in longest.name,
            gpu=operators.rates.gpu,
        )
        least, most = figures.savings
        explained = ExplainedCalls(group, measured_ns - most * excess_ns, measured_ns - least * excess_ns)
        yield from _make_candidate(steps, "slow_operators", figures, explained)


def _reduces_apart(signature: Signature) -> bool:
    """Returns whether a reduction combines elements that are not stored one after the other, as over rows."""
    inputs = Call(signature).tensors()
    if not inputs or inputs[0].strides is None or not _REDUCTION.search(signature.name):
        return False
    dims = [
        int(number) for number in re.findall(r"-?\d+", signature.arguments[1] if len(signature.arguments) > 1 else "")
    ]
    shape, strides = inputs[0].shape, inputs[0].strides
    return bool(dims) and all(strides[dim] > 1 for dim in dims if -len(shape) <= dim < len(shape) and shape[dim] > 1)


# --- what the rules share


class _Description(NamedTuple):
    """The values of ``OperatorsFigures``."""

    calls: int
    ms: float
    attainable_ms: float
    share: float
    operators: tuple[OperatorTime, ...]
    module: str


def _describe(steps: StepsToExplain, calls: Bools) -> _Description:
    """Returns the values of ``OperatorsFigures`` for the given calls."""
    operators = steps.operators
    assert operators is not None
    with_work = np.flatnonzero(calls & (operators.measured_ns > 0))
    members = defaultdict[tuple[str, str], list[int]](list)
    module_ns = Counter[str]()
    for index in with_work.tolist():
        signature = operators.calls.signatures[operators.calls.signature[index]]
        members[_operator_name(operators, index), describe_shapes(signature)].append(index)
        module_ns[_module_class(operators, index)] += operators.measured_ns[index]
    times = [
        OperatorTime(
            name,
            shapes,
            len(indices),
            float(operators.measured_ns[indices].sum()) / NS_PER_MS,
            float(operators.attainable_ns[indices].sum()) / NS_PER_MS,
        )
        for (name, shapes), indices in members.items()
    ]
    times.sort(key=lambda time: -(time.ms - (0.0 if math.isnan(time.attainable_ms) else time.attainable_ms)))
    ms = float(operators.measured_ns[with_work].sum()) / NS_PER_MS
    attainable_ms = float(operators.attainable_ns[with_work].sum()) / NS_PER_MS
    module = module_ns.most_common(1)[0][0] if module_ns else ""
    share = ms / steps.step_ms if steps.step_ms else 0.0
    return _Description(len(with_work), ms, attainable_ms, share, tuple(times[:_MAX_OPERATORS]), module)


def _make_candidate(
    steps: StepsToExplain,
    finding_id: str,
    figures: OperatorsFigures,
    explained: ExplainedCalls,
    save: Callable[[Floats], ReplayChange] = saved_work,
) -> Iterator[Candidate]:
    """Yields a candidate that shortens calls to the time that remains, if the saving may be notable."""
    operators = steps.operators
    assert operators is not None
    measured_ns = np.maximum(operators.measured_ns, 1.0)
    shares = [
        np.where(explained.calls, np.clip(1 - ns / measured_ns, 0.0, 1.0), 0.0)
        for ns in (explained.most_ns, explained.least_ns)
    ]
    if float((shares[1] * measured_ns).sum()) < _LEAST_SHARE_OF_STEP * steps.step_ms * NS_PER_MS:
        return
    changes = tuple(save(operators.spread(share, default=0.0)) for share in shares)
    saved_ns = shares[1] * operators.measured_ns
    operations, lines = operators.operations_of(explained.calls), operators.lines_of(saved_ns)
    is_symptom = isinstance(figures, SlowOperatorsFigures)
    yield Candidate(finding_id, figures, changes, None, operations, lines, is_symptom=is_symptom)


def _groups_by_line(operators: PricedOperators, calls: Bools) -> Iterator[Bools]:
    """Yields the given calls of each line, or of each class of modules if the line is unknown."""
    lines, places = operators.calls.lines, defaultdict[str, list[int]](list)
    for index in np.flatnonzero(calls).tolist():
        line = operators.calls.line[index]
        places[lines[line] if line >= 0 else _module_class(operators, index)].append(index)
    for members in places.values():
        yield _mask(len(calls), members)


def _mask(size: int, members: Sequence[int]) -> Bools:
    """Returns a mask that is True for the given indices; shape (size,)."""
    mask = np.zeros(size, np.bool_)
    mask[members] = True
    return mask


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


def _module_class(operators: PricedOperators, index: int) -> str:
    """Returns the class of the module that makes a call; empty outside of modules."""
    module = operators.calls.module[index]
    return str(operators.calls.modules[module]).rpartition(": ")[2] if module >= 0 else ""


def _operator_name(operators: PricedOperators, index: int) -> str:
    """Returns the name of the operator of a call without its namespace."""
    return str(operators.calls.signatures[operators.calls.signature[index]].name).rpartition("::")[2]


#: The rules of this file. If two findings save equal time, the finding of the earlier rule comes first.
RULES: tuple[Rule, ...] = (
    find_redundant_work, find_padding, find_fp32_operators, find_memory_format, find_misaligned_operators,
    find_unfused_chains, find_copied_tensors, find_split_operators, find_slow_operators,
)  # fmt: skip
