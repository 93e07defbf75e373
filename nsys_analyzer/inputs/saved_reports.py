"""Reads a report that was saved as JSON back into summaries."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.errors import TraceError
from nsys_analyzer.system.strict_json import decode_json

#: The value of the key ``generator`` in the JSON of a report.
GENERATOR = "nsys-analyze"
#: The key ``generator`` must occur within this many bytes from the start of the file.
_HEADER_BYTES = 512
_GENERATOR_KEY = re.compile(rb'"generator":\s*"%b"' % GENERATOR.encode())


def is_saved_report(path: Path) -> bool:
    """Returns whether a file is a report that was saved as JSON."""
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return _GENERATOR_KEY.search(file.read(_HEADER_BYTES)) is not None


def read_saved_report(path: Path) -> tuple[Summary, ...]:
    """Returns the summaries of the captures in a report that was saved as JSON.

    Raises:
        TraceError: the file is damaged, or was written by a version of the package whose reports lack needed figures.
    """
    remedy = f"Write it again: nsys-analyze report CAPTURE --format json -o {path.name}"
    try:
        document = decode_json(path.read_bytes())
        captures = msgspec.convert(document, _SavedReport, dec_hook=lambda _, value: value).captures
    except msgspec.ValidationError as error:
        raise TraceError(f"{path} lacks figures that a comparison needs ({error})", remedy) from error
    except ValueError as error:
        raise TraceError(f"{path} cannot be read: {error}", remedy) from error
    for phase in (phase for capture in captures for phase in capture.phases):
        if phase.instances and not (phase.wall_values_ms and phase.busy_values_ms):
            raise TraceError(f"{path} has instances of the phase {phase.phase} without times", remedy)
    return captures


class _SavedReport(msgspec.Struct):
    """The keys of a report's JSON that are read."""

    captures: tuple[Summary, ...]
