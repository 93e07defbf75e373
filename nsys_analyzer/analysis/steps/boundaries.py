"""Finds the steps of a process: when each pass of the program's main loop begins and ends.

The first of these methods that finds steps applies: ranges that name the step; phases, from one forward pass to the
next; the repetition of the whole sequence of work; and the number of steps that the user gives. If no method finds
steps, the whole capture counts as one step. A layer, the update of one parameter, a micro-batch of a step with an
optimizer, and a loop outside the model never count as a step.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np

from nsys_analyzer.analysis.intervals import NONE, Cover
from nsys_analyzer.analysis.ranges.inference import BY_THREADS
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.repetition import Repetition, find_repeats, has_layers
from nsys_analyzer.analysis.steps.windows import LaunchedWork, StepSource, Windows, find_work_ends, runs_training
from nsys_analyzer.trace.arrays import Bools, Ints, distinct, mask_by_name
from nsys_analyzer.trace.columns import GRAPH, KERNEL, process_of
from nsys_analyzer.trace.phase_names import (
    MODULE_RANGE_PREFIX,
    OTHER_STEP,
    PIPELINE_PASS_SUFFIXES,
    STEP,
    parse_served_step,
)

_PROFILER_STEP = "ProfilerStep#"
_NUMBER_AT_END = re.compile(r"(\d{1,18})\W*$")
#: Ranges named like steps are steps only if they contain at least this share of all forward and backward passes.
_MIN_PASSES_IN_STEPS = 0.5
#: A range named like a step contains a whole generation if it contains at least this many forward passes.
_MIN_PASSES_OF_GENERATION = 8
#: The time between two steps of a server is a pause without requests if it exceeds the usual length of a step,
#: including the usual time between steps, by this factor.
_SERVER_PAUSE_FACTOR = 10
#: If each phase occurs once, the phases together are a step only if they contain at least this share of the total
#: duration of all operations.
_MIN_TIME_IN_PHASES = 0.8
#: Two steps do the same work if they have at least this share of their operations in common.
_MIN_EQUAL_OPERATIONS_SHARE = 0.9
#: The kernel classes that contain the main computations of a layer.
_CLASSES_OF_LAYERS = ("matmul", "fused attention", "convolution")
#: The GPU lags after the program if its work ends later than the step's range by more than this share of a step.
_MIN_GPU_LAG_SHARE = 0.1
#: The maximum number of steps, in the middle of the capture, that are checked for a lag of the GPU.
_STEPS_CHECKED_FOR_LAG = 32
#: The first operation of a capture waits for unrecorded work if it waits longer than this share of a step while no
#: recorded work runs.
_MIN_UNRECORDED_WAIT_SHARE = 0.5


def find_windows(attributed: AttributedTrace, process: int) -> Windows | None:
    """Finds the steps of a process. Without steps, its whole work is one step. Returns None if it has no operations."""
    work = LaunchedWork(attributed, process)
    if not len(work.index):
        return None
    windows = _find_steps_in_ranges(work)
    if windows is None or (len(windows) == 1 and windows.source == "profiler_step"):
        # A single step of PyTorch's profiler may contain several passes of the program's loop.
        phases = _find_steps_in_phases(work)
        windows = phases if phases and (windows is None or len(phases) > 1) else windows
    windows = windows or _find_repeating_steps(work) or _find_steps_in_phases(work, by_threads=True)
    if windows is None and (steps := attributed.roles.names.steps):
        bounds = np.linspace(*work.bounds, steps + 1).astype(np.int64)
        unit = f"one of {steps:,} equal parts of the capture"
        windows = Windows.of_program("said", unit, bounds[:-1], bounds[1:])
    return _align_with_gpu_work(windows, work) if windows else work.as_one_pass


# --- ranges that name the step


def _find_steps_in_ranges(work: LaunchedWork) -> Windows | None:
    """Finds the steps that ranges mark. If any of these ranges contain a backward pass, only those count as steps."""
    attributed, instances, ranges = work.attributed, work.attributed.instances, work.attributed.trace.ranges
    # A step ends no later than another step of any kind begins. Steps of two threads may begin at the same time.
    bounds = np.unique(np.append(instances.start[work.is_instance_of(STEP, OTHER_STEP)], work.warmups.start))
    largest_time = np.iinfo(np.int64).max
    for phase in (STEP, OTHER_STEP):
        is_step = work.is_instance_of(phase) & instances.is_measured
        if not is_step.any():
            continue
        range_names = [ranges.names[code] for code in dict.fromkeys(ranges.name[instances.range[is_step]].tolist())]
        is_served = bool(parse_served_step(range_names[0]))
        is_certain = STEP in attributed.roles.names.extra or is_served
        if not is_certain and not _contain_passes(work, is_step):
            continue
        start, first_of_start = np.unique(instances.start[is_step], return_index=True)
        range_end = instances.end[is_step][first_of_start]
        names_of_steps = [ranges.names[code] for code in ranges.name[instances.range[is_step][first_of_start]].tolist()]
        next_bound = np.append(bounds, largest_time)[np.searchsorted(bounds, start, side="right")]
        ends_with_range = (next_bound == largest_time) | (_precede_missing_steps(names_of_steps) & (not is_served))
        end = np.where(ends_with_range, range_end, next_bound)
        source: StepSource = "range"
        unit = f"a range named {range_names[0]}" if len(range_names) == 1 else f"a range named like {range_names[0]}"
        if range_names[0].startswith(_PROFILER_STEP):
            source, unit = "profiler_step", "a step of PyTorch's profiler"
        windows = Windows.of_program(source, unit, start, end, np.minimum(range_end, end))
        if is_served:  # a step ends with its work, because a server may have no request until the next step
            body_end = work.end_with_work(windows).body_end
            between_ns = windows.end - body_end
            is_pause = between_ns > _SERVER_PAUSE_FACTOR * (np.median(between_ns) + np.median(body_end - windows.start))
            end = np.where(is_pause, body_end, windows.end)
            windows = replace(windows, end=end, cpu_end=end)
        return windows
    return None


def _contain_passes(work: LaunchedWork, is_step: Bools) -> bool:
    """Checks whether ranges named like steps contain passes of the model, but not a whole generation.

    A range named "step" may contain only the optimizer. A generation contains many forward passes of a model that does
    not train.
    """
    instances, ranges = work.attributed.instances, work.attributed.trace.ranges
    time = instances.start[work.is_instance_of("forward", "backward") & instances.is_measured]
    steps = Cover.from_intervals(instances.start[is_step], instances.end[is_step])
    if steps.covered_within(time, time + 1).sum() < _MIN_PASSES_IN_STEPS * len(time):
        return False
    is_pipeline_part = mask_by_name(ranges, lambda name: name.endswith(tuple(PIPELINE_PASS_SUFFIXES)))[instances.range]
    forward = np.sort(instances.start[work.is_instance_of("forward") & ~is_pipeline_part])
    first, end = (np.searchsorted(forward, bound[is_step]) for bound in (instances.start, instances.end))
    is_generation = bool(np.median(end - first) >= _MIN_PASSES_OF_GENERATION)
    return not is_generation or runs_training(work.attributed, work.process)


def _precede_missing_steps(names: list[str]) -> Bools:
    """Returns True for each step after which steps are missing. Numbers in the names of steps show this: #3, #8.

    The numbers in the names of PyTorch's profiler increase by one from step to step. A program's own numbers may
    usually increase by more than one.
    """
    numbers = [int(match[1]) for name in names if (match := _NUMBER_AT_END.search(name))]
    if len(numbers) < len(names) or len(names) < 2:
        return np.zeros(len(names), np.bool_)
    increase = np.diff(numbers)
    usual_increase = 1 if names[0].startswith(_PROFILER_STEP) else max(np.median(increase), 1)
    return np.append(increase > usual_increase, False)


# --- phases

#: The letter of each phase. A sequence of phases is written as a text such as FBOFBO, in which steps are found.
_PHASE_LETTERS = {"forward": "F", "backward": "B", "optimizer": "O"}


def _find_steps_in_phases(work: LaunchedWork, *, by_threads: bool = False) -> Windows | None:
    """Finds the steps from one forward pass to the next, or from the end of one optimizer step to that of the next.

    If each phase occurs once, the phases together are the only step.

    Args:
        work: the operations of the process.
        by_threads: if True, only the phases that were inferred from threads and kernels count. If False, only the other
            phases count.
    """
    instances, ranges = work.attributed.instances, work.attributed.trace.ranges
    is_phase = work.is_instance_of(*_PHASE_LETTERS)
    # A forward pass on autograd's thread is a recomputation for a backward pass, and is part of it.
    is_recomputed = np.isin(ranges.thread[instances.range], work.attributed.attribution.engine_threads)
    # In pipeline parallelism, the parts of several passes alternate, so they do not show where a step begins.
    is_pipeline_part = mask_by_name(ranges, lambda name: name.endswith(tuple(PIPELINE_PASS_SUFFIXES)))[instances.range]
    is_by_threads = mask_by_name(ranges, lambda name: BY_THREADS in name)[instances.range]
    index = np.flatnonzero(is_phase & ~is_recomputed & ~is_pipeline_part & (is_by_threads == by_threads))
    letters = np.array([_PHASE_LETTERS.get(name, "") for name in (*instances.phases, "")])[instances.phase[index]]
    text = "".join(letters.tolist())
    if "F" not in text:
        return _find_steps_between_optimizers(work, index[letters == "O"])
    # A step ends with its optimizer steps. Without optimizer steps, it ends with its backward passes. Without backward
    # passes, each forward pass is a step.
    closing_letter = next((letter for letter in "OB" if letter in text), "F")
    pattern = f"[^{closing_letter}]*{closing_letter}+" if closing_letter != "F" else "F"
    spans = [match.span() for match in re.finditer(pattern, text)]
    spans = _exclude_evaluation(spans, text) if closing_letter != "F" else spans
    first_phase, end_phase = (np.array([span[side] for span in spans], np.int64) for side in (0, 1))
    start, end = instances.start[index], np.maximum.accumulate(instances.end[index])
    bounds = np.unique(np.append(start, work.warmups.start))
    next_bound = np.searchsorted(bounds, start[end_phase - 1], side="right")
    own_end = end[end_phase - 1]
    if closing_letter == "F" and len(spans) > 1:  # the last forward pass also includes the work after it
        own_end[-1] = max(own_end[-1], work.end[work.launched_at >= start[-1]].max(initial=start[-1]))
    step_end = np.where(next_bound == len(bounds), own_end, np.append(bounds, 0)[next_bound])
    measured_before = np.append(0, np.cumsum(instances.is_measured[index]))
    is_step = measured_before[end_phase] - measured_before[first_phase] == end_phase - first_phase
    is_step &= step_end > start[first_phase]
    columns = start[first_phase][is_step], step_end[is_step], np.minimum(own_end, step_end)[is_step]
    windows = Windows.of_program("phases", "the time from one forward pass to the next", *columns)
    if closing_letter == "F" and len(windows):
        windows = work.end_with_work(windows)
    if len(windows) < 2:
        inside_ns = work.duration_ns[windows.step_at(work.launched_at) != NONE].sum() if len(windows) else 0
        spans_capture = inside_ns and inside_ns >= _MIN_TIME_IN_PHASES * work.duration_ns.sum()
        return replace(windows, unit="the one step that its phases span") if spans_capture else None
    return _join_alternating_steps(windows, work) if "O" in text else windows


def _exclude_evaluation(spans: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Excludes the forward passes of an evaluation from the start of steps.

    Most steps start with an equal number of forward passes. If a step starts with more forward passes, the first of
    them belong to an evaluation. A step without a forward pass at its start was not recorded from its beginning, and is
    left out.

    Args:
        spans: the positions in ``text`` of the first phase of each step, and of the phase after its last phase.
        text: the letters of all phases in order.
    """
    leading_counts = [len(text[first:end]) - len(text[first:end].lstrip("F")) for first, end in spans]
    usual_count = Counter(count for count in leading_counts if count).most_common(1)[0][0] if any(leading_counts) else 0
    return [
        (first + max(count - usual_count, 0), end)
        for (first, end), count in zip(spans, leading_counts, strict=True)
        if count >= min(usual_count, 1)
    ]


