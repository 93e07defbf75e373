"""The array types of the columns."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
SmallInts: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]
#: One table in memory: column name to a numpy array (integers) or an Arrow string array (texts).
Frame: TypeAlias = dict[str, Any]
