"""How far a capture is from what its GPU can do: the FLOPs of its model, and least bytes, against the peaks.

MFU (model FLOPs utilization) is the FLOPs of the model ÷ time ÷ peak, https://arxiv.org/abs/2204.02311, appendix B.
No rate is above a peak: a figure that would be is of another configuration or precision than the one assumed, and is
left out with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, FUSED, MATMUL
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.analysis.summary.statistics import precision_shares
from nsys_analyzer.analysis.summary.summary import CaptureSummary, ClassRate, Limits, PhaseRate, PhaseSummary, TimeOf
from nsys_analyzer.analysis.transformer.costs import (
    ELEMENT_BYTES,
    attention_matmul_elements,
    attention_matmul_flops,
    forward_flops,
    fused_attention_elements,
    linear_elements,
)
from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize
from nsys_analyzer.analysis.transformer.peaks import GPU_BOUND, Peaks, find_memory_bandwidth, find_peaks
from nsys_analyzer.configuration import CountedFlops
from nsys_analyzer.trace.columns import COPY_KINDS, MEMCPY, ON_DEVICE
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS

#: What is taken to be so where several GPUs train together.
_ONE_RANK = (
    "FLOPs were counted on the first rank, and are taken to be those of each; where ranks hold other layers (pipeline "
    "parallelism) the rates of the others are wrong."
)
_WHOLE_MODEL = (
    "The whole model and the batch size are taken to be those of one GPU, as in data parallelism; where GPUs share the "
    "layers (tensor or pipeline parallelism) the rates are too high."
)
#: A rate above a peak by more than this is no measurement.
TOLERANCE = 0.02
#: Precisions of less than 16 bits.
_NARROW = ("fp8", "fp4")
#: A precision with less of the matmul time has no roof of its own.
_LEAST_SHARE = 0.05
#: The matmuls of unfused attention, which are among those of the class matmul.
ATTENTION_MATMUL = "attention matmul"

#: The passes whose FLOPs are known, and the classes of kernels that may do with fewer.
_PASSES = ("forward", "backward")
_SKIPPED = {
    FUSED: "skips work: the whole square of scores would be above the GPU's peak",
    "convolution": "needs fewer FLOPs than the direct one whose FLOPs are known (Winograd, FFT)",
}
_NO_WHOLE_STEPS = "The passes that are measured do not make up whole steps, so the FLOPs of a step are not known."


def limits_of(capture: CaptureSummary) -> Limits | None:
    """The rates of a capture against its GPU's peaks; None on a CPU, and without any work on a GPU."""
    return None if capture.on_cpu or capture.whole is None else _View(capture).limits()


class _Shapes(NamedTuple):
    """All that FLOPs and bytes follow from."""

    model: ModelSize
    batch_size: int
    context_length: int


