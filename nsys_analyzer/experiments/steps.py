"""Training steps: the case and figures of their target, and the section of experiments on them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from nsys_analyzer.analysis.transformer.costs import layer_saved_bytes
from nsys_analyzer.analysis.transformer.models import ModelSize, find_model
from nsys_analyzer.configuration import ATTENTIONS, DIMENSIONS, MODES, PRECISIONS
from nsys_analyzer.experiments.model import Results, Settings, option, single
from nsys_analyzer.experiments.section import (
    MANTISSA_BITS,
    MinimumMemory,
    Rate,
    compile_cache,
    each,
    endings,
    named,
    precision_found,
    section,
    unsteady,
)
from nsys_analyzer.report.model import Block, Section
from nsys_analyzer.runs.rows import CaseTarget, Row, Times
from nsys_analyzer.text import Words, phrase

PHASES = ("forward", "loss", "backward", "optimizer")


class OfModel:
    """A case that is of a transformer."""

    model: str

    @property
    def size(self) -> ModelSize:
        """The model's dimensions, or the case's own where it has some that are not 0."""
        own: dict[str, Any] = {name: value for name in DIMENSIONS if (value := getattr(self, name, 0))}
        return replace(find_model(self.model), **own)


@dataclass(frozen=True)
class StepCase(OfModel):
    """One configuration of the transformer, and how many steps of it."""

    device: str
    model: str = option("small", "small, medium, large, xl, 2.7B, xl-2026 or 10B")
    d_model: int = option(0, "0 is the model's own", least=0)
    d_ff: int = option(0, "0 is the model's own", least=0)
    num_layers: int = option(0, "0 is the model's own", least=0, cpu=2)
    num_heads: int = option(0, "0 is the model's own", least=0)
    vocab_size: int = option(0, "0 is the model's own", least=0)
    context_length: int = option(256, "tokens of a sequence", cpu=32)
    batch_size: int = option(4, "batch size", cpu=1)
    mode: str = option("train", "the phases of a step: forward; loss and backward too; the optimizer too", MODES)
    precision: str = option("fp32", "bf16 is autocast", PRECISIONS)
    attention: str = option("unfused", "unfused (naive), or PyTorch's SDPA", ATTENTIONS)
    optimizer: str = option("torch", "AdamW of torch.optim, or ours", ("torch", "plain"))
    compile: bool = option(False, "torch.compile the model")
    warmup_steps: int = option(5, "steps before the measured ones", least=0, cpu=1)
    steps: int = option(10, "measured steps", cpu=2)
    seed: int = option(0, "of weights and tokens", least=0)


@dataclass
class StepFigures:
    """Times and memory of the steps of one configuration.

    Attributes:
        forward_flops, backward_flops: of the matmuls of a step.
        warmup_times_ms, first_step_ms, times_ms: each step before the measured ones, the very first, and each measured.
        peak_allocated_bytes, peak_reserved_bytes: of tensors and of PyTorch's allocator, also where memory ran out.
        gradients_bytes, optimizer_bytes, logits_bytes: what is there after the last step.
        product_bits: bits of the mantissa that matmuls keep of their operands.
    """

    forward_flops: int | None = None
    backward_flops: int | None = None
    parameters: int | None = None
    parameters_bytes: int | None = None
    warmup_times_ms: list[float] | None = None
    first_step_ms: float | None = None
    times_ms: list[float] | None = None
    forward: Times | None = None
    loss: Times | None = None
    backward: Times | None = None
    optimizer: Times | None = None
    step: Times | None = None
    tokens_per_s: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    logits_bytes: int | None = None
    product_bits: int | None = None

    def phase(self, name: str) -> Times | None:
        """Returns the times of one of ``PHASES``, or of the step."""
        times: Times | None = getattr(self, name)
        return times


TARGET = CaseTarget("profiling_targets.training_steps", StepCase, StepFigures)
StepRow: TypeAlias = Row[StepCase, StepFigures]
Namer: TypeAlias = Callable[[StepRow], str]

#: Options of every bench of training steps that each case of it shares; on a CPU two layers are enough.
SHARED = single(StepCase, "attention", *DIMENSIONS, "warmup_steps", "steps", "seed")


def models(settings: Settings) -> tuple[str, ...]:
    """Returns the canonical names of the models that were asked for; an unknown one is a ConfigurationError."""
    return tuple(find_model(name).name for name in settings["model"])


def model_names(rows: Sequence[StepRow], beside: Container[str] = ("context_length", "mode")) -> Namer:
    """Names rows by their model and the options in which they differ, without those that stand beside the name."""
    keys = [
        option.name
        for option in fields(StepCase)
        if option.name not in ("device", "model") and option.name not in beside
    ]
    differing = [key for key in keys if len({getattr(row.case, key) for row in rows}) > 1]

    def name(row: StepRow) -> str:
        more = (f"{key.replace('_', ' ')} {getattr(row.case, key)}" for key in differing)
        return ", ".join([row.case.model, *more])

    return name


def titles(rows: Sequence[StepRow]) -> Namer:
    """Names the rows' configurations in a sentence."""
    name = model_names(rows)
    return lambda row: f"{name(row)}, context {row.case.context_length:,}, {row.case.mode}"


