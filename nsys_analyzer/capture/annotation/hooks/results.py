"""What the hooks leave for the report: one JSON file, by the keys of a manifest, and a line for the user."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

#: Is replaced by the rank of the process in the name of a file that is each rank's own.
_OF_RANK = "%q{RANK}"


class Results:
    """The results of this process; those of the first rank are written, or each rank's where the file is its own.

    Attributes:
        is_measured: whether the time of the hooks is added up.
    """

    def __init__(self, path: str | None) -> None:
        self.is_measured = self._is_written = False
        rank = os.environ.get("RANK", "0")
        is_written = path is not None and (rank == "0" or _OF_RANK in path)
        self._path = Path(str(path).replace(_OF_RANK, rank)) if is_written else None
        self._notes: list[str] = []
        self._cost_ns = 0

    def say(self, message: str) -> None:
        """Says what could not be annotated, now and in the report."""
        print(f"nsys-analyze: {message}", file=sys.stderr)
        self._notes.append(message)

    def cost_begins(self) -> int:
        """The hooks begin to work; the result is for ``cost_ends``, 0 where that is not measured."""
        begun = time.perf_counter_ns() if self.is_measured else 0
        self.is_measured = False  # what is called inside is part of it
        return begun

    def cost_ends(self, begun: int) -> None:
        """The program goes on."""
        if begun:
            self._cost_ns += time.perf_counter_ns() - begun
            self.is_measured = True

    def write(self, steps: int, values: dict[str, Any]) -> None:
        """Writes what was found in so many steps; the file is complete or absent."""
        self._is_written = True
        if self._path is None:
            return
        told: dict[str, Any] = {"not_annotated": "; ".join(self._notes)} if self._notes else {}
        if steps:
            told["hooks_ms"] = self._cost_ns / steps / 1e6
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps({"timed_by": "hooks", **values, **told}), encoding="utf-8")
        unfinished.replace(self._path)

    def write_notes(self) -> None:
        """Writes what was said, where nothing was written."""
        if self._notes and not self._is_written:
            self.write(0, {})
