"""Matches the times of unprofiled runs with captures. An unprofiled run without a capture gets a row in the report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary.summary import STATUSES, CaptureSummary, Unprofiled
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.configuration import Run
from nsys_analyzer.inputs.unprofiled_times import PhaseTiming, Timings

_PHASE_ORDER = ("forward", "loss", "backward", "forward+backward", "optimizer", "step")
#: The phases that do the same work in steps with and without an optimizer.
_PHASES_WITHOUT_OPTIMIZER = ("forward", "loss", "backward", "forward+backward")
#: The statuses of runs that did not fail.
_STATUSES_WITHOUT_FAILURE = ("ok", "missing")
#: A warning about differing rows lists at most this many columns, and at most this many values of each column.
_MAX_LISTED_VALUES = 3
#: The columns, besides the configuration, that describe a run without a capture.
_RUN_CONDITIONS = ("compile", "cuda_graph", "attention", "optimizer", "device")
#: The phases that make up a longer phase. Their times are added if the capture has no range for the longer phase.
_SUBPHASES = {"forward+backward": ("forward", "loss", "backward"), "step": ("forward", "loss", "backward", "optimizer")}
#: The time of the same work may differ by this fraction between two runs, because the clock rate of the GPU differs.
_RUN_TOLERANCE = 0.03


def match_timings(captures: Sequence[CaptureSummary], timings: Timings, *, one_run: bool) -> list[CaptureSummary]:
    """Returns the captures with the times of their unprofiled runs, and a row for each run without a capture.

    A row of times belongs to the capture that it names. A row that names no capture belongs to each capture that it
    fits: all conditions that are known on both sides are equal, and no other row agrees in more conditions. If several
    rows with different conditions fit a capture equally well, none of them is used.

    Args:
        captures: the captures.
        timings: the unprofiled times.
        one_run: whether all captures belong to one run. A row that names neither a capture nor a model then belongs to
            this run.
    """
    capture_names = {capture.name for capture in captures}
    # A row that names an unknown capture is treated as unnamed, because the capture may have been renamed.
    unnamed_rows = [
        row
        for row in timings.rows
        if row.run.capture not in capture_names and (row.model or (one_run and not row.run.capture))
    ]
    timed_captures: list[CaptureSummary] = []
    used_rows: list[PhaseTiming] = []
    for capture in captures:
        own_rows = [row for row in timings.rows if row.run.capture == capture.name]
        fitting_rows, evidence = own_rows, ""
        if len({row.cells for row in own_rows}) != 1:
            fitting_rows, evidence = _find_fitting_rows(own_rows or unnamed_rows, capture, one_run=one_run)
        if len({row.cells for row in fitting_rows}) == 1:
            used_rows += fitting_rows
            capture = _add_times(capture, fitting_rows)
            if evidence:
                warning = Fact("row_chosen_by_kernels", place=fitting_rows[0].place, evidence=evidence)
                capture = replace(capture, warnings=(*capture.warnings, warning))
        elif unused_rows := _explain_unused_rows(timings, fitting_rows, one_run=one_run):
            capture = replace(capture, warnings=(*capture.warnings, unused_rows))
        timed_captures.append(capture)
    used_ids = {id(row) for row in used_rows}
    unmatched_rows = [
        row
        for row in (() if timings.of_captures else timings.rows)
        if id(row) not in used_ids and row.run.capture not in capture_names
    ]
    own_runs = [row for row in unmatched_rows if row.run.capture or _is_of_another_run(row, captures)]
    return [*timed_captures, *_make_rows_without_capture(own_runs, timings.source)]


def _find_fitting_rows(
    rows: Sequence[PhaseTiming], capture: CaptureSummary, *, one_run: bool
) -> tuple[list[PhaseTiming], str]:
    """Returns the rows that contradict no known condition of a capture, and agree with it in the most conditions.

    If several rows fit equally well, the names of the kernels decide: first the precision of more than half of the
    matmul time, then whether torch.compile generated any kernel. The second result names what decided, or is empty.
    """
    run, configuration = capture.run or Run(), capture.configuration or Configuration()
    modes = {"optimizer": "train", "backward": "forward+backward", "forward": "forward"}
    mode = configuration.mode or next((mode for phase, mode in modes.items() if capture.phase(phase)), None)
    configuration, run = structs.replace(configuration, mode=mode), replace(run, rank=capture.rank)
    shares = {name: share for name, share in capture.precisions.items() if name != "unknown"}
    precision = next((name for name, share in shares.items() if share > sum(shares.values()) / 2), None)
    if precision == "tf32" and all(row.configuration.precision != precision for row in rows):
        precision = "fp32"  # TF32 counts as fp32, because programs whose fp32 matmuls run as TF32 call it fp32
    kernels = capture.whole.kernels if capture.whole and not capture.on_cpu else ()
    is_compiled = any(row.name.startswith("triton_") for row in kernels) if kernels else None
    precision, compiled = configuration.precision or precision, is_compiled if run.compile is None else run.compile
    best_rows, evidence = list[PhaseTiming](), ""
    attempts = ((configuration.precision, run.compile), (precision, run.compile), (precision, compiled))
    for tried_precision, tried_compile in dict.fromkeys(attempts):
        tried_conditions = (
            structs.replace(configuration, precision=tried_precision),
            replace(run, compile=tried_compile),
        )
        scores = [_count_agreements(row, *tried_conditions) for row in rows]
        highest_score = max((score for score in scores if score is not None), default=0)
        rows_of_highest_score = [row for row, score in zip(rows, scores, strict=True) if score == highest_score]
        best_rows = [row for row in rows_of_highest_score if highest_score >= 1 or (one_run and not row.run.capture)]
        precision_evidence = "" if tried_precision == configuration.precision else tried_precision
        compile_evidence = "" if tried_compile == run.compile else "compiled" if tried_compile else "eager"
        evidence = ", ".join(filter(None, (precision_evidence, compile_evidence)))
        if len({row.cells for row in best_rows}) == 1:
            break
    return best_rows, evidence


def _count_agreements(row: PhaseTiming, configuration: Configuration, run: Run) -> float | None:
    """Returns the number of conditions that are known on both sides and agree; None if one of them differs.

    An equal mode counts as half a condition, because the mode of a capture is inferred.
    """
    row_configuration, row_model, model = row.configuration, row.configuration.model, configuration.model
    pairs: list[tuple[object, object]]
    pairs = [(row_model.dimensions if row_model else row.model, model.dimensions if model else None)]
    names = ("context_length", "batch_size", "precision")
    pairs += [(getattr(row_configuration, name), getattr(configuration, name)) for name in names]
    pairs += [(getattr(row.run, name), getattr(run, name)) for name in ("compile", "cuda_graph", "device", "rank")]
    known_pairs = [pair for pair in pairs if None not in pair]
    modes = {row_configuration.mode, configuration.mode} - {None}
    is_same_work = modes == {"train", "forward+backward"} and row.phase in _PHASES_WITHOUT_OPTIMIZER
    all_agree = (len(modes) < 2 or is_same_work) and all(of_row == of_capture for of_row, of_capture in known_pairs)
    return len(known_pairs) + (0.5 if row_configuration.mode == configuration.mode else 0) if all_agree else None


def _explain_unused_rows(timings: Timings, fitting_rows: Sequence[PhaseTiming], *, one_run: bool) -> Fact | None:
    """Returns the warning that rows are not used: several rows fit equally well, or rows name no capture.

    Returns None if there is no such row.
    """
    cells = [dict(row.cells) for row in fitting_rows]
    headers = dict.fromkeys(header for row_cells in cells for header in row_cells)
    values = {header: list(dict.fromkeys(row_cells.get(header, "") for row_cells in cells)) for header in headers}
    texts_of_differing_columns = {header: texts for header, texts in values.items() if len(texts) > 1}
    if not texts_of_differing_columns:
        lacks_owner = not one_run and any(not row.run.capture and not row.model for row in timings.rows)
        return Fact("rows_without_owner", source=timings.source) if lacks_owner else None
    columns = tuple(
        (header, tuple(texts[:_MAX_LISTED_VALUES]))
        for header, texts in list(texts_of_differing_columns.items())[:_MAX_LISTED_VALUES]
    )
    return Fact("rows_differ", source=timings.source, columns=columns)


def _add_times(capture: CaptureSummary, timings: Sequence[PhaseTiming]) -> CaptureSummary:
    """Returns a capture with its unprofiled times, and with a warning for each time that cannot be right.

    The peak memory in the capture's manifest is kept if the rows of times contain no peak memory.
    """
    timings = sorted(
        timings, key=lambda row: _PHASE_ORDER.index(row.phase) if row.phase in _PHASE_ORDER else len(_PHASE_ORDER)
    )
    times = {row.phase: row.times for row in timings if row.times}
    failed_rows = [row for row in timings if row.status not in _STATUSES_WITHOUT_FAILURE]
    memory = [row.run.peak_memory_bytes or 0 for row in timings]
    unprofiled = Unprofiled(
        status=failed_rows[0].status if failed_rows else "ok" if times else "missing",
        message=next((row.run.message for row in failed_rows if row.run.message), ""),
        phases=times,
        warmup_steps=timings[0].run.warmup_steps,
        device=timings[0].run.device,
        peak_memory_bytes=max(memory) or (capture.unprofiled.peak_memory_bytes if capture.unprofiled else None),
        doubts={
            row.phase: doubts
            for row in timings
            if row.times and (doubts := tuple(_find_doubts(capture, row.phase, row.times, row.in_recorded_process)))
        },
        step_in_recorded_process=any(row.in_recorded_process for row in timings if row.times),
    )
    warnings = [
        Fact(
            "untrusted_time",
            place=row.place,
            phase=row.phase,
            ms=times[row.phase].typical,
            doubts=unprofiled.doubts[row.phase],
        )
        for row in timings
        if row.phase in unprofiled.doubts
    ]
    phases = tuple(structs.replace(phase, python_ms=times.get(phase.phase)) for phase in capture.phases)
    return replace(capture, phases=phases, unprofiled=unprofiled, warnings=(*capture.warnings, *warnings))


def _find_doubts(capture: CaptureSummary, name: str, unprofiled: Stats, in_recorded_process: bool) -> Iterator[Fact]:
    """Yields the reasons why the unprofiled time of a phase cannot be right, according to the capture.

    If the recorded process made the timed steps, they are steps of the same program, and may be longer than the
    profiled steps, as steps differ.
    """
    if unprofiled.mean is None or (name == "step" and capture.times_calls):
        return
    if unprofiled.median is None and unprofiled.std is not None and unprofiled.std > unprofiled.mean:
        yield Fact("deviation_above_mean", std_ms=unprofiled.std)
    # The names of the phases in the capture whose times are compared with the unprofiled time.
    subphases = [part for part in _SUBPHASES.get(name, ()) if part != "loss" or capture.phase("loss")]
    phase_names = [name] if capture.phase(name) else subphases
    phases = [phase for part in phase_names if (phase := capture.phase(part))]
    step = capture.step if name == "step" and not capture.phase(name) else None
    if step and not step.is_pass:  # a step is not the sum of its phases: a phase may occur several times in it
        phases, busy = [], Stats(None, step.total_ms - step.idle_ms)
        wall = Stats(None, step.length_ms, step.wall_ms.std)
    elif not phases or len(phases) < len(phase_names):
        return
    else:
        busy, wall = (
            _sum_times([phase.gpu_busy_ms for phase in phases]),
            _sum_times([phase.wall_ms for phase in phases]),
        )
    # Collectives may wait longer under the profiler, and the GPU counts as busy while they wait.
    has_waits = capture.on_cpu or any(len(member.collectives) for member in capture.members)
    if not has_waits and _is_shorter(unprofiled, busy):
        yield Fact("gpu_busy_longer", busy_ms=busy.mean)
    if not in_recorded_process and all(phase.synchronized for phase in phases) and _is_shorter(wall, unprofiled):
        yield Fact("profiled_shorter", wall_ms=wall.mean)


def _sum_times(clocks: Sequence[Stats]) -> Stats:
    """Returns the sum of the times of consecutive phases, with the sum of the standard deviations."""
    return Stats(None, sum(clock.mean or 0.0 for clock in clocks), sum(clock.std or 0.0 for clock in clocks))


def _is_shorter(time: Stats, reference: Stats) -> bool:
    """Returns whether a time is shorter than the reference by more than spread and clock rates can explain."""
    if not time.mean or not reference.mean:
        return False
    return reference.mean - time.mean > (time.std or 0.0) + (reference.std or 0.0) + _RUN_TOLERANCE * reference.mean


def _make_rows_without_capture(timings: Sequence[PhaseTiming], source: str) -> Iterator[CaptureSummary]:
    """Yields a summary for each run without a capture. It was only timed, or failed before it wrote a capture."""
    rows_of_run: dict[object, list[PhaseTiming]] = defaultdict(list)
    for timing in timings:
        rows_of_run[timing.run.capture, timing.cells].append(timing)
    cells = {cell for timing in timings for cell in timing.cells if cell[0] in _RUN_CONDITIONS[2:]}
    differing_options = {name for name, count in Counter(name for name, _ in cells).items() if count > 1}
    summaries: dict[str, CaptureSummary] = {}
    for rows in rows_of_run.values():
        first_timing, configuration = rows[0], rows[0].configuration
        summary = _add_times(CaptureSummary("", None, source, ""), rows)
        unprofiled = summary.unprofiled
        if not unprofiled or (unprofiled.status == "missing" and not first_timing.run.capture):
            continue
        # A run without any time failed before its mode mattered, so its mode is left out.
        if not unprofiled.phases and not first_timing.run.capture:
            configuration = structs.replace(configuration, mode=None)
        status = "not_profiled" if unprofiled.status in _STATUSES_WITHOUT_FAILURE else unprofiled.status
        conditions = {name: value for name in _RUN_CONDITIONS if (value := getattr(first_timing.run, name)) is not None}
        summary = replace(
            summary, name=first_timing.run.capture or _make_run_name(first_timing, configuration, differing_options),
            configuration=configuration, status=status if status in STATUSES else "failed",
            message=(unprofiled.message if status in STATUSES else status) or None,
            run=Run(**conditions) if conditions else None,
        )  # fmt: skip
        summaries.setdefault(summary.name, summary)
    yield from summaries.values()


def _make_run_name(timing: PhaseTiming, configuration: Configuration, differing_options: Collection[str]) -> str:
    """Returns a name for a run without a capture. It contains the values of the conditions in ``differing_options``."""
    model = configuration.model.name if configuration.model else timing.model or "unknown model"
    details = (
        f"b{configuration.batch_size}" if configuration.batch_size else "",
        *(configuration.precision, configuration.mode),
        *("compiled" if timing.run.compile else "", "cuda-graph" if timing.run.cuda_graph else ""),
        *(text for name, text in timing.cells if name in differing_options),
    )
    return "_".join([f"{model}_ctx{configuration.context_length or '?'}", *filter(None, details)])


def _is_of_another_run(row: PhaseTiming, captures: Sequence[CaptureSummary]) -> bool:
    """Returns whether a row of times has a model, and no capture has the row's model and configuration."""
    names = ("context_length", "batch_size", "precision", "mode")
    for configuration in (capture.configuration or Configuration() for capture in captures):
        pairs = [(getattr(row.configuration, name), getattr(configuration, name)) for name in names]
        differs = any(of_row != of_capture for of_row, of_capture in pairs if None not in (of_row, of_capture))
        if not row.model or (configuration.model == row.configuration.model and not differs):
            return False
    return True
