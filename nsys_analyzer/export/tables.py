"""The table of GPU operations, which every format but a trace holds: its rows as Arrow, and what its columns are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nsys_analyzer.analysis.kernels.frame import OPERATION_COLUMNS, operation_frame
from nsys_analyzer.export.captures import Capture

if TYPE_CHECKING:
    import pyarrow as pa

#: What the table is called where it has a name.
TABLE = "gpu_operations"


def operation_tables(captures: Sequence[Capture]) -> Iterator[pa.Table]:
    """The operations of each capture, in columns of :func:`arrow_schema`; times are on the clock of their capture.

    Raises:
        MissingTableError: a capture has no GPU activity.
    """
    import pyarrow as pa

    for capture in captures:
        attributed = capture.read()
        frame = operation_frame(attributed)
        processes = capture.processes(attributed)
        if len(processes) == 1 and processes[0].rank is not None:
            frame["rank"] = frame["rank"].fillna(processes[0].rank)
        yield pa.Table.from_pandas(frame, arrow_schema(), preserve_index=False)


def arrow_schema() -> pa.Schema:
    """The columns, each with what it says and its unit in its metadata."""
    import pyarrow as pa

    types = {"category": pa.dictionary(pa.int32(), pa.string()), "integer": pa.int64(), "flag": pa.bool_()}
    return pa.schema(
        [
            pa.field(name, types[one.type], metadata={"description": one.doc, "unit": one.unit})
            for name, one in OPERATION_COLUMNS.items()
        ]
    )


def plain_texts(table: pa.Table) -> pa.Table:
    """The table with texts in place of codes, for formats that know no codes."""
    import pyarrow as pa

    fields = [field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field for field in table.schema]
    return table.cast(pa.schema(fields))


def column_reference() -> Iterator[tuple[str, str, str, str]]:
    """Name, type, unit and meaning of each column."""
    types = {"category": "text", "integer": "integer", "flag": "true or false"}
    return ((name, types[one.type], one.unit, one.doc) for name, one in OPERATION_COLUMNS.items())
