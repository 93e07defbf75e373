"""Tests what the hooks write down about a kernel of torch.compile: its buffers, and which of them it reads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from nsys_analyzer.analysis.operators.costs import Cost, estimate_cost
from nsys_analyzer.capture.hooks.operators import OperatorStep
from nsys_analyzer.trace.operator_calls import Tensor, read_operator_calls


def test_buffers_of_a_compiled_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``buf0 += a; buf1 = buf0 · 2``: the kernel reads and writes ``buf0``, reads ``a``, and writes ``buf1``."""

    class CachingAutotuner:
        fn = SimpleNamespace(
            __name__="triton_poi_fused_add_mul_0", arg_names=["in_out_ptr0", "in_ptr0", "out_ptr0", "xnumel", "XBLOCK"]
        )

        def run(self, *arguments: object, stream: int) -> None:
            """Launches nothing."""

    heuristics = ModuleType("torch._inductor.runtime.triton_heuristics")
    heuristics.CachingAutotuner = CachingAutotuner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, heuristics.__name__, heuristics)
    modules = MagicMock(is_tracking=False, current_module=lambda: None, next_node=lambda: 0)
    path = tmp_path / "capture.operators.gz"
    step = OperatorStep(torch, modules, MagicMock(), str(path), lambda: "forward")
    buf0, a, buf1 = torch.zeros(4, 8), torch.zeros(8), torch.zeros(4, 8, dtype=torch.bfloat16)
    step.open()
    CachingAutotuner().run(buf0, a, buf1, 32, stream=0)
    step.close()
    CachingAutotuner().run(buf0, a, buf1, 32, stream=0)  # is not described any more
    _, calls = read_operator_calls(path)
    (signature,) = calls.signatures
    matrix, row = Tensor((4, 8), "float32", (8, 1), "cpu"), Tensor((8,), "float32", (1,), "cpu")
    half = Tensor((4, 8), "bfloat16", (8, 1), "cpu")
    assert signature == (
        "triton::triton_poi_fused_add_mul_0",
        (matrix, row, None, None),
        (matrix, half),
        ("", "", "", "32"),
    )
    assert [len(values) for values in (*calls.reads, *calls.writes)] == [2, 2]
    on_gpu = signature._replace(
        inputs=tuple(tensor and tensor._replace(device="cuda") for tensor in (matrix, row, None, None)),
        outputs=tuple(tensor._replace(device="cuda") for tensor in (matrix, half)),
    )
    assert estimate_cost(on_gpu) == Cost("elementwise", "fp32", 0.0, 4.0 * (32 + 8) + 4.0 * 32 + 2.0 * 32)
