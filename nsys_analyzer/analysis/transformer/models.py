"""Describes transformers: the known model sizes, the costs of a model, and the known configuration of a capture.

The costs are the FLOPs and the minimum bytes moved, which follow from the shapes alone. B is the batch size, S the
context length, d = d_model, H the number of heads, L the number of layers, V the vocabulary size.

A matmul of (m, k) and (k, n) has 2·m·k·n FLOPs: one multiplication and one addition per term. The FLOPs of norms, RoPE,
the activation and the residual additions are negligible. A matmul reads both operands once and writes its result once:
m·k + k·n + m·n elements. A backward pass has twice the FLOPs and moves twice the elements of the forward pass, since
the gradients of both operands of a matmul are two matmuls of matrices with the same shapes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from nsys_analyzer.errors import ConfigurationError

DEFAULT_VOCAB_SIZE = 10_000


@dataclass(frozen=True)
class ModelSize:
    """One size of the pre-norm transformer: RMSNorm, RoPE, SwiGLU, no biases, and separate embedding and head.

    Attributes:
        name: the name of the size, such as "small".
        d_model: the width of the residual stream.
        d_ff: the width of the feed-forward layer.
        num_layers: the number of layers.
        num_heads: the number of attention heads.
        vocab_size: the number of tokens in the vocabulary.

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

    @cached_property
    def dimensions(self) -> tuple[int, int, int, int]:
        """Returns ``(d_model, d_ff, num_layers, num_heads)``."""
        return self.d_model, self.d_ff, self.num_layers, self.num_heads

    @property
    def d_head(self) -> int:
        """Returns the width of one attention head: d_model ÷ num_heads."""
        return self.d_model // self.num_heads

    @property
    def parameters(self) -> int:
        """Returns the number of parameters: L·(4·d² + 3·d·d_ff + 2·d) + 2·V·d + d.

        Each layer has four projections, three SwiGLU matrices and two norms. The model also has an embedding, a head
        and a final norm.
        """
        d = self.d_model
        layer = 4 * d * d + 3 * d * self.d_ff + 2 * d
        return self.num_layers * layer + 2 * self.vocab_size * d + d

    @property
    def min_matmuls(self) -> int:
        """Returns the minimum number of matmul kernels in one forward pass, with all possible fusions: 4·L + 1.

        Each layer needs four matmuls: QKV, output, gate with up, and down. The head needs one matmul.
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
"""The known sizes. If only dimensions are given, the first size with these dimensions applies."""


def list_model_names() -> str:
    """Returns the names of the known sizes, separated by commas, for error messages."""
    return ", ".join(model.name for model in MODEL_SIZES)


def find_model(name: str) -> ModelSize:
    """Returns the known size with this name, in upper or lower case.

    ``2_7B`` and ``2p7b`` are also accepted for ``2.7B``, and ``xl_2026`` for ``xl-2026``.

    Raises:
        ConfigurationError: no size has this name.
    """
    normalized_name = re.sub(r"^2[._p-]7b$", "2.7b", re.sub(r"[\s_]+", "-", name.strip().lower()))
    model = next((model for model in MODEL_SIZES if model.name.lower() == normalized_name), None)
    if model is None:
        similar_names = get_close_matches(normalized_name, [size.name for size in MODEL_SIZES], 1)
        hint = f"Did you mean {similar_names[0]!r}? " if similar_names else ""
        raise ConfigurationError(f"Unknown model {name!r}", f"{hint}Known models: {list_model_names()}")
    return model


def model_from_dimensions(
    d_model: int, d_ff: int, num_layers: int, num_heads: int, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> ModelSize:
    """Returns the known size with these dimensions, or a size named after its width and depth, such as ``d512-L4``.

    Raises:
        ConfigurationError: the dimensions are impossible.
    """
    dimensions = d_model, d_ff, num_layers, num_heads
    names = (model.name for model in MODEL_SIZES if model.dimensions == dimensions)
    return ModelSize(next(names, f"d{d_model}-L{num_layers}"), *dimensions, vocab_size)


def resolve_model(
    name: str | None, dimensions: tuple[int, int, int, int] | None, vocab_size: int | None = None
) -> ModelSize | None:
    """Returns the model with the given name or dimensions; None if neither is given.

    If both are given and contradict each other, the model has the given dimensions, and the name of the known size with
    these dimensions. For example, the 2026 course uses the name ``xl`` for the size ``2.7B``.

    Raises:
        ConfigurationError: the name is unknown and there are no dimensions, or the dimensions are impossible.
    """
    vocabulary = vocab_size or DEFAULT_VOCAB_SIZE
    if dimensions is None:
        return replace(find_model(name), vocab_size=vocabulary) if name else None
    model = model_from_dimensions(*dimensions, vocabulary)
    try:
        model_of_name = find_model(name) if name else model
    except ConfigurationError:
        return replace(model, name=name or model.name)
    return replace(model, name=model_of_name.name) if model_of_name.dimensions == dimensions else model


#: The number of operations that are counted per score of a softmax: max, subtract, exp, sum and divide.
SOFTMAX_FLOPS_PER_SCORE = 5

#: The size of an element that a matmul reads or writes, by precision, bytes.
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


def attention_matmul_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the FLOPs of both attention matmuls, Q·Kᵀ and weights·V, in one forward pass: 4·B·S²·d·L.

    Each layer has two such matmuls of 2·B·S²·d FLOPs. All S × S scores count, since unfused attention computes all of
    them and applies the mask afterwards.
    """
    return 4 * batch_size * context_length**2 * model.d_model * model.num_layers


