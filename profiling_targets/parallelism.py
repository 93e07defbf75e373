"""Shares the training of the transformer among several GPUs. Each strategy of sharing is a class.

===============  ===================================  ======================================================
strategy         a rank holds                         ranks exchange
===============  ===================================  ======================================================
ddp              the whole model, its own batch       gradients, in buckets, during backward
fsdp             a part of each tensor, its own batch parameters before a block, gradients after its backward
tensor           some heads and features, one batch   activations, twice in each block
pipeline         some blocks, one batch               activations and their gradients, by microbatch
===============  ===================================  ======================================================

Shapes are those of ``transformer.py``. FSDP2 needs PyTorch 2.6 or newer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from nsys_analyzer.errors import ConfigurationError
from profiling_targets.harness import Config, annotate
from profiling_targets.transformer import Block, Training, Transformer


@dataclass(frozen=True)
class Rank:
    """The rank of this process, the number of ranks, and the local rank, which is the index of the rank's GPU."""

    number: int = 0
    world_size: int = 1
    local: int = 0

    def device(self, kind: str) -> torch.device:
        """Returns this rank's GPU if the kind is ``cuda``, else the device of that kind."""
        return torch.device("cuda", self.local) if kind == "cuda" else torch.device(kind)


@dataclass(frozen=True)
class Sharing:
    """The options that set how the ranks share the training.

    Attributes:
        strategy: one of ``STRATEGIES``.
        bucket_mb: the size of DDP's gradient buckets in MiB, or None for PyTorch's default.
        microbatches: the number of microbatches in a pipeline's batch, or None for another strategy.
    """

    strategy: str
    bucket_mb: int | None = None
    microbatches: int | None = None


class SharedTraining(Training):
    """A rank's part of the training. All ranks make equal models, and a subclass shares the model among the ranks.

    Attributes:
        has_own_batch: whether each rank has its own batch. Otherwise all ranks have equal batches.
        before_load: a function that each step calls before it loads its batch.
    """

    has_own_batch = True

    def __init__(self, config: Config, sharing: Sharing, rank: Rank) -> None:
        self.sharing, self.rank = sharing, rank
        self.before_load: Callable[[], None] = lambda: None
        super().__init__(config)
        self.host_tokens, self.host_targets = (self._random_tokens(index) for index in range(2))
        self.tokens, self.targets = (host.to(config.device) for host in (self.host_tokens, self.host_targets))

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes the loss."""
        return True

    def load(self) -> None:
        """Starts to copy the batch to the device, without a wait for the copy."""
        self.before_load()
        self.tokens.copy_(self.host_tokens, non_blocking=True)
        self.targets.copy_(self.host_targets, non_blocking=True)

    def _random_tokens(self, index: int) -> Tensor:
        seed = self.config.seed + (self.rank.number if self.has_own_batch else 0)
        generator = torch.Generator().manual_seed(2 * seed + index)
        shape = (self.config.batch_size, self.config.context_length)
        tokens = torch.randint(self.config.size.vocab_size, shape, generator=generator)  # (B, S)
        return tokens.pin_memory() if self.config.device == "cuda" else tokens


class Replicated(SharedTraining):
    """Data parallel (DDP): the gradients are averaged among the ranks, in buckets, during the backward pass."""

    def prepare_model(self, model: Transformer) -> nn.Module:
        """Returns the whole model, wrapped in DistributedDataParallel."""
        # The cosines, sines and mask never change, so rank 0 need not broadcast them before each forward pass.
        parameters = signature(DistributedDataParallel).parameters
        broadcasting = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
        options: dict[str, Any] = {"bucket_cap_mb": self.sharing.bucket_mb, broadcasting: False}
        return DistributedDataParallel(model, **options)


class Sharded(SharedTraining):
    """Fully sharded (FSDP2): parameters are gathered before a block runs, and its gradients are reduce-scattered."""

    def prepare_model(self, model: Transformer) -> nn.Module:
        """Shards each block on its own, then the parameters outside of the blocks."""
        mesh = init_device_mesh(self.config.device, (self.rank.world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model


class TensorParallel(SharedTraining):
    """Tensor parallel: projections are split by features, and attention by heads.

    Each block needs two all-reduces in the forward pass and two in the backward pass.
    """

    has_own_batch = False

    def prepare_model(self, model: Transformer) -> nn.Module:
        """Keeps this rank's heads and features of each block. Each rank keeps the whole embedding, norms and head."""
        ranks, size = self.rank.world_size, self.config.size
        if size.num_heads % ranks or size.d_ff % ranks:
            raise ConfigurationError(
                f"{size.num_heads} heads and d_ff {size.d_ff} cannot be shared by {ranks} ranks",
                "Give --num-heads and --d-ff that the number of processes divides",
            )
        mesh = init_device_mesh(self.config.device, (ranks,))
        column_parallel = ("attention.q", "attention.k", "attention.v", "feed_forward.w1", "feed_forward.w3")
        row_parallel = ("attention.out", "feed_forward.w2")
        styles: list[tuple[tuple[str, ...], type[ParallelStyle]]] = [
            (column_parallel, ColwiseParallel),
            (row_parallel, RowwiseParallel),
        ]
        for block in model.blocks:
            parallelize_module(block, mesh, {name: style() for names, style in styles for name in names})
            cast(Block, block).attention.heads //= ranks
        return model

    def _make_optimizer(self, lr: float) -> torch.optim.Optimizer:
        split = [parameter for parameter in self.parameters if isinstance(parameter, DTensor)]
        unsplit = [parameter for parameter in self.parameters if not isinstance(parameter, DTensor)]
        groups = [
            {"params": group} for group in (split, unsplit) if group
        ]  # one kernel cannot update both kinds of tensors
        return torch.optim.AdamW(groups, lr)


