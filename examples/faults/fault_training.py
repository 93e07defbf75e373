"""Defines a training loop whose parts can be switched one by one; ``faults.py`` plants its faults into it.

The control trains as one should: bf16 autocast, fused attention, compiled blocks, fused AdamW, batches made ahead by
worker processes and copied from pinned memory while the step before runs.
Nothing waits for the GPU between steps, unless a switch says so, so the CPU runs ahead as in real training.

Shapes: those of ``transformer.py``, and F feature tensors: added to the embedding, or the image of a convolution.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from host_work import HostSwitches, HostWork
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nsys_analyzer.analysis.transformer.models import ModelSize
from nsys_analyzer.errors import ConfigurationError
from profiling_targets import harness
from profiling_targets.harness import Config, annotate
from profiling_targets.transformer import ATTENTION, Block, Transformer

_BATCHES_IN_MEMORY = 4
_LONGEST_PIECE = 20
"""How many characters the tokenizer looks ahead."""


@dataclass(frozen=True)
class Switches(HostSwitches):
    """What the training loop does; the defaults are the control.

    Attributes:
        eager_attention: attention stays outside of the compiled regions.
        cuda_graph: forward, loss, backward and optimizer are one CUDA graph, captured once.
        tokenized: the data set holds text, and its tokens are found batch by batch, on the CPU.
        copies: from pinned memory while the step before runs, or from pageable memory when the batch is needed.
        feature_tensors: F, how many tensors of features a batch holds.
        cast_chains: how often the activations between two blocks are cast and transposed, there and back.
        context_length: None for the usual one.
    """

    attention: Literal["sdpa", "unfused"] = "sdpa"
    eager_attention: bool = False
    compiled: bool = True
    cuda_graph: bool = False
    tokenized: bool = False
    workers: int = 2
    copies: Literal["ahead", "pageable"] = "ahead"
    feature_tensors: int = 1
    cast_chains: int = 0
    context_length: int | None = None

    @property
    def needs_gpu(self) -> str | None:
        """What of it no CPU can do."""
        return "a CUDA graph" if self.cuda_graph else "TF32" if self.precision == "tf32" else None


@dataclass(frozen=True)
class Case:
    """A loop, its network and its size: what one training is made from."""

    switches: Switches
    size: ModelSize
    batch_size: int
    context_length: int
    device: str
    network: str = "transformer"

    def __post_init__(self) -> None:
        if self.network != "transformer" and (self.switches.attention != "sdpa" or self.switches.eager_attention):
            raise ConfigurationError(
                f"The network {self.network} has no attention of its own to change", "Choose --network transformer"
            )

    def config(self) -> Config:
        """The configuration of its transformer."""
        return Config(
            self.size,
            batch_size=self.batch_size,
            context_length=self.context_length,
            precision=self.switches.precision,
            attention=self.switches.attention,
            device=self.device,
        )


Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens (B, S), targets (B, S) and features (F, B, S, d) in fp32."""


class Batches(Dataset[Batch]):
    """An endless data set of whole batches, which lie in memory that worker processes share."""

    def __init__(self, case: Case) -> None:
        random = torch.Generator().manual_seed(0)
        shape = (case.batch_size, case.context_length)
        self.batches: list[Batch] = []
        for _ in range(_BATCHES_IN_MEMORY):
            tokens, targets = (torch.randint(case.size.vocab_size, shape, generator=random) for _ in range(2))
            features = torch.randn(case.switches.feature_tensors, *shape, case.size.d_model, generator=random)
            for tensor in (tokens, targets, features):
                tensor.share_memory_()  # type: ignore[no-untyped-call]
            self.batches.append((tokens, targets, features))
        self.vocabulary = {f"{token} ": token for token in range(case.size.vocab_size)}
        self.texts: list[list[str]] = []
        if case.switches.tokenized:
            for tokens, _, _ in self.batches:
                self.texts.append(["".join(f"{token} " for token in sample) for sample in tokens.tolist()])

    def __len__(self) -> int:
        return 1_000_000_000

    def __getitem__(self, index: int) -> Batch:
        index %= len(self.batches)
        tokens, targets, features = self.batches[index]
        if self.texts:
            tokens = torch.tensor([tokenize(text, self.vocabulary) for text in self.texts[index]])
        return tokens, targets, features


def tokenize(text: str, vocabulary: dict[str, int], longest_piece: int = _LONGEST_PIECE) -> list[int]:
    """The tokens of a text, each the longest piece of it that the vocabulary has: about a millisecond a sample."""
    tokens, start = [], 0
    while start < len(text):
        pieces = (text[start : start + length] for length in range(longest_piece, 0, -1))
        piece = next(piece for piece in pieces if piece in vocabulary)
        tokens.append(vocabulary[piece])
        start += len(piece)
    return tokens


