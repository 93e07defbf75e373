"""Masked-language-model pre-training of a BERT-base (from a config) with the Hugging Face Trainer.

bf16, SDPA attention, dynamic padding, vectorised masking in the collator, fused AdamW.
"""
import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # one process, one GPU: no DataParallel

import torch
from transformers import (BertConfig, BertForMaskedLM, Trainer, TrainerCallback,
                          TrainingArguments)

PROGRAM = "hf_bert"
FAULTS = ["none", "pad_max_length", "python_masking", "empty_cache_every_step", "adafactor",
          "eager_attention"]
PAD, CLS, SEP, MASK = 0, 101, 102, 103


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--fault", default="none", choices=FAULTS)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--warmup", type=int, default=5)
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--json", default=None)
    return p.parse_args()


class StepTimer:
    """Wall clock per step; does nothing unless --json was given.

    With --json the loop runs warmup + steps (timed one by one, with a
    synchronisation on both sides) + steps again (free running, timed as a whole).
    """

    def __init__(self, args):
        self.args, self.on, self.ms = args, args.json is not None, []
        self.total = args.warmup + args.steps * (2 if self.on else 1)

    def _sync(self):
        if self.args.device == "cuda":
            torch.cuda.synchronize()

    def begin(self, step):
        if self.on and self.args.warmup <= step <= self.args.warmup + self.args.steps:
            self._sync()
            self.t0 = time.perf_counter()

    def end(self, step):
        if self.on and self.args.warmup <= step < self.args.warmup + self.args.steps:
            self._sync()
            self.ms.append((time.perf_counter() - self.t0) * 1e3)

    def finish(self):
        if not self.on:
            return
        self._sync()
        free = (time.perf_counter() - self.t0) * 1e3 / self.args.steps
        with open(self.args.json, "w") as f:
            json.dump({"program": PROGRAM, "fault": self.args.fault,
                       "median_step_ms": statistics.median(self.ms),
                       "steps": self.args.steps, "free_running_step_ms": free}, f)


class TimerCallback(TrainerCallback):
    """Only added with --json: times from the end of one optimizer step to the end of the next."""

    def __init__(self, timer):
        self.timer = timer

    def on_train_begin(self, args, state, control, **kwargs):
        self.timer.begin(0)

    def on_step_end(self, args, state, control, **kwargs):
        self.timer.end(state.global_step - 1)
        self.timer.begin(state.global_step)
        if state.global_step == self.timer.total:
            self.timer.finish()


