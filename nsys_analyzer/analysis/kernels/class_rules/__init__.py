"""The table behind :func:`nsys_analyzer.analysis.kernels.classes.classify`: one row a rule, the first match wins.

A new class or rule is one row of the module of its source: pattern, class, and a real kernel name that shows it.
"""

from __future__ import annotations

from nsys_analyzer.analysis.kernels.class_rules.compilers import COMPILED_RULES
from nsys_analyzer.analysis.kernels.class_rules.libraries import LIBRARY_RULES
from nsys_analyzer.analysis.kernels.class_rules.operators import OPERATOR_RULES
from nsys_analyzer.analysis.kernels.class_rules.rule import Rule

__all__ = ["RULES", "Rule"]

RULES: tuple[Rule, ...] = COMPILED_RULES + OPERATOR_RULES + LIBRARY_RULES
