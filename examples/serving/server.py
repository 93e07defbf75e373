"""Serves requests with the transformer: requests wait, are prefilled one by one, and are decoded in one batch.

``python examples/serving/server.py --requests 24 --batch-size 8 --results run.json`` prints TTFT, inter-token latency
and tokens a second; the results hold each step of the engine. Each step is a range that says its sequences, their new
tokens and all that these attend to, ``prefill bs=1 toks=512 sk=512`` or ``decode bs=8 toks=8 sk=4096``; a request is a
range from its arrival to its last token, and another to its first.

Shapes: B sequences, S new tokens of each, T positions in the cache, d = d_model, H heads of d_head = d ÷ H, L layers.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nsys_analyzer.errors import ConfigurationError
from profiling_targets.decoding import tensors_made_in
from profiling_targets.harness import (
    Config,
    Times,
    annotate,
    capture_graphs,
    make_parser,
    open_range,
    read_options,
    run_measured,
    switch_profiler,
    synchronize,
)
from profiling_targets.transformer import SelfAttention, Transformer

_OPTIONS = ("context_length", "precision", "batch_size", "cuda_graph", "device", "seed")


@dataclass
class Request:
    """A prompt, the tokens that were made behind it, and when.

    Attributes:
        wanted: tokens to make.
        times: seconds at which it arrived and at which each token was there.
        close: ends the open ranges, that of the whole request first.
    """

    name: str
    prompt: list[int]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    close: list[Callable[[], None]] = field(default_factory=list)

    def arrive(self) -> None:
        """Opens the ranges of the request and of its first token."""
        self.times = [time.perf_counter()]
        self.close = [open_range(self.name), open_range(f"first token of {self.name}")]

    def take(self, token: int) -> bool:
        """Keeps a new token; returns whether it was the last."""
        self.tokens.append(token)
        self.times.append(time.perf_counter())
        if len(self.tokens) in (1, self.wanted):
            self.close.pop()()
        return len(self.tokens) == self.wanted


class Model(Transformer):
    """The transformer over a cache with a row for each sequence of the batch, each at its own position."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        size, self.room = config.size, config.context_length
        # (L, 2, B, H, T, d_head)
        shape = (size.num_layers, 2, config.batch_size, size.num_heads, self.room, size.d_head)
        self.cache = torch.zeros(shape)
        self.rows, self.positions, self.end = slice(0, 0), torch.empty(0), 0
        for layer, block in enumerate(self.blocks):
            cast("SelfAttention", block.attention).attend = partial(self._attend, layer)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Puts keys and values (B, H, S, d_head) at their positions of the cache, and attends to what is visible."""
        keys, values = self.cache[layer, :, self.rows]  # (B, H, T, d_head) each
        at = self.positions[:, None, :, None].expand_as(k)
        keys.scatter_(2, at, k)
        values.scatter_(2, at, v)
        return F.scaled_dot_product_attention(q, keys[:, :, : self.end], values[:, :, : self.end], visible)

    def next_tokens(self, tokens: Tensor, positions: Tensor, rows: slice, end: int) -> Tensor:
        """Returns the likeliest token behind each sequence, (B,), of new tokens (B, S) at their positions (B, S).

        Args:
            tokens, positions: the new tokens of the sequences.
            rows: of the cache, those of the sequences.
            end: positions of the cache that any of them may see.
        """
        self.rows, self.positions, self.end = rows, positions, end
        cos, sin = (self.get_buffer(name)[positions][:, None] for name in ("cos", "sin"))  # (B, 1, S, d_head / 2)
        visible = positions[:, None, :, None] >= torch.arange(end, device=tokens.device)  # (B, 1, S, end)
        x = self.embedding(tokens)  # (B, S, d)
        for block in self.blocks:
            x = block(x, cos, sin, visible)
        return cast(Tensor, self.head(self.norm(x[:, -1]))).argmax(-1)


class Engine:
    """Serves requests: a waiting one is prefilled as soon as a row of the batch is free, else all are decoded.

    Attributes:
        log: the engine's own record of each step: what its range says, begin and length in ms.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.log = config, list[Mapping[str, Any]]()
        with tensors_made_in(torch.bfloat16 if config.precision == "bf16" else torch.float32, config.device):
            self.model = Model(config).requires_grad_(False)
        rows = config.batch_size
        self.tokens, self.positions = (torch.zeros(rows, 1, dtype=torch.long, device=config.device) for _ in range(2))
        self.made = torch.zeros(rows, dtype=torch.long, device=config.device)
        self.decode: Callable[[], object] = self._decode_all
        if config.cuda_graph:
            self.decode = capture_graphs({"decode": self._decode_all})["decode"]

    def _decode_all(self) -> None:
        """A token for every row of the batch, used or not: the shapes are always the same."""
        whole = slice(0, self.config.batch_size)
        self.made.copy_(self.model.next_tokens(self.tokens, self.positions, whole, self.config.context_length))

    def serve(self, requests: list[Request]) -> None:
        """Serves requests that all arrive at once, until the last has its tokens."""
        for request in requests:
            request.arrive()
        waiting, running = list(requests), cast("dict[int, Request]", {})
        while waiting or running:
            free = [row for row in range(self.config.batch_size) if row not in running]
            if waiting and free:
                request, row = waiting.pop(0), free[0]
                running[row] = request
                made = {row: self._step("prefill", [request], partial(self._prefill, request, row))[0]}
            else:
                tokens = self._step("decode", list(running.values()), partial(self._decode, running))
                made = {row: tokens[row] for row in running}
            for row, token in made.items():
                if running[row].take(token):
                    del running[row]

    def _step(self, kind: str, requests: Sequence[Request], work: Callable[[], Tensor]) -> list[int]:
        """Runs a step inside its range, and logs it; returns its tokens, for which the GPU is waited."""
        seen = sum(len(request.prompt) + len(request.tokens) for request in requests)
        new = seen if kind == "prefill" else len(requests)
        begin = time.perf_counter()
        with annotate(f"{kind} bs={len(requests)} toks={new} sk={seen}"):
            made: list[int] = work().tolist()
        ms = (time.perf_counter() - begin) * 1e3
        step = {"kind": kind, "batch": len(requests), "tokens": new, "positions": seen}
        self.log.append({**step, "start_ms": begin * 1e3, "ms": ms})
        return made

    def _prefill(self, request: Request, row: int) -> Tensor:
        length = len(request.prompt)
        prompt = torch.tensor([request.prompt], device=self.config.device)  # (1, S)
        positions = torch.arange(length, device=self.config.device)[None]
        return self.model.next_tokens(prompt, positions, slice(row, row + 1), length)

    def _decode(self, running: Mapping[int, Request]) -> Tensor:
        tokens, positions = [0] * self.config.batch_size, [0] * self.config.batch_size
        for row, request in running.items():
            tokens[row], positions[row] = request.tokens[-1], len(request.prompt) + len(request.tokens) - 1
        self.tokens.copy_(torch.tensor(tokens)[:, None])
        self.positions.copy_(torch.tensor(positions)[:, None])
        self.decode()
        return self.made