def forward_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the FLOPs of one forward pass: two FLOPs per token and weight, and the FLOPs of the attention matmuls.

    The weights are four projections (d, d) and SwiGLU's three matrices (d, d_ff) per layer, and the head (d, V).
    """
    d = model.d_model
    weights = (4 * d * d + 3 * d * model.d_ff) * model.num_layers + d * model.vocab_size
    return 2 * batch_size * context_length * weights + attention_matmul_flops(model, batch_size, context_length)


def softmax_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the FLOPs of attention's softmax in one forward pass: 5·B·H·S²·L, with 5 FLOPs per score."""
    scores = batch_size * model.num_heads * context_length**2 * model.num_layers
    return SOFTMAX_FLOPS_PER_SCORE * scores


def attention_to_softmax_flop_ratio(model: ModelSize) -> float:
    """Returns the FLOPs of the attention matmuls divided by the FLOPs of the softmax: 4·d_head ÷ 5 for any B and S.

    The ratio of the times of matmuls and softmax is different.
    """
    return 4 * model.d_head / SOFTMAX_FLOPS_PER_SCORE


def attention_matmul_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the elements that the attention matmuls move if they are separate kernels: 2·(2·B·S·d + B·H·S²)·L."""
    vectors = 2 * batch_size * context_length * model.d_model
    scores = batch_size * model.num_heads * context_length**2
    return 2 * (vectors + scores) * model.num_layers


def fused_attention_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the elements that fused attention moves in a forward pass: 4·B·S·d·L.

    The kernel reads Q, K and V and writes the result. In the backward pass, it moves twice the elements: it reads these
    four tensors and the gradient of the result, and writes three gradients.
    """
    return 4 * batch_size * context_length * model.d_model * model.num_layers


def count_weights_bytes(model: ModelSize, element: int) -> int:
    """Counts the bytes of the weights that every pass reads: all weights except the embedding.

    A token reads only one row of the embedding.

    Args:
        element: bytes per element.
    """
    return (model.parameters - model.vocab_size * model.d_model) * element


def count_cached_bytes(model: ModelSize, positions: float, element: int) -> float:
    """Counts the bytes of the keys and values in the cache: 2·L·d elements for each position.

    Keys and values are assumed to have the same number of heads as queries.

    Args:
        model: the model.
        positions: the number of positions in the cache.
        element: bytes per element.
    """
    return 2 * model.num_layers * model.d_model * element * positions


