"""Trains a small transformer for some steps, so that two captures of it can be compared.

``python program.py --kind gpu_bound`` times its steps, each synchronized, and prints them as JSON. ``--profiled`` opens
a capture range around them, for nsys. ``--planted 0.05 --base-ms B`` adds work to forward that takes 5 % of B where it
runs alone: for ``gpu_bound`` matmuls, for ``launch_bound`` a loop that keeps the CPU busy. Only torch is needed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

#: d_model, layers, heads, batch size and context length of each kind.
SHAPES = {"gpu_bound": (1024, 12, 16, 32, 512), "launch_bound": (256, 12, 4, 2, 64)}
VOCABULARY = 10_000
WARM_UP = 30


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x, (B, S, d)."""
        b, s, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, S, d_head)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Model(nn.Module):
    """A transformer of such blocks."""

    def __init__(self, d: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, d), nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits, (B, S, V), of tokens, (B, S)."""
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Planted:
    """Extra work of so many milliseconds: matmuls, as many as take so long alone, or a loop of the CPU."""

    def __init__(self, kind: str, extra_ms: float) -> None:
        self.extra_ms, self.matmuls = extra_ms, 0
        if extra_ms and kind == "gpu_bound":
            self.a = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
            self.b = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
            self.matmuls = round(extra_ms / self._matmul_ms())

    def _matmul_ms(self, warm_up: int = 200, repeats: int = 2000) -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for i in range(warm_up + repeats):
            if i == warm_up:
                first.record()
            self.a @ self.b
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / repeats

    def work(self) -> None:
        """Does the work."""
        if self.matmuls:
            with torch.no_grad():
                for _ in range(self.matmuls):
                    self.a @ self.b
        elif self.extra_ms:
            end = time.perf_counter_ns() + self.extra_ms * 1e6
            while time.perf_counter_ns() < end:
                pass


def phase(name: str) -> AbstractContextManager[None]:
    """A range of this name."""
    return torch.cuda.nvtx.range(name)


def training_step(kind: str, extra: Planted) -> Callable[[], None]:
    """A step of training, which waits for the GPU at its end."""
    torch.manual_seed(0)
    d, layers, heads, batch, context = SHAPES[kind]
    model = Model(d, layers, heads, context).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=kind == "gpu_bound")
    tokens = torch.randint(VOCABULARY, (batch, context + 1), device="cuda")

    def step() -> None:
        with phase("step"):
            with phase("forward"), torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens[:, :-1])
                extra.work()
            with phase("loss"):
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            with phase("backward"):
                loss.backward()
            with phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()

    return step


def main() -> None:
    """Times the steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=sorted(SHAPES), required=True)
    parser.add_argument("--planted", type=float, default=0.0)
    parser.add_argument("--base-ms", type=float, default=0.0, help="a step without a profiler and planted work")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profiled", action="store_true")
    options = parser.parse_args()
    if options.planted and not options.base_ms:
        parser.error("--planted needs --base-ms, which a run without it prints as median_ms")
    extra_ms = options.planted * options.base_ms
    extra = Planted(options.kind, extra_ms)
    step = training_step(options.kind, extra)
    for _ in range(WARM_UP):
        step()
    if options.profiled:
        torch.cuda.profiler.start()
    steps_ms = []
    for _ in range(options.steps):
        start = time.perf_counter()
        step()
        steps_ms.append((time.perf_counter() - start) * 1e3)
    if options.profiled:
        torch.cuda.profiler.stop()
    found = {"kind": options.kind, "planted": options.planted, "extra_ms": extra_ms, "extra_count": extra.matmuls}
    found |= {"profiled": options.profiled, "median_ms": statistics.median(steps_ms), "steps_ms": steps_ms}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
