"""How to generate this file."""

from __future__ import annotations

import shlex

from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Listing, Paragraph, Section

_BY_HAND = (
    "# capture the steps between cudaProfilerStart and cudaProfilerStop",
    "nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none \\",
    "  --capture-range=cudaProfilerApi --cuda-graph-trace=node -o capture python train.py",
    "nsys export --type sqlite capture.nsys-rep",
)
_RUN = "nsys-analyze run"
_WIDTH = 96
_HOW_TO_READ = (
    "Every figure is of one measured instance of a phase, unless it says otherwise; instances inside a warm-up range "
    "are left out and counted. A kernel belongs to the NVTX ranges that were open when it was *launched*: those of its "
    "own thread, and for PyTorch's autograd threads those of the thread that waits for the backward pass."
)


def answer(evidence: Evidence) -> Section:
    """The commands: capture, export, report; those that the runs left behind, where they did."""
    whole = evidence.command.startswith(_RUN)
    ran = dict.fromkeys(c.run.run for c in evidence.captures if c.run and c.run.run)
    runs = tuple(dict.fromkeys((*ran, evidence.command)) if whole else ran)
    made = _captured(evidence)
    title = "# the captures, their timings and this report" if whole else "# the captures and their timings"
    parts = [
        *([(title, *runs)] if runs else []),
        *([made] if made else []),
        *([] if runs or made else [_BY_HAND]),
        *([] if whole else [("# this report", evidence.command)]),
    ]
    lines = tuple(line for part in parts for line in ("", *(row for one in part for row in _wrapped(one))))[1:]
    return Section("generate", "How to generate this file", (Listing(lines, "commands"), Paragraph(_HOW_TO_READ)))


def _wrapped(command: str) -> list[str]:
    """A command in lines that a page is wide enough for; comments and what is broken already stay."""
    if command.startswith("#") or command.endswith("\\") or len(command) <= _WIDTH:
        return [command]
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
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
