"""Puts the times of unprofiled runs beside the captures they belong to, and gives the others rows of their own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary.summary import STATUSES, CaptureSummary, Unprofiled
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.configuration import Run
from nsys_analyzer.inputs.timings import Timing, Timings

_ORDER = ("forward", "loss", "backward", "forward+backward", "optimizer", "step")
#: The phases whose work is the same with and without an optimizer behind it.
_WITHOUT_OPTIMIZER = ("forward", "loss", "backward", "forward+backward")
#: Statuses that say nothing of how a run ended.
_NO_NEWS = ("ok", "missing")
#: So many columns, and values of each, are named in a warning.
_FEW = 3
#: What a row of its own says of the run, beside its configuration.
_CONDITIONS = ("compile", "cuda_graph", "attention", "optimizer", "device")
#: The phases that a time of several covers, where the capture has no range for it.
_PARTS = {
    "forward+backward": ("forward", "loss", "backward"),
    "step": ("forward", "loss", "backward", "optimizer"),
}
#: A share by which the same work may differ between two runs, whose clocks do.
_TOLERANCE = 0.03


def with_timings(captures: Sequence[CaptureSummary], timings: Timings, *, one_run: bool) -> list[CaptureSummary]:
    """Returns the captures with the times of their unprofiled runs, and a row for each run that was only timed.

    A row belongs to the capture that it names, else to each that it fits: what both know of the run is the same, and no
    other row agrees in more. Rows of several conditions that fit alike are not used. Where all captures are of
    ``one_run``, a row that names neither capture nor model is theirs.
    """
    names = {capture.name for capture in captures}
    # A row that names another capture, which is not here, may be of a capture that was renamed.
    rest = [row for row in timings.rows if row.run.capture not in names]
    rest = [row for row in rest if row.model or (one_run and not row.run.capture)]
    timed: list[CaptureSummary] = []
    used: list[Timing] = []
    for capture in captures:
        own = [row for row in timings.rows if row.run.capture == capture.name]
        fitting, by_kernels = own, ""
        if len({row.cells for row in own}) != 1:
            fitting, by_kernels = _fitting(own or rest, capture, one_run=one_run)
        if len({row.cells for row in fitting}) == 1:
            used += fitting
            capture = _with_times(capture, fitting)
            if by_kernels:
                said = f"{fitting[0].place}: taken, of the rows that fit, since the capture's kernels are {by_kernels}"
                capture = replace(capture, warnings=(*capture.warnings, said))
        elif warning := _why_none(timings, fitting, one_run=one_run):
            capture = replace(capture, warnings=(*capture.warnings, warning))
        timed.append(capture)
    taken = {id(row) for row in used}
    unmatched = () if timings.of_captures else timings.rows
    alone = [row for row in unmatched if id(row) not in taken and row.run.capture not in names]
    return [*timed, *_only_timed([row for row in alone if row.run.capture or _is_other(row, captures)], timings.source)]


def _fitting(rows: Sequence[Timing], capture: CaptureSummary, *, one_run: bool) -> tuple[list[Timing], str]:
    """Returns the rows that contradict nothing that is known of a capture, and agree in most of it.

    Where several fit alike, the kernels' names decide, and the second text says by what: the precision that more than
    half of the matmul time has, then whether torch.compile made any.
    """
    run, known = capture.run or Run(), capture.configuration or Configuration()
    modes = {"optimizer": "train", "backward": "forward+backward", "forward": "forward"}
    mode = known.mode or next((mode for phase, mode in modes.items() if capture.phase(phase)), None)
    known, run = structs.replace(known, mode=mode), replace(run, rank=capture.rank)
    shares = {name: share for name, share in capture.precisions.items() if name != "unknown"}
    told = next((name for name, share in shares.items() if share > sum(shares.values()) / 2), None)
    if told == "tf32" and all(row.configuration.precision != told for row in rows):
        told = "fp32"  # as a program calls it that lets fp32 run as TF32
    kernels = capture.whole.kernels if capture.whole and not capture.on_cpu else ()
    is_compiled = any(row.name.startswith("triton_") for row in kernels) if kernels else None
    precision, compiled = known.precision or told, is_compiled if run.compile is None else run.compile
    best, how = list[Timing](), ""
    tried = ((known.precision, run.compile), (precision, run.compile), (precision, compiled))
    for tell in dict.fromkeys(tried):
        case, ran = structs.replace(known, precision=tell[0]), replace(run, compile=tell[1])
        scores = [_agreement(row, case, ran) for row in rows]
        most = max((score for score in scores if score is not None), default=0)
        fitting = [row for row, score in zip(rows, scores, strict=True) if score == most]
        best = [row for row in fitting if most >= 1 or (one_run and not row.run.capture)]
        said = "" if tell[0] == known.precision else tell[0]
        how = ", ".join(filter(None, (said, "" if tell[1] == run.compile else "compiled" if tell[1] else "eager")))
        if len({row.cells for row in best}) == 1:
            break
    return best, how


def _agreement(row: Timing, known: Configuration, run: Run) -> float | None:
    """Returns how many conditions both sides know and agree on; None where they disagree in one.

    The mode, which is inferred, decides between rows that agree in as many others.
    """
    said, model = row.configuration, row.configuration.model
    pairs: list[tuple[object, object]]
    pairs = [(model.dimensions if model else row.model, known.model.dimensions if known.model else None)]
    pairs += [(getattr(said, name), getattr(known, name)) for name in ("context_length", "batch_size", "precision")]
    pairs += [(getattr(row.run, name), getattr(run, name)) for name in ("compile", "cuda_graph", "device", "rank")]
    both = [pair for pair in pairs if None not in pair]
    modes = {said.mode, known.mode} - {None}
    same_mode = len(modes) < 2 or (modes == {"train", "forward+backward"} and row.phase in _WITHOUT_OPTIMIZER)
    agree = same_mode and all(ours == theirs for ours, theirs in both)
    return len(both) + (0.5 if said.mode == known.mode else 0) if agree else None


def _why_none(timings: Timings, fitting: Sequence[Timing], *, one_run: bool) -> str:
    """Returns why no row is used, if not for their configurations: they fit alike, or nothing says whose they are."""
    cells = [dict(row.cells) for row in fitting]
    headers = dict.fromkeys(header for one in cells for header in one)
    values = {header: list(dict.fromkeys(one.get(header, "") for one in cells)) for header in headers}
    differing = {header: texts for header, texts in values.items() if len(texts) > 1}
    if not differing:
        is_nobodys = not one_run and any(not row.run.capture and not row.model for row in timings.rows)
        said = "rows that name neither their capture nor a model are not used: add a column capture"
        return f"{timings.source}: {said}" if is_nobodys else ""
    few = list(differing.items())[:_FEW]
    listed = [f"{header} ({', '.join(text or 'empty' for text in texts[:_FEW])})" for header, texts in few]
    said = f"they differ in {', '.join(listed)}; give a file with the rows of this run alone"
    return f"{timings.source}: none of the rows that fit is used, {said}"


def _with_times(capture: CaptureSummary, timings: Sequence[Timing]) -> CaptureSummary:
    """Returns the capture with these times of its own, and a warning for each that cannot be right.

    The peak memory of its manifest serves where they have none.
    """
    timings = sorted(timings, key=lambda timing: _ORDER.index(timing.phase) if timing.phase in _ORDER else len(_ORDER))
    times = {timing.phase: timing.times for timing in timings if timing.times}
    ended = [timing for timing in timings if timing.status not in _NO_NEWS]
    memory = [timing.run.peak_memory_bytes or 0 for timing in timings]
    unprofiled = Unprofiled(
        status=ended[0].status if ended else "ok" if times else "missing",
        message=next((timing.run.message for timing in ended if timing.run.message), ""),
        phases=times,
        warmup_steps=timings[0].run.warmup_steps,
        device=timings[0].run.device,
        peak_memory_bytes=max(memory) or (capture.unprofiled.peak_memory_bytes if capture.unprofiled else None),
        doubts={phase: why for phase, stats in times.items() if (why := tuple(_doubts(capture, phase, stats)))},
    )
    warnings = [
        f"{timing.place}: {timing.phase} {times[timing.phase].typical:.3f} ms is not trusted, no verdict rests on it: "
        + "; ".join(unprofiled.doubts[timing.phase])
        for timing in timings
        if timing.phase in unprofiled.doubts
    ]
    phases = tuple(structs.replace(phase, python_ms=times.get(phase.phase)) for phase in capture.phases)
    return replace(capture, phases=phases, unprofiled=unprofiled, warnings=(*capture.warnings, *warnings))


def _doubts(capture: CaptureSummary, name: str, python: Stats) -> Iterator[str]:
    """Yields why a phase's unprofiled time cannot be right, from the capture of the same run."""
    if python.mean is None or (name == "step" and capture.times_calls):
        return
    if python.median is None and python.std is not None and python.std > python.mean:
        yield f"its deviation, {python.std:.3f} ms, is above its mean, as where warm-up is among the measured steps"
    # The phase under the profiler, or the phases that make it, where all of these are there.
    parts = [part for part in _PARTS.get(name, ()) if part != "loss" or capture.phase("loss")]
    names = [name] if capture.phase(name) else parts
    phases = [phase for part in names if (phase := capture.phase(part))]
    step = capture.step if name == "step" and not capture.phase(name) else None
    if step and not step.is_pass:  # it may hold each phase several times, and more than phases
        phases, busy = [], Stats(None, step.total_ms - step.idle_ms)
        wall = Stats(None, step.length_ms, step.wall_ms.std)
    elif not phases or len(phases) < len(names):
        return
    else:
        busy, wall = _sum([phase.gpu_busy_ms for phase in phases]), _sum([phase.wall_ms for phase in phases])
    # Where collectives wait, the GPU is busy for longer under the profiler.
    waits = capture.on_cpu or any(len(member.collectives) for member in capture.members)
    if not waits and _is_less(python, busy):
        cause = "another run, another unit, or the device was not synchronised"
        yield f"the GPU is busy for longer, {busy.mean:.3f} ms ({cause})"
    if all(phase.synchronized for phase in phases) and _is_less(wall, python):
        yield f"under the profiler it takes less, {wall.mean:.3f} ms (another run, or another unit)"


