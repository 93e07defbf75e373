"""The array types of the columns, and what is done with any column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

Ints: TypeAlias = npt.NDArray[np.int64]
SmallInts: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]
#: One table as it was read: column name to a list of numpy arrays (integers) or an Arrow string array (texts).
Frame: TypeAlias = dict[str, Any]

_SPARSE = 4  # a table of codes may be this many times longer than the values it serves


def values_of(array: pa.Array, default: int = 0) -> Any:
    """The numbers of an Arrow array, the default in place of nulls; without nulls, without a copy.

    Straight from its buffers: Arrow's own conversions to numpy import pandas, a sixth of a second.
    """
    kind = np.dtype(f"i{array.type.bit_width // 8}")
    if not len(array):
        return np.empty(0, kind)
    validity, data = array.buffers()
    values = np.frombuffer(data, kind, len(array), array.offset * kind.itemsize)
    if not array.null_count:
        return values
    valid = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[array.offset :][: len(array)]
    return np.where(valid.astype(np.bool_), values, default)


def arrow_integers(values: Ints) -> pa.Array:
    """Integers as an Arrow array: from their memory, since Arrow's own conversions import pandas."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def arrow_texts(texts: Sequence[str]) -> pa.Array:
    """Texts as an Arrow array, likewise."""
    import pyarrow as pa

    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def join(*columns: list[Ints], dtype: npt.DTypeLike = np.int64) -> Any:
    """The chunks of one or more columns as one array: copied once, into the type they are kept in."""
    chunks = [chunk for column in columns for chunk in column]
    return np.concatenate(chunks, dtype=dtype, casting="unsafe") if chunks else np.empty(0, dtype)


def rows_of(frame: Frame) -> Iterator[tuple[Any, ...]]:
    """The rows of a small table, its columns in the order of the schema."""
    columns = (join(column).tolist() if isinstance(column, list) else column.to_pylist() for column in frame.values())
    return zip(*columns, strict=True)


def distinct(values: Ints) -> Ints:
    """The distinct values, sorted; fast where equal values come in runs, as the IDs of threads do."""
    if not len(values):
        return values
    found: Ints = np.unique(values[np.append(True, values[1:] != values[:-1])])
    return found


def dense_codes(values: Ints) -> tuple[Ints, Ints]:
    """The distinct values, sorted, and the position of each value among them: ``np.unique`` without its sort."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low > _SPARSE * len(values) + 1_000_000:
        ids, codes = np.unique(values, return_inverse=True)
        return ids, codes
    present = np.zeros(high - low + 1, np.bool_)
    present[values - low] = True
    code_of = np.cumsum(present) - 1
    return np.flatnonzero(present)[: len(values)] + low, code_of[values - low]
