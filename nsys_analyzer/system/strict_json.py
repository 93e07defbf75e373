"""Reads JSON and TOML files that any program may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nsys_analyzer.errors import ConfigurationError

_Type = TypeVar("_Type")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: The largest integer up to which a float represents every integer exactly.
LARGEST_EXACT_INTEGER = 2**53


def decode_json(content: bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: the text is not valid JSON, or it contains a lone surrogate, NaN or infinity, or is nested too deep.
    """
    try:
        return msgspec.json.decode(content.removeprefix(_BYTE_ORDER_MARK))
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_toml(path: Path, kind: type[_Type], example: str) -> _Type:
    """Returns the content of a TOML file as a value of a type.

    Args:
        path: the file.
        kind: the type.
        example: an example of valid content, for the hint of the error.

    Raises:
        ConfigurationError: the file is not valid TOML, or its content does not have the type.
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=kind)
    except (ValueError, RecursionError) as error:  # wrong types, invalid TOML, bytes that are not text, deep nesting
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise ConfigurationError(
            f"{path} cannot be read: {reason}", f"Valid content is, for example: {example}"
        ) from error
