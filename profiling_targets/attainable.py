"""Measures well-shaped operators of one kind: the kernel time of each, and the FLOPs and bytes of its shapes.

Each function at the end of this file yields the operators of one kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from nsys_analyzer.analysis.operators import costs
from nsys_analyzer.analysis.operators.attainable import find_classes
from nsys_analyzer.experiments.attainable import TARGET, AttainableCase, AttainableFigures, MeasuredOperator
from nsys_analyzer.trace import operator_calls
from profiling_targets.harness import main, set_precision, synchronize

Work: TypeAlias = Callable[[], object]

#: The types of the random tensors. Matmuls in fp8 convert them.
_TYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32, "fp8": torch.bfloat16,
}  # fmt: skip
_MIB = 2**20
_VOCABULARY = 32_000
#: Tensors with rows of 1,024 and of 4,096 elements, from 16 Ki to 256 Mi elements.
_ROWS = tuple((2**power // width, width) for power in range(14, 30, 2) for width in (1024, 4096))


class Operator(NamedTuple):
    """An operator to measure.

    Attributes:
        precision: the precision in which it computes.
        shapes: the shapes of the random tensors that it needs.
        start: takes the tensors, and returns the function that is measured.
        channels_last: whether the tensors are images and filters whose channels are stored together.
    """

    precision: str
    shapes: tuple[tuple[int, ...], ...]
    start: Callable[[list[Tensor]], Work]
    channels_last: bool = False

    def prepare(self) -> Work:
        """Makes the tensors, and returns the function that is measured."""
        tensors = [torch.randn(shape, dtype=_TYPES[self.precision]) for shape in self.shapes]
        if self.channels_last:
            tensors = [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in tensors]
        return self.start(tensors)


def call(forward: Callable[..., object]) -> Callable[[list[Tensor]], Work]:
    """Returns how to start an operator that is called with the tensors."""
    return lambda tensors: partial(forward, *tensors)


def differentiate(forward: Callable[..., Tensor]) -> Callable[[list[Tensor]], Work]:
    """Returns how to start a backward operator: it computes the gradients of all tensors, from one forward pass."""

    def start(tensors: list[Tensor]) -> Work:
        output = forward(*(tensor.requires_grad_() for tensor in tensors))
        return partial(torch.autograd.grad, output, tensors, torch.randn_like(output), retain_graph=True)

    return start


def measure(case: AttainableCase, figures: AttainableFigures) -> None:
    """Measures the operators of a kind whose tensors are small enough."""
    torch.set_default_device(case.device)
    torch.backends.cudnn.benchmark = True
    operators = []
    for operator in OPERATORS[case.kind]():
        largest_bytes = max(map(math.prod, operator.shapes)) * _TYPES[operator.precision].itemsize
        if _is_available(operator.precision, case.device) and largest_bytes <= case.max_mib * _MIB:
            set_precision(operator.precision)
            torch.backends.cudnn.allow_tf32 = operator.precision == "tf32"
            operators.append(_measure_operator(operator.prepare(), operator.precision, case))
    figures.operators = operators


def _is_available(precision: str, device: str) -> bool:
    """Returns whether the device multiplies in a precision without emulating it."""
    if device == "cpu":
        return precision in ("fp32", "bf16")
    return torch.cuda.get_device_capability() >= {"fp8": (8, 9), "bf16": (8, 0), "tf32": (8, 0)}.get(precision, (0, 0))


def _measure_operator(work: Work, precision: str, case: AttainableCase) -> MeasuredOperator:
    """Measures the operator with the most work among those that a function calls."""
    with _Describing() as described:
        work()
    pairs = [(cost, signature) for signature in described.signatures if (cost := costs.estimate_cost(signature))]
    cost, signature = max(pairs, key=lambda pair: (pair[0].flops, pair[0].bytes))
    for _ in range(case.warmup_steps):
        work()
    synchronize(case.device)
    on_gpu = case.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(case.steps):
            work()
        synchronize(case.device)
    events = profiler.key_averages()
    total_us = sum(event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in events)
    tensors = [x for argument in signature.inputs if argument for x in _flatten(argument)]
    shapes = " · ".join("×".join(map(str, x.shape)) for x in tensors[:2])
    return MeasuredOperator(
        find_classes(cost, signature)[0], signature.name, shapes, precision, cost.flops, cost.bytes,
        round(total_us / case.steps, 3),
    )  # fmt: skip


class _Describing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the signatures of the operators that are called inside the context.

    The tensors have no device, because operators on a CPU have no cost.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.signatures: list[operator_calls.Signature] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, keywords = func(*args, **(kwargs or {})), kwargs or {}
        schema = func._schema
        values = [*args, *(keywords.get(argument.name) for argument in schema.arguments[len(args) :])]
        inputs = tuple(_describe(value) for value in values)
        texts = tuple("" if given is not None else str(value) for given, value in zip(inputs, values, strict=True))
        outputs = _describe(result)
        self.signatures.append(operator_calls.Signature(schema.name, inputs, _flatten(outputs or ()), texts))
        return result


def _describe(value: Any) -> operator_calls.TensorArgument:
    """Returns the properties of a tensor or of the tensors in a list; None for another value."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return operator_calls.Tensor(tuple(value.shape), dtype, tuple(value.stride()))
    if not isinstance(value, (list, tuple)):
        return None
    return tuple(x for part in value for x in _flatten(_describe(part) or ())) or None


