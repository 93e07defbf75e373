"""Operators that work on tensors of which few elements were written: padded buffers, gates, and one-hot masks."""

from __future__ import annotations

import numpy as np
import pytest

from nsys_analyzer.analysis.findings.finding import StepsToExplain
from nsys_analyzer.analysis.findings.redundant_work import find_zeros
from nsys_analyzer.analysis.operators.zeros import find_work_on_zeros
from tests.support.operator_calls import OperatorSteps, tensor
from tests.test_operator_findings import only, saved_us, text_of

#: The width of the rows, and the number of rows that are used.
WIDTH, USED = 1024, 2048
WEIGHT = tensor(WIDTH, WIDTH)


def padded_buffer(rows: int) -> StepsToExplain:
    """Rows are written into a buffer of zeros, which a matmul multiplies, and from which the rows are read again."""
    buffer, index = tensor(rows, WIDTH), tensor(USED, dtype="int64")
    steps = OperatorSteps().call("new_zeros", tensor(USED, WIDTH), out=[buffer], us=10, reads=[0], writes=[1])
    steps.call(
        "index_copy", buffer, None, index, tensor(USED, WIDTH), out=[buffer], us=100, reads=[0, 1, 2], writes=[3],
        line="moe.py:4 in dispatch",
    )  # fmt: skip
    steps.call("mm", buffer, WEIGHT, out=[buffer], us=1_000, reads=[3, 4], writes=[5], line="moe.py:9 in experts")
    steps.call("index_select", buffer, None, index, out=[tensor(USED, WIDTH)], us=50, reads=[2, 5], writes=[6])
    return steps.case(lasting=[6])


def test_a_buffer_with_padding() -> None:
    """Three of four rows are zeros. All or half of this share of the 100 + 1,000 µs is saved; the reads are needed."""
    steps = padded_buffer(4 * USED)
    candidate = only(find_zeros, steps)
    assert saved_us(steps, candidate) == pytest.approx([0.5 * 0.75 * 1_100, 0.75 * 1_100], abs=1)
    assert "Operators work on tensors with 75 % zeros" in text_of(candidate)
    assert "writes only some of its rows" in text_of(candidate)
    assert [line.place for line in candidate.lines] == ["moe.py:4"]


def test_a_buffer_with_little_padding() -> None:
    """A quarter more rows than are used is what programs without a fault have as well."""
    assert [*find_zeros(padded_buffer(USED * 5 // 4))] == []


def gated(*, reads_elsewhere: bool) -> StepsToExplain:
    """The result of a matmul is multiplied by gates, which are zero for seven of eight experts."""
    gates, rows = tensor(USED, 8), tensor(8, USED, WIDTH)
    steps = OperatorSteps().call("zeros", out=[gates], us=2, reads=[], writes=[1])
    steps.call("scatter", gates, None, tensor(USED, 1), tensor(USED, 1), out=[gates], us=2, reads=[0, 1], writes=[2])
    steps.call("bmm", rows, tensor(8, WIDTH, WIDTH), out=[rows], us=800, reads=[3, 4], writes=[5])
    steps.call("mul", rows, tensor(8, USED, 1), out=[rows], us=160, reads=[2, 5], writes=[6])
    if reads_elsewhere:
        steps.call("exp", rows, out=[rows], us=10, reads=[5], writes=[7])
    return steps.case(lasting=[6, 7])


@pytest.mark.parametrize(("reads_elsewhere", "us"), [(False, 962), (True, 162)])
def test_values_that_are_only_multiplied_by_zeros(reads_elsewhere: bool, us: float) -> None:
    """Of the multiplication and the 2 µs of the scatter, 7/8 are on zeros; of the matmul, unless others read it."""
    steps = gated(reads_elsewhere=reads_elsewhere)
    assert saved_us(steps, only(find_zeros, steps)) == pytest.approx([us * 7 / 16, us * 7 / 8], abs=1)


def test_a_one_hot_mask() -> None:
    """A mask of 1 of 512 columns is made, copied and multiplied. The sum over its rows has no zeros."""
    mask, index = tensor(USED, 512), tensor(USED, 1, dtype="int64")
    steps = OperatorSteps().call("zeros", out=[mask], us=10, reads=[], writes=[1])
    steps.call("scatter_", mask, None, index, out=[mask], us=10, reads=[0, 1], writes=[2])
    steps.call("_to_copy", mask, out=[mask], us=90, reads=[2], writes=[3])
    steps.call("mm", mask, tensor(512, 64), out=[tensor(USED, 64)], us=100, reads=[3, 4], writes=[5])
    steps.call("sum", mask, out=[tensor(512)], us=40, reads=[3], writes=[6])
    steps.call("exp", tensor(USED, 64), out=[tensor(USED, 64)], us=70, reads=[5], writes=[7])
    case = steps.case(lasting=[6, 7])
    candidate = only(find_zeros, case)
    assert saved_us(case, candidate) == pytest.approx([240 * 511 / 1024, 240 * 511 / 512], abs=1)
    assert "writes only some of its elements" in text_of(candidate)


def test_rows_without_a_gradient_are_no_padding() -> None:
    """The gradient of ``x[index]`` is zero for the rows that are not selected, in any program that selects rows."""
    whole, index = tensor(4 * USED, WIDTH), tensor(USED, dtype="int64")
    steps = OperatorSteps().call("index_select", whole, None, index, out=[tensor(USED, WIDTH)], us=50, reads=[0, 1])
    steps.call("new_zeros", whole, out=[whole], us=10, reads=[], writes=[2], phase="backward")
    steps.call(
        "index_add", whole, None, index, tensor(USED, WIDTH), out=[whole], us=90, reads=[1, 2], writes=[3],
        phase="backward",
    )  # fmt: skip
    steps.call("mm", whole, WEIGHT, out=[whole], us=1_000, reads=[3, 4], writes=[5], phase="backward")
    operators = steps.case(lasting=[5]).operators
    assert operators is not None
    assert not np.any(find_work_on_zeros(operators).zero_share)
