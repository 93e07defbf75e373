"""The tracks of a report's captures as the data of a page: JSON, deflated, in base64."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nsys_analyzer.analysis.ranks.run import ParallelRun, RankFigures
from nsys_analyzer.analysis.steps.process import CAUSES
from nsys_analyzer.analysis.steps.tracks import IdleTrack, Stream, Track, Tracks
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import CAUSE_WORDS
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.palette import CAUSE_COLORS, CLASS_COLORS
from nsys_analyzer.text import visible
from nsys_analyzer.trace.arrays import Ints

#: What is known of a box of a stream alone.
_OF_STREAMS = ("phase", "module", "path", "wait", "thread")


def page_data(report: Report) -> tuple[frozenset[str], str]:
    """The captures and runs that the page's timeline shows, and the data of its script; empty where none has tracks.

    The data is a line of base64 for what belongs to all captures, and one for each of them, unpacked when it is shown.
    """
    captures = [(capture, capture.tracks) for capture in report.captures if capture.tracks]
    if not captures:
        return frozenset(), ""
    place = {(capture.name, tracks.global_pid): i for i, (capture, tracks) in enumerate(captures)}
    alone = [
        {"title": visible(one.title), "parts": [{"capture": i, "label": "", "at": 0}]}
        for i, (one, _) in enumerate(captures)
    ]
    together = [view for run in report.runs if (view := _together(run, place, [tracks for _, tracks in captures]))]
    shared = {
        "views": together + alone,
        "classes": CLASS_COLORS,
        "causes": {cause: {"color": CAUSE_COLORS[cause], "text": CAUSE_WORDS[cause]} for cause in CAUSES},
    }
    views = frozenset(str(view.get("name", view["title"])) for view in together + alone)
    return views, "\n".join(map(_packed, (shared, *(_capture(*one, report.labels) for one in captures))))


def _together(run: ParallelRun, place: dict[tuple[str, int], int], tracks: list[Tracks]) -> dict[str, Any] | None:
    """The captures of a run above each other, each with the moment in ns at which its own time 0 is."""
    known = [(place[one.capture, one.process], one) for one in run.ranks if (one.capture, one.process) in place]
    ranks: dict[int, RankFigures] = {}
    for index, one in known:
        ranks.setdefault(index, one)  # a process of several devices is there once
    if len(ranks) < 2:
        return None
    begins = [tracks[index].origin_ns - one.shift_ns for index, one in ranks.items() if one.shift_ns is not None]
    aligned = len(begins) == len(ranks)
    ahead = [begin - min(begins) for begin in begins] if aligned else [0.0] * len(ranks)
    parts = [
        {"capture": index, "label": visible(one.label), "at": round(at)}
        for (index, one), at in zip(ranks.items(), ahead, strict=True)
    ]
    name, note = visible(run.name), "The clocks of these ranks are not aligned: each begins with its own first step."
    return {"title": f"{name}: {len(parts)} ranks", "name": name, "parts": parts, "note": "" if aligned else note}


def _capture(capture: CaptureSummary, tracks: Tracks, labels: Mapping[str, str]) -> dict[str, Any]:
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
        "tracks": [dict(_columns(track, bool(capture.step and capture.step.critical_path))) for track in tracks.tracks],
    }


def _columns(track: Track, has_path: bool) -> Iterator[tuple[str, Any]]:
    yield "title", visible(track.title)
    yield "kind", track.kind
    yield "start", _differences(track.start)
    inside = _OF_STREAMS if isinstance(track, Stream) else ("stack",) if isinstance(track, IdleTrack) else ()
    if isinstance(track, Stream) and has_path:
        yield "critical", _differences(np.flatnonzero(track.critical))
    # Ranges, calls and lines are nested, and have no color of their own.
    track_columns = ("depth",) if track.kind in ("ranges", "calls", "lines") else ("group", *inside)
    for key in ("duration", "name", *track_columns):
        yield key, getattr(track, key).tolist()


def _differences(values: Ints) -> list[int]:
    """The first value, and from each to the next: small numbers, which pack well."""
    found: list[int] = np.diff(values, prepend=np.int64(0)).tolist()
    return found


def _packed(value: dict[str, Any]) -> str:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode())).decode()
