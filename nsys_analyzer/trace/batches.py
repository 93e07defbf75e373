"""Arrow batches, from whatever file, as the columns of a frame: each value is copied once, to where it is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nsys_analyzer.trace.arrays import Frame, values_of
from nsys_analyzer.trace.schema import Column

if TYPE_CHECKING:
    import pyarrow as pa


def frame_of(batches: Iterable[pa.RecordBatch], columns: Sequence[Column], rows: int = 0) -> Frame:
    """The columns of a table.

    Args:
        batches: the table in parts, their columns in the order of ``columns``.
        columns: what is to become of each.
        rows: how many there are, about: room for them is taken at once, and used as far as they come.

    Raises:
        pyarrow.ArrowException: a column holds what it should not.
    """
    numbers = {one.name: np.empty(rows, np.int32 if one.narrow else np.int64) for one in columns if not one.is_text}
    texts: dict[str, list[pa.Array]] = {one.name: [] for one in columns if one.is_text}
    length = 0
    for batch in batches:
        until = length + batch.num_rows
        for column, values in zip(columns, batch.columns, strict=True):
            if column.is_text:
                texts[column.name].append(values)
                continue
            array = numbers[column.name]
            if until > len(array):
                array.resize(max(until, 2 * len(array)), refcheck=False)
            array[length:until] = _integers(values, column.default)
        length = until
    for array in numbers.values():
        array.resize(length, refcheck=False)
    return {one.name: _texts(texts[one.name]) if one.is_text else numbers[one.name] for one in columns}


def empty_frame(columns: Sequence[Column]) -> Frame:
    """The columns of a table without rows."""
    return frame_of((), columns)


def _integers(values: pa.Array, default: int | str) -> Any:
    import pyarrow as pa

    return values_of(values if values.type == pa.int64() else values.cast(pa.int64()), int(default))


def _text(values: pa.Array) -> pa.Array:
    """Bytes as a text, unchecked and in place: Arrow's casts take a tenth of a second to import."""
    import pyarrow as pa

    return values.view(pa.string()) if values.type == pa.binary() else values.cast(pa.string())


def _texts(parts: list[pa.Array]) -> pa.Array:
    import pyarrow as pa

    if not parts:
        return pa.nulls(0, pa.string())
    texts = pa.concat_arrays([_text(part) for part in parts])
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:  # not UTF-8: a character cut in two, or another encoding
        found = [text.decode("utf-8", errors="replace") for part in parts for text in part.to_pylist()]
        return pa.array(found, pa.string())
    return texts
