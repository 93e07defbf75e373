"""Rules for operators that take longer than they should.

These rules compare the time of each operator with its attainable time, instead of looking for known faults. Tests of
the shapes find the reason if they can. Each rule consists of a type of figures and a function that finds them.
``report/finding_texts/operators.py`` makes sentences from the figures.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nsys_analyzer.analysis.findings.finding import (
    Candidate,
    FindingFigures,
    ReplayChange,
    Rule,
    StepsToExplain,
    saved_work,
)
from nsys_analyzer.analysis.findings.padding import find_padding
from nsys_analyzer.analysis.operators.account import describe_shapes
from nsys_analyzer.analysis.operators.memory_formats import find_image_formats
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.operators.shape_reasons import (
    ExplainedCalls,
    Reason,
    explain_calls,
    find_misaligned_sizes,
    find_needed_calls,
    pad_size,
)
from nsys_analyzer.trace.arrays import Bools, Floats
from nsys_analyzer.trace.schema import NS_PER_MS

#: Operators are examined only if they could save at least this share of a step.
_LEAST_SHARE_OF_STEP = 0.02
#: Match operators that make tensors of constants, and that keep one triangle of a matrix.
_CONSTANT = re.compile(r"::(?:new_)?(?:ones|zeros|full|scalar_tensor)(?:_like)?$")
_TRIANGLE = re.compile(r"::tri[lu]_?$")
#: The maximum number of operators that a finding names.
_MAX_OPERATORS = 3
#: The smallest and the largest share of the time above the attainable time that is saved if the reason is unknown.
SLOW_OPERATOR_SAVINGS = (0.0, 1.0)
#: The smallest and the largest share that is saved if the reason is known.
KNOWN_REASON_SAVINGS = (0.3, 1.0)
#: The reasons that the rule on slow operators reports.
_SLOW_REASONS: tuple[Reason, ...] = ("efficient_attention", "reduction", "many_kernels")
#: A finding names a reason if the reason explains at least this share of the excess.
_LEAST_REASON_SHARE = 0.5


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


# --- operators above their attainable time, for a reason that the shapes show


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
            *describe_calls(steps, calls),
            sizes=tuple((size, pad_size(size)) for size in sorted(sizes)),
            padded_ms=float(explained.least_ns[calls].sum()) / NS_PER_MS,
        )
        yield from make_candidate(steps, "misaligned_operators", figures, replace(explained, calls=calls))


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
    origin = name_operator(operators, int(np.argmax(origin_ns))) if formats.is_mixed else ""
    figures = MemoryFormatFigures(*describe_calls(steps, calls), origin=origin)
    for candidate in make_candidate(steps, "memory_format", figures, explained):
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
        figures = Fp32OperatorsFigures(*describe_calls(steps, explained.calls), *times_ms)
        yield from make_candidate(steps, "fp32_operators", figures, explained)


class CausalMaskFigures(OperatorsFigures):
    """Attention that reads a causal mask, and the operators that make the mask."""


def find_causal_masks(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds attention with a triangle as its mask, so that the program could pass ``is_causal`` instead.

    Kernels then skip the half of the scores that is hidden: between the attainable time with all scores and half of it
    remains. Nothing remains of the operators that make the mask.
    """
    operators = steps.operators
    if operators is None or not steps.has_data_flow:
        return
    calls, constants, masks = operators.calls, set[int](), set[int]()
    makes_mask, reads_mask = np.zeros((2, len(calls)), np.bool_)
    for index, (reads, writes) in enumerate(zip(calls.reads, calls.writes, strict=True)):
        code = calls.signature[index]
        name, cost = calls.signatures[code].name, operators.costs[code]
        is_mask = not masks.isdisjoint(reads) or _TRIANGLE.search(name)
        if _CONSTANT.search(name):
            constants.update(writes)
        elif is_mask and constants.union(masks).issuperset(reads):
            masks.update(writes)
            makes_mask[index] = True
        reads_mask[index] = bool(cost and cost.kind == "attention") and not masks.isdisjoint(reads)
    selected = (makes_mask | reads_mask) & find_needed_calls(operators)
    if reads_mask.any():
        all_scores_ns = np.where(makes_mask, 0.0, np.fmin(operators.attainable_ns, operators.measured_ns))
        explained = ExplainedCalls(selected, all_scores_ns / 2, all_scores_ns)
        figures = CausalMaskFigures(*describe_calls(steps, selected))
        yield from make_candidate(steps, "causal_mask", figures, explained)