def _find_steps_between_optimizers(work: LaunchedWork, optimizers: Ints) -> Windows | None:
    """Finds the steps between the ends of optimizer steps, for captures without forward passes."""
    instances = work.attributed.instances
    ends, first_of_end = np.unique(instances.end[optimizers], return_index=True)
    is_measured = instances.is_measured[optimizers][first_of_end]
    warmups_before = np.searchsorted(np.sort(work.warmups.start), ends)
    is_step = is_measured[1:] & is_measured[:-1] & (warmups_before[1:] == warmups_before[:-1])
    unit = "the time from the end of one optimizer step to the end of the next"
    windows = Windows.of_program("phases", unit, ends[:-1][is_step], ends[1:][is_step])
    return _join_alternating_steps(windows, work) if len(windows) else None


def _join_alternating_steps(windows: Windows, work: LaunchedWork) -> Windows:
    """Joins consecutive steps that train different models alternately, as in a GAN, into one step.

    Steps of different models launch different operations. The smallest number of steps after which the operations
    repeat is the number of steps that are joined.
    """
    step, symbol = windows.step_at(work.launched_at), work.symbols(work.index)
    in_step = step != NONE
    counts = np.zeros((len(windows), int(symbol.max()) + 1))
    np.add.at(counts, (step[in_step], symbol[in_step]), 1)
    for joined_count in range(1, len(windows) // 2 + 1):
        later_counts, earlier_counts = counts[joined_count:], counts[:-joined_count]
        same_count = np.minimum(later_counts, earlier_counts).sum(1)
        largest_count = np.maximum(later_counts, earlier_counts).sum(1)
        if (same_count >= _MIN_EQUAL_OPERATIONS_SHARE * largest_count).all():
            break
    else:
        return windows
    first_step = np.arange(0, len(windows) - joined_count + 1, joined_count)
    last_step = first_step + joined_count - 1
    bounds = windows.start[first_step], windows.end[last_step], windows.body_end[last_step]
    unit = f"{joined_count} optimizer steps that take turns" if joined_count > 1 else windows.unit
    return Windows.of_program("phases", unit, *bounds)


# --- repetition


def _find_repeating_steps(work: LaunchedWork) -> Windows | None:
    """Finds steps as repeating units of the whole sequence of work, if they are passes of the program's loop."""
    operations, given_steps = work.attributed.trace.operations, work.attributed.roles.names.steps
    # Select the operations of the device that works most, in the order of their launches.
    _, device = np.unique(operations.device[work.index], return_inverse=True)
    operations_on_device = np.flatnonzero(device == np.argmax(np.bincount(device, work.duration_ns)))
    operations_on_device = operations_on_device[
        np.lexsort((work.start[operations_on_device], work.launched_at[operations_on_device]))
    ]
    index, time = work.index[operations_on_device], work.launched_at[operations_on_device]
    launch = work.attributed.attribution.launch[index]
    begins_launch = np.append(True, (launch[1:] != launch[:-1]) | (launch[1:] == NONE))
    pauses, symbols = np.diff(time, prepend=time[:1]), work.symbols(index)
    for repeats in find_repeats(symbols, work.duration_ns[operations_on_device], pauses, given_steps, begins_launch):
        step_starts = time[repeats.starts]
        if not (np.diff(step_starts) > 0).all():  # equal times show kernels of one graph, which are launched together
            step_starts = operations.start[index[repeats.starts]]
        bounds = np.append(step_starts, max(int(time[repeats.end - 1]), int(step_starts[-1])) + 1)
        unit = f"a sequence of {repeats.period:,} operations that repeats"
        source: StepSource = "said" if given_steps else "repetition"
        windows = Windows.of_program(source, unit, bounds[:-1], bounds[1:], step_starts)
        if given_steps or _are_passes_of_loop(work, windows, index, repeats):
            return work.end_with_work(windows)
    return None


def _are_passes_of_loop(work: LaunchedWork, windows: Windows, index: Ints, repeats: Repetition) -> bool:
    """Checks whether the repeating units are passes of a loop, and not the layers of one pass.

    A unit is a pass if it contains layers, trains a model, or replays a CUDA graph. A pass has some work before its
    layers and some work after them. So units are layers if a few kernels run both before the first unit and after the
    last unit. Waits and copies between CPU and device are no evidence of a pass, because sharded or offloaded layers
    contain them as well.
    """
    attributed, operations = work.attributed, work.attributed.trace.operations
    # If all units lie in a single phase, or in a single call of a model, they are parts of one pass.
    roles, ranges = attributed.roles, attributed.trace.ranges
    is_call = mask_by_name(ranges, lambda name: name.startswith(MODULE_RANGE_PREFIX))
    is_around = (roles.is_phase_or_step | is_call) & (process_of(ranges.thread) == work.process)
    if (is_around & (ranges.start <= windows.cpu_start[0]) & (ranges.end >= windows.cpu_start[-1])).any():
        return False
    is_kernel = operations.kind[index] == KERNEL
    kernels_before = int(is_kernel[: repeats.operations_before].sum())
    kernels_after = int(is_kernel[len(index) - repeats.operations_after :].sum())
    if kernels_before and kernels_after and max(kernels_before, kernels_after) < repeats.period:
        return False
    unit = index[int(repeats.starts[0]) : int(repeats.starts[0]) + repeats.period]
    classes = np.array([*attributed.kernels.classes, ""])[attributed.kernels.code[unit]]
    is_layer_work = np.isin(classes, _CLASSES_OF_LAYERS)
    if "optimizer" in classes and is_layer_work.any():
        return True
    is_replayed = (operations.kind[unit] == GRAPH) | (operations.graph_node[unit] != 0)
    replay_count = len(distinct(np.sort(attributed.attribution.launch[unit[is_replayed]])))
    # If a CUDA graph contains a single layer, the attention of the layer runs outside the graph. If a CUDA graph
    # contains a pass, only the sampling of tokens runs outside the graph.
    if replay_count == 1 and not is_layer_work[~is_replayed].any():
        return True
    return has_layers(work.symbols(unit), is_layer_work)


# --- the clock of the GPU


def _align_with_gpu_work(windows: Windows, work: LaunchedWork) -> Windows:
    """Returns steps that begin and end with the GPU's work if the program runs far ahead of the GPU.

    Such a step lasts from the end of the work that was launched before the step to the end of the step's own work. If
    the program does not run far ahead, only the start of the first step and the end of the last step may change.
    """
    attributed = work.attributed
    operations, attribution = attributed.trace.operations, attributed.attribution
    index = np.flatnonzero((operations.process == work.process) & (attribution.thread != NONE))
    index = index[np.argsort(attribution.time[index], kind="stable")]
    time, end = attribution.time[index], operations.end[index]
    work_end = find_work_ends(windows, time, end)
    middle_step = max(0, (len(windows) - _STEPS_CHECKED_FOR_LAG) // 2)
    checked_steps = slice(middle_step, middle_step + _STEPS_CHECKED_FOR_LAG)
    lag_ns = np.median(np.maximum(work_end - windows.end, 0)[checked_steps])
    first_start = int(windows.start[0])
    first_step_operations = index[windows.step_at(time) == 0]
    # Work that was launched before the capture began is not recorded, but may delay the work of the first step.
    first_work = int(operations.start[first_step_operations].min()) if len(first_step_operations) else first_start
    if lag_ns <= _MIN_GPU_LAG_SHARE * np.median(windows.length[checked_steps]):
        end = np.append(windows.end[:-1], max(int(windows.end[-1]), int(work_end[-1])))
        min_wait_ns = _MIN_UNRECORDED_WAIT_SHARE * int(windows.length[0])
        if first_work < end[0] and _waits_for_unrecorded_work(work, index, first_start, min_wait_ns):
            return replace(windows, start=np.append(first_work, windows.start[1:]), end=end)
        return replace(windows, end=end)
    step_ends = np.maximum.accumulate(np.maximum(work_end, windows.end))
    usual_length = float(np.median(np.diff(step_ends, prepend=first_start)))
    first_work = first_work if first_work - first_start > _MIN_GPU_LAG_SHARE * usual_length else first_start
    earlier_end = np.append(first_work, np.maximum.accumulate(end))[np.searchsorted(time, windows.start)]
    starts = np.maximum.reduce([earlier_end, windows.start, np.append(earlier_end[0], step_ends[:-1])])
    has_length = step_ends > starts
    if not has_length.any():
        return windows
    return replace(windows, start=starts, end=step_ends, on_gpu=True).select(has_length)


def _waits_for_unrecorded_work(work: LaunchedWork, index: Ints, time: int, min_wait_ns: float) -> bool:
    """Checks whether the first operation after a time waits longer than ``min_wait_ns`` while no recorded work runs."""
    trace, launch = work.attributed.trace, work.attributed.attribution.launch
    start, end = trace.operations.start[index], trace.operations.end[index]
    if not (start >= time).any():
        return False
    first_start = int(start[start >= time].min())
    launch_end = int(trace.launches.end[launch[index[start == first_start][0]]])
    return first_start - max(launch_end, int(end[start < time].max(initial=time))) > min_wait_ns
