"""What attention must move and keep: the byte accounting, and the claims that the physics check tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.benches.physics import Rate, Residence
from nsys_analyzer.report.model import Block, Column, Details, Table

_FP32 = 4
#: Passes over the (B, S, S) scores of one eager forward: two products write or read them once, scale, mask, subtract,
#: exp and divide read and write them, max and sum read them.
_EAGER_PASSES = 14
_TIGHTEST = 3


def shape_name(row: Row) -> str:
    """What a shape is called."""
    return f"d {row.case['d']}, context {row.case['context_length']:,}{', compiled' if row.case['compile'] else ''}"


def accounting(results: Results) -> tuple[Block, ...]:
    """The byte accounting of the largest eager row that has one: tensor by tensor, against what was measured."""
    rows = [row for row in results.of(compile=False) if row.figures.get("saved")]
    if not rows:
        return ()
    row = max(rows, key=lambda row: row.figures["before_backward_bytes"])
    inputs = {tuple(shape) for shape in _input_shapes(row)}
    own = [one for one in row.figures["saved"] if tuple(one[0]) not in inputs]
    batch, length, d = row.case["batch_size"], row.case["context_length"], row.case["d"]
    output = batch * length * d * _FP32
    cells = [(_role(one, row), _shape(one[0]), one[1], one[2], one[3]) for one in own]
    total = sum(one[3] for one in own) + output
    rows_ = (
        *cells,
        ("output", _shape((batch, length, d)), "float32", 1, output),
        ("sum", "", "", None, total),
        ("measured", "", "", None, row.figures["before_backward_bytes"]),
    )
    columns = (
        Column("tensor"), Column("shape"), Column("dtype"), Column("number", "count"), Column("bytes", "bytes"),
    )  # fmt: skip
    caption = f"What waits for backward at {shape_name(row)}, as autograd saved it; inputs are not counted again:"
    return (Details("Byte accounting of the largest shape", (Table(columns, rows_, caption),)),)


def _input_shapes(row: Row) -> list[tuple[int, ...]]:
    batch, length, d = row.case["batch_size"], row.case["context_length"], row.case["d"]
    return [(batch, length, d), (batch, d, length), (length, length)]


def _role(saved: Sequence[Any], row: Row) -> str:
    length = row.case["context_length"]
    if saved[0][-2:] == [length, length]:
        return "scores, their exponentials, the weights"
    return "maxima and sums of the rows"


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(f"{side:,}" for side in shape)


def rates(results: Results) -> list[Rate]:
    """Two products of 2·B·S²·d FLOPs forward and four backward, the whole square: masked scores are computed too."""
    found = []
    for row in (row for row in results.rows if row.ok):
        batch, length, d = row.case["batch_size"], row.case["context_length"], row.case["d"]
        flops, moved = 4 * batch * length**2 * d, _EAGER_PASSES * batch * length**2 * _FP32
        name, figures, precision = shape_name(row), row.figures, str(row.case["precision"])
        eager = None if row.case["compile"] else moved
        scores = 2 * batch * length**2 * _FP32
        found.append(Rate(f"forward, {name}", precision, flops, eager, figures["forward_ms"], scores))
        found.append(Rate(f"backward, {name}", precision, 2 * flops, None, figures["backward_ms"]))
    return found


def residences(results: Results) -> list[Residence]:
    """Before an eager backward three score matrices and the output live: the largest shapes show it best."""
    rows = [row for row in results.of(compile=False) if "before_backward_bytes" in row.figures]
    largest = sorted(rows, key=lambda row: -row.figures["before_backward_bytes"])[:_TIGHTEST]
    found = []
    for row in largest:
        batch, length, d = row.case["batch_size"], row.case["context_length"], row.case["d"]
        least = (3 * batch * length**2 + batch * length * d) * _FP32
        found.append(
            Residence(
                f"what waits for backward at {shape_name(row)}",
                row.figures["before_backward_bytes"],
                least,
                "3·B·S² scores, B·S·d output",
            )
        )
    return found
