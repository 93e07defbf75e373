"""Trains a Llama-like model with grouped-query attention and the ``Trainer`` of transformers, with one planted fault.

``python examples/faults/llama.py --fault item`` trains with the fault, ``--remedy`` with its remedy, and
``--compare`` times both in turns. The control trains as ``Trainer`` does by default, in bf16, with attention in one
kernel, batches from worker processes, and the fused AdamW, and without a check of the loss in every step.

Shapes: B sequences of S tokens; d features.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from fault_training import tokenize
from host_work import Fault, HostSwitches, HostWork
from in_turns import run
from torch import Tensor
from torch.utils.data import Dataset

BATCH_SIZE, CONTEXT_LENGTH = 6, 1024
MODEL = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
TINY_MODEL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_SAMPLES = 24
_LONGEST_PIECE = 160
"""The number of characters that the tokenizer looks ahead."""


@dataclass(frozen=True)
class Switches(HostSwitches):
    """The switches of the training; the defaults are the control.

    Attributes:
        attention: the implementation in transformers: ``sdpa`` has one kernel, ``eager`` has many.
        tokenized: the data set contains text, which is tokenized sample by sample.
        embedded: the data set contains embeddings in fp32 instead of tokens, as for images or sound.
        pinned: batches are copied from pinned memory, and the CPU does not wait for the copies.
        padded: the samples fill a quarter, a half and three quarters of the context length.
        recomputed: the backward pass recomputes the activations of each layer.
        nan_filter: each step checks whether its loss is NaN, as ``Trainer`` does by default.
    """

    attention: str = "sdpa"
    tokenized: bool = False
    embedded: bool = False
    pinned: bool = True
    padded: bool = False
    recomputed: bool = False
    nan_filter: bool = False


CONTROL = Switches()
TOKENIZED = Switches(tokenized=True)
EMBEDDED = Switches(embedded=True)
SINGLE_PRECISION = Switches(precision="fp32", batch_size=2)
SMALL_BATCH = Switches(batch_size=2)
HEAP = Switches(heap_records=300_000)

FAULTS: dict[str, Fault] = {
    "none": Fault("nothing is wrong: the control", CONTROL, CONTROL),
    "loader": Fault(
        "the training process tokenizes each batch itself; worker processes do it ahead",
        replace(TOKENIZED, workers=0),
        TOKENIZED,
    ),
    "item": Fault(
        "the norm of every parameter and gradient is read by .item(); norms of all of them stay on the device",
        replace(CONTROL, norms="each"),
        replace(CONTROL, norms="total"),
    ),
    "nan_filter": Fault(
        "each step reads whether its loss is a number; logging_nan_inf_filter=False",
        replace(SMALL_BATCH, nan_filter=True),
        SMALL_BATCH,
    ),
    "pageable": Fault(
        "batches of embeddings are copied from pageable memory; from pinned memory, without a wait",
        replace(EMBEDDED, pinned=False),
        EMBEDDED,
    ),
    "fp32": Fault(
        "matmuls in fp32, without tensor cores; TF32 uses them",
        SINGLE_PRECISION,
        replace(SINGLE_PRECISION, precision="tf32"),
    ),
    "foreach": Fault(
        "AdamW runs a dozen small kernels for each parameter; the fused one does all in a few",
        replace(CONTROL, optimizer="for each parameter"),
        CONTROL,
    ),
    "empty_cache": Fault(
        "torch.cuda.empty_cache() after every step; without it",
        replace(CONTROL, empty_cache=True),
        CONTROL,
    ),
    "attention": Fault("naive (unfused) attention; SDPA", replace(CONTROL, attention="eager"), CONTROL),
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
        "backward computes all activations again although memory suffices; gradient_checkpointing=False",
        replace(CONTROL, recomputed=True),
        CONTROL,
    ),
    "padding": Fault(
        "half of the tokens are padding; the same tokens packed into half as many sequences",
        replace(CONTROL, padded=True),
        replace(CONTROL, batch_size=BATCH_SIZE // 2),
    ),
    "eager": Fault("nothing is compiled; torch_compile=True", CONTROL, replace(CONTROL, compiled=True)),
    "bf16": Fault(
        "all in fp32; matmuls and what autocast lets follow them in bf16",
        SINGLE_PRECISION,
        replace(SINGLE_PRECISION, precision="bf16"),
    ),
    "double_batch": Fault("half of the usual batch; twice as much", replace(CONTROL, batch_size=3), CONTROL),
}
"""The faults by their names. The last two entries are no faults: they only change a step."""


class Samples(Dataset[dict[str, Tensor]]):
    """An endless data set of random samples in memory."""

    def __init__(self, switches: Switches, context_length: int, vocabulary: int, features: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.switches = switches
        self.tokens = torch.randint(vocabulary, (_SAMPLES, context_length), generator=random)
        if switches.embedded:
            self.embeddings = torch.randn(_SAMPLES, context_length, features, generator=random)
        self.vocabulary = {f"{token} ": token for token in range(vocabulary)}
        self.texts = ["".join(f"{token} " for token in sample) for sample in self.tokens.tolist()]

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index %= _SAMPLES
        tokens = self.tokens[index]
        if self.switches.tokenized:
            tokens = torch.tensor(tokenize(self.texts[index], self.vocabulary, _LONGEST_PIECE))
        sample = {"inputs_embeds": self.embeddings[index]} if self.switches.embedded else {"input_ids": tokens}
        if not self.switches.padded:
            return {**sample, "labels": tokens}
        is_token = torch.arange(len(tokens)) < len(tokens) * (1 + index % 3) // 4
        return {**sample, "attention_mask": is_token.long(), "labels": torch.where(is_token, tokens, -100)}


def train(switches: Switches, given: argparse.Namespace, turns: Iterator[None] | None) -> None:
    """Trains with ``Trainer``, and prints the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    sizes, device = TINY_MODEL if given.tiny else MODEL, given.device
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, use_cache=False, attn_implementation=switches.attention)
    model = LlamaForCausalLM(config).to(device)
    work = HostWork(switches, device, turns)
    work.watch(model)

    class CallHostWork(TrainerCallback):  # type: ignore[misc]
        """Calls the work on the host at the events of ``Trainer``."""

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            """Reads norms when the gradients are complete."""
            work.before_update()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Runs the work after a step."""
            work.after_step()

    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=2 if given.tiny else switches.batch_size or BATCH_SIZE,
        max_steps=given.steps,
        bf16=switches.precision == "bf16",
        dataloader_num_workers=min(switches.workers, 2) if given.tiny else switches.workers,
        dataloader_pin_memory=switches.pinned and device == "cuda",
        accelerator_config={"non_blocking": switches.pinned},
        gradient_checkpointing=switches.recomputed,
        torch_compile=switches.compiled,
        logging_nan_inf_filter=switches.nan_filter,
        logging_steps=1_000_000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )
    fused = switches.optimizer == "fused"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused, foreach=False)
    samples = Samples(switches, 32 if given.tiny else CONTEXT_LENGTH, sizes["vocab_size"], sizes["hidden_size"])
    trainer = Trainer(model, arguments, train_dataset=samples, optimizers=(optimizer, None), callbacks=[CallHostWork()])
    print(f"loss {trainer.train().training_loss:.4f}")


if __name__ == "__main__":
    shape = {"model": "llama-491M", "batch_size": BATCH_SIZE, "context_length": CONTEXT_LENGTH}
    run(__file__, "Trains a Llama-like model with Trainer, with or without a planted fault.", FAULTS, shape, train)
