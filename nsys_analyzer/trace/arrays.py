"""Defines the array types of table columns, operations on them, and the conversion from and to Arrow."""

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
#: The columns of a table by name: numpy arrays of integers, and Arrow arrays of texts.
Frame: TypeAlias = dict[str, Any]

#: ``dense_codes`` looks codes up in an array with an entry for each integer from the smallest to the largest value. It
#: sorts the values instead if that array would be more than this many times longer than the values.
_MAX_LOOKUP_RATIO = 4
#: The default number of positions in a block of :func:`iterate_blocks`.
_BLOCK_LENGTH = 1 << 15
#: The position of a value whose group is not on the axis. It lies before all other positions.
OFF_AXIS = -1
#: The largest length of an ``Axis``. Positions on a longer axis might not fit into 64 bits.
_MAX_AXIS_LENGTH = 1 << 62


def arrow_to_numpy(array: pa.Array, default: int = 0) -> Any:
    """Returns the integers of an Arrow array, with the default in place of nulls. An array without nulls is not copied.

    The function reads Arrow's buffers, because Arrow's own conversion to numpy imports pandas, which takes a sixth of a
    second.
    """
    kind = np.dtype(f"{'u' if str(array.type).startswith('u') else 'i'}{array.type.bit_width // 8}")
    if not len(array):
        return np.empty(0, kind)
    validity, data = array.buffers()
    values = np.frombuffer(data, kind, len(array), array.offset * kind.itemsize)
    if not array.null_count:
        return values
    is_valid = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[array.offset :][: len(array)]
    return np.where(is_valid.astype(np.bool_), values.astype(np.int64), default)


def arrow_integers(values: Ints | SmallInts) -> pa.Array:
    """Returns integers as an Arrow array of the same width, with a null for ``NO_TIME``.

    The Arrow array is made from the memory of the integers, because Arrow's own conversion imports pandas.
    """
    import pyarrow as pa

    are_known = values != NO_TIME
    validity = None if are_known.all() else pa.py_buffer(np.packbits(are_known, bitorder="little"))
    kind = pa.int32() if values.itemsize == 4 else pa.int64()
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(np.ascontiguousarray(values))])


def arrow_texts(texts: Sequence[str]) -> pa.Array:
    """Returns texts as an Arrow array, without Arrow's own conversion, which imports pandas."""
    import pyarrow as pa

    encoded_texts = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded_texts)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded_texts)))


def arrow_table(columns: Mapping[str, Ints | SmallInts | Sequence[str]]) -> pa.Table:
    """Returns columns of integers and texts as an Arrow table."""
    import pyarrow as pa

    arrays = [arrow_integers(c) if isinstance(c, np.ndarray) else arrow_texts(c) for c in columns.values()]
    return pa.Table.from_arrays(arrays, names=list(columns))


def append_in_place(array: Any, *further_arrays: Any) -> Any:
    """Appends further arrays to an array that owns its memory, and returns the array without copying its entries."""
    length = len(array)
    array.resize(length + sum(map(len, further_arrays)), refcheck=False)
    np.concatenate(further_arrays, out=array[length:], casting="unsafe")
    return array


def take_or_default(column: Any, index: Any, missing_value: int) -> Any:
    """Returns the column's entries at the positions in ``index``, and ``missing_value`` where the position is -1."""
    entries = np.full(len(index), missing_value, column.dtype)
    for block in iterate_blocks(len(index) if len(column) else 0):
        has_entry = index[block] >= 0
        entries[block][has_entry] = column[index[block][has_entry]]
    return entries


def compress_constant(column: Any) -> Any:
    """Returns the column itself, or, if all its values are equal, a read-only view that stores the value only once.

    In most captures, all operations have the same process and the same device.
    """
    is_constant = len(column) and all((column[block] == column[0]).all() for block in iterate_blocks(len(column)))
    return np.broadcast_to(column[0], len(column)) if is_constant else column


def iterate_blocks(length: int, min_length: int = 0) -> Iterator[slice]:
    """Returns slices that divide a long column into blocks of at least ``min_length`` positions.

    The temporary arrays of one block fit into the CPU's cache. For arrays of the column's length, the system allocates
    and zeroes memory in each calculation. In a long capture, this takes half of the time of the analysis.
    """
    size = max(_BLOCK_LENGTH, min_length)
    return (slice(first, first + size) for first in range(0, length, size))


def iterate_rows(frame: Frame) -> Iterator[tuple[Any, ...]]:
    """Returns the rows of a small table as tuples, in which the columns have the order of the schema."""
    columns = (column.tolist() for column in frame.values())
    return zip(*columns, strict=True)


