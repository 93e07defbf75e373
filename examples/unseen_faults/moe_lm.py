"""Pre-training of a mixture-of-experts language model (top-2 routing, static capacity).

Pure bf16 weights, SDPA attention, batched expert matmuls, fused AdamW, random tokens on the device.
"""
import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

PROGRAM = "moe_lm"
FAULTS = ["none", "expert_loop", "dense_experts", "onehot_dispatch", "cpu_argsort",
          "capacity_padding"]


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
    vocab: int = 32000
    dim: int = 1024
    layers: int = 8
    heads: int = 16
    experts: int = 8
    top_k: int = 2
    ffn: int = 2048
    seq: int = 1024
    batch: int = 8
    capacity_factor: float = 1.25
    fault: str = "none"


def make_config(args):
    cfg = Config(fault=args.fault)
    if args.tiny:
        cfg = Config(vocab=256, dim=64, layers=2, heads=4, experts=4, ffn=64, seq=32, batch=2,
                     fault=args.fault)
    if args.fault == "capacity_padding":
        cfg.capacity_factor = 2.75
    return cfg


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim, bias=False)
        self.out = nn.Linear(cfg.dim, cfg.dim, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2),
                                           v.transpose(1, 2), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class MoE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.router = nn.Linear(cfg.dim, cfg.experts, bias=False)
        self.w_in = nn.Parameter(torch.empty(cfg.experts, cfg.dim, 2 * cfg.ffn))
        self.w_out = nn.Parameter(torch.empty(cfg.experts, cfg.ffn, cfg.dim))

    def experts(self, x):
        """x: [experts, rows, dim] -> [experts, rows, dim]"""
        gate, up = torch.bmm(x, self.w_in).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * up, self.w_out)

    def route(self, x):
        probs = self.router(x).float().softmax(-1)
        weight, expert = probs.topk(self.cfg.top_k, dim=-1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        load = F.one_hot(expert[:, 0], self.cfg.experts).float().mean(0)
        aux = self.cfg.experts * (load * probs.mean(0)).sum()
        return weight, expert, aux

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weight, expert, aux = self.route(x)
        if self.cfg.fault == "expert_loop":
            y = self.loop_over_experts(x, weight, expert)
        elif self.cfg.fault == "dense_experts":
            y = self.all_experts(x, weight, expert)
        elif self.cfg.fault == "onehot_dispatch":
            y = self.einsum_dispatch(x, weight, expert, groups=shape[0])
        else:
            y = self.sorted_dispatch(x, weight, expert)
        return y.view(shape), aux

    def sorted_dispatch(self, x, weight, expert):
        """Tokens sorted by expert into a buffer of fixed capacity; no host synchronisation."""
        N, D = x.shape
        E, K = self.cfg.experts, self.cfg.top_k
        capacity = math.ceil(N * K / E * self.cfg.capacity_factor / 8) * 8
        flat = expert.flatten()
        if self.cfg.fault == "cpu_argsort":
            order = torch.from_numpy(np.argsort(flat.cpu().numpy(), kind="stable")).to(x.device)
        else:
            order = flat.argsort(stable=True)
        by_expert = flat.index_select(0, order)
        counts = torch.zeros(E, dtype=torch.long, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        first = counts.cumsum(0) - counts
        place = torch.arange(N * K, device=x.device) - first.index_select(0, by_expert)
        keep = place < capacity
        slot = torch.where(keep, by_expert * capacity + place, E * capacity)
        token = order // K

        rows = x.index_select(0, token)
        buffer = x.new_zeros(E * capacity + 1, D).index_copy(0, slot, rows)
        out = self.experts(buffer[:-1].view(E, capacity, D)).view(E * capacity, D)
        gate = weight.flatten().index_select(0, order) * keep
        picked = out.index_select(0, slot.clamp(max=E * capacity - 1)) * gate[:, None]
        return torch.zeros_like(x).index_add(0, token, picked)

    def loop_over_experts(self, x, weight, expert):
        y = torch.zeros_like(x)
        for e, (w_in, w_out) in enumerate(zip(self.w_in.unbind(0), self.w_out.unbind(0))):
            token, k = torch.where(expert == e)
            if token.numel() == 0:
                continue
            gate, up = (x.index_select(0, token) @ w_in).chunk(2, dim=-1)
            out = (F.silu(gate) * up) @ w_out
            y = y.index_add(0, token, out * weight[token, k, None])
        return y

    def all_experts(self, x, weight, expert):
        out = self.experts(x.expand(self.cfg.experts, -1, -1))
        gates = torch.zeros(x.shape[0], self.cfg.experts, dtype=x.dtype, device=x.device)
        gates = gates.scatter(1, expert, weight)
        return (out * gates.t()[:, :, None]).sum(0)

    def einsum_dispatch(self, x, weight, expert, groups):
        D = x.shape[-1]
        E, K = self.cfg.experts, self.cfg.top_k
        x = x.view(groups, -1, D)
        S = x.shape[1]
        capacity = math.ceil(S * K / E * self.cfg.capacity_factor / 8) * 8
        chosen = F.one_hot(expert.view(groups, S * K), E)
        place = ((chosen.cumsum(1) - 1) * chosen).sum(-1)
        keep = place < capacity
        where = F.one_hot(place.clamp(max=capacity - 1), capacity) * keep[..., None]
        mask = chosen[..., :, None] * where[..., None, :]
        mask = mask.view(groups, S, K, E, capacity).to(x.dtype)
        combine = (mask * weight.view(groups, S, K, 1, 1)).sum(2)
        dispatch = mask.sum(2)
        rows = torch.einsum("gsec,gsd->egcd", dispatch, x)
        out = self.experts(rows.reshape(E, -1, D)).view(E, groups, capacity, D)
        return torch.einsum("gsec,egcd->gsd", combine, out).reshape(-1, D)


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(cfg.dim, eps=1e-5), nn.RMSNorm(cfg.dim, eps=1e-5)
        self.attn, self.moe = Attention(cfg), MoE(cfg)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        y, aux = self.moe(self.norm2(x))
        return x + y, aux


class MoELanguageModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.position = nn.Embedding(cfg.seq, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.RMSNorm(cfg.dim, eps=1e-5)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight
        aux_loss = 0.0
        for block in self.blocks:
            x, aux = block(x)
            aux_loss = aux_loss + aux
        return self.head(self.norm(x)), aux_loss


def main():
    args = parse_args()
    cfg = make_config(args)
    torch.manual_seed(0)
    device = torch.device(args.device)
    with device:
        model = MoELanguageModel(cfg)
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), fused=True)
    corpus = torch.randint(0, cfg.vocab, (16, cfg.batch, cfg.seq + 1), device=device)
    loss_sum = torch.zeros((), device=device)
    timer = StepTimer(args)

    for step in range(timer.total):
        timer.begin(step)
        batch = corpus[step % len(corpus)]
        logits, aux_loss = model(batch[:, :-1])
        loss = F.cross_entropy(logits.view(-1, cfg.vocab), batch[:, 1:].flatten())
        (loss + 0.01 * aux_loss).backward()
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
