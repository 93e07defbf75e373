"""Builds the attention variants of ``attention_cpu.cpp`` on first use, in PyTorch's folder for extensions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

from profiling_targets.harness import NotHereError

_NAME = "nsys_analyze_attention"
_SOURCE = Path(__file__).with_name("attention_cpu.cpp")
#: Without the two "no-", compilers do not vectorise the rounding inside an exponential. Neither changes a result.
_FLAGS = ("-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
#: The instructions that PyTorch's own kernels use here, not all that there are: a build runs on the same machines.
_INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
}
#: A build takes about twenty seconds; a lock of this age belongs to a process that was killed.
_STALE_SECONDS = 600


def attention(implementation: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Computes attention by one of ``CPP_VARIANTS``, forward only.

    Args:
        implementation: the variant.
        q, k, v: (B, H, N, d) each, fp32, on the CPU, contiguous.
        causal: whether a query sees no later key.

    Returns:
        The attended values, (B, H, N, d).

    Raises:
        NotHereError: there is no compiler, no ninja or no folder to build in, or the variants do not compile here.
    """
    attended: Tensor = getattr(_library(), implementation)(q, k, v, causal)
    return attended


@cache
def _library() -> Any:
    """Returns the compiled variants as operators."""
    compiler = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    if shutil.which(compiler) is None:
        raise NotHereError(
            f"The C++ attention needs a compiler, and there is no {compiler}", "Install g++, or name one in CXX"
        )
    if not cpp_extension.is_ninja_available():
        raise NotHereError("The C++ attention needs ninja to build", "pip install ninja")
    folder = _folder()
    instructions = _INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale_lock(folder / "lock")
        cpp_extension.load(
            _NAME,
            [str(_SOURCE)],
            extra_cflags=[*_FLAGS, *instructions],
            extra_ldflags=["-fopenmp"],
            build_directory=str(folder),
            is_python_module=False,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if "error:" in line), lines[0] if lines else "no reason given")
        raise NotHereError(
            f"The C++ attention does not compile or load here: {reason}",
            "It needs a C++ compiler with OpenMP, such as g++, and a folder to write to (TORCH_EXTENSIONS_DIR)",
        ) from error
    return getattr(torch.ops, _NAME)


def _folder() -> Path:
    """Returns where the build is kept: one folder for each PyTorch and each set of instructions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
    return Path(root) / f"{_NAME}-{torch.__version__}-{platform.machine()}-{capability}"


def _remove_stale_lock(lock: Path) -> None:
    """Removes the lock of a build that was killed, for which PyTorch would wait for ever."""
    if lock.exists() and time.time() - lock.stat().st_mtime > _STALE_SECONDS:
        lock.unlink(missing_ok=True)
