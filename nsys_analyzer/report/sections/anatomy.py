"""What fills a step, in words and tables: compute by class, what is exposed, and why the GPU idles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.steps.process import Cause
from nsys_analyzer.analysis.steps.step import DeviceSteps, PhaseParts, StepSummary
from nsys_analyzer.report.model import Cell, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, milliseconds
from nsys_analyzer.text import Words, phrase

#: What follows "the GPU idles because".
CAUSES: dict[Cause, str] = {
    "launch": "launching takes time",
    "sync": "the program waits for the GPU",
    "copy": "the program waits for a copy",
    "allocator": "the program allocates or frees memory",
    "host": "the program does other work on the CPU",
    "data": "the program loads a batch",
    "communication": "a collective waits to start",
    "unknown": "of something unknown",
}
#: What stands for launching where no launch is known.
_PAUSES = "of short pauses between operations"
_COMPUTE: Words = phrase("*compute*: a kernel (other than a collective) or a memory fill runs.")
_EXPOSED: Words = phrase(
    "*exposed copies*: a copy runs, and nothing computes. *exposed communication*: only collectives run."
)
_IDLE: Words = phrase("*idle*: nothing runs on the GPU. Idle time counts to the phase whose work ends it.")
_CAUSES: tuple[tuple[Cause, Words], ...] = (
    (
        "launch",
        phrase(
            "*launching takes time*: the GPU has no work left, and the program needs some time to launch the next "
            "operation. The pauses of about 1 µs between two operations that are both launched are counted here, too."
        ),
    ),
    ("host", phrase("*the program does other work on the CPU*: it makes no CUDA call for 0.1 ms or longer.")),
)
_OF_PAUSES: Words = phrase("*of short pauses between operations*: each is 0.01 ms at most, and no launch is known.")
#: Rows of idle time that are shown one by one, and the share of a step that a row has at least.
_MOST_ROWS, _LEAST_SHARE = 8, 0.005
_MANY = 10
#: With fewer operations in its queue the GPU cannot bridge a delay.
_QUEUED = 3
_US_PER_MS = 1e3


def legend_of_steps(steps: Sequence[StepSummary]) -> tuple[Words, ...]:
    """What the parts and the causes are, those that some step has."""
    devices = [device for step in steps for device in step.devices]
    exposed = any(one.exposed_copy_ms or one.exposed_communication_ms for one in devices)
    said = {words_of(row.cause, step) for step in steps for device in step.devices for row in device.idle_by_cause}
    causes = [(CAUSES[cause], words) for cause, words in _CAUSES]
    causes.append((_PAUSES, _OF_PAUSES))
    return (_COMPUTE, *([_EXPOSED] if exposed else []), _IDLE, *(words for cause, words in causes if cause in said))


def anatomy_tables(capture: str, step: StepSummary) -> Iterator[Table]:
    """What fills a step, the same by phase, and the idle time by cause: of each device."""
    several, of = len(step.devices) > 1, "the capture" if step.is_pass else "a step"
    whole = of if step.is_pass else "the step"
    for caption, fields, rows in (
        (f"What fills {of} under the profiler, ms:", _PARTS, lambda device: _parts(device, whole)),
        (f"The same by phase, ms of {of}:", _PHASES, _phases),
        (
            f"Why the GPU idles under the profiler, ms and gaps of {of}:",
            _CAUSE,
            lambda device: _idle(device, step),
        ),
    ):
        found = [row for device in step.devices for row in rows(device)]
        if found:
            kept = fields if several else fields[1:]
            yield table(kept, found, caption, capture=capture, names=1 + several)


def tables_of_cpu(capture: str, step: StepSummary) -> Iterator[Table]:
    """What the phases of a program without a GPU take, and its operators by class."""
    of = "the capture" if step.is_pass else "a step"
    rows = [(step, (one.phase, one.total_ms, _share(one.total_ms, step), one.compute_ms)) for one in step.phases]
    rows.append((step, (of, step.total_ms, 1.0, step.compute_ms)))
    yield table(_OF_CPU[1:], rows, f"What takes the time of {of}, under the profiler:", capture=capture)
    classes = [(step, (one.kernel_class, one.ms, _share(one.ms, step))) for one in step.classes]
    yield table(_CLASSES_OF_CPU[1:], classes, f"The operators of {of} by class:", capture=capture)


#: A row of a device: its cells after the device's number.
_Row = tuple[DeviceSteps, tuple[Cell, ...]]


def _column(title: str, unit: str, place: int) -> Field[_Row]:
    return Field(title, unit, lambda row: row[1][place], lambda cell: cell not in (None, 0.0))  # type: ignore[arg-type]


def _fields(*columns: tuple[str, str]) -> tuple[Field[_Row], ...]:
    """The device, then these columns."""
    device: Field[_Row] = Field("GPU", "text", lambda row: str(row[0].device))
    return (device, *(_column(title, unit, place) for place, (title, unit) in enumerate(columns)))


_PARTS = _fields(("part", "text"), ("ms", "ms"), ("share of the step", "percent"))
_PHASES = _fields(
    ("phase", "text"),
    ("compute", "ms"),
    ("exposed copies", "ms"),
    ("exposed communication", "ms"),
    ("idle", "ms"),
    ("sum", "ms"),
)
_CAUSE = _fields(
    ("the GPU idles because", "text"),
    ("range", "code"),
    ("API call", "code"),
    ("ms", "ms"),
    ("share of the step", "percent"),
    ("gaps", "count"),
)


_OF_CPU = _fields(("part", "text"), ("ms", "ms"), ("share of the step", "percent"), ("operators ms", "ms"))
_CLASSES_OF_CPU = _fields(("class", "text"), ("ms", "ms"), ("share of the step", "percent"))


def _parts(device: DeviceSteps, whole: str) -> Iterator[_Row]:
    """The parts of a step in order, and their sum."""
    most = _shown([one.ms for one in device.classes], device.total_ms)
    others = [one.ms for one in device.classes[most:]]
    named = [(f"compute: {one.kernel_class}", one.ms) for one in device.classes[:most]]
    named += [(f"compute: {len(others)} other classes", sum(others))]
    named += [("exposed copies", device.exposed_copy_ms), ("exposed communication", device.exposed_communication_ms)]
    for name, ms in (*named, ("idle", device.idle_ms), (whole, device.total_ms)):
        if ms or name in ("idle", whole):
            yield device, (name, ms, _share(ms, device))


def _phases(device: DeviceSteps) -> Iterator[_Row]:
    def cells(phase: PhaseParts) -> tuple[Cell, ...]:
        copies, communication = phase.exposed_copy_ms, phase.exposed_communication_ms
        return phase.phase, phase.compute_ms, copies, communication, phase.idle_ms, phase.total_ms

    return ((device, cells(phase)) for phase in device.phases)


def _idle(device: DeviceSteps, step: StepSummary) -> Iterator[_Row]:
    """The largest causes, and the sum of the others."""
    most = _shown([one.ms for one in device.idle_by_cause], device.total_ms)
    for one in device.idle_by_cause[:most]:
        gaps, share = _counted(one.gaps), _share(one.ms, device)
        why, api = words_of(one.cause, step), one.api
        yield device, (why, one.range, api, one.ms, share, gaps)
    if others := device.idle_by_cause[most:]:
        ms, gaps = sum(one.ms for one in others), _counted(sum(one.gaps for one in others))
        yield device, (f"other reasons ({len(others)})", None, None, ms, _share(ms, device), gaps)


def _shown(longest_first: list[float], step_ms: float) -> int:
    """How many rows are shown one by one: those that matter, and a last one that would be the only one left."""
    most = max(1, min(sum(ms >= _LEAST_SHARE * step_ms for ms in longest_first), _MOST_ROWS))
    return len(longest_first) if most + 1 >= len(longest_first) else most


def _counted(gaps: float) -> float:
    """Gaps of a step, of many whole ones."""
    return round(gaps) if gaps >= _MANY else gaps


def _share(ms: float, device: DeviceSteps) -> float | None:
    return ms / device.total_ms if device.total_ms else None


def words_of(cause: Cause, step: StepSummary) -> str:
    """A cause as it follows "the GPU idles because"."""
    return _PAUSES if cause == "launch" and step.launch_latency_us is None else CAUSES[cause]


def queue_in_words(step: StepSummary) -> str:
    """How long operations wait, how many of them, and what that means; empty where no launch is known."""
    if step.launch_latency_us is None or step.queue is None:
        return ""
    latency, waiting = step.launch_latency_us, step.queue.median
    many = "none" if waiting < 1 else f"{round(waiting):,}"
    verb = "is" if round(waiting) <= 1 else "are"
    most = format_number(step.queue.max, "count")
    waits = f"When a kernel is launched, {many} {verb} still queued (median; at most {most})"
    means = (
        "the GPU has no work in reserve, so every delay of the program becomes idle time"
        if waiting < _QUEUED
        else "the program runs ahead of the GPU, which bridges short delays of the program"
    )
    return (
        f"An operation starts {_duration(latency.median)} after its launch (median; for the slowest tenth "
        f"{_duration(latency.p90)} or more). {waits}: {means}."
    )


def _duration(us: float) -> str:
    return milliseconds(us / _US_PER_MS) if us >= _US_PER_MS else f"{us:.3g}\N{NO-BREAK SPACE}µs"
