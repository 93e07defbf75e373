"""Tests decoding: the cache changes no logit, tokens are the greedy ones, and memory and times are right."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

import server as serving  # noqa: E402  of examples/serving

from nsys_analyzer.analysis.transformer.models import ModelSize  # noqa: E402
from nsys_analyzer.configuration import ATTENTION_IMPLEMENTATIONS  # noqa: E402
from nsys_analyzer.errors import ConfigurationError  # noqa: E402
from profiling_targets import decoding, transformer  # noqa: E402
from profiling_targets.decoding import Cache, DecodeCase, Decoder, generate, measure  # noqa: E402
from profiling_targets.harness import Config, measure_case  # noqa: E402

TINY = ModelSize("tiny", d_model=32, d_ff=64, num_layers=3, num_heads=4, vocab_size=50)
ROOM = 24
BATCH = 2


def config(attention: str = "unfused") -> Config:
    return Config(TINY, context_length=ROOM, batch_size=BATCH, mode="forward", attention=attention, device="cpu")


def decoder(attention: str = "unfused") -> Decoder:
    torch.manual_seed(0)
    return Decoder(config(attention)).requires_grad_(False)


def tokens(length: int) -> Any:
    return torch.randint(TINY.vocab_size, (BATCH, length), generator=torch.Generator().manual_seed(1))


def measure_small(**changes: Any) -> dict[str, Any]:
    return measure_case(decoding.TARGET, small_case(**changes), measure)


def small_case(**changes: Any) -> DecodeCase:
    known = {"num_layers": 1, "batch_size": 2, "prompt_length": 6, "cache_length": 16, "tokens": 5, "warmup_tokens": 2}
    return DecodeCase(**{"device": "cpu", **known, **changes})


@pytest.mark.parametrize("attention", ATTENTION_IMPLEMENTATIONS)
def test_a_whole_pass_is_that_of_the_transformer(attention: str) -> None:
    ours, known = decoder(attention), transformer.Transformer(config(attention)).requires_grad_(False)
    ours.load_state_dict(known.state_dict())
    sequence = tokens(ROOM)
    torch.testing.assert_close(ours(sequence), known(sequence)[:, -1])


def max_error(model: Decoder, prompt_length: int) -> float:
    """The largest difference of logits with the cache from those of one pass over the whole, ÷ the largest logit."""
    sequence, cache = tokens(ROOM), Cache(config())
    ends = range(prompt_length, ROOM)
    whole = torch.stack([model(sequence[:, :end]) for end in ends])
    cached = torch.stack([model(sequence[:, cache.filled : end], cache) for end in ends])
    return float((cached - whole).abs().max() / whole.abs().max())


@pytest.mark.parametrize("attention", ATTENTION_IMPLEMENTATIONS)
@pytest.mark.parametrize("prompt_length", [1, 7])
def test_the_cache_changes_no_logit(attention: str, prompt_length: int) -> None:
    assert max_error(decoder(attention), prompt_length) < 1e-5


def test_without_what_the_cache_holds_the_logits_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = Cache.extend

    def forgets(self: Cache, layer: int, k: Any, v: Any) -> Any:
        self.tensor[layer, :, :, :, : self.filled] = 0
        return extend(self, layer, k, v)

    monkeypatch.setattr(Cache, "extend", forgets)
    assert max_error(decoder(), 7) > 5e-2


@pytest.mark.parametrize("attention", ATTENTION_IMPLEMENTATIONS)
def test_tokens_are_greedy_and_the_same_with_and_without_the_cache(attention: str) -> None:
    model, made = decoder(attention), []
    for cache in (None, Cache(config())):
        sequence = tokens(ROOM)
        for at, logits in enumerate(generate(model, sequence, 7, cache), start=7):
            assert torch.equal(sequence[:, at], model(sequence[:, :at]).argmax(-1))
            assert logits.shape == (BATCH, TINY.vocab_size)
        made.append(sequence)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0][:, :7], tokens(ROOM)[:, :7])  # the prompt stays


def test_a_generation_fills_the_cache_anew_up_to_its_last_token() -> None:
    cache = Cache(config())
    for length in (ROOM, 10):
        list(generate(decoder(), tokens(length), 7, cache))
        assert cache.filled == length - 1  # nothing follows the last token, which is never fed back


@pytest.mark.parametrize("cache", [True, False])
def test_the_figures_of_a_case(cache: bool) -> None:
    row = measure_small(cache=cache)
    figures = row["figures"]
    assert row["status"] == "ok", row["message"]
    # one layer of small: 4·768² + 3·768·3072 + 2·768 parameters; embedding, head and norm: 2·10,000·768 + 768
    assert figures["weights_bytes"] == 4 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768 + 2 * 10_000 * 768 + 768)
    # keys and values of 2 sequences, 16 positions, 768 features, fp32
    assert figures["cache_bytes"] == (2 * 2 * 16 * 768 * 4 if cache else 0)
    times = figures["token_times_ms"]
    assert len(times) == 5
    assert figures["between_tokens_ms"] == pytest.approx(sum(times[1:]) / 4)
    assert figures["tokens_per_s"] == pytest.approx(2 / figures["between_tokens_ms"] * 1e3)
    # Of four sorted samples the 95th percentile lies at 0.95 · 3 = 2.85: 15 % of the third, 85 % of the fourth.
    *_, third, fourth = sorted(times[1:])
    assert figures["between_tokens_p95_ms"] == pytest.approx(0.15 * third + 0.85 * fourth)
    assert figures["first_token_min_ms"] <= figures["first_token_median_ms"] <= figures["first_token_max_ms"]


def test_bf16_halves_weights_and_cache() -> None:
    single, half = (measure_small(precision=precision)["figures"] for precision in ("fp32", "bf16"))
    for key in ("weights_bytes", "cache_bytes"):
        assert 2 * half[key] == single[key]
    assert torch.get_default_dtype() == torch.float32


def test_tf32_is_not_there_on_a_cpu() -> None:
    assert measure_small(precision="tf32")["status"] == "unsupported"


def test_a_cache_without_room_for_the_tokens() -> None:
    with pytest.raises(ConfigurationError, match="5 more tokens do not fit into a cache of 16"):  # 13 + 5 - 1 = 17
        small_case(prompt_length=13)
    assert small_case(prompt_length=12).cache_length == 12 + 5 - 1  # it may be full


def test_a_served_request_gets_the_tokens_that_it_gets_alone() -> None:
    torch.manual_seed(0)
    engine = serving.Engine(config("sdpa"))
    requests = serving.make_requests(5, 9, 6, TINY.vocab_size, seed=3)
    engine.serve(requests)
    for request in requests:
        known = torch.tensor([request.prompt + request.tokens])
        x, end = engine.model.embedding(known), known.shape[1]  # a pass over the whole, each token behind all before it
        cos, sin, seen = engine.model.cos[:end], engine.model.sin[:end], engine.model.future[:end, :end].logical_not()
        for block in engine.model.blocks:
            block.attention.attend = lambda q, k, v, seen: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, seen
            )
            x = block(x, cos, sin, seen)
        likeliest = engine.model.head(engine.model.norm(x))[0].argmax(-1).tolist()
        assert request.tokens == likeliest[len(request.prompt) - 1 : -1]
        assert len(request.tokens) == request.wanted == len(request.times) - 1
    kinds = [step["kind"] for step in engine.log]
    # Each request is prefilled once; its first token comes of that, every other of a decode step.
    assert kinds.count("prefill") == 5
    assert sum(step["batch"] for step in engine.log if step["kind"] == "decode") == sum(r.wanted - 1 for r in requests)
