"""Summarizes how requests are served: prefill, decode and mixed steps, the time between steps, and the requests.

A step lasts from its start to the start of the next step, without the time in which the server has no request.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.groups import Steps
from nsys_analyzer.analysis.steps.process import ProcessWork
from nsys_analyzer.analysis.steps.step import DeviceSteps, KernelTime, Ms, narrow_to_base
from nsys_analyzer.analysis.steps.summarize import dissect_device
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import process_of
from nsys_analyzer.trace.phase_names import REQUEST_RANGE, ServedStepKind
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS, NS_PER_S

#: The maximum number of kernels that are listed for each kind of step.
_MAX_KERNELS = 8


@dataclass(frozen=True)
class Quantiles:
    """The median and the 95th percentile of a set of times, ms."""

    median: Ms
    p95: Ms

    @staticmethod
    def of_ns(values: Ints) -> Quantiles:
        """Computes the quantiles of durations in ns; the quantiles are in ms."""
        median, p95 = np.quantile(values / NS_PER_MS, [0.5, 0.95]).tolist()
        return Quantiles(median, p95)


@dataclass(frozen=True, kw_only=True)
class StepKind(DeviceSteps):
    """The steps of one kind ("prefill", "decode" or "mixed"), with the figures of the device that computes most.

    The parts of the device's time add up to the median length of a step.

    Attributes:
        kind: "prefill", "decode" or "mixed".
        steps: the number of steps.
        length_ms: the lengths of the steps.
        batch: the median number of sequences in a step; None if it is unknown for a step.
        tokens: the median number of new tokens in a step; None if it is unknown for a step.
        positions: the median number of positions in the cache that the tokens of a step attend to; None if it is
            unknown for a step.
        tokens_per_s: the new tokens of all steps of this kind, divided by the time of these steps.
        between_ms: the median time on the CPU from the end of a step to the start of the next step; None if no step
            follows directly.
        kernels: the kernels with most compute time, the longest first.
        weights_bytes, cache_bytes: the minimum bytes of the weights and of the cache that a step reads; None if
            unknown.
        counted: True if the bytes were counted in the model; False if they were derived from the model's dimensions.
        least_ms: the time to read these bytes once at the peak rate of the memory, ms; None if unknown.
    """

    kind: ServedStepKind
    steps: int
    length_ms: Quantiles
    batch: float | None
    tokens: float | None
    positions: float | None
    tokens_per_s: float | None
    between_ms: Ms | None
    kernels: tuple[KernelTime, ...]
    weights_bytes: float | None = None
    cache_bytes: float | None = None
    counted: bool = False
    least_ms: Ms | None = None

    def share_of(self, *classes: str) -> float | None:
        """Returns the share of the given kernel classes in the compute time; None if there is no compute time."""
        ms = sum(row.ms for row in self.classes if row.kernel_class in classes)
        return ms / self.compute_ms if self.compute_ms else None

    @property
    def busy_share(self) -> float | None:
        """Returns the share of a step in which the GPU works; None if the step has no length."""
        return 1 - self.idle_ms / self.total_ms if self.total_ms else None


@dataclass(frozen=True)
class HeldUp:
    """Decode steps that wait for prefill steps although their sequences are ready.

    Attributes:
        steps: the number of decode steps that wait.
        of: the number of decode steps that follow another decode step, with or without such a wait.
        wait_ms: the length of the prefill steps directly before a decode step that waits.
        per_step_ms: the sum of all waits divided by ``of``, ms.
    """

    steps: int
    of: int
    wait_ms: Quantiles
    per_step_ms: Ms


@dataclass(frozen=True)
class Requests:
    """The latencies of the requests that ranges mark, measured on the CPU.

    Attributes:
        count: the number of requests whose first token is marked.
        ttft_ms: the time to first token (TTFT): from the arrival of a request to its first token.
        inter_token_ms: the inter-token latency: from one token of a request to its next token; None if no request has
            two tokens.
    """

    count: int
    ttft_ms: Quantiles
    inter_token_ms: Quantiles | None


@dataclass(frozen=True)
class Serving:
    """The steps and requests of a process that serves requests.

    Attributes:
        kinds: the figures of each kind of step, the most frequent kind first.
        inferred: whether a hook inferred the kinds from the shapes of the model's input, because no engine marked them.
        held_up: the decode steps that wait for prefill steps; None if there are none, or if the kinds are inferred.
        requests: the latencies of requests; None if no range marks requests.
    """

    kinds: tuple[StepKind, ...]
    inferred: bool
    held_up: HeldUp | None = None
    requests: Requests | None = None

    def with_memory_bounds(
        self, weights_bytes: float, token_bytes: float | None, bytes_per_s: float | None, *, counted: bool
    ) -> Serving:
        """Returns a copy with the minimum bytes that a decode step reads.

        Args:
            weights_bytes: the bytes of the weights.
            token_bytes: the bytes of the cache for each token; None if unknown.
            bytes_per_s: the peak rate of the memory, bytes per second; None if unknown.
            counted: as in ``StepKind``.
        """

        def add_memory_bound(kind: StepKind) -> StepKind:
            """Returns the kind of step with the lower bound of its memory traffic."""
            cache_bytes = None if kind.positions is None or token_bytes is None else token_bytes * kind.positions
            least_ms = (weights_bytes + (cache_bytes or 0)) / bytes_per_s * MS_PER_S if bytes_per_s else None
            return replace(
                kind, weights_bytes=weights_bytes, cache_bytes=cache_bytes, least_ms=least_ms, counted=counted
            )

        return replace(
            self, kinds=tuple(add_memory_bound(kind) if kind.kind == "decode" else kind for kind in self.kinds)
        )


def summarize_serving(work: ProcessWork, steps: Steps) -> Serving | None:
    """Summarizes how a process serves requests. Returns None if the steps have no marks of a serving engine."""
    if not steps.marks:
        return None
    kind, is_warm = np.array([mark.kind for mark in steps.marks]), np.array(steps.group_names) != "first"
    kinds = Counter(kind[is_warm].tolist()).most_common()
    summaries = tuple(_summarize_kind(work, steps, name, (kind == name) & is_warm) for name, _ in kinds)
    inferred = any(mark.inferred for mark in steps.marks)
    # If a hook inferred the kinds, each prefill step begins another generation, so no decode step waits for it.
    held_up = None if inferred else _find_held_up(steps, kind)
    return Serving(summaries, inferred, held_up, _find_requests(work.attributed, work.process, steps, kind))


def _summarize_kind(work: ProcessWork, steps: Steps, kind: ServedStepKind, mask: Bools) -> StepKind:
    """Summarizes the steps of one kind. ``mask`` is True for these steps among all recorded steps."""
    marks = [mark for mark, is_selected in zip(steps.marks, mask.tolist(), strict=True) if is_selected]
    windows = steps.recorded.select(mask)
    length = Quantiles.of_ns(windows.length)
    devices = [dissect_device(work, windows, device, length.median) for device in work.devices]
    main_device = max(devices, key=lambda device: device.compute_ms)
    is_followed = np.append(steps.recorded.cpu_start[1:] == steps.recorded.cpu_end[:-1], False)[mask]
    between_ns = (windows.cpu_end - windows.body_end)[is_followed]
    tokens = [mark.tokens for mark in marks if mark.tokens is not None]
    seconds = float(windows.length.sum()) / NS_PER_S
    return StepKind(
        **vars(narrow_to_base(main_device, DeviceSteps)),
        kind=kind,
        steps=len(windows),
        length_ms=length,
        batch=_median([mark.batch for mark in marks]),
        tokens=_median([mark.tokens for mark in marks]),
        positions=_median([mark.positions for mark in marks]),
        tokens_per_s=sum(tokens) / seconds if len(tokens) == len(marks) and seconds else None,
        between_ms=float(np.median(between_ns)) / NS_PER_MS if len(between_ns) else None,
        kernels=main_device.kernels[:_MAX_KERNELS],
    )


def _median(values: list[int | None]) -> float | None:
    """Returns the median of the values, or None if a value is None."""
    known_values = [value for value in values if value is not None]
    return float(np.median(known_values)) if known_values and len(known_values) == len(values) else None


def _find_held_up(steps: Steps, kind: npt.NDArray[np.str_]) -> HeldUp | None:
    """Finds the decode steps that had to wait for prefill steps.

    Only prefill steps, and no pause, lie between such a step and the previous decode step.
    """
    decode = np.flatnonzero(kind == "decode")
    prefill_ns = np.append(0, np.cumsum(np.where(kind == "prefill", steps.recorded.length, 0)))
    follows_at_once = (steps.recorded.cpu_start[1:] == steps.recorded.cpu_end[:-1]) & (kind[1:] != "mixed")
    follower_count = np.append(0, np.cumsum(follows_at_once))
    wait_ns = prefill_ns[decode[1:]] - prefill_ns[decode[:-1] + 1]
    waits = (wait_ns > 0) & (follower_count[decode[1:]] - follower_count[decode[:-1]] == np.diff(decode))
    if not waits.any():
        return None
    wait_ns, decode_intervals = wait_ns[waits], len(wait_ns)
    return HeldUp(
        len(wait_ns), decode_intervals, Quantiles.of_ns(wait_ns), int(wait_ns.sum()) / decode_intervals / NS_PER_MS
    )


def _find_requests(
    attributed: AttributedTrace, process: int, steps: Steps, kind: npt.NDArray[np.str_]
) -> Requests | None:
    """Finds the requests that ranges mark outside warm-up. Returns None if there are none.

    Each token of a request after its first token is the result of a decode step or a mixed step.
    """
    ranges = attributed.trace.ranges
    matches = [REQUEST_RANGE.fullmatch(name) for name in ranges.names]
    is_request = np.array([*(match is not None for match in matches), False])[ranges.name]
    index = np.flatnonzero(is_request & (process_of(ranges.thread) == process))
    index = index[~attributed.is_in_warmup(process_of(ranges.thread[index]), ranges.start[index])]
    whole_requests, first_tokens = dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()
    for position in index.tolist():
        if match := matches[ranges.name[position]]:
            bounds = (int(ranges.start[position]), int(ranges.end[position]))
            (first_tokens if match["first"] else whole_requests)[match["request"]] = bounds
    if not first_tokens:
        return None
    step_ends = steps.recorded.body_end[kind != "prefill"]
    latencies = [np.zeros(0, np.int64)]
    for name, (_, first_end) in first_tokens.items():
        if name in whole_requests:
            is_token = (step_ends > first_end) & (step_ends <= whole_requests[name][1])
            latencies.append(np.diff([first_end, *step_ends[is_token].tolist()]))
    inter_token = np.concatenate(latencies)
    ttft = np.array([end - start for start, end in first_tokens.values()])
    inter_token_ms = Quantiles.of_ns(inter_token) if len(inter_token) else None
    return Requests(len(first_tokens), Quantiles.of_ns(ttft), inter_token_ms)