def distinct(values: Any) -> Any:
    """Returns the distinct values in ascending order.

    The function is fast if equal values are adjacent, as in columns of thread IDs. ``np.unique`` uses a hash table,
    which is much slower for a million different times.
    """
    if not len(values):
        return values
    ordered_values = _drop_repeats(values)
    ordered_values.sort()
    return _drop_repeats(ordered_values)


def _drop_repeats(values: Any) -> Any:
    """Returns a copy of the values without each value that equals its predecessor."""
    return values[np.append(True, values[1:] != values[:-1])]


def distinct_texts(texts: Sequence[str]) -> tuple[tuple[str, ...], Ints]:
    """Returns the sorted distinct texts, including the empty text, and the position of each text among them."""
    sorted_texts = tuple(sorted({*texts, ""}))
    position = {text: i for i, text in enumerate(sorted_texts)}
    return sorted_texts, np.fromiter(map(position.__getitem__, texts), np.int64, len(texts))


def distinct_rows(*columns: Integers) -> tuple[Ints, SmallInts]:
    """Returns the first position of each distinct row in sorted order, and for each row the index of its distinct row.

    The function encodes each row as one integer, because ``np.unique`` along an axis is much slower: it compares rows.
    """
    codes = np.zeros(len(columns[0]), np.int32)
    for column in columns:
        values, code = dense_codes(column.astype(np.int64))
        codes = dense_codes(codes.astype(np.int64) * len(values) + code)[1]
    first_position = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    # Reversed, so that the first occurrence is assigned last and remains.
    first_position[codes[::-1]] = np.arange(len(codes))[::-1]
    return first_position, codes


def dense_codes(values: Ints) -> tuple[Ints, SmallInts]:
    """Returns the distinct values in ascending order, and the position of each value among them.

    It does not sort, unlike ``np.unique``, unless the values are far apart.
    """
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low > _MAX_LOOKUP_RATIO * len(values) + 1_000_000:
        ids, inverse = np.unique(values, return_inverse=True)
        return ids, inverse.astype(np.int32)
    is_present = np.zeros(high - low + 1, np.bool_)
    for block in iterate_blocks(len(values)):
        is_present[values[block] - low] = True
    code_of_value = (np.cumsum(is_present) - 1).astype(np.int32)
    codes = np.empty(len(values), np.int32)
    for block in iterate_blocks(len(values)):
        codes[block] = code_of_value[values[block] - low]
    ids_present: Ints = np.flatnonzero(is_present)[: len(values)] + low
    return ids_present, codes


def build_frame(
    batches: Iterable[pa.RecordBatch],
    columns: Sequence[Column],
    is_wanted: Callable[[pa.RecordBatch], Bools] | None = None,
) -> Frame:
    """Returns the columns of a table, with defaults in place of nulls.

    Args:
        batches: the rows in batches, whose first columns are in the order of ``columns``.
        columns: the declaration of each column.
        is_wanted: returns the mask of the rows to keep of a batch. None keeps all rows.

    Raises:
        pyarrow.ArrowException: a column contains values of the wrong type.
    """
    numbers = {
        column.name: np.empty(0, np.int32 if column.narrow else np.int64) for column in columns if not column.is_text
    }
    texts: dict[str, list[pa.Array]] = {column.name: [] for column in columns if column.is_text}
    length = 0
    for batch in batches:
        selected = np.flatnonzero(is_wanted(batch)) if is_wanted else None
        selected = None if selected is None or len(selected) == batch.num_rows else selected
        new_length = length + (batch.num_rows if selected is None else len(selected))
        for column, values in zip(columns, batch.columns, strict=False):
            if column.is_text:
                texts[column.name].append(values if selected is None else values.take(arrow_integers(selected)))
                continue
            array = numbers[column.name]
            if new_length > len(array):
                array.resize(max(new_length, 2 * len(array)), refcheck=False)
            integers = arrow_to_integers(values, column.default)
            array[length:new_length] = integers if selected is None else integers[selected]
        length = new_length
    for array in numbers.values():
        array.resize(length, refcheck=False)
    return {
        column.name: _concatenate_texts(texts[column.name], column.default == b"")
        if column.is_text
        else numbers[column.name]
        for column in columns
    }


def empty_frame(columns: Sequence[Column]) -> Frame:
    """Returns the columns of a table without rows."""
    return build_frame((), columns)


def arrow_to_integers(values: pa.Array, default: Any) -> Any:
    """Returns the integers of an Arrow array of any width, with the default in place of nulls."""
    import pyarrow as pa

    return arrow_to_numpy(values if pa.types.is_integer(values.type) else values.cast(pa.int64()), int(default))