def _flatten(argument: operator_calls.TensorArgument) -> tuple[operator_calls.Tensor, ...]:
    return (argument,) if isinstance(argument, operator_calls.Tensor) else argument or ()


def multiply_matrices() -> Iterator[Operator]:
    """Yields square matmuls, and those of linear layers."""
    squares = [(2**power,) * 3 for power in range(5, 14)]
    layers = [
        (8192, 1024, 1024), (8192, 512, 1024), (8192, 4096, 1024), (8192, 1024, 4096), (8192, 8192, 2048),
        (2048, 2048, 512), (512, 4096, 1024), (16384, 2048, 2048), (64, 4096, 4096), (8192, 32000, 1024),
        (8192, 1024, 32000), (4096, 14336, 4096),
    ]  # fmt: skip

    def start_in_fp8(tensors: list[Tensor]) -> Work:
        left, right = (tensor.to(torch.float8_e4m3fn) for tensor in tensors)
        scale = torch.ones(())
        return lambda: torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16)

    for precision, (m, n, k) in product(("bf16", "fp16", "tf32", "fp32", "fp8"), (*squares, *layers)):
        start = start_in_fp8 if precision == "fp8" else call(lambda left, right: left @ right.t())
        yield Operator(precision, ((m, k), (n, k)), start)


def attend() -> Iterator[Operator]:
    """Yields attention of several context lengths and head sizes, with and without a causal mask."""
    shapes = [(8, 16, 128), (8, 16, 256), (8, 16, 512), (8, 16, 1024), (4, 16, 2048), (2, 16, 8192)]
    for precision, shape, d_head, causal in product(("bf16", "fp16", "fp32"), shapes, (64, 128), (False, True)):
        for start in (call, differentiate):
            forward = partial(F.scaled_dot_product_attention, is_causal=causal)
            yield Operator(precision, ((*shape, d_head),) * 3, start(forward))


def convolve() -> Iterator[Operator]:
    """Yields convolutions of ResNets and U-Nets."""
    shapes = [  # images, channels, height and width, output channels, kernel size
        (4, 64, 28, 64, 3), (128, 64, 56, 64, 3), (128, 128, 28, 128, 3), (128, 256, 14, 256, 3), (128, 512, 7, 512, 3),
        (128, 256, 56, 64, 1), (128, 64, 56, 256, 1), (128, 1024, 14, 256, 1), (128, 2048, 7, 512, 1),
        (16, 320, 64, 320, 3), (16, 640, 32, 640, 3), (16, 1280, 16, 1280, 3),
    ]  # fmt: skip
    for precision, (images, channels, side, outputs, size) in product(("bf16", "fp16", "tf32", "fp32"), shapes):
        for start in (call, differentiate):
            filters = (outputs, channels, size, size)
            forward = partial(F.conv2d, padding=size // 2)
            yield Operator(precision, ((images, channels, side, side), filters), start(forward), channels_last=True)


def compute_elements() -> Iterator[Operator]:
    """Yields additions."""
    for precision, power in product(("bf16", "fp32"), range(10, 30)):
        yield Operator(precision, ((2**power,),) * 2, call(torch.add))


def copy() -> Iterator[Operator]:
    """Yields copies."""
    for precision, power in product(("bf16", "fp32"), range(10, 30)):
        yield Operator(precision, ((2**power,),), call(torch.clone))


def normalize() -> Iterator[Operator]:
    """Yields layer norm and RMS norm of rows, and batch norm and group norm of images."""

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias)

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, [*weight.shape], weight)

    def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight, bias, training=True)

    def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.group_norm(x, 32, weight, bias)

    images = [(4, 64, 28), (32, 64, 56), (128, 512, 7), (128, 256, 14), (128, 2048, 7), (128, 512, 28), (128, 256, 56)]
    for precision, start in product(("bf16", "fp32"), (call, differentiate)):
        for rows, width in _ROWS:
            yield Operator(precision, ((rows, width), (width,), (width,)), start(layer_norm))
            yield Operator(precision, ((rows, width), (width,)), start(rms_norm))
        for n, channels, side in images:
            shapes = ((n, channels, side, side), (channels,), (channels,))
            yield Operator(precision, shapes, start(batch_norm), channels_last=True)
            yield Operator(precision, shapes, start(group_norm))


