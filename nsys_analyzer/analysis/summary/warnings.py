"""Finds the warnings of a capture: the facts that limit the meaning of its figures.

The sentences of the facts are in ``report/facts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.ranges.instances import AttributedTrace, find_repeating_ranges
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Coverage
from nsys_analyzer.trace.arrays import distinct
from nsys_analyzer.trace.columns import UNNAMED_KERNEL, pid_of, process_of
from nsys_analyzer.trace.metadata import Diagnostic, explain_message, find_missing_cuda_message, is_irrelevant_message
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP
from nsys_analyzer.trace.ranks import INIT_COMMUNICATOR
from nsys_analyzer.trace.trace import Trace

#: How a program should be annotated: with NVTX or PyTorch profiler ranges around phases, or NVTX ranges around steps.
Annotation = Literal["nvtx", "record_function", "steps"]
#: A warning is given on GPU work after the end of a phase's range if the phase has at least this share of the GPU time
#: of the longest phase.
_NOTABLE_PHASE_SHARE = 0.02
#: A warning is given on steps that figures leave out if they are at least this share of all steps.
_NOTABLE_SHARE_OF_UNLIKE_STEPS = 0.25
#: The maximum number of ranges that a warning names if no range of the capture is a phase.
_MAX_LISTED_RANGES = 5
#: The starts of messages that nsys writes for every capture with a capture range.
_ROUTINE_MESSAGES = (
    "Not all NVTX events might",
    "Not all CUDA events might",
    "No NVTX events collected",
    "No CUDA events",
)


def find_warnings(
    summary: CaptureSummary, coverage: Coverage, attributed: AttributedTrace, process: int
) -> tuple[Fact, ...]:
    """Returns the warnings about one process, the most serious first.

    Args:
        summary: the summary of the process.
        coverage: the numbers of the process's kernels, by how the kernels were attributed.
        attributed: the trace.
        process: the global ID of the process.
    """
    checks = _Checks(summary, coverage, attributed, process)
    in_order = (
        checks.find_missing_data, checks.find_excluded_rows, checks.find_hidden_kernels,
        checks.find_unmatched_names, checks.find_empty_phases, checks.find_inferred_phases,
        checks.find_time_outside_phases, checks.find_left_out_steps, checks.find_late_work,
        checks.find_ambiguous_ranges, checks.find_machine_warnings, checks.find_profiler_messages,
    )  # fmt: skip
    return tuple(warning for check in in_order for warning in check())


class _Checks:
    """The checks of one process, each of which yields warnings.

    The arguments of the constructor are those of ``find_warnings``.
    """

    def __init__(self, summary: CaptureSummary, coverage: Coverage, attributed: AttributedTrace, process: int) -> None:
        self.summary, self.coverage, self.attributed, self.process = summary, coverage, attributed, process
        self.trace, self.whole, self.leaves = attributed.trace, summary.whole, summary.leaf_phases
        self.messages = _find_messages(self.trace, process)
        self.by_torch = self.trace.metadata.profiler == "torch"
        self.annotation: Annotation = "record_function" if self.by_torch else "nvtx" if summary.holds_model else "steps"

    def find_missing_data(self) -> Iterator[Fact]:
        """Yields the data that the trace lacks: an up-to-date export, tables, events or kernels."""
        tables, metadata = self.trace.tables, self.trace.metadata
        if stale_export := self.trace.stale_export:
            yield Fact("stale_export", export=stale_export, capture=self.trace.path.name)
        if self.summary.status == "oom":
            yield Fact("out_of_memory", failure=self.summary.message)
        has_ranges, has_calls = "nvtx" in tables, "runtime" in tables or not self.coverage.kernels
        if self.by_torch:
            has_both = bool(len(self.trace.operators) and self.coverage.kernels)
            if self.summary.has_no_kernel and not self.coverage.lost_launches:
                yield Fact("no_kernels_in_torch_trace")
            if not has_calls:
                yield Fact("no_api_calls_in_torch_trace", platform=metadata.platform, has_both=has_both)
            if not has_ranges:
                yield Fact("no_ranges_in_torch_trace", has_both=has_both)
            return
        if self.summary.has_no_kernel:
            reason = find_missing_cuda_message(self.messages)
            yield Fact("no_kernels", reason=self._quote(reason) if reason else None)
        if not has_ranges:
            yield Fact("no_range_table", annotation=self.annotation)
        if not has_calls:
            yield Fact("no_api_calls")

    def find_excluded_rows(self) -> Iterator[Fact]:
        """Yields ranges and rows that no figure includes.

        The first process also reports the rows of processes without a summary.
        """
        for name in self.attributed.find_open_phases(self.process):
            yield Fact("open_phase", name=name)
        processes = [entry.global_pid for entry in find_processes(self.trace)] if self.trace.left_out else []
        for rows in self.trace.left_out:
            if self.process == (rows.process if rows.process in processes else processes[0]):
                yield Fact(
                    "rows_left_out", rows=rows, pid=None if rows.process == self.process else pid_of(rows.process)
                )
        if incomplete_count := sum(phase.incomplete_instances for phase in self.summary.phases):
            yield Fact("partial_instances", instances=incomplete_count)

    def find_hidden_kernels(self) -> Iterator[Fact]:
        """Yields kernels without a name, inside an opaque graph, without a launch, or missing in the capture."""
        rows = self.whole.kernels if self.whole else ()
        unnamed = [row.share for row in rows if row.name.startswith(UNNAMED_KERNEL)]
        if unnamed:
            yield Fact("unnamed_kernels", kernels=len(unnamed), share=sum(unnamed))
        if self.whole and self.whole.opaque:
            replays = sum(row.operations_per_instance for row in self.whole.memory if row.kind == "graph")
            yield Fact("opaque_graphs", replays=replays)
        if self.coverage.without_launch:
            yield Fact("kernels_without_launch", kernels=self.coverage.without_launch)
        if self.coverage.lost_launches:
            yield Fact("lost_launches", launches=self.coverage.lost_launches)

    def find_unmatched_names(self) -> Iterator[Fact]:
        """Yields requested names that no range has, and ranges that may be steps or phases."""
        ranges = self.trace.ranges
        repeating_ranges = find_repeating_ranges(self.trace) if self.summary.step and self.summary.step.is_pass else ()
        if repeating_ranges:
            yield Fact("repeating_ranges", ranges=tuple(repeating_ranges))
        for phase, names in self.attributed.roles.names.extra.items():
            for name in names:
                if name not in ranges.names:
                    yield Fact("missing_range", name=name, phase=phase)
        if "nvtx" in self.trace.tables and not self.summary.phases:
            count = np.bincount(ranges.name, minlength=1)
            most_frequent = np.argsort(-count, kind="stable")[:_MAX_LISTED_RANGES]
            frequent_names = tuple(ranges.names[code] for code in most_frequent if count[code])
            yield Fact("no_phase_names", ranges=frequent_names, annotation=self.annotation)

    def find_empty_phases(self) -> Iterator[Fact]:
        """Yields phases without GPU work, and phases without a measured instance."""
        for phase in self.summary.phases:
            if phase.instances and not phase.kernels_per_instance and not phase.memory and self.summary.status == "ok":
                yield Fact("phase_without_work", range=phase.range, phase=phase.phase, on_cpu=self.summary.on_cpu)
            if not phase.instances and phase.warmup_instances:
                yield Fact("phase_only_in_warmup", phase=phase.phase)

    def find_inferred_phases(self) -> Iterator[Fact]:
        """Yields a warning on all inferred phases, and one on each inferred phase that may include other work."""
        if self.leaves and all(phase.inferred for phase in self.leaves):
            yield Fact("inferred_phases", ranges=tuple(phase.range for phase in self.leaves))
        for phase in self.leaves:
            if phase.uneven:
                yield Fact("uneven_phase", phase=phase.phase, least=phase.kernels_least, most=phase.kernels_most)

    def find_time_outside_phases(self) -> Iterator[Fact]:
        """Yields the GPU time that is outside phases or in warm-up."""
        summary, coverage = self.summary, self.coverage
        phases = tuple(phase.phase for phase in self.leaves if phase.instances)
        is_uneven = any(phase.uneven for phase in summary.phases)
        if phases and not summary.phases_suffice and not is_uneven and summary.share_in_phases is not None:
            yield Fact(
                "insufficient_phases",
                phases=phases,
                share=summary.share_in_phases,
                on_cpu=summary.on_cpu,
                has_forward=summary.phase("forward") is not None,
            )
        if coverage.in_warmup:
            yield Fact(
                "warmup_kernels", kernels=coverage.in_warmup, warmup_ms=coverage.warmup_ms, kernel_ms=coverage.kernel_ms
            )

    def find_left_out_steps(self) -> Iterator[Fact]:
        """Yields waits for unrecorded work, steps that figures leave out, and a warm-up without an end."""
        summary = self.summary
        if summary.step and (unrecorded_ms := summary.step.idle_of("unrecorded")):
            yield Fact("unrecorded_work", ms=unrecorded_ms, is_pass=summary.step.is_pass)
        other_steps, step, backward = (summary.phase(name) for name in (OTHER_STEP, STEP, "backward"))
        if other_steps:
            yield Fact("steps_without_backward", steps=other_steps.instances)
        if step and backward and not step.holds_backward:
            yield Fact("step_ranges_without_backward", range=step.range)
        groups = summary.step.groups if summary.step and not summary.step.kind else ()
        count = sum(group.steps for group in groups)
        for group in groups:
            is_unlike = group.kind in ("longer", "shorter", "other work")
            if is_unlike and group.steps >= _NOTABLE_SHARE_OF_UNLIKE_STEPS * count:
                yield Fact("unlike_steps", steps=group.steps, count=count, kind=group.kind, median_ms=group.median_ms)
        if self.attributed.count_open_warmups(self.process):
            yield Fact("open_warmup")

    def find_late_work(self) -> Iterator[Fact]:
        """Yields phases whose GPU work ends after their range."""
        busy_ms = {phase.phase: phase.gpu_busy_ms.mean or 0.0 for phase in self.summary.phases}
        least_ms = max(busy_ms.values(), default=0.0) * _NOTABLE_PHASE_SHARE
        phases = tuple(
            phase.phase for phase in self.summary.phases if not phase.synchronized and busy_ms[phase.phase] > least_ms
        )
        if phases:
            yield Fact("late_gpu_work", phases=phases)

    def find_ambiguous_ranges(self) -> Iterator[Fact]:
        """Yields phases inside or across another phase, and kernels that several threads may have launched."""
        for (inner, outer), count in self.attributed.count_nested_phases(self.process).items():
            yield Fact("nested_phases", count=count, inner=inner, outer=outer)
        for (first, second), count in self.attributed.count_crossing_phases(self.process).items():
            yield Fact("crossing_phases", count=count, first=first, second=second)
        if self.coverage.ambiguous:
            yield Fact("ambiguous_kernels", kernels=self.coverage.ambiguous)

    def find_machine_warnings(self) -> Iterator[Fact]:
        """Yields several GPUs, an unknown rank, and matmuls in TF32 although fp32 was requested."""
        operations = self.trace.operations
        devices = tuple(distinct(operations.device[operations.process == self.process]).tolist())
        if len(devices) > 1:
            yield Fact("several_gpus", devices=devices)
        if self.summary.rank is None and any(name.startswith(INIT_COMMUNICATOR) for name in self.trace.ranges.names):
            yield Fact("unknown_rank")
        precision = self.summary.configuration.precision if self.summary.configuration else None
        tf32_share = self.summary.precisions.get("tf32", 0.0)
        if precision == "fp32" and tf32_share:
            yield Fact("tf32_matmuls", share=tf32_share)

    def find_profiler_messages(self) -> Iterator[Fact]:
        """Yields the profiler's messages about this process, except a message that the fact ``no_kernels`` quotes."""
        quoted_message = None if self.coverage.kernels else find_missing_cuda_message(self.messages)
        for message in {(message.severity, message.text): message for message in self.messages}.values():
            is_routine = message.severity not in (2, 3) or message.text.startswith(_ROUTINE_MESSAGES)
            is_notable = "events might be missing" in message.text or not is_routine
            is_quoted = quoted_message is not None and message.text == quoted_message.text
            if is_notable and not is_irrelevant_message(message.text) and not is_quoted:
                yield self._quote(message)

    def _quote(self, message: Diagnostic) -> Fact:
        """Quotes a message of the profiler. If the capture has no kernel, the fact also explains the message."""
        meaning = "" if self.coverage.kernels else explain_message(message.text)
        return Fact("profiler_message", profiler=self.trace.metadata.profiler, text=message.text, meaning=meaning)


def _find_messages(trace: Trace, process: int) -> list[Diagnostic]:
    """Returns the profiler's messages about a process, about no process, and about idle processes.

    The workers of torch.compile are idle processes: nsys follows them, and reports that they use no GPU.
    """
    if not trace.metadata.diagnostics:
        return []
    processes_with_work = set(distinct(trace.operations.process).tolist())
    threads = np.concatenate([distinct(table.thread) for table in (trace.launches, trace.ranges, trace.open_ranges)])
    idle_processes = set(distinct(process_of(threads)).tolist()) - processes_with_work

    def concerns_process(subject: int) -> bool:
        """Returns whether the subject of a message belongs to the process."""
        return subject == process or not pid_of(subject) or not processes_with_work or subject in idle_processes

    return [message for message in trace.metadata.diagnostics if concerns_process(message.process)]
