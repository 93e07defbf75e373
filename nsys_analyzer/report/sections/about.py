"""Reports the basis of the figures: conditions, the attribution check, warnings, names, commands, and a glossary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nsys_analyzer.analysis.kernels.classes import known_classes
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Coverage
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.analysis.transformer.peaks import GPU_BOUND_SHARE, IDLE_SHARE
from nsys_analyzer.configuration import OPTIONS, Option
from nsys_analyzer.report.evidence import Evidence, format_status, kernel_word, shorten_message
from nsys_analyzer.report.facts import describe_message, say_all
from nsys_analyzer.report.model import Block, Details, Field, Listing, Paragraph, Section, make_table
from nsys_analyzer.report.units import format_percent, rounded_percent
from nsys_analyzer.text import StrOrText, code, emphasis, join_texts, phrase, plural


def about_section(evidence: Evidence) -> Section:
    """Returns the section “About”, which follows the answers. Its parts are folded."""
    warnings = tuple(
        phrase("**{}** {}", f"{', '.join(titles)}:", warning) for warning, titles in collect_warnings(evidence).items()
    )
    coverages = [(capture.title, capture.coverage) for capture in evidence.captures if capture.coverage]
    attribution = (make_table(_ATTRIBUTION_FIELDS, coverages), Paragraph(_ATTRIBUTION_LEGEND)) if coverages else ()
    parts: tuple[tuple[str, tuple[Block, ...]], ...] = (
        ("Conditions", tuple(_tabulate_conditions(evidence))),
        (f"{kernel_word(*evidence.captures).capitalize()} attribution check", attribution),
        (format_warning_count(evidence), (Listing(warnings),) if warnings else ()),
        ("Full kernel names", tuple(_list_kernel_names(evidence))),
        ("How this report was made", tuple(_list_commands(evidence))),
        ("Glossary", (Listing(tuple(_list_terms(evidence))),)),
    )
    return Section("about", "About", tuple(Details(title, blocks) for title, blocks in parts if blocks))


# --- conditions

_CAPTURE_FIELD: Field[CaptureSummary] = Field("capture", "text", lambda capture: capture.title)
_CAPTURE_FIELDS: tuple[Field[CaptureSummary], ...] = (
    _CAPTURE_FIELD,
    Field("model", "text", lambda capture: model.name if (model := _get_configuration(capture).model) else None),
    Field("context", "count", lambda capture: _get_configuration(capture).context_length),
    Field("batch", "count", lambda capture: _get_configuration(capture).batch_size),
    Field("status", "text", lambda capture: _format_status(capture)),
    Field("steps", "count", lambda capture: _count_steps(capture)),
    Field("kernels", "count", lambda capture: capture.coverage.kernels if capture.coverage else None),
    Field("model known from", "text", lambda capture: capture.configuration.source if capture.configuration else None),
)
_MACHINE_FIELDS: tuple[Field[CaptureSummary], ...] = (
    _CAPTURE_FIELD,
    Field("GPU", "text", lambda capture: _name_gpu(capture)),
    Field("memory", "bytes", lambda capture: capture.conditions.gpu_memory_bytes if capture.conditions else None),
    Field("driver", "text", lambda capture: capture.conditions.driver if capture.conditions else None),
    Field("CUDA or HIP", "text", lambda capture: capture.conditions.runtime if capture.conditions else None),
    Field("profiler", "text", lambda capture: capture.profiler and f"{capture.profiler} {capture.profiler_version}"),
    Field("torch", "text", lambda capture: capture.run.torch if capture.run else None),
    Field("matmul precision", "text", lambda capture: _format_precisions(capture)),
)


def _make_option_field(option: Option) -> Field[CaptureSummary]:
    def read_option_cell(capture: CaptureSummary) -> str | None:
        """Returns the value that the option had in the run of a capture."""
        value = getattr(capture.run, option.name, None)
        return ("no", "yes")[value] if isinstance(value, bool) else None if value is None else str(value)

    return Field(option.column or option.name, "text", read_option_cell)


_OPTION_FIELDS = (_CAPTURE_FIELD, *(_make_option_field(option) for option in OPTIONS.values() if option.column != ""))


def _tabulate_conditions(evidence: Evidence) -> Iterator[Block]:
    """Yields tables of what was captured, on which machine, and with which options."""
    yield make_table(_CAPTURE_FIELDS, evidence.captures)
    yield make_table(_MACHINE_FIELDS, evidence.captures)
    metadata = [capture.metadata for capture in evidence.captures if capture.metadata]
    if unread_tables := sorted({name for recording in metadata for name in recording.unread_tables}):
        tables = join_texts(", ", map(code, unread_tables))
        yield Paragraph(phrase("nsys-analyze does not read these tables of the captures: {}.", tables))
    options = make_table(_OPTION_FIELDS, evidence.captures, "The options of each run, from its manifest:")
    if options.rows:
        yield options


def _get_configuration(capture: CaptureSummary) -> Configuration:
    return capture.configuration or Configuration()


def _format_status(capture: CaptureSummary) -> str:
    """Returns the status with the run's message. The warnings say why a file cannot be read."""
    message = describe_message(capture)
    is_unreadable = capture.status == "failed" and message in say_all(capture.warnings)
    return format_status(capture.status, "" if is_unreadable else message)


