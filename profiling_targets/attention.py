"""Attention without heads, forward and backward, eager or compiled: time, and the memory that waits for backward.

``python -m profiling_targets.attention --d 64 --context-length 4096`` measures one shape.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from profiling_targets.cases import Figures, default_device, main, option
from profiling_targets.harness import annotate, synchronize
from profiling_targets.products import kept_bits, set_precision
from profiling_targets.timer import allocations, statistics_of
from profiling_targets.transformer import unfused_attention


@dataclass(frozen=True)
class Case:
    """One shape: queries, keys and values of (batch_size, context_length, d) each, causal."""

    device: str = field(default_factory=default_device)
    batch_size: int = option(8, "sequences")
    context_length: int = option(1024, "tokens of each")
    d: int = option(64, "features")
    compile: bool = option(False, "torch.compile the attention")
    precision: str = option("fp32", "of the products", ("fp32", "tf32"))
    warmup_steps: int = option(5, "steps before the measured ones")
    steps: int = option(100, "measured forward and backward passes")


class _Attention:
    """The attention of a case, its inputs, and its passes as functions without arguments."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        shape = (case.batch_size, case.context_length, case.d)
        q, k, v = (torch.randn(shape, device=case.device, requires_grad=True) for _ in range(3))  # (B, S, d) each
        self.inputs = (q, k, v)
        self.masked = torch.ones(2 * (case.context_length,), dtype=torch.bool, device=case.device).triu(1)  # (S, S)
        self.gradient = torch.randn(shape, device=case.device)
        self.attend = torch.compile(unfused_attention) if case.compile else unfused_attention
        self.out = torch.empty(0)

    def forward(self) -> None:
        """One pass, recorded for backward."""
        self.out = self.attend(*self.inputs, self.masked)  # (B, S, d)

    def backward(self) -> None:
        """Gradients of queries, keys and values, into fresh tensors."""
        for tensor in self.inputs:
            tensor.grad = None
        torch.autograd.backward(self.out, self.gradient)

    def forget(self) -> None:
        """Frees what waits for backward."""
        self.out = torch.empty(0)

    def saved(self) -> dict[tuple[int, ...], tuple[str, int, int]]:
        """What one forward saves for backward: shape to dtype, number and bytes of its tensors, each storage once."""
        storages: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            alone = tensor.detach()  # a result that its own node saved would hold that node, and never be freed
            storages[tensor.untyped_storage().data_ptr()] = alone
            return alone

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.forward()
        counts = Counter(tuple(tensor.shape) for tensor in storages.values())
        sizes = {
            tuple(t.shape): (str(t.dtype).removeprefix("torch."), t.untyped_storage().nbytes())
            for t in storages.values()
        }
        return {shape: (sizes[shape][0], counts[shape], counts[shape] * sizes[shape][1]) for shape in counts}


def measure(case: Case, figures: Figures) -> None:
    """Times forward and backward, each synchronised, after counting the memory that waits between them."""
    set_precision(case.precision)
    figures["product_bits"] = kept_bits(case.device)
    attention = _Attention(case)
    counters.clear()
    before = time.perf_counter_ns()
    attention.forward()
    attention.backward()
    synchronize(case.device)
    figures["first_step_ms"] = (time.perf_counter_ns() - before) / 1e6
    if case.compile:
        figures["compiled_graphs"] = int(counters["stats"]["unique_graphs"])
    attention.forget()
    _count(case, attention, figures)
    forward, backward = _times(case, attention)
    figures |= {**statistics_of("forward", forward), **statistics_of("backward", backward)}


def _count(case: Case, attention: _Attention, figures: Figures) -> None:
    """Counts the memory of one forward and backward, above the inputs, and what is saved between them."""
    held = (*attention.inputs, attention.masked, attention.gradient)
    figures["inputs_bytes"] = sum(tensor.nbytes for tensor in held)
    with allocations(case.device) as counted:
        attention.forward()
    figures["before_backward_bytes"], figures["forward_peak_bytes"] = counted.alive_bytes, counted.peak_bytes
    attention.forget()
    with allocations(case.device) as counted:
        attention.forward()
        attention.backward()
    figures["peak_bytes"] = counted.peak_bytes
    attention.forget()
    figures["saved"] = [[list(shape), *rest] for shape, rest in attention.saved().items()]
    attention.forget()


def _times(case: Case, attention: _Attention) -> tuple[list[float], list[float]]:
    """Milliseconds of each measured forward and backward."""
    phases = {"forward": attention.forward, "backward": attention.backward}
    times: dict[str, list[float]] = {name: [] for name in phases}
    synchronize(case.device)
    for step in range(-case.warmup_steps, case.steps):
        for name, phase in phases.items():
            before = time.perf_counter_ns()
            with annotate(name):
                phase()
                synchronize(case.device)
            if step >= 0:
                times[name].append((time.perf_counter_ns() - before) / 1e6)
        attention.forget()
    return times["forward"], times["backward"]


if __name__ == "__main__":
    sys.exit(main(Case, measure))
