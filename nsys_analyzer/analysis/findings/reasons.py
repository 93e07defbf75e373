"""Finds why operators take longer than they should. Findings and the tables of operators use these reasons."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from nsys_analyzer.analysis.findings.kernels import find_unfused_scores
from nsys_analyzer.analysis.findings.kernels_without_operators import find_kernel_chains
from nsys_analyzer.analysis.operators.chains import find_chains
from nsys_analyzer.analysis.operators.operands import Call
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.operators.shape_reasons import Reason, explain_calls, find_needed_calls
from nsys_analyzer.analysis.operators.waves import find_idle_shares
from nsys_analyzer.trace.arrays import Bools
from nsys_analyzer.trace.operator_calls import Signature

#: The reasons that do not follow from redundant work, shapes or unfused attention explain a call only if the call
#: exceeds its attainable time by at least this share of its time.
_LEAST_EXCESS_SHARE = 0.15
#: Idle multiprocessors are the reason if they explain at least this share of a call's excess. The number of kernels is
#: the reason if a call's kernels without the longest kernel take at least this share of the excess.
_LEAST_SHARE_OF_EXCESS = 0.5
#: A call consists of many kernels if it launches at least this number.
_MANY_KERNELS = 4
#: Names of operators that reduce dimensions, and the position of these dimensions among the operator's arguments.
_REDUCED_DIMENSIONS = (
    (re.compile(r"::(?:sum|mean|prod|amax|amin|max|min|argmax|argmin|any|all|std|var|var_mean|std_mean|logsumexp|"
                r"cumsum|cumprod|_softmax|_log_softmax|_safe_softmax)$"), 1),
    (re.compile(r"::(?:linalg_vector_norm|norm|_softmax_backward_data|_log_softmax_backward_data)$"), 2),
)  # fmt: skip


def find_reasons(operators: PricedOperators) -> Mapping[Reason, Bools]:
    """Returns for each reason which calls it explains; shape (calls,). A call has only the first reason that fits."""
    calls, study = operators.calls, operators.study
    pending, reasons = operators.measured_ns > 0, dict[Reason, Bools]()

    def add_reason(reason: Reason, is_reason: Bools) -> None:
        """Gives the reason to the calls that have no reason yet."""
        reasons[reason] = pending & is_reason
        pending[reasons[reason]] = False

    for kind, is_redundant in operators.redundant.items():
        add_reason(kind, is_redundant)
    for shape_reason, explained in explain_calls(operators).items():
        add_reason(shape_reason, explained.calls)
    add_reason("attention", operators.measure_ns(find_unfused_scores(study)) > 0)
    has_excess = operators.excess_ns >= _LEAST_EXCESS_SHARE * operators.measured_ns
    add_reason("efficient_attention", has_excess & _find_signatures(operators, _is_efficient_attention))
    add_reason("reduction", has_excess & _find_signatures(operators, _reduces_strided_elements))
    copies = find_copies(operators)
    add_reason("unfused", _find_chained_calls(operators, find_unexplained_calls(operators, reasons), copies))
    add_reason("copies", copies)
    idle, least_ns = find_idle_shares(study), _LEAST_SHARE_OF_EXCESS * operators.excess_ns
    add_reason("small_grid", has_excess & (operators.measure_ns(idle.least * idle.is_small) >= least_ns))
    add_reason("wave_tail", has_excess & (operators.measure_ns(idle.least * ~idle.is_small) >= least_ns))
    is_called, longest_ns = operators.call >= 0, np.zeros(len(calls))
    kernels_per_call = np.bincount(operators.call[is_called], minlength=len(calls)) / study.steps
    np.maximum.at(longest_ns, operators.call[is_called], study.operations.exposed_ns[is_called])
    other_kernels_are_slow = operators.measured_ns - longest_ns >= least_ns
    add_reason("many_kernels", has_excess & (kernels_per_call >= _MANY_KERNELS) & other_kernels_are_slow)
    return reasons


def find_unexplained_calls(operators: PricedOperators, reasons: Mapping[Reason, Bools]) -> Bools:
    """Returns True for each call with work that a step needs, unless shapes or unfused attention explain its time.

    Fewer operators could do the work of some of these calls.
    """
    is_explained = [reasons[reason] for reason in ("precision", "memory_format", "alignment", "attention")]
    unexplained: Bools = find_needed_calls(operators) & ~np.any(is_explained, axis=0)
    return unexplained


def _find_chained_calls(operators: PricedOperators, unexplained: Bools, copies: Bools) -> Bools:
    """Returns True for each call of a chain that one kernel could replace, except for chains that only copy.

    One kernel takes at least as long as the longest call of the chain. So the chain explains the excess of this call
    only if the other calls take a large share of the excess. If the values of operators are unknown, consecutive
    kernels are a chain, as the rule on unfused kernels assumes.
    """
    chains: Iterable[Sequence[int]] = find_chains(operators, unexplained)
    if not operators.calls.reads:
        calls_of_kernels = (operators.call[kernels] for kernels in find_kernel_chains(operators.study))
        chains = (np.unique(calls[calls >= 0]).tolist() for calls in calls_of_kernels)
    in_chain, measured_ns = np.zeros(len(operators.calls), np.bool_), operators.measured_ns
    for chain in chains:
        if len(chain) > 1 and not copies[chain].all():
            longest = chain[int(np.argmax(measured_ns[chain]))]
            saved_ns = measured_ns[chain].sum() - measured_ns[longest]
            in_chain[chain] = True
            in_chain[longest] = saved_ns >= _LEAST_SHARE_OF_EXCESS * operators.excess_ns[longest]
    return in_chain


def find_copies(operators: PricedOperators) -> Bools:
    """Returns True for each call that only copies tensors; shape (calls,)."""
    copying = {
        signature
        for signature, cost in zip(operators.calls.signatures, operators.costs, strict=True)
        if cost and cost.kind == "copy" and Call(signature).tensors()
    }
    return _find_signatures(operators, copying.__contains__)


def _find_signatures(operators: PricedOperators, is_match: Callable[[Signature], bool]) -> Bools:
    """Returns True for each call whose signature passes a test; shape (calls,)."""
    matches: Bools = np.array([*map(is_match, operators.calls.signatures), False])[operators.calls.signature]
    return matches


def _is_efficient_attention(signature: Signature) -> bool:
    return "_efficient_attention" in signature.name


def _reduces_strided_elements(signature: Signature) -> bool:
    """Returns whether an operator reduces over elements that are not adjacent in memory, such as columns."""
    inputs, arguments = Call(signature).tensors(), signature.arguments
    position = next((position for names, position in _REDUCED_DIMENSIONS if names.search(signature.name)), 0)
    if not inputs or inputs[0].strides is None or not 0 < position < len(arguments):
        return False
    dims = [int(number) for number in re.findall(r"-?\d+", arguments[position])]
    shape, strides = inputs[0].shape, inputs[0].strides
    reduced = [strides[dim] for dim in dims if -len(shape) <= dim < len(shape) and shape[dim] > 1]
    return bool(reduced) and min(reduced) > 1
