"""Kernel classes: every rule by its example, and names from captures and from public profiles."""

from __future__ import annotations

import re

import pytest

from nsys_analyzer.analysis.kernels.class_rules import CLASSES, OTHER, RULES, UNKNOWN, Rule
from nsys_analyzer.analysis.kernels.classes import classify, demangle, find_rule
from tests.support.cases import read_names

#: Each name with its class.
NAMES = [*read_names("kernel_classes"), (OTHER, "")]


@pytest.mark.parametrize(("kernel_class", "name"), NAMES)
def test_name_is_of_its_class(kernel_class: str, name: str) -> None:
    assert classify(name) == kernel_class


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kernel_class}-{rule.example[:30]}")
def test_example_is_decided_by_its_own_rule(rule: Rule) -> None:
    assert find_rule(rule.example) is rule
    assert classify(rule.example) == rule.kernel_class


def test_every_class_has_a_line_in_the_glossary_and_a_rule() -> None:
    assert {rule.kernel_class for rule in RULES} | {OTHER, UNKNOWN} == set(CLASSES)
    assert all(row.meaning.endswith(".") and "\n" not in row.meaning for row in CLASSES.values())


def test_patterns_are_distinct_and_compile() -> None:
    assert len({rule.pattern for rule in RULES}) == len(RULES)
    assert all(re.compile(rule.pattern) for rule in RULES)


def test_mangled_name_is_written_out() -> None:
    assert demangle("_ZN2at6native13reduce_kernelILi512ELi1EEEvT1_") == "at::native::reduce_kernel<512, 1>"
    assert demangle("_ZN12_GLOBAL__N_14copyINS_3RowELb1EEEvPKf") == "(anonymous namespace)::copy<Row, 1>"
    # An enumerator's value is no length, and neither is the 16 of bfloat16 (DF16b) or of a back reference (S16_).
    assert demangle("_ZN1a1fILNS_4ModeE3EDF16bLi7ES16_3RowEvT_") == "a::f<Mode, 7, Row>"
    assert demangle("_Z9my_kernelPf") == "my_kernel"
    assert demangle("_attn_fwd") == "_attn_fwd"


@pytest.mark.parametrize(
    ("name", "kernel_class"),
    [
        ("triton_poi_fused" + "_slice_scatter_select_copy__to_copy_index_put" * 40 + "_zz_3", "elementwise"),
        ("triton_poi_fused" + "_native_layer_norm_view_native_batch_norm" * 40 + "_zz_3", "elementwise"),
        ("loop" + "_dynamic_slice_update_dynamic_update_slice" * 40 + "_fusion", "elementwise"),
        ("a::" * 2000 + "f<" + "x" * 20000, OTHER),
    ],
    ids=["moves", "norms", "xla", "namespaces"],
)
def test_long_names_are_read_without_backtracking(name: str, kernel_class: str) -> None:
    assert classify(name) == kernel_class
