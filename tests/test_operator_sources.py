"""Operators with shapes from traces of PyTorch's profiler and of nsys: their signatures, and the work they launched."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from nsys_analyzer import Trace
from nsys_analyzer.analysis.operators.costs import estimate_cost
from nsys_analyzer.analysis.operators.matching import OperatorWork, find_operator_work
from nsys_analyzer.analysis.operators.recorded import find_kernel_types
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.trace.operator_calls import OperatorCalls, OperatorStep, Signature, Tensor
from nsys_analyzer.trace.operator_shapes import describe_linear_layer, parse_signature
from tests.conftest import DATA
from tests.support.export import Export, shared_copy
from tests.support.kineto import AUTOGRAD, MAIN, Kineto
from tests.support.program import work_of

RealCapture = Callable[[str], Path]
#: One step of a Llama-like model, without most of its layers: all gradients, and the optimizer.
LLAMA = DATA / "shapes_llama.pt.trace.json.gz"
TRITON = "triton_poi_fused_add_0"
MM = "nvjet_sm90_tst_128x128_64x6_2x1_v_bz_NNT"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"

NARROWED = ("bfloat16", "float32")


def find_work(trace: Trace | Path) -> OperatorWork | None:
    """The operators of the only process of a trace."""
    attributed = AttributedTrace(trace if isinstance(trace, Trace) else Trace.load(trace))
    return find_operator_work(*work_of(attributed, int(attributed.trace.operations.process[0])))


def work_from(trace: Trace | Path) -> OperatorWork:
    """The operators of the only process of a trace, which has some."""
    work = find_work(trace)
    assert work is not None
    return work


def operators_of(work: OperatorWork) -> list[str]:
    """The operator of each operation of the trace; empty if it is unknown."""
    names = [work.calls.signatures[i].name for i in work.calls.signature.tolist()]
    return [*map([*names, ""].__getitem__, work.call.tolist())]


def signature_of(work: OperatorWork, name: str) -> Signature:
    """The only signature of an operator."""
    (signature,) = {signature for signature in work.calls.signatures if signature.name == name}
    return signature


class Shaped(Kineto):
    """A trace of steps of 1,000 µs whose operators have shapes; each launches one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu()
        self.kernels = 0

    def call(
        self, name: str, ts: float, *tensors: tuple[int, ...] | list[tuple[int, ...]], kernel: str = ADD,
        tid: int = MAIN, sequence: int | None = None, launches: int = 1,
    ) -> Shaped:  # fmt: skip
        """An operator of 20 µs that launches kernels of 5 µs after 2 µs, on tensors in float32 or on lists."""
        types = ["TensorList" if isinstance(tensor, list) else "float" for tensor in tensors]
        lists = {"Input Dims": [*tensors], "Input type": types}
        node = {} if sequence is None else {"Sequence number": sequence}
        self.add("cpu_op", name, ts, 20, tid=tid, **lists, **node)
        for _ in range(launches):
            self.kernels += 1
            self.launch(self.kernels, ts + 2, tid=tid).kernel(kernel, self.kernels, ts + 30, 5)
        return self


def three_steps(fill: Callable[[Shaped, int], object]) -> Shaped:
    """Three steps [0, 900), [1000, 1900), [2000, 2900) µs with forward, backward and optimizer of 300 µs each."""
    trace = Shaped()
    for number in range(3):
        start = 1000 * number
        trace.range("step", start, 900)
        for position, phase in enumerate(("forward", "backward", "optimizer")):
            trace.range(phase, start + 300 * position, 300)
        fill(trace, start)
    return trace


# --- a real trace


