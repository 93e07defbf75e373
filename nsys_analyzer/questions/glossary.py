"""The kernel classes that occur in the captures."""

from __future__ import annotations

from nsys_analyzer.analysis.classes import CLASSES
from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Column, Section, Table


def answer(evidence: Evidence) -> Section:
    """What each class seen means, with a kernel of the captures that shows it."""
    example: dict[str, str] = {}
    for capture in evidence.measured:
        for row in capture.whole.kernels if capture.whole else ():
            example.setdefault(row.kernel_class, row.name)
    rows = tuple(
        (name, meaning, evidence.labels[example[name]]) for name, meaning in CLASSES.items() if name in example
    )
    columns = (Column("class"), Column("what it is"), Column("a kernel seen", "code"))
    return Section("glossary", "Kernel classes seen", (Table(columns, rows),))