def _count_steps(capture: CaptureSummary) -> int | None:
    """Returns the number of measured steps, from the capture or, without a trace, from the run's manifest."""
    if capture.step and not capture.step.is_pass:
        return capture.step.instances
    return capture.run.steps if capture.run and capture.status == "not_profiled" else None


def _name_gpu(capture: CaptureSummary) -> str | None:
    if capture.on_cpu:
        return "none (CPU)"
    return capture.gpu or (capture.run.gpu if capture.run else None)


def _format_precisions(capture: CaptureSummary) -> str | None:
    shares = {name: share for name, share in capture.precisions.items() if name != "unknown"}
    if len(shares) < 2:
        return next(iter(shares), None)
    total = sum(shares.values())
    return ", ".join(f"{name} {format_percent(share / total)}" for name, share in shares.items())


# --- the attribution check

#: A capture's title and its coverage.
_CoverageRow = tuple[str, Coverage]
_ATTRIBUTION_FIELDS: tuple[Field[_CoverageRow], ...] = (
    Field("capture", "text", lambda row: row[0]),
    Field("all", "count", lambda row: row[1].kernels),
    Field("same thread", "count", lambda row: row[1].how["same thread"]),
    Field("other thread", "count", lambda row: row[1].how["other thread"]),
    Field("graph", "count", lambda row: row[1].how["graph"], fills=bool),
    Field("no range", "count", lambda row: row[1].unattributed),
    Field("no range ms", "ms", lambda row: row[1].unattributed_ms, fills=bool),
    Field("warm-up", "count", lambda row: row[1].in_warmup, fills=bool),
    Field("dropped", "count", lambda row: row[1].lost_launches, fills=bool),
)
_ATTRIBUTION_LEGEND = phrase(
    "Each kernel counts once, so *same thread*, *other thread*, *graph* and *no range* add up to *all*. A *same "
    "thread* kernel was launched inside a range of the launching thread. An *other thread* kernel was launched by a "
    "thread that inherits the ranges of the thread waiting for it, as PyTorch's autograd threads do. A *graph* kernel "
    "was launched by the replay of a CUDA graph inside a range. A *warm-up* kernel was launched in warm-up, and no "
    "figure includes it. A *dropped* launch has no kernel in the capture."
)


# --- warnings


def collect_warnings(evidence: Evidence) -> dict[StrOrText, list[str]]:
    """Returns each warning with the titles of its captures, including messages that a table shortened."""
    titles: dict[StrOrText, list[str]] = {}
    for capture in evidence.captures:
        message = describe_message(capture)
        complete_message = [" ".join(message.split())] if shorten_message(message) != message else []
        for warning in dict.fromkeys((*say_all(capture.warnings), *complete_message)):
            titles.setdefault(warning, []).append(capture.title)
    for note in evidence.notes:
        titles.setdefault(note, []).append(evidence.timings)
    return titles


def format_warning_count(evidence: Evidence) -> str:
    """Returns the number of warnings in words, for commands and the report."""
    count = len(collect_warnings(evidence))
    return f"{count} {plural(count, 'warning')}"


# --- names


def _list_kernel_names(evidence: Evidence) -> Iterator[Block]:
    """Yields a list of the short labels with their full names.

    A table would be as wide as the longest name, whereas the lines of a list break anywhere.
    """
    classes: dict[str, set[str]] = {}
    for row in evidence.kernel_rows:
        classes.setdefault(row.name, set()).add(row.kernel_class)
    names_by_label = sorted((label, name) for name, label in evidence.labels.items() if label != name)
    if names_by_label:
        yield Listing(
            tuple(
                phrase("`{}` ({}): `{}`", label, ", ".join(sorted(classes[name])), name)
                for label, name in names_by_label
            )
        )


# --- how it was made


def _list_commands(evidence: Evidence) -> Iterator[Block]:
    """Yields the commands that made the captures, if they are known, and the command of this report."""
    captures_with_run = [(capture, capture.run) for capture in evidence.captures if capture.run]
    sweeps = dict.fromkeys(run.run for _, run in captures_with_run if run.run)
    own_commands = [
        (capture.title, run.profile_command or run.command) for capture, run in captures_with_run if capture.metadata
    ]
    parts = [("# the captures and their timings", *sweeps)] if sweeps else []
    parts += [(f"# the capture {title}", command) for title, command in own_commands[:1] if command]
    parts += [("# this report", evidence.command)] if evidence.command and evidence.command not in sweeps else []
    if lines := tuple(line for part in parts for line in ("", *part))[1:]:
        yield Listing(lines, "commands")


