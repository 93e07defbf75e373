"""The dimensions of a model and of its batch, read where they have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: What configurations of models call their dimensions, by the keys of a manifest.
_CALLED = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "vocab_size": ("vocab_size",),
}
#: The names of a batch's tokens among the arguments of a call.
_TOKENS = ("input_ids", "decoder_input_ids", "inputs_embeds", "pixel_values")
_LEAST_LAYERS = 2


def of_model(module: Any) -> dict[str, int]:
    """What the modules of a model say, by the keys of a manifest; what they do not say is absent."""
    return {**_of_modules(module), **_of_config(module)}


def of_batch(arguments: Iterable[Any], keywords: Mapping[str, Any]) -> dict[str, int]:
    """What the arguments of a call say: the batch size, and of tokens the context length."""
    given = [*(keywords[name] for name in _TOKENS if name in keywords), *arguments, *keywords.values()]
    batch = next((one for one in given if hasattr(one, "shape") and hasattr(one, "is_floating_point")), None)
    if batch is None or not len(batch.shape) or not batch.shape[0]:
        return {}
    found = {"batch_size": int(batch.shape[0])}
    if len(batch.shape) == 2 and not batch.is_floating_point():
        found["context_length"] = int(batch.shape[1])
    return found


def _of_config(module: Any) -> dict[str, int]:
    """The dimensions in the ``config`` that models of transformers, and of many others, carry."""
    configs = (getattr(one, "config", None) for one in module.modules())
    config = next((one for one in configs if one is not None), None)
    found = {}
    for key, names in _CALLED.items():
        values = (getattr(config, name, None) for name in names)
        value = next((one for one in values if isinstance(one, int) and one > 0), None)
        if value is not None:
            found[key] = value
    return found


def _of_modules(module: Any) -> dict[str, int]:
    """The layers: the longest list of modules of one class; the vocabulary and width: the largest embedding."""
    import torch

    found: dict[str, int] = {}
    lists = [one for one in module.modules() if isinstance(one, (torch.nn.ModuleList, torch.nn.Sequential))]
    layers = max((len(one) for one in lists if len({type(layer) for layer in one}) == 1), default=0)
    if layers >= _LEAST_LAYERS:
        found["num_layers"] = layers
    attention = next((one for one in module.modules() if isinstance(one, torch.nn.MultiheadAttention)), None)
    if attention is not None:
        found |= {"num_heads": attention.num_heads, "d_model": attention.embed_dim}
    embeddings = [one for one in module.modules() if isinstance(one, torch.nn.Embedding)]
    if embeddings:
        largest = max(embeddings, key=lambda one: one.num_embeddings)
        found |= {"vocab_size": largest.num_embeddings, "d_model": largest.embedding_dim}
    return found
