"""Token generation with a static KV cache, in the manner of continuous batching.

One step is one scheduler tick: the prompts of a few new requests are prefilled into their slots,
then every slot of the batch decodes a chunk of tokens (top-k sampling). bf16, SDPA attention with
grouped KV heads, inference mode, tokens stay on the device until the chunk is complete.
"""
import argparse
import json
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

PROGRAM = "serve_kv"
FAULTS = ["none", "cache_concat", "repeat_kv", "prefill_all_logits", "full_vocab_sort",
          "per_sequence_item"]


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
    vocab: int = 128256
    dim: int = 2048
    layers: int = 12
    heads: int = 16
    kv_heads: int = 8
    ffn: int = 5632
    slots: int = 96
    admit: int = 12
    prompt: int = 512
    chunk: int = 16
    top_k: int = 50
    eos: int = 2
    fault: str = "none"


def make_config(args):
    cfg = Config(fault=args.fault)
    if args.tiny:
        cfg = Config(vocab=256, dim=64, layers=2, heads=4, kv_heads=2, ffn=96, slots=4, admit=2,
                     prompt=16, chunk=4, top_k=8, fault=args.fault)
    return cfg


class StaticCache:
    """Keys and values of all slots, written in place."""

    def __init__(self, cfg, device, dtype):
        shape = (cfg.slots, cfg.kv_heads, cfg.prompt + cfg.chunk, cfg.dim // cfg.heads)
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(cfg.layers)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(cfg.layers)]

    def store_prompt(self, layer, first, k, v):
        self.k[layer][first:first + k.shape[0], :, :k.shape[2]] = k
        self.v[layer][first:first + v.shape[0], :, :v.shape[2]] = v

    def start_decoding(self):
        pass

    def append(self, layer, position, k, v):
        self.k[layer][:, :, position:position + 1] = k
        self.v[layer][:, :, position:position + 1] = v
        return self.k[layer][:, :, :position + 1], self.v[layer][:, :, :position + 1]


class GrowingCache(StaticCache):
    """Grows the keys and values of the running chunk token by token."""

    def start_decoding(self):
        prompt = self.k[0].shape[2] - self.chunk
        self.past = [(k[:, :, :prompt], v[:, :, :prompt]) for k, v in zip(self.k, self.v)]

    def __init__(self, cfg, device, dtype):
        super().__init__(cfg, device, dtype)
        self.chunk = cfg.chunk

    def append(self, layer, position, k, v):
        past_k, past_v = self.past[layer]
        self.past[layer] = (torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2))
        return self.past[layer]


def rotate(x, cos, sin):
    """Rotary embedding; the sign of the rotated half is folded into `sin`."""
    a, b = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((b, a), dim=-1), sin)


