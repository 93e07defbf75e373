"""Supervised training of a ViT-B/16 on (random) images, transformer blocks under torch.compile.

bf16 autocast over fp32 weights, SDPA attention, fused AdamW; uint8 batches wait in pinned host
memory, are copied asynchronously and are augmented as a batch on the GPU.
"""
import argparse
import json
import math
import random
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

PROGRAM = "vit"
FAULTS = ["none", "host_normalize", "per_sample_augment", "finite_check_in_block",
          "step_attribute"]


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
    image: int = 224
    patch: int = 16
    dim: int = 768
    layers: int = 12
    heads: int = 12
    mlp: int = 3072
    classes: int = 1000
    batch: int = 128
    layer_scale_warmup: int = 4
    fault: str = "none"


def make_config(args):
    cfg = Config(fault=args.fault)
    if args.tiny:
        cfg = Config(image=32, patch=8, dim=64, layers=2, heads=2, mlp=128, classes=10, batch=4,
                     fault=args.fault)
    return cfg


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.heads = cfg, cfg.heads
        self.norm1, self.norm2 = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim)
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim)
        self.proj = nn.Linear(cfg.dim, cfg.dim)
        self.fc1, self.fc2 = nn.Linear(cfg.dim, cfg.mlp), nn.Linear(cfg.mlp, cfg.dim)
        self.scale1 = nn.Parameter(torch.full((cfg.dim,), 0.1))
        self.scale2 = nn.Parameter(torch.full((cfg.dim,), 0.1))
        self.register_buffer("ramp", torch.ones(()), persistent=False)
        self.global_step = 0

    def attention(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.proj(y.transpose(1, 2).reshape(B, T, D))

    def forward(self, x):
        if self.cfg.fault == "step_attribute":
            ramp = min(1.0, (self.global_step + 1) / self.cfg.layer_scale_warmup)
        else:
            ramp = self.ramp
        x = x + ramp * self.scale1 * self.attention(self.norm1(x))
        if self.cfg.fault == "finite_check_in_block":
            if not torch.isfinite(x).all():
                raise FloatingPointError("activations overflowed in attention")
        return x + ramp * self.scale2 * self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, cfg.dim, cfg.patch, cfg.patch)
        tokens = (cfg.image // cfg.patch) ** 2 + 1
        self.cls = nn.Parameter(torch.zeros(1, 1, cfg.dim))
        self.position = nn.Parameter(torch.randn(1, tokens, cfg.dim) * 0.02)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.classes)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))

    def set_step(self, step, ramp_schedule, fault):
        if fault == "step_attribute":
            for block in self.blocks:
                block.global_step = step
        else:
            torch._foreach_copy_([b.ramp for b in self.blocks],
                                 [ramp_schedule[step]] * len(self.blocks))


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def augment_batch(x):
    """Flip, brightness, contrast and erasing for a whole batch, on the device."""
    B, _, H, W = x.shape

    def draw(lo, hi):
        return torch.empty(B, 1, 1, 1, device=x.device, dtype=x.dtype).uniform_(lo, hi)

    x = torch.where(draw(0, 1) < 0.5, x.flip(3), x)
    x = x * draw(0.8, 1.2)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (x - mean) * draw(0.8, 1.2) + mean
    rows = torch.arange(H, device=x.device).view(1, 1, H, 1) / H
    cols = torch.arange(W, device=x.device).view(1, 1, 1, W) / W
    dy, dx = rows - draw(0, 0.75), cols - draw(0, 0.75)
    return x.masked_fill((dy >= 0) & (dy < 0.25) & (dx >= 0) & (dx < 0.25), 0.0)


def augment_sample(x):
    _, H, W = x.shape
    if random.random() < 0.5:
        x = x.flip(2)
    x = x * random.uniform(0.8, 1.2)
    mean = x.mean()
    x = (x - mean) * random.uniform(0.8, 1.2) + mean
    top, left = random.randrange(H * 3 // 4), random.randrange(W * 3 // 4)
    x = x.clone()
    x[:, top:top + H // 4, left:left + W // 4] = 0.0
    return x


def augment_each(x):
    return torch.stack([augment_sample(image) for image in x])


def main():
    args = parse_args()
    cfg = make_config(args)
    torch.manual_seed(0)
    device = torch.device(args.device)
    pin = args.device == "cuda"
    with device:
        model = VisionTransformer(cfg)
    for block in model.blocks:
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)

    batches = []
    for _ in range(6):
        images = torch.randint(0, 256, (cfg.batch, 3, cfg.image, cfg.image), dtype=torch.uint8)
        labels = torch.randint(0, cfg.classes, (cfg.batch,))
        batches.append((images.pin_memory(), labels.pin_memory()) if pin else (images, labels))
    mean_host, std_host = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    mean, std = mean_host.to(device), std_host.to(device)
    timer = StepTimer(args)
    ramp = torch.arange(1, timer.total + 1, device=device) / cfg.layer_scale_warmup
    ramp_schedule = list(ramp.clamp(max=1.0).unbind())
    loss_sum = torch.zeros((), device=device)

    for step in range(timer.total):
        timer.begin(step)
        images, labels = batches[step % len(batches)]
        if args.fault == "host_normalize":
            images = (images.float() / 255 - mean_host) / std_host
            images = images.to(device)
        else:
            images = images.to(device, non_blocking=True)
            images = (images.float() / 255 - mean) / std
        labels = labels.to(device, non_blocking=True)
        images = images.to(torch.bfloat16)
        images = augment_each(images) if args.fault == "per_sample_augment" else augment_batch(images)

        model.set_step(step, ramp_schedule, args.fault)
        with torch.autocast(args.device, dtype=torch.bfloat16):
            logits = model(images)
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum += loss.detach()
        timer.end(step)

    timer.finish()
    mean_loss = loss_sum.item() / max(timer.total, 1)
    assert math.isfinite(mean_loss)
    print(f"{PROGRAM} fault={args.fault} mean loss {mean_loss:.3f}")


if __name__ == "__main__":
    main()
