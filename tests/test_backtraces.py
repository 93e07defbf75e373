"""What of PyTorch an API call was made for, by its backtrace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from nsys_analyzer.trace.trace import Trace
from tests.support.export import Export, global_pid, training_step

SYNC = "cudaStreamSynchronize_v3020"
#: Frames of a real backtrace, the innermost first.
ITEM = (
    "0x7f24a291556e",
    "cudaStreamSynchronize",
    "at::native::_local_scalar_dense_cuda(at::Tensor const&)",
    "at::_ops::_local_scalar_dense::call(at::Tensor const&)",
    "at::_ops::item::call(at::Tensor const&)",
    "torch::autograd::THPVariable_item(_object*, _object*)",
    "_PyEval_EvalFrameDefault",
)
EMPTY = (
    "cudaFree",
    "c10::cuda::CUDACachingAllocator::Native::emptyCache()",
    "THCPModule_emptyCache(_object*, _object*)",
)


def with_backtraces(*chains: Sequence[str], names: Sequence[str] = ("id", "symbol", "stackDepth")) -> Export:
    """A step, and behind it a call for each chain of frames."""
    export = training_step(Export().gpu())
    for number, chain in enumerate(chains):
        correlation = export.call(SYNC, 900 + number)
        export._rows["CUPTI_ACTIVITY_KIND_RUNTIME"][-1]["callchainId"] = number
        assert correlation == max(row["correlationId"] for row in export._rows["CUPTI_ACTIVITY_KIND_RUNTIME"])
        for depth, symbol in enumerate(chain):
            row = {"id": number, "symbol": export.string(symbol), "stackDepth": depth}
            export.add("CUDA_CALLCHAINS", **{name: row[name] for name in names})
    return export


@pytest.mark.parametrize(
    ("chain", "called"),
    [
        (ITEM, ["item"]),
        (EMPTY, ["emptyCache"]),
        (ITEM[:4], ["_local_scalar_dense"]),
        (ITEM[1:3], []),
        (("main",), []),
    ],
)
def test_the_outermost_function_of_pytorch(tmp_path: Path, chain: Sequence[str], called: list[str]) -> None:
    trace = Trace.load(with_backtraces(chain).write(tmp_path / "t.sqlite"))
    assert list(trace.callers.values()) == called


def test_calls_are_known_by_process_and_correlation(tmp_path: Path) -> None:
    trace = Trace.load(with_backtraces(ITEM, EMPTY).write(tmp_path / "t.sqlite"))
    last = int(trace.launches.correlation.max())
    assert trace.callers == {(global_pid(), last - 1): "item", (global_pid(), last): "emptyCache"}


def test_a_table_without_the_columns_says_nothing(tmp_path: Path) -> None:
    assert Trace.load(with_backtraces(ITEM, names=("id",)).write(tmp_path / "t.sqlite")).callers == {}
    assert Trace.load(training_step(Export()).write(tmp_path / "u.sqlite")).callers == {}
