"""Tests that attention in PyTorch's operators is right with its gradients, and makes no needless N² tensor."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from profiling_targets.attention import TOLERANCES  # noqa: E402
from profiling_targets.attention_variants import IMPLEMENTATIONS, max_error  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def inputs(n: int, dtype: torch.dtype = torch.float32, d: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, d, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 128, 300])  # 300 is no multiple of a tile of 256 nor of a block of 128
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
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


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            self.numel = max(self.numel, getattr(tensor, "numel", int)())
        return made


@pytest.mark.parametrize("training", [False, True])
def test_fused_never_holds_all_scores(training: bool) -> None:
    def largest(implementation: str) -> int:
        q, k, v = inputs(1024)
        with Largest() as found, torch.set_grad_enabled(training):
            out = IMPLEMENTATIONS[implementation](q, k, v, False)
            if training:
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        return found.numel

    scores = 2 * 3 * 1024**2
    assert largest("naive") == largest("blocked") == scores
    assert largest("fused") == scores / 8  # 128 rows at a time
