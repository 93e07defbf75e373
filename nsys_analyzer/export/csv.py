"""The table of GPU operations as CSV (RFC 4180, UTF-8): nothing between commas is a missing value, "" an empty text.

Texts are written as they are, also those that a spreadsheet would take for a formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nsys_analyzer.export.captures import Capture
from nsys_analyzer.export.tables import arrow_schema, operation_tables, plain_texts


def write(captures: Sequence[Capture], path: Path) -> None:
    """Writes the operations of the captures, below one line of names."""
    from pyarrow import csv

    options = csv.WriteOptions(include_header=False, quoting_style="needed")
    with path.open("wb") as file:
        file.write(_header())
        for table in operation_tables(captures):
            csv.write_csv(plain_texts(table), file, options)


def is_ours(path: Path) -> bool:
    """Whether a file has the columns of a table that was written here."""
    with path.open("rb") as file:
        return file.readline(2 * len(_header())) == _header()


def _header() -> bytes:
    return f"{','.join(arrow_schema().names)}\n".encode()
