"""How requests are served: the steps of each kind, prefill, decode or both, what lies between them, and requests.

A step lasts, as every step, from its start to the next one's; without the time in which no request is there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.process import ProcessWork
from nsys_analyzer.analysis.steps.step import DeviceSteps, KernelTime, Ms
from nsys_analyzer.analysis.steps.summarize import dissect_device
from nsys_analyzer.analysis.steps.windows import Steps
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import process_of
from nsys_analyzer.trace.phase_names import REQUEST_RANGE, ServedStepKind
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS, NS_PER_S

#: Kernels that are kept of each kind.
_KERNELS = 8


@dataclass(frozen=True)
class Quantiles:
    """The median and the 95th percentile of some times, ms."""

    median: Ms
    p95: Ms

    @staticmethod
    def of_ns(values: Ints) -> Quantiles:
        """Returns those of durations in ns."""
        median, p95 = np.quantile(values / NS_PER_MS, [0.5, 0.95]).tolist()
        return Quantiles(median, p95)


@dataclass(frozen=True, kw_only=True)
class StepKind(DeviceSteps):
    """The steps of one kind, with the figures of the device that computes most; its parts add up to the median step.

    Attributes:
        batch, tokens, positions: sequences, new tokens, and what these attend to in the cache: medians.
        tokens_per_s: new tokens ÷ time of all steps of the kind.
        between_ms: from a step's end to the next one's start on the CPU, median; None where none follows.
        kernels: those that take most.
        weights_bytes, cache_bytes: what a step reads of both at the least; None where that is not known.
        counted: whether they are the model's own, and not those of a transformer of its dimensions.
        least_ms: how long reading them once takes at the memory's peak; None where that is not known.
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
        """Returns the share of some classes in the compute; None without any."""
        return (
            sum(row.ms for row in self.classes if row.kernel_class in classes) / self.compute_ms
            if self.compute_ms
            else None
        )

    @property
    def busy_share(self) -> float | None:
        """The share of a step in which the GPU works."""
        return 1 - self.idle_ms / self.total_ms if self.total_ms else None


@dataclass(frozen=True)
class HeldUp:
    """Decode steps that wait behind prefill while their sequences are there already.

    Attributes:
        steps: how many; ``of`` so many that follow another one.
        wait_ms: the steps in between, of each that waits.
        per_step_ms: all of that ÷ ``of``.
    """

    steps: int
    of: int
    wait_ms: Quantiles
    per_step_ms: Ms


@dataclass(frozen=True)
class Requests:
    """Requests that ranges mark, by the CPU's clock.

    Attributes:
        count: those whose first token is marked.
        ttft_ms: time to first token, from a request's arrival on.
        inter_token_ms: from one token to the next of a request; None where no request has two.
    """

    count: int
    ttft_ms: Quantiles
    inter_token_ms: Quantiles | None


@dataclass(frozen=True)
class Serving:
    """How a process serves requests.

    Attributes:
        kinds: the kinds of steps, the most frequent first.
        inferred: whether a hook told the kinds by the shapes of the model's input, and no engine.
    """

    kinds: tuple[StepKind, ...]
    inferred: bool
    held_up: HeldUp | None = None
    requests: Requests | None = None

    def with_least(
        self, weights: float, of_position: float | None, bytes_per_s: float | None, *, counted: bool
    ) -> Serving:
        """Returns the same with what decoding reads at the least: its weights, and of its cache for each position."""

        def known(kind: StepKind) -> StepKind:
            cache = None if kind.positions is None or of_position is None else of_position * kind.positions
            least = (weights + (cache or 0)) / bytes_per_s * MS_PER_S if bytes_per_s else None
            return replace(kind, weights_bytes=weights, cache_bytes=cache, least_ms=least, counted=counted)

        return replace(self, kinds=tuple(known(kind) if kind.kind == "decode" else kind for kind in self.kinds))


