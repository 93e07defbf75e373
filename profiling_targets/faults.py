"""Trains the transformer of ``transformer.py`` with one fault planted: each is a usual way to lose time on a GPU.

``python -m profiling_targets.faults --fault item`` trains with the fault, ``--remedy`` with what removes it, and
``--compare`` times the two in turns, without a profiler. ``--list`` names the faults.

The control trains as one should: bf16 autocast, fused attention, compiled blocks, fused AdamW, batches made ahead by
worker processes and copied from pinned memory while the step before runs. A fault changes one thing about it.
Nothing waits for the GPU between steps, unless the fault does, so the CPU runs ahead as in real training.

Shapes: those of ``transformer.py``, and F feature tensors that are added to the embedding.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nsys_analyzer.analysis.transformer.models import ModelSize
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.system.atomic_write import write_text
from profiling_targets import harness
from profiling_targets.harness import Config, annotate, synchronize
from profiling_targets.transformer import ATTENTION, Block, Transformer

BATCH_SIZE, CONTEXT_LENGTH = 48, 512
ROUNDS = 7
_SETTLING_STEPS = 2
"""Steps before each timed block: what the other one did to allocator, caches and loader is not its time."""
_BATCHES_IN_MEMORY = 4
_LONGEST_PIECE = 20
"""How many characters the tokenizer looks ahead."""


@dataclass(frozen=True)
class Switches:
    """What the training loop does; the defaults are the control.

    Attributes:
        eager_attention: attention stays outside of the compiled regions.
        optimizer: AdamW in one kernel for many parameters, or a dozen small kernels for each.
        cuda_graph: forward, loss, backward and optimizer are one CUDA graph, captured once.
        tokenized: the data set holds text, and its tokens are found batch by batch, on the CPU.
        workers: processes that make batches; 0 is the training loop itself.
        copies: from pinned memory while the step before runs, or from pageable memory when the batch is needed.
        feature_tensors: F, how many tensors of features a batch holds.
        norms: those of each parameter and its gradient, read at once, or of all of them, kept on the device.
        cast_chains: how often the activations between two blocks are cast and transposed, there and back.
        checkpoint: weights to the host after every step: to pageable memory, for which the CPU waits, or to pinned
            memory on a stream of its own.
        empty_cache: gives the allocator's unused memory back after every step.
        heap_records: records in memory that Python's garbage collector tracks, two objects each.
        collect: runs the garbage collector after every step.
        freeze: takes the records out of what the garbage collector looks at.
        batch_size, context_length: None for the usual ones.
    """

    precision: Literal["bf16", "tf32", "fp32"] = "bf16"
    attention: Literal["sdpa", "unfused"] = "sdpa"
    eager_attention: bool = False
    compiled: bool = True
    optimizer: Literal["fused", "for each parameter"] = "fused"
    cuda_graph: bool = False
    tokenized: bool = False
    workers: int = 2
    copies: Literal["ahead", "pageable"] = "ahead"
    feature_tensors: int = 1
    norms: Literal["none", "each", "total"] = "none"
    cast_chains: int = 0
    checkpoint: Literal["none", "blocking", "overlapped"] = "none"
    empty_cache: bool = False
    heap_records: int = 0
    collect: bool = False
    freeze: bool = False
    batch_size: int | None = None
    context_length: int | None = None

    @property
    def needs_gpu(self) -> str | None:
        """What of it no CPU can do."""
        return "a CUDA graph" if self.cuda_graph else "TF32" if self.precision == "tf32" else None


class Fault(NamedTuple):
    """A fault: what is wrong in a line, the loop that has it, and the loop without it."""

    description: str
    fault: Switches
    remedy: Switches


CONTROL = Switches()
TINY = Switches(compiled=False, batch_size=1, context_length=64)
LARGE_FEATURES = Switches(feature_tensors=2)
SINGLE_PRECISION = Switches(precision="fp32", batch_size=8)
EAGER_ATTENTION = Switches(eager_attention=True, batch_size=32)
MANY_LAUNCHES = Switches(batch_size=32)
HEAP = Switches(heap_records=200_000)

FAULTS: dict[str, Fault] = {
    "none": Fault("nothing is wrong: the control", CONTROL, CONTROL),
    "loader": Fault(
        "the training loop tokenizes each batch itself; worker processes do it ahead",
        replace(CONTROL, tokenized=True, workers=0),
        replace(CONTROL, tokenized=True, workers=8),
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
        "batches are copied from pageable memory when they are needed; pinned memory lets them be copied ahead",
        replace(LARGE_FEATURES, copies="pageable"),
        LARGE_FEATURES,
    ),
    "fp32": Fault(
        "matmuls in fp32, without tensor cores; TF32 uses them",
        SINGLE_PRECISION,
        replace(SINGLE_PRECISION, precision="tf32"),
    ),
    "foreach": Fault(
        "AdamW runs a dozen small kernels for each parameter; the fused one does all in a few",
        replace(MANY_LAUNCHES, optimizer="for each parameter"),
        MANY_LAUNCHES,
    ),
    "empty_cache": Fault(
        "torch.cuda.empty_cache() after every step; without it",
        replace(CONTROL, empty_cache=True),
        CONTROL,
    ),
    "attention": Fault(
        "naive (unfused) attention; scaled_dot_product_attention, outside of the compiled regions as well",
        replace(EAGER_ATTENTION, attention="unfused"),
        EAGER_ATTENTION,
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
    "casts": Fault(
        "activations are cast and transposed between blocks, there and back; not at all",
        replace(CONTROL, cast_chains=2),
        CONTROL,
    ),
    "eager": Fault(
        "nothing is compiled; blocks, norm and loss are",
        replace(CONTROL, compiled=False),
        CONTROL,
    ),
}
"""Every fault by its name: a new one is an entry."""


@dataclass(frozen=True)
class Case:
    """A loop and its size: what one training is made from."""

    switches: Switches
    size: ModelSize
    batch_size: int
    context_length: int
    device: str

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


def tokenize(text: str, vocabulary: dict[str, int]) -> list[int]:
    """The tokens of a text, each the longest piece of it that the vocabulary has: about a millisecond a sample."""
    tokens, start = [], 0
    while start < len(text):
        pieces = (text[start : start + length] for length in range(_LONGEST_PIECE, 0, -1))
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
    """The transformer, its embedding with features added, and where it is wanted needless copies between blocks."""

    def __init__(self, config: Config, cast_chains: int) -> None:
        super().__init__(config)
        self.cast_chains = cast_chains
        self.dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:  # type: ignore[override]
        """The logits of each token's successor: (B, S) and (F, B, S, d) -> (B, S, V)."""
        x = self.embedding(tokens)  # (B, S, d)
        for feature in features.unbind():
            x = x + feature
        x = x.to(self.dtype)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.future)
            for _ in range(self.cast_chains):
                x = there_and_back(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def there_and_back(x: Tensor) -> Tensor:  # (B, S, d) -> (B, S, d)
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


class Training:
    """A model, its data and its optimizer, and a step that does what the switches say."""

    def __init__(self, case: Case) -> None:
        self.switches, self.device = case.switches, case.device
        self.prepare()
        torch.manual_seed(0)
        config = case.config()
        with torch.device(case.device):
            self.model = FeatureTransformer(config, self.switches.cast_chains)
        self.loss_of = CrossEntropy()
        self._choose_regions()
        self.parameters = tuple(self.model.parameters())
        fused = self.switches.optimizer == "fused"
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=3e-4, fused=fused, foreach=False, capturable=self.switches.cuda_graph
        )
        self.loader = load(case)
        self.batches: Iterator[Batch] | None = None
        self.weights = self.model.state_dict()
        overlapped = self.switches.checkpoint == "overlapped" and case.device == "cuda"
        self.snapshot = Snapshot(self.weights) if overlapped else None
        kept = self.weights if self.switches.checkpoint != "none" and not self.snapshot else {}
        self.saved = {name: torch.zeros_like(weight, device="cpu") for name, weight in kept.items()}
        self.norms: list[float] = []
        self.total_norms: tuple[Tensor, Tensor] | None = None
        self.loss = torch.empty(0)
        if self.switches.cuda_graph:  # the graph of a step on inputs that stay where they are
            tokens, targets, features = self._next_batch()
            self.inputs = (tokens.clone(), targets.clone(), features.clone())
            self.replay = harness.captured({"step": lambda: self._train(self.inputs)})["step"]

    def prepare(self) -> None:
        """Sets what is global in a process; call it before the steps where another training ran in between."""
        torch.set_float32_matmul_precision("high" if self.switches.precision == "tf32" else "highest")
        if self.switches.heap_records:
            self.heap: list[dict[str, object]] = []
            gc.unfreeze()
            gc.collect()
            gc.freeze()  # the collector is to look at the records alone, not at what the imports made
            self.heap = [{"index": index, "spans": [index]} for index in range(self.switches.heap_records)]
            if self.switches.freeze:
                gc.freeze()

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
            if self.switches.checkpoint != "none":
                with annotate("checkpoint"):
                    self._checkpoint()
            if self.switches.empty_cache:
                torch.cuda.empty_cache()
            if self.switches.collect:
                gc.collect()

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
        if self.switches.norms != "none":
            with annotate("log"):
                self._log()
        with annotate("optimizer"):
            if self.snapshot:
                self.snapshot.wait()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

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

    def _choose_regions(self) -> None:
        """Compiles each block by itself, the norm and the loss; or leaves attention or all of it as it is."""
        blocks = [block for block in self.model.blocks if isinstance(block, Block)]
        if self.switches.eager_attention:
            for block in blocks:
                block.attention.attend = EAGER[self.switches.attention]
        if self.switches.compiled:
            for region in (*blocks, self.model.norm, self.loss_of):
                region.compile(dynamic=False)


