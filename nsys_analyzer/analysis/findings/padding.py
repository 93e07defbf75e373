"""Finds batches with padding, and what a step would be if its operators had no work for the padding."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nsys_analyzer.analysis.findings.finding import Candidate, FindingFigures, StepsToExplain, saved_work
from nsys_analyzer.analysis.operators.costs import Cost
from nsys_analyzer.analysis.operators.operands import Call
from nsys_analyzer.trace.operator_calls import Batch, Signature, Tensor
from nsys_analyzer.trace.schema import NS_PER_MS

#: Padding is a finding from this share of the tokens on.
_LEAST_PADDING = 0.1


@dataclass(frozen=True)
class PaddingFigures(FindingFigures):
    """The padding in the batches of one step.

    Attributes:
        batches: the number of batches.
        tokens: the number of tokens with padding.
        share: the padding as a share of the tokens.
        share_behind_longest: the padding that not even the longest row of its batch needs, as a share of the tokens.
        length: the length of the rows of the longest batch.
        longest: the largest number of tokens in a row, without padding.
        ms: the time of the operators that process the tokens per step, ms.
    """

    batches: int
    tokens: int
    share: float
    share_behind_longest: float
    length: int
    longest: int
    ms: float


def find_padding(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds batches with padding.

    The work on the tokens shrinks at least by the padding behind the longest row of each batch, and at most by all
    padding. Attention then shrinks with the square of the length of each row. The optimizer's work remains.
    """
    operators = steps.operators
    batches = operators.calls.batches if operators else ()
    tokens = sum(map(_count_places, batches))
    padding = {batch: _count_places(batch) - sum(batch.tokens) for batch in batches}
    padding_of_line = Counter[str]()
    for batch in batches:
        padding_of_line[batch.line] += padding[batch]
    total_padding = padding_of_line.total()
    if operators is None or total_padding < _LEAST_PADDING * tokens or not tokens:
        return
    batches_of_shape = defaultdict[tuple[int, int], list[Batch]](list)
    for batch in batches:
        batches_of_shape[len(batch.tokens), batch.length].append(batch)
    shares = np.zeros((2, len(operators.calls.signatures)))
    has_tokens = np.zeros(len(operators.calls.signatures), np.bool_)
    for index, (signature, cost) in enumerate(zip(operators.calls.signatures, operators.costs, strict=True)):
        tensors = Call(signature).all_tensors()
        shape = next((shape for shape in batches_of_shape if _has_rows(tensors, *shape)), None)
        if shape:
            has_tokens[index] = True
            shares[:, index] = _find_savings(
                batches_of_shape[shape], is_attention=_is_attention(signature, cost, shape)
            )
    in_optimizer = operators.calls.in_phase("optimizer")
    least, most = np.where(in_optimizer, 0.0, shares[:, operators.calls.signature])
    ns = operators.measured_ns * (has_tokens[operators.calls.signature] & ~in_optimizer)
    behind_longest = sum(_count_places(batch) - len(batch.tokens) * max(batch.tokens) for batch in batches)
    figures = PaddingFigures(
        batches=len(batches),
        tokens=tokens,
        share=total_padding / tokens,
        share_behind_longest=behind_longest / tokens,
        length=max(batch.length for batch in batches),
        longest=max(max(batch.tokens) for batch in batches),
        ms=float(ns.sum()) / NS_PER_MS,
    )
    saved_ns = float((most * ns).sum())
    lines = operators.make_lines(
        {line: saved_ns * count / total_padding for line, count in padding_of_line.items()}, max(saved_ns, 1.0)
    )
    changes = tuple(saved_work(operators.spread(share, default=0.0)) for share in (least, most))
    # The operators can be slow for other reasons, too: the finding does not explain their work, only its size.
    yield Candidate("padding", figures, changes, None, None, lines)


def _count_places(batch: Batch) -> int:
    """Returns the number of tokens of a batch with its padding."""
    return batch.length * len(batch.tokens)


def _has_rows(tensors: Sequence[Tensor], rows: int, length: int) -> bool:
    """Returns whether a tensor contains the tokens of a batch: the rows and their length, also as one dimension.

    Tensors for the prediction of the next token have one token less in each row.
    """
    for size in (length, max(length - 1, 1)):
        for shape in (tensor.shape for tensor in tensors):
            counts = [count for count, neighbor in (*pairwise(shape), *pairwise(shape[::-1])) if neighbor == size]
            # The heads of attention may be part of the dimension of the rows.
            has_rows = rows in counts or (len(shape) > 2 and any(count % rows == 0 for count in counts))
            if has_rows or rows * size in shape:
                return True
    return False


def _is_attention(signature: Signature, cost: Cost | None, shape: tuple[int, int]) -> bool:
    """Returns whether each token is combined with each other token of its row."""
    rows, length = shape
    has_scores = any(
        tensor.shape[-2:] == (length, length) and (len(tensor.shape) > 3 or tensor.shape[0] != rows)
        for tensor in Call(signature).all_tensors()
        if len(tensor.shape) > 2  # in two dimensions, or with one row per row of the batch, one may be the width
    )
    return has_scores or bool(cost and cost.kind == "attention")


def _find_savings(batches: Sequence[Batch], *, is_attention: bool) -> tuple[float, float]:
    """Returns the share of an operator's work behind the longest row of each batch, and its share for all padding."""
    longest = math.fsum(max(batch.tokens) / batch.length for batch in batches) / len(batches)
    power = 2 if is_attention else 1
    rows = [(count / batch.length) ** power for batch in batches for count in batch.tokens]
    return 1 - longest, 1 - math.fsum(rows) / len(rows)
