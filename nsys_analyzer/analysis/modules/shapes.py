"""The FLOPs of operators, from the sizes of their inputs where a trace has them.

A matmul of (m, k) and (k, n) is 2·m·k·n. A fused attention of B·H heads, N queries and M keys is 4·B·H·N·M·d_head,
and twice that backward: what computes its scores again is no work of the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from nsys_analyzer.analysis.modules.calls import parents
from nsys_analyzer.trace.arrays import Ints, distinct_rows
from nsys_analyzer.trace.columns import Operators

Sizes = Sequence[Sequence[int]]

_FUSED = re.compile(
    r"aten::_scaled_dot_product_(?:flash|efficient|cudnn)_attention(?:_for_cpu)?(?P<backward>_backward)?"
)
#: More FLOPs than this no operator has, and fewer fit 64 bits.
_MOST = 2**62


def counted_operators(operators: Operators) -> tuple[Ints, Ints]:
    """The operators with FLOPs that are known, and these; of one that calls another of them (a cast) the inner one."""
    known = np.array([*(_formula(name) is not None for name in operators.names), False])[operators.name]
    index = np.flatnonzero(known & (operators.shapes >= 0))
    around = parents(operators.thread[index], operators.start[index], operators.end[index])
    index = np.delete(index, np.unique(around[around >= 0]))
    name, shapes = operators.name[index], operators.shapes[index]
    first, code = distinct_rows(name, shapes)
    pairs = zip(name[first].tolist(), shapes[first].tolist(), strict=True)
    flops = [_flops(operators.names[one], operators.shape_texts[shape]) for one, shape in pairs]
    return index, np.array(flops, np.int64)[code]


def _flops(name: str, sizes: str) -> int:
    """The FLOPs of an operator with inputs of these sizes; 0 where they are not those of the operator."""
    formula = _formula(name)
    try:
        flops = formula(json.loads(sizes)) if formula else 0
    except (IndexError, RecursionError, TypeError, ValueError):
        return 0
    return flops if 0 <= flops < _MOST else 0


def _formula(name: str) -> Callable[[Sizes], int] | None:
    if match := _FUSED.fullmatch(name):
        return _attention_backward if match["backward"] else _attention
    return _MATMULS.get(name)


def _matmul(left: Sequence[int], right: Sequence[int]) -> int:
    *batch, rows, inner = map(int, left)
    *_, same, columns = map(int, right)
    return 2 * math.prod(batch) * rows * inner * columns if inner == same else 0


_MATMULS: Mapping[str, Callable[[Sizes], int]] = {
    "aten::mm": lambda sizes: _matmul(sizes[0], sizes[1]),
    "aten::bmm": lambda sizes: _matmul(sizes[0], sizes[1]),
    "aten::addmm": lambda sizes: _matmul(sizes[1], sizes[2]),
    "aten::baddbmm": lambda sizes: _matmul(sizes[1], sizes[2]),
}


def _attention(sizes: Sizes) -> int:
    query, key = sizes[:2]
    batch, heads, queries, d_head = map(int, query)
    return 4 * batch * heads * queries * int(key[-2]) * d_head


def _attention_backward(sizes: Sizes) -> int:
    return 2 * _attention(sizes[1:])