def test_operators_of_a_real_trace_have_shapes_types_and_phases() -> None:
    work = work_from(LLAMA)
    products = [signature for signature in work.calls.signatures if signature.name == "aten::mm"]
    # The projection of the queries, the gradient of the head's weight, and that of the head's input.
    assert [tuple(x.shape for x in product.inputs if isinstance(x, Tensor)) for product in products] == [
        ((4096, 512), (512, 512)),
        ((32000, 4096), (4096, 512)),
        ((4096, 32000), (32000, 512)),
    ]
    assert products[0].inputs[1] == Tensor((512, 512), "bfloat16", (1, 512))
    assert products[0].outputs is None
    costs = [estimate_cost(product) for product in products]
    assert [cost and cost.flops for cost in costs] == [2 * 4096 * 512 * 512, *[2 * 32000 * 4096 * 512] * 2]
    phases = [work.calls.phases[phase] for phase in work.calls.phase.tolist()]
    assert {phase: phases.count(phase) for phase in phases} == {"forward": 9, "backward": 6, "optimizer": 2}


def test_the_kernels_of_a_loss_belong_to_the_loss_although_it_calls_fill() -> None:
    work = work_from(LLAMA)
    operations = Trace.load(LLAMA).operations
    names = [operations.names[code] for code in operations.name[operations.kernels]]
    fills = [
        operator
        for name, operator in zip(names, operators_of(work), strict=False)
        if "FillFunctor<float>" in name or "nll_loss_backward" in name
    ]
    assert fills == ["aten::nll_loss_backward"] * 4  # two kernels in each of two steps


def test_a_list_that_is_too_long_to_be_recorded_holds_the_tensors_with_gradients() -> None:
    work = work_from(LLAMA)
    parameters, gradients, *_ = lists = signature_of(work, "aten::_fused_adamw_").inputs[:4]
    assert parameters == gradients
    # Embedding and head 32000 x 512 each; in each of 6 layers q and o 512 x 512, k and v 128 x 512, three matrices
    # 1408 x 512 and two norms; the last norm.
    layer = 2 * 512 * 512 + 2 * 128 * 512 + 3 * 1408 * 512 + 2 * 512
    elements = [sum(math.prod(tensor.shape) for tensor in one) for one in lists if isinstance(one, tuple)]
    assert elements == [2 * 32000 * 512 + 6 * layer + 512] * 4
    assert signature_of(work, "aten::_foreach_add_").inputs[0] == ()  # the counters of the steps stay unknown


def test_the_account_of_a_real_trace_adds_up_to_the_step() -> None:
    (capture,) = gather([LLAMA]).captures
    account = capture.account
    assert account is not None
    assert account.expected_share > 0.95
    parts = sum(part.ms for part in account.parts)
    assert account.attainable_ms + parts == pytest.approx(account.step_ms, rel=1e-9)


# --- which operator launched an operation


def test_the_innermost_operator_with_shapes_is_the_operator_of_a_kernel(tmp_path: Path) -> None:
    def fill(trace: Shaped, start: int) -> None:
        trace.add("cpu_op", "aten::linear", start + 5, 40, **{"Input Dims": [[8, 4]], "Input type": ["float"]})
        trace.call("aten::mm", start + 10, (8, 4), (4, 2), kernel=MM)
        trace.add("cpu_op", "aten::inner", start + 11, 5)  # without shapes
        trace.add("cpu_op", "MmBackward0", start + 305, 50, tid=AUTOGRAD, **{"Input Dims": [[8, 2]]})
        trace.call("aten::t", start + 310, (8, 2), tid=AUTOGRAD)
        trace.launch(1000 + start, start + 340, tid=AUTOGRAD).kernel(ADD, 1000 + start, start + 345, 5)

    work = work_from(three_steps(fill).write(tmp_path / "t.json"))
    # Autograd's node is not an operator, so the kernel that it launches itself has none.
    assert operators_of(work) == ["aten::mm", "aten::t", ""] * 3


