"""The known transformers, and the known configuration of a capture."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property

import msgspec

from nsys_analyzer.errors import ConfigurationError

DEFAULT_VOCAB_SIZE = 10_000


@dataclass(frozen=True)
class ModelSize:
    """One size of the pre-norm transformer: RMSNorm, RoPE, SwiGLU, no biases, embedding and head not tied.

    Raises:
        ConfigurationError: a dimension is not positive, or ``d_model`` is not a multiple of ``num_heads``.
    """

    name: str
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = DEFAULT_VOCAB_SIZE

    def __post_init__(self) -> None:
        if min(*self.dimensions, self.vocab_size) < 1:
            raise ConfigurationError(
                f"Model {self.name!r} has a dimension below 1", "Give positive dimensions, such as d_model=768"
            )
        if self.d_model % self.num_heads:
            raise ConfigurationError(
                f"Model {self.name!r}: d_model {self.d_model} is not a multiple of num_heads {self.num_heads}",
                "Give a num_heads that divides d_model",
            )

    @cached_property  # asked for at each of very many timings
    def dimensions(self) -> tuple[int, int, int, int]:
        """``(d_model, d_ff, num_layers, num_heads)``: the same for the same model, whatever its name."""
        return self.d_model, self.d_ff, self.num_layers, self.num_heads

    @property
    def d_head(self) -> int:
        """Width of one attention head: d_model ÷ num_heads."""
        return self.d_model // self.num_heads

    @property
    def parameters(self) -> int:
        """Number of parameters: L·(4·d² + 3·d·d_ff + 2·d) + 2·V·d + d.

        Per layer four projections, three SwiGLU matrices and two norms; then embedding, head and the final norm.
        """
        d = self.d_model
        layer = 4 * d * d + 3 * d * self.d_ff + 2 * d
        return self.num_layers * layer + 2 * self.vocab_size * d + d

    @property
    def fewest_matmuls(self) -> int:
        """Kernels of matmuls that one forward pass needs: 4·L + 1, where libraries fuse what they can.

        QKV, output, gate and up, and down of each layer; and the head.
        """
        return 4 * self.num_layers + 1


MODEL_SIZES: tuple[ModelSize, ...] = (
    ModelSize("small", 768, 3072, 12, 12),
    ModelSize("medium", 1024, 4096, 24, 16),
    ModelSize("large", 1280, 5120, 36, 20),
    ModelSize("xl", 1600, 6400, 48, 25),
    ModelSize("2.7B", 2560, 10240, 32, 32),
    ModelSize("xl-2026", 2560, 10240, 32, 32),
    ModelSize("10B", 4608, 12288, 50, 36),
)
"""The known sizes; dimensions alone stand for the first that has them."""


def list_model_names() -> str:
    """Returns the known model names as one line of text, for messages."""
    return ", ".join(model.name for model in MODEL_SIZES)


def find_model(name: str) -> ModelSize:
    """Finds the known size of this name, in any case; ``2_7B`` and ``2p7b`` are ``2.7B``, ``xl_2026`` is ``xl-2026``.

    Raises:
        ConfigurationError: no such size.
    """
    wanted = re.sub(r"^2[._p-]7b$", "2.7b", re.sub(r"[\s_]+", "-", name.strip().lower()))
    model = next((model for model in MODEL_SIZES if model.name.lower() == wanted), None)
    if model is None:
        meant = get_close_matches(wanted, [size.name for size in MODEL_SIZES], 1)
        hint = f"Did you mean {meant[0]!r}? " if meant else ""
        raise ConfigurationError(f"Unknown model {name!r}", f"{hint}Known models: {list_model_names()}")
    return model


def model_from_dimensions(
    d_model: int, d_ff: int, num_layers: int, num_heads: int, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> ModelSize:
    """Returns the known size with these dimensions, or one named after its width and depth, such as ``d512-L4``.

    Raises:
        ConfigurationError: the dimensions are impossible.
    """
    dimensions = d_model, d_ff, num_layers, num_heads
    names = (model.name for model in MODEL_SIZES if model.dimensions == dimensions)
    return ModelSize(next(names, f"d{d_model}-L{num_layers}"), *dimensions, vocab_size)


def resolve_model(
    name: str | None, dimensions: tuple[int, int, int, int] | None, vocab_size: int | None = None
) -> ModelSize | None:
    """Returns the model that a name, its four dimensions or both describe; ``None`` where neither is given.

    The dimensions decide. A known name used for other dimensions (the 2026 course calls the 2.7B ``xl``) gives way to
    the name they stand for.

    Raises:
        ConfigurationError: an unknown name without dimensions, or impossible dimensions.
    """
    vocabulary = vocab_size or DEFAULT_VOCAB_SIZE
    if dimensions is None:
        return replace(find_model(name), vocab_size=vocabulary) if name else None
    model = model_from_dimensions(*dimensions, vocabulary)
    try:
        named = find_model(name) if name else model
    except ConfigurationError:
        return replace(model, name=name or model.name)
    return replace(model, name=named.name) if named.dimensions == dimensions else model


class Configuration(msgspec.Struct, frozen=True):
    """The known configuration of a capture; ``None`` is unknown.

    ``precision`` and ``mode`` are spelled as ``precision_from_text`` and ``mode_from_text`` return them; ``source`` is
    ``manifest``, ``command line``, ``file name``, ``timings`` or ``unknown``. In JSON ``model`` is the name.
    """

    model: ModelSize | None = msgspec.field(name="size", default=None)
    context_length: int | None = None
    batch_size: int | None = None
    precision: str | None = None
    mode: str | None = None
    attention: str | None = None
    source: str = "unknown"
    model_name: str | None = msgspec.field(name="model", default=None)

    def __post_init__(self) -> None:
        """Takes the name of the model."""
        if self.model:
            msgspec.structs.force_setattr(self, "model_name", self.model.name)


_PRECISIONS = {
    "fp32": ("fp32", "float32", "float", "single", "full"),
    "tf32": ("tf32",),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
}
_MODES = {
    "forward": ("forward", "fwd", "forward_only", "only_forward", "inference"),
    "forward+backward": ("forward_backward", "fwd_bwd", "both", "backward", "bwd", "forward_and_backward"),
    "train": ("train", "training", "train_step", "training_step", "full", "step"),
}


def _canonical(text: str, synonyms: dict[str, tuple[str, ...]]) -> str:
    word = re.sub(r"[\s+&_-]+", "_", text.strip().lower())
    return next((name for name, words in synonyms.items() if word in words), text.strip().lower())


def precision_from_text(text: str) -> str:
    """Reads ``fp32``, ``tf32``, ``bf16`` or ``fp16`` from a dtype's spelling; an unknown spelling in lower case."""
    return _canonical(text.strip().lower().removeprefix("torch."), _PRECISIONS)


