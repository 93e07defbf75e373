"""The attention variants in PyTorch's operators: right with their gradients, and no N² where none is needed."""

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from torch import Tensor  # noqa: E402

from profiling_targets.attention_variants import IMPLEMENTATIONS, max_error  # noqa: E402
from profiling_targets.harness import allocations  # noqa: E402
from profiling_targets.variants import TOLERANCES  # noqa: E402

OPERATORS = [name for name in IMPLEMENTATIONS if name != "flash"]  # which needs a GPU, and has tests of its own
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def inputs(n: int, dtype: torch.dtype = torch.float32, d: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, d, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 128, 300])  # 300 is no multiple of a tile of 256 nor of a block of 128
@pytest.mark.parametrize("implementation", OPERATORS)
def test_output_and_gradients(implementation: str, n: int, causal: bool, precision: str) -> None:
    found = inputs(n, DTYPES[precision])
    exact = [x.detach().double().requires_grad_() for x in found]
    scores = exact[0] @ exact[1].mT / 32**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    expected = scores.softmax(-1) @ exact[2]
    out = IMPLEMENTATIONS[implementation](*found, causal)
    gradient = torch.randn(out.shape).to(out.dtype)
    assert max_error([out.detach()], [expected.detach()]) < TOLERANCES[precision]
    exact_gradients = torch.autograd.grad(expected, exact, gradient.double())
    assert max_error(torch.autograd.grad(out, found, gradient), exact_gradients) < TOLERANCES[precision]


def peak(implementation: str, n: int, training: bool) -> int:
    q, k, v = inputs(n)
    with allocations("cpu") as counted, torch.set_grad_enabled(training):
        out = IMPLEMENTATIONS[implementation](q, k, v, False)
        if training:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return counted.peak_bytes


@pytest.mark.parametrize("training", [False, True])
def test_fused_never_holds_all_scores(training: bool) -> None:
    scores = 2 * 3 * 1024**2 * 4
    assert peak("naive", 1024, training) >= 2 * scores
    # Of 128 rows at a time no more than ten copies of 1/8 of the scores, half of what naive holds at the very least.
    assert peak("fused", 1024, training) < peak("naive", 1024, training) / 2
    assert peak("blocked", 1024, training) >= 2 * scores
