"""(d) What share matmul and every other class has, in inference and in a training step."""

from __future__ import annotations

from dataclasses import replace

from nsys_analyzer.analysis.classes import UNKNOWN
from nsys_analyzer.analysis.phases import LEAF_PHASES
from nsys_analyzer.analysis.statistics import (
    ClassRow,
    class_rows,
    merge_kernels,
    share_of,
    without_communication,
)
from nsys_analyzer.analysis.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.questions.evidence import (
    FEW,
    TRAINING_PHASES,
    Evidence,
    compared_phases,
    figures_of,
    kernel_word,
    nothing_measured,
)
from nsys_analyzer.report.model import Answer, Bars, Block, Column, Section, Table
from nsys_analyzer.report.units import milliseconds, percent

#: Title to the classes of a column and their total kernel time in ms.
_Columns = dict[str, tuple[tuple[ClassRow, ...], "float | None"]]
_MATMUL = "matmul"
_FUSED = "fused attention"
_UNNAMED = "the capture lacks names of kernels"
#: A change of a share that its digits do not show, one that is not worth a word, a share too thin to see in a figure.
_NOTHING, _SMALL, _THIN = 0.0005, 0.005, 0.5


def answer(evidence: Evidence) -> Section:
    """Class shares by phase, and the training step against inference."""
    captures = [capture for capture in evidence.measured if any(p.kernels for p in compared_phases(capture))]
    blocks: list[Block] = [_answer(capture, evidence) for capture in captures]
    blocks += [_grid(captures, evidence.kernel)] if len(captures) > FEW else []
    blocks += [table for capture in captures for table in _tables(capture)]
    blocks += figures_of(evidence, lambda capture: _figure(capture, evidence.figure_key(capture, "class-shares")))
    return Section("matmul_share", "(d) What share is matmul?", tuple(blocks) or (nothing_measured(),), "matmul")