def count_linear_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the elements that all matmuls with a weight move in one forward pass.

    These are four projections and three feed-forward matmuls per layer, and the head.
    """
    tokens, d = batch_size * context_length, model.d_model
    projections = 4 * (2 * tokens * d + d * d)
    feed_forward = 3 * (tokens * d + d * model.d_ff + tokens * model.d_ff)
    head = tokens * d + d * model.vocab_size + tokens * model.vocab_size
    return (projections + feed_forward) * model.num_layers + head


#: The sources of a configuration. If values of the command line replace some values, but not the model, the source of
#: the model comes first.
ConfigurationSource: TypeAlias = Literal[
    "unknown", "manifest", "file name", "timings", "command line", "manifest, command line", "file name, command line"
]
#: The sources of a configuration whose model is from the capture's file name.
FILE_NAME_SOURCES: tuple[ConfigurationSource, ...] = ("file name", "file name, command line")


class Shapes(NamedTuple):
    """The model and the size of its input, which determine FLOPs and bytes."""

    model: ModelSize
    batch_size: int
    context_length: int


class Configuration(msgspec.Struct, frozen=True):
    """The configuration of a capture. A field is None if it is unknown.

    Attributes:
        model: the model. In JSON, this field has the key ``size``, and ``model`` contains only the model's name.
        context_length: the number of tokens in a sequence.
        batch_size: the number of sequences in a batch.
        precision: "fp32", "tf32", "bf16", "fp16", or another text in lower case.
        mode: "forward", "forward+backward", "train", or another text in lower case.
        attention: the name of the implementation of attention.
        source: the source of the values.
        model_name: the name of the model.
    """

    model: ModelSize | None = msgspec.field(name="size", default=None)
    context_length: int | None = None
    batch_size: int | None = None
    precision: str | None = None
    mode: str | None = None
    attention: str | None = None
    source: ConfigurationSource = "unknown"
    model_name: str | None = msgspec.field(name="model", default=None)

    def __post_init__(self) -> None:
        """Sets ``model_name`` to the name of ``model``, if the model is known."""
        if self.model:
            msgspec.structs.force_setattr(self, "model_name", self.model.name)

    @property
    def shapes(self) -> Shapes | None:
        """Returns the model with its batch size and context length; None if one of them is unknown."""
        model, batch_size, context_length = self.model, self.batch_size, self.context_length
        return Shapes(model, batch_size, context_length) if model and batch_size and context_length else None


_PRECISION_SYNONYMS = {
    "fp32": ("fp32", "float32", "float", "single", "full"),
    "tf32": ("tf32",),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
}
_MODE_SYNONYMS = {
    "forward": ("forward", "fwd", "forward_only", "only_forward", "inference"),
    "forward+backward": ("forward_backward", "fwd_bwd", "both", "backward", "bwd", "forward_and_backward"),
    "train": ("train", "training", "train_step", "training_step", "full", "step"),
}


def _replace_synonym(text: str, synonyms: dict[str, tuple[str, ...]]) -> str:
    """Returns the key of ``synonyms`` whose values contain the text; the text in lower case if there is none."""
    word = re.sub(r"[\s+&_-]+", "_", text.strip().lower())
    return next((name for name, words in synonyms.items() if word in words), text.strip().lower())


def precision_from_text(text: str) -> str:
    """Returns ``fp32``, ``tf32``, ``bf16`` or ``fp16`` for the name of a dtype, or an unknown name in lower case."""
    return _replace_synonym(text.strip().lower().removeprefix("torch."), _PRECISION_SYNONYMS)


def mode_from_text(text: str) -> str:
    """Returns ``forward``, ``forward+backward`` or ``train`` for a name of a mode, or an unknown name in lower case."""
    return _replace_synonym(text, _MODE_SYNONYMS)


# A bare number after the model is a context length only if it is a power of two and at least 32. No day, month or year
# of a date is such a number. `xl-2026` is a model, but `xl-2026-03-01` is the model xl and a date.
_MODEL_IN_NAME = re.compile(
    r"(?<![a-z0-9])(?<!x[-_])(?P<model>2[._p]7b|xl[-_]?2026(?![-_]\d\d(?!\d))|10b|small|medium|large|xl)"
    r"(?:[-_ ]?(?P<context>[1-9][0-9]{0,8}))?(?![a-z0-9])"
)
_CONTEXT_IN_NAME = re.compile(
    r"(?<![a-z])(?:ctx|(?:context|seq|sequence)(?:[-_]?len(?:gth)?)?)[-_=]?([1-9][0-9]{0,8})(?![a-z0-9])"
)
_BATCH_IN_NAME = re.compile(r"(?<![a-z0-9])(?:b|bs|(?:bs|batch(?:[-_]?size)?)[-_=]?)([1-9][0-9]{0,8})(?![a-z0-9])")
_PRECISION_IN_NAME = re.compile(r"(?<![a-z0-9])(bf16|fp32|tf32|fp16)(?![a-z0-9])")
_MODE_IN_NAME = re.compile(
    r"(?<![a-z0-9])((?:forward|fwd)[-_+](?:backward|bwd)|forward|fwd|inference|train(?:ing)?)(?![a-z0-9])"
)
_ATTENTION_IN_NAME = re.compile(r"(?<![a-z0-9])(sdpa|flash|eager|naive|unfused)(?![a-z0-9])")
_OTHER_MODEL_FAMILY = re.compile(
    r"(?<![a-z0-9])(?:[a-z]*bert|gpt|t5|opt|llama|vit|whisper|qwen|mistral)[-_]?\d*(?![a-z])"
)


def configuration_from_name(stem: str) -> Configuration | None:
    """Reads the configuration from a capture's file name, such as ``train_small256`` or ``2.7B_ctx256_b4``.

    The name of a model size counts only if it is the whole file name, or if the file name contains another detail
    (context length, batch size, precision, mode or attention).

    Args:
        stem: the file name without its extension.

    Returns:
        The configuration, or None if the file name contains no configuration or is ambiguous. It is ambiguous if it
        contains two sizes, two context lengths, or the name of another family of models.
    """
    name = stem.strip().lower()
    matches = list(_MODEL_IN_NAME.finditer(name))
    models = {re.sub(r"[_-]?2026", "-2026", match["model"]) for match in matches}
    context_lengths = {int(match["context"]) for match in matches if match["context"]}
    # A number below 16, as in "seq_3", is the number of a file.
    contexts = {length for length in map(int, _CONTEXT_IN_NAME.findall(name)) if length >= 16}
    contexts |= {length for length in context_lengths if 32 <= length <= 131_072 and length.bit_count() == 1}
    if len(models) > 1 or len(contexts) > 1 or _OTHER_MODEL_FAMILY.search(name):
        return None
    mode = _single_value(_MODE_IN_NAME.findall(name))
    configuration = Configuration(
        model=find_model(models.pop()) if models else None,
        context_length=contexts.pop() if contexts else None,
        batch_size=int(batch) if (batch := _single_value(_BATCH_IN_NAME.findall(name))) else None,
        precision=_single_value(_PRECISION_IN_NAME.findall(name)),
        mode=mode_from_text(mode) if mode else None,
        attention=_single_value(_ATTENTION_IN_NAME.findall(name)),
        source="file name",
    )
    is_whole_name = configuration.model is not None and name.replace("_", "-") == configuration.model.name.lower()
    details = configuration.batch_size, configuration.precision, configuration.mode, configuration.attention
    is_sure = configuration.context_length or (configuration.model and (is_whole_name or any(details)))
    return configuration if is_sure else None


def _single_value(values: list[str]) -> str | None:
    """Returns the value if all values are equal; None if there are no values or different values."""
    return values[0] if len(set(values)) == 1 else None
