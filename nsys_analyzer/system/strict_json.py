"""JSON and TOML of unknown origin: what a later step cannot hold is refused when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nsys_analyzer.errors import ConfigurationError

_Type = TypeVar("_Type")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: The largest whole number that a float holds together with all below it.
LARGEST_EXACT_INTEGER = 2**53


def decode_json(content: bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: it is no JSON, or holds half a surrogate pair, NaN, infinity, or too deep a nesting.
    """
    try:
        return msgspec.json.decode(content.removeprefix(_BYTE_ORDER_MARK))
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_toml(path: Path, kind: type[_Type], example: str) -> _Type:
    """Returns what a TOML file says, as a type.

    Raises:
        ConfigurationError: it is no TOML, or says something else; the ``example`` is what it may say.
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=kind)
    except (ValueError, RecursionError) as error:  # of the types, of TOML, of bytes that are no text, of deep nesting
        why = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise ConfigurationError(f"{path} cannot be read: {why}", f"It may say: {example}") from error