# --- operators above their attainable time, without a reason that the shapes show


@dataclass(frozen=True)
class SlowOperatorsFigures(OperatorsFigures):
    """Operators that take longer than their attainable time.

    Attributes:
        reason: the reason for most of the excess; None if it is unknown.
        kernels_per_call: the mean number of operations that a call launches.
        gpu: the name of the GPU.
    """

    reason: Reason | None
    kernels_per_call: float
    gpu: str

    @property
    def savings(self) -> tuple[float, float]:
        """Returns the smallest and the largest share of the excess that is saved."""
        return KNOWN_REASON_SAVINGS if self.reason else SLOW_OPERATOR_SAVINGS


def find_slow_operators(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds operators that take longer than their attainable time, one finding per line.

    The reasons that other rules report are left out.
    """
    operators, study = steps.operators, steps.study
    if operators is None or operators.rates is None:
        return
    measured_ns, excess_ns = operators.measured_ns, operators.excess_ns
    pending = find_needed_calls(operators) & (excess_ns > 0)
    pending &= ~np.any([calls for reason, calls in steps.reasons.items() if reason not in _SLOW_REASONS], axis=0)
    for group in _groups_by_line(operators, pending):
        reason_ns = {reason: excess_ns[steps.reasons[reason] & group].sum() for reason in _SLOW_REASONS}
        reason = max(_SLOW_REASONS, key=lambda reason: reason_ns[reason])
        operations = operators.operations_of(group)
        figures = SlowOperatorsFigures(
            *describe_calls(steps, group),
            reason=reason if reason_ns[reason] >= _LEAST_REASON_SHARE * excess_ns[group].sum() else None,
            kernels_per_call=operations.sum() / study.steps / max(int(group.sum()), 1),
            gpu=operators.rates.gpu,
        )
        least, most = figures.savings
        explained = ExplainedCalls(group, measured_ns - most * excess_ns, measured_ns - least * excess_ns)
        yield from make_candidate(steps, "slow_operators", figures, explained)


# --- what the rules share


class _Description(NamedTuple):
    """The values of ``OperatorsFigures``."""

    calls: int
    ms: float
    attainable_ms: float
    share: float
    operators: tuple[OperatorTime, ...]
    module: str


def describe_calls(steps: StepsToExplain, calls: Bools) -> _Description:
    """Returns the values of ``OperatorsFigures`` for the given calls."""
    operators = steps.operators
    assert operators is not None
    with_work = np.flatnonzero(calls & (operators.measured_ns > 0))
    members = defaultdict[tuple[str, str], list[int]](list)
    module_ns = Counter[str]()
    for index in with_work.tolist():
        signature = operators.calls.signatures[operators.calls.signature[index]]
        members[name_operator(operators, index), describe_shapes(signature)].append(index)
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


def make_candidate(
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
        yield mask_calls(len(calls), members)


def mask_calls(size: int, members: Sequence[int]) -> Bools:
    """Returns a mask that is True for the given indices; shape (size,)."""
    mask = np.zeros(size, np.bool_)
    mask[members] = True
    return mask


def _module_class(operators: PricedOperators, index: int) -> str:
    """Returns the class of the module that makes a call; empty outside of modules."""
    module = operators.calls.module[index]
    return str(operators.calls.modules[module]).rpartition(": ")[2] if module >= 0 else ""


def name_operator(operators: PricedOperators, index: int) -> str:
    """Returns the name of the operator of a call without its namespace."""
    return str(operators.calls.signatures[operators.calls.signature[index]].name).rpartition("::")[2]


#: The rules of this file. If two findings save equal time, the finding of the earlier rule comes first.
RULES: tuple[Rule, ...] = (
    find_padding, find_fp32_operators, find_memory_format, find_misaligned_operators, find_causal_masks,
    find_slow_operators,
)  # fmt: skip