def compare(fault: Case, remedy: Case, *, steps: int, warmup: int, rounds: int = ROUNDS) -> tuple[list[float], ...]:
    """Times blocks of steps of the two in turns, so that a change of the machine's pace meets both.

    Returns:
        Milliseconds of a step of the fault, and of the remedy, without a profiler: one value for each round.
    """
    trainings = [Training(case) for case in (fault, remedy)]
    for training in trainings:
        timed_ms(training, warmup)
    times: tuple[list[float], ...] = ([], [])
    for _ in range(rounds):
        for training, values in zip(trainings, times, strict=True):
            values.append(timed_ms(training, steps))
    return times


def timed_ms(training: Training, steps: int) -> float:
    """Milliseconds of a step: the mean over steps between which nothing waits for the GPU.

    Workers start before the timed steps, and end after them: no other training's block meets them.
    """
    training.prepare()
    for _ in range(_SETTLING_STEPS):
        training.step()
    synchronize(training.device)
    before = time.perf_counter()
    for _ in range(steps):
        training.step()
    synchronize(training.device)
    elapsed = time.perf_counter() - before
    training.rest()
    return elapsed / steps * 1e3


def measure(case: Case, *, steps: int, warmup: int) -> tuple[float, float]:
    """Warms up, then runs the steps inside the capture range, and waits for the GPU only when all are launched.

    Returns:
        Milliseconds of a step, and the loss of the last.
    """
    training = Training(case)
    with annotate("warmup"):
        for _ in range(warmup):
            training.step()
        synchronize(case.device)
    training.prepare()  # what compiling left in memory is nothing for the garbage collector of the measured steps
    harness.profiler("start", case.device)
    before = time.perf_counter()
    for _ in range(steps):
        training.step()
    synchronize(case.device)
    step_ms = (time.perf_counter() - before) / steps * 1e3
    harness.profiler("stop", case.device)
    return step_ms, training.loss.item()


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit code, 2 where the device cannot do it."""
    given = _parse(arguments)
    if given.list:
        for name, fault in FAULTS.items():
            print(f"{name:12} {fault.description}")
        return 0
    try:
        return _run(given)
    except ConfigurationError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    harness._ranges_wanted = not given.no_ranges
    fault = FAULTS[given.fault]
    if given.compare:
        case = _case(fault.fault, given)
        fault_ms, remedy_ms = compare(case, _case(fault.remedy, given), steps=given.steps, warmup=given.warmup)
        for name, values in (("fault", fault_ms), ("remedy", remedy_ms)):
            print(f"{name:8} {statistics.median(values):10.3f} ms, {min(values):.3f} to {max(values):.3f}")
        found: dict[str, object] = {
            "gpu": torch.cuda.get_device_name() if case.device == "cuda" else None,
            "torch": str(torch.__version__),
            "rounds": len(fault_ms),
            "fault_ms": fault_ms,
            "remedy_ms": remedy_ms,
        }
    else:
        case = _case(fault.remedy if given.remedy else fault.fault, given)
        step_ms, loss = measure(case, steps=given.steps, warmup=given.warmup)
        print(f"step {step_ms:10.3f} ms, mean of {given.steps}; loss {loss:.4f}")
        found = {"remedy": given.remedy, "step_ms": step_ms, "loss": loss}
    if given.results:
        shape = {"batch_size": case.batch_size, "context_length": case.context_length}
        results = {"fault": given.fault, "model": case.size.name, **shape, "steps": given.steps, **found}
        write_text(given.results, json.dumps(results, indent=1) + "\n")
    return 0


def _case(switches: Switches, given: argparse.Namespace) -> Case:
    """The loop at the size that the command line, the fault or the defaults say, in this order."""
    if given.no_compile:
        switches = replace(switches, compiled=False)
    if given.device == "cpu" and switches.needs_gpu:
        raise ConfigurationError(
            f"--fault {given.fault} needs {switches.needs_gpu} here, which no CPU has",
            "Run it on a GPU, or choose another fault: --list names them",
        )
    return Case(
        switches,
        harness.size_of(given),
        batch_size=given.batch_size or switches.batch_size or BATCH_SIZE,
        context_length=given.context_length or switches.context_length or CONTEXT_LENGTH,
        device=given.device,
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    description = "Trains a transformer with one fault planted, or without it."
    parser = harness.command_line("faults", description, ["device"])
    parser.add_argument("--fault", default="none", choices=FAULTS, help="what is wrong; --list describes each")
    parser.add_argument("--remedy", action="store_true", help="train with what removes the fault")
    parser.add_argument("--compare", action="store_true", help="time fault and remedy in turns, without a profiler")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    parser.add_argument("--batch-size", type=int, help=f"default: the fault's, else {BATCH_SIZE}")
    parser.add_argument("--context-length", type=int, help=f"default: the fault's, else {CONTEXT_LENGTH}")
    parser.add_argument("--steps", type=int, default=6, help="measured steps, with --compare those of each block")
    parser.add_argument("--warmup", type=int, default=6, help="steps before the measured ones")
    parser.add_argument("--no-compile", action="store_true", help="compile nothing, whatever the fault says")
    given = parser.parse_args(arguments)
    if given.steps < 1 or given.warmup < 0:
        parser.error("--steps must be at least 1, and --warmup at least 0")
    return given


if __name__ == "__main__":
    sys.exit(main())
