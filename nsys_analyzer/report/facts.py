"""Writes facts as sentences. ``SENTENCES`` has an entry for each ID in ``analysis.facts.FactId``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from nsys_analyzer.analysis.facts import Fact, FactId, FactOrText
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Summary
from nsys_analyzer.text import (
    NO_BREAK_SPACE,
    StrOrText,
    code,
    format_bytes,
    join_names,
    join_texts,
    list_first,
    phrase,
    plain,
    plural,
    rounded,
    rounded_percent,
)
from nsys_analyzer.trace.metadata import first_sentence
from nsys_analyzer.trace.time_checks import ExcludedRows


def say(fact: FactOrText) -> StrOrText:
    """Returns the sentence of a fact. A text, such as a sentence that was read from JSON, is returned unchanged."""
    return SENTENCES[fact.id](**fact.values) if isinstance(fact, Fact) else fact


def say_all(facts: Iterable[FactOrText]) -> tuple[StrOrText, ...]:
    """Returns the facts as sentences, in the same order."""
    return tuple(map(say, facts))


def replace_facts_by_sentences(capture: CaptureSummary) -> CaptureSummary:
    """Returns a capture whose facts are replaced by sentences."""
    limits, unprofiled = capture.limits, capture.unprofiled
    if limits:
        doubt = None if limits.doubt is None else say(limits.doubt)
        limits = replace(limits, notes=say_all(limits.notes), doubt=doubt)
    if unprofiled:
        unprofiled = replace(unprofiled, doubts={phase: say_all(facts) for phase, facts in unprofiled.doubts.items()})
    return replace(
        capture,
        message=None if capture.message is None else say(capture.message),
        warnings=say_all(capture.warnings),
        limits=limits,
        unprofiled=unprofiled,
    )


def describe_message(capture: Summary) -> str:
    """Returns the message that explains the status of a capture, as plain text; empty if there is none."""
    return plain(say(capture.message)) if capture.message else ""


# --- sentences that need more than one expression

_ANNOTATION_ADVICE = (
    "Wrap the parts of the step, as in `with {}: ...`, or name the existing ranges with `--phase-name forward=NAME`."
)
#: The advice on how to annotate a program, by ``analysis.summary.warnings.Annotation``.
_HOW_TO_ANNOTATE = {
    "nvtx": phrase(_ANNOTATION_ADVICE, 'torch.cuda.nvtx.range("forward")'),
    "record_function": phrase(_ANNOTATION_ADVICE, 'torch.profiler.record_function("forward")'),
    "steps": phrase(
        "Put a range around each pass of the loop (`nvtxRangePush`, `nvtxRangePop`), or name the existing range with "
        "`--step NAME`."
    ),
}
_NO_SAVING = "No saving can be derived for this capture"
_OTHER_SCOPES_SENTENCE = "Therefore every question is also answered for the step or the whole capture."


def _advise_recording_both(has_both: bool) -> StrOrText:
    """Returns the advice to record both the CPU and the GPU; empty if both were recorded."""
    return "" if has_both else phrase(": record with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {plural(number, noun)}"


def _list_code(names: Iterable[str]) -> StrOrText:
    return join_texts(", ", map(code, names))


def _how_to_record(by_torch: bool) -> StrOrText:
    """Returns the advice on how to record kernels and API calls, without the final period."""
    if by_torch:
        return phrase("Record with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`")
    return phrase("Capture with `nsys profile --trace=cuda,nvtx`")


def _describe_failed_allocation(api_call: str, range: str, gpu: str, memory_bytes: int) -> str:
    where = f" in the range {range}" if range else ""
    size = f", which has {format_bytes(memory_bytes)}" if memory_bytes else ""
    on_gpu = f" on the {gpu}{size}" if gpu else ""
    return f"{api_call} failed{where}{on_gpu}, and nothing was launched afterwards."


def _describe_excluded_rows(rows: ExcludedRows, pid: int | None) -> StrOrText:
    where = f"{_count(rows.rows, 'row')} of {rows.table}" + (f" of process {pid}" if pid is not None else "")
    treatment = "Counted without a duration" if rows.only_end_excluded else "Left out of every figure"
    treatment = "Counted until that start" if rows.is_shortened else treatment
    return phrase("{}: {} with {}, such as {}.", treatment, where, rows.reason, rows.example)


def _cold_start(start_up_ms: float, total_ms: float, calls: Sequence[tuple[str, float]]) -> str:
    ms_by_api: defaultdict[str, list[float]] = defaultdict(list)
    for api, ms in calls:
        ms_by_api[api].append(ms)
    longest_first = sorted(((sum(values), len(values), api) for api, values in ms_by_api.items()), reverse=True)
    apis = list_first(
        [f"{api} {rounded(ms)} ms{f' in {count} calls' if count > 1 else ''}" for ms, count, api in longest_first]
    )
    return (
        f"{_NO_SAVING}: this is a cold start. Of {rounded(total_ms)} ms on the CPU, {rounded(start_up_ms)} ms are "
        f"calls that a program makes only at its start ({apis}). Record steps after the warm-up."
    )


def _describe_insufficient_phases(phases: Sequence[str], share: float, on_cpu: bool, has_forward: bool) -> str:
    percent_rounded_down = math.floor(share * 1000) / 10  # rounded down, so that 89.99 % is not shown as 90 %
    time = "operators' time" if on_cpu else "GPU time (kernels, copies and fills)"
    forward = "" if has_forward else ", and no forward pass is among them"
    subject = f"{plural(len(phases), 'phase')} {join_names(phases)} {'contains' if len(phases) == 1 else 'contain'}"
    sentence = f"The {subject} {percent_rounded_down:.1f}{NO_BREAK_SPACE}% of the {time}{forward}."
    return f"{sentence} {_OTHER_SCOPES_SENTENCE}"


def _describe_impossible_rate(
    work: str, factor: float, precision: str | None, configuration: tuple[str, int, int] | None, has_fused: bool
) -> str:
    source = "the counted FLOPs"
    if configuration:
        source = "the configuration ({}, context length {}, batch size {})".format(*configuration)
    causal = ", or fused attention skips half of the scores" if has_fused else ""
    return (
        f"{work} would run at {factor:.3g} times the GPU's peak in {precision}, which is impossible: {source} "
        f"or the precision does not belong to this capture{causal}. The report omits all rates."
    )


#: The sentence of each fact, as a function of the fact's values.
SENTENCES: dict[FactId, Callable[..., StrOrText]] = {
    # the capture lacks something
    "stale_export": lambda export, capture: phrase(
        "`{}` is older than `{}`, and there is no nsys to export it again. The figures are those of the older file, "
        "which may belong to an earlier recording.", export, capture,
    ),
    "out_of_memory": lambda failure: phrase("The process ran out of memory: {}", say(failure)),
    "allocation_failed": _describe_failed_allocation,
    "no_kernels": lambda reason: phrase(
        "The capture has no kernel. {}",
        say(reason) if reason else phrase("Record steps that run on the GPU with `--trace=cuda,nvtx`."),
    ),
    "no_kernels_in_torch_trace": lambda: "The trace has no kernel: record steps that run on the device.",
    "no_range_table": lambda annotation: phrase(
        "The export has no NVTX table (capture with `--trace=cuda,nvtx`). {}", _HOW_TO_ANNOTATE[annotation]
    ),
    "no_ranges_in_torch_trace": lambda has_both: phrase(
        "The trace has no ranges of the program's own{}. {}", _advise_recording_both(has_both),
        _HOW_TO_ANNOTATE["record_function"],
    ),
    "no_api_calls": lambda: phrase(
        "The export has no CUDA API table, so no kernel has a launch: capture with `--trace=cuda`."
    ),
    "no_api_calls_in_torch_trace": lambda platform, has_both: phrase(
        "The trace has no {} API calls, so no kernel has a launch{}.", platform, _advise_recording_both(has_both)
    ),
    "unreadable": lambda error: error,
    # rows, ranges and kernels that figures leave out
    "open_phase": lambda name: phrase(
        "A range `{}` has no end, or ends after the next range of this name starts. It is left out as partial.", name,
    ),
    "rows_left_out": _describe_excluded_rows,
    "partial_instances": lambda instances: (
        f"{_count(instances, 'instance')} of phases {'is' if instances == 1 else 'are'} left out: kernels are missing "
        "or have impossible times, or an allocation failed."
    ),
    "unnamed_kernels": lambda kernels, share: (
        f"The capture does not contain the names of {_count(kernels, 'kernel')} ({rounded_percent(share, 1)} of the "
        "kernel time), so their class is unknown. Export the report again."
    ),
    "opaque_graphs": lambda replays: phrase(
        "The kernels of {} were not recorded: GPU busy includes the {}, but no table lists their kernels. Capture with "
        "`--cuda-graph-trace=node` to record them.",
        _count(round(replays), "CUDA graph replay"), plural(replays, "replay"),
    ),
    "kernels_without_launch": lambda kernels: (
        f"No launch was recorded for {_count(kernels, 'kernel')}, so the range of "
        f"{'this kernel' if kernels == 1 else 'these kernels'} is unknown."
    ),
    "lost_launches": lambda launches: (
        f"The kernels of {_count(launches, 'kernel launch')} are missing: activity records were dropped or cut off."
    ),
    "warmup_kernels": lambda kernels, warmup_ms, kernel_ms: (
        f"No figure includes kernels that were launched in warm-up: {_count(kernels, 'kernel')}, {warmup_ms:,.2f} of "
        f"{kernel_ms:,.2f} ms."
    ),
    "open_warmup": lambda: "A warm-up range has no end: everything after its start counts as warm-up.",
    # phases and steps
    "repeating_ranges": lambda ranges: phrase(
        "No range names a step, but these ranges repeat (name the range of a step with `--step RANGE`): {}.",
        _list_code(ranges),
    ),
    "missing_range": lambda name, phase: phrase("No range has the name `{}`, which was given for {}.", name, phase),
    "no_phase_names": lambda ranges, annotation: phrase(
        "No range names a phase.{} {}",
        phrase(" The most frequent ranges are {}.", _list_code(ranges)) if ranges else "",
        _HOW_TO_ANNOTATE[annotation],
    ),
    "phase_without_work": lambda range, phase, on_cpu: phrase(
        "{} inside `{}` ({}).", "No operator ran" if on_cpu else "No GPU operation was launched", range, phase
    ),
    "phase_only_in_warmup": lambda phase: f"Every instance of {phase} is in warm-up, so {phase} is not measured.",
    "inferred_phases": lambda ranges: phrase(
        "None of the program's ranges is named after a phase. These ranges are used instead: {}.", _list_code(ranges)
    ),
    "uneven_phase": lambda phase, least, most: (
        f"The inferred {phase} launches {least:,} to {most:,} kernels: some instances may include other work, such as "
        f"an evaluation. {_OTHER_SCOPES_SENTENCE}"
    ),
    "insufficient_phases": _describe_insufficient_phases,
    "unrecorded_work": lambda ms, is_pass: (
        f"For {rounded(ms)} ms of a {'pass' if is_pass else 'step'} the program waits while no recorded work runs: the "
        "GPU works on something unrecorded, or for another process. This idle time may be work, so no saving is "
        "reported for it."
    ),
    "steps_without_backward": lambda steps: (
        f"{_count(steps, 'step')} {'has' if steps == 1 else 'have'} no backward pass, as in evaluation. The figures of "
        "a training step do not include steps without a backward pass."
    ),
    "step_ranges_without_backward": lambda range: phrase(
        "The `{}` ranges contain no backward pass, so the time of a step is the sum of its phases. If they are ranges "
        "of the optimizer, give `--phase-name optimizer={}`.", range, range,
    ),
    "unlike_steps": lambda steps, count, kind, median_ms: (
        f"{steps:,} of {count:,} steps differ from the usual steps ({kind}), with a median of {rounded(median_ms)} ms. "
        "The figures of a step do not include these steps."
    ),
    "late_gpu_work": lambda phases: (
        f"The GPU work of {join_names(phases)} ends after {'its range' if len(phases) == 1 else 'their ranges'}, "
        "because the program does not wait for the GPU there. The wall time covers only the launches, so wall minus "
        "busy is not idle time."
    ),
    "nested_phases": lambda count, inner, outer: phrase(
        "{:,} `{}` ranges lie inside `{}`, so their work counts as work of `{}`.", count, inner, outer, outer
    ),
    "crossing_phases": lambda count, first, second: phrase(
        "{:,} `{}` {} into `{}`, which is impossible for ranges that are pushed and popped. A pop is missing or came "
        "too late. Operations that were launched in both ranges count only in the first range.",
        count, first, "range extends" if count == 1 else "ranges extend", second,
    ),
    "ambiguous_kernels": lambda kernels: (
        f"{kernels:,} kernels were launched from threads without ranges while several threads had phases open. Such a "
        "kernel counts as work of backward if backward was open, and otherwise of the phase that was opened last."
    ),
    # the machine, the program and its configuration
    "several_gpus": lambda devices: (
        f"The process uses {len(devices)} GPUs (devices {', '.join(map(str, devices))}): GPU busy is the time during "
        "which any of them works."
    ),
    "unknown_rank": lambda: phrase(
        "The export lacks the rank: repeat `nsys export` with `--type sqlite --include-blobs=true`."
    ),
    "tf32_matmuls": lambda share: (
        f"The configuration says fp32, but tf32 kernels take {rounded_percent(share)} of the matmul time."
    ),
    "model_contradicted": lambda model, needed, launched: (
        f"The file name says {model}, which needs at least {needed} matmuls per forward pass, but the capture launches "
        f"{launched:,.0f} matmuls. The report ignores this model name."
    ),
    "not_annotated": lambda parts: f"Some parts of this program could not be annotated: {parts}.",
    "profiler_message": lambda profiler, text, meaning: join_texts(
        " ", (f"{profiler}: {first_sentence(text)}", *([meaning] if meaning else []))
    ),
    "clock_limited": lambda gpu, cause, share, clock_mhz, max_mhz: (
        f"{cause.capitalize()} limited the clock of the {gpu} in {rounded_percent(share)} of the unprofiled steps"
        + (f": it ran at {clock_mhz:,} MHz, where {max_mhz:,} MHz are possible." if clock_mhz and max_mhz else ".")
    ),
    # unprofiled times
    "row_chosen_by_kernels": lambda place, evidence: (
        f"{place}: this row was chosen among the rows that fit, because the capture's kernels are {evidence}"
    ),
    "rows_without_owner": lambda source: (
        f"{source}: rows that name neither their capture nor a model are not used (add a column “capture”)"
    ),
    "rows_differ": lambda source, columns: (
        f"{source}: none of the rows that fit is used, because they differ in "
        + ", ".join(f"{header} ({', '.join(text or 'empty' for text in texts)})" for header, texts in columns)
        + " (give a file with only the rows of this run)"
    ),
    "untrusted_time": lambda place, phase, ms, doubts: phrase(
        "{}: the time of {}, {:.3f} ms, is not trusted, and no verdict is based on it: {}",
        place, phase, ms, join_texts("; ", map(say, doubts)),
    ),
    "deviation_above_mean": lambda std_ms: (
        f"its standard deviation, {std_ms:.3f} ms, exceeds its mean, as if warm-up were among the measured steps"
    ),
    "gpu_busy_longer": lambda busy_ms: (
        f"the GPU is busy for longer, {busy_ms:.3f} ms (the time is of another run or in another unit, or the device "
        "was not synchronized)"
    ),
    "profiled_shorter": lambda wall_ms: (
        f"the phase is shorter under the profiler, {wall_ms:.3f} ms (the time is of another run or in another unit)"
    ),
    # rates and FLOPs
    "flops_of_first_rank": lambda: (
        "FLOPs were counted on the first rank and are assumed to be equal on each rank. If ranks run different "
        "layers (pipeline parallelism), the rates of the other ranks are wrong."
    ),
    "whole_model_on_each_gpu": lambda: (
        "Each GPU is assumed to run the whole model with the whole batch size, as in data parallelism. If GPUs share "
        "the layers (tensor or pipeline parallelism), the rates are too high."
    ),
    "no_whole_steps": lambda: (
        "The measured passes do not make up whole steps, so the FLOPs of a step are not known."
    ),
    "uncounted_operators": lambda operators: (
        f"The FLOPs of these operators are unknown, and no rate includes them: {', '.join(operators)}."
    ),
    "several_passes_per_step": lambda passes, batch_size: (
        f"A step has {passes} forward passes, and each is assumed to have batch size {batch_size}."
    ),
    "skipped_scores": lambda kernel_class, phase: (
        f"{kernel_class.capitalize()} in {phase} skips work, because the GPU would have to exceed its peak to compute "
        f"all scores in this time. So the report omits the rate of {kernel_class} in {phase}."
    ),
    "skipped_convolution_work": lambda kernel_class, phase: (
        f"{kernel_class.capitalize()} in {phase} uses an algorithm with fewer FLOPs than a direct convolution "
        "(Winograd, FFT), so the report omits its rate."
    ),
    "too_few_matmuls": lambda model, context_length, batch_size, needed, launched: (
        f"{model} needs at least {needed} matmuls per forward pass, but the capture launches {launched:,.0f}. So the "
        f"capture does not belong to the configuration ({model}, context length {context_length}, batch size "
        f"{batch_size}), so its FLOPs are not known."
    ),
    "rate_above_peak": _describe_impossible_rate,
    # why no saving can be derived from a replay
    "earlier_work": lambda: f"{_NO_SAVING}: its steps contain GPU work that was launched earlier.",
    "replay_differs": lambda error: (
        f"{_NO_SAVING}: the replayed steps are {rounded_percent(abs(error))} {'longer' if error > 0 else 'shorter'} "
        "than the recorded steps."
    ),
    "cold_start": _cold_start,
    "captures_graphs": lambda: (
        f"{_NO_SAVING}: the program captures CUDA graphs, which it does only once, and captured operations do not run "
        "during the capture."
    ),
    "findings_out_of_memory": lambda failure: (
        f"{_NO_SAVING}: the program ran out of memory: "
        f"{plain(say(failure)).rstrip('.') if failure else 'an allocation failed'}."
    ),
    # why some or all findings are missing for another reason
    "ran_on_cpu": lambda: "The program ran on the CPU, and the rules for findings do not apply to such programs.",
    "no_capture": lambda reason: say(reason) if reason else "There is no capture of this run.",
    "only_launches_recorded": lambda launches: (
        f"{_count(launches, 'kernel launch')} but no kernels were recorded, because the GPU's records were dropped or "
        "cut off. Record again, with a warm-up before the recorded steps."
    ),
    "no_recorded_kernel": lambda by_torch: phrase(
        "No kernel was recorded. {} around steps that run on the GPU.", _how_to_record(by_torch)
    ),
    "idle_steps": lambda: "Nothing runs on the GPU during the steps.",
    "no_replay_without_api_calls": lambda by_torch: phrase(
        "This trace has no API calls. Without API calls, launches and waits are unknown, and no step can be "
        "replayed, so there are no findings. {}.",
        _how_to_record(by_torch),
    ),
    "one_of_many_ranks": lambda ranks, labels: (
        f"Findings are derived for {len(labels)} of {ranks} ranks, at equal distances in the order of their times "
        f"without communication: {', '.join(labels)}. Give this capture alone to see its findings."
    ),
    "too_few_api_calls": lambda: (
        "Findings need the API calls of whole steps. This capture contains too few API calls."
    ),
    "hidden_in_graphs": lambda share: phrase(
        "{} of the GPU's compute time is inside CUDA graphs whose kernels were not recorded. So findings about "
        "matmuls, attention, elementwise kernels and the optimizer are missing. Capture with "
        "`--cuda-graph-trace=node`.",
        rounded_percent(share),
    ),
    # the changes of a what-if question
    "changed_class": lambda name, factor: f"{name} × {factor:g}",
    "changed_range": lambda name, factor: f"range {name} × {factor:g}",
    "changed_operator": lambda name, factor: (
        f"{name} at its attainable time" if factor is None else f"{name} × {factor:g}"
    ),
    "pinned_copies": lambda: "copies from pinned memory",
    "changed_launches": lambda factor: f"launches × {factor:g}",
    "ranks_on_time": lambda ranks: f"{', '.join(f'rank {rank}' for rank in ranks)} on time",
    "more_ranks": lambda before, after: f"{after} ranks instead of {before}",
    "faster_network": lambda factor: f"a network {factor:g} times as fast",
    "checkpointed": lambda modules, names: f"{modules} {plural(modules, 'checkpointed module')} ({names})",
    "changed_batch": lambda factor: f"batch × {factor:g}",
    "micro_batches": lambda count: f"{count} micro-batches",
    "other_optimizer": lambda kind: "an optimizer with 8-bit state" if kind == "8bit" else "offloaded optimizer state",
}  # fmt: skip
