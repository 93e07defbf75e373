"""Writes the sentences of findings about what the GPU waits for, and about idle time that no rule explains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from nsys_analyzer.analysis.findings.diagnosis import GpuIdleFigures
from nsys_analyzer.analysis.findings.finding import Caller, FindingFigures, FindingTexts
from nsys_analyzer.analysis.findings.host_lines import HostLineFigures
from nsys_analyzer.analysis.findings.values_on_host import (
    FORWARD_LAUNCHES,
    DeviceToHostCopyFigures,
    GradientChecksFigures,
    HostSyncFigures,
    RoundTripsFigures,
)
from nsys_analyzer.analysis.findings.waits import (
    LONG_PAUSE_NS,
    NODE_GAP_NS,
    PINNED_BYTES_PER_S,
    READY_BATCH_NS,
    REMAINING_GAP_NS,
    REMAINING_PAUSE_NS,
    AllocatorFigures,
    BetweenStepsFigures,
    DataLoadingFigures,
    GraphBreakFigures,
    HostStallFigures,
    LaunchBoundFigures,
    PageableCopyFigures,
    RecompilationFigures,
)
from nsys_analyzer.analysis.steps.process import Cause
from nsys_analyzer.report.units import format_bytes, format_count, format_ms, rounded, rounded_percent
from nsys_analyzer.text import StrOrText, Text, join_names, list_first, phrase, plural
from nsys_analyzer.trace.schema import NS_PER_MS, NS_PER_US, US_PER_MS


def _say_off_cpu(share: float | None) -> Iterator[str]:
    """Yields a sentence on the share of the pauses in which the program's thread runs on no CPU, if it is known."""
    if share is not None:
        reasons = "it sleeps, or waits for a file, a lock, another process or a free core"
        yield f"The program's thread runs on no CPU for {rounded_percent(share)} of this time: {reasons}."


def _say_callers(callers: Sequence[Caller]) -> Iterator[str]:
    """Yields a sentence on the PyTorch functions that make the calls, if backtraces show them."""
    if callers:
        names = join_names([f"{caller.name} ({rounded(caller.calls)} per step)" for caller in callers])
        yield f"Backtraces show that these calls come from {names}."


def list_lines(sentence: str, counts: Sequence[tuple[str, int]]) -> Text:
    """Returns a sentence that ends with lines of the program and their counts."""
    lines = ", ".join(["`{}` {:,}×"] * len(counts))
    return phrase(f"{sentence}: {lines}.", *(value for line in counts for value in line))


def _say_ms_range(ns_range: tuple[int, int]) -> str:
    """Returns the bounds of an assumed time, given in ns with the larger one first: "0.05 to 0.5 ms"."""
    most, least = ns_range
    return f"{rounded(least / NS_PER_MS)} to {format_ms(most / NS_PER_MS)}"


def describe_data_loading(figures: DataLoadingFigures) -> FindingTexts:
    """Returns the sentences of the finding on an input pipeline that the GPU waits for."""
    names = list_first(figures.range_names)
    where = f"in the {plural(len(figures.range_names), 'range')} {names}" if names else "before a batch is copied"
    pauses = format_count(figures.pauses, "pause")
    in_place_of = f", instead of {names}" if names else ""
    advice = f"# load the next batch in other processes{in_place_of}:"
    if figures.has_worker_processes:
        advice = "# the loader has worker processes: try more of them, or less work for each batch"
    return FindingTexts(
        title="The GPU waits for the input pipeline",
        evidence=(
            f"In each step, the program makes no CUDA call for {format_ms(figures.pause_ms)} ({pauses}) {where}.",
            *_say_off_cpu(figures.off_cpu_share),
        ),
        derivation="The step is replayed as if each batch were ready when the program asks for it, so that the request "
        f"takes {_say_ms_range(READY_BATCH_NS)}. With the shorter time, batches from pageable memory are also copied "
        "ahead, from pinned memory.",
        remedy=(
            advice,
            f"loader = DataLoader(dataset, batch_size, num_workers={16 if figures.has_worker_processes else 8}, "
            "pin_memory=True,",
            "                    persistent_workers=True, prefetch_factor=4)",
            "batch = batch.to(device, non_blocking=True)",
        ),
        disproof="Make one batch before the loop and use it for every step: if the steps take just as long, loading "
        "is not the bottleneck.",
    )


