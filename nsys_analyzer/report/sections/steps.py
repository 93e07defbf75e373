"""Reports the details of a step: how steps are recognized, what fills a step, and why the GPU is idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.steps.step import PROGRAM_PART, DeviceSteps, PhaseParts, StepSummary
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import CAUSE_WORDS
from nsys_analyzer.report.model import Block, Cell, Details, Field, Paragraph, Table, make_table
from nsys_analyzer.report.sections.findings import list_program_lines
from nsys_analyzer.report.units import format_count, format_ms, format_ms_range
from nsys_analyzer.text import StrOrText, join_texts, phrase, plural
from nsys_analyzer.trace.schema import US_PER_MS

#: The maximum number of rows of the table of idle time, and the minimum share of a step for a row of its own.
_MAX_IDLE_ROWS, _SMALLEST_IDLE_SHARE = 12, 0.002
_CRITICAL_PATH_CAPTION = (
    "A step ends when everything on its critical path has ended, so only less time on this path makes the step "
    "shorter. While the GPU is idle or its work delays nothing, the critical path runs through the program or through "
    "another GPU."
)
_GPU_STEP_DEFINITION = (
    "The program runs ahead of the GPU, so a step lasts from the end of the previous step's GPU work to the end of its "
    "own GPU work."
)


def step_details(capture: CaptureSummary) -> Iterator[Details]:
    """Yields how the steps are recognized, what fills them, and their idle time by cause."""
    step, title = capture.step, capture.title
    if step is None:
        return
    blocks: list[Block] = [Paragraph(define_step(step), title)]
    if step.launch_latency_us is not None and step.queue is not None:
        latency = format_ms(step.launch_latency_us.median / US_PER_MS)
        queued = format_count(round(step.queue.median), "other operation")
        blocks.append(
            Paragraph(
                f"A GPU operation starts {latency} after its launch, with {queued} in the queue (medians).", title
            )
        )
    devices = step.devices or (step,)
    part_rows = [row for device in devices for row in _list_parts(device, step)]
    callers = (capture.run and capture.run.lines) or {}
    phase_rows = [
        _PhaseRow(device.device, part, callers.get(part.phase)) for device in devices for part in device.phases
    ]
    step_or_capture = "the capture" if step.is_pass else "a step"
    part_table = _make_step_table(
        _PART_FIELDS, part_rows, step, title, _CRITICAL_PATH_CAPTION if step.critical_path else ""
    )
    caption = "The step by phase. Idle time counts toward the phase of the operation that ends it:"
    phase_table = _make_step_table(_PHASE_FIELDS, phase_rows, step, title, caption)
    blocks += [table for table in (part_table, phase_table) if table.rows]
    yield Details(f"What fills {step_or_capture} under the profiler", tuple(blocks), title)
    idle_rows = [row for device in devices for row in _list_idle_times(device)]
    if idle_rows and not capture.on_cpu:
        idle_table = _make_step_table(_IDLE_FIELDS, idle_rows, step, title)
        yield Details(f"Idle time of {step_or_capture} by cause", (idle_table,), title)
    if step.lines and not capture.on_cpu:
        yield Details(f"The program's lines in {step_or_capture}", tuple(list_program_lines(step.lines, title)), title)


class _PartRow(NamedTuple):
    """A part of a device's step; ``critical_ms`` is its time on the critical path."""

    device: int
    part: str
    ms: float | None
    share: float | None
    critical_ms: float | None


class _PhaseRow(NamedTuple):
    """A phase of a device's step, and the line of the program that calls it."""

    device: int
    parts: PhaseParts
    caller: str | None


class _IdleRow(NamedTuple):
    """The idle time of a device with one cause."""

    device: int
    cause: str
    range: str | None
    api: str | None
    ms: float
    share: float
    gaps: float
    line: str | None


_Row = TypeVar("_Row", _PartRow, _PhaseRow, _IdleRow)


def _is_nonzero(cell: Cell) -> bool:
    """Returns whether a cell has a figure other than zero. Columns without such a cell are left out."""
    return cell not in (None, 0.0)


_PART_FIELDS: tuple[Field[_PartRow], ...] = (
    Field("GPU", "text", lambda row: str(row.device)),
    Field("part", "text", lambda row: row.part),
    Field("ms", "ms", lambda row: row.ms, _is_nonzero),
    Field("share", "percent", lambda row: row.share, _is_nonzero),
    Field("on the critical path ms", "ms", lambda row: row.critical_ms, _is_nonzero),
)
_PHASE_FIELDS: tuple[Field[_PhaseRow], ...] = (
    Field("GPU", "text", lambda row: str(row.device)),
    Field("phase", "text", lambda row: row.parts.phase),
    Field("compute ms", "ms", lambda row: row.parts.compute_ms, _is_nonzero),
    Field("exposed copies ms", "ms", lambda row: row.parts.exposed_copy_ms, _is_nonzero),
    Field("exposed communication ms", "ms", lambda row: row.parts.exposed_communication_ms, _is_nonzero),
    Field("idle ms", "ms", lambda row: row.parts.idle_ms, _is_nonzero),
    Field("all ms", "ms", lambda row: row.parts.total_ms, _is_nonzero),
    Field("called from", "code", lambda row: row.caller),
)
_IDLE_FIELDS: tuple[Field[_IdleRow], ...] = (
    Field("GPU", "text", lambda row: str(row.device)),
    Field("cause", "text", lambda row: row.cause),
    Field("range", "code", lambda row: row.range),
    Field("API call", "code", lambda row: row.api),
    Field("ms", "ms", lambda row: row.ms, _is_nonzero),
    Field("share", "percent", lambda row: row.share, _is_nonzero),
    Field("gaps", "count", lambda row: row.gaps, _is_nonzero),
    Field("line", "code", lambda row: row.line),
)


