"""Where a value ends in a text of JSON, found without building it: by the brackets that stand outside of texts."""

from __future__ import annotations

import re

import numpy as np

_ESCAPED = re.compile(r"\\.", re.DOTALL)


class Extent:
    """The extent of an object, an array or a text, looked for in one piece of it after another."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        self._is_escaped = False

    def end_in(self, piece: str) -> int | None:
        """The number of characters in the next piece up to the value's end; None where it goes on behind the piece."""
        if not piece:
            return None
        plain = _ESCAPED.sub("__", "_" + piece[1:] if self._is_escaped else piece)
        self._is_escaped = plain.endswith("\\")
        codes = np.frombuffer(plain.encode("utf-32-le"), np.uint32)
        in_text = (np.cumsum(codes == ord('"')) + self._in_text) % 2 == 1  # from the opening quote on
        opens, closes = (np.isin(codes, [ord(one) for one in brackets]) & ~in_text for brackets in ("[{", "]}"))
        depth = self._depth + np.cumsum(opens.astype(np.int64) - closes)
        self._depth, self._in_text = int(depth[-1]), bool(in_text[-1])
        ends = np.flatnonzero((depth <= 0) & ~in_text)
        return int(ends[0]) + 1 if len(ends) else None