def _sum(clocks: Sequence[Stats]) -> Stats:
    """Returns the clocks of phases that follow each other as one, their deviations added."""
    return Stats(None, sum(clock.mean or 0.0 for clock in clocks), sum(clock.std or 0.0 for clock in clocks))


def _is_less(time: Stats, other: Stats) -> bool:
    """Returns whether a time is less than another by more than both deviations and the clocks explain."""
    if not time.mean or not other.mean:
        return False
    return other.mean - time.mean > (time.std or 0.0) + (other.std or 0.0) + _TOLERANCE * other.mean


def _only_timed(timings: Sequence[Timing], source: str) -> Iterator[CaptureSummary]:
    """Yields a row for each run without a capture: timed alone, or ended before it was."""
    groups: dict[object, list[Timing]] = defaultdict(list)
    for timing in timings:
        groups[timing.run.capture, timing.cells].append(timing)
    texts = {cell for timing in timings for cell in timing.cells if cell[0] in _CONDITIONS[2:]}
    differing = {name for name, count in Counter(name for name, _ in texts).items() if count > 1}
    rows: dict[str, CaptureSummary] = {}
    for group in groups.values():
        first, configuration = group[0], group[0].configuration
        row = _with_times(CaptureSummary("", None, source, ""), group)
        unprofiled = row.unprofiled
        if not unprofiled or (unprofiled.status == "missing" and not first.run.capture):
            continue
        if not unprofiled.phases and not first.run.capture:  # it failed before it timed anything, whatever its mode
            configuration = structs.replace(configuration, mode=None)
        status = "not_profiled" if unprofiled.status in _NO_NEWS else unprofiled.status
        said = {name: getattr(first.run, name) for name in _CONDITIONS if getattr(first.run, name) is not None}
        row = replace(
            row, name=first.run.capture or _name(first, configuration, differing), configuration=configuration,
            status=status if status in STATUSES else "failed",
            message=(unprofiled.message if status in STATUSES else status) or None, run=Run(**said) if said else None,
        )  # fmt: skip
        rows.setdefault(row.name, row)
    yield from rows.values()


def _name(timing: Timing, configuration: Configuration, differing: Collection[str]) -> str:
    model = configuration.model.name if configuration.model else timing.model or "unknown model"
    details = (
        f"b{configuration.batch_size}" if configuration.batch_size else "",
        *(configuration.precision, configuration.mode),
        *("compiled" if timing.run.compile else "", "cuda-graph" if timing.run.cuda_graph else ""),
        *(text for name, text in timing.cells if name in differing),
    )
    return "_".join([f"{model}_ctx{configuration.context_length or '?'}", *filter(None, details)])


def _is_other(row: Timing, captures: Sequence[CaptureSummary]) -> bool:
    """Returns whether a row is of none of the captures: of another model, or of another configuration of one."""
    fields = ("context_length", "batch_size", "precision", "mode")
    for known in (capture.configuration or Configuration() for capture in captures):
        pairs = [(getattr(row.configuration, field), getattr(known, field)) for field in fields]
        differ = any(ours != theirs for ours, theirs in pairs if None not in (ours, theirs))
        if not row.model or (known.model == row.configuration.model and not differ):
            return False
    return True