def test_an_operator_in_the_backward_pass_that_makes_a_node_recomputes(tmp_path: Path) -> None:
    def fill(trace: Shaped, start: int) -> None:
        trace.call("aten::add", start + 10, (8,), sequence=5)
        trace.add("cpu_op", "CheckpointFunctionBackward", start + 305, 200, tid=AUTOGRAD, **{"Sequence number": 5})
        trace.call("aten::add", start + 310, (8,), tid=AUTOGRAD, sequence=6)
        trace.call("aten::mul", start + 340, (8,), tid=AUTOGRAD)

    work = work_from(three_steps(fill).write(tmp_path / "t.json"))
    calls = work.calls
    assert [calls.phases[phase] for phase in calls.phase.tolist()] == ["forward", "recomputed", "backward"]
    assert calls.keeps_graph.tolist() == [True, True, False]
    assert calls.instance.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("reentrant", "recomputed"),
    [(None, []), *[(reentrant, ["aten::linear", "aten::gelu", "aten::linear"]) for reentrant in (False, True)]],
)
def test_a_checkpoint_of_pytorch_recomputes_its_forward_pass(
    reentrant: bool | None, recomputed: list[str], tmp_path: Path
) -> None:
    layer, head = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), nn.Linear(64, 64)
    batch = torch.randn(256, 64, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(3):
            hidden = layer(batch) if reentrant is None else checkpoint(layer, batch, use_reentrant=reentrant)
            head(hidden).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    work = work_from(tmp_path / "t.json")
    is_recomputed = work.calls.in_phase("recomputed")
    signatures = work.calls.signature[is_recomputed].tolist()
    assert [work.calls.signatures[index].name for index in signatures] == recomputed


def test_calls_are_those_of_the_step_with_the_median_number_of_operations(tmp_path: Path) -> None:
    def fill(trace: Shaped, start: int) -> None:
        trace.call("aten::add", start + 10, (start + 8,))
        if start == 2000:
            trace.call("aten::mul", start + 40, (8,), kernel="mul")

    work = work_from(three_steps(fill).write(tmp_path / "t.json"))
    # Numbers of operations: 1, 1, 2. The second of the sorted steps is the one at 1000 µs.
    assert [signature.inputs for signature in work.calls.signatures] == [(Tensor((1008,), "float32"),)]
    assert work.call.tolist() == [0, 0, 0, -1]  # the kernel of ``mul`` has no counterpart


def test_a_module_of_the_profiler_calls_its_operators(tmp_path: Path) -> None:
    def fill(trace: Shaped, start: int) -> None:
        trace.module("GPT_0", start + 5, 100).module("Linear_3", start + 8, 40)
        trace.call("aten::add", start + 10, (8,)).call("aten::add", start + 60, (8,))

    work = work_from(three_steps(fill).write(tmp_path / "t.json"))
    modules = [work.calls.modules[module] for module in work.calls.module.tolist()]
    assert modules == ["GPT/Linear[0]: Linear", "GPT: GPT"]


def test_a_copy_from_the_host_belongs_to_no_operator(tmp_path: Path) -> None:
    def fill(trace: Shaped, start: int) -> None:
        trace.call("aten::copy_", start + 10, (8,), (8,), launches=0)
        correlation = 1 + start
        trace.launch(correlation, start + 12, api="cudaMemcpyAsync")
        trace.copy("Memcpy HtoD (Pageable -> Device)", correlation, start + 20, 5, size=32)

    work = work_from(three_steps(fill).write(tmp_path / "t.json"))
    assert work.call.tolist() == [-1, -1, -1]


def test_a_compiled_kernel_is_an_operator_of_triton(tmp_path: Path) -> None:
    work = work_from(three_steps(lambda trace, start: trace.call(TRITON, start + 10, (8,))).write(tmp_path / "t.json"))
    assert operators_of(work) == [f"triton::{TRITON}"] * 3


def test_nodes_of_a_cuda_graph_belong_to_the_operators_of_their_capture(tmp_path: Path) -> None:
    export = Export().gpu().range("aten::add, op_id = 1, sizes = [[8, 4], []]", 100, 120).captured_node(110, node=5)
    for start in (1000, 2000, 3000):
        export.range("step", start, start + 900)
        replay = export.call("cudaGraphLaunch_v10000", start + 10)
        export.kernel(ADD, None, start + 20, start + 90, correlation=replay, node=5)
    work = work_from(export.write(tmp_path / "t.sqlite"))
    assert operators_of(work) == ["aten::add"] * 3


# --- the source


def test_the_step_of_the_hooks_precedes_shapes_of_a_profiler(tmp_path: Path) -> None:
    path = three_steps(lambda trace, start: trace.call("aten::add", start + 10, (8,))).write(tmp_path / "t.json")
    trace = Trace.load(path)
    none = np.zeros(1, np.int64)
    calls = OperatorCalls(none, none, none, none, none, none > 0, (Signature("aten::mul", ()),))
    steps = {int(trace.operations.process[0]): OperatorStep(calls, (ADD,), none)}
    work = work_from(replace(trace, operator_steps=steps))
    assert operators_of(work) == ["aten::mul"] * 3


def test_the_earliest_call_of_a_correlation_id_tells_whether_an_operation_is_late(tmp_path: Path) -> None:
    """The runtime call starts 2 ns before the step of the hooks, and the driver call inside it 2 ns later."""
    export = Export().range("nsys-analyze operators", 1000, 2000)
    correlation = export.call("cuLaunchKernel", 1002)
    export.kernel(ADD, 998, 1010, 1020, correlation=correlation).kernel(MM, 1100, 1110, 1120)
    trace = Trace.load(export.write(tmp_path / "t.sqlite"))
    assert [trace.operations.names[code] for code in trace.operations.name] == [ADD]


@pytest.mark.parametrize("name", ["mem_small256", "train_small256"])
def test_a_capture_without_shapes_has_no_operators(name: str, real_capture: RealCapture) -> None:
    assert find_work(real_capture(name)) is None


# --- parameters of optimizers


def adamw(trace: Shaped, start: int, groups: int = 1, names: tuple[str, ...] = ()) -> None:
    """Accumulates the gradients of (4, 2) and (3,), and updates an unknown list for each group of parameters."""
    for position, shape in enumerate(((4, 2), (3,))):
        node = {"Input Dims": [shape], "Input type": ["float"]}
        trace.add("cpu_op", "torch::autograd::AccumulateGrad", start + 310 + 9 * position, 5, tid=AUTOGRAD, **node)
    for name in names:
        trace.add("cpu_op", name, start + 500, 5)
    for group in range(groups):
        trace.call("aten::_fused_adamw_", start + 610 + 40 * group, *[[]] * 6)


@pytest.mark.parametrize(
    ("groups", "names", "known"),
    [(1, (), True), (1, ("c10d::allreduce_",), True), (2, (), False), (1, ("c10d::_reduce_scatter_base_",), False)],
)
def test_lists_of_an_optimizer_are_known_if_it_updates_all_parameters(
    groups: int, names: tuple[str, ...], *, known: bool, tmp_path: Path
) -> None:
    path = three_steps(lambda trace, start: adamw(trace, start, groups, names)).write(tmp_path / "t.json")
    work = work_from(path)
    parameters = (Tensor((4, 2), "float32"), Tensor((3,), "float32"))
    expected = (*[parameters] * 4, (), ()) if known else ((),) * 6
    assert signature_of(work, "aten::_fused_adamw_").inputs == expected


# --- signatures


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ("c10::BFloat16", "bfloat16"), ("c10::Half", "float16"), ("float", "float32"), ("double", "float64"),
        ("long int", "int64"), ("int", "int32"), ("unsigned char", "uint8"), ("bool", "bool"),
        ("c10::Float8_e4m3fn", "float8_e4m3fn"), ("a type of the future", ""),
    ],
)  # fmt: skip
def test_types_have_the_names_of_pytorch(written: str, dtype: str) -> None:
    text = json.dumps([[[2, 3]], [written], [[3, 1]], [""]])
    assert parse_signature("aten::mul", text) == Signature("aten::mul", (Tensor((2, 3), dtype, (3, 1)),), None, ("",))


