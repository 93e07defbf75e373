"""The dimensions of the models, and the FLOPs that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.analysis.transformer.flops import forward_flops
from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize
from nsys_analyzer.report.model import Block, Details, Paragraph, Section
from nsys_analyzer.report.sections.evidence import FEW, Evidence
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


@dataclass(frozen=True)
class _Ran:
    """What a capture ran, and the FLOPs of a forward pass, None where its shapes are not known."""

    capture: str
    known: Configuration
    forward_flops: int | None


_RAN: tuple[Field[_Ran], ...] = (
    Field("capture", "text", lambda ran: ran.capture),
    Field("model", "text", lambda ran: ran.known.model.name if ran.known.model else None),
    Field("context", "count", lambda ran: ran.known.context_length),
    Field("batch", "count", lambda ran: ran.known.batch_size),
    Field("precision", "text", lambda ran: ran.known.precision),
    Field("forward FLOPs", "flop", lambda ran: ran.forward_flops),
    Field("known from", "text", lambda ran: ran.known.source),
)
_NO_FLOPS = phrase(
    "Where no FLOPs are given, the batch size or context length is unknown: give `--batch-size`, `--context-length`."
)


def answer(evidence: Evidence) -> Section:
    """One row for each model, and one for each capture whose configuration is known."""
    models = {c.configuration.model for c in evidence.captures if c.configuration and c.configuration.model}
    if not models:
        text = phrase(
            "The captures do not say which model they ran. Give `--model small --context-length 256 --batch-size 4` "
            "for FLOPs; every measured time stands without it."
        )
        return Section("models", "Model specifications", (Paragraph(text),))
    ran = [_ran(capture.title, capture.configuration) for capture in evidence.captures if capture.configuration]
    many = len(ran) > FEW
    of_captures = table(_RAN, ran, "" if many else "What each capture ran:")
    blocks: tuple[Block, ...] = (
        table(_MODEL, sorted(models, key=lambda model: model.parameters)),
        Details(f"What each of {len(ran)} captures ran", (of_captures,)) if many else of_captures,
        Paragraph(
            "FLOPs of one forward: projections 8·B·S·d²·L, attention matmuls 4·B·S²·d·L, feed-forward "
            "6·B·S·d·d_ff·L, head 2·B·S·d·V; a multiplication and an addition count as two. Backward is twice that."
        ),
        *([Paragraph(_NO_FLOPS)] if any(one.forward_flops is None for one in ran) else []),
    )
    return Section("models", "Model specifications", blocks)


def _ran(title: str, known: Configuration) -> _Ran:
    model, batch, context = known.model, known.batch_size, known.context_length
    if not model or not batch or not context:
        return _Ran(title, known, None)
    return _Ran(title, known, forward_flops(model, batch, context))
