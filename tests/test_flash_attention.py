"""The Triton kernels: in Triton's interpreter, in a process of its own, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")
if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need Triton: pip install triton", allow_module_level=True)

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from tests.support.attention_reference import TOLERATED, error, random_inputs  # noqa: E402

ROOT = Path(__file__).parent.parent
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; the interpreter runs here")
# PyTorch says so when the first product of a process is one of autograd's thread.
in_autograd = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")


@pytest.mark.nightly
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/support/interpreted_flash.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@pytest.mark.gpu
@needs_gpu
@in_autograd
@pytest.mark.parametrize(("length", "causal"), [(1024, True), (1111, True), (1111, False)])
@pytest.mark.parametrize(
    ("dtype", "d_head"),
    [
        *((torch.bfloat16, d_head) for d_head in (16, 32, 64, 128)),
        *((torch.float32, d_head) for d_head in (16, 32, 64, 128)),
        (torch.float16, 64),
    ],
)
def test_on_a_gpu(dtype: torch.dtype, d_head: int, length: int, causal: bool) -> None:
    from profiling_targets.flash_attention import flash_attention

    inputs, out_grad = random_inputs((2, 3, length, d_head), dtype, "packed", "cuda")
    assert error(flash_attention, inputs, out_grad, causal) < TOLERATED[dtype]


@pytest.mark.gpu
@needs_gpu
@in_autograd
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [4096, 16384])
@pytest.mark.parametrize("d_head", [64, 128])
def test_as_fast_as_sdpas_flash_attention(d_head: int, length: int, causal: bool) -> None:
    from triton.testing import do_bench

    from profiling_targets.flash_attention import flash_attention

    inputs, out_grad = random_inputs((1, 16, length, d_head), torch.bfloat16, device="cuda")
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        times = []
        for attend in (
            lambda: flash_attention(q, k, v, causal),
            lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
        ):
            out = attend()
            backward = partial(torch.autograd.grad, out, (q, k, v), out_grad, retain_graph=True)
            times.append((do_bench(attend, return_mode="median"), do_bench(backward, return_mode="median")))
    (forward, backward), (their_forward, their_backward) = times
    assert forward < 1.3 * their_forward
    assert backward < 1.3 * their_backward
