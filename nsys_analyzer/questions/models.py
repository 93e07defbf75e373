"""The dimensions of the models, and the FLOPs that follow from them."""

from __future__ import annotations

from dataclasses import replace

from nsys_analyzer.analysis.flops import backward_flops, forward_flops
from nsys_analyzer.analysis.models import ModelSize
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import FEW, Evidence
from nsys_analyzer.report.model import Block, Cell, Column, Details, Paragraph, Section, Table
from nsys_analyzer.text import marked

_MODEL_COLUMNS = (
    Column("model"),
    Column("d_model", "count"),
    Column("d_ff", "count"),
    Column("layers", "count"),
    Column("heads", "count"),
    Column("d_head", "count"),
    Column("parameters", "count"),
    Column("products per forward", "count"),
)
_CAPTURE_COLUMNS = (
    Column("capture"),
    Column("model"),
    Column("context", "count"),
    Column("batch", "count"),
    Column("precision"),
    Column("forward", "flop"),
    Column("backward", "flop"),
    Column("known from"),
)
#: What a row says that has no FLOPs.
_DASH = marked("A dash: the batch size or context length is unknown. Give `--batch-size`, `--context-length`.")


def answer(evidence: Evidence) -> Section:
    """One row for each model, and one for each capture whose configuration is known."""
    models = {c.configuration.model for c in evidence.captures if c.configuration and c.configuration.model}
    if not models:
        text = marked(
            "The captures do not say which model they ran. Give `--model small --context-length 256 --batch-size 4` "
            "for FLOPs; every measured time stands without it."
        )
        return Section("models", "Model specifications", (Paragraph(text),))
    known = [capture for capture in evidence.captures if capture.configuration]
    ran = Table(_CAPTURE_COLUMNS, tuple(_capture_row(capture) for capture in known))
    title = f"What each of {len(known)} captures ran"
    shown = Details(title, (ran,)) if len(known) > FEW else replace(ran, caption="What each capture ran:")
    blocks: tuple[Block, ...] = (
        Table(_MODEL_COLUMNS, tuple(_model_row(m) for m in sorted(models, key=lambda m: m.parameters))),
        shown,
        Paragraph(
            "FLOPs of one forward: projections 8·B·S·d²·L, attention products 4·B·S²·d·L, feed-forward "
            "6·B·S·d·d_ff·L, head 2·B·S·d·V; a multiplication and an addition count as two. Backward is twice that."
        ),
        *([Paragraph(_DASH)] if any(_capture_row(capture)[5] is None for capture in known) else []),
    )
    return Section("models", "Model specifications", blocks)


def _model_row(model: ModelSize) -> tuple[Cell, ...]:
    return (
        model.name,
        model.d_model,
        model.d_ff,
        model.num_layers,
        model.num_heads,
        model.d_head,
        model.parameters,
        model.gemms_per_forward,
    )


def _capture_row(capture: CaptureSummary) -> tuple[Cell, ...]:
    configuration = capture.configuration
    if configuration is None:
        return (capture.title, *(None for _ in _CAPTURE_COLUMNS[1:]))
    model, batch, context = configuration.model, configuration.batch_size, configuration.context_length
    shapes = (model, batch, context) if model and batch and context else None
    return (
        capture.title,
        model.name if model else None,
        context,
        batch,
        configuration.precision,
        *((forward_flops(*shapes), backward_flops(*shapes)) if shapes else (None, None)),
        configuration.source,
    )
