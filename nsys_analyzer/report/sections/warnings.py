"""The warnings: read them before believing the figures."""

from __future__ import annotations

from nsys_analyzer.report.evidence import Evidence, shortened
from nsys_analyzer.report.model import Block, Details, Listing, Paragraph, Section
from nsys_analyzer.text import Words, phrase
from nsys_analyzer.trace.metadata import first_sentence, touches_no_figure


def answer(evidence: Evidence) -> Section:
    """The warnings of every capture; one that several share is said once."""
    captures_of: dict[Words, list[str]] = {}
    for capture in evidence.captures:
        # A message that its table shortened is given in full here.
        message = capture.message or ""
        cut = [message] if shortened(message) != message else []
        for warning in dict.fromkeys((*capture.warnings, *(" ".join(one.split()) for one in cut))):
            captures_of.setdefault(warning, []).append(capture.title)
    lines = [phrase("**{}** {}", ", ".join(names) + ":", warning) for warning, names in captures_of.items()]
    lines += [phrase("**{}** {}", evidence.timings + ":", note) for note in evidence.notes]
    block: Block = Listing(tuple(lines)) if lines else Paragraph("None.")
    return Section("warnings", "Warnings", (block, *_folded(evidence)))


def _folded(evidence: Evidence) -> tuple[Details, ...]:
    """The profilers' messages about other things than CUDA and NVTX, each once."""
    messages = [one for c in evidence.captures if c.metadata for one in c.metadata.diagnostics]
    texts = dict.fromkeys(one.text for one in messages if one.severity in (2, 3) and touches_no_figure(one.text))
    if not texts:
        return ()
    what = "message of the profiler that touches" if len(texts) == 1 else "messages of the profiler that touch"
    title = f"{len(texts)} {what} no figure"
    return (Details(title, (Listing(tuple(map(first_sentence, texts))),)),)
