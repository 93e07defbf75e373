"""What a reader sees first of a capture: how long its step is, what fills it, what to do, what limits the figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.summary.complete import compared_phases
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.evidence import (
    Evidence,
    kernel_word,
    launch_word,
    peak_memory,
    said_length,
    status_of,
    step_noun,
)
from nsys_analyzer.report.model import Answer, Block, Field, Paragraph, Section, Table, make_table
from nsys_analyzer.report.sections.bars import bars_of_step
from nsys_analyzer.report.sections.findings import FIRST, nothing_found, saving, to_fix
from nsys_analyzer.report.sections.limits import OPTIONS, mfu_of_step
from nsys_analyzer.report.sections.lines import lines_of_program
from nsys_analyzer.report.sections.serving import kinds_of_steps
from nsys_analyzer.report.units import format_ms, format_ms_range, format_number, rounded, rounded_percent
from nsys_analyzer.text import StrOrText, Text, code, join_names, join_texts, phrase, plural, spans

#: An interval that is narrower than this share of its middle is not shown.
_NARROW = 0.03
#: Letters of a kernel's label in the table of phases.
_LABEL = 44
#: Limits of the figures that are named here; all of them stand under "About".
_LIMITS = 3


def decide(capture: CaptureSummary, evidence: Evidence) -> Section:
    """The first block of a capture."""
    blocks = (
        Paragraph(conditions(capture), capture.title),
        *_of_step(capture),
        *(kinds_of_steps(capture) if capture.serving else _phases(capture, evidence.labels)),
        *_limits(capture, evidence),
    )
    return Section("decision", "", blocks)


def conditions(capture: CaptureSummary) -> str:
    """What was captured, in a line: NVIDIA H200 · fp32 · small, context 256, batch 4 · 3 steps · nsys 2025.3."""
    known, step = capture.configuration, capture.step
    precision = max(capture.precisions, key=lambda name: capture.precisions[name], default="unknown")
    shapes = [known.model.name] if known and known.model else []
    shapes += [f"context {known.context_length:,}"] if known and known.context_length else []
    shapes += [f"batch {known.batch_size}"] if known and known.batch_size else []
    trains = any(capture.phase(name) for name in ("backward", "optimizer"))
    kind = step.kind if step and step.kind else "training" if trains else ""
    # A kind of steps that serve requests is not a part of the steps of other kinds.
    all_steps = sum(group.steps for group in step.groups) if step and not step.kind else 0
    of = f" of {all_steps:,}" if step and all_steps > step.instances else ""
    many = f"{step.instances:,}{of} {kind} {plural(step.instances, 'step')}".replace("  ", " ") if step else ""
    steps = "one pass" if step and step.is_pass else many
    version = ".".join((capture.profiler_version or "").removeprefix("unknown").split(".")[:2])
    recorded = f"{'PyTorch' if capture.profiler == 'torch' else capture.profiler or ''} {version}".strip()
    ended = "" if capture.status in ("ok", "no_kernels") else status_of(capture.status)
    device = capture.gpu or (capture.run.gpu if capture.run else "") or ""
    most = peak_memory(capture)
    memory = f"peak memory {format_number(most, 'bytes')}" if most else ""
    facts = (ended, device, "" if precision == "unknown" else precision, ", ".join(shapes), steps, memory, recorded)
    return " · ".join(part for part in facts if part) or capture.source


def _of_step(capture: CaptureSummary) -> Iterator[Block]:
    """The length of a step in a line, what fills it, and what to do first."""
    step, title = capture.step, capture.title
    if step is None:
        why = capture.findings_missing or capture.message or "Nothing of this capture was measured."
        ms = capture.unprofiled.typical_ms(STEP) if capture.unprofiled else None
        yield Answer(f"{format_ms(ms)} a step, timed without a profiler" if ms else why, title)
        return
    yield Answer(_length(capture, step), title)
    if bars := bars_of_step(step, title, on_cpu=capture.on_cpu):
        yield bars
    if capture.on_cpu and step.lines:
        yield Paragraph(f"The lines at which the program is longest in {'it' if step.is_pass else 'a step'}:", title)
        yield from lines_of_program(step.lines, title)
    first = to_fix(capture)[:FIRST]
    if first:
        yield _do_first(capture)
        if step.unprofiled_ms and not (step.unprofiled_ms.timed or step.is_pass or capture.on_cpu):
            yield Paragraph(phrase("Estimates. To narrow them: `--step-ms N`, the unprofiled step."), title)
    if capture.findings_missing:
        yield Paragraph(capture.findings_missing, title)
    elif not first and not capture.on_cpu:
        yield Paragraph(step.in_words(nothing_found(capture)), title)


def _length(capture: CaptureSummary, step: StepSummary) -> str:
    """How long a step takes, how much of it the GPU works, and the model's FLOPs against the peak."""
    noun = step_noun(step)
    clauses = [f"{said_length(step)} {noun}{_in_brackets(step)}"]
    share = step.busy_share
    if capture.on_cpu:
        of = "the profiled one" if step.unprofiled_ms else "it"
        clauses += [] if share is None else [f"operators run for {rounded_percent(share)} of {of}"]
    elif share is not None:
        of = "it" if step.unprofiled_ms else "that"
        gpu = f"GPU {step.device}" if len(step.devices) > 1 else "the GPU"
        least = "at least " if step.idle_of("unrecorded") else ""
        clauses.append(f"{gpu} works {least}{rounded_percent(share)} of {of}")
        if exposed := step.exposed_communication_ms / step.total_ms if step.total_ms else 0.0:
            of = " of the profiled one" if step.unprofiled_ms else ""
            clauses += [f"only communicates {rounded_percent(exposed)}{of}"] if exposed >= _NARROW else []
    mfu = mfu_of_step(capture)
    clauses += [f"MFU {rounded_percent(mfu)}"] if mfu is not None else []
    return " · ".join(clauses)


