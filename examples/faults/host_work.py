"""Work of a training loop on the host besides training, such as logging and checkpoints, as the switches select."""

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
    """The switches that any training loop has; the defaults are the control.

    Attributes:
        precision: the precision of matmuls; ``bf16`` uses autocast.
        compiled: whether the model is compiled.
        optimizer: one kernel for many parameters (fused), or several small kernels for each parameter.
        workers: the number of processes that make batches; with 0, the training loop makes them.
        norms: ``each`` reads the norm of each parameter and gradient; ``total`` keeps two norms on the device.
        checkpoint: copies the weights to the host after every step: to pageable memory, for which the CPU waits, or
            to pinned memory, on a separate stream.
        empty_cache: calls ``torch.cuda.empty_cache()`` after every step.
        heap_records: the number of records in memory, each of two objects that Python's garbage collector tracks.
        collect: runs the garbage collector after every step.
        freeze: excludes the records from garbage collection.
        batch_size: the batch size; None for the program's usual one.
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
    """A fault: its description, the switches of the loop with the fault, and those of the loop without it."""

    description: str
    fault: HostSwitches
    remedy: HostSwitches


class Snapshot:
    """A copy of the weights in pinned memory, made on a separate stream while the GPU computes."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.host = {name: torch.empty_like(weight, device="cpu", pin_memory=True) for name, weight in weights.items()}
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def take(self) -> None:
        """Launches the copies of the weights. The copies begin after all work that was launched before."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for name, weight in self.weights.items():
                self.host[name].copy_(weight, non_blocking=True)

    def wait(self) -> None:
        """Makes the GPU, not the CPU, wait for the copies before the weights change."""
        torch.cuda.current_stream().wait_stream(self.stream)


class HostWork:
    """The work on the host before the optimizer changes the weights, and after the step."""

    def __init__(self, switches: HostSwitches, device: str, turns: Iterator[None] | None = None) -> None:
        self.switches, self.device, self.turns = switches, device, turns
        self.norms: list[float] = []
        self.total_norms: tuple[Tensor, Tensor] | None = None
        self.prepare()

    def prepare(self) -> None:
        """Sets the global state of the process. Call it again if another training ran in between."""
        torch.set_float32_matmul_precision("high" if self.switches.precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = self.switches.precision != "fp32"  # of convolutions; PyTorch allows it
        if self.switches.heap_records:
            self.heap: list[dict[str, object]] = []
            gc.unfreeze()
            gc.collect()
            gc.freeze()  # the collector then examines only the records, not the objects of imported modules
            self.heap = [{"index": index, "spans": [index]} for index in range(self.switches.heap_records)]
            if self.switches.freeze:
                gc.freeze()

    def watch(self, model: nn.Module) -> None:
        """Sets the model whose norms are read, and whose weights are copied."""
        self.parameters, self.weights = tuple(model.parameters()), model.state_dict()
        overlapped = self.switches.checkpoint == "overlapped" and self.device == "cuda"
        self.snapshot = Snapshot(self.weights) if overlapped else None
        kept = self.weights if self.switches.checkpoint != "none" and not self.snapshot else {}
        self.saved = {name: torch.zeros_like(weight, device="cpu") for name, weight in kept.items()}

    def before_update(self) -> None:
        """Reads the norms, and waits for the last checkpoint, because the optimizer changes the weights next."""
        if self.switches.norms != "none":
            with annotate("log"):
                self._log()
        if self.snapshot:
            self.snapshot.wait()

    def after_step(self) -> None:
        """Copies the weights, frees memory, collects garbage, and waits for its turn if programs take turns."""
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
