"""How to generate this file."""

from __future__ import annotations

from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Listing, Paragraph, Section

_BY_HAND = (
    "# capture the steps between cudaProfilerStart and cudaProfilerStop",
    "nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none \\",
    "  --capture-range=cudaProfilerApi --cuda-graph-trace=node -o capture python train.py",
    "nsys export --type sqlite capture.nsys-rep",
)
_RUN = "nsys-analyze run"


def answer(evidence: Evidence) -> Section:
    """The commands: capture, export, report; those that the runs left behind, where they did."""
    made, whole = _captured(evidence), evidence.command.startswith(_RUN)
    here = ("# the captures, their timings and this report" if whole else "# this report", evidence.command)
    lines = (*here, *([""] if made else []), *made) if whole else (*(made or _BY_HAND), "", *here)
    return Section(
        "generate",
        "How to generate this file",
        (
            Listing(lines, "commands"),
            Paragraph(
                "Every figure is of one measured instance of a phase, unless it says otherwise; instances inside a "
                "warm-up range are left out and counted. A kernel belongs to the NVTX ranges that were open when it "
                "was *launched*: those of its own thread, and for PyTorch's autograd threads those of the thread that "
                "waits for the backward pass."
            ),
        ),
    )


def _captured(evidence: Evidence) -> tuple[str, ...]:
    """The command of the first capture that keeps it, and how many more have one of their own."""
    commands = [(c.title, c.run.command) for c in evidence.captures if c.run and c.run.command and c.metadata]
    if not commands:
        return ()
    title, command = commands[0]
    more = f", and {len(commands) - 1} more as in their manifest.json" if len(commands) > 1 else ""
    return f"# the capture {title}{more}", command
