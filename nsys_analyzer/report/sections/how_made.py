"""How a report and its captures were made: the commands that were run, where they are known."""

from __future__ import annotations

import shlex

from nsys_analyzer.analysis.ranges.inference import FUNCTION_RANGES
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Block, Listing, Paragraph
from nsys_analyzer.text import Words, code, joined, phrase
from nsys_analyzer.trace.metadata import Recording

#: Kinds of events that nsys writes into its export, as its option calls them.
_TRACE_OPTION = {"Cuda": "cuda", "NvtxEvents": "nvtx"}
_ANNOTATED = "--pytorch=functions-trace"
_SHOWN = 3
_RUN = "nsys-analyze run"
_WIDTH = 96
_SAID = "What was run, as far as the captures say: {}{}."
_OPAQUE = (
    "To change: {} traced each CUDA graph as a whole, so that its kernels are unknown. `--cuda-graph-trace=node` "
    "traces them one by one."
)


def how_made(evidence: Evidence) -> tuple[Block, ...]:
    """The commands that were run, where known, else what the captures say; and the command of this report."""
    whole = evidence.command.startswith(_RUN)
    ran = dict.fromkeys(c.run.run for c in evidence.captures if c.run and c.run.run)
    runs = tuple(dict.fromkeys((*ran, evidence.command)) if whole else ran)
    captured = _captured(evidence)
    title = "# the captures, their timings and this report" if whole else "# the captures and their timings"
    parts = [*([(title, *runs)] if runs else []), *([captured] if captured else [])]
    parts += [] if whole or not evidence.command else [("# this report", evidence.command)]
    lines = tuple(line for part in parts for line in ("", *(row for one in part for row in _wrapped(one))))[1:]
    recorded = () if runs or captured else _recorded(evidence)
    commands = [Listing(lines, "commands")] if lines else []
    return (*recorded, *commands)


def _recorded(evidence: Evidence) -> list[Block]:
    """How the captures were made by their own account, and what to change where that hides kernels."""
    names_of: dict[Words, list[str]] = {}
    for capture in evidence.captures:
        if (text := _said(capture)) and capture.name not in names_of.setdefault(text, []):
            names_of[text].append(capture.name)
    said = [phrase("{} with {}", ", ".join(names), text) for text, names in names_of.items()]
    more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    blocks: list[Block] = [Paragraph(phrase(_SAID, joined("; ", said[:_SHOWN]), more))] if said else []
    if opaque := dict.fromkeys(capture.name for capture in evidence.captures if capture.whole and capture.whole.opaque):
        blocks.append(Paragraph(phrase(_OPAQUE, ", ".join(opaque))))
    return blocks


def _said(capture: CaptureSummary) -> Words:
    """The options of a recording as its export tells them, empty where it does not."""
    recording = capture.metadata.recording if capture.metadata else Recording()
    options = [_TRACE_OPTION[event] for event in sorted(recording.events) if event in _TRACE_OPTION]
    others = [event for event in recording.events if event not in _TRACE_OPTION]
    mode = recording.graph_trace or ("graph" if capture.whole and capture.whole.opaque else "")
    parts = (
        code(f"--trace={','.join(options)}") if options else "",
        f"events {', '.join(others)}" if others else "",
        code(f"--cuda-graph-trace={mode}") if mode in ("graph", "node") else "",
        phrase("`{}` (its ranges are there)", _ANNOTATED) if _is_annotated(capture) else "",
    )
    return joined(", ", [part for part in parts if part])


def _is_annotated(capture: CaptureSummary) -> bool:
    """Whether nsys itself wrote the ranges that the phases are inferred from."""
    by_nsys = capture.metadata is not None and capture.metadata.profiler == "nsys"
    return by_nsys and any(FUNCTION_RANGES in phase.range for phase in capture.phases)


def _wrapped(command: str) -> list[str]:
    """A command in lines that a page is wide enough for; comments and what is broken already stay."""
    if command.startswith("#") or command.endswith("\\") or len(command) <= _WIDTH:
        return [command]
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation mark without its other: no shell has run this, but a manifest may say so
        return [command]
    lines = [""]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) > _WIDTH:
            lines.append(" ")
        lines[-1] += f" {word}" if lines[-1] else word
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _captured(evidence: Evidence) -> tuple[str, ...]:
    """The command of the first capture that keeps it, and how many more have one of their own."""
    kept = [(c.title, c.run.profile_command or c.run.command) for c in evidence.captures if c.run and c.metadata]
    commands = [(title, command) for title, command in kept if command]
    if not commands:
        return ()
    title, command = commands[0]
    more = f", and {len(commands) - 1} more as in their manifest.json" if len(commands) > 1 else ""
    return f"# the capture {title}{more}", command
