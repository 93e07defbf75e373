"""Why a step is as long as it is: what fills it, why the GPU idles, and what to do first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nsys_analyzer.analysis.findings.diagnosis import works
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.analysis.steps.process import OUTSIDE, Cause
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import FEW, Evidence
from nsys_analyzer.report.model import Answer, Block, Details, Listing, Paragraph, Section, Table
from nsys_analyzer.report.sections.anatomy import (
    anatomy_tables,
    legend_of_steps,
    queue_in_words,
    tables_of_cpu,
    words_of,
)
from nsys_analyzer.report.sections.findings import (
    findings_of,
    first_to_fix,
    in_lines,
    is_estimated,
    legend_of_findings,
    nothing_found,
    remedies,
    saves_in_words,
    saving,
    without_profiler,
)
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import about_percent, milliseconds, milliseconds_between
from nsys_analyzer.text import Words, joined, phrase, plural

#: What is below this share of a step is not in its answer.
_MATTERS = 0.02
#: The causes of idle time that an answer names.
_CAUSES = 2
_ON_GPU = (
    "The program runs ahead of the GPU here, so a step is bounded by the GPU's work: from the end of the work of the "
    "step before it to the end of its own."
)

#: A capture, and its steps.
_Stepped = tuple[CaptureSummary, StepSummary]


def answer(evidence: Evidence) -> Section:
    """How long a step takes, what fills it, why the GPU idles, and what would make it shorter."""
    stepped = [(capture, capture.step) for capture in evidence.captures if capture.step]
    found = [capture for capture, _ in stepped if capture.diagnosis and capture.diagnosis.findings]
    many = len(evidence.captures) > FEW
    blocks: list[Block] = [_overview(stepped)] if len(stepped) > 1 else []
    for capture, step in stepped:
        blocks += (_in_words(step, block) for block in _of_capture(capture, step, many=many))
    blocks += _without_steps(evidence)
    blocks += [Paragraph("What to do about each finding:"), *remedies(found)] if many and found else []
    if on_gpu := [step for capture, step in stepped if not capture.on_cpu]:
        blocks.append(Paragraph("What the words of this section mean:"))
        legend = Listing((*legend_of_steps(on_gpu), *legend_of_findings(found)))
        blocks.append(legend if any(not step.is_pass for step in on_gpu) else _in_words(on_gpu[0], legend))
    if stepped and all(step.is_pass for _, step in stepped):
        title = "Why does the whole capture take as long as it does, and what to do first?"
        return Section("steps", title, tuple(blocks), "capture")
    return Section("steps", "Why is a step as long as it is, and what to do first?", tuple(blocks), "step")


def unread(evidence: Evidence) -> tuple[Block, ...]:
    """The files that could not be read, and why."""
    failed = [one for one in evidence.captures if one.status == "failed" and one.metadata is None and one.run is None]
    if not failed:
        return ()
    count = f"{len(failed)} {plural(len(failed), 'file')} could not be read:"
    return Paragraph(count), Listing(tuple(one.message or one.title for one in failed))


def _of_capture(capture: CaptureSummary, step: StepSummary, *, many: bool) -> Iterator[Block]:
    lines = in_lines(capture) if works(step) and not capture.on_cpu else ()
    yield Answer(capture.title, _text(capture, step), _short(capture, step), lines)
    yield Paragraph(_windows(capture, step), capture.title)
    if capture.on_cpu:
        yield from tables_of_cpu(capture.title, step)
    if capture.on_cpu or not works(step):
        return
    yield from anatomy_tables(capture.title, step)
    if queue := queue_in_words(step):
        yield Paragraph(queue, capture.title)
    yield from findings_of(capture, explained=not many)


def _in_words(step: StepSummary, block: Block) -> Block:
    """A block that says "pass" where the capture has no steps."""
    words = step.in_words
    match block:
        case Answer():
            return replace(block, text=words(block.text), short=words(block.short), more=tuple(map(words, block.more)))
        case Paragraph():
            return replace(block, text=words(block.text))
        case Listing(kind="bullets"):
            return replace(block, lines=tuple(map(words, block.lines)))
        case Details():
            inside = tuple(_in_words(step, one) for one in block.blocks)
            return replace(block, title=str(words(block.title)), blocks=inside)
        case Table():
            columns = tuple(replace(column, title=str(words(column.title))) for column in block.columns)
            return replace(block, columns=columns, caption=words(block.caption))
    return block


def _text(capture: CaptureSummary, step: StepSummary) -> Words:
    said: list[Words] = [_takes(capture, step), _holds(capture, step)]
    if works(step) and not capture.on_cpu:
        first = first_to_fix(capture)
        why, doubt = capture.findings_missing, capture.diagnosis and capture.diagnosis.doubt
        saves = saves_in_words(first, capture) if first else ""
        if first and not doubt:
            said.append(f'What to fix first: "{first.title}"{", which" if first.saves_ms_low else ":"} {saves}.')
        else:
            said.append(why or nothing_found(capture))
            said += [f"{first.title}: {saves}."] if first else []
    return joined(" ", said)


def _takes(capture: CaptureSummary, step: StepSummary) -> str:
    """How long a step takes, without the profiler where that is known."""
    without, length, noun = without_profiler(capture), milliseconds(step.length_ms), noun_of(step)
    if without is None:
        return f"{noun.capitalize()} takes {length} under the profiler."
    if is_estimated(capture):
        between = milliseconds_between(without.low, without.high)
        return f"{noun.capitalize()} takes an estimated {between} without the profiler, and {length} under it."
    faster = " The profiled steps are of another run, which was faster." if without.low > step.length_ms else ""
    return f"{noun.capitalize()} takes {milliseconds(without.low)} without the profiler, and {length} under it.{faster}"


def _holds(capture: CaptureSummary, step: StepSummary) -> str:
    """What the GPU does in a step, and how long it idles; of a program without one, what its phases take."""
    if capture.on_cpu:
        shares = _shares(step)
        return f"Operators run for {milliseconds(step.compute_ms)} of it{f': {shares}' if shares else ''}."
    if not works(step):
        return "Nothing runs on the GPU in it."
    others = [
        (step.exposed_copy_ms, "copies"),
        (step.exposed_communication_ms, "communicates"),
    ]
    said = [f"computes for {milliseconds(step.compute_ms)}"]
    said += [f"only {what} for {milliseconds(ms)}" for ms, what in others if ms > _MATTERS * step.total_ms]
    gpu = f"GPU {step.device}" if len(step.devices) > 1 else "The GPU"
    idles, why = f"{gpu} {', '.join(said)}, and idles for {_idle_time(capture, step)}", _why(step)
    if not why or without_profiler(capture) is None:
        return f"{idles}{why}."
    return f"{idles}. Under the profiler it idles for {milliseconds(step.idle_ms)}{why}."


def _shares(step: StepSummary) -> str:
    """What each phase takes of a step: "forward 44 %, backward 48 %"."""
    total = step.total_ms
    named = [one for one in step.phases if one.phase != OUTSIDE and one.total_ms > _MATTERS * total]
    return ", ".join(f"{one.phase} {about_percent(one.total_ms / total)}" for one in named)


def _idle_time(capture: CaptureSummary, step: StepSummary) -> str:
    """The idle time of a step: without the profiler what the GPU's work leaves of it, else as it was recorded."""
    without = without_profiler(capture)
    if without is None:
        return milliseconds(step.idle_ms)
    low, high = (max(ms + step.idle_ms - step.total_ms, 0.0) for ms in (without.low, without.high))
    return milliseconds_between(low, high)


