"""Measures greedy decoding by the transformer, with or without a key-value cache.

The layers are those of ``transformer.py``, with an attention that reads the cache.

Shapes: B sequences, S new tokens after N earlier tokens, T positions in the cache, d = d_model, H heads of
d_head = d ÷ H, L layers, V tokens in the vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor

from nsys_analyzer.experiments.decode import TARGET, DecodeCase, DecodeFigures
from nsys_analyzer.inputs.rows import Times
from nsys_analyzer.trace.schema import MS_PER_S
from profiling_targets.harness import Config, main, make_config, measure_allocations, set_precision, time_calls_ms
from profiling_targets.transformer import ATTENTION, SelfAttention, Transformer

#: Measurements of the time to the first token (TTFT).
_FIRST_TOKEN_SAMPLES = 5


class Cache:
    """A key-value cache for all layers, with the number of its filled positions."""

    def __init__(self, config: Config) -> None:
        size, length = config.size, config.context_length
        # (L, 2, B, H, T, d_head)
        self.tensor = torch.zeros(size.num_layers, 2, config.batch_size, size.num_heads, length, size.d_head)
        self.filled = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new keys and values (B, H, S, d_head) of a layer, and returns all of them, (B, H, N + S, d_head)."""
        layer_cache, end = self.tensor[layer], self.filled + k.shape[2]  # room (2, B, H, T, d_head)
        layer_cache[0, :, :, self.filled : end], layer_cache[1, :, :, self.filled : end] = k, v
        return layer_cache[0, :, :, :end], layer_cache[1, :, :, :end]


class Decoder(Transformer):
    """The transformer, with an attention that reads and extends a key-value cache if ``forward`` gets one."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.attend, self.cache = ATTENTION[config.attention], cast("Cache | None", None)
        for layer, block in enumerate(self.blocks):
            cast("SelfAttention", block.attention).attend = partial(self._attend, layer)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, masked: Tensor) -> Tensor:
        """Attends to the cached and the new keys and values: (B, H, S, d_head) each -> (B, H, S, d_head)."""
        if self.cache is not None:
            k, v = self.cache.extend(layer, k, v)  # (B, H, N + S, d_head)
        return self.attend(q, k, v, masked)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Returns the logits (B, V) after the last of the new tokens (B, S). The new tokens follow the cached tokens.

        If the cache is not empty, S must be 1, because the attention supports only a square causal mask or no mask.
        """
        self.cache = cache
        start = cache.filled if cache is not None else 0
        end = start + tokens.shape[1]
        cos, sin, masked = self.get_buffer("cos"), self.get_buffer("sin"), self.get_buffer("future")
        x = self.embedding(tokens)  # (B, S, d)
        for block in self.blocks:
            x = block(x, cos[start:end], sin[start:end], masked[start:end, :end])
        if cache is not None:
            cache.filled = end
        logits: Tensor = self.head(self.norm(x[:, -1]))
        return logits


def generate(model: Decoder, sequence: Tensor, prompt_length: int, cache: Cache | None) -> Iterator[Tensor]:
    """Yields the logits (B, V) for each new token, and writes the most likely token into the sequence.

    Args:
        model: the model.
        sequence: the prompt, followed by the positions of the new tokens, (B, prompt + tokens).
        prompt_length: the number of tokens in the prompt.
        cache: the cache, whose contents are replaced. With None, each token needs a pass over the whole sequence.
    """
    if cache is not None:
        cache.filled = 0
    for end in range(prompt_length, sequence.shape[1]):
        cached_length = cache.filled if cache is not None else 0
        logits = model(sequence[:, cached_length:end], cache)  # (B, V)
        sequence[:, end] = logits.argmax(-1)
        yield logits


@contextmanager
def tensors_made_in(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Sets the default device and dtype inside the block, so that no fp32 copy of weights raises the peak memory."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(default_dtype)


class _Decoding:
    """The model of a case, its sequences, and its cache."""

    def __init__(self, case: DecodeCase) -> None:
        torch.manual_seed(case.seed)
        self.case = case
        # The context covers the cache, because it sets the size of RoPE's tables.
        config = make_config(case, context_length=case.cache_length, mode="forward")
        with tensors_made_in(torch.bfloat16 if case.precision == "bf16" else torch.float32, case.device):
            self.model = Decoder(config)
            self.cache = Cache(config) if case.cache else None
        shape = (case.batch_size, case.prompt_length + case.tokens)
        self.sequence = torch.randint(config.size.vocab_size, shape, device=case.device)  # (B, prompt + tokens)

    def time_tokens_ms(self, tokens: int) -> list[float]:
        """Generates tokens after the prompt, and returns the time of each in ms, including the wait for the device."""
        sequence = self.sequence[:, : self.case.prompt_length + tokens]
        generation = generate(self.model, sequence, self.case.prompt_length, self.cache)
        return time_calls_ms(lambda: next(generation), self.case.device, 0, tokens)

    def generate_peak_token(self) -> None:
        """Generates the token that needs the most memory: with a cache the first token, without it the last token."""
        length = self.case.prompt_length if self.cache else self.sequence.shape[1] - 1
        next(generate(self.model, self.sequence[:, : length + 1], length, self.cache))


@torch.inference_mode()
def measure(case: DecodeCase, figures: DecodeFigures) -> None:
    """Measures prefill (time to the first token) and the inter-token latency, after a warm-up."""
    set_precision(case.precision)
    with measure_allocations(case.device) as memory:
        decoding = _Decoding(case)
        decoding.generate_peak_token()
    figures.peak_bytes = memory.peak_bytes
    figures.weights_bytes = sum(weight.nbytes for weight in decoding.model.parameters())
    figures.cache_bytes = decoding.cache.tensor.nbytes if decoding.cache else 0
    decoding.time_tokens_ms(case.warmup_tokens)
    figures.first_token = Times.of([decoding.time_tokens_ms(1)[0] for _ in range(_FIRST_TOKEN_SAMPLES)])
    times = figures.token_times_ms = decoding.time_tokens_ms(case.tokens)
    figures.between_tokens = Times.of(times[1:])
    figures.between_tokens_p95_ms = statistics.quantiles(times[1:], n=20, method="inclusive")[-1]
    figures.tokens_per_s = case.batch_size / figures.between_tokens.ms * MS_PER_S


if __name__ == "__main__":
    main(TARGET, measure)
