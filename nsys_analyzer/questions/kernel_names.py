"""The full name behind every short label."""

from __future__ import annotations

from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Column, Details, Paragraph, Section, Table


def answer(evidence: Evidence) -> Section:
    """A folded list: label, class, full name."""
    classes = {
        row.name: row.kernel_class
        for capture in evidence.measured
        for row in (capture.whole.kernels if capture.whole else ())
    }
    rows = tuple(
        (label, classes[name], name) for name, label in sorted(evidence.labels.items(), key=lambda item: item[1])
    )
    table = Table((Column("label", "code"), Column("class"), Column("full name", "code")), rows)
    folded = Details(f"{len(rows)} kernels", (table,))
    return Section("kernel_names", "Full kernel names", (folded if rows else Paragraph("None."),))
