"""Figures of many captures: a panel for each model, over the context length."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from nsys_analyzer.analysis.summary.compared import TRAINING_PHASES
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import Bars, Curves, Figure, Panels
from nsys_analyzer.report.sections.evidence import model_of
from nsys_analyzer.report.sections.pivots import variants_of

_STEP, _MOST_BARS = "step", 24
_Value = Callable[[CaptureSummary], float | None]


def time_figures(captures: Sequence[CaptureSummary]) -> tuple[Figure, ...]:
    """Time against context length: of the step by model and variant, and of the phases by model for each variant.

    Where no model was timed at two context lengths, one bar for each capture; nothing of a single capture.
    """
    phase = _STEP if any(_ms(_STEP)(capture) for capture in captures) else "forward"
    title, axis = f"Unprofiled time of one {phase}", f"ms per {phase}"
    step = by_variant("unprofiled-times", f"{title} by context length", captures, _ms(phase), axis, log_y=True)
    if step is None:
        known = {capture.title: ms for capture in captures if (ms := _ms(phase)(capture))}
        bars = Bars("unprofiled-times", title, tuple(known), ((phase, tuple(known.values())),), axis, "horizontal")
        return (bars,) if 1 < len(known) <= _MOST_BARS else ()
    return (step, *_phases(captures))


def by_variant(
    key: str, title: str, captures: Sequence[CaptureSummary], value: _Value, axis: str, *, log_y: bool = False
) -> Panels | None:
    """A figure of each capture over context length: a panel for each model, a curve for each variant.

    Args:
        key, title: of the figure.
        captures: the captures of the report.
        value: what is drawn of a capture, None where it is not known.
        axis: the title of its axis, with the unit.
        log_y: as of ``Panels``.

    Returns:
        None where no curve has two points.
    """
    others = _variants(captures)
    names = dict.fromkeys(others.values())
    own = {name or "all": _of_variant(others, name, value) for name in names}
    panels = _panels(captures, own)
    return Panels(key, title, panels, "context length, tokens", axis, log_y=log_y) if _has_curves(panels) else None


def _variants(captures: Sequence[CaptureSummary]) -> dict[str, str]:
    return {title: str(variant) for title, variant in variants_of(captures).items()}


def _of_variant(others: Mapping[str, str], name: str, value: _Value) -> _Value:
    return lambda capture: value(capture) if others[capture.title] == name else None


def _phases(captures: Sequence[CaptureSummary]) -> tuple[Panels, ...]:
    """The phases of each variant of which several were timed, at several context lengths."""
    others, figures = _variants(captures), []
    for variant in dict.fromkeys(others.values()):
        own = [capture for capture in captures if others[capture.title] == variant]
        panels = _panels(own, {phase: _ms(phase) for phase in TRAINING_PHASES})
        if _has_curves(panels) and any(len(curves) > 1 for _, curves in panels):
            key = re.sub(r"[^\w.]+", "-", f"unprofiled-phases {variant}".strip())
            title = f"Unprofiled time of each phase by context length{f', {variant}' if variant else ''}"
            figures.append(Panels(key, title, panels, "context length, tokens", "ms", log_y=True))
    return tuple(figures)


def _ms(phase: str) -> _Value:
    return lambda capture: capture.unprofiled.typical_ms(phase) if capture.unprofiled else None


def _panels(captures: Sequence[CaptureSummary], values: Mapping[str, _Value]) -> tuple[tuple[str, Curves], ...]:
    """The curves of each model: one for each of the values by name, over context length."""
    models: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for capture in captures:
        context = capture.configuration.context_length if capture.configuration else None
        for name, value in values.items():
            if context and (found := value(capture)) is not None:
                models.setdefault(model_of(capture), {}).setdefault(name, []).append((context, found))
    return tuple(
        (model, tuple((name, tuple(sorted(curves[name]))) for name in values if name in curves))
        for model, curves in models.items()
    )


def _has_curves(panels: tuple[tuple[str, Curves], ...]) -> bool:
    return any(len({x for x, _ in points}) > 1 for _, curves in panels for _, points in curves)
