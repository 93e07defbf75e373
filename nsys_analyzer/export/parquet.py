"""The table of GPU operations as a Parquet file: the smallest, with types and units."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nsys_analyzer.export.captures import Capture
from nsys_analyzer.export.tables import arrow_schema, operation_tables

_GENERATOR = {"generator": "nsys-analyze export"}
_START = b"PAR1"


def write(captures: Sequence[Capture], path: Path) -> None:
    """Writes the operations of the captures, a row group or more for each."""
    from pyarrow import parquet

    schema = arrow_schema().with_metadata(_GENERATOR)
    # Arrow takes a path for text, which not every one is.
    with path.open("wb") as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in operation_tables(captures):
            writer.write_table(table.replace_schema_metadata(_GENERATOR))


def is_ours(path: Path) -> bool:
    """Whether a file is a table that was written here."""
    from pyarrow import ArrowException, parquet

    with path.open("rb") as file:
        if file.read(len(_START)) != _START:
            return False
        try:
            metadata = parquet.read_schema(file).metadata or {}
        except (ArrowException, OSError):  # it only begins as one does
            return False
    return all(metadata.get(key.encode()) == value.encode() for key, value in _GENERATOR.items())
