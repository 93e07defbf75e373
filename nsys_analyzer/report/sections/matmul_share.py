"""(d) What share matmul and every other class has, in inference and in a training step."""

from __future__ import annotations

from nsys_analyzer.analysis.summary.compared import (
    FUSED,
    MATMUL,
    TRAINING_PHASES,
    ClassShares,
    MatmulShare,
    compared_phases,
    matmul_share,
    shares_of_all,
)
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import Answer, Bars, Block, Section, Table
from nsys_analyzer.report.sections.evidence import FEW, Evidence, figures_of, kernel_word, nothing_measured
from nsys_analyzer.report.sections.pivots import pivots
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds, percent

_UNNAMED = "the capture lacks names of kernels"
#: A change of a share that its digits do not show, one that is not worth a word, a share too thin to see in a figure.
_NOTHING, _SMALL, _THIN = 0.0005, 0.005, 0.5
_Known = tuple[CaptureSummary, MatmulShare]


def answer(evidence: Evidence) -> Section:
    """Class shares by phase, and the training step against inference."""
    shares = {capture.title: matmul_share(capture, evidence.measured) for capture in evidence.measured}
    captures = [capture for capture in evidence.measured if any(p.kernels for p in compared_phases(capture))]
    known = [(capture, shares[capture.title]) for capture in captures]
    blocks: list[Block] = [_answer(capture, share) for capture, share in known]
    if len(evidence.captures) > FEW:
        blocks += pivots(
            evidence.captures, _share_of_all, "percent", "Matmul's share of a step, or of a forward pass alone"
        )
    blocks += [_grid(known, evidence.kernel)] if len(known) > FEW else []
    blocks += [table for capture, share in known for table in _tables(capture, share)]
    blocks += figures_of(evidence, lambda c: _figure(c, shares[c.title].scopes, evidence.figure_key(c, "class-shares")))
    return Section("matmul_share", "(d) What share is matmul?", tuple(blocks) or (nothing_measured(),), "matmul")


def _share_of_all(capture: CaptureSummary) -> float | None:
    return shares.matmul if (shares := shares_of_all(capture)) else None


def _grid(known: list[_Known], kernel: str) -> Table:
    """One row for each capture: matmul's share of its phases and of its step."""
    fields: tuple[Field[_Known], ...] = (
        Field("capture", "text", lambda row: row[0].title),
        *map(_share_of_phase, TRAINING_PHASES),
        Field("training step", "percent", lambda row: row[1].step.matmul if row[1].step else None),
    )
    return table(fields, known, f"Matmul's share of the total {kernel} time:")


def _share_of_phase(name: str) -> Field[_Known]:
    return Field(name, "percent", lambda row: next((one.matmul for one in row[1].phases if one.scope == name), None))


def _answer(capture: CaptureSummary, share: MatmulShare) -> Answer:
    phases, step, inference = share.phases, share.step, share.inference
    if any(one.matmul is None for one in (*phases, *([inference] if inference else []))):
        said = ", ".join(f"{_bounds(one)} of {one.scope}" for one in phases)
        return Answer(capture.title, f"matmul is {said}: {_UNNAMED}.", said)
    parts = [f"{percent(one.of(MATMUL))} of {one.scope}{_without(one)}" for one in phases]
    short = ", ".join(parts)
    if step and step in share.scopes:
        the = "the " if " " in step.scope else ""
        short += f", {percent(step.of(MATMUL))} of {the}{step.scope}{_without(step)}"
    text = f"matmul is {', '.join(parts)}"
    fused = [f"{percent(one.of(FUSED))} of {one.scope}" for one in phases if one.of(FUSED)]
    if fused:
        text += f" (attention fused into one kernel, counted apart, is {', '.join(fused)})"
    if inference and step:
        before = f"Inference ({share.inference_of})" if share.inference_of else "Forward (that is, inference)"
        whole = "whole " if " " in step.scope else ""
        text += f". {before} {percent(inference.of(MATMUL))}{_without(inference)}, "
        text += f"{whole}{step.scope} {percent(step.of(MATMUL))}{_without(step)}"
        text += f": {_change(inference.computing(), step.computing())}"
        text += " (of what computes)" if step.communicates or inference.communicates else ""
    return Answer(capture.title, f"{text}.", short)


def _bounds(shares: ClassShares) -> str:
    """Between what values matmul's share lies, where kernels without a name may be of it or not."""
    least = shares.of(MATMUL)
    return f"{percent(least)} to {percent(least + shares.unnamed)}" if shares.unnamed < 1 else "not known"


def _without(shares: ClassShares) -> str:
    """Matmul's share of what computes, in brackets; nothing where nothing communicates."""
    return f" ({percent(shares.computing().of(MATMUL))} without communication)" if shares.communicates else ""


def _change(inference: ClassShares, step: ClassShares) -> str:
    """By how much the share changes, and which classes take or give it."""
    change = step.of(MATMUL) - inference.of(MATMUL)
    if abs(change) < _NOTHING:
        return "the same share"
    others = {row.kernel_class for row in (*inference.classes, *step.classes)} - {MATMUL}
    towards = -1 if change < 0 else 1
    given = {name: (inference.of(name) - step.of(name)) * towards for name in others}
    named = [
        f"{name} goes from {percent(inference.of(name))} to {percent(step.of(name))}"
        for name in sorted(others, key=lambda name: (-given[name], name))[:2]
        if given[name] >= _SMALL
    ]
    verb = "falls" if change < 0 else "rises"
    return "; ".join([f"the share {verb} by {abs(change) * 100:.1f} points", *named])


def _tables(capture: CaptureSummary, share: MatmulShare) -> tuple[Table, ...]:
    """The shares of every class; where GPUs communicate, those of what computes in a second table."""
    scopes, kernel = share.scopes, kernel_word(capture)
    sums = ", ".join(f"{one.scope} {milliseconds(ms)}" for one in scopes if (ms := one.kernel_sum_ms) is not None)
    every = _table(scopes, f"shares of the total {kernel} time, which is {sums}.", capture)
    text = "the same without communication, whose time is mostly waiting for the slowest rank."
    computing = _table(tuple(one.computing() for one in scopes), text, capture)
    return (every, computing) if any(one.communicates for one in scopes) and computing.rows else (every,)


def _table(scopes: tuple[ClassShares, ...], caption: str, capture: CaptureSummary) -> Table:
    heaviest: dict[str, float] = {}
    for row in (row for one in scopes for row in one.classes):
        heaviest[row.kernel_class] = max(heaviest.get(row.kernel_class, 0.0), row.ms_per_instance)
    fields: tuple[Field[str], ...] = (Field("class", "text", lambda name: name), *map(_share_in, scopes))
    classes = sorted(heaviest, key=lambda name: -heaviest[name])
    return table(fields, classes, caption, capture=capture.title)


def _share_in(shares: ClassShares) -> Field[str]:
    return Field(shares.scope, "percent", lambda name: shares.of(name) or None)


def _figure(capture: CaptureSummary, scopes: tuple[ClassShares, ...], key: str) -> Bars:
    kernel = kernel_word(capture)
    classes = sorted(
        {row.kernel_class for one in scopes for row in one.classes},
        key=lambda name: -sum(one.of(name) for one in scopes),
    )
    series = tuple((name, tuple(one.of(name) * 100 for one in scopes)) for name in classes)
    return Bars(
        key,
        f"{capture.title}: classes of {kernel}s, share of each phase's total {kernel} time",
        tuple(one.scope for one in scopes),
        tuple(one for one in series if max(one[1]) >= _THIN),
        f"% of total {kernel} time",
        "stacked",
    )
