"""Arrow batches, from whatever file, as the columns of a frame: each value is copied once, to where it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Frame, arrow_integers, values_of
from nsys_analyzer.trace.schema import Column

if TYPE_CHECKING:
    import pyarrow as pa


def frame_of(
    batches: Iterable[pa.RecordBatch],
    columns: Sequence[Column],
    rows: int = 0,
    chosen: Callable[[pa.RecordBatch], Bools] | None = None,
) -> Frame:
    """The columns of a table.

    Args:
        batches: the table in parts, their first columns in the order of ``columns``.
        columns: what is to become of each.
        rows: how many there are, about: room for them is taken at once, and used as far as they come.
        chosen: tells which rows of a part are kept.

    Raises:
        pyarrow.ArrowException: a column holds what it should not.
    """
    numbers = {one.name: np.empty(rows, np.int32 if one.narrow else np.int64) for one in columns if not one.is_text}
    texts: dict[str, list[pa.Array]] = {one.name: [] for one in columns if one.is_text}
    length = 0
    for batch in batches:
        kept = np.flatnonzero(chosen(batch)) if chosen else None
        kept = None if kept is None or len(kept) == batch.num_rows else kept
        until = length + (batch.num_rows if kept is None else len(kept))
        for column, values in zip(columns, batch.columns, strict=False):
            if column.is_text:
                texts[column.name].append(values if kept is None else values.take(arrow_integers(kept)))
                continue
            array = numbers[column.name]
            if until > len(array):
                array.resize(max(until, 2 * len(array)), refcheck=False)
            integers = integers_of(values, column.default)
            array[length:until] = integers if kept is None else integers[kept]
        length = until
    for array in numbers.values():
        array.resize(length, refcheck=False)
    return {
        one.name: _texts(texts[one.name], one.default == b"") if one.is_text else numbers[one.name] for one in columns
    }


def empty_frame(columns: Sequence[Column]) -> Frame:
    """The columns of a table without rows."""
    return frame_of((), columns)


def integers_of(values: pa.Array, default: Any) -> Any:
    """The integers of an Arrow array of any width, the default in place of nulls."""
    import pyarrow as pa

    return values_of(values if pa.types.is_integer(values.type) else values.cast(pa.int64()), int(default))


def _texts(parts: Sequence[pa.Array], are_bytes: bool) -> pa.Array:
    """The texts of several arrays in one, or the bytes; what is absent is empty."""
    import pyarrow as pa

    blobs = pa.concat_arrays([_blobs(part) for part in parts]) if parts else pa.nulls(0, pa.binary())
    blobs.validate(full=True)
    if are_bytes:
        return blobs
    texts = blobs.view(pa.string())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:  # not UTF-8: a character cut in two, or another encoding
        return pa.array([blob.decode("utf-8", errors="replace") for blob in blobs.to_pylist()], pa.string())
    return texts


def _blobs(values: pa.Array) -> pa.Array:
    """Texts or bytes with offsets of any width as bytes, in place: casts take a tenth of a second to import.

    Raises ArrowInvalid for what is neither.
    """
    import pyarrow as pa

    width = {pa.string(): 4, pa.binary(): 4, pa.large_string(): 8, pa.large_binary(): 8}.get(values.type)
    if width is None:
        return _blobs(values.cast(pa.string()))
    _, offsets, letters = values.buffers()
    bounds = np.zeros(len(values) + 1, np.int64)
    if len(values) and offsets is not None:
        bounds = np.frombuffer(offsets, f"i{width}", len(values) + 1, values.offset * width)
    first, last = int(bounds[0]), int(bounds[-1])
    letters = letters if letters is not None else pa.py_buffer(b"")
    if not 0 <= first <= last <= letters.size or last - first > np.iinfo(np.int32).max:
        raise pa.ArrowInvalid(f"texts from {first:,} to {last:,} in {letters.size:,} bytes")
    letters, narrow = letters.slice(first, last - first), pa.py_buffer((bounds - first).astype(np.int32))
    return pa.Array.from_buffers(pa.binary(), len(values), [None, narrow, letters])