def _concatenate_texts(parts: Sequence[pa.Array], are_bytes: bool) -> pa.Array:
    """Returns the texts (or bytes) of several arrays as one array, with an empty text in place of each null."""
    import pyarrow as pa

    blobs = pa.concat_arrays([_convert_to_binary(part) for part in parts]) if parts else pa.nulls(0, pa.binary())
    blobs.validate(full=True)
    if are_bytes:
        return blobs
    texts = blobs.view(pa.string())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:  # the bytes are not UTF-8: the text has another encoding, or was cut inside a character
        return pa.array([blob.decode("utf-8", errors="replace") for blob in blobs.to_pylist()], pa.string())
    return texts


def _convert_to_binary(values: pa.Array) -> pa.Array:
    """Returns texts or bytes with offsets of any width as a binary array, without copying them.

    The function avoids Arrow's casts, whose import takes a tenth of a second. It raises ArrowInvalid for other types.
    """
    import pyarrow as pa

    width = {pa.string(): 4, pa.binary(): 4, pa.large_string(): 8, pa.large_binary(): 8}.get(values.type)
    if width is None:
        return _convert_to_binary(values.cast(pa.string()))
    _, offsets, letters = values.buffers()
    bounds = np.zeros(len(values) + 1, np.int64)
    if len(values) and offsets is not None:
        bounds = np.frombuffer(offsets, f"i{width}", len(values) + 1, values.offset * width)
    first, last = int(bounds[0]), int(bounds[-1])
    letters = letters if letters is not None else pa.py_buffer(b"")
    if not 0 <= first <= last <= letters.size or last - first > np.iinfo(np.int32).max:
        raise pa.ArrowInvalid(f"texts from {first:,} to {last:,} in {letters.size:,} bytes")
    letters, narrow_bounds = letters.slice(first, last - first), pa.py_buffer((bounds - first).astype(np.int32))
    return pa.Array.from_buffers(pa.binary(), len(values), [None, narrow_bounds, letters])


def mask_by_name(rows: Any, is_match: Callable[[str], object]) -> Bools:
    """Returns the mask of the rows whose name passes a test, shape (rows,).

    ``rows.name`` contains positions in ``rows.names``, or -1 for a row without a name.
    """
    passes = np.array([*map(bool, map(is_match, rows.names)), False])
    mask: Bools = passes[rows.name]
    return mask


class Axis:
    """Maps values of several groups to positions on one axis. Positions are sorted by group, then by value.

    Each group has a stretch of the axis that is as long as the range of all values. If these stretches do not fit into
    64 bits, for example because a time is broken, the position depends on the rank of a value among all values.
    """

    def __init__(self, group: Ints, *values: Ints) -> None:
        self._groups = distinct(group)
        if not len(self._groups):
            return  # an axis without values places every value off the axis
        self._last = len(self._groups) - 1
        self._low = min(int(column.min()) for column in values)
        self._high = max(int(column.max()) for column in values)
        # Also counts one position before all values and one after all values.
        self._stretch = self._high - self._low + 3
        self._ranked: Ints | None = None
        if self._stretch * len(self._groups) > _MAX_AXIS_LENGTH:
            self._ranked = distinct(np.concatenate(values))
            self._stretch = 2 * len(self._ranked) + 1  # also counts one position between any two neighboring values

    def place(self, group: Integers, value: Ints) -> Ints:
        """Returns the position of each (group, value) on the axis; ``OFF_AXIS`` if the axis lacks the group.

        A value that the axis was not built from gets a position between its neighbors.
        """
        positions = np.full(len(group), OFF_AXIS, np.int64)
        for block in iterate_blocks(len(group) if len(self._groups) else 0):
            positions[block] = self._place_block(group[block], value[block])
        return positions

    def _place_block(self, group: Integers, value: Ints) -> Ints:
        group = group.astype(np.int64)  # `code * self._stretch` would overflow narrower integers
        if not self._last:
            return np.where(group == self._groups[0], self._place_in_stretch(value), OFF_AXIS)
        code = np.searchsorted(self._groups, group).clip(0, self._last)
        position = code * self._stretch + self._place_in_stretch(value)
        return np.where(self._groups[code] == group, position, OFF_AXIS)

    def _place_in_stretch(self, value: Ints) -> Ints:
        """Returns the position of each value within the stretch of its group."""
        if self._ranked is None:
            limits = np.iinfo(np.int64)
            return value.clip(max(self._low - 1, limits.min), min(self._high + 1, limits.max)) - self._low + 1
        # A value on the axis has an odd position. The even positions lie between two values.
        return np.searchsorted(self._ranked, value) + np.searchsorted(self._ranked, value, side="right")
