"""The C++ attention: right on every shape, exact in its memory, and clear where it cannot be built."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402

from nsys_analyzer.experiments.variants import CPP_VARIANTS  # noqa: E402
from profiling_targets import attention_variants  # noqa: E402
from profiling_targets.attention_variants import cpp_attention as attention  # noqa: E402
from profiling_targets.harness import (  # noqa: E402
    NotHereError,
    allocations,
)

TILE = 64


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    """The extension, built once, on two threads; without a compiler these tests skip, with the reason."""
    try:
        attention("naive", *inputs(1, 1, 1, 1), False)
    except NotHereError as error:
        if "compile or load" in str(error):
            raise
        pytest.skip(str(error))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs(batch: int, heads: int, n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, n, d, generator=generator) for _ in range(3))
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention written out in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("implementation", CPP_VARIANTS)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 200), st.integers(1, 80)),
    causal=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 30.0]),  # large queries make weights of one and nothing
    seed=st.integers(0, 1000),
)
def test_right_on_any_shape(
    implementation: str, shape: tuple[int, int, int, int], causal: bool, scale: float, seed: int
) -> None:
    q, k, v = inputs(*shape, seed)
    found = attention(implementation, q * scale, k, v, causal)
    # A score of 30 · √80 · 4 ≈ 1,000 has an error of 1,000 · 6e-8 = 6e-5 in fp32, and so has e to its power.
    torch.testing.assert_close(
        found.double(), exact(q * scale, k, v, causal), rtol=2e-4, atol=2e-4 if scale > 1 else 1e-5
    )


@pytest.mark.parametrize("implementation", CPP_VARIANTS)
@pytest.mark.parametrize("n", [TILE - 1, TILE, TILE + 1, 4 * TILE])
def test_right_at_the_edges_of_tiles(implementation: str, n: int) -> None:
    for causal in (False, True):
        q, k, v = inputs(2, 2, n, 32)
        torch.testing.assert_close(
            attention(implementation, q, k, v, causal).double(), exact(q, k, v, causal), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("implementation", CPP_VARIANTS)
def test_the_last_query_alone_sees_the_last_key(implementation: str) -> None:
    q, k, v = inputs(1, 2, 130, 16)
    before = attention(implementation, q, k, v, True)
    k[:, :, -1], v[:, :, -1] = 9.0, 9.0
    after = attention(implementation, q, k, v, True)
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])
    assert not torch.equal(before[:, :, -1], after[:, :, -1])


@pytest.mark.parametrize("implementation", CPP_VARIANTS)
def test_refuses_what_it_cannot_read(implementation: str) -> None:
    q, k, v = inputs(1, 2, 8, 4)
    with pytest.raises(RuntimeError, match="fp32"):
        attention(implementation, q.double(), k.double(), v.double(), False)
    with pytest.raises(RuntimeError, match="contiguous"):
        attention(implementation, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), False)
    with pytest.raises(RuntimeError, match="one shape"):
        attention(implementation, q, k[:, :, :4].contiguous(), v, False)


@pytest.mark.parametrize("implementation", CPP_VARIANTS)
def test_memory_to_the_byte(implementation: str) -> None:
    n, heads, d, threads = 256, 2, 32, torch.get_num_threads()
    floats = {  # besides the output, 2·256·32 floats
        "naive": heads * n * n,
        "blocked": heads * n * n + threads * d * TILE,  # a tile of keys for each thread
        "fused": threads * n,  # the scores of a query for each thread
        "flash": threads * (d * TILE + TILE * TILE + 2 * TILE),  # tiles of keys and of scores, maxima and sums
    }
    q, k, v = inputs(1, heads, n, d)
    with allocations("cpu") as counted:
        attention(implementation, q, k, v, False)
    assert counted.peak_bytes == counted.total_bytes == 4 * (heads * n * d + floats[implementation])


def test_without_a_compiler_or_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    with pytest.raises(NotHereError, match="pip install ninja"):
        attention_variants._cpp_library.__wrapped__()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(NotHereError, match=r"no /nowhere/c\+\+\. Install g\+\+"):
        attention_variants._cpp_library.__wrapped__()


def test_source_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("#error this is no attention\n")
    monkeypatch.setattr(attention_variants, "_SOURCE", broken)
    monkeypatch.setattr(attention_variants, "_NAME", "nsys_analyze_broken")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(NotHereError, match=r"does not compile.*error: #error this is no attention.*with OpenMP"):
        attention_variants._cpp_library.__wrapped__()


def test_builds_outside_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert attention_variants._folder().parent == tmp_path  # a package folder may be read-only
    assert torch.__version__ in attention_variants._folder().name  # another PyTorch needs another build


def test_a_lock_of_a_killed_build_does_not_block(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    attention_variants._remove_stale_lock(lock)
    assert lock.exists()  # a build may be at work
    long_ago = time.time() - 601
    os.utime(lock, (long_ago, long_ago))
    attention_variants._remove_stale_lock(lock)
    assert not lock.exists()