def _in_brackets(step: StepSummary) -> str:
    """What else is known of the length: how it was found, and what it is under the profiler."""
    known, profiled = step.unprofiled_ms, rounded(step.length_ms)
    if known is None:
        return " under the profiler"
    if known.timed:
        return f" (measured; profiled {profiled})"
    wide = known.high - known.low > _NARROW * (known.high + known.low) / 2
    between = format_ms_range(known.low, known.high).removesuffix("\N{NO-BREAK SPACE}ms")
    return f" ({f'{between}, ' if wide else ''}estimated; profiled {profiled})"


def _do_first(capture: CaptureSummary) -> Table:
    first = to_fix(capture)[:FIRST]
    most = max(finding.saves_ms for finding in first) or 1.0
    fields: tuple[Field[tuple[int, Finding]], ...] = (
        Field("#", "text", lambda row: str(row[0])),
        Field("Do first (savings overlap)", "text", lambda row: row[1].title),
        Field(f"saves {step_noun(capture.step)}, ms", "ms", lambda row: saving(row[1])),
        Field("share", "percent", lambda row: rounded_percent(row[1].share_of_step)),
        Field("", "bar", lambda row: row[1].saves_ms / most),
        Field("line", "code", lambda row: row[1].lines[0].place if row[1].lines else None),
    )
    return make_table(fields, enumerate(first, 1), capture=capture.title, names=2)


#: A phase by its name, and what was recorded of it.
_Part = tuple[str, PhaseSummary | None]


