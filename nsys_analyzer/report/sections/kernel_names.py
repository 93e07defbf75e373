"""The full name behind every short label."""

from __future__ import annotations

from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Details, Listing, Paragraph, Section
from nsys_analyzer.text import phrase


def answer(evidence: Evidence) -> Section:
    """A folded list of the names that have a shorter label: label, class, full name."""
    classes: dict[str, set[str]] = {}
    for row in evidence.kernel_rows:
        classes.setdefault(row.name, set()).add(row.kernel_class)
    shortened = {name: label for name, label in evidence.labels.items() if label != name}
    in_order = sorted(shortened, key=lambda name: shortened[name])
    # No table: its columns would be as wide as the longest name, and a line of a list breaks anywhere.
    lines = tuple(phrase("`{}` ({}): `{}`", shortened[one], ", ".join(sorted(classes[one])), one) for one in in_order)
    folded = Details(f"{len(lines)} {evidence.kernel}s", (Listing(lines),))
    return Section("kernel_names", "Full kernel names", (folded if lines else Paragraph("Every name stands in full."),))