class RandomCorpus(torch.utils.data.Dataset):
    """Tokenised documents of 190 to 320 tokens, already in memory."""

    def __init__(self, size, vocab, low, high):
        g = torch.Generator().manual_seed(0)
        self.docs = []
        for _ in range(size):
            n = int(torch.randint(low, high + 1, (1,), generator=g))
            ids = torch.randint(min(1000, vocab // 2), vocab, (n,), generator=g)
            ids[0], ids[-1] = CLS, SEP
            self.docs.append(ids)

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        return {"input_ids": self.docs[i]}


class MlmCollator:
    """Whole-word masking: a word is a token and the continuation tokens ("##...") behind it."""

    def __init__(self, vocab, max_length, pad_to_max=False):
        self.vocab, self.max_length, self.pad_to_max = vocab, max_length, pad_to_max
        self.id_to_token = [f"##{i}" if i % 4 == 3 else f"t{i}" for i in range(vocab)]
        for i, name in ((PAD, "[PAD]"), (CLS, "[CLS]"), (SEP, "[SEP]"), (MASK, "[MASK]")):
            self.id_to_token[i] = name
        self.continues = torch.tensor([t.startswith("##") for t in self.id_to_token])

    def pad(self, examples):
        longest = max(len(e["input_ids"]) for e in examples)
        width = min(self.max_length, (longest + 7) // 8 * 8)
        if self.pad_to_max:
            width = self.max_length
        ids = torch.full((len(examples), width), PAD, dtype=torch.long)
        for row, e in zip(ids, examples):
            row[:len(e["input_ids"])] = e["input_ids"]
        return ids, (ids != PAD).long()

    def choose(self, ids):
        special = (ids == PAD) | (ids == CLS) | (ids == SEP)
        word = (~self.continues[ids]).long().cumsum(1)
        draw = torch.rand(ids.shape[0], ids.shape[1] + 1)
        return (draw.gather(1, word) < 0.15) & ~special

    def __call__(self, examples):
        ids, attention = self.pad(examples)
        chosen = self.choose(ids)
        labels = ids.masked_fill(~chosen, -100)
        draw = torch.rand(ids.shape)
        random_words = torch.randint(self.vocab, ids.shape)
        ids = torch.where(chosen & (draw < 0.8), MASK, ids)
        ids = torch.where(chosen & (draw >= 0.9), random_words, ids)
        return {"input_ids": ids, "attention_mask": attention, "labels": labels}


class PerTokenMlmCollator(MlmCollator):
    def whole_words(self, tokens):
        words = []
        for i, token in enumerate(tokens):
            if token in ("[CLS]", "[SEP]", "[PAD]"):
                continue
            if words and token.startswith("##"):
                words[-1].append(i)
            else:
                words.append([i])
        random.shuffle(words)
        budget = max(1, round(len(tokens) * 0.15))
        covered = set()
        for word in words:
            if len(covered) >= budget:
                break
            covered.update(word)
        return covered

    def mask_token(self, token):
        draw = random.random()
        if draw < 0.8:
            return MASK
        return token if draw < 0.9 else random.randrange(self.vocab)

    def __call__(self, examples):
        ids, attention = self.pad(examples)
        masked, labels = [], []
        for row in ids:
            row = [int(token) for token in row]
            covered = self.whole_words([self.id_to_token[token] for token in row])
            masked.append([self.mask_token(t) if i in covered else t for i, t in enumerate(row)])
            labels.append([t if i in covered else -100 for i, t in enumerate(row)])
        return {"input_ids": torch.tensor(masked), "attention_mask": attention,
                "labels": torch.tensor(labels)}


def make_collator(args, vocab, max_length):
    if args.fault == "python_masking":
        return PerTokenMlmCollator(vocab, max_length)
    return MlmCollator(vocab, max_length, pad_to_max=args.fault == "pad_max_length")


def make_model(args):
    attention = "eager" if args.fault == "eager_attention" else "sdpa"
    if args.tiny:
        config = BertConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2,
                            num_attention_heads=2, intermediate_size=128,
                            max_position_embeddings=64, attn_implementation=attention)
    else:
        config = BertConfig(vocab_size=30528, max_position_embeddings=512,
                            attn_implementation=attention)
    return BertForMaskedLM(config)


def main():
    args = parse_args()
    torch.manual_seed(0)
    random.seed(0)
    timer = StepTimer(args)
    model = make_model(args)
    vocab, max_length = model.config.vocab_size, model.config.max_position_embeddings
    batch = 4 if args.tiny else 32
    low, high = (12, 32) if args.tiny else (190, 320)
    corpus = RandomCorpus(batch * 32, vocab, low, high)
    options = dict(
        output_dir=tempfile.mkdtemp(prefix="hf_bert_"),
        per_device_train_batch_size=batch,
        max_steps=timer.total,
        learning_rate=1e-4,
        bf16=True,
        optim="adamw_torch_fused",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_drop_last=True,
        accelerator_config={"non_blocking": True},
        use_cpu=args.device == "cpu",
    )
    if args.fault == "adafactor":
        options["optim"] = "adafactor"
    if args.fault == "empty_cache_every_step":
        options["torch_empty_cache_steps"] = 1
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**options),
        train_dataset=corpus,
        data_collator=make_collator(args, vocab, max_length),
        callbacks=[TimerCallback(timer)] if args.json else None,
    )
    # no gradient accumulation: the plain batch mean is right, and no token count goes to the device
    trainer.model_accepts_loss_kwargs = False
    result = trainer.train()
    assert math.isfinite(result.training_loss)
    print(f"{PROGRAM} fault={args.fault} mean loss {result.training_loss:.3f}")


if __name__ == "__main__":
    main()
