"""Columns of tables: the types of their arrays, what is done with any of them, and how Arrow's batches become some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nsys_analyzer.trace.schema import NO_TIME, Column

if TYPE_CHECKING:
    import pyarrow as pa

Ints: TypeAlias = npt.NDArray[np.int64]
SmallInts: TypeAlias = npt.NDArray[np.int32]
Integers: TypeAlias = npt.NDArray[np.signedinteger[Any]]  # of any width
Codes: TypeAlias = npt.NDArray[np.int8]
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]
#: One table as it was read: column name to a numpy array (integers) or an Arrow string array (texts).
Frame: TypeAlias = dict[str, Any]

_SPARSE = 4  # a table of codes may be this many times longer than the values it serves
_BLOCK = 1 << 15


def arrow_to_numpy(array: pa.Array, default: int = 0) -> Any:
    """Returns the numbers of an Arrow array, the default in place of nulls; without nulls, without a copy.

    Straight from its buffers: Arrow's own conversions to numpy import pandas, a sixth of a second.
    """
    kind = np.dtype(f"{'u' if str(array.type).startswith('u') else 'i'}{array.type.bit_width // 8}")
    if not len(array):
        return np.empty(0, kind)
    validity, data = array.buffers()
    values = np.frombuffer(data, kind, len(array), array.offset * kind.itemsize)
    if not array.null_count:
        return values
    valid = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[array.offset :][: len(array)]
    return np.where(valid.astype(np.bool_), values.astype(np.int64), default)


def arrow_integers(values: Ints | SmallInts) -> pa.Array:
    """Returns integers as an Arrow array of their width, a time that is not known as a null.

    From their memory: Arrow's own conversions import pandas.
    """
    import pyarrow as pa

    are_known = values != NO_TIME
    validity = None if are_known.all() else pa.py_buffer(np.packbits(are_known, bitorder="little"))
    kind = pa.int32() if values.itemsize == 4 else pa.int64()
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(np.ascontiguousarray(values))])


def arrow_texts(texts: Sequence[str]) -> pa.Array:
    """Returns texts as an Arrow array, likewise."""
    import pyarrow as pa

    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def arrow_table(columns: Mapping[str, Ints | SmallInts | Sequence[str]]) -> pa.Table:
    """Returns columns of integers and of texts as a table."""
    import pyarrow as pa

    arrays = [arrow_integers(c) if isinstance(c, np.ndarray) else arrow_texts(c) for c in columns.values()]
    return pa.Table.from_arrays(arrays, names=list(columns))


def append_in_place(first: Any, *others: Any) -> Any:
    """Returns an array of its own memory with others behind it; without a copy of what may be millions of entries."""
    length = len(first)
    first.resize(length + sum(map(len, others)), refcheck=False)
    np.concatenate(others, out=first[length:], casting="unsafe")
    return first


def take_or_default(column: Any, index: Any, absent: int) -> Any:
    """Returns the column's entries at some positions, ``absent`` where the position is -1."""
    entries = np.full(len(index), absent, column.dtype)
    for block in blocks(len(index) if len(column) else 0):
        is_there = index[block] >= 0
        entries[block][is_there] = column[index[block][is_there]]
    return entries


def compress_constant(column: Any) -> Any:
    """Returns the column; one that holds a single value, as most of processes and devices do, as that value repeated.

    Such a one takes no memory, and cannot be written to.
    """
    is_constant = len(column) and all((column[block] == column[0]).all() for block in blocks(len(column)))
    return np.broadcast_to(column[0], len(column)) if is_constant else column


def blocks(length: int, least: int = 0) -> Iterator[slice]:
    """Returns the positions of a long column in blocks, of at least so many.

    What is computed from one block stays in the processor's cache, where temporaries as long as the column would take
    pages from the system and give them back, each of them set to zero in between: half of the time of a long capture.
    """
    size = max(_BLOCK, least)
    return (slice(first, first + size) for first in range(0, length, size))


def iterate_rows(frame: Frame) -> Iterator[tuple[Any, ...]]:
    """Returns the rows of a small table, its columns in the order of the schema."""
    columns = (column.tolist() for column in frame.values())
    return zip(*columns, strict=True)


def distinct(values: Any) -> Any:
    """Returns the distinct values, sorted; fast where equal values come in runs, as the IDs of threads do.

    ``np.unique`` puts them into a hash table first, which takes far longer where a million times are all different.
    """
    if not len(values):
        return values
    ordered = _without_repeats(values)
    ordered.sort()
    return _without_repeats(ordered)


