"""Finds operators that work on zeros: on tensors that were filled with zeros, and of which only a part was written.

Buffers with padding for each expert, gates that are zero for most experts, and one-hot masks are such tensors.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

from nsys_analyzer.analysis.operators.operands import Call, count_elements
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.operator_calls import Tensor

#: Matches operators that make a tensor of zeros.
_ZEROS = re.compile(r"::(?:new_)?zeros(?:_like)?$|::zero_$")
#: Operators that write some elements of their first argument, and the position of an argument that has as many elements
#: as are written.
_PARTIAL_WRITES = {
    "index_copy": 3, "index_copy_": 3, "index_add": 3, "index_add_": 3, "index_put": 2, "index_put_": 2,
    "scatter": 2, "scatter_": 2, "scatter_add": 2, "scatter_add_": 2,
}  # fmt: skip
#: Operators that write whole rows of their first argument.
_WRITES_ROWS = re.compile(r"::index_(?:copy|add|put)_?$")
#: The kinds of operators whose work is proportional to the size of their tensors.
_PROPORTIONAL_KINDS = ("matmul", "elementwise", "copy", "reduction", "softmax", "norm")
#: Matches operators of these kinds that work only on selected elements, or whose result for zeros matters.
_SELECTS = re.compile(r"index|gather|scatter|embedding|cumsum|cumprod|sort|topk|zeros")
#: Matches operators that keep zeros where their inputs have zeros.
_KEEPS_ZEROS = re.compile(r"::(?:mul_?|_to_copy|clone|copy_|contiguous)$")
#: Tensors belong to one buffer if their numbers of rows differ by at most this share, such as by a row for dropped
#: tokens.
_ROWS_TOLERANCE = 0.01


class _Sparse(NamedTuple):
    """A tensor that is mostly zeros.

    Attributes:
        density: the share of nonzero elements.
        elements: the number of elements.
        rows: the number of rows if whole rows are zeros; 0 if single elements are zeros.
        origin: the call that wrote the nonzero elements.
    """

    density: float
    elements: int
    rows: int
    origin: int


class WorkOnZeros(NamedTuple):
    """The share of each call's work that is on zeros. Arrays have the shape (calls,).

    Attributes:
        zero_share: the share; 0 for calls without work on zeros.
        in_rows: True for each call that works on rows of zeros, False for single elements.
        origin: the call that wrote the nonzero elements; -1 for calls without work on zeros.
    """

    zero_share: Floats
    in_rows: Bools
    origin: Ints


def find_work_on_zeros(operators: PricedOperators) -> WorkOnZeros:
    """Returns the share of each call's work that is on zeros.

    Calls count if they read a tensor that is mostly zeros, or if their result is only multiplied by such a tensor. A
    backward pass also makes such tensors, for elements without a gradient. These tensors count only if they have as
    many rows as such a tensor of the forward pass.
    """
    calls = operators.calls
    sparse = _follow_zeros(operators)
    _follow_factors(operators, sparse)
    zero_share, in_rows, origin = np.zeros(len(calls)), np.zeros(len(calls), np.bool_), np.full(len(calls), -1)
    for index, sparse_tensor in sparse.items():
        zero_share[index], in_rows[index], origin[index] = (
            1 - sparse_tensor.density,
            sparse_tensor.rows > 0,
            sparse_tensor.origin,
        )
    return WorkOnZeros(zero_share, in_rows, origin)


def _follow_zeros(operators: PricedOperators) -> dict[int, _Sparse]:
    """Returns the tensor that is mostly zeros for each call that reads or writes one, in the order of the calls."""
    calls = operators.calls
    in_backward, padded_rows = calls.in_phase("backward", "recomputed"), set[int]()
    zeros, of_value, sparse_inputs = dict[int, int](), dict[int, _Sparse](), dict[int, _Sparse]()
    for index, (reads, writes) in enumerate(zip(calls.reads, calls.writes, strict=True)):
        call = Call(calls.signatures[calls.signature[index]])
        name, output = call.signature.name, max(call.outputs or (), key=count_elements, default=None)
        if output is None:
            continue
        if _ZEROS.search(name):
            zeros.update(dict.fromkeys(writes, index))
        elif zeros.keys() & {*reads} and (written := _count_written(call)):
            elements = count_elements(output)
            rows = _count_rows(output) if _WRITES_ROWS.search(name) else 0
            sparse_tensor = _Sparse(written / max(elements, 1), elements, rows, index)
            if sparse_tensor.density < 1 and (not in_backward[index] or (rows and _is_near(rows, padded_rows))):
                padded_rows.add(rows)
                of_value.update(dict.fromkeys(writes, sparse_tensor))
                sparse_inputs[index] = sparse_tensor
        elif _is_proportional(operators, index) and any(value in of_value for value in reads):
            sparse_inputs[index] = min(of_value[value] for value in reads if value in of_value)
            if after := _find_result(call, output, sparse_inputs[index]):
                of_value.update(dict.fromkeys(writes, after))
    return sparse_inputs


def _count_written(call: Call) -> int:
    """Returns the number of elements that a call writes to its first argument; 0 if it writes all elements or none."""
    position = _PARTIAL_WRITES.get(call.signature.name.rpartition("::")[2], 0)
    tensors = call.tensors(position) if position else []
    return count_elements(tensors[0]) if tensors else 0


def _find_result(call: Call, output: Tensor, sparse_tensor: _Sparse) -> _Sparse | None:
    """Returns the result of a call that reads a tensor of mostly zeros; None if the result is not mostly zeros."""
    if sparse_tensor.rows:
        return sparse_tensor if _is_near(_count_rows(output), {sparse_tensor.rows}) else None
    elements = count_elements(output)
    if call.signature.name.endswith("::sum"):
        density = sparse_tensor.density * sparse_tensor.elements / max(elements, 1)
        return _Sparse(density, elements, 0, sparse_tensor.origin) if density < 1 else None
    if not _KEEPS_ZEROS.search(call.signature.name):
        return None
    # A factor with one element for each row makes whole rows zeros.
    of_rows = any(
        tensor.shape[-1:] == (1,) and count_elements(tensor) == sparse_tensor.elements for tensor in call.tensors()
    )
    rows = _count_rows(output) if of_rows and elements > sparse_tensor.elements else 0
    return sparse_tensor._replace(elements=elements, rows=rows)


def _follow_factors(operators: PricedOperators, sparse: dict[int, _Sparse]) -> None:
    """Adds the calls whose result the same pass only multiplies by mostly zeros, directly or in later calls."""
    calls = operators.calls
    passes = list(zip(calls.phase.tolist(), calls.instance.tolist(), strict=True))
    factors = {
        index: sparse_tensor
        for index, sparse_tensor in sparse.items()
        if calls.signatures[calls.signature[index]].name.endswith(("::mul", "::mul_"))
    }
    for index in range(len(calls) - 1, -1, -1):
        if index in sparse or not _is_proportional(operators, index):
            continue
        readers = {
            reader
            for value in calls.writes[index]
            for reader in calls.readers.get(value, ())
            if passes[reader] == passes[index]
        }
        outputs = calls.signatures[calls.signature[index]].outputs or ()
        if readers and outputs and readers <= factors.keys():
            sparse_tensor = max(factors[reader] for reader in readers)
            rows = [_count_rows(_largest_output(operators, reader)) for reader in readers]
            if _count_rows(outputs[0]) in rows:
                sparse[index] = factors[index] = sparse_tensor


def _is_proportional(operators: PricedOperators, index: int) -> bool:
    """Returns whether the work of a call is proportional to the size of its tensors."""
    code = operators.calls.signature[index]
    cost, name = operators.costs[code], operators.calls.signatures[code].name
    return bool(cost and cost.kind in _PROPORTIONAL_KINDS and not _SELECTS.search(name))


def _largest_output(operators: PricedOperators, index: int) -> Tensor:
    outputs = operators.calls.signatures[operators.calls.signature[index]].outputs or (Tensor(()),)
    return max(outputs, key=count_elements)


def _count_rows(tensor: Tensor) -> int:
    return math.prod(tensor.shape[:-1])


def _is_near(rows: int, row_counts: set[int]) -> bool:
    return any(abs(rows - row_count) <= _ROWS_TOLERANCE * row_count for row_count in row_counts)
