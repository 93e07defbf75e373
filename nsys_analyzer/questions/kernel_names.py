"""The full name behind every short label."""

from __future__ import annotations

from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Column, Details, Paragraph, Section, Table


def answer(evidence: Evidence) -> Section:
    """A folded list of the names that have a shorter label: label, class, full name."""
    classes: dict[str, set[str]] = {}
    for row in evidence.kernel_rows:
        classes.setdefault(row.name, set()).add(row.kernel_class)
    shortened = {name: label for name, label in evidence.labels.items() if label != name}
    in_order = sorted(shortened, key=lambda name: shortened[name])
    rows = tuple((shortened[name], ", ".join(sorted(classes[name])), name) for name in in_order)
    table = Table((Column("label", "code"), Column("class"), Column("full name", "code")), rows)
    folded = Details(f"{len(rows)} {evidence.kernel}s", (table,))
    return Section("kernel_names", "Full kernel names", (folded if rows else Paragraph("Every name stands in full."),))