def load(case: Case) -> DataLoader[Batch]:
    """Batches on the host, in the order of the data set: made by workers ahead of time, or by the caller.

    The workers start with an iterator and end with it.
    """
    workers = min(case.switches.workers, os.cpu_count() or 1)
    return DataLoader(
        Batches(case),
        batch_size=None,  # the data set makes whole batches
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        pin_memory=case.device == "cuda" and case.switches.copies == "ahead",
    )


class CopiedAhead:
    """Batches on the GPU: while a step runs, the next batch is copied on a stream of its own.

    Two sets of buffers take turns: a copy waits on the GPU for the step that read its buffers last.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.batches = batches
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        first = next(batches)
        tokens, targets, features = (torch.empty_like(tensor, device="cuda") for tensor in first)
        self.ahead: Batch = (tokens, targets, features)
        self.in_use: Batch = (tokens.clone(), targets.clone(), features.clone())
        self._copy(first)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        computing = torch.cuda.current_stream()
        computing.wait_stream(self.stream)
        self.stream.wait_stream(computing)
        self.ahead, self.in_use = self.in_use, self.ahead
        self._copy(next(self.batches))
        return self.in_use

    def _copy(self, host: Batch) -> None:
        with torch.cuda.stream(self.stream):
            for buffer, tensor in zip(self.ahead, host, strict=True):
                buffer.copy_(tensor, non_blocking=True)


def copied_when_needed(batches: Iterable[Batch], device: str) -> Iterator[Batch]:
    """Batches on the device, each copied when the loop asks for it, which then waits for the copy."""
    for tokens, targets, features in batches:
        yield tokens.to(device), targets.to(device), features.to(device)


class FeatureTransformer(Transformer):
    """The transformer of ``transformer.py``, its embedding with features added."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.config())
        self.cast_chains = case.switches.cast_chains
        self.dtype = torch.bfloat16 if case.switches.precision == "bf16" else torch.float32

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:  # type: ignore[override]
        """The logits of each token's successor: (B, S) and (F, B, S, d) -> (B, S, V)."""
        x = self.embedding(tokens)  # (B, S, d)
        for feature in features.unbind():
            x = x + feature
        x = x.to(self.dtype)
        for block in self.blocks:
            x = with_casts(block(x, self.cos, self.sin, self.future), self.cast_chains)
        logits: Tensor = self.head(self.norm(x))
        return logits


class EncoderLayer(nn.TransformerEncoderLayer):
    """PyTorch's own layer; its ``forward`` stands here because none of ``torch.nn`` is compiled when called first."""

    def forward(self, x: Tensor, future: Tensor) -> Tensor:  # type: ignore[override]  # (B, S, d), (S, S) -> (B, S, d)
        """Causal attention and feed-forward, each behind its norm."""
        x = x + self._sa_block(self.norm1(x), future, None, is_causal=True)
        return x + self._ff_block(self.norm2(x))