def step_section(
    name: str, title: str, results: Results, rows: Sequence[StepRow], *, answers: Iterable[Words],
    blocks: Iterable[Block], definitions: Words, suspect: Iterable[Words] = (),
) -> Section:  # fmt: skip
    """Returns the section of an experiment on training steps.

    Args:
        name, title, results, answers, blocks, definitions: as of ``section``.
        rows: those that the conditions and checks are about.
        suspect: warnings beside those on any steps.
    """
    every = results.rows_of(TARGET)
    setup = ", ".join(f"{word} {each(rows, key)}" for word, key in _CONDITIONS.items())
    return section(
        name,
        title,
        results,
        every,
        titles(every),
        answers=(*answers, *endings(rows, titles(rows))),
        warmup=f"{each(rows, 'warmup_steps')} steps",
        measured=f"{each(rows, 'steps')} steps, {setup}{compile_cache(rows)}",
        synchronized="at the end of each phase",
        gradients="off in forward alone (no_grad), recorded in the other modes",
        blocks=blocks,
        definitions=definitions,
        warnings=(*_warnings(rows), *suspect),
        rates=rates(rows),
        memory=minimum_memory(rows),
    )


_CONDITIONS = {"batch": "batch_size", "context": "context_length", "precision": "precision", "attention": "attention"}


def _warnings(rows: Sequence[StepRow]) -> Iterator[Words]:
    """Yields a line on matmuls in another precision than asked for, and on steps too unsteady for their mean."""
    other = [row for row in rows if row.figures.product_bits not in (None, MANTISSA_BITS[row.case.precision])]
    if other:
        kept = named(dict.fromkeys(f"{row.case.precision} kept {row.figures.product_bits} bits" for row in other))
        yield phrase("**Matmuls in another precision than asked for**, in {} of {} rows: {}.",
                     len(other), len(rows), kept)  # fmt: skip
    title = titles(rows)
    yield from unsteady("steps", {title(row): row.figures.step.cv or 0 for row in rows if row.figures.step})


def rates(rows: Sequence[StepRow]) -> Iterator[Rate]:
    """Yields FLOP/s of forward and backward, and bytes/s of the optimizer, in the precision that matmuls really had.

    The FLOPs are those of the matmuls alone; the times hold the elementwise work as well. AdamW reads parameters,
    gradients and both states, and writes all but the gradients: at least seven times the parameters' bytes.
    """
    title = titles(rows)
    for row in (row for row in rows if row.ok):
        figures, name = row.figures, title(row)
        precision = precision_found(figures.product_bits, row.case.precision)
        if figures.forward:
            yield Rate(f"forward of {name}", precision, figures.forward_flops, None, figures.forward.ms)
        if figures.backward:
            yield Rate(f"backward of {name}", precision, figures.backward_flops, None, figures.backward.ms)
        if figures.optimizer and (size := figures.parameters_bytes):
            ms = figures.optimizer.ms
            yield Rate(f"optimizer of {name}", precision, None, 7 * size, ms, footprint_bytes=4 * size)


def minimum_memory(rows: Sequence[StepRow]) -> Iterator[tuple[str, MinimumMemory]]:
    """Yields the peak of each row against what is allocated when the last logits are made, by mode."""
    title = titles(rows)
    for row in rows:
        peak, sizes = row.figures.peak_allocated_bytes, _held_bytes(row)
        if row.ok and peak and sizes:
            yield row.case.mode, MinimumMemory(title(row), peak, sum(sizes.values()), ", ".join(sizes))


def _held_bytes(row: StepRow) -> dict[str, int]:
    """Returns bytes that are allocated as forward ends; gradients and states are those of the step before."""
    case, figures = row.case, row.figures
    parts = {
        "parameters": figures.parameters_bytes,
        "gradients": figures.gradients_bytes,
        "states": figures.optimizer_bytes,
        "logits": figures.logits_bytes,
    }
    sizes = {part: size for part, size in parts.items() if size}
    if case.compile:
        return sizes  # compiled code chooses what it saves
    if case.mode == "forward":
        casts = cast_bytes(case)
        return {**sizes, "weights cast to bf16": casts} if casts else sizes
    # After a single step there were no gradients beside what its layers saved.
    if case.warmup_steps + case.steps > 1 and case.attention == "unfused":
        on_gpu = case.device == "cuda"
        layer = layer_saved_bytes(case.size, case.batch_size, case.context_length, case.precision, on_gpu)
        sizes["activations"] = case.size.num_layers * layer
    return sizes


def cast_bytes(case: StepCase) -> int:
    """Returns the bf16 casts of the weights that autocast keeps until its block ends; 0 without autocast.

    The operands of matmuls are cast: in each layer four projections of d² and three matrices of d·d_ff, and the head
    of V·d, two bytes a number.
    """
    size = case.size
    layer = 4 * size.d_model**2 + 3 * size.d_model * size.d_ff
    weights = size.num_layers * layer + size.vocab_size * size.d_model
    return 2 * weights if case.precision == "bf16" else 0
