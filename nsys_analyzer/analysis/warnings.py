"""What a reader must know before believing a capture's figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from nsys_analyzer.analysis.instances import AttributedTrace
from nsys_analyzer.analysis.nouns import plural
from nsys_analyzer.analysis.phases import OTHER_STEP, STEP
from nsys_analyzer.analysis.processes import processes_of
from nsys_analyzer.text import code, marked
from nsys_analyzer.trace.arrays import distinct
from nsys_analyzer.trace.columns import UNNAMED, pid_of, process_of
from nsys_analyzer.trace.diagnostics import Diagnostic, first_sentence, meaning, touches_no_figure, why_no_cuda
from nsys_analyzer.trace.ranks import MAKES_COMMUNICATOR

if TYPE_CHECKING:
    from nsys_analyzer.analysis.summary import CaptureSummary
    from nsys_analyzer.trace.trace import Trace

_OR_NAME = marked("or name the ranges there are with `--phase forward=NAME`.")
_REST = f"and the same for backward and optimizer; {_OR_NAME}"
_IN_NVTX = marked('Wrap the parts of the step in NVTX ranges, as in `with torch.cuda.nvtx.range("forward"): ...`')
_IN_TORCH = marked('Wrap the parts of the step, as in `with torch.profiler.record_function("forward"): ...`')
HOW_TO_ANNOTATE = f"{_IN_NVTX}, {_REST}"
_HOW_TO_RECORD = f"{_IN_TORCH}, {_REST}"
_RECORD_BOTH = marked("record with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`")
_MISSING_EVENTS = "events might be missing"
#: A phase below this share of the longest one's GPU time (a loss, as a rule) earns no warning.
_MINOR = 0.02
#: nsys says these of every capture with a capture range; they carry no news.
_ROUTINE = (
    "Not all NVTX events might",
    "Not all CUDA events might",
    "No NVTX events collected",
    "No CUDA events",
)


def capture_warnings(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> tuple[str, ...]:
    """The warnings of one process, the gravest first."""
    checks = (
        _status, _names, _graphs, _launches, _phases, _inferred, _uneven, _part, _steps, _warmup, _threads,
        _synchronisation, _nested, _ambiguous, _devices, _ranks, _precision, _diagnostics,
    )  # fmt: skip
    return tuple(warning for check in checks for warning in check(summary, attributed, process))


def _status(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> Iterator[str]:
    if summary.status == "oom":
        yield "A device allocation failed and nothing was launched afterwards: the process ran out of memory."
    if attributed.trace.metadata.profiler == "torch":
        yield from _missing_of_torch(attributed.trace, summary)
    else:
        yield from _missing_of_nsys(attributed, summary, process)
    for name in attributed.open_phases(process):
        yield f"A range {code(name)} has no end: that occurrence is partial and left out."
    yield from _left_out(attributed, process)
    partial = sum(phase.incomplete_instances for phase in summary.phases)
    if partial:
        yield (
            f"{partial} {plural(partial, 'instance')} of phases left out: kernels that were launched there are "
            "missing or have impossible times, or an allocation failed at the end."
        )


def _left_out(attributed: AttributedTrace, process: int) -> Iterator[str]:
    """The rows of a process whose times cannot be true; the first process tells of those that have no entry."""
    entries = [one.global_pid for one in processes_of(attributed.trace)]
    for one in attributed.trace.left_out:
        if process == (one.process if one.process in entries else entries[0]):
            of = "" if one.process == process else f" of process {pid_of(one.process)}"
            rows = f"{one.rows:,} {plural(one.rows, 'row')}"
            yield f"Left out of every figure: {rows} of {one.table}{of} with {one.why}, such as {one.example}."


def _missing_of_nsys(attributed: AttributedTrace, summary: CaptureSummary, process: int) -> Iterator[str]:
    """The tables that an export of nsys lacks, with the message that says why there is no kernel."""
    trace, kernels = attributed.trace, summary.coverage.kernels if summary.coverage else 0
    if not kernels and not _opaque(summary):
        reason = why_no_cuda(_messages(summary, attributed, process))
        yield (
            f"The capture has no kernel. {_quoted(summary, reason)}"
            if reason
            else marked("The capture has no kernel: capture with `--trace=cuda,nvtx` around steps that run on the GPU.")
        )
    if "nvtx" not in trace.tables:
        yield f"The export has no NVTX table (capture with {code('--trace=cuda,nvtx')}). {HOW_TO_ANNOTATE}"
    if "runtime" not in trace.tables and kernels:
        yield marked("The export has no CUDA API table, so no kernel has a launch: capture with `--trace=cuda`.")


def _missing_of_torch(trace: Trace, summary: CaptureSummary) -> Iterator[str]:
    """The events that a trace of PyTorch's profiler lacks."""
    kernels = summary.coverage.kernels if summary.coverage else 0
    platform = trace.metadata.platform
    if not kernels and not _opaque(summary):
        yield "The trace has no kernel: record steps that run on the device."
    if trace.metadata.ranges_on_gpu:
        yield (
            "The trace holds events of the GPU alone, so kernels are placed by GPU time: each belongs to the ranges "
            "open on its stream when it starts, and a range's wall time is its span on the GPU."
        )
    elif "runtime" not in trace.tables and kernels:
        yield f"The trace has no {platform} API calls, so no kernel has a launch: {_RECORD_BOTH}."
    if "nvtx" not in trace.tables:
        yield (f"The trace has no ranges: {_RECORD_BOTH}. {_HOW_TO_RECORD}")


