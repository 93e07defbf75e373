"""A transformer to profile: pre-norm, RMSNorm, RoPE, SwiGLU, naive attention or PyTorch's own.

Run it alone (``python -m profiling_targets.transformer --model small``), or let ``nsys-analyze run`` do it. The
options, and the code that times, annotates and captures the phases, are in ``harness.py``.

Shapes: B sequences of S tokens, d = d_model, H heads of d_head = d ÷ H, V tokens in the vocabulary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from torch import Tensor, nn

from nsys_analyzer.errors import ConfigurationError
from profiling_targets import harness
from profiling_targets.harness import Config, annotate, make_parser, read_options
from profiling_targets.operator_step import record_operators

ROPE_THETA = 10_000.0


class RMSNorm(nn.Module):
    """Root mean square normalization with a learned gain, computed in fp32."""

    def __init__(self, d: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # (B, S, d) -> (B, S, d)
        """Divides by the root mean square over d."""
        x32 = x.float()
        normalized_x = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normalized_x * self.weight).to(x.dtype)


def rope_tables(context_length: int, d_head: int) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of the rotary embedding, shape (S, d_head ÷ 2) each."""
    frequencies = ROPE_THETA ** (-torch.arange(0, d_head, 2).float() / d_head)  # (d_head / 2,)
    angles = torch.outer(torch.arange(context_length).float(), frequencies)  # (S, d_head / 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, H, S, d_head) -> (B, H, S, d_head)
    """Rotates each pair of neighboring features by the angle of its position."""
    even, odd = x[..., 0::2], x[..., 1::2]  # (B, H, S, d_head / 2) each
    rotated_pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)  # (B, H, S, d_head / 2, 2)
    return rotated_pairs.flatten(-2).to(x.dtype)


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, masked: Tensor) -> Tensor:
    """Computes causal attention in three parts with a range each. Softmax is max, subtract, exp, sum and divide."""
    with annotate("scaled dot product attention"):
        with annotate("computing attention scores"):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, S, S)
            scores = scores.masked_fill(masked, float("-inf"))
        with annotate("computing softmax"):
            scores = scores - scores.amax(dim=-1, keepdim=True)
            weights = scores.exp()
            weights = weights / weights.sum(dim=-1, keepdim=True)  # (B, H, S, S)
        with annotate("final matmul"):
            return weights @ v  # (B, H, S, d_head)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, masked: Tensor) -> Tensor:
    """Computes causal attention in one kernel if PyTorch has a fused kernel for this device and precision."""
    del masked
    with annotate("scaled dot product attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)  # the last position sees all keys


ATTENTION = {"unfused": unfused_attention, "sdpa": sdpa_attention}


class SelfAttention(nn.Module):
    """Causal multi-head self-attention: four projections and two matmuls."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d, self.heads = config.size.d_model, config.size.num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.attend = ATTENTION[config.attention]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, masked: Tensor) -> Tensor:  # (B, S, d) -> (B, S, d)
        """Projects the input, rotates queries and keys, attends, and projects the result back to d."""
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, S, d_head)
            for projection in (self.q, self.k, self.v)
        )
        attention_output = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v, masked)  # (B, H, S, d_head)
        out: Tensor = self.out(attention_output.transpose(1, 2).flatten(-2))  # (B, S, d)
        return out


class SwiGLU(nn.Module):
    """The feed-forward network, with three matrices: w2(silu(w1 x) · w3 x)."""

    def __init__(self, d: int, d_ff: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(d, d_ff, bias=False), nn.Linear(d, d_ff, bias=False)
        self.w2 = nn.Linear(d_ff, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, d) -> (B, S, d)
        """Computes two matmuls up to d_ff and one back to d."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d, d_ff = config.size.d_model, config.size.d_ff
        self.attention_norm, self.attention = RMSNorm(d), SelfAttention(config)
        self.feed_forward_norm, self.feed_forward = RMSNorm(d), SwiGLU(d, d_ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, masked: Tensor) -> Tensor:  # (B, S, d) -> (B, S, d)
        """Adds the outputs of attention and of the feed-forward network to x."""
        x = x + self.attention(self.attention_norm(x), cos, sin, masked)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Transformer(nn.Module):
    """Embedding, blocks, final norm and head; embedding and head are not tied."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        size = config.size
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(size.num_layers))
        self.norm, self.head = RMSNorm(size.d_model), nn.Linear(size.d_model, size.vocab_size, bias=False)
        cos, sin = rope_tables(config.context_length, size.d_head)
        future = torch.ones(2 * (config.context_length,), dtype=torch.bool).triu(1)  # (S, S), True for later keys
        for name, table in (("cos", cos), ("sin", sin), ("future", future)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, S) -> (B, S, V)
        """Returns the logits of the token after each position."""
        x = self.embedding(tokens)  # (B, S, d)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.future)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Training:
    """A model with its data and optimizer. The phases of a step are methods without arguments."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
        self.config = config
        shape = (config.batch_size, config.context_length)
        with torch.device(config.device):
            model = Transformer(config)
            self.tokens, self.targets = (torch.randint(config.size.vocab_size, shape) for _ in range(2))  # (B, S) each
        self.model = self.prepare_model(model)
        self.parameters = tuple(self.model.parameters())
        self.optimizer = self._make_optimizer(lr=3e-4)
        self.logits = self.value = torch.empty(0)

    def prepare_model(self, model: Transformer) -> nn.Module:
        """Returns the model as it is trained, compiled if the configuration asks for it."""
        return cast(nn.Module, torch.compile(model)) if self.config.compile else model

    def phases(self) -> dict[str, Callable[[], None]]:
        """Returns the phases of the mode, in the order of a step."""
        if self.config.mode == "forward":
            return {"forward": self.forward}
        phases = {"forward": self.forward, "loss": self.loss, "backward": self.backward}
        return {**phases, "optimizer": self.update} if self.config.mode == "train" else phases

    def forward(self) -> None:
        """Runs the model on the batch. Nothing is saved for backward if the mode is forward."""
        with torch.set_grad_enabled(self.config.mode != "forward"), self._autocast():
            self.logits = self.model(self.tokens)  # (B, S, V)

    def loss(self) -> None:
        """Computes the cross entropy over all tokens."""
        with self._autocast():
            self.value = F.cross_entropy(self.logits.flatten(0, 1), self.targets.flatten())

    def backward(self) -> None:
        """Computes the gradients of all parameters into new tensors."""
        for parameter in self.parameters:
            parameter.grad = None
        self.value.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Runs one step of AdamW."""
        self.optimizer.step()

    def _autocast(self) -> AbstractContextManager[None]:
        # The capture of a CUDA graph must not reuse casts that were made outside of it.
        enabled, cache = self.config.precision == "bf16", not self.config.cuda_graph
        return torch.autocast(self.config.device, torch.bfloat16, enabled=enabled, cache_enabled=cache)

    def _make_optimizer(self, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters, lr, capturable=self.config.cuda_graph)


def main() -> int:
    """Runs the target and returns the exit code."""
    try:
        parser = make_parser("transformer", "Trains a transformer for a few steps, with NVTX ranges.")
        config, parsed_options = read_options(parser, sys.argv[1:])
        finish = None if parsed_options.no_ranges else record_operators
        return harness.run(
            lambda: Training(config),
            config,
            config.run(),
            parsed_options.results,
            ranges=not parsed_options.no_ranges,
            finish=finish,
        )
    except ConfigurationError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
