from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from profiling_targets.tiled_attention import tiled_attention  # noqa: E402
from tests.support.attention_reference import TOLERATED, error, passes, random_inputs  # noqa: E402

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(2, 70), st.integers(1, 40)),
    tile=st.integers(1, 80),
    dtype=DTYPES,
    layout=st.sampled_from(["plain", "packed", "mixed"]),
    causal=st.booleans(),
)
def test_random_shapes_and_tiles(
    shape: tuple[int, int, int, int], tile: int, dtype: torch.dtype, layout: str, causal: bool
) -> None:
    inputs, out_grad = random_inputs(shape, dtype, layout)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return tiled_attention(q, k, v, causal, tile)

    assert error(attend, inputs, out_grad, causal) < TOLERATED[dtype]


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """The most numbers in any tensor that is made inside it."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return made


def test_the_square_of_scores_is_never_there() -> None:
    inputs, out_grad = random_inputs((1, 1, 256, 8), torch.float32)
    with Largest() as largest:
        passes(lambda *given: tiled_attention(*given, 32), inputs, out_grad, True)
    assert largest.numel == 256 * 8  # an input: a tile of scores is 32·32 = 1,024, all scores would be 65,536


def test_causal_attention_skips_what_is_ahead() -> None:
    """A key that no row of a tile may see is never looked at: what stands there does not matter."""
    (q, k, v), _ = random_inputs((1, 1, 64, 8), torch.float32)
    spoiled = v.clone()
    spoiled[..., 32:, :] = torch.nan
    out = tiled_attention(q, k, spoiled, True, 32)
    torch.testing.assert_close(out[..., :32, :], tiled_attention(q, k, v, True, 32)[..., :32, :])
