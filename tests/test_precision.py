"""The precision of matrix products: every rule by its example, and names from captures and public profiles."""

from __future__ import annotations

import pytest

from nsys_analyzer.analysis.kernels.classes import PRECISION_RULES, PrecisionRule, find_precision, find_precision_rule
from tests.support.cases import read_names


@pytest.mark.parametrize(("precision", "name"), read_names("precisions"))
def test_name_tells_its_precision(precision: str, name: str) -> None:
    assert (find_precision(name) or "unknown") == precision


@pytest.mark.parametrize("rule", PRECISION_RULES, ids=lambda rule: f"{rule.precision}-{rule.example[:40]}")
def test_example_is_decided_by_its_own_rule(rule: PrecisionRule) -> None:
    assert find_precision_rule(rule.example) is rule
    assert find_precision(rule.example) == rule.precision


def test_precisions_are_the_documented_ones() -> None:
    known = {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8"}
    assert {rule.precision for rule in PRECISION_RULES} - {None} == known
