"""The kernel classes that occur in the captures."""

from __future__ import annotations

from nsys_analyzer.analysis.kernels.class_rules import CLASSES
from nsys_analyzer.analysis.summary.statistics import KernelRow
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Column, Section, Table


def answer(evidence: Evidence) -> Section:
    """The meaning of each class seen, with its kernel of the most time."""
    longest: dict[str, KernelRow] = {}
    for row in evidence.kernel_rows:
        known = longest.setdefault(row.kernel_class, row)
        longest[row.kernel_class] = max(known, row, key=lambda one: one.ms_per_instance)
    rows = tuple(
        (name, meaning, evidence.labels[longest[name].name]) for name, meaning in CLASSES.items() if name in longest
    )
    columns = (Column("class"), Column("what it is"), Column("the one with the most time", "code"))
    return Section("glossary", f"{evidence.kernel.capitalize()} classes seen", (Table(columns, rows),) if rows else ())