def _without_repeats(values: Any) -> Any:
    """Returns a copy of the values without those that are equal to the one before."""
    return values[np.append(True, values[1:] != values[:-1])]


def distinct_texts(texts: Sequence[str]) -> tuple[tuple[str, ...], Ints]:
    """Returns the distinct texts and the empty one, sorted, and the position of each text among them."""
    ordered = tuple(sorted({*texts, ""}))
    position = {text: i for i, text in enumerate(ordered)}
    return ordered, np.fromiter(map(position.__getitem__, texts), np.int64, len(texts))


def distinct_rows(*columns: Integers) -> tuple[Ints, SmallInts]:
    """Returns where each distinct row of some columns is first, in sorted order, and each row's position among these.

    Each row is made one number: ``np.unique`` along an axis compares rows, which takes many times as long.
    """
    codes = np.zeros(len(columns[0]), np.int32)
    for column in columns:
        values, code = dense_codes(column.astype(np.int64))
        codes = dense_codes(codes.astype(np.int64) * len(values) + code)[1]
    first = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]  # of several entries for one place, the last one stays
    return first, codes


def dense_codes(values: Ints) -> tuple[Ints, SmallInts]:
    """Returns the distinct values, sorted, and each value's position among them: ``np.unique`` without its sort."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low > _SPARSE * len(values) + 1_000_000:
        ids, inverse = np.unique(values, return_inverse=True)
        return ids, inverse.astype(np.int32)
    present = np.zeros(high - low + 1, np.bool_)
    for block in blocks(len(values)):
        present[values[block] - low] = True
    code_of = (np.cumsum(present) - 1).astype(np.int32)
    codes = np.empty(len(values), np.int32)
    for block in blocks(len(values)):
        codes[block] = code_of[values[block] - low]
    ids_present: Ints = np.flatnonzero(present)[: len(values)] + low
    return ids_present, codes


def build_frame(
    batches: Iterable[pa.RecordBatch],
    columns: Sequence[Column],
    is_wanted: Callable[[pa.RecordBatch], Bools] | None = None,
) -> Frame:
    """Returns the columns of a table.

    Args:
        batches: the table in parts, their first columns in the order of ``columns``.
        columns: what is to become of each.
        is_wanted: tells which rows of a part are kept.

    Raises:
        pyarrow.ArrowException: a column holds what it should not.
    """
    numbers = {
        column.name: np.empty(0, np.int32 if column.narrow else np.int64) for column in columns if not column.is_text
    }
    texts: dict[str, list[pa.Array]] = {column.name: [] for column in columns if column.is_text}
    length = 0
    for batch in batches:
        kept = np.flatnonzero(is_wanted(batch)) if is_wanted else None
        kept = None if kept is None or len(kept) == batch.num_rows else kept
        until = length + (batch.num_rows if kept is None else len(kept))
        for column, values in zip(columns, batch.columns, strict=False):
            if column.is_text:
                texts[column.name].append(values if kept is None else values.take(arrow_integers(kept)))
                continue
            array = numbers[column.name]
            if until > len(array):
                array.resize(max(until, 2 * len(array)), refcheck=False)
            integers = arrow_to_integers(values, column.default)
            array[length:until] = integers if kept is None else integers[kept]
        length = until
    for array in numbers.values():
        array.resize(length, refcheck=False)
    return {
        column.name: _texts(texts[column.name], column.default == b"") if column.is_text else numbers[column.name]
        for column in columns
    }


def empty_frame(columns: Sequence[Column]) -> Frame:
    """Returns the columns of a table without rows."""
    return build_frame((), columns)


def arrow_to_integers(values: pa.Array, default: Any) -> Any:
    """Returns the integers of an Arrow array of any width, the default in place of nulls."""
    import pyarrow as pa

    return arrow_to_numpy(values if pa.types.is_integer(values.type) else values.cast(pa.int64()), int(default))


def _texts(parts: Sequence[pa.Array], are_bytes: bool) -> pa.Array:
    """Returns the texts of several arrays in one, or the bytes; what is absent is empty."""
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
    """Returns texts or bytes with offsets of any width as bytes, in place: casts take a tenth of a second to import.

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


def mask_by_name(rows: Any, test: Callable[[str], object]) -> Bools:
    """Marks the rows whose name passes a test: their ``name`` is a code into their ``names``, -1 for none."""
    passes = np.array([*map(bool, map(test, rows.names)), False])
    marked: Bools = passes[rows.name]
    return marked