def summarize_serving(attributed: AttributedTrace, process: int, steps: Steps) -> Serving | None:
    """Returns how a process serves requests; None where no mark says it."""
    if not steps.marks:
        return None
    kind, warm = np.array([mark.kind for mark in steps.marks]), np.array(steps.names) != "first"
    work = ProcessWork(attributed, process, steps.every)
    kinds = Counter(kind[warm].tolist()).most_common()
    found = tuple(_of_kind(work, steps, name, (kind == name) & warm) for name, _ in kinds)
    inferred = any(mark.inferred for mark in steps.marks)
    held_up = None if inferred else _held_up(steps, kind)  # each prefill begins another generation then
    return Serving(found, inferred, held_up, _requests(attributed, process, steps, kind))


def _of_kind(work: ProcessWork, steps: Steps, kind: ServedStepKind, chosen: Bools) -> StepKind:
    marks = [mark for mark, mine in zip(steps.marks, chosen.tolist(), strict=True) if mine]
    windows = steps.every.select(chosen)
    length = Quantiles.of_ns(windows.length)
    devices = [dissect_device(work, windows, device, length.median) for device in work.devices]
    main = max(devices, key=lambda device: device.compute_ms)
    follows = np.append(steps.every.called[1:] == steps.every.left[:-1], False)[chosen]
    between = (windows.left - windows.ended)[follows]
    tokens = [mark.tokens for mark in marks if mark.tokens is not None]
    seconds = float(windows.length.sum()) / NS_PER_S
    return StepKind(
        **{one.name: getattr(main, one.name) for one in fields(DeviceSteps)},
        kind=kind,
        steps=len(windows),
        length_ms=length,
        batch=_median([mark.batch for mark in marks]),
        tokens=_median([mark.tokens for mark in marks]),
        positions=_median([mark.positions for mark in marks]),
        tokens_per_s=sum(tokens) / seconds if len(tokens) == len(marks) and seconds else None,
        between_ms=float(np.median(between)) / NS_PER_MS if len(between) else None,
        kernels=main.kernels[:_KERNELS],
    )


def _median(values: list[int | None]) -> float | None:
    """Returns the median of what is said of all steps; None where one says nothing."""
    said = [value for value in values if value is not None]
    return float(np.median(said)) if said and len(said) == len(values) else None


def _held_up(steps: Steps, kind: npt.NDArray[np.str_]) -> HeldUp | None:
    """Finds the decode steps between which and the decode step before lies prefill alone."""
    decode = np.flatnonzero(kind == "decode")
    behind = np.append(0, np.cumsum(np.where(kind == "prefill", steps.every.length, 0)))
    # Of two decode steps with nothing but prefill in between, without a pause.
    goes_on = np.append(0, np.cumsum((steps.every.called[1:] == steps.every.left[:-1]) & (kind[1:] != "mixed")))
    wait = behind[decode[1:]] - behind[decode[:-1] + 1]
    held = (wait > 0) & (goes_on[decode[1:]] - goes_on[decode[:-1]] == np.diff(decode))
    if not held.any():
        return None
    return HeldUp(
        int(held.sum()), len(wait), Quantiles.of_ns(wait[held]), int(wait[held].sum()) / len(wait) / NS_PER_MS
    )


def _requests(attributed: AttributedTrace, process: int, steps: Steps, kind: npt.NDArray[np.str_]) -> Requests | None:
    """Reads the requests that ranges mark, outside warm-up: each token behind the first is that of a decode step."""
    ranges = attributed.trace.ranges
    found = [REQUEST_RANGE.fullmatch(name) for name in ranges.names]
    named = np.array([*(match is not None for match in found), False])[ranges.name]
    mine = np.flatnonzero(named & (process_of(ranges.thread) == process))
    mine = mine[~attributed.is_in_warmup(process_of(ranges.thread[mine]), ranges.start[mine])]
    whole, first = dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()
    for index in mine.tolist():
        match = found[ranges.name[index]]
        if match:
            (first if match["first"] else whole)[match["request"]] = (int(ranges.start[index]), int(ranges.end[index]))
    ended = steps.every.ended[kind != "prefill"]
    gaps = [
        np.diff([there, *ended[(ended > there) & (ended <= whole[name][1])].tolist()])
        for name, (_, there) in first.items()
        if name in whole
    ]
    if not first:
        return None
    between = np.concatenate([np.zeros(0, np.int64), *gaps])
    ttft = np.array([end - start for start, end in first.values()])
    return Requests(len(first), Quantiles.of_ns(ttft), Quantiles.of_ns(between) if len(between) else None)
