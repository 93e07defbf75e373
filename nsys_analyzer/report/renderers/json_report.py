"""Writes a report as JSON of schema version 1, and reads the captures of such a document for a comparison."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nsys_analyzer.analysis.steps.step import narrow
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
#: The keys that identify a capture and say how it ended.
_IDENTITY = ("name", "process", "pid", "rank", "source", "status", "message", "gpu")
#: The keys of documents on the steps and on the modules of captures.
STEP_KEYS = (*_IDENTITY, "limits", "step", "findings", "findings_missing", "warnings")
MODULE_KEYS = (*_IDENTITY, "modules")
#: The maximum number of listed ranks without a capture: a manifest may claim a million of them.
_MAX_MISSING_RANKS = 1_000
#: The generator is within this many bytes of the start of a report.
_GENERATOR_DISTANCE_BYTES = 512
#: Half a surrogate pair, which stands for a byte that is not valid UTF-8. The group matches text that must be kept: an
#: escaped backslash, or a complete pair.
_HALF_PAIR = re.compile(r"(?P<kept>\\\\|\\ud[89ab]..\\ud[c-f]..)|\\ud[89a-f]..")
_GENERATOR = re.compile(rb'"generator":\s*"%b"' % GENERATOR.encode())


def render(report: Report, figures: Mapping[str, str]) -> str:
    """Returns the report as a JSON document, without figures."""
    del figures
    return in_json(report_data(report))


def in_json(data: Any, *, indent: int | None = 1) -> str:
    """Returns a document as JSON; bytes of names that are not valid UTF-8 become U+FFFD, as JSON requires."""
    separators = None if indent else (",", ":")
    text = json.dumps(data, indent=indent, separators=separators, allow_nan=False) + "\n"
    return _HALF_PAIR.sub(lambda match: match["kept"] or r"\ufffd", text)


def report_data(report: Report) -> dict[str, Any]:
    """Returns a report as plain data: times are means of one instance, shares are fractions."""
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
    """Returns captures and runs of several ranks as plain data.

    Args:
        captures: the captures.
        runs: the runs, the one with the most ranks first. Its keys are those of the document itself.
        keys: the keys of a capture that are returned; all if it is empty.
    """
    documents = [to_plain_data(narrow(capture, Summary)) for capture in captures]
    if keys:
        documents = [{key: document[key] for key in keys} for document in documents]
    for capture, document in zip(captures, documents, strict=True):
        if reason := document.get("findings_missing"):
            hides_kernels = capture.whole is not None and capture.whole.opaque
            command = RECORD_GRAPH_NODES_COMMAND if hides_kernels else RECORD_COMMAND
            document |= CannotAnswerError(reason, RECORD_ON_GPU_COMMAND if capture.on_cpu else command).data
    document = {"schema_version": SCHEMA_VERSION, "generator": GENERATOR, "captures": documents}
    if runs:
        first, *other_runs = map(_run_data, runs)
        document |= {**first, "other_runs": other_runs}
    return document


def _run_data(run: ParallelRun) -> dict[str, Any]:
    """Returns a run as plain data, with its notes as sentences and not too many missing ranks."""
    from nsys_analyzer.report.sections.ranks import join_sentences  # captures of one rank need none of it

    missing = list(run.missing[:_MAX_MISSING_RANKS])
    return {**to_plain_data(run), "missing_ranks": missing, "run_notes": to_plain_data(join_sentences(run))}


def to_plain_data(value: object) -> Any:
    """Returns a value, or a struct of values, as plain data. A ``Text`` becomes a string with code in backticks."""
    return msgspec.to_builtins(value, enc_hook=_in_backticks)


def _in_backticks(value: object) -> str:
    if isinstance(value, Text):
        return plain(value, "`")
    raise NotImplementedError


def is_report(path: Path) -> bool:
    """Checks whether a file is a report as JSON."""
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return _GENERATOR.search(file.read(_GENERATOR_DISTANCE_BYTES)) is not None


def read_report(path: Path) -> tuple[Summary, ...]:
    """Reads the captures of a report as JSON.

    Raises:
        TraceError: the file is damaged, or was written by another version with other figures.
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
            raise TraceError(f"{path} has instances of the phase {phase.phase} without times", remedy)
    return captures


class _Document(msgspec.Struct):
    """The part of a report's JSON that is read."""

    captures: tuple[Summary, ...]
