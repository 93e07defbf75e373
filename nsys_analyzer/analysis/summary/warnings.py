"""The warnings of a capture: the facts that limit what its figures mean."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.analysis.ranges.instances import AttributedTrace, find_repeating_ranges
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Coverage
from nsys_analyzer.text import NO_BREAK_SPACE, StrOrText, code, join_texts, phrase, plural, rounded, rounded_percent
from nsys_analyzer.trace.arrays import distinct
from nsys_analyzer.trace.columns import UNNAMED_KERNEL, pid_of, process_of
from nsys_analyzer.trace.metadata import (
    Diagnostic,
    explain_message,
    find_missing_cuda_message,
    first_sentence,
    is_irrelevant_message,
)
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP
from nsys_analyzer.trace.ranks import INIT_COMMUNICATOR
from nsys_analyzer.trace.trace import Trace

_HOW_TO = (
    "Wrap the parts of the step, as in `with {}: ...`, or name the ranges there are with `--phase-name forward=NAME`."
)
_HOW_TO_ANNOTATE = phrase(_HOW_TO, 'torch.cuda.nvtx.range("forward")')
_HOW_TO_RECORD = phrase(_HOW_TO, 'torch.profiler.record_function("forward")')
_HOW_TO_NAME_STEPS = phrase(
    "Put a range around each pass of the loop (`nvtxRangePush`, `nvtxRangePop`), or name the range there is with "
    "`--step NAME`."
)
_RECORD_BOTH = phrase("record with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`")
#: A phase below this share of the longest one's GPU time (a loss, as a rule) earns no warning.
_MINOR = 0.02
#: Steps that are left out get a warning if they are at least this share of all steps.
_SHARE_OF_UNLIKE_STEPS = 0.25
#: nsys says these of every capture with a capture range.
_ROUTINE = ("Not all NVTX events might", "Not all CUDA events might", "No NVTX events collected", "No CUDA events")


def capture_warnings(
    summary: CaptureSummary, coverage: Coverage, attributed: AttributedTrace, process: int
) -> tuple[StrOrText, ...]:
    """The warnings of one process, by its global ID, the gravest first."""
    checks = _Checks(summary, coverage, attributed, process)
    in_order = (
        checks.missing, checks.left_out, checks.kernels, checks.names, checks.phases, checks.inferred, checks.shares,
        checks.steps, checks.concurrency, checks.attribution, checks.machine, checks.diagnostics,
    )  # fmt: skip
    return tuple(warning for check in in_order for warning in check())


class _Checks:
    """The checks of one process, each of which yields its warnings; the arguments are ``capture_warnings``'."""

    def __init__(self, summary: CaptureSummary, coverage: Coverage, attributed: AttributedTrace, process: int) -> None:
        self.summary, self.coverage, self.attributed, self.process = summary, coverage, attributed, process
        self.trace, self.whole = attributed.trace, summary.whole
        self.leaves = summary.leaf_phases
        self.messages = _messages(self.trace, process)
        by_torch, how = self.trace.metadata.profiler == "torch", _HOW_TO_ANNOTATE
        self.how_to_name = _HOW_TO_RECORD if by_torch else how if summary.holds_model else _HOW_TO_NAME_STEPS

    def missing(self) -> Iterator[StrOrText]:
        """Yields what the trace lacks: a current export, tables, events; if it has no kernel, the reason for that."""
        if old := self.trace.stale_export:
            yield phrase(
                "`{}` is older than `{}`, and there is no nsys here to export it again: the figures are those of the "
                "older file, which may be of an earlier recording.", old, self.trace.path.name,
            )  # fmt: skip
        if self.summary.status == "oom":
            yield f"The process ran out of memory: {self.summary.message}"
        has_ranges, has_calls = "nvtx" in self.trace.tables, "runtime" in self.trace.tables or not self.coverage.kernels
        if self.trace.metadata.profiler == "torch":
            yield from self._missing_in_torch(has_ranges, has_calls)
            return
        reason = find_missing_cuda_message(self.messages)
        if self.summary.has_no_kernel:
            how = phrase("Capture with `--trace=cuda,nvtx` around steps that run on the GPU.")
            yield phrase("The capture has no kernel. {}", self._quoted(reason) if reason else how)
        if not has_ranges:
            yield phrase("The export has no NVTX table (capture with `--trace=cuda,nvtx`). {}", self.how_to_name)
        if not has_calls:
            yield phrase("The export has no CUDA API table, so no kernel has a launch: capture with `--trace=cuda`.")

    def _missing_in_torch(self, has_ranges: bool, has_calls: bool) -> Iterator[StrOrText]:
        has_both = len(self.trace.operators) and self.coverage.kernels
        how = "" if has_both else phrase(": {}", _RECORD_BOTH)
        if self.summary.has_no_kernel and not self.coverage.lost_launches:
            yield "The trace has no kernel: record steps that run on the device."
        if not has_calls:
            platform = self.trace.metadata.platform
            yield phrase("The trace has no {} API calls, so no kernel has a launch{}.", platform, how)
        if not has_ranges:
            yield phrase("The trace has no ranges of the program's own{}. {}", how, _HOW_TO_RECORD)

    def left_out(self) -> Iterator[StrOrText]:
        """Ranges and rows that count in no figure; the first process reports the rows of those without an entry."""
        for name in self.attributed.find_open_phases(self.process):
            yield phrase(
                "A range `{}` has no end, or one behind the next start: that occurrence is partial and left out.", name
            )
        entries = [one.global_pid for one in find_processes(self.trace)] if self.trace.left_out else []
        for one in self.trace.left_out:
            if self.process == (one.process if one.process in entries else entries[0]):
                of = "" if one.process == self.process else f" of process {pid_of(one.process)}"
                rows = f"{one.rows:,} {plural(one.rows, 'row')} of {one.table}{of}"
                how = "Counted without a duration" if one.only_end_excluded else "Left out of every figure"
                how = "Counted until that start" if one.is_shortened else how
                yield phrase("{}: {} with {}, such as {}.", how, rows, one.reason, one.example)
        partial = sum(phase.incomplete_instances for phase in self.summary.phases)
        if partial:
            instances = f"{partial} {plural(partial, 'instance')} of phases"
            yield f"{instances} left out: kernels are missing or have impossible times, or an allocation failed."

    def kernels(self) -> Iterator[StrOrText]:
        """The kernels without a name, those that an opaque graph hides, and those without a launch or without a row."""
        rows = self.whole.kernels if self.whole else ()
        unnamed = [row.share for row in rows if row.name.startswith(UNNAMED_KERNEL)]
        if unnamed:
            yield (
                f"The capture does not hold the names of {len(unnamed):,} {plural(len(unnamed), 'kernel')} "
                f"({rounded_percent(sum(unnamed), 1)} of the kernel time), so their class is unknown. Export the "
                "report again."
            )
        if self.whole and self.whole.opaque:
            replays = sum(row.operations_per_instance for row in self.whole.memory if row.kind == "graph")
            opaque = f"{replays:,.0f} CUDA graph replays are opaque: GPU busy holds their time, no table their kernels."
            yield phrase("{} Capture with `--cuda-graph-trace=node` to see them.", opaque)
        coverage = self.coverage
        if coverage.without_launch:
            yield f"{coverage.without_launch:,} kernels have no launch row and stay unattributed."
        if coverage.lost_launches:
            launches = f"{coverage.lost_launches:,} kernel {plural(coverage.lost_launches, 'launch')}"
            yield f"Of {launches} there is no kernel: activity records were dropped or cut off."

    def names(self) -> Iterator[StrOrText]:
        """Yields names of phases that no range has, and says if no range names a step or a phase."""
        ranges = self.trace.ranges
        repeating = find_repeating_ranges(self.trace) if self.summary.step and self.summary.step.is_pass else ()
        if repeating:
            examples = join_texts(", ", map(code, repeating))
            yield phrase(
                "No range names a step, but these repeat: {}; say which is a step with `--step RANGE`.", examples
            )
        for key, names in self.attributed.roles.names.extra.items():
            for name in names:
                if name not in ranges.names:
                    yield phrase("No range is called `{}`, which was to be {}.", name, key)
        if "nvtx" in self.trace.tables and not self.summary.phases:
            count = np.bincount(ranges.name, minlength=1)
            named = join_texts(", ", (code(ranges.names[i]) for i in np.argsort(-count, kind="stable")[:5] if count[i]))
            found = phrase(" The ranges seen most are {}.", named) if named else ""
            yield phrase("No range names a phase.{} {}", found, self.how_to_name)

    def phases(self) -> Iterator[StrOrText]:
        """The phases without GPU work, and those without a measured instance."""
        for phase in self.summary.phases:
            if phase.instances and not phase.kernels_per_instance and not phase.memory and self.summary.status == "ok":
                none = "No operator ran" if self.summary.on_cpu else "No GPU operation was launched"
                yield phrase("{} inside `{}` ({}).", none, phase.range, phase.phase)
            if not phase.instances and phase.warmup_instances:
                yield f"Every {phase.phase} lies inside warm-up: nothing was measured of it."

    def inferred(self) -> Iterator[StrOrText]:
        """The inferred phases, and those of them that may hold other work in some instances."""
        if self.leaves and all(phase.inferred for phase in self.leaves):
            ranges = join_texts(", ", (code(phase.range) for phase in self.leaves))
            yield phrase("No range of the program's own names a phase. Used instead: {}.", ranges)
        for phase in self.leaves:
            if phase.uneven:
                kernels = f"{phase.kernels_least:,} to {phase.kernels_most:,} kernels"
                yield (
                    f"The inferred {phase.phase} launches {kernels}: some instances may hold other work, such as an "
                    "evaluation, so every question is answered for the step or the whole capture, too."
                )

    def shares(self) -> Iterator[StrOrText]:
        """The time that phases, and warm-up, leave out."""
        summary, coverage = self.summary, self.coverage
        held = ", ".join(phase.phase for phase in self.leaves if phase.instances)
        uneven = any(phase.uneven for phase in summary.phases)
        if held and not summary.phases_suffice and not uneven and summary.share_in_phases is not None:
            tenths = math.floor(summary.share_in_phases * 1000) / 10  # 89.99 % is not 90
            time = "operators' time" if summary.on_cpu else "GPU time (kernels, copies and fills)"
            none = "" if summary.phase("forward") else ", and no forward is among them"
            share = f"The phases found ({held}) hold {tenths:.1f}{NO_BREAK_SPACE}% of the {time}{none}"
            yield f"{share}: every question is answered for the step or the whole capture, too."
        if coverage.in_warmup:
            kernels = f"{coverage.in_warmup:,} {plural(coverage.in_warmup, 'kernel')}"
            time = f"{coverage.warmup_ms:,.2f} of {coverage.kernel_ms:,.2f} ms"
            yield f"Launched in warm-up and left out: {kernels}, {time}."

    def steps(self) -> Iterator[StrOrText]:
        """Yields waits for unrecorded work, steps that no figure holds, and a warm-up that never ends."""
        if self.summary.step and (unrecorded := self.summary.step.idle_of("unrecorded")):
            of = self.summary.step.adapt_to_pass("of a step")
            yield (
                f"For {rounded(unrecorded)} ms {of} the program waits, and no recorded work runs: the GPU works on "
                "what was not recorded, or for another process. This idle time may be work, so no saving is "
                "reported for it."
            )
        other, step, backward = (self.summary.phase(name) for name in (OTHER_STEP, STEP, "backward"))
        if other:
            steps = f"{other.instances:,} {plural(other.instances, 'step')}"
            yield f"{steps} without a backward pass, as in evaluation, kept apart from the others."
        if step and backward and not step.holds_backward:
            none = phrase("The `{}` ranges hold no backward pass: the step is the sum of its phases.", step.range)
            yield phrase("{} If they are the optimizer's, say `--phase-name optimizer={}`.", none, step.range)
        groups = self.summary.step.groups if self.summary.step and not self.summary.step.kind else ()
        count = sum(group.steps for group in groups)
        for group in groups:
            if group.kind in ("longer", "shorter", "other work") and group.steps >= _SHARE_OF_UNLIKE_STEPS * count:
                unlike = f"{group.steps:,} of {count:,} steps are unlike the usual ones ({group.kind})"
                yield f"{unlike}, with a median of {rounded(group.median_ms)} ms: no figure of a step holds them."
        if self.attributed.count_open_warmups(self.process):
            yield "A warm-up range has no end: everything after its start counts as warm-up."

    def concurrency(self) -> Iterator[StrOrText]:
        """GPU work behind the end of its range."""
        busy_ms = {phase.phase: phase.gpu_busy_ms.mean or 0.0 for phase in self.summary.phases}
        least = max(busy_ms.values(), default=0.0) * _MINOR
        running = [p.phase for p in self.summary.phases if not p.synchronized and busy_ms[p.phase] > least]
        if running:
            yield (
                f"GPU work of {', '.join(running)} ends after the range does: nothing synchronises there, so its wall "
                "time is that of the launches alone, and wall minus busy is no idle time."
            )

    def attribution(self) -> Iterator[StrOrText]:
        """The phases inside another one, and the kernels that several threads may have launched."""
        for (inner, outer), count in self.attributed.count_nested_phases(self.process).items():
            yield phrase("{:,} `{}` ranges lie inside `{}` and are counted there.", count, inner, outer)
        for (first, second), count in self.attributed.count_crossing_phases(self.process).items():
            yield phrase(
                "{:,} `{}` {} into `{}`, as no range that is pushed and popped can: what is launched in both counts in "
                "the first alone. A pop is missing, or came too late.",
                count, first, "range lasts" if count == 1 else "ranges last", second,
            )  # fmt: skip
        if self.coverage.ambiguous:
            yield (
                f"{self.coverage.ambiguous:,} kernels were launched from threads without ranges while several threads "
                "had phases open: they count in backward, else in the phase opened last."
            )

    def machine(self) -> Iterator[StrOrText]:
        """Several GPUs, a rank that is unknown, and matmuls in TF32 where fp32 was asked for."""
        operations = self.trace.operations
        devices = distinct(operations.device[operations.process == self.process]).tolist()
        if len(devices) > 1:
            numbers = ", ".join(map(str, devices))
            yield f"The process uses {len(devices)} GPUs (devices {numbers}): GPU busy is the time of any of them."
        if self.summary.rank is None and any(name.startswith(INIT_COMMUNICATOR) for name in self.trace.ranges.names):
            yield phrase("The export lacks the rank: repeat `nsys export` with `--type sqlite --include-blobs=true`.")
        wanted = self.summary.configuration.precision if self.summary.configuration else None
        tf32 = self.summary.precisions.get("tf32", 0.0)
        if wanted == "fp32" and tf32:
            yield f"The configuration says fp32, but {rounded_percent(tf32)} of the matmul time ran as tf32."

    def diagnostics(self) -> Iterator[StrOrText]:
        """The profiler's messages that concern the figures of this process and have not been quoted."""
        quoted = None if self.coverage.kernels else find_missing_cuda_message(self.messages)
        for message in {(one.severity, one.text): one for one in self.messages}.values():
            is_routine = message.severity not in (2, 3) or message.text.startswith(_ROUTINE)
            is_news = "events might be missing" in message.text or not is_routine
            if is_news and not is_irrelevant_message(message.text) and (quoted is None or message.text != quoted.text):
                yield self._quoted(message)

    def _quoted(self, message: Diagnostic) -> StrOrText:
        """A message in the profiler's words, and its meaning where there is no kernel."""
        means = "" if self.coverage.kernels else explain_message(message.text)
        quote = f"{self.trace.metadata.profiler}: {first_sentence(message.text)}"
        return phrase("{} {}", quote, means) if means else quote


def _messages(trace: Trace, process: int) -> list[Diagnostic]:
    """The profiler's messages about a process, or about none that has an entry or that did nothing.

    torch.compile's workers did nothing: nsys follows them, and finds that they use no GPU.
    """
    if not trace.metadata.diagnostics:
        return []
    measured = set(distinct(trace.operations.process).tolist())
    threads = np.concatenate([distinct(some.thread) for some in (trace.launches, trace.ranges, trace.open_ranges)])
    idle_but_seen = set(distinct(process_of(threads)).tolist()) - measured

    def is_ours(other: int) -> bool:
        return other == process or not pid_of(other) or not measured or other in idle_but_seen

    return [one for one in trace.metadata.diagnostics if is_ours(one.process)]
