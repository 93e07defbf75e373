"""Measures well-shaped operators of one kind: the kernel time of each, and the FLOPs and bytes of its shapes.

Each function below yields the operators of a kind: the precision, the number of elements of the largest tensor, and a
function that makes the tensors and returns the work. The tensors are made only for operators that are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

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
#: The precision, the number of elements of the largest tensor, and a function that makes the tensors.
Operator: TypeAlias = tuple[str, int, Callable[[], Work]]

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
_MIB = 2**20
_VOCABULARY = 32_000


def measure(case: AttainableCase, figures: AttainableFigures) -> None:
    """Measures the operators of a kind whose tensors are small enough."""
    torch.set_default_device(case.device)
    torch.backends.cudnn.benchmark = True
    operators = []
    for precision, elements, make in OPERATORS[case.kind]():
        bytes_per_element = 1 if precision == "fp8" else _TYPES[precision].itemsize
        if _is_available(precision, case.device) and elements * bytes_per_element <= case.max_mib * _MIB:
            set_precision(precision)
            torch.backends.cudnn.allow_tf32 = precision == "tf32"
            operators.append(_measure_operator(make(), precision, case))
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


def random(precision: str, *shape: int) -> Tensor:
    """Makes a tensor of random numbers."""
    return torch.randn(*shape, dtype=_TYPES[precision])


def repeat_backward(inputs: list[Tensor], forward: Callable[..., Tensor]) -> Work:
    """Returns a function that computes the gradients of the inputs, from one forward pass."""
    for tensor in inputs:
        tensor.requires_grad_()
    output = forward(*inputs)
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def multiply_matrices() -> Iterator[Operator]:
    """Yields square matmuls, and those of linear layers."""
    squares = [(2**power,) * 3 for power in range(5, 14)]
    layers = [
        (8192, 1024, 1024), (8192, 512, 1024), (8192, 4096, 1024), (8192, 1024, 4096), (8192, 8192, 2048),
        (2048, 2048, 512), (512, 4096, 1024), (16384, 2048, 2048), (64, 4096, 4096), (8192, 32000, 1024),
        (8192, 1024, 32000), (4096, 14336, 4096),
    ]  # fmt: skip

    def make(precision: str, m: int, n: int, k: int) -> Work:
        if precision == "fp8":
            left, right = (torch.randn(*shape).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
            scale = torch.ones(())
            return lambda: torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16)
        left, right = random(precision, m, k), random(precision, n, k)
        return lambda: torch.mm(left, right.t())

    for precision in ("bf16", "fp16", "tf32", "fp32", "fp8"):
        for m, n, k in (*squares, *layers):
            yield precision, max(m * k, n * k, m * n), partial(make, precision, m, n, k)


def attend() -> Iterator[Operator]:
    """Yields attention of several context lengths and head sizes, with and without a causal mask."""
    shapes = [(8, 16, 128), (8, 16, 256), (8, 16, 512), (8, 16, 1024), (4, 16, 2048), (2, 16, 8192)]

    def make(precision: str, shape: tuple[int, ...], causal: bool, is_backward: bool) -> Work:
        inputs = [random(precision, *shape) for _ in range(3)]

        def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

        return repeat_backward(inputs, forward) if is_backward else lambda: forward(*inputs)

    for precision in ("bf16", "fp16", "fp32"):
        for batch, heads, length in shapes:
            for d_head in (64, 128):
                for causal in (False, True):
                    for is_backward in (False, True):
                        shape = (batch, heads, length, d_head)
                        yield (
                            precision,
                            batch * heads * length * d_head,
                            partial(make, precision, shape, causal, is_backward),
                        )


def convolve() -> Iterator[Operator]:
    """Yields convolutions of ResNets and U-Nets, with channels last."""
    shapes = [  # images, channels, height and width, output channels, kernel size
        (4, 64, 28, 64, 3), (128, 64, 56, 64, 3), (128, 128, 28, 128, 3), (128, 256, 14, 256, 3), (128, 512, 7, 512, 3),
        (128, 256, 56, 64, 1), (128, 64, 56, 256, 1), (128, 1024, 14, 256, 1), (128, 2048, 7, 512, 1),
        (16, 320, 64, 320, 3), (16, 640, 32, 640, 3), (16, 1280, 16, 1280, 3),
    ]  # fmt: skip

    def make(precision: str, shape: tuple[int, ...], is_backward: bool) -> Work:
        n, c, side, out, size = shape
        inputs = [random(precision, n, c, side, side), random(precision, out, c, size, size)]
        inputs = [tensor.to(memory_format=torch.channels_last) for tensor in inputs]
        forward = partial(F.conv2d, padding=size // 2)
        return repeat_backward(inputs, forward) if is_backward else lambda: forward(*inputs)

    for precision in ("bf16", "fp16", "tf32", "fp32"):
        for shape in shapes:
            n, c, side, out, _ = shape
            for is_backward in (False, True):
                yield precision, n * max(c, out) * side**2, partial(make, precision, shape, is_backward)


def _by_elements(
    make: Callable[[str, int, int], Work], columns: tuple[int, ...] = (1024, 4096), powers: range = range(14, 30, 2)
) -> Iterator[Operator]:
    """Yields operators on tensors with a number of elements that is a power of 2.

    Args:
        make: makes the tensors from the precision, and the numbers of rows and columns.
        columns: the numbers of columns.
        powers: the exponents.
    """
    for precision in ("bf16", "fp32"):
        for elements in (2**power for power in powers):
            for width in columns:
                yield precision, elements, partial(make, precision, elements // width, width)


def compute_elements() -> Iterator[Operator]:
    """Yields additions and GELU."""

    def make_add(precision: str, rows: int, width: int) -> Work:
        left, right = random(precision, rows, width), random(precision, rows, width)
        return lambda: left + right

    def make_gelu(precision: str, rows: int, width: int) -> Work:
        x = random(precision, rows, width)
        return lambda: F.gelu(x)

    for make in (make_add, make_gelu):
        yield from _by_elements(make, (1024,), range(10, 30, 2))


def copy() -> Iterator[Operator]:
    """Yields copies."""

    def make(precision: str, rows: int, width: int) -> Work:
        x = random(precision, rows, width)
        return lambda: x.clone()

    return _by_elements(make, (1024,), range(10, 30, 2))


def normalize() -> Iterator[Operator]:
    """Yields layer norm and RMS norm of rows, and batch norm and group norm of images, forward and backward."""

    def make(name: str, is_backward: bool, precision: str, rows: int, width: int) -> Work:
        inputs = [random(precision, rows, width), torch.ones(width, dtype=_TYPES[precision])]
        if name == "layer":
            inputs.append(torch.zeros(width, dtype=_TYPES[precision]))

        def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return F.rms_norm(x, (width,), weight) if bias is None else F.layer_norm(x, (width,), weight, bias)

        return repeat_backward(inputs, forward) if is_backward else lambda: forward(*inputs)

    def make_of_images(name: str, is_backward: bool, precision: str, shape: tuple[int, int, int]) -> Work:
        n, c, side = shape
        x, weight, bias = random(precision, n, c, side, side), torch.ones(c), torch.zeros(c)

        def normalize_batch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, weight, bias, training=True)

        def normalize_groups(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.group_norm(x, 32, weight, bias)

        forward, inputs = normalize_groups, [x, weight.to(x.dtype), bias.to(x.dtype)]
        if name == "batch":
            forward, inputs = normalize_batch, [x.to(memory_format=torch.channels_last), weight, bias]
        return repeat_backward(inputs, forward) if is_backward else lambda: forward(*inputs)

    for is_backward in (False, True):
        for name in ("layer", "rms"):
            yield from _by_elements(partial(make, name, is_backward))
        for precision in ("bf16", "fp32"):
            for name in ("batch", "group"):
                for n, c, side in [(4, 64, 28), (128, 2048, 7), (128, 1024, 14), (128, 512, 28), (128, 256, 56)]:
                    shape = (n, c, side)
                    yield precision, n * c * side**2, partial(make_of_images, name, is_backward, precision, shape)


def take_softmax() -> Iterator[Operator]:
    """Yields softmax and log softmax of rows, forward and backward."""

    def make(function: Callable[..., Tensor], is_backward: bool, precision: str, rows: int, width: int) -> Work:
        x = random(precision, rows, width)
        forward = partial(function, dim=-1)
        return repeat_backward([x], forward) if is_backward else lambda: forward(x)

    for function in (torch.softmax, torch.log_softmax):
        for is_backward in (False, True):
            yield from _by_elements(partial(make, function, is_backward))


def reduce() -> Iterator[Operator]:
    """Yields sums of rows, of columns, and of all elements, and the maxima of pooled images with channels last."""

    def make(dimensions: tuple[int, ...], precision: str, rows: int, width: int) -> Work:
        x = random(precision, rows, width)
        return lambda: x.sum(dimensions)

    def make_pool(is_backward: bool, precision: str, shape: tuple[int, ...]) -> Work:
        x = random(precision, *shape).to(memory_format=torch.channels_last)
        forward = partial(F.max_pool2d, kernel_size=3, stride=2, padding=1)
        return repeat_backward([x], forward) if is_backward else lambda: forward(x)

    for dimensions in ((1,), (0,), (0, 1)):
        yield from _by_elements(partial(make, dimensions))
    for precision in ("bf16", "fp32"):
        for shape in ((4, 64, 28, 28), (32, 64, 112, 112), (128, 64, 112, 112)):
            for is_backward in (False, True):
                yield precision, math.prod(shape), partial(make_pool, is_backward, precision, shape)


def embed() -> Iterator[Operator]:
    """Yields the embedding of tokens, forward and backward."""

    def make(is_backward: bool, precision: str, rows: int, width: int, vocabulary: int = _VOCABULARY) -> Work:
        tokens, table = torch.randint(0, vocabulary, (rows,)), random(precision, vocabulary, width)
        return (
            repeat_backward([table], lambda table: F.embedding(tokens, table))
            if is_backward
            else lambda: F.embedding(tokens, table)
        )

    for is_backward in (False, True):
        yield from _by_elements(partial(make, is_backward), (1024,), range(14, 28, 2))
        for precision in ("bf16", "fp32"):
            for tokens in (1024, 8192):
                large = 4 * _VOCABULARY, 2048
                yield precision, math.prod(large), partial(make, is_backward, precision, tokens, large[1], large[0])


def lose() -> Iterator[Operator]:
    """Yields the loss of the log probabilities of tokens, forward and backward."""

    def make(is_backward: bool, precision: str, rows: int, width: int) -> Work:
        targets, x = torch.randint(0, width, (rows,)), random(precision, rows, width)
        return repeat_backward([x], lambda x: F.nll_loss(x, targets)) if is_backward else lambda: F.nll_loss(x, targets)

    for is_backward in (False, True):
        yield from _by_elements(partial(make, is_backward), (4096, 32768), range(16, 30, 2))


def update_parameters() -> Iterator[Operator]:
    """Yields the fused optimizers AdamW and SGD, and the addition to all tensors of a list."""

    def make(name: str, precision: str, count: int, width: int) -> Work:
        parameters = [torch.nn.Parameter(random(precision, width, width)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        if name == "foreach":
            return lambda: torch._foreach_add_([parameter.data for parameter in parameters], 1.0)
        if name == "adamw":
            return torch.optim.AdamW(parameters, fused=True).step
        return torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True).step

    for name in ("adamw", "sgd", "foreach"):
        for precision in ("bf16", "fp32"):
            for count, width in ((4, 64), (20, 256), (4, 1024), (16, 1024), (64, 1024), (256, 1024)):
                yield precision, count * width**2, partial(make, name, precision, count, width)


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