class EncoderNetwork(nn.Module):
    """Encoder layers stacked as in GPT-2: LayerNorm, GELU, biases, dropout, learned positions."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        size, self.cast_chains = case.size, case.switches.cast_chains
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        self.positions = nn.Parameter(torch.randn(case.context_length, size.d_model) * 0.02)  # (S, d)
        self.blocks = nn.ModuleList(
            EncoderLayer(size.d_model, size.num_heads, size.d_ff, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(size.num_layers)
        )
        self.norm = nn.LayerNorm(size.d_model)
        self.head = nn.Linear(size.d_model, size.vocab_size, bias=False)
        future = nn.Transformer.generate_square_subsequent_mask(case.context_length)  # (S, S)
        self.register_buffer("future", future, persistent=False)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        """The logits of each token's successor: (B, S) and (F, B, S, d) -> (B, S, V)."""
        x = self.embedding(tokens) + self.positions + features.sum(0)  # (B, S, d)
        for block in self.blocks:
            x = with_casts(block(x, self.future), self.cast_chains)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions of 3 × 3 with batch norm, and what passes by them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = stride == 1 and channels == out
        self.past = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, h, w) -> (B, C', h', w')
        """What passes by and what the convolutions make of it, added."""
        return F.relu(self.past(x) + self.body(x))


class ConvolutionNetwork(nn.Module):
    """A residual network that names each patch of an image, as in segmentation: S patches of d values are the image."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        size, self.cast_chains = case.size, case.switches.cast_chains
        self.side = 16 if size.d_model % 256 == 0 else 4  # of a patch, pixels
        self.rows = 2 ** int(math.log2(case.context_length) / 2)  # of patches
        widths = [size.d_model // 8, size.d_model // 4, size.d_model // 2]
        stem = self.side // 4  # the second and the third third of the blocks halve the image, too
        self.stem = nn.Conv2d(size.d_model // self.side**2, widths[0], 2 * stem - 1, stem, padding=stem - 1)
        count = max(size.num_layers, 3)
        thirds = [index * 3 // count for index in range(count)]
        self.blocks = nn.ModuleList(
            ResidualBlock(widths[before], widths[third], 1 + third - before)
            for before, third in zip([0, *thirds], thirds, strict=False)
        )
        self.norm = nn.BatchNorm2d(widths[-1])
        self.head = nn.Conv2d(widths[-1], size.vocab_size, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        """The logits of each patch: (F, B, S, d) -> (B, S, V)."""
        del tokens  # the image says it all
        patches = (
            features.sum(0).permute(0, 2, 1).reshape(*features.shape[1::2], self.rows, -1)
        )  # (B, d, rows, columns)
        image = F.pixel_shuffle(patches, self.side)  # (B, d / side², rows · side, columns · side)
        x = self.stem(image.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            x = with_casts(block(x), self.cast_chains)
        logits: Tensor = self.head(self.norm(x))  # (B, V, rows, columns)
        return logits.permute(0, 2, 3, 1).flatten(1, 2)


NETWORKS = {"transformer": FeatureTransformer, "encoder": EncoderNetwork, "convolution": ConvolutionNetwork}
"""What can be trained, by the name that the command line has for it."""


def with_casts(x: Tensor, chains: int) -> Tensor:
    """The same values, cast and transposed there and back so many times."""
    for _ in range(chains):
        x = there_and_back(x)
    return x


def there_and_back(x: Tensor) -> Tensor:  # (B, S, d) -> (B, S, d), or an image
    """The same values in the same order: four copies that change nothing."""
    transposed = x.float().transpose(1, 2).contiguous()  # (B, d, S)
    return transposed.transpose(1, 2).contiguous().to(x.dtype)


class CrossEntropy(nn.Module):
    """Cross entropy over all tokens: a module, so that it compiles as the blocks do."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:  # (B, S, V), (B, S) -> ()
        """The mean over all tokens."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


EAGER = {name: torch.compiler.disable(attend) for name, attend in ATTENTION.items()}  # type: ignore[no-untyped-call]
"""Attention that no compiled region takes in; its ranges stay."""


class Training(HostWork):
    """A model, its data and its optimizer, and a step that does what the switches say."""

    switches: Switches

    def __init__(self, case: Case) -> None:
        super().__init__(case.switches, case.device)
        torch.manual_seed(0)
        with torch.device(case.device):
            self.model = NETWORKS[case.network](case)
        self.loss_of = CrossEntropy()
        self._choose_regions()
        self.watch(self.model)
        fused = self.switches.optimizer == "fused"
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=3e-4, fused=fused, foreach=False, capturable=self.switches.cuda_graph
        )
        self.loader = load(case)
        self.batches: Iterator[Batch] | None = None
        self.loss = torch.empty(0)
        if self.switches.cuda_graph:  # the graph of a step on inputs that stay where they are
            tokens, targets, features = self._next_batch()
            self.inputs = (tokens.clone(), targets.clone(), features.clone())
            self.replay = harness.capture_graphs({"step": lambda: self._train(self.inputs)})["step"]

    def rest(self) -> None:
        """Ends the worker processes, so that they take no time from another training; the next step starts new ones."""
        self.batches = None  # the last reference: with the iterator its workers end

    def step(self) -> None:
        """One step of training; the CPU has launched it when this returns, the GPU may be steps behind."""
        with annotate("step"):
            with annotate("data"):
                batch = self._next_batch()
            if not self.switches.cuda_graph:
                self._train(batch)
            else:
                with annotate("replay"):
                    for static, tensor in zip(self.inputs, batch, strict=True):
                        static.copy_(tensor)
                    self.replay()
            self.after_step()

    def _next_batch(self) -> Batch:
        if self.batches is None:
            is_ahead = self.switches.copies == "ahead" and self.device == "cuda"
            loaded = iter(self.loader)
            self.batches = CopiedAhead(loaded) if is_ahead else copied_when_needed(loaded, self.device)
        return next(self.batches)

    def _train(self, batch: Batch) -> None:
        tokens, targets, features = batch
        bf16, cached = self.switches.precision == "bf16", not self.switches.cuda_graph
        with torch.autocast(self.device, torch.bfloat16, enabled=bf16, cache_enabled=cached):
            with annotate("forward"):
                logits = self.model(tokens, features)  # (B, S, V)
            with annotate("loss"):
                loss = self.loss_of(logits, targets)
        with annotate("backward"):
            loss.backward()
        self.loss = loss.detach()
        self.before_update()
        with annotate("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _choose_regions(self) -> None:
        """Compiles each block by itself, the norm and the loss; or leaves attention or all of it as it is."""
        blocks = cast("nn.ModuleList", self.model.blocks)
        if self.switches.eager_attention:
            for block in blocks:
                cast(Block, block).attention.attend = EAGER[self.switches.attention]
        if self.switches.compiled:
            for region in (*blocks, self.model.norm, self.loss_of):
                region.compile(dynamic=False)