def mode_from_text(text: str) -> str:
    """Reads ``forward``, ``forward+backward`` or ``train`` from its usual spellings; an unknown one in lower case."""
    return _canonical(text, _MODES)


# A number alone after the model is a context length only where it can be nothing else: a power of two from 32,
# which no day, month or year is. `xl-2026` is a model, `xl-2026-03-01` is the model xl and a date.
_MODEL = re.compile(
    r"(?<![a-z0-9])(?<!x[-_])(?P<model>2[._p]7b|xl[-_]?2026(?![-_]\d\d(?!\d))|10b|small|medium|large|xl)"
    r"(?:[-_ ]?(?P<context>[1-9][0-9]{0,8}))?(?![a-z0-9])"
)
_CONTEXT = re.compile(
    r"(?<![a-z])(?:ctx|(?:context|seq|sequence)(?:[-_]?len(?:gth)?)?)[-_=]?([1-9][0-9]{0,8})(?![a-z0-9])"
)
_BATCH = re.compile(r"(?<![a-z0-9])(?:b|bs|(?:bs|batch(?:[-_]?size)?)[-_=]?)([1-9][0-9]{0,8})(?![a-z0-9])")
_PRECISION = re.compile(r"(?<![a-z0-9])(bf16|fp32|tf32|fp16)(?![a-z0-9])")
_MODE = re.compile(
    r"(?<![a-z0-9])((?:forward|fwd)[-_+](?:backward|bwd)|forward|fwd|inference|train(?:ing)?)(?![a-z0-9])"
)
_ATTENTION = re.compile(r"(?<![a-z0-9])(sdpa|flash|eager|naive|unfused)(?![a-z0-9])")
_OTHER_FAMILY = re.compile(r"(?<![a-z0-9])(?:[a-z]*bert|gpt|t5|opt|llama|vit|whisper|qwen|mistral)[-_]?\d*(?![a-z])")


def configuration_from_name(stem: str) -> Configuration | None:
    """Reads the configuration in a capture's file name, without its extension: ``train_small256``, ``2.7B_ctx256_b4``.

    A size word counts beside another detail (context, batch, precision, mode, attention) or alone as the whole name.
    ``None`` when unsure: two sizes or two context lengths in one name, another family of models, nothing recognised.
    """
    name = stem.strip().lower()
    matches = list(_MODEL.finditer(name))
    models = {re.sub(r"[_-]?2026", "-2026", match["model"]) for match in matches}
    numbers = {int(match["context"]) for match in matches if match["context"]}
    contexts = {length for length in map(int, _CONTEXT.findall(name)) if length >= 16}  # "seq_3" counts files
    contexts |= {length for length in numbers if 32 <= length <= 131_072 and length.bit_count() == 1}
    if len(models) > 1 or len(contexts) > 1 or _OTHER_FAMILY.search(name):
        return None
    mode = _only(_MODE.findall(name))
    configuration = Configuration(
        model=find_model(models.pop()) if models else None,
        context_length=contexts.pop() if contexts else None,
        batch_size=int(batch) if (batch := _only(_BATCH.findall(name))) else None,
        precision=_only(_PRECISION.findall(name)),
        mode=mode_from_text(mode) if mode else None,
        attention=_only(_ATTENTION.findall(name)),
        source="file name",
    )
    is_whole_name = configuration.model is not None and name.replace("_", "-") == configuration.model.name.lower()
    details = configuration.batch_size, configuration.precision, configuration.mode, configuration.attention
    is_sure = configuration.context_length or (configuration.model and (is_whole_name or any(details)))
    return configuration if is_sure else None


def _only(values: list[str]) -> str | None:
    return values[0] if len(set(values)) == 1 else None