def describe_pageable_copy(figures: PageableCopyFigures) -> FindingTexts:
    """Returns the sentences of the finding on copies to the GPU from memory that is not pinned."""
    name = "batch" if figures.is_batch else "data"
    rate = figures.bytes / max(figures.ms, 1e-9) / 1e6
    return FindingTexts(
        title=f"{'Batches are' if figures.is_batch else 'Data is'} copied from pageable memory",
        evidence=(
            f"Each step copies {format_bytes(figures.bytes)} from pageable memory to the GPU: "
            f"{format_count(figures.copies, 'copy')}, {format_ms(figures.ms)}, {rounded(rate)} GB/s.",
            "The program waits for each copy, because copies from pageable memory go through a buffer of the driver.",
            *_say_callers(figures.callers),
        ),
        derivation=f"The step is replayed in two ways: with copies at {PINNED_BYTES_PER_S / 1e9:.0f} GB/s on the same "
        "stream, for which the program does not wait, and with copies that other work hides completely. For a batch, "
        "a step takes at least the time in which one thread of the CPU makes it and copies it to pinned memory.",
        remedy=(
            f"{name} = {name}.pin_memory()  # ahead, as a DataLoader does with pin_memory=True",
            f"{name} = {name}.to(device, non_blocking=True)  # best on a side stream, ahead of its use",
        ),
        disproof="Run on tensors that are on the GPU already: if the step is no shorter, the copies are hidden.",
    )


def describe_device_to_host_copy(figures: DeviceToHostCopyFigures) -> FindingTexts:
    """Returns the sentences of the finding on device-to-host copies that are larger than a few scalars."""
    names = list_first(figures.range_names)
    in_ranges = f" in the {plural(len(figures.range_names), 'range')} {names}" if names else ""
    return FindingTexts(
        title=f"{'Tensors are' if figures.is_torch else 'Data is'} copied to the host{_say_inside(figures.is_pass)}",
        evidence=(
            f"Each step copies {format_bytes(figures.bytes)} from the GPU to the host{in_ranges}: "
            f"{format_count(figures.copies, 'copy')}, {format_ms(figures.ms)}. Pageable memory receives "
            f"{rounded_percent(figures.pageable_share)} of these bytes.",
        ),
        derivation="The step is replayed in two ways: with the copies on a stream of their own, for which the program "
        "does not wait, and without the copies and the program's code around them.",
        remedy=(
            "host = {k: torch.empty_like(v, device='cpu', pin_memory=True) for k, v in state.items()}  # once",
            "side = torch.cuda.Stream()  # once",
            "side.wait_stream(torch.cuda.current_stream())",
            "with torch.cuda.stream(side):",
            "    for k, v in state.items(): host[k].copy_(v, non_blocking=True)",
            "# before the tensors change: torch.cuda.current_stream().wait_stream(side)",
            "# before host is written to a file: side.synchronize()",
        ),
        disproof="Leave the copies out for a run: if the step is no shorter, they are hidden.",
    )


def _say_inside(is_pass: bool) -> str:
    """Returns " inside the step", or an empty string if the capture is one pass."""
    return "" if is_pass else " inside the step"


def describe_host_sync(figures: HostSyncFigures) -> FindingTexts:
    """Returns the sentences of the finding on a program that waits for the GPU."""
    names = list_first(figures.range_names)
    in_ranges = (
        f" in ranges such as {names}" if len(figures.range_names) > 1 else f" in the range {names}" * bool(names)
    )
    calls = format_count(figures.waits, "call")
    evidence: list[StrOrText] = [f"In each step, the program waits in {calls} ({list_first(figures.apis)}){in_ranges}."]
    remedy: tuple[str, ...] = (
        "# leave out of the loop: torch.cuda.synchronize(), which only timing needs",
        "# CUDA events time the GPU's work without a wait: torch.cuda.Event(enable_timing=True)",
    )
    if figures.values_read >= 1:
        values = format_count(figures.values_read, "value")
        as_torch = ", as .item() and .cpu() do" if figures.is_torch else ""
        are = "is" if figures.values_read == 1 else "are"
        evidence.append(f"In each step, {values} {are} copied to the host{as_torch}.")
        remedy = (
            "values.append(x)  # a tensor: it stays on the GPU",
            "print(torch.stack(values).tolist())  # one wait for all",
        )
        if figures.trains:
            remedy = (
                "total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # stays on the GPU",
                "if step % 100 == 0: print(total.item())  # one wait in 100 steps",
            )
    evidence += _say_callers(figures.callers)
    if figures.warned_lines:
        sentence = "PyTorch warns that the program waits for the GPU at these lines (waits per step)"
        evidence.append(list_lines(sentence, figures.warned_lines))
    return FindingTexts(
        title=f"The program waits for the GPU{_say_inside(figures.is_pass)}",
        evidence=tuple(evidence),
        derivation="The step is replayed in two ways: without the waits for the GPU but with half of the program's "
        "time around them, and without the waiting calls and their copies.",
        remedy=remedy,
        disproof="Comment the calls out for one run: if the step is no shorter, the GPU has enough queued work to stay "
        "busy during the waits.",
    )


