"""(d) What share matmul and every other class has, in inference and in a training step."""

from __future__ import annotations

from nsys_analyzer.analysis.summary.statistics import MATMUL, ClassShares, MatmulShare
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import NOTHING_MEASURED, Evidence, figures_of, kernel_word
from nsys_analyzer.report.model import Answer, Bars, Block, Section, Table
from nsys_analyzer.report.sections.sweep import over_sweep
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds, percent

_UNNAMED = "the capture lacks names of kernels"
#: A change of a share that its digits do not show, one that is not worth a word, a share too thin to see in a figure.
_NOTHING, _SMALL, _THIN = 0.0005, 0.005, 0.5


def answer(evidence: Evidence) -> Section:
    """Class shares by phase, and the training step against inference."""
    blocks: list[Block] = [
        *over_sweep(evidence, _share_of_forward, "percent", "Matmul's share of the forward pass", "matmul-forward"),
        *over_sweep(evidence, _share_of_step, "percent", "Matmul's share of the training step", "matmul-step"),
    ]
    for capture in evidence.measured:
        if capture.matmul and capture.matmul.phases:
            blocks += [_answer(capture, capture.matmul), *_tables(capture, capture.matmul)]
    blocks += figures_of(evidence, lambda capture: _figure(capture, capture.matmul.scopes if capture.matmul else ()))
    return Section("matmul_share", "(d) What share is matmul?", tuple(blocks) or (NOTHING_MEASURED,), "matmul")


def _share_of_forward(capture: CaptureSummary) -> float | None:
    forwards = (one for one in (capture.matmul.phases if capture.matmul else ()) if one.scope == "forward")
    return next((one.matmul for one in forwards), None)


def _share_of_step(capture: CaptureSummary) -> float | None:
    share = capture.matmul
    return share.step.matmul if share and share.step else None


def _answer(capture: CaptureSummary, share: MatmulShare) -> Answer:
    phases, step, inference = share.phases, share.step, share.inference
    if any(one.matmul is None for one in (*phases, *([inference] if inference else []))):
        said = ", ".join(f"{_bounds(one)} of {one.scope}" for one in phases)
        return Answer(capture.title, f"matmul is {said}: {_UNNAMED}.", said)
    short = ", ".join(f"{_matmul(one)} of {'the ' if ' ' in one.scope else ''}{one.scope}" for one in share.scopes)
    text = f"matmul is {short} (shares of the total {kernel_word(capture)} time)."
    if fused := [f"{percent(one.fused_attention)} of {one.scope}" for one in phases if one.fused_attention]:
        text += f" Fused attention is counted apart: {', '.join(fused)}."
    if inference and step:
        of, scope = share.inference_of or "the forward pass", step.scope.capitalize()
        change = _change(inference.computing(), step.computing())
        text += f" {scope} against inference ({of}): {_matmul(step)} against {_matmul(inference)}, {change}."
    return Answer(capture.title, text, short)


def _bounds(shares: ClassShares) -> str:
    """Between what values matmul's share lies, where kernels without a name may be of it or not."""
    least = shares.of(MATMUL)
    return f"{percent(least)} to {percent(least + shares.unnamed)}" if shares.unnamed < 1 else "not known"


def _matmul(shares: ClassShares) -> str:
    """Matmul's share, and behind it that of what computes, where there is communication."""
    computing = percent(shares.computing().of(MATMUL))
    return percent(shares.of(MATMUL)) + (f" ({computing} without communication)" if shares.communicates else "")


def _change(inference: ClassShares, step: ClassShares) -> str:
    """By how much the share changes, and which classes take or give it."""
    change = step.of(MATMUL) - inference.of(MATMUL)
    if abs(change) < _NOTHING:
        return "the same share"
    others = {row.kernel_class for row in (*inference.classes, *step.classes)} - {MATMUL}
    towards = -1 if change < 0 else 1
    change_of = {name: (inference.of(name) - step.of(name)) * towards for name in others}
    named = [
        f"{name} {percent(step.of(name))} against {percent(inference.of(name))}"
        for name in sorted(others, key=lambda name: (-change_of[name], name))[:2]
        if change_of[name] >= _SMALL
    ]
    points = f"{abs(change) * 100:.1f} percentage points {'lower' if change < 0 else 'higher'}"
    return "; ".join([points, *named])


def _tables(capture: CaptureSummary, share: MatmulShare) -> tuple[Table, ...]:
    """The shares of every class; where GPUs communicate, those of what computes in a second table."""
    scopes, kernel = share.scopes, kernel_word(capture)
    sums = ", ".join(f"{one.scope} {milliseconds(ms)}" for one in scopes if (ms := one.kernel_sum_ms) is not None)
    every = _table(scopes, f"Shares of the total {kernel} time: {sums}.", capture)
    text = "Shares without communication, whose time is mostly waiting for the slowest rank:"
    computing = _table(tuple(one.computing() for one in scopes), text, capture)
    return (every, computing) if any(one.communicates for one in scopes) and computing.rows else (every,)


def _table(scopes: tuple[ClassShares, ...], caption: str, capture: CaptureSummary) -> Table:
    fields: tuple[Field[str], ...] = (Field("class", "text", lambda name: name), *map(_share_in, scopes))
    return table(fields, _classes(scopes), caption, capture=capture.title)


def _classes(scopes: tuple[ClassShares, ...]) -> dict[str, None]:
    """The names of all classes, longest first."""
    rows = sorted((row for one in scopes for row in one.classes), key=lambda row: -row.ms_per_instance)
    return dict.fromkeys(row.kernel_class for row in rows)


def _share_in(shares: ClassShares) -> Field[str]:
    return Field(shares.scope, "percent", lambda name: shares.of(name) or None)


def _figure(capture: CaptureSummary, scopes: tuple[ClassShares, ...]) -> Bars:
    kernel = kernel_word(capture)
    series = tuple((name, tuple(one.of(name) * 100 for one in scopes)) for name in _classes(scopes))
    return Bars(
        f"{capture.title}-class-shares",
        f"{capture.title}: classes of {kernel}s, share of each phase's total {kernel} time",
        tuple(one.scope for one in scopes),
        tuple(one for one in series if max(one[1]) >= _THIN),
        f"% of total {kernel} time",
        "stacked",
    )
