"""Labels of kernels: examples from captures, and what holds for any set of names."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsys_analyzer.analysis.kernels.class_rules import RULES
from nsys_analyzer.analysis.kernels.labels import make_short_labels
from tests.support.cases import read_names

_VECTORIZED = "void at::native::vectorized_elementwise_kernel<(int)4, "
_MUL = "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>"

EXAMPLES = read_names("kernel_labels")


@pytest.mark.parametrize(("label", "name"), EXAMPLES)
def test_label_alone(label: str, name: str) -> None:
    assert make_short_labels([name]) == {name: label}


def test_kernels_of_one_label_are_told_apart_by_how_they_are_built_and_by_their_operands() -> None:
    tail = ", std::array<char *, (unsigned long)3>>(int, T2, T3)"
    unary = "at::native::BUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>"
    strided = (
        f"void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<{_MUL}>>()"
    )
    names = [_VECTORIZED + _MUL + tail, _VECTORIZED + unary + tail, strided]
    assert make_short_labels(names) == {
        names[0]: "elementwise mul float (vectorized 4, Binary)",
        names[1]: "elementwise mul float (vectorized 4, BUnary)",
        names[2]: "elementwise mul float (strided)",
    }


def test_what_nothing_tells_apart_is_numbered_in_the_order_of_the_full_names() -> None:
    # The same words in another order: the second name in sorted order gets the number.
    names = ["void a::f<int, long>(x)", "void a::f<long, int>(x)"]
    assert make_short_labels(names[::-1]) == {names[0]: "f", names[1]: "f #2"}


def test_unknown_and_empty_names_keep_a_label() -> None:
    assert make_short_labels(["", "  "]) == {"": "unnamed", "  ": "unnamed #2"}
    assert make_short_labels([]) == {}


def test_long_names_lose_their_ends() -> None:
    """Never their middle; of words that start alike the rest tells kernels apart."""
    names = [f"triton_red_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_{number}" for number in (10, 11)]
    assert make_short_labels(names[:1], limit=40) == {names[0]: "triton_red_fused__to_copy_add_embedding…"}
    cut = "triton_red_fused__to_copy_add_embed…"
    assert make_short_labels(names, limit=41) == {names[0]: f"{cut} (10)", names[1]: f"{cut} (11)"}


_PIECES = [
    "void ", "at::native::", "<unnamed>::", "f", "reduce_kernel<", "elementwise_kernel<", "(int)4", "float", ", ",
    "MulFunctor<", ">", "(", ")", "|", "`", "\n", " #2", "_Z", "N2at", "6native", "cutlass_80_", "128x64_8x4_nn",
]  # fmt: skip


def test_an_endless_name_costs_no_time() -> None:
    """A look for its last word from each of its characters would take minutes."""
    (label,) = make_short_labels([f"/{'0' * 200_000}!"]).values()
    assert label == f"/{'0' * 58}…"


_NAMES = st.one_of(
    st.sampled_from([rule.example for rule in RULES] + [name for _, name in EXAMPLES]),
    st.lists(st.sampled_from(_PIECES), max_size=12).map("".join),
    st.text(max_size=90),
)


@given(st.lists(_NAMES, max_size=25), st.integers(20, 80), st.randoms(use_true_random=False))
@example(["f", "f #2", "f<a, b>", "f<b, a>"], 60, None)
def test_labels_are_unique_short_printable_and_independent_of_order(
    names: list[str], limit: int, random: Random | None
) -> None:
    labels = make_short_labels(names, limit)
    assert set(labels) == set(names)
    assert len(set(labels.values())) == len(labels)
    for label in labels.values():
        assert label == label.strip() != ""
        assert not set(label) & set("|`\n\r")
        assert len(label.rpartition(" #")[0] or label) <= limit
    shuffled = list(names)
    if random:
        random.shuffle(shuffled)
    assert make_short_labels(shuffled, limit) == labels