def _make_step_table(
    columns: Sequence[Field[_Row]], rows: Sequence[_Row], step: StepSummary, capture: str, caption: str = ""
) -> Table:
    """Returns a table; the column of the GPU is left out if the steps use one GPU."""
    has_several_devices = len(step.devices) > 1
    return make_table(
        columns if has_several_devices else columns[1:], rows, caption, capture=capture, names=1 + has_several_devices
    )


def _list_parts(device: DeviceSteps, step: StepSummary) -> Iterator[_PartRow]:
    """Yields the parts of a step in order, and their sum at the end, each with its time on the critical path."""
    devices = {device.device, None} if device.device == step.device else {device.device}
    path = [piece for piece in step.critical_path if piece.device in devices]
    ms_on_path = {piece.part: piece.ms for piece in path if piece.where != "idle"}
    step_or_capture = "the capture" if step.is_pass else "the step"
    rows: tuple[tuple[str, float, float | None], ...] = (
        *((f"compute: {row.kernel_class}", row.ms, ms_on_path.get(row.kernel_class)) for row in device.classes),
        ("exposed copies", device.exposed_copy_ms, ms_on_path.get("copies")),
        ("exposed communication", device.exposed_communication_ms, ms_on_path.get(COMMUNICATION)),
        ("idle", device.idle_ms, sum(piece.ms for piece in path if piece.where == "idle") or None),
        ("the program, while the GPU works", 0.0, ms_on_path.get(PROGRAM_PART)),
        (step_or_capture, device.total_ms, sum(piece.ms for piece in path) or None),
    )
    for name, ms, critical_ms in rows:
        if ms or critical_ms:
            yield _PartRow(device.device, name, ms or None, ms / device.total_ms if ms else None, critical_ms)


def _list_idle_times(device: DeviceSteps) -> Iterator[_IdleRow]:
    """Yields a row for each of the largest causes, and a row with the sum of the smaller causes."""
    least_ms = _SMALLEST_IDLE_SHARE * device.total_ms
    largest_causes = [row for row in device.idle_by_cause if row.ms >= least_ms][:_MAX_IDLE_ROWS]
    for row in largest_causes:
        line = row.lines[0].place if row.lines else None
        share, gaps = row.ms / device.total_ms, round(row.gaps, 1)
        yield _IdleRow(device.device, CAUSE_WORDS[row.cause], row.range, row.api, row.ms, share, gaps, line)
    if smaller_causes := device.idle_by_cause[len(largest_causes) :]:
        ms, gaps = sum(row.ms for row in smaller_causes), round(sum(row.gaps for row in smaller_causes), 1)
        cause = f"{len(smaller_causes)} smaller {plural(len(smaller_causes), 'cause')}"
        yield _IdleRow(device.device, cause, None, None, ms, ms / device.total_ms, gaps, None)


def define_step(step: StepSummary) -> StrOrText:
    """Returns what bounds the steps, how many there are, and which steps the figures leave out."""
    if step.is_pass:
        return (
            "Nothing in the capture shows where a pass of the program's loop begins, so the whole capture counts as "
            "one step. If the capture contains several steps, give the range around each step (--step RANGE) or the "
            "number of steps (--steps N)."
        )
    range_ms = format_ms_range(step.wall_ms.min or 0.0, step.wall_ms.max or 0.0)
    count = f"There are {step.instances:,} steps of {range_ms} under the profiler."
    count = count if step.instances > 1 else "There is one step."
    sentences: list[StrOrText] = [phrase("What counts as a step: {}. {}", step.unit, count)]
    for group in step.groups:
        median = format_ms(group.median_ms)
        if group.kind == "first":
            start = f"The first {group.steps:,} steps take {median} (median)"
            start = f"The first step takes {median}" if group.steps == 1 else start
            sentences.append(f"{start}, because the program is starting up. No figure includes start-up.")
        elif group.kind == "last":
            sentences.append("The last step is left out of every figure, because nothing shows where it ends.")
        elif not group.measured:
            steps = f"{group.steps:,} {plural(group.steps, 'step')} of {median} (median)"
            left_out = "of another kind" if step.kind else f"left out of every figure ({group.kind})"
            sentences.append(f"{steps} {'is' if group.steps == 1 else 'are'} {left_out}.")
    return join_texts(" ", (*sentences, *([_GPU_STEP_DEFINITION] if step.on_gpu_timeline else [])))
