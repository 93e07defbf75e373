"""Trains a transformer on several GPUs in one of many ways: ``torchrun --nproc-per-node 4 train.py --mode no_sync``.

===============  =====================================================================================
mode             what the ranks do
===============  =====================================================================================
ddp              each rank trains on its own batch; DDP averages the gradients
accumulate       four micro-batches in a step; DDP averages the gradients after each of them
no_sync          four micro-batches in a step; DDP averages the gradients after the last
uneven           DDP; the sequences of each rank are 1.5 times as long as those of the rank before it
unused           DDP with ``find_unused_parameters``; a part of the model is not used
fsdp_one         FSDP2 of the whole model: one all-gather of all parameters
fsdp_blocks      FSDP2 of each block
tensor           each rank has some heads and features of each block, as DTensors
pipeline         each rank has some blocks; eight micro-batches in the schedule 1F1B
===============  =====================================================================================

Without a profiler, the program times blocks of steps. It waits for the GPU only between blocks, and writes the times to
the file of ``--results``. On a machine without a GPU the model is tiny, and the ranks communicate through gloo.

Shapes: B sequences of S tokens; d features; H heads of d / H features; V tokens in the vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

MODES = ("ddp", "accumulate", "no_sync", "uneven", "unused", "fsdp_one", "fsdp_blocks", "tensor", "pipeline")
MICRO_BATCHES, PIPELINE_MICRO_BATCHES = 4, 8
_WARMUP_STEPS, _TIMED_BLOCKS, _STEPS_OF_A_BLOCK = 10, 4, 10

ON_GPU = torch.cuda.is_available()
LAYERS, D, HEADS, VOCABULARY, B, S = (24, 1024, 16, 16_000, 4, 512) if ON_GPU else (4, 32, 4, 100, 2, 16)


class Block(nn.Module):
    """Causal attention and a feed-forward network, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, d) -> (B, S, d)
        """Returns x plus the outputs of attention and of the feed-forward network."""
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, S, d / H)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Network(nn.Module):
    """The blocks of one rank of a pipeline, or all of them: (B, S) tokens or (B, S, d) -> (B, S, d) or (B, S, V)."""

    def __init__(self, blocks: range, *, has_unused_part: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D) if blocks.start == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in blocks)
        self.head = nn.Linear(D, VOCABULARY, bias=False) if blocks.stop == LAYERS else None
        self.unused = nn.Linear(D, D) if has_unused_part else None

    def forward(self, x: Tensor) -> Tensor:
        """Runs in bf16 under autocast."""
        with torch.autocast("cuda" if ON_GPU else "cpu", torch.bfloat16):
            x = self.embedding(x) if self.embedding else x
            for block in self.blocks:
                x = block(x)
            return self.head(x) if self.head else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropy of all tokens: (B, S, V), (B, S) -> ()."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_model(mode: str, device: torch.device) -> nn.Module:
    """Returns the part of the model that this rank has in the given mode."""
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if mode == "pipeline":
        return Network(range(LAYERS * rank // ranks, LAYERS * (rank + 1) // ranks)).to(device)
    model = Network(range(LAYERS), has_unused_part=mode == "unused").to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    if mode.startswith("fsdp"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in model.blocks if mode == "fsdp_blocks" else ():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    if mode == "tensor":
        columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        for block in model.blocks:
            parallelize_module(block, mesh, {**columns, "out": RowwiseParallel(), "down": RowwiseParallel()})
            block.heads = HEADS // ranks
        return model
    return DistributedDataParallel(model, find_unused_parameters=mode == "unused")


def make_step(mode: str, model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Returns the function that runs one training step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kinds = ([p for p in model.parameters() if isinstance(p, DTensor) is split] for split in (True, False))
    groups = [{"params": parameters} for parameters in kinds if parameters]  # fused AdamW takes only one kind
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=ON_GPU)
    has_own_batch = mode not in ("tensor", "pipeline")
    length = int(S * 1.5**rank) // 2 if mode == "uneven" else S
    batch_size = B * PIPELINE_MICRO_BATCHES if mode == "pipeline" else B
    random = torch.Generator().manual_seed(rank if has_own_batch else 0)

    def load() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCABULARY, (batch_size, length + 1), generator=random)
        moved = (tokens.pin_memory() if ON_GPU else tokens).to(device, non_blocking=True)
        return moved[:, :-1].contiguous(), moved[:, 1:].contiguous()

    def train_on_micro_batches() -> None:
        count = MICRO_BATCHES if mode in ("accumulate", "no_sync") else 1
        for index in range(count):
            tokens, targets = load()
            is_local = mode == "no_sync" and index < count - 1
            with model.no_sync() if is_local else contextlib.nullcontext():  # type: ignore[operator]
                loss = loss_of(model(tokens), targets) / count
                loss.backward()

    def train_on_pipeline() -> None:
        tokens, targets = load()
        inputs = (tokens,) if rank == 0 else ()
        schedule.step(*inputs, **({"target": targets} if rank == ranks - 1 else {}))

    if mode == "pipeline":
        stage = PipelineStage(model, rank, ranks, device)
        schedule = Schedule1F1B(stage, PIPELINE_MICRO_BATCHES, loss_of)

    def step() -> None:
        (train_on_pipeline if mode == "pipeline" else train_on_micro_batches)()
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_blocks(step: Callable[[], None], device: torch.device) -> list[float]:
    """Returns the mean length of a step in each block of steps, ms. The CPU waits for the GPU only between blocks."""
    lengths_ms = []
    for count in (_WARMUP_STEPS, *[_STEPS_OF_A_BLOCK] * _TIMED_BLOCKS):
        if ON_GPU:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            step()
        if ON_GPU:
            torch.cuda.synchronize(device)
        lengths_ms.append((time.perf_counter() - start) / count * 1e3)
    return lengths_ms[1:]


def main() -> None:
    """Trains as one rank, and writes the lengths of steps."""
    parser = argparse.ArgumentParser(description="Trains a transformer on several GPUs.")
    parser.add_argument("--mode", choices=MODES, default="ddp", help="what the ranks do (default ddp)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the lengths of steps to this JSON file")
    given = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if ON_GPU else "gloo", device_id=device if ON_GPU else None)
    step = make_step(given.mode, make_model(given.mode, device), device)
    lengths_ms = time_blocks(step, device)
    print(f"rank {dist.get_rank()}: {min(lengths_ms):.3f} to {max(lengths_ms):.3f} ms a step")
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, lengths_ms)
    if given.results and dist.get_rank() == 0:
        gpu = torch.cuda.get_device_name() if ON_GPU else None
        shape = {"layers": LAYERS, "d_model": D, "batch_size": B, "context_length": S, "torch": torch.__version__}
        results = {"mode": given.mode, "ranks": len(gathered), "gpu": gpu, **shape, "step_ms": gathered}
        given.results.write_text(json.dumps(results) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