def _why(step: StepSummary) -> str:
    """Why the GPU idles under the profiler, where that is known and matters: the causes of most of it."""
    least = _MATTERS * step.total_ms
    shown = [(cause, ms) for cause, ms in _causes(step)[:_CAUSES] if ms > least]
    if all(cause == "unknown" for cause, _ in shown):
        return ""
    return f": {' and '.join(f'{milliseconds(ms)} because {words_of(cause, step)}' for cause, ms in shown)}"


def _causes(step: StepSummary) -> list[tuple[Cause, float]]:
    """The idle time of each cause, wherever it was, the longest first."""
    causes = dict.fromkeys(row.cause for row in step.idle_by_cause)
    return sorted(((cause, step.idle_of(cause)) for cause in causes), key=lambda pair: -pair[1])


def _short(capture: CaptureSummary, step: StepSummary) -> str:
    without, profiled = without_profiler(capture), milliseconds(step.length_ms)
    if capture.on_cpu:
        timed = f"{milliseconds(without.low)} without the profiler, " if without else ""
        return f"{timed}{profiled} under the profiler: {_shares(step) or 'its parts are not named'}"
    if not works(step):
        return f"{profiled} under the profiler: nothing runs on the GPU"
    does = f"the GPU computes for {milliseconds(step.compute_ms)}, idles for {_idle_time(capture, step)}"
    if without is None:
        return f"{profiled} under the profiler: {does}"
    estimated = " (estimated)" if is_estimated(capture) else ""
    return f"{milliseconds_between(without.low, without.high)} without the profiler{estimated}: {does}"