def _opaque(summary: CaptureSummary) -> bool:
    return bool(summary.whole and summary.whole.opaque)


def _names(summary: CaptureSummary, *_: object) -> Iterator[str]:
    """The kernels whose names the file does not hold."""
    whole = summary.whole
    unnamed = [row for row in whole.kernels if row.name.startswith(UNNAMED)] if whole else []
    if unnamed:
        share = sum(row.share for row in unnamed)
        yield (
            f"The capture does not hold the names of {len(unnamed):,} {plural(len(unnamed), 'kernel')} "
            f"({share:.1%} of the kernel time): which class they are of is not known. Export the report again."
        )


def _graphs(summary: CaptureSummary, *_: object) -> Iterator[str]:
    if summary.whole and _opaque(summary):
        replays = sum(row.operations_per_instance for row in summary.whole.memory if row.kind == "graph")
        yield (
            f"{replays:,.0f} CUDA graph replays are opaque: their time counts as GPU busy, their kernels are unknown. "
            f"Capture with {code('--cuda-graph-trace=node')} to see them."
        )


def _launches(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> Iterator[str]:
    del process
    coverage = summary.coverage
    if coverage and coverage.without_launch and not attributed.trace.metadata.ranges_on_gpu:
        yield f"{coverage.without_launch:,} kernels have no launch row and stay unattributed."
    if coverage and coverage.lost_launches:
        yield (
            f"Of {coverage.lost_launches:,} kernel {plural(coverage.lost_launches, 'launch')} there is no kernel: "
            "activity records were dropped or cut off."
        )


def _phases(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> Iterator[str]:
    del process
    known = set(attributed.trace.ranges.names)
    for key, names in attributed.roles.names.extra.items():
        for name in names:
            if name not in known:
                yield f"No range is called {code(name)}, which was to be {key}."
    if "nvtx" in attributed.trace.tables and not summary.phases:
        ranges = attributed.trace.ranges
        count = np.bincount(ranges.name, minlength=1)
        named = ", ".join(code(ranges.names[i]) for i in np.argsort(-count, kind="stable")[:5] if count[i])
        found = f" The ranges seen most are {named}." if named else ""
        how = _HOW_TO_RECORD if attributed.trace.metadata.profiler == "torch" else HOW_TO_ANNOTATE
        yield f"No range names a phase.{found} {how}"
    for phase in summary.phases:
        if phase.instances and not phase.kernels_per_instance and not phase.memory and summary.status == "ok":
            none = "No operator ran" if summary.on_cpu else "No GPU operation was launched"
            yield f"{none} inside {code(phase.range)} ({phase.phase})."
        if not phase.instances and phase.warmup_instances:
            yield f"Every {phase.phase} lies inside warm-up: nothing was measured of it."


def _inferred(summary: CaptureSummary, *_: object) -> Iterator[str]:
    leaves = [phase for phase in summary.phases if phase.phase not in (STEP, OTHER_STEP)]
    if leaves and all(phase.inferred for phase in leaves):
        ranges = ", ".join(code(phase.range) for phase in leaves)
        yield f"No range of the program's own names a phase. Used instead: {ranges}."


def _uneven(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> Iterator[str]:
    """What the instances of a phase may hold besides it."""
    for phase in summary.phases:
        if phase.uneven and phase.phase not in (STEP, OTHER_STEP):
            yield (
                f"The inferred {phase.phase} launches {phase.kernels_least:,} to {phase.kernels_most:,} kernels: some "
                "instances may hold other work, such as an evaluation. Every question is answered for the whole "
                "capture, too; ranges of your own tell the parts apart."
            )
    around = attributed.around_warmup(process)
    if around:
        yield (
            f"A warm-up range lies inside {', '.join(around)}: what was launched in it is left out, and the wall time "
            "holds it."
        )


def _part(summary: CaptureSummary, *_: object) -> Iterator[str]:
    """The time that phases, and warm-up, leave out."""
    leaves = [phase.phase for phase in summary.phases if phase.instances and phase.phase not in (STEP, OTHER_STEP)]
    told = any(phase.uneven for phase in summary.phases)
    if leaves and not summary.phases_suffice and not told and summary.share_in_phases is not None:
        tenths = math.floor(summary.share_in_phases * 1000) / 10  # 89.99 % is not 90
        time = "operators' time" if summary.on_cpu else "GPU time (kernels, copies and fills)"
        yield (
            f"The phases found ({', '.join(leaves)}) hold {tenths:.1f} % of the {time}"
            f"{'' if summary.phase('forward') else ', and no forward is among them'}: every question is answered for "
            "the whole capture, too."
        )
    coverage = summary.coverage
    if coverage and coverage.in_warmup:
        yield (
            f"Launched in warm-up and left out: {coverage.in_warmup:,} {plural(coverage.in_warmup, 'kernel')}, "
            f"{coverage.warmup_ms:,.2f} of {coverage.kernel_ms:,.2f} ms."
        )


def _steps(summary: CaptureSummary, *_: object) -> Iterator[str]:
    other, step, backward = (summary.phase(name) for name in (OTHER_STEP, STEP, "backward"))
    if other:
        yield (
            f"{other.instances:,} {plural(other.instances, 'step')} without a backward pass, as in evaluation, kept "
            "apart from the others."
        )
    if step and backward and not step.holds_backward:
        yield (
            f"The {code(step.range)} ranges hold no backward pass, so the training step is taken as the sum of its "
            f"phases. If they are the optimizer's, say {code(f'--phase optimizer={step.range}')}."
        )


def _warmup(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> Iterator[str]:
    del summary
    if attributed.open_warmups(process):
        yield "A warm-up range has no end: everything after its start counts as warm-up."


def _threads(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> Iterator[str]:
    del summary
    crowded = attributed.concurrent_phases(process)
    if crowded and attributed.trace.metadata.ranges_on_gpu:
        yield f"Several streams have {', '.join(crowded)} open at once; each stream's occurrence counts as an instance."
    elif crowded:
        yield (
            f"Several threads have {', '.join(crowded)} open at once; each thread's occurrence counts as an instance. "
            f"If they work on one pass together, name the range around them alone, with {code('--phase')}."
        )


def _devices(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> Iterator[str]:
    del summary
    operations = attributed.trace.operations
    devices = distinct(operations.device[operations.process == process]).tolist()
    if len(devices) > 1:
        yield (
            f"The process uses {len(devices)} GPUs (devices {', '.join(map(str, devices))}): GPU busy is the time in "
            "which any of them works, and the GPU named is the first."
        )


def _ranks(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> Iterator[str]:
    del process
    names = attributed.trace.ranges.names
    if summary.rank is None and any(name.startswith(MAKES_COMMUNICATOR) for name in names):
        yield marked(
            "The export does not tell the rank, which NCCL notes when it makes a communicator: "
            "export the report again with `nsys export --type sqlite --include-blobs=true`."
        )


def _synchronisation(summary: CaptureSummary, *_: object) -> Iterator[str]:
    busy = max((p.gpu_busy_ms.mean or 0.0 for p in summary.phases), default=0.0)
    running = [p.phase for p in summary.phases if not p.synchronized and (p.gpu_busy_ms.mean or 0.0) > busy * _MINOR]
    if running:
        yield (
            f"GPU work of {', '.join(running)} ends after the range does: nothing synchronises there, so wall time "
            "is what the CPU took to launch it, and wall minus busy is no idle time."
        )


def _nested(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> Iterator[str]:
    del summary
    for (inner, outer), count in attributed.nested_phases(process).items():
        yield f"{count:,} {code(inner)} ranges lie inside {code(outer)} and are counted there."


def _ambiguous(summary: CaptureSummary, *_: object) -> Iterator[str]:
    if summary.coverage and summary.coverage.ambiguous:
        yield (
            f"{summary.coverage.ambiguous:,} kernels were launched from threads without ranges while several threads "
            "had phases open: they went to the one in backward, else to the one opened last."
        )


def _precision(summary: CaptureSummary, *_: object) -> Iterator[str]:
    wanted = summary.configuration.precision if summary.configuration else None
    tf32 = summary.precisions.get("tf32", 0.0)
    if wanted == "fp32" and tf32:
        yield f"The configuration says fp32, but {tf32:.0%} of the product time ran as tf32."


def _diagnostics(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> Iterator[str]:
    """The profiler's messages that concern the figures of this process and have not been quoted."""
    messages = _messages(summary, attributed, process)
    told = None if summary.coverage and summary.coverage.kernels else why_no_cuda(messages)
    for message in {(one.severity, one.text): one for one in messages}.values():
        news = _MISSING_EVENTS in message.text or (message.severity in (2, 3) and not message.text.startswith(_ROUTINE))
        if news and not touches_no_figure(message.text) and (told is None or message.text != told.text):
            yield _quoted(summary, message)


def _quoted(summary: CaptureSummary, message: Diagnostic) -> str:
    """A message in the profiler's words, and what it means where there is no kernel."""
    profiler = summary.metadata.profiler if summary.metadata else "profiler"
    means = "" if summary.coverage and summary.coverage.kernels else meaning(message.text)
    return f"{profiler}: {first_sentence(message.text)} {means}".rstrip()


def _messages(summary: CaptureSummary, attributed: AttributedTrace, process: int) -> list[Diagnostic]:
    """The profiler's messages about this process, or about none that has a report or did nothing."""
    elsewhere = _is_elsewhere(attributed.trace, process)
    return [m for m in (summary.metadata.diagnostics if summary.metadata else ()) if not elsewhere(m.process)]


def _is_elsewhere(trace: Trace, process: int) -> Callable[[int], bool]:
    """Whether a message's process is another one: one with an entry of its own, or one that nothing was seen of.

    torch.compile's workers are such: nsys follows them, and finds that they use no GPU.
    """
    measured = set(distinct(trace.operations.process).tolist())
    threads = np.concatenate([trace.launches.thread, trace.ranges.thread, trace.open_ranges.thread])
    seen = set(distinct(process_of(threads)).tolist())

    def elsewhere(other: int) -> bool:
        about_none = not pid_of(other) or not measured
        return other != process and not about_none and (other in measured or other not in seen)

    return elsewhere
