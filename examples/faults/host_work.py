"""What a training loop does on the host besides training, as its switches say; ``faults.py`` plants faults into it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from profiling_targets.harness import annotate


@dataclass(frozen=True)
class HostSwitches:
    """What any training loop can do; the defaults are the control.

    Attributes:
        precision: of matmuls, which ``bf16`` reaches by autocast.
        compiled: whether the model is compiled.
        optimizer: the optimizer in one kernel for many parameters, or a dozen small kernels for each.
        workers: processes that make batches; 0 is the training loop itself.
        norms: those of each parameter and its gradient, read at once, or of all of them, kept on the device.
        checkpoint: weights to the host after every step: to pageable memory, for which the CPU waits, or to pinned
            memory on a stream of its own.
        empty_cache: gives the allocator's unused memory back after every step.
        heap_records: records in memory that Python's garbage collector tracks, two objects each.
        collect: runs the garbage collector after every step.
        freeze: takes the records out of what the garbage collector looks at.
        batch_size: None for the usual one.
    """

    precision: Literal["bf16", "tf32", "fp32"] = "bf16"
    compiled: bool = False
    optimizer: Literal["fused", "for each parameter"] = "fused"
    workers: int = 8
    norms: Literal["none", "each", "total"] = "none"
    checkpoint: Literal["none", "blocking", "overlapped"] = "none"
    empty_cache: bool = False
    heap_records: int = 0
    collect: bool = False
    freeze: bool = False
    batch_size: int | None = None


class Fault(NamedTuple):
    """A fault: what is wrong in a line, the loop that has it, and the loop without it."""

    description: str
    fault: HostSwitches
    remedy: HostSwitches


class Snapshot:
    """The weights in pinned memory on the host, copied on a stream of its own while the GPU computes on."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.host = {name: torch.empty_like(weight, device="cpu", pin_memory=True) for name, weight in weights.items()}
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def take(self) -> None:
        """Has the weights copied as they are after all that was launched so far."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for name, weight in self.weights.items():
                self.host[name].copy_(weight, non_blocking=True)

    def wait(self) -> None:
        """Lets the GPU, not the CPU, wait for the copies before the weights change."""
        torch.cuda.current_stream().wait_stream(self.stream)


class HostWork:
    """The work of a loop on the host: before the optimizer changes the weights, and after the step."""

    def __init__(self, switches: HostSwitches, device: str, turns: Iterator[None] | None = None) -> None:
        self.switches, self.device, self.turns = switches, device, turns
        self.norms: list[float] = []
        self.total_norms: tuple[Tensor, Tensor] | None = None
        self.prepare()

    def prepare(self) -> None:
        """Sets what is global in a process; call it before the steps where another training ran in between."""
        torch.set_float32_matmul_precision("high" if self.switches.precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = self.switches.precision != "fp32"  # of convolutions; PyTorch allows it
        if self.switches.heap_records:
            self.heap: list[dict[str, object]] = []
            gc.unfreeze()
            gc.collect()
            gc.freeze()  # the collector is to look at the records alone, not at what the imports made
            self.heap = [{"index": index, "spans": [index]} for index in range(self.switches.heap_records)]
            if self.switches.freeze:
                gc.freeze()

    def watch(self, model: nn.Module) -> None:
        """Names the model whose norms are read, and whose weights are kept."""
        self.parameters, self.weights = tuple(model.parameters()), model.state_dict()
        overlapped = self.switches.checkpoint == "overlapped" and self.device == "cuda"
        self.snapshot = Snapshot(self.weights) if overlapped else None
        kept = self.weights if self.switches.checkpoint != "none" and not self.snapshot else {}
        self.saved = {name: torch.zeros_like(weight, device="cpu") for name, weight in kept.items()}

    def before_update(self) -> None:
        """Reads the norms, and waits for the last checkpoint: the next call changes the weights."""
        if self.switches.norms != "none":
            with annotate("log"):
                self._log()
        if self.snapshot:
            self.snapshot.wait()

    def after_step(self) -> None:
        """Keeps the weights, gives memory back, collects garbage, and waits for the next turn where turns are taken."""
        if self.switches.checkpoint != "none":
            with annotate("checkpoint"):
                self._checkpoint()
        if self.switches.empty_cache:
            torch.cuda.empty_cache()
        if self.switches.collect:
            gc.collect()
        if self.turns:
            next(self.turns)

    def _log(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.switches.norms == "each":
            self.norms = [tensor.detach().norm().item() for tensor in (*gradients, *self.parameters)]
        else:
            weights = [parameter.detach() for parameter in self.parameters]
            self.total_norms = nn.utils.get_total_norm(gradients), nn.utils.get_total_norm(weights)

    def _checkpoint(self) -> None:
        if self.snapshot:
            self.snapshot.take()
        for name, pageable in self.saved.items():
            pageable.copy_(self.weights[name])
