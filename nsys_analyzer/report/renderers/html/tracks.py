"""Encodes the tracks of a report's captures as the data of a page: JSON, compressed by zlib, in base64."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nsys_analyzer.analysis.ranks.run import ParallelRun, RankFigures
from nsys_analyzer.analysis.steps.process import CAUSES
from nsys_analyzer.analysis.steps.tracks import IdleTrack, Stream, Tracks
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import CAUSE_WORDS
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.palette import CAUSE_COLORS, CLASS_COLORS
from nsys_analyzer.text import visible
from nsys_analyzer.trace.arrays import Ints

#: The columns that only the track of a stream has.
_STREAM_COLUMNS = ("phase", "module", "path", "wait", "thread")


def page_data(report: Report) -> tuple[frozenset[str], str]:
    """Returns the captures and runs on the timeline of a page, and its data; both are empty if no capture has tracks.

    The first line of the data belongs to all captures. Each further line belongs to one capture, and is decoded when
    that capture is shown.
    """
    captures = [(capture, capture.tracks) for capture in report.captures if capture.tracks]
    if not captures:
        return frozenset(), ""
    indexes = {(capture.name, tracks.global_pid): i for i, (capture, tracks) in enumerate(captures)}
    capture_views = [
        {"title": visible(capture.title), "parts": [{"capture": i, "label": "", "at": 0}]}
        for i, (capture, _) in enumerate(captures)
    ]
    run_views = [view for run in report.runs if (view := _run_view(run, indexes, [tracks for _, tracks in captures]))]
    shared = {
        "views": run_views + capture_views,
        "classes": CLASS_COLORS,
        "causes": {cause: {"color": CAUSE_COLORS[cause], "text": CAUSE_WORDS[cause]} for cause in CAUSES},
    }
    views = frozenset(str(view.get("name", view["title"])) for view in run_views + capture_views)
    parts = (shared, *(_capture_data(*pair, report.labels) for pair in captures))
    texts = (json.dumps(part, separators=(",", ":"), ensure_ascii=False, allow_nan=False) for part in parts)
    return views, "\n".join(base64.b64encode(zlib.compress(text.encode())).decode() for text in texts)


def _run_view(run: ParallelRun, indexes: dict[tuple[str, int], int], tracks: list[Tracks]) -> dict[str, Any] | None:
    """Returns the view of a run's captures below each other, or None if fewer than two have tracks.

    ``at`` of each part is the time in ns at which the time 0 of its capture is.
    """
    ranks: dict[int, RankFigures] = {}
    for rank in run.ranks:
        if (index := indexes.get((rank.capture, rank.process))) is not None:
            ranks.setdefault(index, rank)  # a process with several devices is one part
    if len(ranks) < 2:
        return None
    origins = [tracks[index].origin_ns - rank.shift_ns for index, rank in ranks.items() if rank.shift_ns is not None]
    aligned = len(origins) == len(ranks)
    offsets = [origin - min(origins) for origin in origins] if aligned else [0.0] * len(ranks)
    parts = [
        {"capture": index, "label": visible(rank.label), "at": round(offset)}
        for (index, rank), offset in zip(ranks.items(), offsets, strict=True)
    ]
    name = visible(run.name)
    note = "The clocks of these ranks are not aligned: each rank starts with its own first step."
    return {"title": f"{name}: {len(parts)} ranks", "name": name, "parts": parts, "note": "" if aligned else note}


def _capture_data(capture: CaptureSummary, tracks: Tracks, labels: Mapping[str, str]) -> dict[str, Any]:
    encoded_tracks = []
    for track in tracks.tracks:
        columns: dict[str, Any] = {"title": visible(track.title), "kind": track.kind}
        columns["start"] = _differences(track.start)
        # Ranges, calls and lines are nested. All their boxes have the same color, so they have no group.
        keys = ["duration", "name", "depth" if track.kind in ("ranges", "calls", "lines") else "group"]
        if isinstance(track, Stream):
            keys += _STREAM_COLUMNS
            if capture.step and capture.step.critical_path:
                columns["critical"] = _differences(np.flatnonzero(track.critical))
        elif isinstance(track, IdleTrack):
            keys.append("stack")
        encoded_tracks.append(columns | {key: getattr(track, key).tolist() for key in keys})
    return {
        "duration": tracks.duration_ns,
        "steps": tracks.steps,
        "on_cpu": tracks.on_cpu,
        "left_out": tracks.left_out,
        "names": list(map(visible, tracks.names)),
        "labels": [visible(labels.get(name, "")) for name in tracks.names],
        "groups": tracks.groups,
        "phases": list(map(visible, tracks.phases)),
        "modules": list(map(visible, tracks.modules)),
        "paths": list(map(visible, tracks.paths)),
        "usual": {
            f"{row.cause} {visible(row.range or '')}": visible(f"{row.lines[0].place} in {row.lines[0].function}")
            for row in (capture.step.idle_by_cause if capture.step else ())
            if row.lines
        },
        "stacks": [list(map(visible, stack)) for stack in tracks.stacks],
        "memory": {"time": _differences(tracks.memory[0]), "bytes": _differences(tracks.memory[1])},
        "tracks": encoded_tracks,
    }


def _differences(values: Ints) -> list[int]:
    """Returns the first value and the differences of adjacent values: small numbers, which compress well."""
    differences: list[int] = np.diff(values, prepend=np.int64(0)).tolist()
    return differences