def test_only_tensors_are_inputs() -> None:
    shapes, types, strides = [[8, 1], [], [[8, 4], [8, 4]]], ["float", "Scalar", "TensorList"], [[1, 1], [], []]
    assert parse_signature("aten::op", json.dumps([shapes, types, strides, ["", "2", ""]])) == Signature(
        "aten::op", (Tensor((8, 1), "float32", (1, 1)), None, (Tensor((8, 4)), Tensor((8, 4)))), None, ("", "2", "")
    )


@pytest.mark.parametrize(
    ("name", "sizes", "inputs"),
    [
        ("aten::mul", [[8, 4], []], (Tensor((8, 4)), None)),
        ("aten::cat", [[8, 4], [8, 2], []], ((Tensor((8, 4)), Tensor((8, 2))),)),
        # Two lists of two tensors, and scalars.
        ("aten::_foreach_mul_", [[8], [4], [8], [4], [], []], ((Tensor((8,)), Tensor((4,))),) * 2),
    ],
)
def test_nsys_writes_only_sizes(name: str, sizes: list[list[int]], inputs: tuple[Any, ...]) -> None:
    assert parse_signature(name, json.dumps([sizes])) == Signature(name, inputs)


@pytest.mark.parametrize(
    ("kernel", "types"),
    [
        (ADD, ("float32",)),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, c10::BFloat16, float>", ("bfloat16",)),
        # The target, then the source.
        ("at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}", NARROWED),
        (
            "at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda()::[lambda(float)], "
            "at::native::memory::LoadWithCast<(int)1>>", ("float32", ""),
        ),
        (MM, ()),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(const void *, const float *)", ()),
    ],
)  # fmt: skip
def test_the_name_of_a_kernel_shows_types(kernel: str, types: tuple[str, ...]) -> None:
    assert find_kernel_types(kernel) == types


