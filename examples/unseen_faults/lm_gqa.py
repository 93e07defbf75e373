"""Pre-training of a small Llama-style language model with grouped-query attention.

Pure bf16 weights, SDPA attention, fused AdamW, random tokens held on the device.

    python lm_gqa.py --steps 50
    python lm_gqa.py --fault vocab_50257 --steps 50
"""
import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

PROGRAM = "lm_gqa"
FAULTS = ["none", "vocab_50257", "manual_rmsnorm", "metrics_every_step",
          "needless_checkpointing", "grad_stats_item", "dense_mask"]


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


@dataclass
class Config:
    vocab: int = 50304
    dim: int = 1024
    layers: int = 16
    heads: int = 16
    kv_heads: int = 4
    ffn: int = 2816
    seq: int = 1024
    batch: int = 8
    fault: str = "none"


def make_config(args):
    cfg = Config(fault=args.fault)
    if args.tiny:
        cfg = Config(vocab=320, dim=64, layers=2, heads=4, kv_heads=2, ffn=96, seq=32, batch=2,
                     fault=args.fault)
    if args.fault == "vocab_50257":
        cfg.vocab = 257 if args.tiny else 50257
    return cfg


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LlamaRMSNorm(RMSNorm):
    def forward(self, x):
        h = x.float()
        variance = h.pow(2).mean(-1, keepdim=True)
        h = h * torch.rsqrt(variance + self.eps)
        return self.weight * h.to(x.dtype)


def make_norm(cfg):
    if cfg.fault == "manual_rmsnorm":
        return LlamaRMSNorm(cfg.dim)
    return RMSNorm(cfg.dim)


def rotate(x, cos, sin):
    """Rotary embedding; the sign of the rotated half is folded into `sin`."""
    a, b = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((b, a), dim=-1), sin)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.hd = cfg.dim // cfg.heads
        self.q_size, self.kv_size = cfg.heads * self.hd, cfg.kv_heads * self.hd
        self.qkv = nn.Linear(cfg.dim, self.q_size + 2 * self.kv_size, bias=False)
        self.out = nn.Linear(cfg.dim, cfg.dim, bias=False)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = q.view(B, T, self.cfg.heads, self.hd).transpose(1, 2)
        k = k.view(B, T, self.cfg.kv_heads, self.hd).transpose(1, 2)
        v = v.view(B, T, self.cfg.kv_heads, self.hd).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.cfg.fault == "dense_mask":
            mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril().expand(B, 1, T, T)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate_up = nn.Linear(cfg.dim, 2 * cfg.ffn, bias=False)
        self.down = nn.Linear(cfg.ffn, cfg.dim, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.norm2 = make_norm(cfg), make_norm(cfg)
        self.attn, self.ffn = Attention(cfg), FeedForward(cfg)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.ffn(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = make_norm(cfg)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        hd = cfg.dim // cfg.heads
        freq = 1.0 / 10000 ** (torch.arange(0, hd, 2) / hd)
        angles = torch.outer(torch.arange(cfg.seq), freq)
        cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", torch.cat([cos, cos], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], dim=-1), persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            if self.cfg.fault == "needless_checkpointing":
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class RunningMetrics:
    """Accumulated on the device, read every 100 steps."""

    def __init__(self, device):
        self.sums = torch.zeros(3, device=device)

    @torch.no_grad()
    def update(self, logits, targets):
        logp = logits.float().log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        top5 = (logp.topk(5, dim=-1).indices == targets[:, None]).any(-1).float().mean()
        top1 = (logp.argmax(-1) == targets).float().mean()
        self.sums += torch.stack([entropy, top5, top1])


def log_grad_stats(model, history):
    stats = {}
    for name, p in model.named_parameters():
        stats[name + "/norm"] = p.grad.norm().item()
        stats[name + "/max"] = p.grad.abs().max().item()
    history.append(stats)


def main():
    args = parse_args()
    cfg = make_config(args)
    torch.manual_seed(0)
    device = torch.device(args.device)
    with device:
        model = LanguageModel(cfg)
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95),
                                  weight_decay=0.1, fused=True)
    corpus = torch.randint(0, min(cfg.vocab, 50257), (16, cfg.batch, cfg.seq + 1), device=device)
    metrics = RunningMetrics(device)
    history = []
    loss_sum = torch.zeros((), device=device)
    timer = StepTimer(args)

    for step in range(timer.total):
        timer.begin(step)
        batch = corpus[step % len(corpus)]
        tokens, targets = batch[:, :-1], batch[:, 1:].flatten()
        logits = model(tokens).view(-1, cfg.vocab)
        loss = F.cross_entropy(logits, targets)
        if args.fault == "metrics_every_step":
            metrics.update(logits, targets)
        loss.backward()
        if args.fault == "grad_stats_item":
            log_grad_stats(model, history)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum += loss.detach()
        timer.end(step)

    timer.finish()
    mean = loss_sum.item() / max(timer.total, 1)
    assert math.isfinite(mean)
    print(f"{PROGRAM} fault={args.fault} mean loss {mean:.3f}")


if __name__ == "__main__":
    main()
