"""Tests that the backtrace of an API call shows which part of PyTorch the call was made for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from nsys_analyzer.trace.trace import Trace
from tests.support.export import AUTOGRAD, MAIN, Export, global_pid, global_tid, training_step
from tests.support.program import Program

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
    assert list(trace.torch_callers.values()) == called


def test_calls_are_known_by_process_and_correlation(tmp_path: Path) -> None:
    trace = Trace.load(with_backtraces(ITEM, EMPTY).write(tmp_path / "t.sqlite"))
    last = int(trace.launches.correlation.max())
    assert trace.torch_callers == {(global_pid(), last - 1): "item", (global_pid(), last): "emptyCache"}


def test_a_table_without_the_columns_says_nothing(tmp_path: Path) -> None:
    assert Trace.load(with_backtraces(ITEM, names=("id",)).write(tmp_path / "t.sqlite")).torch_callers == {}
    assert Trace.load(training_step(Export()).write(tmp_path / "u.sqlite")).torch_callers == {}


def test_samples_of_the_cpu_during_a_call_tell_what_it_is_for(tmp_path: Path) -> None:
    """Of a call from 900 to 940 a sample at 905 is of item(); one at 950, or of another thread, tells nothing of it."""
    program = Program().step(0, 1)
    waited, beside = program.api(SYNC, 0.900, 0.940), program.api(SYNC, 0.945, 0.990, tid=AUTOGRAD)
    program.work((0.1, 0.101), (0.2, 0.3))
    for number, (at, tid, chain) in enumerate(
        ((905, MAIN, ITEM), (950, MAIN, ITEM), (948, AUTOGRAD, ("main",)), (910, AUTOGRAD, EMPTY))
    ):
        program.add(
            "COMPOSITE_EVENTS", id=number, start=at, globalTid=global_tid(tid), cpu=0, threadState=1, cpuCycles=9
        )
        for depth, symbol in enumerate(chain):
            row = {"id": number, "symbol": program.string(symbol), "module": 0, "stackDepth": depth}
            program.add("SAMPLING_CALLCHAINS", **row)
    trace = Trace.load(program.write(tmp_path / "t.sqlite"))
    assert {waited, beside} <= set(trace.launches.correlation.tolist())
    assert trace.torch_callers == {(global_pid(), waited): "item"}
