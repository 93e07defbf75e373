"""The ranges of a trace as columns, and PyTorch's operators: those of its profiler, or those that ranges name.

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
from nsys_analyzer.trace.arrays import (
    Frame,
    Ints,
    arrow_integers,
    arrow_texts,
    dense_codes,
    distinct_texts,
    rows_of,
    values_of,
)
from nsys_analyzer.trace.columns import PROCESS_MASK, Operators, Ranges
from nsys_analyzer.trace.reader import Reader, column_in

if TYPE_CHECKING:
    import pyarrow as pa

_ATEN = "aten::"
_ANNOTATION = r",\s*(seq|op_id|sizes|input_op_ids)\s*=.*"
_SEQUENCE = r",\s*seq\s*=\s*(?P<found>\d{1,18})(?:\D|$)"
_SIZES = r",\s*sizes\s*=\s*(?P<found>\[[\d\[\], ]*\])\s*(?:,\s*input_op_ids|$)"


def read_ranges(frame: Frame, strings: Mapping[int, str]) -> tuple[Ranges, Ints, Operators]:
    """Returns the ranges, named by text ID or by text; which of them are PyTorch's operators, as indices; and these.

    Operators are the ranges with one of ATen's names, and those of names that have an annotation behind them anywhere.
    """
    import pyarrow as pa

    by_id = frame["text_id"]
    used, id_codes = dense_codes(by_id)
    texts = pa.concat_arrays([arrow_texts([strings.get(i, "") for i in used.tolist()]), frame["text"]])
    start, end, thread = (frame[column] for column in ("start", "end", "thread"))
    text = np.where(by_id >= 0, id_codes, len(used) + np.arange(len(by_id)))
    shape_texts: tuple[str, ...] = ()
    letters = texts.buffers()[2]
    if letters is None or not (np.frombuffer(letters, np.uint8) == ord("=")).any():  # as of most captures
        names, codes = distinct_texts(texts.to_pylist())
        ranges = Ranges(start, end, thread, codes[text], names)
        index = np.flatnonzero(np.array([name.startswith(_ATEN) for name in names], np.bool_)[ranges.name])
        none = np.full(len(index), -1, np.int32)
        sequence, shapes = none.astype(np.int64), none
    else:
        import pyarrow.compute as pc

        def found(pattern: str) -> pa.Array:
            return pc.struct_field(pc.extract_regex(of_operators, pattern=pattern), "found")

        named = pc.replace_substring_regex(texts, pattern=_ANNOTATION, replacement="")
        encoded = named.dictionary_encode()
        names, codes = distinct_texts(encoded.dictionary.to_pylist())
        codes = codes[values_of(encoded.indices)][text]
        ranges = Ranges(start, end, thread, codes, names)
        annotated = set(pc.unique(named.filter(pc.not_equal(named, texts))).to_pylist())
        are_operators = np.array([name in annotated or name.startswith(_ATEN) for name in names], np.bool_)
        index = np.flatnonzero(are_operators[ranges.name])
        of_operators = texts.take(arrow_integers(text[index]))
        sequence = values_of(found(_SEQUENCE).cast(pa.int64()), default=-1)
        inputs = found(_SIZES).dictionary_encode()
        shapes, shape_texts = (
            values_of(inputs.indices, default=-1).astype(np.int32),
            tuple(inputs.dictionary.to_pylist()),
        )
        # A profiler cuts a text that is too long for it.
        is_whole = np.array([*(each.count("[") == each.count("]") for each in shape_texts), False], np.bool_)
        shapes = np.where(is_whole[shapes], shapes, np.int32(-1))
    operators = Operators(
        **ranges.select(index).columns(),
        names=names,
        sequence=sequence,
        forward_thread=np.zeros(len(index), np.int32),
        shapes=shapes,
        shape_texts=shape_texts,
    )
    return ranges, index, operators


def recorded_operators(frame: Frame, strings: Mapping[int, str]) -> Operators:
    """Returns the operators of the profiler's own table."""
    names, name = dense_codes(frame["name"])
    shape_ids, shapes = dense_codes(np.maximum(frame["shapes"], -1))
    present = shape_ids[shape_ids >= 0]
    return Operators(
        start=frame["start"],
        end=frame["end"],
        thread=frame["thread"],
        name=name.astype(np.int64),
        names=tuple(strings.get(i, "") for i in names.tolist()),
        sequence=np.maximum(frame["sequence"], -1),
        forward_thread=frame["forward_thread"],
        shapes=shapes - np.int32(len(shape_ids) - len(present)),  # the ID -1 becomes the code -1
        shape_texts=tuple(strings.get(i, "") for i in present.tolist()),
    )


#: A function of PyTorch that Python calls (``THPVariable_item``, ``THCPModule_emptyCache``), or an operator.
_CALLED = re.compile(r"\bTHC?P\w+?_(?P<function>\w+)\(|^at::_ops::(?P<operator>\w+)::call\b")


def read_callers(reader: Reader, strings: Mapping[int, str]) -> Mapping[tuple[int, int], str]:
    """Returns the outermost operator or function of PyTorch around each API call, by process and correlation ID.

    A call without a backtrace, or with none of PyTorch's functions in it, has no entry. ``strings`` are those of the
    export, by their IDs.
    """
    for table in (schema.CALLCHAINS, schema.CHAINED_CALLS):
        name = reader.name_of(table)
        if not name or (table.filter and not reader.filter_of(table, name)):
            return {}
        if not all(column_in(column, reader.columns_of[name]) for column in table.columns):
            return {}
    chains = sorted(rows_of(reader.read(schema.CALLCHAINS)), key=lambda row: row[2])  # by depth
    outermost = {chain: _CALLED.search(strings.get(symbol, "")) for chain, symbol, _ in chains}
    called = {chain: match["function"] or match["operator"] for chain, match in outermost.items() if match}
    calls = reader.read(schema.CHAINED_CALLS)
    chained = np.flatnonzero(np.isin(calls["chain"], list(called)))
    thread, correlation, chain = (calls[column][chained].tolist() for column in ("thread", "correlation", "chain"))
    return {(t & PROCESS_MASK, c): called[number] for t, c, number in zip(thread, correlation, chain, strict=True)}