def step_classes(capture: CaptureSummary) -> tuple[ClassRow, ...] | None:
    """The classes of a whole training step: of the step range, else of its phases together."""
    step = capture.phase("step")
    if step and step.kernels and step.holds_backward:
        return step.classes
    parts = [phase for name in LEAF_PHASES if (phase := capture.phase(name)) and phase.kernels]
    steps = min((phase.instances for phase in parts), default=0)
    # Gradients accumulated over k passes: k forwards for one optimizer. Counts that do not fit are no steps.
    if len(parts) < 2 or any(phase.instances % steps for phase in parts):
        return None
    return class_rows(merge_kernels(*(phase.kernels for phase in parts for _ in range(phase.instances // steps))))


def step_name(capture: CaptureSummary) -> str:
    """What the classes of a step are of: a training step has an optimizer."""
    whole = capture.phase("optimizer") or not capture.phase("forward")
    return "training step" if whole else "forward+backward"


def matmul_of_step(capture: CaptureSummary) -> float | None:
    """Matmul's share of a whole training step, None where the capture holds none."""
    step = step_classes(capture)
    return share_of(step, _MATMUL) if step else None


def classes_of_all(capture: CaptureSummary) -> tuple[ClassRow, ...] | None:
    """The classes of a whole training step, else of the forward pass where that is all there is."""
    phases = compared_phases(capture)
    alone = phases[0].classes if [phase.phase for phase in phases] == ["forward"] else None
    return step_classes(capture) or alone


def matmul_of_all(capture: CaptureSummary) -> float | None:
    """Matmul's share of a whole training step, else of a forward pass alone; None where there is neither."""
    rows = classes_of_all(capture)
    return share_of(rows, _MATMUL) if rows else None


def _grid(captures: list[CaptureSummary], kernel: str) -> Table:
    """One row for each capture: matmul's share of its phases and of its step."""
    columns = (Column("capture"), *(Column(name, "percent") for name in (*TRAINING_PHASES, "training step")))
    rows = []
    for capture in captures:
        shares = {phase.phase: phase.share_of(_MATMUL) for phase in compared_phases(capture)}
        rows.append((capture.title, *(shares.get(name) for name in TRAINING_PHASES), matmul_of_step(capture)))
    return Table(columns, tuple(rows), f"Matmul's share of the {kernel} sum:")


def _share(rows: tuple[ClassRow, ...], name: str) -> float:
    return sum(row.share for row in rows if row.kernel_class == name)


def _inference(capture: CaptureSummary, evidence: Evidence) -> tuple[PhaseSummary, str] | None:
    """The forward pass of a forward-only capture of the same configuration, else of this capture."""
    for other in evidence.measured:
        forward = other.phase("forward") if _same_but_for_mode(capture, other) else None
        if forward and forward.kernels:
            return forward, f"Inference ({other.title})"
    forward = capture.phase("forward")
    return (forward, "Forward (that is, inference)") if forward and forward.kernels else None


def _same_but_for_mode(capture: CaptureSummary, other: CaptureSummary) -> bool:
    ours, theirs = capture.configuration, other.configuration
    if not ours or not theirs or not ours.model or theirs.mode != "forward" or ours.mode == "forward":
        return False
    built = [(run.compile, run.cuda_graph) if (run := one.run) else None for one in (capture, other)]
    return built[0] == built[1] and replace(ours, mode=None, source="") == replace(theirs, mode=None, source="")


def _answer(capture: CaptureSummary, evidence: Evidence) -> Answer:
    inference, step = _inference(capture, evidence), step_classes(capture)
    compared, found = compared_phases(capture), [inference] if inference else []
    if any(
        share_of(rows, _MATMUL) is None for rows in (*(p.classes for p in compared), *(i.classes for i, _ in found))
    ):
        said = ", ".join(f"{_bounds(p.classes)} of {p.phase}" for p in compared)
        return Answer(capture.title, f"matmul is {said}: {_UNNAMED}.", said)
    parts = [f"{percent(_share(p.classes, _MATMUL))} of {p.phase}{_without(p.classes)}" for p in compared]
    name, short = step_name(capture), ", ".join(parts)
    if step and capture.phase("step") not in compared:
        short += f", {percent(_share(step, _MATMUL))} of {'the ' if ' ' in name else ''}{name}{_without(step)}"
    text = f"matmul is {', '.join(parts)}"
    fused = [f"{percent(share)} of {p.phase}" for p in compared if (share := _share(p.classes, _FUSED))]
    if fused:
        text += f" (attention fused into one kernel, counted apart, is {', '.join(fused)})"
    if inference and step:
        before, after = _share(inference[0].classes, _MATMUL), _share(step, _MATMUL)
        text += f". {inference[1]} {percent(before)}{_without(inference[0].classes)}, "
        text += f"{'whole ' if ' ' in name else ''}{name} {percent(after)}{_without(step)}"
        text += f": {_change(without_communication(inference[0].classes), without_communication(step))}"
        text += " (of what computes)" if _without(step) or _without(inference[0].classes) else ""
    return Answer(capture.title, f"{text}.", short)


def _bounds(classes: tuple[ClassRow, ...]) -> str:
    """Between what values matmul's share lies, where kernels without a name may be of it or not."""
    least, unnamed = _share(classes, _MATMUL), _share(classes, UNKNOWN)
    return f"{percent(least)} to {percent(least + unnamed)}" if unnamed < 1 else "not known"


def _without(classes: tuple[ClassRow, ...]) -> str:
    """Matmul's share of what computes, in brackets; nothing where nothing communicates."""
    computing = without_communication(classes)
    return f" ({percent(_share(computing, _MATMUL))} without communication)" if computing != classes else ""


def _change(inference: tuple[ClassRow, ...], step: tuple[ClassRow, ...]) -> str:
    """By how much the share changes, and which classes take or give it."""
    change = _share(step, _MATMUL) - _share(inference, _MATMUL)
    if abs(change) < _NOTHING:
        return "the same share"
    others = {row.kernel_class for row in (*inference, *step)} - {_MATMUL}
    towards = -1 if change < 0 else 1
    given = {name: (_share(inference, name) - _share(step, name)) * towards for name in others}
    named = [
        f"{name} goes from {percent(_share(inference, name))} to {percent(_share(step, name))}"
        for name in sorted(others, key=lambda name: (-given[name], name))[:2]
        if given[name] >= _SMALL
    ]
    verb = "falls" if change < 0 else "rises"
    return "; ".join([f"the share {verb} by {abs(change) * 100:.1f} points", *named])


def _columns(capture: CaptureSummary) -> _Columns:
    """Column title to the classes it shows and their total kernel time."""
    columns = {phase.phase: (phase.classes, phase.kernel_sum_ms.mean) for phase in compared_phases(capture)}
    step = step_classes(capture)
    if step and "step" not in columns:
        columns[step_name(capture)] = (step, sum(row.ms_per_instance for row in step))
    return columns


def _tables(capture: CaptureSummary) -> tuple[Table, ...]:
    """The shares of every class; where GPUs communicate, those of what computes in a second table."""
    columns = _columns(capture)
    sums = ", ".join(f"{title} {milliseconds(total)}" for title, (_, total) in columns.items() if total is not None)
    kernel = kernel_word(capture)
    every = _table(columns, f"shares of the total {kernel} time, which is {sums}.", capture)
    computing = {title: (without_communication(rows), total) for title, (rows, total) in columns.items()}
    if all(computing[title][0] == rows for title, (rows, _) in columns.items()):
        return (every,)
    text = "the same without communication, whose time is mostly waiting for the slowest rank."
    return every, _table(computing, text, capture)


def _table(columns: _Columns, caption: str, capture: CaptureSummary) -> Table:
    heaviest: dict[str, float] = {}
    for row in (row for rows, _ in columns.values() for row in rows):
        heaviest[row.kernel_class] = max(heaviest.get(row.kernel_class, 0.0), row.ms_per_instance)
    classes = sorted(heaviest, key=lambda name: -heaviest[name])
    body = tuple((name, *(_share(rows, name) or None for rows, _ in columns.values())) for name in classes)
    return Table((Column("class"), *(Column(title, "percent") for title in columns)), body, caption, capture.title)


def _figure(capture: CaptureSummary, key: str) -> Bars:
    columns, kernel = _columns(capture), kernel_word(capture)
    classes = sorted(
        {row.kernel_class for rows, _ in columns.values() for row in rows},
        key=lambda name: -sum(_share(rows, name) for rows, _ in columns.values()),
    )
    series = tuple((name, tuple(_share(rows, name) * 100 for rows, _ in columns.values())) for name in classes)
    return Bars(
        key,
        f"{capture.title}: classes of {kernel}s, share of each phase's {kernel} sum",
        tuple(columns),
        tuple(one for one in series if max(one[1]) >= _THIN),
        f"% of {kernel} sum",
        "stacked",
    )