class Pipeline(SharedTraining):
    """Pipeline parallel (GPipe): all microbatches run forward from rank to rank, then all run backward."""

    has_own_batch = False

    def __init__(self, config: Config, sharing: Sharing, rank: Rank) -> None:
        super().__init__(config, sharing, rank)
        microbatches = sharing.microbatches or 1
        if config.batch_size % microbatches:
            raise ConfigurationError(
                f"A batch of {config.batch_size} cannot be cut into {microbatches} microbatches",
                "Give a --batch-size that --microbatches divides",
            )
        stage = Stage(self.model, rank.number, rank.world_size, rank.device(config.device))
        self.schedule = ScheduleGPipe(stage, microbatches, self._loss)

    @property
    def has_loss(self) -> bool:
        """Whether this is the last rank, which computes the loss."""
        return self.rank.number == self.rank.world_size - 1

    def phases(self) -> dict[str, Callable[[], None]]:
        """Returns the phases: the pipeline, in which each pass of a microbatch has its own range, and the optimizer."""
        return {"microbatches": self.run_microbatches, "optimizer": self.update}

    def run_microbatches(self) -> None:
        """Runs forward, loss and backward of all microbatches.

        The first rank reads the tokens, and the last rank reads the targets.
        """
        for parameter in self.parameters:
            parameter.grad = None
        losses: list[Tensor] = []
        tokens = (self.tokens,) if self.rank.number == 0 else ()
        if self.has_loss:
            self.schedule.step(*tokens, target=self.targets, losses=losses)
            self.value = torch.stack(losses).mean()
        else:
            self.schedule.step(*tokens)

    def prepare_model(self, model: Transformer) -> nn.Module:
        """Keeps this rank's consecutive blocks.

        The first rank also keeps the embedding, and the last rank the final norm and the head.
        """
        ranks, layers, number = self.rank.world_size, len(model.blocks), self.rank.number
        if layers < ranks:
            raise ConfigurationError(
                f"{layers} layers cannot make {ranks} stages", "Give at least as many --num-layers as processes"
            )
        local_layers = range(layers * number // ranks, layers * (number + 1) // ranks)
        blocks_elsewhere = [f"blocks.{layer}" for layer in range(layers) if layer not in local_layers]
        blocks_elsewhere += ["embedding"] * (number > 0) + ["norm", "head"] * (number < ranks - 1)
        for name in blocks_elsewhere:
            model.set_submodule(name, ModuleOnOtherRank())
        return Autocast(model, self._autocast)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        with annotate("loss"), self._autocast():
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ModuleOnOtherRank(nn.Module):
    """A placeholder for a part of the model that is on another rank."""

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        """Returns the input unchanged."""
        return x


class Autocast(nn.Module):
    """A model that always runs under autocast, as the configuration sets it."""

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, x: Tensor) -> Tensor:
        """Runs the model under autocast."""
        with self.autocast():
            out: Tensor = self.model(x)
            return out


class Stage(PipelineStage):
    """A stage of the pipeline, which emits the ranges ``forward`` and ``backward`` for each microbatch."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward pass of one microbatch."""
        with annotate("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the backward pass of one microbatch."""
        with annotate("backward"):
            return super().backward_one_chunk(*args, **kwargs)


STRATEGIES: dict[str, type[SharedTraining]] = {
    "ddp": Replicated,
    "fsdp": Sharded,
    "tensor": TensorParallel,
    "pipeline": Pipeline,
}
