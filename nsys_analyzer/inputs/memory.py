"""Adds the account of a GPU's memory to the summaries of a capture that has a memory snapshot beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.memory.accounting import account_memory
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.trace.memory_snapshot import find_snapshot_files, read_snapshot

_RANK = re.compile(r"_rank(\d+)\.")


def add_memory(summaries: tuple[CaptureSummary, ...], capture: Path) -> tuple[CaptureSummary, ...]:
    """Returns the summaries of a capture's processes with the accounts of their memory, each from its own snapshot.

    A snapshot without a rank in its name belongs to the only process. A snapshot that cannot be read is a warning.
    """
    snapshots = find_snapshot_files(capture) if capture.exists() else []
    for snapshot in snapshots:
        rank = match[1] if (match := _RANK.search(snapshot.name.removeprefix(capture.name))) else None
        rows = [row for row in summaries if (len(summaries) == 1 if rank is None else str(row.rank) == rank)]
        if not rows:
            continue
        try:
            described = replace(rows[0], memory=account_memory(read_snapshot(snapshot)))
        except NsysAnalyzerError as error:
            described = replace(rows[0], warnings=(*rows[0].warnings, Fact("unreadable", error=str(error))))
        summaries = tuple(described if row is rows[0] else row for row in summaries)
    return summaries
