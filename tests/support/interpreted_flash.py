"""The Triton kernels, run by Triton's interpreter on the CPU; ``test_flash_attention.py`` starts this in a process.

Triton decides when it is imported whether it interprets: the process of the other tests must not.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from profiling_targets.flash_attention import D_HEADS, flash_attention
from profiling_targets.tiled_attention import tiled_attention
from tests.support.attention_reference import TOLERATED, error, passes, random_inputs

assert os.environ.get("TRITON_INTERPRET") == "1", "run by tests/test_flash_attention.py"
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(scope="module", autouse=True)
def mended() -> Any:
    """Mends what Triton 3.6's interpreter gets wrong.

    It takes loop bounds from arrays of one number, which NumPy 2.4 refuses, and multiplies bf16 as the integers that
    hold its bits.
    """
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot_in_fp32(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang_tensor", patched)
        patches.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_fp32)
        yield


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(2, 150), st.sampled_from([16, 32])),
    dtype=DTYPES,
    layout=st.sampled_from(["plain", "packed", "mixed"]),
    causal=st.booleans(),
)
def test_random_shapes(shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str, causal: bool) -> None:
    inputs, out_grad = random_inputs(shape, dtype, layout)
    assert error(flash_attention, inputs, out_grad, causal) < TOLERATED[dtype]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [128, 130])  # every tile full, and two rows in the last one
@pytest.mark.parametrize("d_head", D_HEADS)
def test_every_width(d_head: int, length: int, causal: bool) -> None:
    inputs, out_grad = random_inputs((1, 1, length, d_head), torch.bfloat16)
    assert error(flash_attention, inputs, out_grad, causal) < TOLERATED[torch.bfloat16]


@pytest.mark.parametrize("causal", [False, True])
def test_like_its_twin_in_pytorch(causal: bool) -> None:
    inputs, out_grad = random_inputs((1, 2, 100, 16), torch.float32)
    for ours, twin in zip(
        *(passes(f, inputs, out_grad, causal) for f in (flash_attention, tiled_attention)), strict=True
    ):
        torch.testing.assert_close(ours, twin)


def test_a_single_token_is_its_value() -> None:
    inputs, out_grad = random_inputs((1, 1, 1, 16), torch.float32)
    out, dq, dk, dv = passes(flash_attention, inputs, out_grad, True)
    torch.testing.assert_close(out, inputs[2])  # its one weight is 1, whatever its score
    torch.testing.assert_close(dv, out_grad)
    torch.testing.assert_close((dq, dk), (torch.zeros_like(dq), torch.zeros_like(dk)), atol=1e-6, rtol=0)


def test_large_scores_do_not_overflow() -> None:
    (q, k, v), out_grad = random_inputs((1, 1, 70, 16), torch.float32)
    large = (q * 10, k * 10, v)  # scores of hundreds: e to the power of 89 is beyond fp32
    assert error(flash_attention, large, out_grad, True) < TOLERATED[torch.float32]


def test_a_gradient_that_takes_no_memory_of_its_own() -> None:
    inputs, _ = random_inputs((1, 2, 40, 16), torch.float32)
    ones: Tensor = torch.ones(()).expand(1, 2, 40, 16)  # as the gradient of a sum is
    assert error(flash_attention, inputs, ones, False) < TOLERATED[torch.float32]
