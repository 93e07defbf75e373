"""What of PyTorch an API call was made for, by the backtraces that ``nsys profile --cudabacktrace`` records."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import rows_of
from nsys_analyzer.trace.columns import PROCESS_MASK
from nsys_analyzer.trace.reader import Reader, column_in

#: A function of PyTorch that Python calls (``THPVariable_item``, ``THCPModule_emptyCache``), or an operator.
_CALLED = re.compile(r"\bTHC?P\w+?_(?P<function>\w+)\(|^at::_ops::(?P<operator>\w+)::call\b")


def read_callers(reader: Reader, strings: Mapping[int, str]) -> Mapping[tuple[int, int], str]:
    """The outermost operator or function of PyTorch around each API call, by process and correlation ID.

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
    """Whether the export has a table with all its columns, and what its filter needs."""
    name = reader.name_of(table)
    if not name or (table.filter and not reader.filter_of(table, name)):
        return False
    return all(column_in(column, reader.columns_of[name]) for column in table.columns)


def _depth(row: tuple[int, int, int]) -> int:
    return row[2]


def _called(symbol: str) -> str:
    """The function or operator that a frame's symbol names, empty for any other symbol."""
    found = _CALLED.search(symbol)
    return found["function"] or found["operator"] if found else ""
