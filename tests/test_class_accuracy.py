"""The kernel classes measured on thousands of kernels, and the measure itself."""

from __future__ import annotations

import pytest

from nsys_analyzer.analysis.kernels.class_rules import CLASSES, RULES
from nsys_analyzer.analysis.kernels.classes import classify
from tests.class_accuracy import Accuracy, Pair, accuracy, hold_out, read_pairs, signature

LEAST = 0.99
PAIRS = read_pairs()
HELD_OUT = hold_out(PAIRS)


def test_nearly_every_kernel_is_of_its_class() -> None:
    assert min(accuracy(HELD_OUT).shares) >= LEAST


@pytest.mark.parametrize("source", sorted({pair.source for pair in PAIRS}))
def test_whatever_it_was_recorded_with(source: str) -> None:
    assert min(accuracy([pair for pair in HELD_OUT if pair.source == source]).shares) >= LEAST


@pytest.mark.parametrize("kernel_class", sorted({pair.kernel_class for pair in PAIRS}))
def test_launches_of_every_class(kernel_class: str) -> None:
    _, launches, _ = accuracy([pair for pair in HELD_OUT if pair.kernel_class == kernel_class]).shares
    assert launches >= LEAST


def test_the_operator_is_needed() -> None:
    # By their names alone, the GEMMs of convolutions are matmul.
    by_name = accuracy(HELD_OUT, lambda pair: classify(pair.name) == pair.kernel_class)
    assert by_name.right_ns < accuracy(HELD_OUT).right_ns


def test_pairs_are_distinct_and_of_known_classes() -> None:
    assert len({(pair.name, pair.operator, pair.source) for pair in PAIRS}) == len(PAIRS)
    assert {pair.kernel_class for pair in PAIRS} <= set(CLASSES)
    assert {pair.evidence for pair in PAIRS} == {"operator", "hand"}


def test_a_kernel_that_a_rule_shows_is_left_out() -> None:
    shown = {signature(rule.example) for rule in RULES}
    assert not shown & {signature(pair.name) for pair in HELD_OUT}
    assert signature("void (anonymous namespace)::f<g(int), h>(float*)") == "void (anonymous namespace)::f<g(int), h>"
    assert signature("volta_sgemm_64x64_nt") == "volta_sgemm_64x64_nt"


def test_a_name_is_right_where_every_pair_of_it_is() -> None:
    # Two names: `a` is right in one pair of two, `b` in its only one. Launches 1 + 3 of 6, time 10 + 30 of 60.
    pairs = [
        Pair("a", "aten::mm", "matmul", "operator", 1, 10, "test"),
        Pair("a", "aten::conv2d", "convolution", "operator", 2, 20, "test"),
        Pair("b", "aten::mm", "matmul", "operator", 3, 30, "test"),
    ]
    found = accuracy(pairs, lambda pair: pair.kernel_class == "matmul")
    assert found == Accuracy(names=2, right_names=1, launches=6, right_launches=4, ns=60, right_ns=40)
    assert found.shares == pytest.approx((1 / 2, 4 / 6, 40 / 60))
