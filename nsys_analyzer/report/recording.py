"""The runs that a comparison reads: of captures, or of a report's JSON, which holds the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from nsys_analyzer.analysis.comparison.recorded import Recorded
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.errors import TraceError
from nsys_analyzer.report.renderers.json_data import GENERATOR, recorded_data
from nsys_analyzer.system.strict_json import check_numbers, decode_json

#: The generator stands so near to the start of a report's JSON.
_NEAR = 512
_GENERATOR = re.compile(rb'"generator":\s*"%b"' % GENERATOR.encode())


def recorded(captures: Sequence[CaptureSummary]) -> tuple[Recorded, ...]:
    """What a comparison reads of captures: the very figures of their report's JSON."""
    return _runs(recorded_data(captures))


def is_report(path: Path) -> bool:
    """Whether a file is the JSON of a report."""
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return _GENERATOR.search(file.read(_NEAR)) is not None


def read_report(path: Path) -> tuple[Recorded, ...]:
    """The runs of a report's JSON.

    Raises:
        TraceError: it is damaged, or of a version that kept no times of single steps.
    """
    remedy = f"Write it again: nsys-analyze report CAPTURE --format json -o {path.name}"
    try:
        document = decode_json(path.read_bytes())
        check_numbers(document)
        return _runs(document)
    except msgspec.ValidationError as error:
        raise TraceError(f"{path} lacks what a comparison needs ({error})", remedy) from error
    except ValueError as error:
        raise TraceError(f"{path} cannot be read: {error}", remedy) from error


def _runs(document: Any) -> tuple[Recorded, ...]:
    return msgspec.convert(document, _Document).captures


class _Document(msgspec.Struct, frozen=True):
    captures: tuple[Recorded, ...]