def describe_round_trips(figures: RoundTripsFigures) -> FindingTexts:
    """Returns the sentences of the finding on values that are copied to the host and back."""
    return FindingTexts(
        title="The GPU waits for a computation on the CPU between two copies",
        evidence=(
            f"In each step, the program copies values from the GPU to the host {format_count(figures.trips, 'time')} "
            f"({format_bytes(figures.bytes)}), works on them for {format_ms(figures.cpu_ms)}, and copies the result to "
            "the GPU. The GPU first runs out of work, and then waits for the result.",
        ),
        derivation="The step is replayed without these copies, the waits for them, and the time on the CPU between "
        "them, as if the GPU did this work in no time.",
        remedy=(
            "order = values.argsort()            # PyTorch's operators, instead of NumPy or a Python loop",
            "y = table[values]                   # a table on the GPU, instead of one lookup for each value",
        ),
        disproof="Let the function return a constant tensor on the GPU for one run: if the step is no shorter, the GPU "
        "has enough queued work.",
    )


def describe_gradient_checks(figures: GradientChecksFigures) -> FindingTexts:
    """Returns the sentences of the finding on the anomaly detection of autograd."""
    most, least = FORWARD_LAUNCHES
    return FindingTexts(
        title="Autograd's anomaly detection is on",
        evidence=(
            f"In each backward pass, the program waits for {format_count(figures.checks, 'check')} of gradients for "
            f"NaN, which take {format_ms(figures.ms)} on the GPU. In the forward pass, anomaly detection records the "
            "stack of each operator.",
        ),
        derivation="The step is replayed without the checks and the waits for them. A call in the forward pass then "
        f"takes at most {most:g} or {least:g} usual launches.",
        remedy=("torch.autograd.set_detect_anomaly(False)  # turn it on only to look for a NaN",),
        disproof="Turn the anomaly detection off for one run: if the step is no shorter, the gradients are checked by "
        "the program itself.",
    )


def describe_host_stall(figures: HostStallFigures) -> FindingTexts:
    """Returns the sentences of the finding on long pauses of the program."""
    places = [f"in the range {name}" if name else "outside of all ranges" for name in figures.range_names]
    where = f" Most of this time is {join_names(places)}." if places else ""
    on_average = "" if figures.pauses == round(figures.pauses) else " on average"
    return FindingTexts(
        title="The CPU stops launching work",
        evidence=(
            f"In each step, the program makes no CUDA call for {format_ms(figures.pause_ms)}{on_average}, in "
            f"{format_count(figures.pauses, 'pause')} of {LONG_PAUSE_NS / NS_PER_MS:.0f} ms or more.{where}",
            f"The longest pause takes {format_ms(figures.longest_ms)}.",
            *_say_off_cpu(figures.off_cpu_share),
        ),
        derivation=f"The step is replayed with each of these pauses shortened to {_say_ms_range(REMAINING_PAUSE_NS)}.",
        remedy=(
            "# py-spy dump --pid PID  # shows what Python does in the pause",
            "import gc; gc.collect(); gc.freeze(); gc.disable()  # if it is Python's garbage collector",
        ),
        disproof="Put a range around the suspected code: if the pause is outside this range, another part of the "
        "program causes it.",
    )


def describe_recompilation(figures: RecompilationFigures) -> FindingTexts:
    """Returns the sentences of the finding on functions that torch.compile compiles in the measured steps."""
    stall = describe_host_stall(figures.stall)
    sentence = "In the measured steps without a profiler, torch.compile compiles these functions again (recompilations)"
    return replace(
        stall,
        title="torch.compile compiles functions again",
        evidence=(list_lines(sentence, figures.recompiles), *stall.evidence),
        remedy=(
            "# if a size changes from batch to batch: one version of the function for all sizes",
            "torch._dynamo.mark_dynamic(batch, dim)  # or torch.compile(model, dynamic=True)",
            "# if a Python number changes: pass it as a tensor; or pad all batches to the same size",
        ),
        disproof="Run with TORCH_LOGS=recompiles after more warm-up steps: if no line is logged and the pauses remain, "
        "they have another cause.",
    )


