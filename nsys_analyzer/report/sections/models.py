"""The dimensions of the models, and the FLOPs that follow from them."""

from __future__ import annotations

from nsys_analyzer.analysis.transformer.costs import forward_flops
from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Block, Paragraph, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import phrase

_MODEL: tuple[Field[ModelSize], ...] = (
    Field("model", "text", lambda model: model.name),
    Field("d_model", "count", lambda model: model.d_model),
    Field("d_ff", "count", lambda model: model.d_ff),
    Field("layers", "count", lambda model: model.num_layers),
    Field("heads", "count", lambda model: model.num_heads),
    Field("d_head", "count", lambda model: model.d_head),
    Field("parameters", "count", lambda model: model.parameters),
    Field("matmuls per forward", "count", lambda model: model.gemms_per_forward),
)


_FLOPS = (
    "FLOPs of one forward pass: projections 8·B·S·d²·L, attention matmuls 4·B·S²·d·L, feed-forward 6·B·S·d·d_ff·L, "
    "head 2·B·S·d·V; a multiplication and an addition count as two. The backward pass has twice as many."
)
_NO_FLOPS = phrase(
    "Where no FLOPs are given, the batch size or context length is unknown: give `--batch-size`, `--context-length`."
)
_NO_MODEL = phrase(
    "The captures do not say which model they ran. Give `--model small --context-length 256 --batch-size 4` for FLOPs; "
    "the measured times need none of it."
)


def answer(evidence: Evidence) -> Section:
    """One row for each model, and where the FLOPs of a forward pass come from."""
    known = [capture.configuration for capture in evidence.captures if capture.configuration]
    models = sorted({one.model for one in known if one.model}, key=lambda model: model.parameters)
    blocks: list[Block] = [table(_MODEL, models), Paragraph(_FLOPS)] if models else [Paragraph(_NO_MODEL)]
    blocks += [Paragraph(_NO_FLOPS)] if models and any(flops_of(one) is None for one in known) else []
    return Section("models", "Model specifications", tuple(blocks))


def flops_of(known: Configuration) -> int | None:
    """The FLOPs of a forward pass, None where its shapes are not known."""
    model, batch, context = known.model, known.batch_size, known.context_length
    return forward_flops(model, batch, context) if model and batch and context else None
