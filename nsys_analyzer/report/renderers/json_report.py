"""A report as JSON, and what a comparison reads of one: schema version 1."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nsys_analyzer.analysis.steps.step import narrowed
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.errors import (
    RECORD_COMMAND,
    RECORD_GRAPH_NODES_COMMAND,
    RECORD_ON_GPU_COMMAND,
    CannotAnswerError,
    TraceError,
)
from nsys_analyzer.system.strict_json import decode_json
from nsys_analyzer.text import Text, plain

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun
    from nsys_analyzer.report.model import Report

SCHEMA_VERSION = 1
GENERATOR = "nsys-analyze"
#: What tells a capture from others, and how it ended.
_IDENTITY = ("name", "process", "pid", "rank", "source", "status", "message", "gpu")
#: Why the steps of captures are as long as they are; their modules.
STEPS = (*_IDENTITY, "limits", "step", "findings", "findings_missing", "warnings")
MODULES = (*_IDENTITY, "modules")
#: Ranks without a capture that are listed at most: a manifest may claim a million of them.
_MAX_MISSING_RANKS = 1_000
#: The generator stands so near to the start of a report's JSON.
_NEAR = 512
#: Half a surrogate pair, which stands for a byte that is not UTF-8. The group matches what only resembles it: an
#: escaped backslash, or a complete pair.
_HALF_PAIR = re.compile(r"(?P<whole>\\\\|\\ud[89ab]..\\ud[c-f]..)|\\ud[89a-f]..")
_GENERATOR = re.compile(rb'"generator":\s*"%b"' % GENERATOR.encode())


def render(report: Report, figures: Mapping[str, str]) -> str:
    """The report as one JSON document, without figures."""
    del figures
    return in_json(report_data(report))


def in_json(data: Any, *, indent: int | None = 1) -> str:
    """Returns a document as JSON; bytes of names that are not valid UTF-8 become U+FFFD, as JSON requires."""
    separators = None if indent else (",", ":")
    text = json.dumps(data, indent=indent, separators=separators, allow_nan=False) + "\n"
    return _HALF_PAIR.sub(lambda match: match["whole"] or r"\ufffd", text)


def report_data(report: Report) -> dict[str, Any]:
    """A report as plain data; times are those of one instance, shares are fractions."""
    benches = [
        {
            "name": bench.name,
            "runs": list(bench.commands),
            "rows": [row.written() for row in bench.rows],
        }
        for bench in report.benches
    ]
    return {**captures_data(report.captures, report.runs), "benches": benches}


def captures_data(
    captures: Sequence[Summary], runs: Sequence[ParallelRun] = (), keys: Collection[str] = ()
) -> dict[str, Any]:
    """Captures as plain data, whole or with some ``keys`` alone, and the runs of ranks among them.

    The run with most ranks stands in the document itself.
    """
    data = [written(narrowed(capture, Summary)) for capture in captures]
    chosen = [{key: one[key] for key in keys} for one in data] if keys else data
    for capture, one in zip(captures, chosen, strict=True):
        if why := one.get("findings_missing"):
            hidden = capture.whole is not None and capture.whole.opaque
            one |= CannotAnswerError(
                why,
                RECORD_ON_GPU_COMMAND if capture.on_cpu else RECORD_GRAPH_NODES_COMMAND if hidden else RECORD_COMMAND,
            ).data
    document = {"schema_version": SCHEMA_VERSION, "generator": GENERATOR, "captures": chosen}
    if runs:
        first, *other_runs = (written(run) | {"missing_ranks": list(run.missing[:_MAX_MISSING_RANKS])} for run in runs)
        document |= {**first, "other_runs": other_runs}
    return document


def written(value: object) -> Any:
    """A figure, or what holds some, as plain data; of a text without its marks, code in backticks."""
    return msgspec.to_builtins(value, enc_hook=_in_backticks)


def _in_backticks(value: object) -> str:
    if isinstance(value, Text):
        return plain(value, "`")
    raise NotImplementedError


def is_report(path: Path) -> bool:
    """Whether a file is the JSON of a report."""
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return _GENERATOR.search(file.read(_NEAR)) is not None


def read_report(path: Path) -> tuple[Summary, ...]:
    """The captures of a report's JSON.

    Raises:
        TraceError: it is damaged, or of another version, which kept other figures.
    """
    remedy = f"Write it again: nsys-analyze report CAPTURE --format json -o {path.name}"
    try:
        document = decode_json(path.read_bytes())
        captures = msgspec.convert(document, _Document, dec_hook=lambda _, value: value).captures
    except msgspec.ValidationError as error:
        raise TraceError(f"{path} lacks what a comparison needs ({error})", remedy) from error
    except ValueError as error:
        raise TraceError(f"{path} cannot be read: {error}", remedy) from error
    for phase in (phase for capture in captures for phase in capture.phases):
        if phase.instances and not (phase.wall_values_ms and phase.busy_values_ms):
            raise TraceError(f"{path} has instances of the phase {phase.phase} without a time", remedy)
    return captures


class _Document(msgspec.Struct):
    """What is read of a report's JSON."""

    captures: tuple[Summary, ...]
