"""Training of a latent-diffusion U-Net (noise prediction) with timestep conditioning and an EMA.

bf16 autocast over fp32 weights, channels_last throughout (channel RMS norms work on the NHWC view),
SDPA attention at the lowest resolution, fused AdamW, latents held on the device.
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

PROGRAM = "unet"
FAULTS = ["none", "ema_on_cpu", "timestep_python", "film_rows", "fp32_attention",
          "second_forward", "anomaly_mode"]


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
    channels: int = 128
    mult: tuple = (1, 2, 3)
    blocks: int = 2
    size: int = 64
    latent: int = 4
    heads_dim: int = 64
    batch: int = 64
    train_timesteps: int = 1000
    time_dim: int = 256
    fault: str = "none"


def make_config(args):
    cfg = Config(fault=args.fault)
    if args.tiny:
        cfg = Config(channels=32, mult=(1, 2), blocks=1, size=16, heads_dim=16, batch=2, time_dim=32,
                     fault=args.fault)
    return cfg


class ChannelRMSNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        h = x.permute(0, 2, 3, 1)
        with torch.autocast(x.device.type, enabled=False):
            h = F.rms_norm(h, h.shape[-1:], self.weight.to(h.dtype), 1e-5)
        return h.permute(0, 3, 1, 2)


def film(h, scale, shift):
    return h * (1 + scale[:, :, None, None]) + shift[:, :, None, None]


def film_rows(h, scale, shift):
    """One row per sample and channel, so that scale and shift are plain columns."""
    rows = h.reshape(h.shape[0] * h.shape[1], -1)
    rows = torch.addcmul(shift.reshape(-1, 1), rows, 1 + scale.reshape(-1, 1))
    return rows.view(h.shape)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, emb, cfg):
        super().__init__()
        self.norm1, self.norm2 = ChannelRMSNorm(cin), ChannelRMSNorm(cout)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.emb = nn.Linear(emb, 2 * cin + 2 * cout)
        self.splits = [cin, cin, cout, cout]
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()
        self.modulate = film_rows if cfg.fault == "film_rows" else film

    def forward(self, x, emb):
        scale1, shift1, scale2, shift2 = self.emb(emb).split(self.splits, dim=1)
        h = self.conv1(F.silu(self.modulate(self.norm1(x), scale1, shift1)))
        h = self.conv2(F.silu(self.modulate(self.norm2(h), scale2, shift2)))
        return self.skip(x) + h


class SelfAttention(nn.Module):
    def __init__(self, channels, cfg):
        super().__init__()
        self.cfg, self.heads = cfg, channels // cfg.heads_dim
        self.norm = ChannelRMSNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x):
        B, C, H, W = x.shape
        h = self.norm(x).permute(0, 2, 3, 1).reshape(B, H * W, C)
        q, k, v = self.qkv(h).view(B, H * W, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.cfg.fault == "fp32_attention":
            with torch.autocast(x.device.type, enabled=False):
                h = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        else:
            h = F.scaled_dot_product_attention(q, k, v)
        h = self.proj(h.transpose(1, 2).reshape(B, H * W, C))
        return x + h.view(B, H, W, C).permute(0, 3, 1, 2)


class UNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        c, emb = cfg.channels, 4 * cfg.channels
        self.time = nn.Sequential(nn.Linear(cfg.time_dim, emb), nn.SiLU(), nn.Linear(emb, emb), nn.SiLU())
        self.stem = nn.Conv2d(cfg.latent, c, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        widths, cur = [c], c
        last = len(cfg.mult) - 1
        for level, m in enumerate(cfg.mult):
            stage = nn.ModuleDict({"res": nn.ModuleList(), "attn": nn.ModuleList()})
            for _ in range(cfg.blocks):
                stage["res"].append(ResBlock(cur, m * c, emb, cfg))
                cur = m * c
                stage["attn"].append(SelfAttention(cur, cfg) if level == last else nn.Identity())
                widths.append(cur)
            if level != last:
                stage["pool"] = nn.Conv2d(cur, cur, 3, stride=2, padding=1)
                widths.append(cur)
            self.down.append(stage)
        self.mid1, self.mid2 = ResBlock(cur, cur, emb, cfg), ResBlock(cur, cur, emb, cfg)
        self.mid_attn = SelfAttention(cur, cfg)
        for level, m in reversed(list(enumerate(cfg.mult))):
            stage = nn.ModuleDict({"res": nn.ModuleList(), "attn": nn.ModuleList()})
            for _ in range(cfg.blocks + 1):
                stage["res"].append(ResBlock(cur + widths.pop(), m * c, emb, cfg))
                cur = m * c
                stage["attn"].append(SelfAttention(cur, cfg) if level == last else nn.Identity())
            if level != 0:
                stage["conv"] = nn.Conv2d(cur, cur, 3, padding=1)
            self.up.append(stage)
        self.norm = ChannelRMSNorm(cur)
        self.final = nn.Conv2d(cur, cfg.latent, 3, padding=1)

    def forward(self, x, time_features):
        emb = self.time(time_features)
        h = self.stem(x)
        skips = [h]
        for stage in self.down:
            for res, attn in zip(stage["res"], stage["attn"]):
                h = attn(res(h, emb))
                skips.append(h)
            if "pool" in stage:
                h = stage["pool"](h)
                skips.append(h)
        h = self.mid2(self.mid_attn(self.mid1(h, emb)), emb)
        for stage in self.up:
            for res, attn in zip(stage["res"], stage["attn"]):
                h = attn(res(torch.cat([h, skips.pop()], dim=1), emb))
            if "conv" in stage:
                h = stage["conv"](F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return self.final(F.silu(self.norm(h)))


def timestep_features(t, dim):
    freq = torch.exp(-math.log(10000.0) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    angle = t[:, None].float() * freq
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def timestep_features_per_sample(t, dim):
    rows = []
    for step in t.tolist():
        row = []
        for i in range(dim // 2):
            row.append(math.cos(step * math.exp(-math.log(10000.0) * i / (dim // 2))))
        for i in range(dim // 2):
            row.append(math.sin(step * math.exp(-math.log(10000.0) * i / (dim // 2))))
        rows.append(row)
    return torch.tensor(rows, device=t.device)


class Ema:
    def __init__(self, model, decay, on_cpu):
        self.decay, self.on_cpu = decay, on_cpu
        self.params = list(model.parameters())
        self.shadow = [p.detach().clone() for p in self.params]
        if on_cpu:
            self.shadow = [s.cpu() for s in self.shadow]

    @torch.no_grad()
    def update(self):
        if self.on_cpu:
            for s, p in zip(self.shadow, self.params):
                s.lerp_(p.detach().cpu(), 1 - self.decay)
        else:
            torch._foreach_lerp_(self.shadow, self.params, 1 - self.decay)


def main():
    args = parse_args()
    cfg = make_config(args)
    torch.manual_seed(0)
    if args.device == "cuda":
        torch.backends.cudnn.benchmark = True
    if args.fault == "anomaly_mode":
        torch.autograd.set_detect_anomaly(True)
    device = torch.device(args.device)
    with device:
        model = UNet(cfg)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ema = Ema(model, 0.9999, on_cpu=args.fault == "ema_on_cpu")
    betas = torch.linspace(1e-4, 0.02, cfg.train_timesteps, device=device)
    alpha_bar = (1 - betas).cumprod(0)
    latents = torch.randn(8, cfg.batch, cfg.size, cfg.size, cfg.latent, device=device)
    latents = latents.permute(0, 1, 4, 2, 3)
    loss_sum = torch.zeros((), device=device)
    logged = torch.zeros((), device=device)
    timer = StepTimer(args)

    for step in range(timer.total):
        timer.begin(step)
        x0 = latents[step % len(latents)]
        t = torch.randint(0, cfg.train_timesteps, (cfg.batch,), device=device)
        noise = torch.randn_like(x0)
        a = alpha_bar[t].view(-1, 1, 1, 1)
        noisy = a.sqrt() * x0 + (1 - a).sqrt() * noise
        if args.fault == "timestep_python":
            features = timestep_features_per_sample(t, cfg.time_dim)
        else:
            features = timestep_features(t, cfg.time_dim)

        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = F.mse_loss(model(noisy, features).float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update()
        if args.fault == "second_forward":
            with torch.autocast(args.device, dtype=torch.bfloat16):
                logged += F.mse_loss(model(noisy, features).float(), noise).detach()
        else:
            logged += loss.detach()
        loss_sum += loss.detach()
        timer.end(step)

    timer.finish()
    mean = loss_sum.item() / max(timer.total, 1)
    assert math.isfinite(mean)
    print(f"{PROGRAM} fault={args.fault} mean loss {mean:.4f} logged {logged.item():.3f}")


if __name__ == "__main__":
    main()