class Layer(nn.Module):
    def __init__(self, cfg, index):
        super().__init__()
        self.cfg, self.index, self.hd = cfg, index, cfg.dim // cfg.heads
        self.split = [cfg.heads, cfg.kv_heads, cfg.kv_heads]
        self.norm1, self.norm2 = nn.RMSNorm(cfg.dim, eps=1e-5), nn.RMSNorm(cfg.dim, eps=1e-5)
        self.qkv = nn.Linear(cfg.dim, sum(self.split) * self.hd, bias=False)
        self.out = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.gate_up = nn.Linear(cfg.dim, 2 * cfg.ffn, bias=False)
        self.down = nn.Linear(cfg.ffn, cfg.dim, bias=False)

    def project(self, x, cos, sin):
        B, T, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, sum(self.split), self.hd).transpose(1, 2)
        qk = rotate(qkv[:, :-self.cfg.kv_heads], cos, sin)
        return qk[:, :self.cfg.heads], qk[:, self.cfg.heads:], qkv[:, -self.cfg.kv_heads:]

    def finish(self, x, y):
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def prefill(self, x, cos, sin, cache, first):
        q, k, v = self.project(x, cos, sin)
        cache.store_prompt(self.index, first, k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.finish(x, y)

    def decode(self, x, cos, sin, cache, position):
        q, k, v = self.project(x, cos, sin)
        k, v = cache.append(self.index, position, k, v)
        if self.cfg.fault == "repeat_kv":
            groups = self.cfg.heads // self.cfg.kv_heads
            k = k.repeat_interleave(groups, dim=1)
            v = v.repeat_interleave(groups, dim=1)
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.finish(x, y)


class Decoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.layers))
        self.norm = nn.RMSNorm(cfg.dim, eps=1e-5)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        hd = cfg.dim // cfg.heads
        freq = 1.0 / 10000 ** (torch.arange(0, hd, 2) / hd)
        angles = torch.outer(torch.arange(cfg.prompt + cfg.chunk), freq)
        cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", torch.cat([cos, cos], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], dim=-1), persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def prefill(self, tokens, cache, first):
        T = tokens.shape[1]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer.prefill(x, self.cos[:T], self.sin[:T], cache, first)
        if self.cfg.fault == "prefill_all_logits":
            logits = self.head(self.norm(x)).float()
            return logits[:, -1]
        return self.head(self.norm(x[:, -1])).float()

    def decode(self, tokens, cache, position):
        x = self.embed(tokens)[:, None]
        cos, sin = self.cos[position:position + 1], self.sin[position:position + 1]
        for layer in self.layers:
            x = layer.decode(x, cos, sin, cache, position)
        return self.head(self.norm(x[:, 0])).float()


def draw(probs):
    """Multinomial draw by an exponential race (torch.multinomial would wait for the device)."""
    return (probs / torch.empty_like(probs).exponential_(1)).argmax(-1, keepdim=True)


def sample_top_k(logits, k):
    values, indices = logits.topk(k, dim=-1)
    return indices.gather(1, draw(values.softmax(-1)))[:, 0]


def sample_sorted(logits, k, p=0.95):
    values, indices = torch.sort(logits, dim=-1, descending=True)
    probs = values.softmax(-1)
    outside = probs.cumsum(-1) - probs > p
    outside[:, k:] = True
    return indices.gather(1, draw(probs.masked_fill(outside, 0.0)))[:, 0]


def main():
    args = parse_args()
    cfg = make_config(args)
    torch.manual_seed(0)
    device = torch.device(args.device)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = Decoder(cfg).eval()
    torch.set_default_dtype(torch.float32)
    make_cache = GrowingCache if args.fault == "cache_concat" else StaticCache
    cache = make_cache(cfg, device, torch.bfloat16)
    sample = sample_sorted if args.fault == "full_vocab_sort" else sample_top_k
    prompts = torch.randint(3, cfg.vocab, (16, cfg.admit, cfg.prompt), device=device)
    current = torch.full((cfg.slots,), 3, device=device)
    replies = [[] for _ in range(cfg.slots)]
    finished_count = 0
    timer = StepTimer(args)

    with torch.inference_mode():
        for step in range(timer.total):
            timer.begin(step)
            first = step * cfg.admit % cfg.slots
            logits = model.prefill(prompts[step % len(prompts)], cache, first)
            current[first:first + cfg.admit] = sample(logits, cfg.top_k)

            cache.start_decoding()
            chunk = []
            for i in range(cfg.chunk):
                logits = model.decode(current, cache, cfg.prompt + i)
                current.copy_(sample(logits, cfg.top_k))
                if args.fault == "per_sequence_item":
                    for slot in range(cfg.slots):
                        token = current[slot].item()
                        replies[slot].append(token)
                        if token == cfg.eos:
                            finished_count += 1
                else:
                    chunk.append(current.clone())
            if args.fault != "per_sequence_item":
                tokens = torch.stack(chunk, dim=1).cpu()
                finished_count += int((tokens == cfg.eos).any(1).sum())
                for slot, row in enumerate(tokens.tolist()):
                    replies[slot].extend(row)
            timer.end(step)

    timer.finish()
    assert len(replies[0]) == timer.total * cfg.chunk
    print(f"{PROGRAM} fault={args.fault} generated {sum(map(len, replies))} tokens, "
          f"{finished_count} finished")


if __name__ == "__main__":
    main()