# --- the glossary


def _list_terms(evidence: Evidence) -> Iterator[StrOrText]:
    """Yields the meanings of the terms, columns and kernel classes that the report uses."""
    measured_captures = [capture for capture in evidence.captures if capture.whole]
    parts = (
        (True, _GENERAL_TERMS),
        (any(not capture.on_cpu for capture in measured_captures), _GPU_TERMS),
        (any(capture.on_cpu for capture in measured_captures), _CPU_TERMS),
        (
            any(capture.limits and (capture.limits.phases or capture.limits.classes) for capture in measured_captures),
            _LIMIT_TERMS,
        ),
        (any(capture.attention for capture in measured_captures), _ATTENTION_TERMS),
    )
    for term, meaning in (pair for is_used, terms in parts if is_used for pair in terms.items()):
        yield join_texts("", (emphasis(term), f": {meaning}"))
    classes: Mapping[str, None] = dict.fromkeys(row.kernel_class for row in evidence.kernel_rows)
    for name, meaning in known_classes().items():
        if name in classes:
            yield join_texts("", (emphasis(name), f" (class): {meaning}"))


_GENERAL_TERMS = {
    "step": "one pass of the program's loop. The length of a step is the median time from its start to the start of "
    "the next step.",
    "unprofiled": "a time that was measured without a profiler and includes the GPU's work. An estimated time comes "
    "from a replay of the recorded steps without the profiler's cost.",
    "profiled": "the length of the range under the profiler. Times of phases are medians of the measured instances, "
    "and figures of kernels are means. No figure includes warm-up.",
    "saving": "the time by which a step becomes shorter if only the cause of one finding is removed and no profiler "
    "runs. It is derived from replays of the recorded steps without the profiler's cost, with this cause and without "
    "it. The two numbers of a saving are a lower and an upper estimate, because the saving and the profiler's cost are "
    "uncertain. Savings overlap and must not be added.",
}
_GPU_TERMS = {
    "GPU busy": "the time in which at least one GPU operation (kernel, copy, fill) runs.",
    "GPU span": "the time from the start of the phase's first GPU operation to the end of its last one.",
    "total kernel time": "the sum of all kernel durations. This sum exceeds GPU busy if kernels overlap.",
    "compute": "the time in which a fill runs, or a kernel that is not a collective.",
    "exposed": "the time in which a copy or a collective runs while nothing computes.",
    "idle": "the time in which nothing runs on the GPU.",
    "launching, short pauses": "idle time while the program launches the next operation. Pauses of about 1 µs between "
    "two launched operations also count as this cause.",
    "other CPU work": "idle time while the program makes no CUDA call for at least 0.1 ms.",
    "verdict": f"“GPU-bound” if the GPU is busy for at least {rounded_percent(GPU_BOUND_SHARE)} of the time, “GPU "
    f"waits” if the GPU is idle for at least {rounded_percent(IDLE_SHARE)} of the time, and “neither” if the idle time "
    "is between these limits. The verdict is “undecided” if times under the profiler cannot show which of these "
    "verdicts holds.",
}
_CPU_TERMS = {
    "operators": "PyTorch's operators on the CPU. The time of an operator leaves out the operators that it calls.",
    "operators busy": "the time in which operators compute on the CPU. The rest is overhead of Python and PyTorch.",
    "operator span": "the time from the start of the phase's first operator to the end of its last one.",
}
_LIMIT_TERMS = {
    "MFU": "model FLOPs utilization: the model's FLOPs ÷ time ÷ peak. The peak is the mean over the precisions of the "
    "matmuls, weighted by time. One forward pass has 8·B·S·d²·L FLOPs of projections, 4·B·S²·d·L of attention, "
    "6·B·S·d·d_ff·L of feed-forward and 2·B·S·d·V of the head. Backward has twice as many FLOPs as forward. "
    "If PyTorch counted the FLOPs of the run, the report uses PyTorch's counts: a matmul of (m, k) and (k, n) has "
    "2·m·k·n FLOPs. Rates are too low if a forward pass is recomputed, and too high if a causal kernel skips "
    "half of the S × S scores.",
    "B/s, FLOP per byte": "rates from a lower bound of the bytes, which are counted and not measured. Each matmul "
    "reads both operands once and writes its result once. Fused attention reads Q, K and V and writes its result. A "
    "copy on the device reads and writes each byte. So B/s is a lower bound, and FLOP per byte is an upper bound.",
}
_ATTENTION_TERMS = {
    "softmax (of attention)": "all kernels launched inside the softmax ranges (max, subtract, exp, sum, divide), or, "
    "without softmax ranges, the kernels named softmax. Softmax has 5·B·H·S²·L FLOPs.",
    "matmul (of attention)": "the matmul kernels launched inside the attention ranges. The attention matmuls have "
    "4·B·S²·d·L FLOPs, which is 4·d_head ÷ 5 times as many as softmax.",
}
