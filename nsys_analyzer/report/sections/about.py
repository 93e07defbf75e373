"""What a report's figures rest on: conditions, the attribution check, warnings, names, how it was made, a glossary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nsys_analyzer.analysis.kernels.classes import known_classes
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Coverage
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.analysis.transformer.peaks import GPU_BOUND, IDLE
from nsys_analyzer.configuration import OPTIONS, Option
from nsys_analyzer.report.evidence import Evidence, kernel_word, shortened, status_of
from nsys_analyzer.report.model import Block, Details, Field, Listing, Paragraph, Section, make_table
from nsys_analyzer.report.units import format_percent, rounded_percent
from nsys_analyzer.text import StrOrText, code, emphasis, join_texts, phrase, plural


def about(evidence: Evidence) -> Section:
    """Everything below the answers, folded."""
    told = tuple(phrase("**{}** {}", f"{', '.join(of)}:", text) for text, of in warnings_of(evidence).items())
    parts: tuple[tuple[str, tuple[Block, ...]], ...] = (
        ("Conditions", tuple(_conditions(evidence))),
        (f"{kernel_word(*evidence.captures).capitalize()} attribution check", tuple(_attribution(evidence))),
        (count_of_warnings(evidence), (Listing(told),) if told else ()),
        ("Full kernel names", tuple(_names(evidence))),
        ("How this report was made", tuple(_how_made(evidence))),
        ("Glossary", (Listing(tuple(_glossary(evidence))),)),
    )
    return Section("about", "About", tuple(Details(title, blocks) for title, blocks in parts if blocks))


# --- conditions

_CAPTURE: Field[CaptureSummary] = Field("capture", "text", lambda c: c.title)
_CAPTURES: tuple[Field[CaptureSummary], ...] = (
    _CAPTURE,
    Field("model", "text", lambda c: model.name if (model := _configuration(c).model) else None),
    Field("context", "count", lambda c: _configuration(c).context_length),
    Field("batch", "count", lambda c: _configuration(c).batch_size),
    Field("status", "text", lambda c: _status(c)),
    Field("steps", "count", lambda c: _steps(c)),
    Field("kernels", "count", lambda c: c.coverage.kernels if c.coverage else None),
    Field("model known from", "text", lambda c: c.configuration.source if c.configuration else None),
)
_MACHINES: tuple[Field[CaptureSummary], ...] = (
    _CAPTURE,
    Field("GPU", "text", lambda c: "none (CPU)" if c.on_cpu else c.gpu or (c.run.gpu if c.run else None)),
    Field("memory", "bytes", lambda c: c.conditions.gpu_memory_bytes if c.conditions else None),
    Field("driver", "text", lambda c: c.conditions.driver if c.conditions else None),
    Field("CUDA or HIP", "text", lambda c: c.conditions.runtime if c.conditions else None),
    Field("profiler", "text", lambda c: f"{c.profiler} {c.profiler_version}" if c.profiler else None),
    Field("torch", "text", lambda c: c.run.torch if c.run else None),
    Field("matmul precision", "text", lambda c: _precision(c)),
)


def _asked(option: Option) -> Field[CaptureSummary]:
    def said(capture: CaptureSummary) -> str | None:
        value = getattr(capture.run, option.name, None)
        return ("no", "yes")[value] if isinstance(value, bool) else None if value is None else str(value)

    return Field(option.column or option.name, "text", said)


_ASKED = (_CAPTURE, *(_asked(option) for option in OPTIONS.values() if option.column != ""))


def _conditions(evidence: Evidence) -> Iterator[Block]:
    """What was captured, where, how, and what the runs were asked for."""
    yield make_table(_CAPTURES, evidence.captures)
    yield make_table(_MACHINES, evidence.captures)
    unread = sorted({name for c in evidence.captures if c.metadata for name in c.metadata.unread_tables})
    if unread:
        yield Paragraph(phrase("Recorded, and not read: {}.", join_texts(", ", map(code, unread))))
    asked = make_table(_ASKED, evidence.captures, "What was asked for, as each run's manifest says:")
    if asked.rows:
        yield asked


def _configuration(capture: CaptureSummary) -> Configuration:
    return capture.configuration or Configuration()


def _status(capture: CaptureSummary) -> str:
    """The status, with what the run said of it; why a file could not be read stands in the warnings."""
    unreadable = capture.status == "failed" and capture.message in capture.warnings
    return status_of(capture.status, "" if unreadable else capture.message or "")


def _steps(capture: CaptureSummary) -> int | None:
    """Measured steps: those that were found; untraced, what the run says."""
    if capture.step and not capture.step.is_pass:
        return capture.step.instances
    return capture.run.steps if capture.run and capture.status == "not_profiled" else None


def _precision(capture: CaptureSummary) -> str | None:
    known = {name: share for name, share in capture.precisions.items() if name != "unknown"}
    total = sum(known.values())
    named = (name if len(known) == 1 else f"{name} {format_percent(share / total)}" for name, share in known.items())
    return ", ".join(named) or None


# --- the attribution check

#: A capture's title and its coverage.
_Covered = tuple[str, Coverage]
_COUNTS: tuple[Field[_Covered], ...] = (
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
_SUM = phrase(
    "The columns after the first add up to it: each kernel counts once. *Same thread*: launched inside a range of its "
    "own thread; *other thread*: by a thread that takes over the ranges of the thread that waits for it, as PyTorch's "
    "autograd threads do; *graph*: by the replay of a CUDA graph inside a range. *Warm-up*: kernels of warm-up, which "
    "are left out of all figures. *Dropped*: launches whose kernel is not in the capture."
)


def _attribution(evidence: Evidence) -> Iterator[Block]:
    """Attributed + unattributed = all, in count and in time."""
    covered = [(capture.title, capture.coverage) for capture in evidence.captures if capture.coverage]
    if covered:
        yield make_table(_COUNTS, covered)
        yield Paragraph(_SUM)


# --- warnings


def warnings_of(evidence: Evidence) -> dict[StrOrText, list[str]]:
    """Every warning once, with the captures that it is of; a message that a table shortened is among them."""
    captures_of: dict[StrOrText, list[str]] = {}
    for capture in evidence.captures:
        message = capture.message or ""
        cut = [" ".join(message.split())] if shortened(message) != message else []
        for warning in dict.fromkeys((*capture.warnings, *cut)):
            captures_of.setdefault(warning, []).append(capture.title)
    for note in evidence.notes:
        captures_of.setdefault(note, []).append(evidence.timings)
    return captures_of


def count_of_warnings(evidence: Evidence) -> str:
    """The number of warnings, as every command and the report say it."""
    count = len(warnings_of(evidence))
    return f"{count} {plural(count, 'warning')}"


# --- names


def _names(evidence: Evidence) -> Iterator[Block]:
    """The full name behind every short label."""
    classes: dict[str, set[str]] = {}
    for row in evidence.kernel_rows:
        classes.setdefault(row.name, set()).add(row.kernel_class)
    cut = {name: label for name, label in evidence.labels.items() if label != name}
    # No table: its columns would be as wide as the longest name, and a line of a list breaks anywhere.
    if cut:
        ordered = sorted(cut, key=lambda name: cut[name])
        yield Listing(
            tuple(phrase("`{}` ({}): `{}`", cut[one], ", ".join(sorted(classes[one])), one) for one in ordered)
        )


# --- how it was made


def _how_made(evidence: Evidence) -> Iterator[Block]:
    """The commands that were run, where they are known, and the command of this report."""
    ran = dict.fromkeys(c.run.run for c in evidence.captures if c.run and c.run.run)
    own = [(c.title, c.run.profile_command or c.run.command) for c in evidence.captures if c.run and c.metadata]
    parts = [("# the captures and their timings", *ran)] if ran else []
    parts += [(f"# the capture {title}", command) for title, command in own[:1] if command]
    parts += [("# this report", evidence.command)] if evidence.command and evidence.command not in ran else []
    if lines := tuple(line for part in parts for line in ("", *part))[1:]:
        yield Listing(lines, "commands")


# --- the glossary


def _glossary(evidence: Evidence) -> Iterator[StrOrText]:
    """What the words and columns of the report mean, those that it has, and the classes of kernels that there are."""
    measured = [capture for capture in evidence.captures if capture.whole]
    parts = (
        (True, _TERMS),
        (any(not c.on_cpu for c in measured), _GPU_TERMS),
        (any(c.on_cpu for c in measured), _CPU_TERMS),
        (any(c.limits and (c.limits.phases or c.limits.classes) for c in measured), _LIMIT_TERMS),
        (any(c.attention for c in measured), _ATTENTION_TERMS),
    )
    for term, meaning in (pair for held, terms in parts if held for pair in terms.items()):
        yield join_texts("", (emphasis(term), f": {meaning}"))
    classes: Mapping[str, None] = dict.fromkeys(row.kernel_class for row in evidence.kernel_rows)
    for name, meaning in known_classes().items():
        if name in classes:
            yield join_texts("", (emphasis(name), f" (class): {meaning}"))


_TERMS = {
    "step": "one pass of the program's loop; its length is the median from the start of one to the start of the next.",
    "unprofiled": "timed without a profiler, with the GPU's work inside; estimated is what a replay of the recorded "
    "steps takes without the profiler's cost.",
    "profiled": "the length of the range under the profiler. Times of phases are medians of the measured instances, "
    "figures of kernels are means; warm-up is left out.",
    "saves": "what a step would be shorter by if this alone were changed, and no profiler ran. The recorded steps are "
    "replayed without the profiler's cost, as they are and with the change. The two numbers rest on the least and the "
    "most that the change may save and that the profiler may cost. Savings overlap: they must not be added.",
}
_GPU_TERMS = {
    "GPU busy": "the time in which at least one GPU operation (kernel, copy, fill) runs.",
    "GPU span": "from the start of the phase's first GPU operation to the end of its last one.",
    "total kernel time": "the sum of all kernel durations; more than GPU busy where kernels overlap.",
    "compute, exposed, idle": "a kernel other than a collective, or a fill, runs; a copy or a collective runs and "
    "nothing computes; nothing runs.",
    "launching, short pauses": "the GPU has no work left while the program launches the next operation; pauses of "
    "about 1 µs between two operations that are both launched count here, too.",
    "other CPU work": "the program makes no CUDA call for 0.1 ms or longer.",
    "verdict": f"GPU-bound: busy for {rounded_percent(GPU_BOUND)} or more of the time; GPU waits: idle for "
    f"{rounded_percent(IDLE)} or more of it; neither; or undecided, where times under the profiler leave it open.",
}
_CPU_TERMS = {
    "operators": "PyTorch's operators on the CPU, each by its own time without the operators that it calls.",
    "operators busy": "the time in which operators compute on the CPU; the rest is Python's and PyTorch's own.",
    "operator span": "from the start of the phase's first operator to the end of its last one.",
}
_LIMIT_TERMS = {
    "MFU": "the model's FLOPs ÷ time ÷ peak of the precisions of its matmuls, each by its time. One forward pass is "
    "8·B·S·d²·L of projections, 4·B·S²·d·L of attention, 6·B·S·d·d_ff·L of feed-forward and 2·B·S·d·V of the "
    "head; backward is twice that. Where a run counted FLOPs, they are PyTorch's: a matmul of (m, k) and (k, n) is "
    "2·m·k·n. Work beyond the model's (a recomputed forward) makes rates too low; a causal kernel that does half "
    "of S × S, too high.",
    "B/s, FLOP per byte": "by the least bytes, counted and not measured: each matmul reads both operands once and "
    "writes its result once; fused attention reads Q, K and V and writes its result; a copy on the device reads and "
    "writes each byte. B/s is a lower bound, FLOP per byte an upper one.",
}
_ATTENTION_TERMS = {
    "softmax, matmul (of attention)": "all kernels launched inside the softmax ranges (max, subtract, exp, sum, "
    "divide), or those named softmax where there is no such range; the matmul kernels inside the attention ranges. "
    "FLOPs: 5·B·H·S²·L of softmax, 4·B·S²·d·L of the matmuls; their ratio is 4·d_head ÷ 5.",
}