#: The ranges of modules as vLLM and SGLang write them (``utils/nvtx_pytorch_hooks.py`` in both).
LAYER = (
    "{'Module': 'LlamaForCausalLM.model.layers.0.mlp.down_proj', 'TrainableParams': {'weight': [4096, 14336]}, "
    "'Inputs': [[32, 14336]]}"
)
ATTENTION = "{'Module': 'LlamaForCausalLM.model.layers.0.self_attn.attn', 'Inputs': [[32, 4096], [32, 1024]]}"


def test_the_ranges_of_a_serving_engine_tell_the_matmul_of_a_linear_layer(tmp_path: Path) -> None:
    """The collective of the layer, and attention, whose sequences no range describes, have no operator."""
    export = Export().gpu()
    for start in (0, 1_000, 2_000):
        export.range("step", start, start + 1_000).range(LAYER, start + 10, start + 100)
        export.kernel(MM, start + 20, start + 40, start + 140)
        export.kernel("vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", start + 30, start + 140, start + 150)
        export.range(ATTENTION, start + 110, start + 200).kernel("flash_fwd", start + 120, start + 150, start + 180)
    work = work_from(export.write(tmp_path / "t.sqlite"))
    assert operators_of(work) == ["module::linear", "", ""] * 3
    signature = signature_of(work, "module::linear")
    assert signature.inputs == (Tensor((32, 14336), "bfloat16"), Tensor((4096, 14336), "bfloat16"))
    cost = estimate_cost(signature)
    assert cost
    # Two bytes for each element of the input, the weight and the output.
    assert (cost.flops, cost.bytes) == (2 * 32 * 14336 * 4096, 2 * (32 * 14336 + 4096 * 14336 + 32 * 4096))
    assert work.calls.modules[work.calls.module[0]] == "LlamaForCausalLM/model.layers.0.mlp.down_proj: Module"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (LAYER, "[[[32,14336],[4096,14336]]]"),
        (LAYER.replace("[4096, 14336]", "[14336, 4096]"), "[[[32,14336],[4096,14336]]]"),  # stored transposed
        (LAYER.replace("[4096, 14336]", "[4096, 7168]"), ""),  # two values in a byte
        (LAYER.replace("Inputs", "Outputs"), ""),
        (LAYER.replace("[[32, 14336]]", "[[14336]]"), ""),  # the tokens of an embedding
        (ATTENTION, ""),
        (LAYER[:80], ""),
        ("{" * 10_000, ""),
    ],
)
def test_only_linear_layers_are_described(text: str, arguments: str) -> None:
    assert describe_linear_layer(text) == arguments