def take_softmax() -> Iterator[Operator]:
    """Yields softmax and log softmax of rows."""
    for precision, start, shape in product(("bf16", "fp32"), (call, differentiate), _ROWS):
        for function in (torch.softmax, torch.log_softmax):
            yield Operator(precision, (shape,), start(partial(function, dim=-1)))


def reduce() -> Iterator[Operator]:
    """Yields sums of rows, of columns, and of all elements, and the maxima of pooled images."""
    images = ((4, 64, 28, 28), (32, 64, 112, 112), (128, 64, 112, 112))
    for precision in ("bf16", "fp32"):
        for shape, dimensions in product(_ROWS, ((1,), (0,), (0, 1))):
            yield Operator(precision, (shape,), call(partial(torch.sum, dim=dimensions)))
        for shape, start in product(images, (call, differentiate)):
            forward = partial(F.max_pool2d, kernel_size=3, stride=2, padding=1)
            yield Operator(precision, (shape,), start(forward), channels_last=True)


def embed() -> Iterator[Operator]:
    """Yields the embedding of tokens."""
    tables = [(16, 256, 1024), *((2**power, _VOCABULARY, 1024) for power in range(4, 18, 2))]
    tables += [(tokens, 4 * _VOCABULARY, 2048) for tokens in (1024, 8192)]
    for precision, start, (tokens, vocabulary, width) in product(("bf16", "fp32"), (call, differentiate), tables):
        forward = partial(F.embedding, torch.randint(0, vocabulary, (tokens,)))
        yield Operator(precision, ((vocabulary, width),), start(forward))


def lose() -> Iterator[Operator]:
    """Yields the loss of the log probabilities of tokens."""
    for precision, start, (rows, width) in product(("bf16", "fp32"), (call, differentiate), _ROWS):
        forward = partial(F.nll_loss, target=torch.randint(0, width, (rows,)))
        yield Operator(precision, ((rows, width),), start(forward))


def update_parameters() -> Iterator[Operator]:
    """Yields the fused optimizers AdamW and SGD, and the addition to all tensors of a list."""

    def make_parameters(tensors: list[Tensor]) -> list[torch.nn.Parameter]:
        parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        return parameters

    def start_adamw(tensors: list[Tensor]) -> Work:
        return torch.optim.AdamW(make_parameters(tensors), fused=True).step

    def start_sgd(tensors: list[Tensor]) -> Work:
        return torch.optim.SGD(make_parameters(tensors), 0.1, momentum=0.9, fused=True).step

    def start_foreach(tensors: list[Tensor]) -> Work:
        return lambda: torch._foreach_add_(tensors, 1.0)

    lists = [(4, 64), (20, 256), (4, 1024), (16, 1024), (64, 1024), (256, 1024)]
    for precision, (count, width) in product(("bf16", "fp32"), lists):
        for start in (start_adamw, start_sgd, start_foreach):
            yield Operator(precision, ((width, width),) * count, start)


#: The operators of each kind.
OPERATORS: dict[str, Callable[[], Iterator[Operator]]] = {
    "matmul": multiply_matrices,
    "attention": attend,
    "convolution": convolve,
    "elementwise": compute_elements,
    "copy": copy,
    "norm": normalize,
    "softmax": take_softmax,
    "reduction": reduce,
    "embedding": embed,
    "cross entropy": lose,
    "optimizer": update_parameters,
}


if __name__ == "__main__":
    main(TARGET, measure)
