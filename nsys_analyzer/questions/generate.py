"""How to generate this file."""

from __future__ import annotations

from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Listing, Paragraph, Section


def answer(evidence: Evidence) -> Section:
    """The commands: capture, export, report."""
    return Section(
        "generate",
        "How to generate this file",
        (
            Listing(
                (
                    "# capture the steps between cudaProfilerStart and cudaProfilerStop",
                    "nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none \\",
                    "  --capture-range=cudaProfilerApi --cuda-graph-trace=node -o capture python train.py",
                    "nsys export --type sqlite capture.nsys-rep",
                    "",
                    "# this report",
                    evidence.command,
                ),
                "commands",
            ),
            Paragraph(
                "Every figure is of one measured instance of a phase, unless it says otherwise; instances inside a "
                "warm-up range are left out and counted. A kernel belongs to the NVTX ranges that were open when it "
                "was *launched*: those of its own thread, and for PyTorch's autograd threads those of the thread that "
                "waits for the backward pass."
            ),
        ),
    )
