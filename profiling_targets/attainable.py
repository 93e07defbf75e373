"""Measures well-shaped operators of one kind: the kernel time of each, and the FLOPs and bytes of its shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nsys_analyzer.analysis.operators.attainable import find_classes
from nsys_analyzer.analysis.operators.costs import estimate_cost
from nsys_analyzer.capture.hooks.modules import Modules
from nsys_analyzer.capture.hooks.operators import OperatorStep
from nsys_analyzer.experiments.attainable import TARGET, AttainableCase, AttainableFigures, MeasuredOperator
from nsys_analyzer.trace.operator_calls import OPERATORS_SUFFIX, read_operator_calls
from profiling_targets.harness import main, range_functions, set_precision, synchronize


class Operators(NamedTuple):
    """Operators of one kind that differ in their precision and in their tensors."""

    kind: str
    precisions: Sequence[str]
    tensors: Sequence[Sequence[Tensor | tuple[int, ...]]]  # of each operator. A tuple is the shape of a random tensor.
    function: Callable[..., Any]  # is called with the tensors
    has_backward: bool = True  # whether the gradients of the function are measured, too
    channels_last: bool = False  # whether the channels of images and filters are stored together


#: For each precision: the type of the tensors, and the compute capability from which a GPU does not emulate it.
PRECISIONS = {
    "fp8": (torch.float8_e4m3fn, (8, 9)), "bf16": (torch.bfloat16, (8, 0)), "fp16": (torch.float16, (7, 0)),
    "tf32": (torch.float32, (8, 0)), "fp32": (torch.float32, (0, 0)),
}  # fmt: skip
FOUR, TWO = ("bf16", "fp16", "tf32", "fp32"), ("bf16", "fp32")
VECTORS = [(2**power,) for power in range(10, 30)]
ROWS = [(2**power // width, width) for power in range(14, 30, 2) for width in (1024, 4096)]
SIZES = [*((2**power,) * 3 for power in range(5, 14)), *product((512, 2048, 8192), repeat=3)]  # M, N, K
MATRICES = [((m, k), (n, k)) for m, n, k in SIZES]
BATCHES = [(8, 16, 128), (8, 16, 256), (8, 16, 512), (8, 16, 1024), (4, 16, 2048), (2, 16, 8192)]  # B, H, S
HEADS = [((*batch, d_head),) * 3 for batch in BATCHES for d_head in (64, 128)]
IMAGES = [(n, c, side, side) for n, c, side in (
    (4, 64, 28), (128, 64, 112), (128, 64, 56), (128, 256, 56), (128, 128, 28), (128, 512, 28), (128, 256, 14),
    (128, 512, 7), (128, 2048, 7), (16, 320, 64), (16, 640, 32), (16, 1280, 16),
)]  # fmt: skip
FILTERED = [(x, (x[1], x[1], size, size)) for x in IMAGES[::2] for size in (1, 3)]  # Searching algorithms takes long.
CHANNELS = [(x, x[1:2], x[1:2]) for x in IMAGES]
TOKENS = [(torch.randint(n, (count,)), (n, 1024)) for count in (16, 256, 4096, 65_536) for n in (256, 32_000, 128_000)]
LABELS = [(x, torch.randint(x[1], x[:1])) for x in ROWS]
PARAMETERS = [((d, d),) * n for n, d in ((4, 64), (20, 256), (4, 1024), (16, 1024), (64, 1024), (256, 1024))]
SCALED = [(*matrices, torch.ones(())) for matrices in MATRICES]
multiply_fp8 = partial(torch._scaled_mm, out_dtype=torch.bfloat16)
attend, attend_causally = F.scaled_dot_product_attention, partial(F.scaled_dot_product_attention, is_causal=True)
OPERATORS = (
    Operators("matmul", FOUR, MATRICES, F.linear, has_backward=False),
    Operators("matmul", ("fp8",), SCALED, lambda x, w, one: multiply_fp8(x, w.t(), one, one), has_backward=False),
    Operators("attention", ("bf16", "fp16", "fp32"), HEADS, attend),
    Operators("attention", ("bf16", "fp16", "fp32"), HEADS, attend_causally),
    Operators("convolution", FOUR, FILTERED, partial(F.conv2d, padding="same"), channels_last=True),
    Operators("elementwise", TWO, [(x, x) for x in VECTORS], torch.add, has_backward=False),
    Operators("copy", TWO, [(x,) for x in VECTORS], torch.clone, has_backward=False),
    Operators("norm", TWO, [(x, x[1:], x[1:]) for x in ROWS], lambda x, w, b: F.layer_norm(x, w.shape, w, b)),
    Operators("norm", TWO, [(x, x[1:]) for x in ROWS], lambda x, w: F.rms_norm(x, w.shape, w)),
    Operators("norm", TWO, CHANNELS, lambda x, w, b: F.batch_norm(x, None, None, w, b, True), channels_last=True),
    Operators("norm", TWO, CHANNELS, lambda x, w, b: F.group_norm(x, 32, w, b)),
    Operators("softmax", TWO, [(x,) for x in ROWS], partial(torch.softmax, dim=-1)),
    Operators("softmax", TWO, [(x,) for x in ROWS], partial(torch.log_softmax, dim=-1)),
    *(Operators("reduction", TWO, [(x,) for x in ROWS], partial(torch.sum, dim=d), False) for d in (0, 1, (0, 1))),
    Operators("reduction", TWO, [(x,) for x in IMAGES], partial(F.max_pool2d, kernel_size=3), channels_last=True),
    Operators("embedding", TWO, TOKENS, F.embedding),
    Operators("cross entropy", TWO, LABELS, F.nll_loss),
    Operators("optimizer", TWO, PARAMETERS, lambda *x: torch._foreach_add_(x, 1.0), has_backward=False),
)


def measure(case: AttainableCase, figures: AttainableFigures) -> None:
    """Measures the operators of a kind whose tensors are small enough. A CPU measures all precisions but fp8."""
    torch.set_default_device(case.device)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 4  # A search among all algorithms takes minutes.
    capability = torch.cuda.get_device_capability() if case.device == "cuda" else (8, 0)
    figures.operators = []
    for kind, precisions, tensors_of_operators, function, has_backward, channels_last in OPERATORS:
        for precision, tensors in product(precisions, tensors_of_operators):
            dtype, least_capability = PRECISIONS[precision]
            size = max(math.prod(x) for x in tensors if isinstance(x, tuple)) * dtype.itemsize
            if kind != case.kind or capability < least_capability or size > case.max_mib * 2**20:
                continue
            set_precision(precision)
            torch.backends.cudnn.allow_tf32 = precision == "tf32"
            arguments = [x.to(case.device) if isinstance(x, Tensor) else torch.randn(x).to(dtype) for x in tensors]
            if channels_last:
                arguments = [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in arguments]
            shapes = " · ".join("×".join(map(str, x.shape)) for x in arguments[:2])
            forward = partial(function, *arguments)
            figures.operators.append(measure_operator(forward, shapes, precision, case))
            if has_backward:
                inputs = [x.requires_grad_() for x in arguments if x.is_floating_point()]
                output = forward()
                backward = partial(torch.autograd.grad, output, inputs, torch.randn_like(output), retain_graph=True)
                figures.operators.append(measure_operator(backward, shapes, precision, case))


def measure_operator(
    function: Callable[[], Any], shapes: str, precision: str, case: AttainableCase
) -> MeasuredOperator:
    """Measures the kernel time of a function, and describes the operator with the most work among those that it calls.

    On a CPU, the time is that of the operators.
    """
    with TemporaryDirectory() as folder:
        ranges: Any = SimpleNamespace(**dict(zip(("push", "pop", "start", "end"), range_functions(), strict=True)))
        step = OperatorStep(torch, Modules(torch, ranges), ranges, f"{folder}/{OPERATORS_SUFFIX}", lambda: "other")
        step.open()
        function()
        step.close()
        _, calls = read_operator_calls(Path(folder, OPERATORS_SUFFIX))
    costs = [(cost, x) for x in calls.signatures if (cost := estimate_cost(x, on_cpu=case.device == "cpu"))]
    cost, signature = max(costs, key=lambda pair: (pair[0].flops, pair[0].bytes))
    for _ in range(case.warmup_steps):
        function()
    synchronize(case.device)
    on_gpu = case.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(case.steps):
            function()
        synchronize(case.device)
    events = profiler.key_averages()
    total_us = sum(event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in events)
    return MeasuredOperator(
        find_classes(cost, signature)[0], signature.name, shapes, precision, cost.flops, cost.bytes,
        round(total_us / case.steps, 3),
    )  # fmt: skip


if __name__ == "__main__":
    main(TARGET, measure)
