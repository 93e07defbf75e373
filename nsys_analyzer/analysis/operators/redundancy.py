"""Finds redundant work in a step: calls whose result is computed twice, is undone, or is not used."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import numpy as np

from nsys_analyzer.analysis.operators.operands import Call
from nsys_analyzer.trace.arrays import Bools
from nsys_analyzer.trace.operator_calls import OperatorCalls, Signature, Tensor

#: ``recomputed``: a forward pass that backward runs again. ``no_backward``: a forward pass that keeps the graph
#: for a backward pass that does not follow. ``unused``: nothing that outlives the step depends on the result.
#: ``repeated``: an equal call with equal inputs ran before. ``undone``: a conversion, and the conversion back.
#: ``monitoring``: the program reads the result, for example of a metric, but the training does not depend on it.
Redundancy: TypeAlias = Literal["recomputed", "no_backward", "unused", "repeated", "undone", "monitoring"]

_BACKWARD_PHASES = ("backward", "recomputed")
#: Matches the names of operators whose result is random, or that allocate memory without writing to it.
_RANDOM_OR_EMPTY = re.compile(r"rand|dropout|bernoulli|multinomial|normal_|uniform|philox|::empty|::new_empty")
_CONVERSIONS = ("aten::_to_copy", "aten::clone", "aten::copy_", "aten::contiguous")
#: Matches the names of operators that other processes or the program see, even if no operator reads their result.
_VISIBLE_OUTSIDE = re.compile(r"c10d|_local_scalar_dense|nccl|record_stream|::item$")
#: A tensor with at most this many elements may contain a metric that is added up over the steps.
_MAX_METRIC_ELEMENTS = 10_000
_EXACT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def find_redundant_calls(calls: OperatorCalls) -> Mapping[Redundancy, Bools]:
    """Returns True for each call of each kind of redundancy; shape (calls,). A call has at most one kind."""
    is_redundant = calls.in_phase("recomputed")
    masks: dict[Redundancy, Bools] = {"recomputed": is_redundant.copy()}
    for kind, find in _SEARCHES.items():
        masks[kind] = find(calls) & ~is_redundant if calls.reads else np.zeros(len(calls), np.bool_)
        is_redundant |= masks[kind]
    return masks


def count_recomputed_bytes(calls: OperatorCalls) -> float:
    """Returns the bytes of the recomputed values that a backward pass reads: without checkpoints, memory keeps them."""
    reads = {value for index in np.flatnonzero(calls.in_phase("backward")).tolist() for value in calls.reads[index]}
    kept_calls = [index for index in np.flatnonzero(calls.in_phase("recomputed")) if reads & {*calls.writes[index]}]
    made_by = [Call(calls.signatures[calls.signature[index]]) for index in kept_calls]
    return sum(call.count_bytes(call.signature.outputs or ()) for call in made_by)


def _find_forward_without_backward(calls: OperatorCalls) -> Bools:
    """Returns True for each call of a forward pass that keeps the graph although no backward pass reads its values.

    The calls that depend on the values of such a pass count as well, for example those of its loss. The mask is empty
    for a step without a backward pass.
    """
    result = np.zeros(len(calls), np.bool_)
    in_backward = calls.in_phase(*_BACKWARD_PHASES)
    if not in_backward.any():
        return result
    read_by_backward = {value for index in np.flatnonzero(in_backward).tolist() for value in calls.reads[index]}
    in_forward = calls.in_phase("forward") & calls.keeps_graph
    for instance in np.unique(calls.instance[in_forward]).tolist():
        of_pass = in_forward & (calls.instance == instance)
        written = {value for index in np.flatnonzero(of_pass).tolist() for value in calls.writes[index]}
        if written & read_by_backward:
            continue
        result |= of_pass
        last = int(np.flatnonzero(of_pass)[-1])
        for index in range(last + 1, len(calls)):  # the loss of the pass, and what is computed from it
            depends = any(value in written for value in calls.reads[index])
            if depends and not in_backward[index] and not read_by_backward.intersection(calls.writes[index]):
                result[index] = True
                written.update(calls.writes[index])
    return result


def _find_unused(calls: OperatorCalls) -> Bools:
    """Returns True for each call on whose values nothing depends that outlives the step or leaves the GPU."""
    leaves_gpu = [
        any(tensor.device == "cpu" for tensor in signature.outputs or ())
        or bool(_VISIBLE_OUTSIDE.search(signature.name))
        for signature in calls.signatures
    ]
    # A call that returns tensors and writes nothing only makes views. Sparse tensors have no strides and no own memory.
    makes_views = [
        signature.outputs is not None and {tensor.strides is None for tensor in signature.outputs} == {False}
        for signature in calls.signatures
    ]
    writes_nothing = np.array([not writes for writes in calls.writes])
    is_opaque = writes_nothing & ~np.array(makes_views, np.bool_)[calls.signature]
    is_needed = np.array(leaves_gpu, np.bool_)[calls.signature] | is_opaque
    is_unused: Bools = ~(_find_needed(calls, is_needed, calls.lasting) | writes_nothing)
    return is_unused


def _find_monitoring(calls: OperatorCalls) -> Bools:
    """Returns True for each call on whose values neither a backward pass, nor an optimizer, nor a state depends.

    If a copy to the host is followed by a copy of a tensor that no operator made, the program may have made this tensor
    from the copied values, for example with NumPy. An operator that changes memory in place updates a state if the
    memory outlives the step, for example an average of weights. A small tensor is no state: metrics are added up in
    such tensors. The mask is empty for a step without an optimizer.
    """
    if not calls.in_phase("optimizer").any():
        return np.zeros(len(calls), np.bool_)
    is_needed = calls.in_phase(*_BACKWARD_PHASES, "optimizer")
    for index, signature in enumerate(calls.signatures[code] for code in calls.signature.tolist()):
        changed = signature.inputs[0] if signature.inputs else None
        is_small = isinstance(changed, Tensor) and math.prod(changed.shape) <= _MAX_METRIC_ELEMENTS
        outlives_step = not calls.lasting.isdisjoint(calls.writes[index])
        is_needed[index] |= "c10d" in signature.name or (
            signature.name.endswith("_") and not is_small and outlives_step
        )
    written = {value for writes in calls.writes for value in writes}
    moves = [_find_devices(signature) for signature in calls.signatures]
    for index, (code, next_code) in enumerate(itertools.pairwise(calls.signature.tolist())):
        comes_back = moves[next_code] == ("cpu", "cuda") and written.isdisjoint(calls.reads[index + 1])
        is_needed[index] |= moves[code] == ("cuda", "cpu") and comes_back
    return ~_find_needed(calls, is_needed, frozenset())


def _find_devices(signature: Signature) -> tuple[str, str]:
    """Returns the device of the first tensor that an operator reads, and that of the first tensor that it returns."""
    read, returned = Call(signature).tensors(), signature.outputs or ()
    return read[0].device if read else "", returned[0].device if returned else ""


def _find_needed(calls: OperatorCalls, is_needed: Bools, values: frozenset[int]) -> Bools:
    """Returns True for the given calls, and for each call on which they or the given values depend."""
    is_needed, needed = is_needed.copy(), set(values)
    for index in range(len(calls) - 1, -1, -1):
        is_needed[index] |= not needed.isdisjoint(calls.writes[index])
        if is_needed[index]:
            needed.update(calls.reads[index])
    return is_needed


def _find_repeated(calls: OperatorCalls) -> Bools:
    """Returns True for each call that has the signature and the input values of an earlier call, and is not random.

    The results of equal calls count as equal values. A call counts only if its result is not changed in place, and does
    not outlive the step, because it then needs memory of its own. A call without inputs, such as ``zeros``, only makes
    values that others may repeat.
    """
    is_repeated = np.zeros(len(calls), np.bool_)
    if not calls.offsets:
        return is_repeated
    results: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
    first_equal: dict[int, int] = {}
    signatures = calls.signature.tolist()
    names = [calls.signatures[signature].name for signature in signatures]
    own_memory = set(calls.lasting)
    own_memory.update(*(reads for name, reads in zip(names, calls.reads, strict=True) if name.endswith("_")))
    for index, name in enumerate(names):
        writes = calls.writes[index]
        if not writes or name.endswith("_") or _RANDOM_OR_EMPTY.search(name):
            continue
        reads = tuple(first_equal.get(value, value) for value in calls.reads[index])
        key = (signatures[index], reads, calls.offsets[index])
        if key in results and own_memory.isdisjoint(writes):
            is_repeated[index] = bool(reads)
            first_equal.update(zip(writes, results[key], strict=False))
        results.setdefault(key, writes)
    return is_repeated


def _find_undone(calls: OperatorCalls) -> Bools:
    """Returns True for each conversion that restores the input of the conversion before it without a loss.

    The first conversion counts as well if no other call reads its result.
    """
    is_undone = np.zeros(len(calls), np.bool_)
    converted = [_converted(signature) for signature in calls.signatures]
    conversions = {
        index: tensors for index, code in enumerate(calls.signature.tolist()) if (tensors := converted[code])
    }
    for first, (before, between) in conversions.items():
        is_exact = _EXACT_BYTES.get(between.dtype, 0) >= _EXACT_BYTES.get(before.dtype, 9)
        for value in calls.writes[first] if is_exact else ():
            for second in conversions.keys() & calls.readers.get(value, ()):
                source, result = conversions[second]
                if source.shape == between.shape and _is_equal(result, before):
                    is_undone[second] = True
                    is_undone[first] |= len(calls.readers[value]) == 1 and value not in calls.lasting
    return is_undone


def _converted(signature: Signature) -> tuple[Tensor, Tensor] | None:
    """Returns the tensor before and after a conversion; None for another operator."""
    if signature.name not in _CONVERSIONS or not signature.outputs:
        return None
    source = signature.inputs[1 if signature.name == "aten::copy_" else 0]
    return (source, signature.outputs[0]) if isinstance(source, Tensor) else None


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)


#: The searches for the kinds of redundancy that need the values which the calls read and write.
_SEARCHES: Mapping[Redundancy, Callable[[OperatorCalls], Bools]] = {
    "no_backward": _find_forward_without_backward,
    "unused": _find_unused,
    "repeated": _find_repeated,
    "undone": _find_undone,
    "monitoring": _find_monitoring,
}
