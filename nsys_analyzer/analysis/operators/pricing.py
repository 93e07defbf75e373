"""Compares the measured time of each call of an operator with its attainable time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.classes import find_precision_rule
from nsys_analyzer.analysis.operators.attainable import COMPUTE_KINDS, AttainableRates, find_attainable_rates
from nsys_analyzer.analysis.operators.costs import Cost, estimate_cost
from nsys_analyzer.analysis.operators.matching import OperatorWork
from nsys_analyzer.analysis.operators.operands import Call
from nsys_analyzer.analysis.operators.redundancy import Redundancy, find_redundant_calls
from nsys_analyzer.analysis.steps.lines import MAX_LINES, MIN_LINE_SHARE, Line, parse_line, quote_source
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.operator_calls import OperatorCalls
from nsys_analyzer.trace.schema import NS_PER_MS


@dataclass(frozen=True)
class PricedOperators:
    """The calls of operators with their measured and attainable times in the studied steps.

    Attributes:
        study: the studied steps.
        calls: the calls of operators.
        call: shape (operations of the study,), the index in ``calls`` of the call of each operation, or -1.
        costs: the cost of each signature of ``calls``; None without a formula.
        measured_ns: shape (calls,), the mean time of the call's operations in a step, ns. It counts only the part that
            no other operation hides.
        attainable_ns: shape (calls,), the attainable time of the call, ns; NaN if it is unknown.
        rates: the attainable rates of the GPU; None if they are unknown.
        redundant: shape (calls,), True for the calls of each kind of redundancy.
    """

    study: Study
    calls: OperatorCalls
    call: Ints
    costs: tuple[Cost | None, ...]
    measured_ns: Floats
    attainable_ns: Floats
    rates: AttainableRates | None
    redundant: Mapping[Redundancy, Bools]

    @cached_property
    def excess_ns(self) -> Floats:
        """Returns the measured time of each call above its attainable time, ns, shape (calls,); 0 if it is unknown."""
        excess: Floats = np.nan_to_num(np.maximum(self.measured_ns - self.attainable_ns, 0.0))
        return excess

    @property
    def is_priced(self) -> Bools:
        """Returns True for each call whose attainable time is known; shape (calls,)."""
        is_priced: Bools = ~np.isnan(self.attainable_ns)
        return is_priced

    @cached_property
    def value_bytes(self) -> Mapping[int, float]:
        """Returns the size of each value that a call writes, bytes: the size of the tensor that the call returns."""
        sizes: dict[int, float] = {}
        for index, writes in enumerate(self.calls.writes):
            call = Call(self.calls.signatures[self.calls.signature[index]])
            outputs = [call.count_bytes((tensor,)) for tensor in call.outputs or ()]
            if len(outputs) != len(writes):
                outputs = [max(outputs, default=0.0)] * len(writes)
            sizes.update(zip(writes, outputs, strict=True))
        return sizes

    def operations_of(self, calls: Bools) -> Bools:
        """Returns True for each operation of the study that one of the given calls launched."""
        of_calls: Bools = np.append(calls, False)[self.call]
        return of_calls

    def spread(self, factor: Floats, default: float = 1.0) -> Floats:
        """Returns the factor of the call of each operation; shape (operations of the study,)."""
        spread: Floats = np.append(factor, default)[self.call]
        return spread

    def measure_ns(self, operations: Bools | Floats) -> Floats:
        """Returns the mean time per step of the given operations, or shares of operations, by their call, ns."""
        return _add_up_by_call(self.study, self.call, operations * self.study.operations.exposed_ns, len(self.calls))

    def measure_launching_ns(self) -> Floats:
        """Returns the mean time per step from the launches of each call to the next launches, ns, shape (calls,)."""
        replay = self.study.replay
        launching_ns = (replay.cpu_ns - replay.pause_ns)[replay.launch]
        return _add_up_by_call(self.study, self.call, launching_ns, len(self.calls))

    def lines_of(self, ns: Floats) -> tuple[Line, ...]:
        """Returns the lines of the program that call the operators with the most time.

        Args:
            ns: shape (calls,), the time of each call per step, ns.
        """
        ns_of_line = defaultdict[str, float](float)
        for index in np.flatnonzero((self.calls.line >= 0) & (ns > 0)).tolist():
            ns_of_line[self.calls.lines[self.calls.line[index]]] += float(ns[index])
        return self.make_lines(ns_of_line, float(ns.sum()))

    def make_lines(self, ns_of_line: Mapping[str, float], total_ns: float) -> tuple[Line, ...]:
        """Returns the lines with the most time, by their texts in a file of operators."""
        samples, lines = self.study.call_samples, list[Line]()
        for text, line_ns in sorted(ns_of_line.items(), key=lambda row: -row[1])[:MAX_LINES]:
            line = parse_line(text, line_ns / total_ns, line_ns / NS_PER_MS)
            if line and line.share >= MIN_LINE_SHARE:
                source = quote_source(samples.stacks, line.file, line.line) if samples and not lines else ()
                lines.append(replace(line, source=source))
        return tuple(lines)


def price_operators(study: Study, work: OperatorWork) -> PricedOperators:
    """Returns the calls of operators with their measured and attainable times in the studied steps."""
    calls, call = work.calls, work.call[study.operations.trace_index]
    rates = find_attainable_rates(study.gpu)
    costs, attainable_of_signature = price_signatures(study, work)
    measured_ns = _add_up_by_call(study, call, study.operations.exposed_ns, len(calls))
    attainable_ns = np.append(attainable_of_signature, np.nan)[calls.signature]
    return PricedOperators(study, calls, call, costs, measured_ns, attainable_ns, rates, find_redundant_calls(calls))


def price_signatures(study: Study, work: OperatorWork) -> tuple[tuple[Cost | None, ...], Floats]:
    """Returns the cost of each signature of the calls, and its attainable time, ns.

    The cost is None without a formula. The time is NaN if it is unknown.
    """
    signatures, call = work.calls.signatures, work.call[study.operations.trace_index]
    rates, is_known = find_attainable_rates(study.gpu), call != NONE
    costs = [estimate_cost(signature) for signature in signatures]
    for number, precision in _find_precisions(study, work.calls.signature[call[is_known]], is_known).items():
        if (cost := costs[number]) and cost.kind in COMPUTE_KINDS and cost.precision == "fp32":
            costs[number] = cost._replace(precision=precision)
    times_ns = [
        rates.time_ns(cost, signature) if rates and cost else np.nan
        for signature, cost in zip(signatures, costs, strict=True)
    ]
    return tuple(costs), np.array(times_ns, np.float64)


def _add_up_by_call(study: Study, call: Ints, ns: Floats, calls: int) -> Floats:
    """Returns the mean sum per step of the times of each call's operations, ns, shape (calls,)."""
    is_known = call != NONE
    sums_ns: Floats = np.bincount(call[is_known], ns[is_known], calls) / study.steps
    return sums_ns


def _find_precisions(study: Study, signature: Ints, is_known: Bools) -> Mapping[int, str]:
    """Returns the precision in which the kernels of a signature multiply, if their names show it.

    Tensors in fp32 may be multiplied in TF32, which only the names of the kernels show.

    Args:
        study: the studied steps.
        signature: the signature of each operation that belongs to a call.
        is_known: shape (operations of the study,), True for the operations that belong to a call.
    """
    rules = [find_precision_rule(name) for name in study.kernels]
    precisions = {code: rule.precision for code, rule in enumerate(rules) if rule and rule.precision}
    pairs = dict.fromkeys(zip(signature.tolist(), study.operations.kernel[is_known].tolist(), strict=True))
    return {number: precisions[code] for number, code in pairs if code in precisions}