class _View:
    """A capture with work on a GPU, what is known of its model, and its peaks."""

    def __init__(self, capture: CaptureSummary) -> None:
        self.capture = capture
        self.peaks: Peaks | None = find_peaks(capture.gpu)
        self.memory = find_memory_bandwidth(capture.device)
        known = capture.configuration or Configuration()
        parts = {"model": known.model, "context length": known.context_length, "batch size": known.batch_size}
        whole = known.model and known.batch_size and known.context_length
        self.shapes = _Shapes(known.model, known.batch_size, known.context_length) if whole else None  # type: ignore[arg-type]
        self.counted = capture.run.flops if capture.run and not whole else None
        is_told = self.counted or not capture.holds_model
        self.missing = [] if is_told else [name for name, value in parts.items() if not value]
        self.precision = next((one for one in capture.precisions if one != "unknown"), None)
        if self.precision and capture.precisions[self.precision] < capture.precisions.get("unknown", 0.0):
            self.precision = None
        rates = dict(self.peaks.flops_per_s) if self.peaks else {}
        self.rates = rates
        shares = {one: share for one, share in capture.precisions.items() if one in rates and share >= _LEAST_SHARE}
        self.roofs = tuple((one, rates[one]) for one in shares)
        # As if the matmuls of each precision reached the same share of its peak.
        peaks = sum(share * rates[one] for one, share in shares.items())
        self.peak = peaks / sum(shares.values()) if self.precision in shares else None
        # Who trains in 16 bits has not chosen among those with fewer.
        wide = [one for one in rates if self.precision in _NARROW or one not in _NARROW]
        self.best = max(wide, key=lambda one: (rates[one], one == "bf16"), default=None)
        self.notes: list[str] = []

    def limits(self) -> Limits:
        capture, rates, best = self.capture, self.rates, self.best
        phases, classes = tuple(self.phase_rates()), tuple(self.class_rates())
        doubt = self.doubt(phases, classes)
        if doubt:
            phases = classes = ()
        return Limits(
            gpu=capture.gpu or "GPU",
            precision=self.precision,
            peak_flops=self.peak,
            best_precision=best,
            best_peak_flops=rates[best] if best else None,
            peak_bytes_per_s=self.memory,
            source=self.peaks.source if self.peaks else None,
            roofs=self.roofs,
            phases=phases,
            classes=(*classes, *self.copies()),
            missing=(*self.missing, *(() if self.peaks else ("peaks",))),
            notes=tuple(dict.fromkeys((*self.notes, *(self.of_ranks() if phases else ())))),
            doubt=doubt or None,
        )

    def phase_rates(self) -> Iterator[PhaseRate]:
        """Forward, backward and step, those that are measured and whose FLOPs are known."""
        is_pass = self.capture.step is not None and self.capture.step.is_pass
        flops: dict[str, int | None] = self.counted_flops(self.counted) if self.counted else {}
        if self.shapes:
            forward = forward_flops(*self.shapes)
            flops = {
                "forward": forward,
                "backward": 2 * forward,
                STEP: self.step_flops(forward, self.shapes.batch_size),
            }
        for name, model_flops in flops.items():
            found = None if name == STEP and is_pass else self.time_of(name)
            if found and model_flops:
                rate = model_flops / (found[0] / MS_PER_S)
                mfu, best = rate / self.peak if self.peak else None, self.rates.get(self.best or "")
                yield PhaseRate(name, model_flops, *found, mfu, rate / best if best else None)

    def counted_flops(self, counted: CountedFlops) -> dict[str, int | None]:
        """FLOPs by phase, as they were counted in one step of the program."""
        if counted.unknown:
            self.notes.append(f"FLOPs of these operators are not known, and not counted: {', '.join(counted.unknown)}.")
        # Of several passes, the prompt's and those of single tokens, none is like their mean.
        alike = [name for name in _PASSES if counted.passes.get(name) == 1 or self.capture.phase("backward")]
        flops: dict[str, int | None] = {name: round(sum(counted.of_pass(name).values())) for name in alike}
        steps = self.capture.phase(STEP) or self.capture.phase(OTHER_STEP)
        instances = {name: phase.instances for name in _PASSES if (phase := self.capture.phase(name))}
        if steps and any(count != counted.passes.get(name, 0) * steps.instances for name, count in instances.items()):
            self.notes.append(_NO_WHOLE_STEPS)
            return flops
        return flops if self.capture.times_calls else {**flops, STEP: round(counted.of_step)}

    def step_flops(self, forward: int, batch_size: int) -> int | None:
        """The model's FLOPs in a step: three times a forward pass for each backward pass in it.

        A forward pass without a backward one, as of an evaluation, is counted where there is no backward pass at all.
        """
        capture = self.capture
        first, backward, optimizer = (capture.phase(name) for name in ("forward", "backward", "optimizer"))
        step = capture.phase(STEP) or capture.phase(OTHER_STEP)
        passes, a_pass = (backward, 3 * forward) if backward else (first, forward)
        steps = step or optimizer or (first if capture.step else None)
        mode = capture.configuration.mode if capture.configuration else None
        if passes is None or steps is None:
            return None
        many, rest = divmod(passes.instances, steps.instances)
        if rest or not many or (not backward and (optimizer or mode in ("train", "forward+backward"))):
            self.notes.append(_NO_WHOLE_STEPS)
            return None
        if many > 1:
            self.notes.append(f"A step holds {many} forward passes, each taken to be of batch size {batch_size}.")
        return many * a_pass

    def time_of(self, name: str) -> tuple[float, TimeOf] | None:
        """The best known time of a phase, ms, and what it is.

        Without an unprofiled time, a wall time counts where the GPU fills it, which hides what the profiler costs.
        """
        capture = self.capture
        phase = capture.phase(name) or (capture.phase(OTHER_STEP) if name == STEP else None)
        busy = phase.gpu_busy_ms.typical or 0.0 if phase else 0.0
        unprofiled = capture.unprofiled.trusted_ms(name) if capture.unprofiled else None
        if unprofiled and busy <= unprofiled * (1 + TOLERANCE):
            return unprofiled, "unprofiled"
        diagnosis = capture.diagnosis if name == STEP else None
        estimated = diagnosis.step_ms if diagnosis and not diagnosis.doubt else None
        wall = phase.wall_ms.typical if phase and phase.synchronized else None
        # From one step's start to the next there may be more than a step.
        if estimated and busy <= estimated * (1 + TOLERANCE) and (wall is None or estimated <= wall * (1 + TOLERANCE)):
            return estimated, "estimated"
        if phase is None or phase.uneven:
            return None
        if wall and busy < GPU_BOUND * wall:
            return (busy, "gpu_busy") if busy else (wall, "wall")
        return (wall, "wall") if wall else (busy, "gpu_busy") if busy else None

    def class_rates(self) -> Iterator[ClassRate]:
        """The classes whose FLOPs are known, in forward and backward, and the parts of attention."""
        if not (self.shapes or self.counted) or (self.capture.coverage and self.capture.coverage.lost_launches):
            return
        for name, times in zip(_PASSES, (1, 2), strict=True):
            phase = self.capture.phase(name)
            if phase and not phase.uneven and not phase.opaque and phase.share_of(MATMUL) is not None:
                ms = {row.kernel_class: row.ms_per_instance for row in phase.classes}
                work = self.shaped_work(phase, times, self.shapes) if self.shapes else self.counted_work(phase)
                for kernel_class, flops, elements in work:
                    if kernel_class in ms and flops:
                        kernels = [row for row in phase.kernels if row.kernel_class == kernel_class]
                        precision = next((one for one in precision_shares(kernels) if one != "unknown"), None)
                        one = self.rate(kernel_class, phase.phase, ms[kernel_class], flops, elements, precision)
                        yield from self.without_skipped_work(one)
        yield from self.of_attention()

    def counted_work(self, phase: PhaseSummary) -> Iterator[tuple[str, int, int | None]]:
        """The FLOPs that were counted by class, in a phase that computes nothing again; elements are not known."""
        if self.counted and not (phase.phase == "backward" and self.counted.of("recomputed")):
            for kernel_class, flops in self.counted.of_pass(phase.phase).items():
                yield kernel_class, round(flops), None

    def shaped_work(self, phase: PhaseSummary, times: int, shapes: _Shapes) -> Iterator[tuple[str, int, int | None]]:
        """The FLOPs and elements of matmul and fused attention in a phase with so many times the forward's FLOPs."""
        attention, flops = attention_matmul_flops(*shapes), forward_flops(*shapes)
        fused = phase.launches_of(FUSED)
        if not fused:
            yield MATMUL, times * flops, times * (linear_elements(*shapes) + attention_matmul_elements(*shapes))
        elif fused >= shapes.model.num_layers:  # else some layers are fused, and of no class the FLOPs are known
            yield MATMUL, times * (flops - attention), times * linear_elements(*shapes)
            yield FUSED, times * attention, times * fused_attention_elements(*shapes)

    def without_skipped_work(self, one: ClassRate) -> Iterator[ClassRate]:
        """A rate, but for one so high that work was skipped: scores of fused attention, products of a convolution."""
        peak = one.peak_flops_per_s or self.rates.get(self.best or "")
        skipped = _SKIPPED.get(one.kernel_class) if peak and (one.flops_per_s or 0.0) > peak * (1 + TOLERANCE) else None
        if skipped:
            self.notes.append(f"{one.kernel_class.capitalize()} in {one.phase} {skipped}, so its rate is left out.")
        else:
            yield one

    def of_attention(self) -> Iterator[ClassRate]:
        """The matmuls and the softmax of unfused attention."""
        attention, shapes = self.capture.attention, self.shapes
        if attention is None or shapes is None:
            return
        if attention.matmul_flops and attention.matmul_ms:
            # Of several forward passes: as many times the elements of one.
            passes = attention.matmul_flops // attention_matmul_flops(*shapes)
            moved = passes * attention_matmul_elements(*shapes)
            flops, ms = attention.matmul_flops, attention.matmul_ms
            yield self.rate(ATTENTION_MATMUL, attention.per, ms, flops, moved, self.precision)
        traffic = attention.softmax_traffic
        if attention.softmax_flops and attention.softmax_ms and traffic:
            flops, ms, rate = attention.softmax_flops, attention.softmax_ms, self.below_peak(traffic.bytes_per_s)
            yield ClassRate("softmax", attention.per, ms, flops, traffic.bytes, rate)

    def rate(
        self, kernel_class: str, phase: str, ms: float, flops: int, elements: int | None, precision: str | None
    ) -> ClassRate:
        """The rate of matmuls, in the precision of the capture where that of the kernels is not known.

        Bytes are known only where the elements are.
        """
        precision = precision or self.precision
        size, peak = ELEMENT_BYTES.get(precision or ""), self.rates.get(precision or "")
        moved = elements * size if size and elements else None
        rate = self.below_peak(moved / (ms / MS_PER_S)) if moved else None
        return ClassRate(kernel_class, phase, ms, flops, moved, rate, precision, peak)

    def below_peak(self, bytes_per_s: float) -> float | None:
        """A rate of bytes; None where it is above the memory's peak: the L2 cache has served a part of them."""
        return None if self.memory and bytes_per_s > self.memory * (1 + TOLERANCE) else bytes_per_s

    def copies(self) -> Iterator[ClassRate]:
        """The copies of a step by kind; one on the device reads and writes each byte in its memory."""
        study = self.capture.study
        if study is None:
            return
        for kind, name in enumerate(COPY_KINDS):
            chosen = (study.kind == MEMCPY) & (study.copy == kind) & (study.size > 0)
            ns = int(study.duration[chosen].sum())
            if ns:
                moved = float(np.sum(study.size[chosen])) * (2 if kind == ON_DEVICE else 1) / study.steps
                ms = ns / study.steps / NS_PER_MS
                rate = self.below_peak(moved / (ms / MS_PER_S))
                yield ClassRate(f"copy, {name}" if name != "other" else "copy", STEP, ms, None, moved, rate)

    def doubt(self, phases: Sequence[PhaseRate], classes: Sequence[ClassRate]) -> str:
        """Why no rate can be right; empty where every one is possible."""
        assumed = "the counted FLOPs"
        if self.shapes:
            model, batch, context = self.shapes
            assumed = f"the configuration ({model.name}, context length {context}, batch size {batch})"
            forward = self.capture.phase("forward")
            matmuls = forward.launches_of(MATMUL) if forward and not forward.opaque else 0
            if 0 < matmuls < model.fewest_matmuls:
                return (
                    f"{model.name} needs {model.fewest_matmuls} matmuls per forward or more, the capture launches "
                    f"{matmuls:,.0f}: it is not of {assumed}, so its FLOPs are not known."
                )
        rates = [(f"{one.phase}", one.mfu, self.precision) for one in phases]
        rates += [(f"{one.phase}", one.mfu_of_best, self.best) for one in phases]
        rates += [(f"{one.kernel_class} in {one.phase}", one.share_of_peak, one.precision) for one in classes]
        what, share, precision = max(rates, key=lambda one: one[1] or 0.0, default=("", None, None))
        if share is None or share <= 1 + TOLERANCE:
            return ""
        causal = (
            "; or fused attention skips half of its square" if any(one.kernel_class == FUSED for one in classes) else ""
        )
        return (
            f"{what} would run at {share:.3g} times the GPU's peak in {precision}, which cannot be: {assumed} or the "
            f"precision do not belong to this capture{causal}. Rates are left out."
        )

    def of_ranks(self) -> Iterator[str]:
        """What is taken to be so where several GPUs share the work."""
        if self.capture.whole and any(row.kernel_class == COMMUNICATION for row in self.capture.whole.classes):
            yield _ONE_RANK if self.counted else _WHOLE_MODEL
