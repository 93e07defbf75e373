"""Reports the first screen of a capture: the length of a step, its parts, what to do first, what limits the figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.summary.complete import select_compared_phases
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.evidence import (
    Evidence,
    find_peak_memory,
    format_status,
    format_step_length,
    kernel_word,
    launch_word,
    step_noun,
)
from nsys_analyzer.report.facts import describe_message, say_all
from nsys_analyzer.report.model import Answer, Block, Field, Paragraph, Section, Table, make_table
from nsys_analyzer.report.sections.bars import make_account_bars, make_step_bars
from nsys_analyzer.report.sections.energy import format_joules
from nsys_analyzer.report.sections.findings import (
    SHOWN_FINDINGS,
    explain_no_findings,
    get_findings,
    list_program_lines,
    make_saving_cell,
)
from nsys_analyzer.report.sections.limits import MFU_OPTIONS, find_step_mfu
from nsys_analyzer.report.sections.operators import describe_limits_of_account, format_attainable
from nsys_analyzer.report.sections.serving import tabulate_step_kinds
from nsys_analyzer.report.units import (
    format_bounds,
    format_ms,
    format_number,
    rounded,
    rounded_percent,
)
from nsys_analyzer.text import StrOrText, Text, code, join_names, join_texts, phrase, plain, plural, spans
from nsys_analyzer.trace.phase_names import STEP

#: The first line omits an interval whose width is below this share of its middle, and communication below this share of
#: a step.
_NEGLIGIBLE_SHARE = 0.03
#: The most characters of a kernel label in the table of phases.
_MAX_LABEL_LENGTH = 44
#: The most limits of the figures on the first screen. "About" has all of them.
_MAX_LIMITS = 3


def decision_section(capture: CaptureSummary, evidence: Evidence) -> Section:
    """Returns the first section of a capture's report."""
    blocks = (
        Paragraph(describe_conditions(capture), capture.title),
        *_describe_step(capture),
        *(tabulate_step_kinds(capture) if capture.serving else _tabulate_phases(capture, evidence.labels)),
        *_describe_limits(capture, evidence),
    )
    return Section("decision", "", blocks)


def describe_conditions(capture: CaptureSummary) -> str:
    """Returns what was captured: "NVIDIA H200 · fp32 · small, context 256, batch 4 · 3 steps · nsys 2025.3"."""
    configuration, step = capture.configuration, capture.step
    precision = max(capture.precisions, key=lambda name: capture.precisions[name], default="unknown")
    shapes = []
    if configuration:
        context, batch = configuration.context_length, configuration.batch_size
        shapes += [configuration.model.name] if configuration.model else []
        shapes += [f"context {context:,}"] if context else []
        shapes += [f"batch {batch}"] if batch else []
    steps = ""
    if step and step.is_pass:
        steps = "one pass"
    elif step:
        trains = any(capture.phase(name) for name in ("backward", "optimizer"))
        kind = step.kind or ("training" if trains else "")
        # Steps that serve requests are of several kinds, and each kind is counted alone.
        all_steps = 0 if step.kind else sum(group.steps for group in step.groups)
        count = f"{step.instances:,} of {all_steps:,}" if all_steps > step.instances else f"{step.instances:,}"
        steps = " ".join(filter(None, (count, kind, plural(step.instances, "step"))))
    version = ".".join((capture.profiler_version or "").removeprefix("unknown").split(".")[:2])
    profiler = f"{'PyTorch' if capture.profiler == 'torch' else capture.profiler or ''} {version}".strip()
    status = "" if capture.status in ("ok", "no_kernels") else format_status(capture.status)
    device = capture.gpu or (capture.run.gpu if capture.run else "") or ""
    peak = find_peak_memory(capture)
    memory = f"peak memory {format_number(peak, 'bytes')}" if peak else ""
    precision = "" if precision == "unknown" else precision
    facts = (status, device, precision, ", ".join(shapes), steps, memory, profiler)
    return " · ".join(fact for fact in facts if fact) or capture.source


