"""What the rows of the variants bench say in words: errors, gains over naive, growth, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.benches.variants_growth import growths
from nsys_analyzer.benches.variants_tables import (
    BOTH,
    FORWARD,
    Shape,
    figure,
    find,
    implementations,
    shape_of,
    shapes,
    speed_ups,
    status,
)
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import strong

#: The shapes that people ask for, (B, H, N, d): a short and a long context of a d_model of 4,096 in 32 heads.
_ASKED = ((4, 32, 128, 128), (64, 32, 4096, 128))
#: From this standard deviation ÷ mean on a time is given with its deviation.
_UNSTEADY = 0.1
_PASSES = {FORWARD: "forward", BOTH: "forward and backward"}


def answers(results: Results) -> Iterator[str]:
    """Sentences: errors, gains over naive of all shapes where none is asked for by many, growth, lost variants."""
    yield from _errors(results)
    if not any(shape[:4] in _ASKED for shape in shapes(results)):
        yield from _spans(results)
    yield from _growth_said(results)
    lost = list(dict.fromkeys(_lost(row) for row in results.rows if row.status == "oom"))
    if lost:
        yield f"Out of memory: {'; '.join(lost)}."
    elif all(row.status in ("ok", "unsupported") for row in results.rows):
        yield "No variant ran out of memory."


def _errors(results: Results) -> Iterator[str]:
    for precision in dict.fromkeys(shape.precision for shape in shapes(results)):
        rows = [row for row in results.of(precision=precision) if f"{FORWARD}_max_error" in row.figures]
        if rows:
            worst = max(row.figures[key] or 0 for row in rows for key in row.figures if key.endswith("max_error"))
            tolerance = rows[0].figures["tolerance"]
            yield f"The largest error of any variant in {precision} is {worst:.1e} (tolerance {tolerance:.0e})."


def _spans(results: Results) -> Iterator[str]:
    """The least and the largest gain over all shapes; not causal on a GPU alone, where naive's mask would be in it."""
    for causal in (False,) if results.on_gpu else (False, True):
        ranges = [
            f"{name} {_span(found)}"
            for name in implementations(results)
            if name != "naive" and (found := [x for s in shapes(results) if (x := speed_ups(results, s, causal)[name])])
        ]
        if ranges:
            yield f"Over naive, forward, {'causal' if causal else 'not causal'}: {', '.join(ranges)}."


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}×", f"{max(values):.2f}×"
    return low if low == high else f"{low} to {high}"


def at_asked_shapes(results: Results) -> Iterator[str]:
    """A line for each shape that people ask for, not causal and causal: naive's time and what each gains over it."""
    for shape in shapes(results):
        if shape[:4] not in _ASKED:
            continue
        d_model = f"d_model {shape.heads * shape.d_head:,}"
        for causal in sorted({row.case["causal"] for row in results.rows}):
            said = [text for prefix in _PASSES if (text := _pass(results, shape, causal, prefix))]
            mask = _mask_said(results, shape) if causal and results.on_gpu else ""
            if said:
                where = f"{strong(shape.name)} ({d_model}, {'causal' if causal else 'not causal'}{mask})"
                yield f"{where}: {'; '.join(said)}."


def _mask_said(results: Results, shape: Shape) -> str:
    """What the mask that naive makes in each call does to the times that others are compared with."""
    without, with_mask = (figure(find(results, shape, "naive", causal), f"{FORWARD}_ms") for causal in (False, True))
    if not without or not with_mask:
        return ""
    return f"; naive makes its mask in each call, which takes {with_mask / without:.2f}× as long as without"


def _pass(results: Results, shape: Shape, causal: bool, prefix: str) -> str:
    """The time of each variant, and its gain over naive where that was measured; empty where nothing was."""
    rows = {name: find(results, shape, name, causal) for name in implementations(results)}
    gains = speed_ups(results, shape, causal, prefix)
    parts = [f"{name} {_time(row, prefix, None if name == 'naive' else gains[name])}" for name, row in rows.items()]
    measured = any(figure(row, f"{prefix}_ms") for row in rows.values())
    return f"{_PASSES[prefix]} {', '.join(parts)}" if measured else ""


def _time(row: Row | None, prefix: str, gain: float | None) -> str:
    ms = figure(row, f"{prefix}_ms")
    if ms is None:
        ended = status(row, prefix)
        return "out of memory" if ended == "oom" else ended
    std = figure(row, f"{prefix}_std_ms") or 0
    spread = f" ± {format_number(std, 'ms')}" if std > _UNSTEADY * ms else ""
    return f"{format_number(ms, 'ms')}{spread} ms" + (f" ({gain:.2f}×)" if gain else "")


def _growth_said(results: Results) -> Iterator[str]:
    """How the peak of each variant grows, over the first shapes that differ in their tokens alone."""
    _, found = next(growths(results), (None, ()))
    said = [f"{one.variant} {one.peak:.2f}" for one in found if one.peak is not None]
    if said:
        yield f"Peak memory of forward grows with the tokens to the power: {', '.join(said)}."


def label(row: Row) -> str:
    """A row's variant and shape."""
    return f"{row.case['implementation']} at {shape_of(row).name}{', causal' if row.case['causal'] else ''}"


def _lost(row: Row) -> str:
    backward = row.case["backward"] and f"{FORWARD}_ms" in row.figures
    return f"{label(row)}{', in backward' if backward else ''}"


def flags(results: Results) -> Iterator[str]:
    """What went wrong, what cannot run here, a fused variant that gains no time, and times that are the same."""
    for row in results.rows:
        if row.status in ("failed", "unsupported", "timeout"):
            yield f"{strong(row.status.capitalize())}: {label(row)}: {row.message}"
    yield from _no_gain(results)
    yield from _same(results)


def _no_gain(results: Results) -> Iterator[str]:
    """Where fused is not faster than naive, by the figures of forward, whatever became of backward."""
    gains = {
        label(row): gain
        for row in results.of(implementation="fused")
        if (gain := speed_ups(results, shape_of(row), row.case["causal"])["fused"])
    }
    slower = [name for name, gain in gains.items() if gain <= 1]
    if slower and results.on_gpu:
        yield (
            f"fused takes at least as long as naive in {len(slower)} of {len(gains)} comparisons, forward: its "
            "blocks go through the same passes over the scores, in more launches."
        )
    elif slower:
        yield f"{strong('No gain')}: at least as long as naive, forward: {'; '.join(slower)}."


def _same(results: Results) -> Iterator[str]:
    printed: dict[tuple[Shape, bool, str], str] = {}
    for row in (row for row in results.rows if f"{FORWARD}_std_ms" in row.figures):
        digits = ("forward_ms", "forward_min_ms", "forward_max_ms")
        key = (shape_of(row), row.case["causal"], " ".join(format_number(row.figures[d], "ms") for d in digits))
        if key in printed:
            yield f"{strong('Equal to the last digit')}: {label(row)} has the times of {printed[key]}."
        printed[key] = row.case["implementation"]
