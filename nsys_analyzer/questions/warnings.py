"""What to know before believing the figures."""

from __future__ import annotations

from nsys_analyzer.questions.evidence import Evidence, shortened
from nsys_analyzer.report.model import Block, Listing, Paragraph, Section


def answer(evidence: Evidence) -> Section:
    """The warnings of every capture; one that several share is said once."""
    captures_of: dict[str, list[str]] = {}
    for capture in evidence.captures:
        # A message that its table shortened is given in full here.
        cut = [capture.message] if shortened(capture.message) != capture.message else []
        for warning in dict.fromkeys((*capture.warnings, *(" ".join(message.split()) for message in cut))):
            captures_of.setdefault(warning, []).append(capture.title)
    lines = [f"**{', '.join(names)}:** {warning}" for warning, names in captures_of.items()]
    lines += [f"**{evidence.timings}:** {note}" for note in evidence.notes]
    block: Block = Listing(tuple(lines)) if lines else Paragraph("None.")
    return Section("warnings", "Warnings", (block,))