def test_types_of_a_real_capture_of_nsys_follow_from_its_kernels(real_capture: RealCapture) -> None:
    work = work_from(real_capture("functions_autograd_gpt2"))
    signatures = {signature.name: signature for signature in work.calls.signatures}
    # All matmuls are kernels ``nvjet_sm90_t…``, which multiply in bf16. The loss and the optimizer run in float32.
    product = signatures["aten::mm"].inputs[0]
    assert isinstance(product, Tensor)
    assert product.dtype == "bfloat16"
    assert signatures["aten::_log_softmax"].inputs[0] == Tensor((8192, 50304), "float32")
    # The loss converts the logits from bf16 to float32.
    logits = Tensor((8, 1024, 50304), "float32")
    target, source, _ = next(signature.inputs for signature in work.calls.signatures if logits in signature.inputs)
    assert (target, source) == (logits, Tensor((8, 1024, 50304), "bfloat16"))
    parameters = signatures["aten::_fused_adamw_"].inputs
    assert len(parameters) == 4  # parameters, gradients and two moments
    assert parameters[0] == parameters[3]


def test_a_shared_copy_keeps_shapes_and_types_and_no_texts(tmp_path: Path) -> None:
    trace = three_steps(lambda trace, start: trace.call("aten::add", start + 10, (8,)))
    for event in trace.events:
        if event["name"] == "aten::add":
            event["args"]["Concrete Inputs"] = ["[0, 1]", "my secret", "0.5", "True"]
    copy = shared_copy(trace.write(tmp_path / "t.json"), tmp_path / "copy.sqlite")
    signature = signature_of(work_from(copy), "aten::add")
    assert signature == Signature("aten::add", (Tensor((8,), "float32"),), None, ("[0, 1]", "", "0.5", "True"))
    assert b"my secret" not in copy.read_bytes()


# --- damaged arguments

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=9,
)
LISTS = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")


@given(damaged=st.dictionaries(st.sampled_from(LISTS), ANY_JSON, min_size=1))
def test_damaged_arguments_change_nothing_else(damaged: dict[str, Any]) -> None:
    def fill(trace: Shaped, start: int) -> None:
        trace.call("aten::add", start + 10, (8,)).call("aten::mul", start + 40, (8,), kernel="mul")

    trace = three_steps(fill)
    for event in trace.events:
        if event["name"] == "aten::mul":
            event["args"].update(damaged)
    with tempfile.TemporaryDirectory() as folder:
        work = work_from(trace.write(Path(folder) / "t.json"))
    assert operators_of(work) == ["aten::add", "aten::mul"] * 3
    assert signature_of(work, "aten::add").inputs == (Tensor((8,), "float32"),)


@given(text=st.text() | st.lists(ANY_JSON, max_size=5).map(json.dumps))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for name in ("aten::mul", "aten::cat", "aten::_foreach_add_"):
        signature = parse_signature(name, text)
        for argument in signature.inputs if signature else ():
            for tensor in (argument,) if isinstance(argument, Tensor) else argument or ():
                assert all(type(size) is int and size >= 0 for size in tensor.shape)