def _phases(capture: CaptureSummary, labels: dict[str, str]) -> Iterator[Table]:
    """The phases that are compared, the others that were timed, and the step."""
    timed, compared = capture.unprofiled, compared_phases(capture)
    shown: dict[str, PhaseSummary | None] = {phase.phase: phase for phase in compared}
    for name in timed.phases if timed else ():
        shown.setdefault(name, capture.phase(name))
    if (step := capture.phase(STEP)) and compared:
        shown.setdefault(STEP, step)
    order = {phase.phase: place for place, phase in enumerate(capture.phases)}
    parts = sorted(shown.items(), key=lambda part: (part[0] == STEP, order.get(part[0], len(order))))
    kernel = kernel_word(capture)
    times = {name: stats.n or 0 for name, stats in timed.phases.items()} if timed else {}

    def passes(part: _Part) -> float | None:
        """Returns how often a phase begins in a step, from the capture or else from the unprofiled times."""
        name, steps = part[0], times.get(STEP)
        recorded = capture.step.passes.get(name) if capture.step else None
        timed_passes = times.get(name, 0) // steps if steps and not times.get(name, 0) % steps else None
        return 1 if name == STEP else recorded or timed_passes or None

    fields: tuple[Field[_Part], ...] = (
        Field("phase", "text", lambda part: part[1].label if part[1] else part[0]),
        Field("passes a step", "count", passes, lambda cell: cell not in (None, 1)),
        Field("unprofiled ms", "ms", lambda part: timed.typical_ms(part[0]) if timed else None),
        Field("profiled ms", "ms", lambda part: _profiled(capture, *part)),
        Field(
            "operators ms" if capture.on_cpu else "GPU busy ms", "ms",
            lambda part: part[1].gpu_busy_ms.median if part[1] and part[1].kernels else None,
        ),
        Field(f"matmul, of {kernel} time", "percent", lambda part: _matmul(capture, *part)),
        Field(f"top {kernel} ({plural(2, launch_word(capture))} a pass)", "text", lambda part: _top(part[1], labels)),
    )  # fmt: skip
    phases = make_table(fields, parts, capture=capture.title)
    if phases.rows:
        yield phases


def _profiled(capture: CaptureSummary, name: str, phase: PhaseSummary | None) -> float | None:
    """The time under the profiler; None of a range that only launches work, which goes on after it."""
    if name == STEP and capture.step and not capture.step.is_pass:
        return capture.step.length_ms
    return phase.wall_ms.median if phase and phase.synchronized else None


def _matmul(capture: CaptureSummary, name: str, phase: PhaseSummary | None) -> float | None:
    shares = capture.matmul.step if capture.matmul and name == STEP else None
    return shares.matmul if shares else phase.share_of("matmul") if phase else None


def _top(phase: PhaseSummary | None, labels: dict[str, str]) -> StrOrText | None:
    kernels = phase.kernels if phase else ()
    row = next((row for row in kernels if row.kernel_class != COMMUNICATION), None)
    if row is None:
        return None
    label = labels.get(row.name, row.name)
    short = label if len(label) <= _LABEL else f"{label[: _LABEL - 1].rstrip()}…"
    return phrase("{} ({:,.0f})", code(short), row.launches_per_instance)


def _limits(capture: CaptureSummary, evidence: Evidence) -> Iterator[Block]:
    """What limits the figures: what is not known and how to give it, then the warnings in a sentence each."""
    missing = capture.limits.missing if capture.limits else ()
    names = [name for name in missing if name in OPTIONS]
    found: list[StrOrText] = []
    if names:
        options = " ".join(OPTIONS[name] for name in names)
        found.append(phrase("unknown {} (`{}`)", join_names(names), options))
    if evidence.timings and capture.step and not capture.unprofiled:
        found.append(f"{evidence.timings} has no timing, or no single one, for this capture")
    found += map(_first_sentence, capture.warnings)
    if found:
        more = [f"and {len(found) - _LIMITS} more, under “About”"] if len(found) > _LIMITS else []
        said = join_texts("; ", (*found[:_LIMITS], *more))
        yield Paragraph(join_texts("", ("What limits these figures: ", said, ".")), capture.title)


def _first_sentence(text: StrOrText) -> StrOrText:
    """A warning up to its first full stop; "About" has all of it."""
    kept = []
    for span in spans(text):
        head, stop, _ = span.text.partition(". ") if span.kind == "plain" else (span.text, "", "")
        kept.append(replace(span, text=head))
        if stop:
            break
    else:
        kept[-1:] = [replace(span, text=span.text.removesuffix(".")) for span in kept[-1:]]
    return Text(tuple(kept))