def make_requests(count: int, prompt_length: int, tokens: int, vocabulary: int, seed: int) -> list[Request]:
    """Returns requests of half to whole the length of prompt, and of answer, by chance."""
    chance = random.Random(seed)
    return [
        Request(
            f"request {number}",
            [chance.randrange(vocabulary) for _ in range(chance.randint((prompt_length + 1) // 2, prompt_length))],
            chance.randint((tokens + 1) // 2, tokens),
        )
        for number in range(count)
    ]


def main(arguments: list[str]) -> int:
    """Runs the target; returns its exit code."""
    parser = make_parser("serving", "Serves requests by prefill and batched decode, with NVTX ranges.", _OPTIONS)
    parser.prog = "python examples/serving/server.py"
    parser.add_argument("--requests", type=int, default=24, help="requests to serve (default 24)")
    parser.add_argument("--prompt-length", type=int, default=512, help="longest prompt (default 512)")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer, at least 3 (default 64)")
    parser.set_defaults(context_length=1024, batch_size=8)
    try:
        config, given = read_options(parser, arguments)
        config = replace(config, mode="forward", attention="sdpa")
    except ConfigurationError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    if given.prompt_length + given.tokens > config.context_length or given.tokens < 3:
        parser.error("--prompt-length and --tokens (3 or more) must fit into --context-length")

    @torch.inference_mode()
    def measure(times: Times) -> Mapping[str, Any]:
        torch.manual_seed(config.seed)
        vocabulary = config.size.vocab_size
        with annotate("warmup"):
            engine = Engine(config)
            engine.serve(make_requests(config.batch_size, given.prompt_length, min(given.tokens, 8), vocabulary, 1))
            engine.log.clear()
            synchronize(config.device)
        requests = make_requests(given.requests, given.prompt_length, given.tokens, vocabulary, config.seed)
        switch_profiler("start", config.device)
        engine.serve(requests)
        switch_profiler("stop", config.device)
        for step in engine.log:
            times.setdefault(step["kind"], []).append(step["ms"])
        first = [(request.times[1] - request.times[0]) * 1e3 for request in requests]
        gaps = [
            (b - a) * 1e3 for request in requests for a, b in zip(request.times[1:], request.times[2:], strict=False)
        ]
        made = sum(len(request.tokens) for request in requests)
        seconds = max(request.times[-1] for request in requests) - requests[0].times[0]
        figures = {
            "steps": engine.log, "ttft_ms": first, "inter_token_ms": gaps, "tokens_per_s": made / seconds,
            "weights_bytes": sum(weight.nbytes for weight in engine.model.parameters()),
            "cache_bytes": engine.model.cache.nbytes,
        }  # fmt: skip
        print(f"TTFT       {statistics.median(first):10.3f} ms, the median of {len(first)} requests")
        print(
            f"inter-token{statistics.median(gaps):10.3f} ms, the median of {len(gaps)}; {made / seconds:.0f} tokens/s"
        )
        return figures

    return run_measured(measure, config.device, config.run(), given.results, ranges=not given.no_ranges)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
