"""What the benches of training steps share: options, cases, and what can be said of any of their rows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nsys_analyzer.analysis.mantissa import MANTISSA_BITS, PRECISION_BY_BITS
from nsys_analyzer.analysis.models import ModelSize, find_model
from nsys_analyzer.analysis.saved_tensors import saved_by_layer
from nsys_analyzer.benches.conditions import precision_warnings
from nsys_analyzer.benches.endings import endings as endings_of
from nsys_analyzer.benches.endings import messages as messages_of
from nsys_analyzer.benches.endings import named
from nsys_analyzer.benches.model import Case, Option, Results, Row, Settings
from nsys_analyzer.benches.physics import Rate, Residence
from nsys_analyzer.report.model import Block, Listing, Spread
from nsys_analyzer.report.units import percent
from nsys_analyzer.text import strong

TARGET = "profiling_targets.training_steps"
MODES = ("forward", "forward-backward", "train")
PHASES = ("forward", "loss", "backward", "optimizer")
_DIMENSIONS = {"d_model": (0,), "d_ff": (0,), "num_layers": (2,), "num_heads": (0,), "vocab_size": (0,)}

#: Options of every bench of training steps that each case of it shares; on a CPU two layers are enough.
SHARED: tuple[Option, ...] = (
    Option("attention", ("unfused", "sdpa"), ("unfused",), ("unfused",), "Of the model.", several=False),
    *(
        Option(name, int, (0,), on_cpu, "In place of the model's; 0 for its own.", several=False, least=0)
        for name, on_cpu in _DIMENSIONS.items()
    ),
    Option("warmup_steps", int, (5,), (1,), "Steps before the measured ones.", several=False, least=0),
    Option("steps", int, (10,), (2,), "Measured steps.", several=False),
    Option("seed", int, (0,), (0,), "Of weights and tokens.", several=False, least=0),
)

_UNSTEADY = 0.1


def step_case(settings: Settings, label: str, environment: Mapping[str, str] | None = None, **values: Any) -> Case:
    """A case of the target: what the settings' shared options say, and the values, which come first."""
    shared = {one.name: settings[one.name] for one in SHARED}
    kept = {key: value for key, value in shared.items() if value or key not in _DIMENSIONS}
    return Case(TARGET, {"device": settings.device, **kept, **values}, label, environment or {})


def spread(row: Row, phase: str) -> Spread | None:
    """The mean of a phase in ms with its standard deviation; None where it was not measured to the end."""
    mean = row.figures.get(f"{phase}_ms")
    return None if mean is None else Spread(mean, row.figures.get(f"{phase}_std_ms"))


def model_name(row: Row, rows: Iterable[Row], beside: Container[str] = ("context_length", "mode")) -> str:
    """The row's model, and whatever else the rows differ in, but for what is said beside the name."""
    keys = [key for key in row.case if key not in ("device", "model") and key not in beside]
    differing = [key for key in keys if len({one.case.get(key) for one in rows}) > 1]
    return ", ".join([str(row.case["model"]), *(f"{key.replace('_', ' ')} {row.case[key]}" for key in differing)])


def title(row: Row, rows: Iterable[Row]) -> str:
    """The row's configuration for a sentence."""
    return f"{model_name(row, rows)}, context {row.case['context_length']:,}, {row.case['mode']}"


def each(rows: Iterable[Row], key: str) -> str:
    """The values that an option has in the rows, for a sentence."""
    return ", ".join(map(str, dict.fromkeys(row.case[key] for row in rows)))


def flags(results: Results, rows: Sequence[Row]) -> Iterator[Block]:
    """Warnings: products in another precision than asked for, and steps that are too unsteady for their mean."""
    lines = list(precision_warnings(results))
    other = [row for row in rows if row.figures.get("product_bits") not in (None, MANTISSA_BITS[row.case["precision"]])]
    if other:
        kept = dict.fromkeys(f"{row.case['precision']} kept {row.figures['product_bits']} bits" for row in other)
        words = strong("Products in another precision than asked for")
        lines.append(f"{words}, in {len(other)} of {len(rows)} rows: {named(kept)}.")
    unsteady = [row for row in rows if row.figures.get("step_cv", 0) > _UNSTEADY]
    if unsteady:
        which = [f"{title(row, rows)}: {percent(row.figures['step_cv'])}" for row in unsteady]
        lines.append(f"{strong('Unsteady steps')}, CV above {percent(_UNSTEADY)}: {named(which)}.")
    if lines:
        yield Listing(tuple(lines))