def _describe_step(capture: CaptureSummary) -> Iterator[Block]:
    """Yields the length of a step, what fills it, and what to do first."""
    step, title = capture.step, capture.title
    if capture.status == "oom" and (step or capture.message):
        yield Answer(_describe_failure(capture), title)
        if step is None:
            return
    if step is None:
        reason = capture.findings_missing or describe_message(capture) or "This capture contains nothing to measure."
        ms = capture.unprofiled.typical_ms(STEP) if capture.unprofiled else None
        yield Answer(f"{format_ms(ms)} a step, timed without a profiler" if ms else reason, title)
        return
    yield Answer(_describe_length(capture, step), title)
    if capture.status == "oom":
        return  # where the time of the interrupted steps went does not tell why memory ran out
    if capture.account:
        yield make_account_bars(capture.account, format_step_length(step), title)
        if limits := describe_limits_of_account(capture.account):
            yield Paragraph(limits, title)
    if bars := make_step_bars(step, title, on_cpu=capture.on_cpu):
        yield bars
    if capture.on_cpu and step.lines:
        yield Paragraph(f"The lines in which {'it' if step.is_pass else 'a step'} spends most time:", title)
        yield from list_program_lines(step.lines, title)
    first = get_findings(capture)[:SHOWN_FINDINGS]
    if first:
        largest_ms = max(finding.saves_ms for finding in first) or 1.0
        fields: tuple[Field[tuple[int, Finding]], ...] = (
            Field("#", "text", lambda row: str(row[0])),
            Field("Do first", "text", lambda row: row[1].title),
            Field("saving", "ms", lambda row: make_saving_cell(row[1])),
            Field("share", "percent", lambda row: rounded_percent(row[1].share_of_step)),
            Field("", "bar", lambda row: row[1].saves_ms / largest_ms),
            Field("line", "code", lambda row: row[1].lines[0].place if row[1].lines else None),
        )
        noun = step_noun(step)
        per_step = noun if step.is_pass else f"per {noun.removeprefix('a ')}"
        caption = f"What to do first, and the saving in ms {per_step} (savings overlap):"
        yield make_table(fields, enumerate(first, 1), caption, capture=title, names=2)
        if step.unprofiled_ms and not (step.unprofiled_ms.timed or step.is_pass or capture.on_cpu):
            hint = phrase("The length of an unprofiled step (`--step-ms N`) narrows these estimates.")
            yield Paragraph(hint, title)
    if capture.findings_missing:
        yield Paragraph(capture.findings_missing, title)
    elif not first and not capture.on_cpu:
        yield Paragraph(step.adapt_to_pass(explain_no_findings(capture)), title)


def _describe_failure(capture: CaptureSummary) -> StrOrText:
    """Returns that memory ran out, the allocation that failed, and the command that says what filled the memory."""
    message = describe_message(capture).rstrip(".") or "an allocation failed"
    snapshots = capture.run.memory if capture.run else None
    if snapshots:
        advice = phrase("A snapshot shows what filled the memory: `nsys-analyze memory {}`.", snapshots[0])
    else:
        advice = phrase(
            "What filled the memory is not recorded. If a program of `nsys-analyze run` runs out of memory, a snapshot "
            "of PyTorch's memory shows it."
        )
    return join_texts(" ", (f"The program ran out of memory: {message}.", advice))


def _describe_length(capture: CaptureSummary, step: StepSummary) -> str:
    """Returns the length of a step, the share of it in which the GPU works, the MFU, and the energy."""
    clauses = [f"{format_step_length(step)} {step_noun(step)}{_describe_origin(step)}"]
    if capture.account:
        clauses.append(f"attainable about {format_attainable(capture.account)} on this GPU")
    share, whole = step.busy_share, "the whole capture" if step.is_pass else "the step"
    profiled = ("the profiled capture" if step.is_pass else "a profiled step") if step.unprofiled_ms else whole
    if capture.on_cpu:
        clauses += [] if share is None else [f"operators run for {rounded_percent(share)} of {profiled}"]
    elif share is not None:
        gpu = f"GPU {step.device}" if len(step.devices) > 1 else "GPU"
        least = "at least " if step.idle_of("unrecorded") else ""
        clauses.append(f"{gpu} busy {least}{rounded_percent(share)} of {whole}")
        exposed = step.exposed_communication_ms / step.total_ms if step.total_ms else 0.0
        if exposed >= _NEGLIGIBLE_SHARE:
            clauses.append(f"communicates without computing for {rounded_percent(exposed)} of {profiled}")
    mfu = find_step_mfu(capture)
    clauses += [f"MFU {rounded_percent(mfu)}"] if mfu is not None else []
    clauses += [f"{format_joules(capture.energy)} {step_noun(step)}"] if capture.energy else []
    return " · ".join(clauses)


def _describe_origin(step: StepSummary) -> str:
    """Returns how the length was determined, and the profiled length: " (80–88, estimated; profiled 90)"."""
    times, profiled = step.unprofiled_ms, rounded(step.length_ms)
    if times is None:
        return " under the profiler"
    if times.timed:
        return f" (measured{' in the recorded process' * times.in_recorded_process}; profiled {profiled})"
    is_wide = times.high - times.low > _NEGLIGIBLE_SHARE * (times.high + times.low) / 2
    ends = format_bounds(times.low, times.high)
    return f" ({f'{ends}, ' if is_wide else ''}estimated; profiled {profiled})"


#: The name of a phase, and its figures, which are None if the phase was only timed.
_NamedPhase = tuple[str, PhaseSummary | None]


