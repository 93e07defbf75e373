"""Writes a report as JSON of schema version 1. ``inputs.saved_reports`` reads such a document for a comparison."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.steps.step import narrow_to_base
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.errors import (
    RECORD_COMMAND,
    RECORD_GRAPH_NODES_COMMAND,
    RECORD_ON_GPU_COMMAND,
    CannotAnswerError,
)
from nsys_analyzer.inputs.saved_reports import GENERATOR
from nsys_analyzer.report.facts import say
from nsys_analyzer.text import Text, plain

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun
    from nsys_analyzer.report.model import Report

SCHEMA_VERSION = 1
#: The keys that identify a capture and state how its recording ended.
_IDENTITY_KEYS = ("name", "process", "pid", "rank", "source", "status", "message", "gpu")
#: The keys of documents on the steps and on the modules of captures.
STEP_KEYS = (*_IDENTITY_KEYS, "limits", "step", "findings", "findings_missing", "warnings")
MODULE_KEYS = (*_IDENTITY_KEYS, "modules")
#: The maximum number of operators in the account of a step.
_MAX_OPERATORS = 200
#: The maximum number of listed ranks without a capture: a manifest may claim a million of them.
_MAX_MISSING_RANKS = 1_000
#: Half a surrogate pair, which stands for a byte that is not valid UTF-8. The group matches text that must be kept: an
#: escaped backslash, or a complete pair.
_HALF_PAIR = re.compile(r"(?P<kept>\\\\|\\ud[89ab]..\\ud[c-f]..)|\\ud[89a-f]..")


def render(report: Report, figures: Mapping[str, str]) -> str:
    """Returns the report as a JSON document, without figures."""
    del figures
    return format_json(report_data(report))


def format_json(data: Any, *, indent: int | None = 1) -> str:
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
            "rows": [row.to_json_values() for row in bench.rows],
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
        runs: the runs, with the most ranks first. The keys of the first run become keys of the document.
        keys: the keys of a capture that are returned; all if it is empty.
    """
    documents = [
        to_plain_data(
            replace(
                narrow_to_base(capture, Summary),
                account=capture.account.with_longest(_MAX_OPERATORS) if capture.account else None,
            )
        )
        for capture in captures
    ]
    for document in documents:
        for key in ("counters", "memory"):
            if document[key] is None:
                del document[key]
    if keys:
        documents = [{key: document[key] for key in keys} for document in documents]
    for capture, document in zip(captures, documents, strict=True):
        if reason := document.get("findings_missing"):
            hides_kernels = capture.whole is not None and capture.whole.opaque
            command = RECORD_GRAPH_NODES_COMMAND if hides_kernels else RECORD_COMMAND
            document |= CannotAnswerError(reason, RECORD_ON_GPU_COMMAND if capture.on_cpu else command).data
    document = {"schema_version": SCHEMA_VERSION, "generator": GENERATOR, "captures": documents}
    if runs:
        first_run, *other_runs = map(_encode_run, runs)
        document |= {**first_run, "other_runs": other_runs}
    return document


def _encode_run(run: ParallelRun) -> dict[str, Any]:
    """Returns a run as plain data, with its notes as sentences and at most ``_MAX_MISSING_RANKS`` missing ranks."""
    # Imported here, because captures of one rank do not need it.
    from nsys_analyzer.report.sections.ranks import describe_joins

    missing_ranks = list(run.missing[:_MAX_MISSING_RANKS])
    return {**to_plain_data(run), "missing_ranks": missing_ranks, "run_notes": to_plain_data(describe_joins(run))}


def to_plain_data(value: object) -> Any:
    """Returns a value, or a struct of values, as plain data. A ``Text`` becomes a string with code in backticks."""

    def encode(leaf: object) -> str:
        """Returns a fact or a text with spans as plain text."""
        if isinstance(leaf, Fact):
            return plain(say(leaf), "`")
        if isinstance(leaf, Text):
            return plain(leaf, "`")
        raise NotImplementedError

    return msgspec.to_builtins(value, enc_hook=encode)