def endings(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each status that is not ok, with the configurations that ended so."""
    return endings_of(rows, lambda row: title(row, rows))


def messages(rows: Sequence[Row]) -> Iterator[Block]:
    """Why rows are not ok, folded away."""
    return messages_of(rows, lambda row: title(row, rows))


def rates(rows: Sequence[Row]) -> tuple[Rate, ...]:
    """FLOP/s of forward and backward, and bytes/s of the optimizer, in the precision that products really had.

    The FLOPs are those of the products alone; the times hold the elementwise work as well. AdamW reads parameters,
    gradients and both states, and writes all but the gradients: seven times the parameters' bytes at the least.
    """
    found = []
    for row in rows:
        if not row.ok:
            continue
        figures, name = row.figures, title(row, rows)
        precision = PRECISION_BY_BITS.get(figures["product_bits"], row.case["precision"])
        found += [
            Rate(f"{phase} of {name}", precision, figures[f"{phase}_flops"], None, figures[f"{phase}_ms"])
            for phase in ("forward", "backward")
            if f"{phase}_ms" in figures
        ]
        if "optimizer_ms" in figures:
            size, ms = figures["parameters_bytes"], figures["optimizer_ms"]
            found.append(Rate(f"optimizer of {name}", precision, None, 7 * size, ms, footprint_bytes=4 * size))
    return tuple(found)


def size_of(row: Row) -> ModelSize:
    """The dimensions of the row's model, with those in place that the row gives."""
    given = {key: value for key in _DIMENSIONS if (value := row.case.get(key))}
    return replace(find_model(row.case["model"]), **given)


def residences(rows: Sequence[Row]) -> tuple[Residence, ...]:
    """The tightest memory of each mode: the peak against the sum of what lives when the last logits are made."""
    tightest: dict[str, Residence] = {}
    for row in rows:
        if not row.ok or "peak_allocated_bytes" not in row.figures:
            continue
        sizes = _living_bytes(row)
        peak, least = row.figures["peak_allocated_bytes"], sum(sizes.values())
        one = Residence(title(row, rows), peak, least, ", ".join(sizes))
        before = tightest.get(row.case["mode"])
        if before is None or _ratio(one) < _ratio(before):
            tightest[row.case["mode"]] = one
    return tuple(tightest.values())


def _living_bytes(row: Row) -> dict[str, int]:
    """What lives as forward ends; gradients and states are those of the step before, until the next backward."""
    parts = {"parameters": "parameters_bytes", "gradients": "gradients_bytes", "states": "optimizer_bytes",
             "logits": "logits_bytes"}  # fmt: skip
    sizes = {part: row.figures[key] for part, key in parts.items() if row.figures[key]}
    if row.case.get("compile"):
        return sizes  # compiled code chooses what it keeps
    if row.case["mode"] == "forward":
        casts = cast_bytes(row)
        return {**sizes, "weights cast to bf16": casts} if casts else sizes
    # After a single step there were no gradients beside what its layers kept.
    repeated = row.case["warmup_steps"] + row.case["steps"] > 1
    if repeated and row.case["attention"] == "unfused":
        sizes["kept by the layers"] = _kept_bytes(row)
    return sizes


def _kept_bytes(row: Row) -> int:
    size, case = size_of(row), row.case
    layer = saved_by_layer(
        size, case["batch_size"], case["context_length"], case["precision"], case["device"] == "cuda"
    )
    return size.num_layers * sum(saved.bytes for saved in layer)


def cast_bytes(row: Row) -> int:
    """The weights' casts to bf16 that autocast keeps until its block ends; without autocast none.

    Cast is what products take: in each layer four projections of d² and three matrices of d·d_ff, and the head of
    V·d, two bytes a number.
    """
    size = size_of(row)
    layer = 4 * size.d_model**2 + 3 * size.d_model * size.d_ff
    weights = size.num_layers * layer + size.vocab_size * size.d_model
    return 2 * weights if row.case["precision"] == "bf16" else 0


def _ratio(residence: Residence) -> float:
    return residence.measured_bytes / residence.must_live_bytes