def _tabulate_phases(capture: CaptureSummary, labels: dict[str, str]) -> Iterator[Table]:
    """Yields a table of the compared phases, of the other phases that were timed, and of the step."""
    timed, compared = capture.unprofiled, select_compared_phases(capture)
    by_name: dict[str, PhaseSummary | None] = {phase.phase: phase for phase in compared}
    for name in timed.phases if timed else ():
        by_name.setdefault(name, capture.phase(name))
    if (step := capture.phase(STEP)) and compared:
        by_name.setdefault(STEP, step)
    order = {phase.phase: place for place, phase in enumerate(capture.phases)}
    rows = sorted(by_name.items(), key=lambda row: (row[0] == STEP, order.get(row[0], len(order))))
    kernel = kernel_word(capture)
    timed_counts = {name: stats.n or 0 for name, stats in timed.phases.items()} if timed else {}

    def count_passes(row: _NamedPhase) -> float | None:
        """Returns how often a phase occurs in a step, from the capture or else from the unprofiled times."""
        name, steps = row[0], timed_counts.get(STEP)
        recorded = capture.step.passes.get(name) if capture.step else None
        timed_passes = timed_counts.get(name, 0) // steps if steps and not timed_counts.get(name, 0) % steps else None
        return 1 if name == STEP else recorded or timed_passes or None

    def profiled_ms(row: _NamedPhase) -> float | None:
        """Returns the time of a phase under the profiler; None if its GPU work ends after its range."""
        name, phase = row
        if name == STEP and capture.step and not capture.step.is_pass:
            return capture.step.length_ms
        return phase.wall_ms.median if phase and phase.synchronized else None

    def matmul_share(row: _NamedPhase) -> float | None:
        """Returns the share of matmul in a phase's kernel time."""
        name, phase = row
        shares = capture.matmul.step if capture.matmul and name == STEP else None
        return shares.matmul if shares else phase.share_of("matmul") if phase else None

    def top_kernel(row: _NamedPhase) -> StrOrText | None:
        """Returns the shortened label of the phase's top kernel, without collectives, and its launches per pass."""
        kernels = row[1].kernels if row[1] else ()
        top = next((kernel for kernel in kernels if kernel.kernel_class != COMMUNICATION), None)
        if top is None:
            return None
        label = labels.get(top.name, top.name)
        short = label if len(label) <= _MAX_LABEL_LENGTH else f"{label[: _MAX_LABEL_LENGTH - 1].rstrip()}…"
        return phrase("{} ({:,.0f})", code(short), top.launches_per_instance)

    fields: tuple[Field[_NamedPhase], ...] = (
        Field("phase", "text", lambda row: row[1].label if row[1] else row[0]),
        Field("passes per step", "count", count_passes, lambda cell: cell not in (None, 1)),
        Field("unprofiled ms", "ms", lambda row: timed.typical_ms(row[0]) if timed else None),
        Field("profiled ms", "ms", profiled_ms),
        Field(
            "operators ms" if capture.on_cpu else "GPU busy ms", "ms",
            lambda row: row[1].gpu_busy_ms.median if row[1] and row[1].kernels else None,
        ),
        Field(f"matmul, of {kernel} time", "percent", matmul_share),
        Field(f"top {kernel} ({plural(2, launch_word(capture))} per pass)", "text", top_kernel),
    )  # fmt: skip
    phases = make_table(fields, rows, capture=capture.title)
    if phases.rows:
        yield phases


def _describe_limits(capture: CaptureSummary, evidence: Evidence) -> Iterator[Block]:
    """Yields what limits the figures: unknown facts with the options that give them, and the start of each warning."""
    unknown = [name for name in (capture.limits.missing if capture.limits else ()) if name in MFU_OPTIONS]
    limits: list[StrOrText] = []
    if unknown:
        options = " ".join(MFU_OPTIONS[name] for name in unknown)
        are = "is" if len(unknown) == 1 else "are"
        limits.append(phrase("The {} {} not known (`{}`).", join_names(unknown), are, options))
    if evidence.timings and capture.step and not capture.unprofiled:
        limits.append(f"{evidence.timings} contains no times or several times for this capture.")
    limits += map(_first_sentence, say_all(capture.warnings))
    if limits:
        hidden = len(limits) - _MAX_LIMITS
        more_limits = [f"“About” has {hidden} more {plural(hidden, 'limit')}."] if hidden > 0 else []
        sentences = join_texts(" ", (*limits[:_MAX_LIMITS], *more_limits))
        yield Paragraph(join_texts("", ("What limits these figures: ", sentences)), capture.title)


def _first_sentence(text: StrOrText) -> StrOrText:
    """Returns the first sentence of a warning, with a period. "About" has the whole warning."""
    kept_spans = []
    for span in spans(text):
        start, full_stop, _ = span.text.partition(". ") if span.kind == "plain" else (span.text, "", "")
        kept_spans.append(replace(span, text=start))
        if full_stop:
            break
    sentence = Text(tuple(kept_spans))
    return sentence if plain(sentence).endswith(".") else sentence + "."
