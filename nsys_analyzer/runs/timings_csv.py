"""Writes ``timings.csv`` from the manifests of a sweep: one row for each configuration and phase, and rank."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated, Any

import msgspec

from nsys_analyzer.analysis.transformer.models import mode_from_text
from nsys_analyzer.configuration import DIMENSIONS, OPTIONS
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.runs.manifest import MANIFEST, capture_name, stem_of_manifest
from nsys_analyzer.runs.rows import Times
from nsys_analyzer.runs.targets import PHASES
from nsys_analyzer.system.atomic_write import write_text
from nsys_analyzer.system.strict_json import decode_json

NAME = "timings.csv"
_STEPS, _SPREAD = ("warmup_steps", "steps"), ("std", "min", "median", "max")
_DESCRIBED = ("model", *DIMENSIONS, *(name for name, one in OPTIONS.items() if one.in_run and name not in _STEPS))
COLUMNS = (
    "capture", *_DESCRIBED, "rank", "phase", *_STEPS, "mean_ms", "std_ms", "min_ms", "median_ms", "max_ms",
    "peak_memory_bytes", "status", "message",
)  # fmt: skip
"""The columns, which ``report --csv`` reads; times in milliseconds over the measured steps."""


class _Timing(msgspec.Struct):
    """A run without a profiler, from a manifest: how it ended, and the times of each phase's steps in ms."""

    status: str
    times_ms: dict[str, Annotated[list[float], msgspec.Meta(min_length=1)]]
    message: str | None = None


def write_timings(folder: Path) -> Path:
    """Writes ``timings.csv`` of a sweep's folder, whole or not at all, and returns its path.

    A configuration that ran out of memory, failed or timed out has its phases with that status and no times. Of one
    capture of several ranks those of each are written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for path in sorted(folder.glob(f"[!.]*/*{MANIFEST}")):  # what is hidden is not finished
        manifest = _manifest(path)
        described = {key: manifest[key] for key in (*_DESCRIBED, *_STEPS) if key in manifest}
        described["capture"] = capture = capture_name(stem_of_manifest(path), path.parent)
        of_ranks = manifest.get("rank_timings") if manifest.get("capture") else None
        for rank, values in enumerate(of_ranks) if of_ranks else (("", manifest.get("timings")),):
            if not values:  # a program may time nothing
                continue
            try:
                timing = msgspec.convert(values, _Timing)
            except msgspec.ValidationError as error:
                problem = f"{capture}/manifest.json: its timings are none of a sweep's ({error})"
                raise ConfigurationError(problem, "Move the folder away, or run the configuration again") from error
            ended = {"rank": rank, "status": timing.status, "message": " ".join((timing.message or "").split())}
            for phase in timing.times_ms or PHASES.get(mode_from_text(manifest.get("mode", "")), ()):
                figures: dict[str, Any] = {}
                if timing.status == "ok":
                    times = Times.of(timing.times_ms[phase])
                    known = {"mean_ms": times.ms, **{f"{name}_ms": getattr(times, f"{name}_ms") for name in _SPREAD}}
                    figures = {key: f"{value:.6f}" for key, value in known.items() if value is not None}
                    figures["peak_memory_bytes"] = manifest.get("peak_memory_bytes") or ""
                writer.writerow({**described, **ended, "phase": phase, **figures})
    write_text(folder / NAME, text.getvalue())
    return folder / NAME


def has_rows(path: Path) -> bool:
    """Tells whether anything stands below the header: programs may time nothing."""
    return b"\n" in path.read_bytes().strip()


def is_from_a_sweep(path: Path) -> bool:
    """Tells whether a file of timings was written here, and may be written anew."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(",".join(COLUMNS[:2]))


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest, empty where the file is somebody else's: others call theirs so, too."""
    try:
        manifest = decode_json(path.read_bytes())
    except ValueError:
        return {}
    return manifest if isinstance(manifest, dict) else {}
