"""PyTorch's operators as columns: those of its profiler, or those that NVTX ranges name.

``nsys --pytorch=autograd-nvtx`` and PyTorch's own ``emit_nvtx`` write the number of autograd's node behind the name of
an operator, ``aten::mm, seq = 9157, op_id = 91984``, and with shapes also the sizes of its inputs: ``sizes = [[8192,
768], [768, 3072]], input_op_ids = [(91979,0), (657,0)]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import Bools, Frame, Ints, dense_codes, rows_of, values_of
from nsys_analyzer.trace.columns import PROCESS_MASK, Operators, Ranges
from nsys_analyzer.trace.reader import Reader, column_in

if TYPE_CHECKING:
    import pyarrow as pa

_ATEN = "aten::"
_ANNOTATION = r",\s*(seq|op_id|sizes|input_op_ids)\s*=.*"
_SEQUENCE = r",\s*seq\s*=\s*(?P<found>\d{1,18})(?:\D|$)"
_SIZES = r",\s*sizes\s*=\s*(?P<found>\[[\d\[\], ]*\])\s*(?:,\s*input_op_ids|$)"


def may_be_annotated(texts: pa.Array) -> bool:
    """Returns whether any of the texts has an annotation, which has an equals sign: most captures have none."""
    letters = texts.buffers()[2]
    return letters is not None and bool((np.frombuffer(letters, np.uint8) == ord("=")).any())


def without_annotations(texts: pa.Array) -> pa.Array:
    """Returns the names of ranges without what is written behind an operator's."""
    import pyarrow.compute as pc

    return pc.replace_substring_regex(texts, pattern=_ANNOTATION, replacement="")


def are_named_operators(ranges: Ranges) -> Bools:
    """Returns which ranges are operators by their names, ATen's."""
    found: Bools = np.array([name.startswith(_ATEN) for name in ranges.names], np.bool_)[ranges.name]
    return found


def plain_operators(ranges: Ranges) -> Operators:
    """Returns the operators of some ranges without any annotation."""
    none = np.full(len(ranges), -1, np.int32)
    return Operators(
        **ranges.columns(),
        names=ranges.names,
        sequence=none.astype(np.int64),
        forward_thread=np.zeros(len(ranges), np.int32),
        shapes=none,
        shape_texts=(),
    )


def are_operators(ranges: Ranges, texts: pa.Array, names: pa.Array) -> Bools:
    """Returns which ranges are operators: those of ATen's names, and of names with an annotation behind them anywhere.

    Args:
        texts: the distinct texts of the ranges, or more of them.
        names: the same without annotations.
    """
    import pyarrow.compute as pc

    annotated = set(pc.unique(names.filter(pc.not_equal(names, texts))).to_pylist())
    found = np.array([name in annotated or name.startswith(_ATEN) for name in ranges.names], np.bool_)
    return found[ranges.name]


def annotated_operators(ranges: Ranges, texts: pa.Array) -> Operators:
    """Returns the operators of some ranges, with what their whole texts say of them."""
    import pyarrow as pa

    sizes = _found(texts, _SIZES).dictionary_encode()
    shapes, shape_texts = values_of(sizes.indices, default=-1).astype(np.int32), sizes.dictionary.to_pylist()
    # A profiler cuts a text that is too long for it.
    is_whole = np.array([*(text.count("[") == text.count("]") for text in shape_texts), False], np.bool_)
    return Operators(
        **ranges.columns(),
        names=ranges.names,
        sequence=values_of(_found(texts, _SEQUENCE).cast(pa.int64()), default=-1),
        forward_thread=np.zeros(len(ranges), np.int32),
        shapes=np.where(is_whole[shapes], shapes, np.int32(-1)),
        shape_texts=tuple(shape_texts),
    )


def _found(texts: pa.Array, pattern: str) -> pa.Array:
    import pyarrow.compute as pc

    return pc.struct_field(pc.extract_regex(texts, pattern=pattern), "found")


def recorded_operators(frame: Frame, strings: dict[int, str]) -> Operators:
    """Returns the operators of the profiler's own table."""
    names, name = dense_codes(frame["name"])
    shape_ids, shapes = dense_codes(np.maximum(frame["shapes"], -1))
    known = shape_ids[shape_ids >= 0]
    return Operators(
        start=frame["start"],
        end=frame["end"],
        thread=frame["thread"],
        name=name.astype(np.int64),
        names=_texts(names, strings),
        sequence=np.maximum(frame["sequence"], -1),
        forward_thread=frame["forward_thread"],
        shapes=shapes - np.int32(len(shape_ids) - len(known)),  # the ID -1 becomes the code -1
        shape_texts=_texts(known, strings),
    )


def _texts(ids: Ints, strings: dict[int, str]) -> tuple[str, ...]:
    return tuple(strings.get(i, "") for i in ids.tolist())


#: A function of PyTorch that Python calls (``THPVariable_item``, ``THCPModule_emptyCache``), or an operator.
_CALLED = re.compile(r"\bTHC?P\w+?_(?P<function>\w+)\(|^at::_ops::(?P<operator>\w+)::call\b")


def read_callers(reader: Reader, strings: Mapping[int, str]) -> Mapping[tuple[int, int], str]:
    """Returns the outermost operator or function of PyTorch around each API call, by process and correlation ID.

    A call without a backtrace, or with none of PyTorch's functions in it, has no entry. ``strings`` are those of the
    export, by their IDs.
    """
    if not all(_has_all(reader, table) for table in (schema.CALLCHAINS, schema.CHAINED_CALLS)):
        return {}
    outermost = {chain: symbol for chain, symbol, _ in sorted(rows_of(reader.read(schema.CALLCHAINS)), key=_depth)}
    called = {chain: found for chain, symbol in outermost.items() if (found := _called(strings.get(symbol, "")))}
    calls = reader.read(schema.CHAINED_CALLS)
    chained = np.flatnonzero(np.isin(calls["chain"], list(called)))
    thread, correlation, chain = (calls[column][chained].tolist() for column in ("thread", "correlation", "chain"))
    return {(t & PROCESS_MASK, c): called[one] for t, c, one in zip(thread, correlation, chain, strict=True)}


def _has_all(reader: Reader, table: schema.Table) -> bool:
    """Returns whether the export has a table with all its columns, and what its filter needs."""
    name = reader.name_of(table)
    if not name or (table.filter and not reader.filter_of(table, name)):
        return False
    return all(column_in(column, reader.columns_of[name]) for column in table.columns)


def _depth(row: tuple[int, int, int]) -> int:
    return row[2]


def _called(symbol: str) -> str:
    """Returns the function or operator that a frame's symbol names, empty for any other symbol."""
    found = _CALLED.search(symbol)
    return found["function"] or found["operator"] if found else ""
