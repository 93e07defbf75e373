"""Trains a ResNet-50 on images that worker processes crop, resize and flip, with one planted fault.

``python examples/faults/resnet.py --fault item`` trains with the fault, ``--remedy`` with its remedy, and
``--compare`` times both in turns. The control trains in bf16 and in channels_last, and copies uint8 images from
pinned memory without a wait.

Shapes: B images of C channels, h × w pixels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from host_work import Fault, HostSwitches, HostWork
from in_turns import run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from profiling_targets import harness

BATCH_SIZE, PIXELS, CLASSES = 96, 224, 1000
_IMAGES = 256


@dataclass(frozen=True)
class Switches(HostSwitches):
    """The switches of the training loop; the defaults are the control.

    Attributes:
        pinned: batches are copied from pinned memory, and the CPU does not wait for the copies.
        float_images: worker processes convert the images to fp32, in which they are four times as large.
        channels_last: whether images and weights are stored as channels_last.
        recomputed: the backward pass recomputes the activations of each block.
        cuda_graph: forward, loss, backward and optimizer are one CUDA graph, captured once.
    """

    pinned: bool = True
    float_images: bool = False
    channels_last: bool = True
    recomputed: bool = False
    cuda_graph: bool = False


CONTROL = Switches()
FLOAT_IMAGES = Switches(float_images=True)
SINGLE_PRECISION = Switches(precision="fp32", batch_size=48)
TINY = Switches(batch_size=4)
SMALL_BATCH = Switches(batch_size=32)
HEAP = Switches(heap_records=300_000)

FAULTS: dict[str, Fault] = {
    "none": Fault("nothing is wrong: the control", CONTROL, CONTROL),
    "loader": Fault(
        "the training process crops, resizes and flips each image itself; worker processes do it ahead",
        replace(CONTROL, workers=0),
        CONTROL,
    ),
    "item": Fault(
        "the norm of every parameter and gradient is read by .item(); norms of all of them stay on the device",
        replace(CONTROL, norms="each"),
        replace(CONTROL, norms="total"),
    ),
    "tiny_batch": Fault(
        "a batch so small that launching takes longer than computing; a CUDA graph launches once a step",
        TINY,
        replace(TINY, cuda_graph=True),
    ),
    "pageable": Fault(
        "images in fp32 are copied from pageable memory; from pinned memory, without a wait",
        replace(FLOAT_IMAGES, pinned=False),
        FLOAT_IMAGES,
    ),
    "fp32": Fault(
        "convolutions in fp32, without tensor cores; TF32 uses them",
        SINGLE_PRECISION,
        replace(SINGLE_PRECISION, precision="tf32"),
    ),
    "foreach": Fault(
        "SGD runs several small kernels for each parameter; the fused one does all in a few",
        replace(SMALL_BATCH, optimizer="for each parameter"),
        SMALL_BATCH,
    ),
    "empty_cache": Fault(
        "torch.cuda.empty_cache() after every step; without it",
        replace(CONTROL, empty_cache=True),
        CONTROL,
    ),
    "collector": Fault(
        "gc.collect() after every step, over a large heap; gc.freeze() once and no collection",
        replace(HEAP, collect=True),
        replace(HEAP, freeze=True),
    ),
    "checkpoint": Fault(
        "the weights go to pageable memory after every step; to pinned memory while the next step runs",
        replace(CONTROL, checkpoint="blocking"),
        replace(CONTROL, checkpoint="overlapped"),
    ),
    "recomputation": Fault(
        "backward computes all activations again although memory suffices; it does not",
        replace(CONTROL, recomputed=True),
        CONTROL,
    ),
    "memory_format": Fault(
        "images lie in memory channel by channel; channels_last",
        replace(CONTROL, channels_last=False),
        CONTROL,
    ),
    "eager": Fault("nothing is compiled; the network is", CONTROL, replace(CONTROL, compiled=True)),
    "bf16": Fault(
        "all in fp32; convolutions and what autocast lets follow them in bf16",
        SINGLE_PRECISION,
        replace(SINGLE_PRECISION, precision="bf16"),
    ),
    "double_batch": Fault("half of the usual batch; twice as much", replace(CONTROL, batch_size=48), CONTROL),
}
"""The faults by their names. The last two entries are no faults: they only change a step."""


class Images(Dataset[tuple[Tensor, int]]):
    """An endless data set of random images, of which a random part is resized, and flipped in half of the cases."""

    def __init__(self, switches: Switches, pixels: int) -> None:
        self.switches, self.pixels = switches, pixels
        random = torch.Generator().manual_seed(0)
        shape = (_IMAGES, 3, pixels * 8 // 7, pixels * 8 // 7)
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=random)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index % _IMAGES]  # (C, h, w)
        side = int(torch.randint(self.pixels // 2, image.shape[-1], ()))
        top, left = torch.randint(image.shape[-1] - side + 1, (2,)).tolist()
        part = image[None, :, top : top + side, left : left + side].float()
        resized = F.interpolate(part, (self.pixels, self.pixels), mode="bilinear", antialias=True)[0]
        flipped = resized.flip(-1) if torch.rand(()) < 0.5 else resized
        return flipped if self.switches.float_images else flipped.round().to(torch.uint8), index % CLASSES


class Bottleneck(nn.Module):
    """Convolutions of 1 × 1, 3 × 3 and 1 × 1, each with batch norm, and a shortcut around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        is_identity = stride == 1 and channels == out
        past = (nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.past = nn.Identity() if is_identity else nn.Sequential(*past)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, h, w) -> (B, C', h', w')
        """Returns the sum of the shortcut and the convolutions."""
        return F.relu(self.past(x) + self.body(x))


class ResNet(nn.Module):
    """A ResNet with the given number of blocks in each of its four stages; 3, 4, 6 and 3 are ResNet-50."""

    def __init__(self, stages: tuple[int, ...], *, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )  # fmt: skip
        blocks, channels = [], 64
        for stage, count in enumerate(stages):
            for index in range(count):
                blocks.append(Bottleneck(channels, 64 * 2**stage, 1 + (stage > 0 and index == 0)))
                channels = 256 * 2**stage
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of each class: (B, C, h, w) -> (B, classes)."""
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Training(HostWork):
    """A network, its data and its optimizer, and a step with the given switches."""

    switches: Switches

    def __init__(self, switches: Switches, *, device: str, tiny: bool, turns: Iterator[None] | None) -> None:
        super().__init__(switches, device, turns)
        torch.manual_seed(0)
        self.format = torch.channels_last if switches.channels_last else torch.contiguous_format
        self.model = ResNet((1, 1, 1, 1) if tiny else (3, 4, 6, 3), recomputed=switches.recomputed)
        self.model.to(device, memory_format=self.format)
        if switches.compiled:
            self.model.compile(dynamic=False)
        self.watch(self.model)
        fused = switches.optimizer == "fused"
        self.optimizer = torch.optim.SGD(
            self.parameters, lr=0.01, momentum=0.9, weight_decay=1e-4, fused=fused, foreach=False
        )
        workers = min(switches.workers, 2) if tiny else switches.workers
        self.loader = DataLoader(
            Images(switches, 64 if tiny else PIXELS),
            batch_size=2 if tiny else switches.batch_size or BATCH_SIZE,
            shuffle=True,
            num_workers=workers,
            pin_memory=switches.pinned and device == "cuda",
        )
        self.loss = torch.empty(0)

    def train(self, steps: int) -> None:
        """Runs the given number of steps."""
        batches = islice(self.batches(), steps)
        first = next(batches)
        step = self.replay_on(*first) if self.switches.cuda_graph else self.train_on
        for images, classes in chain([first], batches):
            step(images, classes)
            self.after_step()

    def replay_on(self, images: Tensor, classes: Tensor) -> Callable[[Tensor, Tensor], None]:
        """Captures a step as a CUDA graph, and returns the function that replays it on a batch."""
        static_images, static_classes = images.clone(), classes.clone()
        replay = harness.capture_graphs({"step": lambda: self.train_on(static_images, static_classes)})["step"]

        def copy_and_replay(images: Tensor, classes: Tensor) -> None:
            static_images.copy_(images)
            static_classes.copy_(classes)
            replay()

        return copy_and_replay

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields batches on the device, in fp32 from −1 to 1."""
        for images, classes in self.loader:
            moved = images.to(self.device, non_blocking=self.switches.pinned)
            scaled = (moved.float() / 127.5 - 1).contiguous(memory_format=self.format)
            yield scaled, classes.to(self.device, non_blocking=self.switches.pinned)

    def train_on(self, images: Tensor, classes: Tensor) -> None:
        """Runs one step on a batch."""
        bf16, cached = self.switches.precision == "bf16", not self.switches.cuda_graph
        with torch.autocast(self.device, torch.bfloat16, enabled=bf16, cache_enabled=cached):
            loss = F.cross_entropy(self.model(images), classes)
        loss.backward()
        self.loss = loss.detach()
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def train(switches: Switches, given: argparse.Namespace, turns: Iterator[None] | None) -> None:
    """Trains, and prints the loss."""
    training = Training(switches, device=given.device, tiny=given.tiny, turns=turns)
    training.train(given.steps)
    print(f"loss {training.loss.item():.4f}")


if __name__ == "__main__":
    shape = {"model": "resnet-50", "batch_size": BATCH_SIZE, "context_length": PIXELS}
    run(__file__, "Trains a ResNet-50, with or without a planted fault.", FAULTS, shape, train)
