"""What a step is, what fills it, and why the GPU idles: the details behind its length."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.steps.step import PROGRAM, DeviceSteps, PhaseParts, StepSummary
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import CAUSE_WORDS
from nsys_analyzer.report.model import Block, Cell, Details, Field, Paragraph, Table, make_table
from nsys_analyzer.report.sections.lines import lines_of_program
from nsys_analyzer.report.units import format_count, format_ms, format_ms_range
from nsys_analyzer.text import StrOrText, join_texts, phrase, plural
from nsys_analyzer.trace.schema import US_PER_MS

#: Rows of idle time, and the share of a step that a row has at least.
_MOST_ROWS, _LEAST_SHARE = 12, 0.002
_ON_PATH = (
    "The critical path is what the end of a step waits for: less of anything else makes no step shorter. While the GPU "
    "is idle, and while its work delays nothing, it leads through the program or the work of another GPU."
)
_ON_GPU = (
    "The program runs ahead of the GPU here, so a step is bounded by the GPU's work: from the end of the work of the "
    "step before it to the end of its own."
)


def step_details(capture: CaptureSummary) -> Iterator[Details]:
    """How the steps are told, what fills them, and the idle time by cause."""
    step, title = capture.step, capture.title
    if step is None:
        return
    told: list[Block] = [Paragraph(what_is_a_step(step), title)]
    if queue := _queue(step):
        told.append(Paragraph(queue, title))
    devices = step.devices or (step,)
    parts = [row for device in devices for row in _parts(device, step)]
    called = (capture.run and capture.run.lines) or {}
    phases = [(device, (*_phase(part), called.get(part.phase))) for device in devices for part in device.phases]
    of = "the capture" if step.is_pass else "a step"
    fills = [_table(_PARTS, parts, step, title, _ON_PATH if step.critical_path else "")]
    fills += [_table(_PHASES, phases, step, title, "By phase; an idle stretch counts to the phase whose work ends it:")]
    yield Details(f"What fills {of}, profiled", (*told, *(one for one in fills if one.rows)), title)
    idle = [row for device in devices for row in _idle(device)]
    if idle and not capture.on_cpu:
        yield Details(f"Idle time of {of} by cause", (_table(_CAUSES, idle, step, title),), title)
    if step.lines and not capture.on_cpu:
        yield Details(f"Where the program is in {of}", tuple(lines_of_program(step.lines, title)), title)


#: A row of a device: its cells after the device's number.
_Row = tuple[DeviceSteps, tuple[Cell, ...]]


def _fields(*columns: tuple[str, str]) -> tuple[Field[_Row], ...]:
    """The device, then these columns."""

    def column(title: str, unit: str, place: int) -> Field[_Row]:
        return Field(title, unit, lambda row: row[1][place], lambda cell: cell not in (None, 0.0))  # type: ignore[arg-type]

    device: Field[_Row] = Field("GPU", "text", lambda row: str(row[0].device))
    return (device, *(column(title, unit, place) for place, (title, unit) in enumerate(columns)))


_PARTS = _fields(("part", "text"), ("ms", "ms"), ("share", "percent"), ("on the critical path ms", "ms"))
_PHASES = _fields(
    ("phase", "text"), ("compute ms", "ms"), ("exposed copies ms", "ms"), ("exposed communication ms", "ms"),
    ("idle ms", "ms"), ("all ms", "ms"), ("called from", "code"),
)  # fmt: skip
_CAUSES = _fields(
    ("cause", "text"), ("range", "code"), ("API call", "code"), ("ms", "ms"), ("share", "percent"), ("gaps", "count"),
    ("line", "code"),
)  # fmt: skip


def _table(
    fields: tuple[Field[_Row], ...], rows: list[_Row], step: StepSummary, capture: str, caption: str = ""
) -> Table:
    several = len(step.devices) > 1
    return make_table(fields if several else fields[1:], rows, caption, capture=capture, names=1 + several)


def _parts(device: DeviceSteps, step: StepSummary) -> Iterator[_Row]:
    """The parts of a step in order, and their sum, each with what of it is on the critical path."""
    devices = {device.device, None} if device.device == step.device else {device.device}
    path = [piece for piece in step.critical_path if piece.device in devices]
    on_path = {piece.part: piece.ms for piece in path if piece.where != "idle"}
    whole = "the capture" if step.is_pass else "the step"
    rows: tuple[tuple[str, float, float | None], ...] = (
        *((f"compute: {row.kernel_class}", row.ms, on_path.get(row.kernel_class)) for row in device.classes),
        ("exposed copies", device.exposed_copy_ms, on_path.get("copies")),
        ("exposed communication", device.exposed_communication_ms, on_path.get(COMMUNICATION)),
        ("idle", device.idle_ms, sum(piece.ms for piece in path if piece.where == "idle") or None),
        ("the program, while the GPU works", 0.0, on_path.get(PROGRAM)),
        (whole, device.total_ms, sum(piece.ms for piece in path) or None),
    )
    for name, ms, critical in rows:
        if ms or critical:
            yield device, (name, ms or None, ms / device.total_ms if ms else None, critical)


def _phase(part: PhaseParts) -> tuple[Cell, ...]:
    copies, communication = part.exposed_copy_ms, part.exposed_communication_ms
    return part.phase, part.compute_ms, copies, communication, part.idle_ms, part.total_ms


def _idle(device: DeviceSteps) -> Iterator[_Row]:
    """The largest causes, and the sum of the others."""
    rows = [row for row in device.idle_by_cause if row.ms >= _LEAST_SHARE * device.total_ms][:_MOST_ROWS]
    for row in rows:
        line = row.lines[0].place if row.lines else None
        share = row.ms / device.total_ms
        yield device, (CAUSE_WORDS[row.cause], row.range, row.api, row.ms, share, round(row.gaps, 1), line)
    if others := device.idle_by_cause[len(rows) :]:
        ms, gaps = sum(row.ms for row in others), sum(row.gaps for row in others)
        yield device, (f"{len(others)} smaller ones", None, None, ms, ms / device.total_ms, round(gaps, 1), None)


def _queue(step: StepSummary) -> str:
    """How long operations wait, and how many of them; empty where no launch is known."""
    if step.launch_latency_us is None or step.queue is None:
        return ""
    after = format_ms(step.launch_latency_us.median / US_PER_MS)
    waiting = format_count(round(step.queue.median), "other")
    return f"An operation starts {after} after its launch, with {waiting} still queued (medians)."


def what_is_a_step(step: StepSummary) -> StrOrText:
    """What bounds the steps, and which of them the figures leave out."""
    if step.is_pass:
        return (
            "Nothing in the capture tells where a pass of the program's loop begins, so that all of it is one. If it "
            "holds several, say which range is around each (--step RANGE), or how many there are (--steps N)."
        )
    spread = format_ms_range(step.wall_ms.min or 0.0, step.wall_ms.max or 0.0)
    many = f"There are {step.instances:,}, of {spread} under the profiler." if step.instances > 1 else "There is one."
    said: tuple[StrOrText, ...] = (phrase("What counts as a step: {}. {}", step.unit, many), *_groups(step))
    return join_texts(" ", (*said, *([_ON_GPU] if step.on_gpu_timeline else [])))


def _groups(step: StepSummary) -> Iterator[str]:
    """The steps that are not like most, with their counts, and what that means for the figures."""
    for group in step.groups:
        median = format_ms(group.median_ms)
        if group.kind == "first":
            several = f"The first {group.steps:,} steps take {median} (median)", "they are"
            takes, are = (f"The first step takes {median}", "it is") if group.steps == 1 else several
            yield f"{takes}, since the program is starting up: {are} left out of every figure."
        elif group.kind == "last":
            yield "The last step is left out, since the time from it to a next one is not known."
        elif not group.measured:
            many = f"{group.steps:,} {plural(group.steps, 'step')} of {median} (median)"
            of = "of another kind" if step.kind else f"left out as {group.kind}"
            yield f"{many} {'is' if group.steps == 1 else 'are'} {of}."
