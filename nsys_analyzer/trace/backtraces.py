"""What of PyTorch an API call was made for, by the backtraces that ``nsys profile --cudabacktrace`` records."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nsys_analyzer.trace import schema
from nsys_analyzer.trace.columns import PROCESS_MASK
from nsys_analyzer.trace.reader import Reader, quoted

_TABLE, _COLUMN = "CUDA_CALLCHAINS", "callchainId"
#: A function of PyTorch that Python calls (``THPVariable_item``, ``THCPModule_emptyCache``), or an operator.
_CALLED = re.compile(r"\bTHC?P\w+?_(?P<function>\w+)\(|^at::_ops::(?P<operator>\w+)::call\b")


def read_callers(reader: Reader) -> Mapping[tuple[int, int], str]:
    """The outermost operator or function of PyTorch around each API call, by process and correlation ID.

    A call without a backtrace, or with none of PyTorch's functions in it, has no entry.
    """
    calls, strings = reader.name_of(schema.RUNTIME), reader.name_of(schema.STRINGS)
    needed = {"id", "symbol", "stackDepth"}
    if not calls or not strings or not needed <= set(reader.columns_of.get(_TABLE, ())):
        return {}
    if not {_COLUMN, "globalTid", "correlationId"} <= set(reader.columns_of[calls]):
        return {}
    outermost = reader.rows(
        f"SELECT c.id, CAST(s.value AS TEXT), max(c.stackDepth) FROM {_TABLE} c "
        f"JOIN {quoted(strings)} s ON s.id = c.symbol "
        "WHERE s.value GLOB '*THP*_*(*' OR s.value GLOB '*THCP*_*(*' OR s.value GLOB 'at::_ops::*::call*' GROUP BY c.id"
    )
    called = {chain: found for chain, symbol, _ in outermost if (found := _called(symbol))}
    chained = reader.rows(
        f"SELECT globalTid, correlationId, {_COLUMN} FROM {quoted(calls)} "
        f"WHERE {_COLUMN} IS NOT NULL AND typeof(globalTid) = 'integer' AND typeof(correlationId) = 'integer'"
    )
    return {(thread & PROCESS_MASK, call): called[chain] for thread, call, chain in chained if chain in called}


def _called(symbol: str) -> str:
    """The function or operator that a frame's symbol names, empty for any other symbol."""
    found = _CALLED.search(symbol)
    return found["function"] or found["operator"] if found else ""
