"""The dtypes that autocast computes in, tensor by tensor, and the error that an accumulator adds to a sum.

``python -m profiling_targets.dtypes --experiment dtypes --model toy --precision bf16`` prints the dtypes of a small
model; the experiment ``sums`` adds a small number many times.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nsys_analyzer.analysis.transformer.models import ModelSize
from nsys_analyzer.experiments.precision import DTYPES_TARGET as TARGET
from nsys_analyzer.experiments.precision import TERM, DtypesCase, DtypesFigures
from profiling_targets.harness import Config, NotHereError, main
from profiling_targets.transformer import Transformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure(case: DtypesCase, figures: DtypesFigures) -> None:
    """Looks at dtypes or measures errors; nothing here is timed."""
    torch.manual_seed(0)
    {"dtypes": _dtypes, "sums": _sums}[case.experiment](case, figures)


def _model_and_batch(name: str) -> tuple[nn.Module, Tensor]:
    """Returns four layers and four inputs of eight features, or a block of our transformer and two sequences."""
    if name == "toy":
        layers = {"fc1": nn.Linear(8, 10), "relu": nn.ReLU(), "norm": nn.LayerNorm(10), "fc2": nn.Linear(10, 5)}
        return nn.Sequential(OrderedDict(layers)), torch.randn(4, 8)
    size = ModelSize("tiny", d_model=32, d_ff=64, num_layers=1, num_heads=4, vocab_size=50)
    return Transformer(Config(size, context_length=16)), torch.randint(size.vocab_size, (2, 16))


class _Inside(TorchFunctionMode):
    """Notes the dtype of what a few functions return, the first time: they are no modules, so no hook sees them."""

    NAMES = {"rsqrt": "inside RMSNorm: 1 ÷ root", "exp": "inside softmax: exp"}  # noqa: RUF012  a table

    def __init__(self, seen: dict[str, str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if name := self.NAMES.get(getattr(func, "__name__", "")):
            self.seen.setdefault(name, _names(result))
        return result


def _dtypes(case: DtypesCase, figures: DtypesFigures) -> None:
    """Notes the dtype of parameters, of each layer's output, of logits and loss, and of gradients."""
    with torch.device(case.device):
        model, batch = _model_and_batch(case.model)
    parameters = tuple(model.parameters())
    seen = {"parameters": _names(*parameters)}

    def keep(name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        seen[name] = _names(output)

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(partial(keep, f"{name.replace('blocks.0.', '')} output"))
    with _autocast(case), _Inside(seen):
        logits = model(batch).flatten(0, -2)  # (tokens, classes)
        seen["logits"] = _names(logits)
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=case.device))
    loss.backward()  # type: ignore[no-untyped-call]
    seen["loss"] = _names(loss)
    seen["gradients"] = _names(*(p.grad for p in parameters if p.grad is not None))
    figures.dtypes = list(seen.items())


@contextmanager
def _autocast(case: DtypesCase) -> Iterator[None]:
    """Autocast in the case's precision, off for fp32; raises NotHereError where the device has none."""
    dtype = DTYPES[case.precision]
    wanted = dtype != torch.float32
    try:
        with torch.autocast(case.device, dtype, enabled=wanted):
            if wanted and not torch.is_autocast_enabled(case.device):  # it only warned
                raise NotHereError(f"autocast to {case.precision} is not supported on this device")
            yield
    except RuntimeError as error:
        if "not implemented for" in str(error):
            raise NotHereError(f"{case.precision} on this device: {error}") from error
        raise


def _names(*tensors: Tensor) -> str:
    """Returns the dtypes of some tensors, such as ``bfloat16, float32``."""
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def _sums(case: DtypesCase, figures: DtypesFigures) -> None:
    """Adds 0.01 many times: in one dtype, and terms of fp16 into fp32, as they are and converted before."""

    def total(accumulator: str, term: str, added: str) -> float:
        value = torch.zeros((), dtype=DTYPES[accumulator], device=case.device)
        small = torch.tensor(TERM, dtype=DTYPES[term], device=case.device)
        for _ in range(case.terms):
            value += small.to(DTYPES[added])
        return float(value.item())

    figures.sum_fp32_of_fp32 = total("fp32", "fp32", "fp32")
    figures.sum_fp16_of_fp16 = total("fp16", "fp16", "fp16")
    figures.sum_bf16_of_bf16 = total("bf16", "bf16", "bf16")
    figures.sum_fp32_of_fp16 = total("fp32", "fp16", "fp16")
    figures.sum_fp32_of_fp16_converted = total("fp32", "fp16", "fp32")
    figures.sum_exact = TERM * case.terms


if __name__ == "__main__":
    sys.exit(main(TARGET, measure))
