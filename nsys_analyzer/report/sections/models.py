"""The dimensions of the models, and the FLOPs that follow from them."""

from __future__ import annotations

from nsys_analyzer.analysis.transformer.flops import forward_flops
from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize
from nsys_analyzer.report.model import Block, Paragraph, Section
from nsys_analyzer.report.sections.evidence import Evidence
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


_Ran = tuple[str, Configuration]
_RAN: tuple[Field[_Ran], ...] = (
    Field("capture", "text", lambda ran: ran[0]),
    Field("model", "text", lambda ran: ran[1].model.name if ran[1].model else None),
    Field("context", "count", lambda ran: ran[1].context_length),
    Field("batch", "count", lambda ran: ran[1].batch_size),
    Field("precision", "text", lambda ran: ran[1].precision),
    Field("forward FLOPs", "flop", lambda ran: _forward_flops(ran[1])),
    Field("known from", "text", lambda ran: ran[1].source),
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
    """One row for each model, and one for each capture whose configuration is known."""
    ran = [(capture.title, capture.configuration) for capture in evidence.captures if capture.configuration]
    models = {known.model for _, known in ran if known.model}
    blocks: list[Block] = [Paragraph(_NO_MODEL)]
    if models:
        of_captures = table(_RAN, ran, "What each capture ran:")
        blocks = [table(_MODEL, sorted(models, key=lambda model: model.parameters)), of_captures, Paragraph(_FLOPS)]
        blocks += [Paragraph(_NO_FLOPS)] if any(_forward_flops(known) is None for _, known in ran) else []
    return Section("models", "Model specifications", tuple(blocks))


def _forward_flops(known: Configuration) -> int | None:
    model, batch, context = known.model, known.batch_size, known.context_length
    return forward_flops(model, batch, context) if model and batch and context else None