def _windows(capture: CaptureSummary, step: StepSummary) -> Words:
    """What bounds the steps."""
    if step.is_pass:
        return (
            "Nothing in the capture tells where a pass of the program's loop begins, so that all of it is one. If it "
            "holds several, say which range is around each (--step RANGE), or how many there are (--steps N)."
        )
    many = f"There {'is one' if step.instances == 1 else f'are {step.instances:,}'}"
    spread = f", of {milliseconds_between(step.wall_ms.min or 0.0, step.wall_ms.max or 0.0)} under the profiler"
    times = f"{many}{spread if step.instances > 1 else ''}."
    what = phrase("What counts as a step: {}. {}", _unit(capture, step), times)
    return joined(" ", (what, *_groups(step), *([_ON_GPU] if step.on_gpu_timeline else [])))


def _groups(step: StepSummary) -> Iterator[str]:
    """The steps that are not like most, with their counts, and what that means for the figures."""
    measured = [one for one in step.groups if one.measured]
    if len(measured) > 1:
        said = ", ".join(f"{one.steps:,} {one.kind} of {milliseconds(one.median_ms)} (median)" for one in measured)
        yield f"They differ: {said}. The length of a step is the mean of these groups by their counts."
    if step.cut:
        yield f"{step.cut:,} more {'was' if step.cut == 1 else 'were'} not recorded whole, and left out."
    for one in step.groups:
        many, median = f"{one.steps:,} {plural(one.steps, 'step')}", milliseconds(one.median_ms)
        takes = "takes" if one.steps == 1 else "take"
        if one.kind == "first":
            yield f"The first step takes {median}, since the program is starting up: it is left out of every figure."
        elif one.kind == "last":
            yield "The last step is left out, since the time from it to a next one is not known."
        elif one.kind == "other work":
            yield f"{many} of other work {takes} {median} and {'is' if one.steps == 1 else 'are'} left out."
        elif not one.measured:
            yield f"{many} {'is' if one.steps == 1 else 'are'} {one.kind}, {median} (median): left out."


def noun_of(step: StepSummary) -> str:
    """What a step is called."""
    return "the whole capture" if step.is_pass else "a step"


def _unit(capture: CaptureSummary, step: StepSummary) -> Words:
    """What one step is: each range of a name, or what else repeats."""
    names = [phase.range for phase in capture.phases if phase.phase in (STEP, OTHER_STEP)]
    by_nsys = capture.metadata is not None and capture.metadata.profiler == "nsys"
    for name in names if step.source == "range" else ():
        rest = step.unit.removeprefix(f"a range {name}")
        if rest != step.unit and (not rest or rest.startswith(" (")):
            return phrase("each {} named `{}`{}", "NVTX range" if by_nsys else "range", name, rest)
    return step.unit


def _overview(stepped: list[_Stepped]) -> Table:
    fixed = any(map(_first, stepped))
    return table(_OF_CAPTURE, stepped, f"The steps{', and what to fix first in each' if fixed else ''}:")


def _first(row: _Stepped) -> Finding | None:
    return first_to_fix(row[0])


_OF_CAPTURE: tuple[Field[_Stepped], ...] = (
    Field("capture", "text", lambda row: row[0].title),
    Field("step ms, no profiler", "ms", lambda row: without_profiler(row[0])),
    Field("step ms, profiled", "ms", lambda row: row[1].length_ms),
    Field("GPU computes ms", "ms", lambda row: None if row[0].on_cpu else row[1].compute_ms),
    Field("operators ms", "ms", lambda row: row[1].compute_ms if row[0].on_cpu else None),
    Field("what to fix first", "text", lambda row: one.title if (one := _first(row)) else None),
    Field("saves ms", "ms", lambda row: saving(one) if (one := _first(row)) else None),
)


def _without_steps(evidence: Evidence) -> Iterator[Paragraph]:
    """The captures of a GPU that have no kernel, or in which nothing repeats."""
    lacking = [one for one in evidence.captures if one.step is None and not one.on_cpu and one.metadata]
    for capture in [one for one in lacking if one.has_no_kernel]:
        yield Paragraph(phrase("{}: {}", capture.title, capture.findings_missing), capture.title)
    names = [one.title for one in lacking if not one.has_no_kernel]
    if names:
        yield Paragraph(
            phrase(
                "No work on a GPU was found in the {} {}.",
                plural(len(names), "capture"),
                ", ".join(names),
            )
        )