def describe_between_steps(figures: BetweenStepsFigures) -> FindingTexts:
    """Returns the sentences of the finding on the time between an engine's steps."""
    return FindingTexts(
        title="The GPU waits between the steps",
        evidence=(
            f"From the last CUDA call of a step to the first CUDA call of the next step, {format_ms(figures.gap_ms)} "
            "pass. In this time, an engine runs its scheduler, samples on the CPU, or detokenizes.",
        ),
        derivation=f"The step is replayed with {_say_ms_range(REMAINING_GAP_NS)} between steps, as if the next step "
        "were prepared while the GPU works.",
        remedy=(
            "# vLLM: --async-scheduling, and detokenization in a process of its own as it is by default",
            "# SGLang: leave out --disable-overlap-schedule; TensorRT-LLM: disable_overlap_scheduler: false",
        ),
        disproof="Generate a fixed number of tokens without detokenization: if the step is no shorter, detokenization "
        "does not take the time between steps.",
    )


def describe_allocator(figures: AllocatorFigures) -> FindingTexts:
    """Returns the sentences of the finding on memory that is allocated and freed in each step."""
    frees = ["A call that frees memory waits for all work on the GPU."] if figures.frees else []
    return FindingTexts(
        title="Memory is allocated and freed inside the step",
        evidence=(
            f"In each step, the program makes {format_count(figures.calls, 'call')} of {list_first(figures.apis)}.",
            *frees,
            *_say_callers(figures.callers),
        ),
        derivation="The step is replayed without these calls.",
        remedy=(
            "# leave out: torch.cuda.empty_cache()",
            "# if sizes alternate and the cache is too small for them:",
            "# export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        disproof="After the change, torch.cuda.memory_stats()['num_device_alloc'] is equal after each step.",
    )


def describe_launch_bound(figures: LaunchBoundFigures) -> FindingTexts:
    """Returns the sentences of the finding on operations that take longer to launch than to run."""
    return FindingTexts(
        title="The GPU waits for launches",
        evidence=(
            f"A step has {format_count(figures.operations, 'GPU operation')}. On average, the GPU needs "
            f"{rounded(figures.gpu_us)} µs to run an operation, and the program needs {rounded(figures.program_us)} µs "
            "to launch it without the profiler.",
            f"The GPU is idle for {format_ms(figures.idle_ms)} of a profiled step because the next operation has "
            "not been launched yet.",
        ),
        derivation="The step is replayed as a CUDA graph: launches and short pauses take no time, and the gaps between "
        f"operations are at most {NODE_GAP_NS / NS_PER_US:.1f} µs long.",
        remedy=(
            'model = torch.compile(model, mode="reduce-overhead")  # CUDA graphs',
            "# or a larger batch: the same launches, more work in each",
        ),
        disproof="Double the batch: if the step takes twice as long, launches do not limit it.",
    )


def describe_graph_breaks(figures: GraphBreakFigures) -> FindingTexts:
    """Returns the sentences of the finding on graph breaks of a program whose GPU waits for launches."""
    launches = describe_launch_bound(figures.launches)
    breaks = format_count(figures.breaks, "line")
    sentence = f"torch.compile ends a graph at {breaks} of the program, so that Python runs between the parts. The "
    sentence += "most frequent reasons are (number of compilations)"
    return replace(
        launches,
        title="Graph breaks split the compiled code",
        evidence=(list_lines(sentence, figures.reasons), *launches.evidence),
        derivation=f"{launches.derivation} This assumes that the step runs as CUDA graphs without graph breaks.",
        remedy=(
            "# take .item(), print() and changes of Python objects out of the compiled function, then:",
            'model = torch.compile(model, fullgraph=True, mode="reduce-overhead")  # fails at each graph break',
        ),
        disproof="Run with TORCH_LOGS=graph_breaks: if a version without graph breaks takes as long, they do not limit "
        "the step.",
    )


def describe_host_line(figures: HostLineFigures) -> FindingTexts:
    """Returns the sentences of the finding on a line or function whose time on the CPU delays launches."""
    kind = "function" if figures.is_function else "block of lines" if "-" in figures.name else "line"
    launches, usual = "launches no operation there.", ""
    if figures.launches >= 1:
        launches = f"launches {format_count(figures.launches, 'operation')} there."
        usual_ms = figures.launches * figures.launch_us / US_PER_MS
        usual = f" At the usual {rounded(figures.launch_us)} µs per launch, this takes {format_ms(usual_ms)}."
    sentence = (
        f"In each profiled step, the program's thread spends {format_ms(figures.cpu_ms)} in `{{}}` and {launches}"
    )
    evidence: list[StrOrText] = [
        phrase(f"{sentence}{usual}", figures.name),
        f"The time is from {format_count(figures.samples, 'sample')} of the program's stack, and from the times of the "
        "CUDA calls before and after it.",
    ]
    if figures.waits:
        evidence.append(f"The program also waits for the GPU there, {format_count(figures.waits, 'time')} per step.")
    return FindingTexts(
        title=f"The GPU waits for a {kind} that runs on the CPU",
        evidence=tuple(evidence),
        derivation=f"The step is replayed as if the {kind} took only the usual time of its launches"
        f"{', and did not wait for the GPU' * bool(figures.waits)}. The interval includes the statistical error of the "
        "number of samples.",
        remedy=(
            "# outside of the loop, or only in some steps: if step % 100 == 0: ...",
            "# as one operation on a whole tensor on the GPU, instead of a Python loop over its elements",
            "# in another thread or process, such as that of a DataLoader, while the GPU works",
        ),
        disproof=f"Leave the {kind} out for a run: if the step is no shorter, the GPU has enough queued work to stay "
        "busy during this time.",
    )


_IDLE_TITLES: dict[Cause, str] = {
    "sync": "The GPU is idle because the program waits for it",
    "allocator": "The GPU is idle while memory is allocated or freed",
    "copy": "The GPU is idle while the program waits for copies",
    "launch": "The GPU is idle while it waits for launches",
    "host": "The GPU is idle while the program works on the CPU",
    "data": "The GPU is idle while batches are loaded",
    "communication": "The GPU is idle while collectives wait to start",
    "unrecorded": "The GPU is idle while the program waits for work that was not recorded",
    "profiler": "The GPU is idle while the profiler works",
    "unknown": "The GPU is idle, and the cause is unknown",
}
_IDLE_REMEDIES: dict[str, tuple[str, ...]] = {
    "copy": (
        "# copy what is needed next while the GPU computes, from pinned memory, on a stream of its own:",
        "with torch.cuda.stream(side): ahead = host.to(device, non_blocking=True)",
        "# keep on the GPU what fits: fewer layers offloaded, smaller data types",
    ),
    "communication": ("# compare the ranks: a collective waits for the last one. Give the captures of all ranks.",),
}


def describe_gpu_idle(figures: GpuIdleFigures) -> FindingTexts:
    """Returns the sentences of the finding on idle time that no rule explains."""
    step = "the capture" if figures.is_pass else "a step"
    title = _IDLE_TITLES[figures.cause]
    observation = f"{title}. This idle time takes"
    if figures.is_exposed:
        activity = "Exposed copies" if figures.cause == "copy" else "Collectives"
        title, observation = f"{activity} take most of the step", f"{activity} take"
    place = f"the range {figures.range_name}" if figures.range_name else figures.api
    where = f", mostly in {place}" if place and figures.is_mostly_in_place else ""
    mark = "torch.cuda.nvtx.range_push(name) ... range_pop()"
    remedy = _IDLE_REMEDIES.get(figures.cause, (f"# put a range around the suspected code, {mark}, and record again",))
    if figures.api == "cudaGraphLaunch":
        remedy = (
            "# nsys profile --cuda-graph-trace=graph  # recording each node makes the launch of a graph take longer",
        )
    return FindingTexts(
        title=title,
        evidence=(
            f"{observation} {format_ms(figures.ms)} of {step}{where}. The GPU computes for "
            f"{rounded_percent(figures.compute_share)} of {step}.",
        ),
        derivation="No change that nsys-analyze replays removes this time, so the estimate is between 0 and this time.",
        remedy=remedy,
        disproof="Leave the suspected code out for a run: if the step is no shorter, the GPU waits for something else.",
    )


TEXTS: dict[type[FindingFigures], Callable[[Any], FindingTexts]] = {
    DataLoadingFigures: describe_data_loading,
    HostSyncFigures: describe_host_sync,
    RoundTripsFigures: describe_round_trips,
    GradientChecksFigures: describe_gradient_checks,
    HostLineFigures: describe_host_line,
    LaunchBoundFigures: describe_launch_bound,
    PageableCopyFigures: describe_pageable_copy,
    DeviceToHostCopyFigures: describe_device_to_host_copy,
    AllocatorFigures: describe_allocator,
    HostStallFigures: describe_host_stall,
    RecompilationFigures: describe_recompilation,
    GraphBreakFigures: describe_graph_breaks,
    BetweenStepsFigures: describe_between_steps,
    GpuIdleFigures: describe_gpu_idle,
}
