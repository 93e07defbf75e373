"""Compares the rates that a capture achieves with the peaks of its GPU.

The rates follow from the FLOPs of the model and from a lower bound of the bytes that are moved. MFU (model FLOPs
utilization) is the model's FLOPs ÷ time ÷ peak, see https://arxiv.org/abs/2204.02311, appendix B. A rate above a peak
is impossible, and shows that the configuration or the precision does not belong to the capture. A report then gives
this reason instead of the rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nsys_analyzer.analysis.facts import Fact, FactId
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, FUSED_ATTENTION, MATMUL
from nsys_analyzer.analysis.summary.kernel_tables import find_precision_shares
from nsys_analyzer.analysis.summary.summary import (
    CaptureSummary,
    ClassRate,
    Limits,
    PhaseRate,
    PhaseSummary,
    TimeOrigin,
)
from nsys_analyzer.analysis.transformer.models import (
    ELEMENT_BYTES,
    Configuration,
    Shapes,
    attention_matmul_elements,
    attention_matmul_flops,
    count_linear_elements,
    forward_flops,
    fused_attention_elements,
)
from nsys_analyzer.analysis.transformer.peaks import GPU_BOUND_SHARE, Peaks, find_memory_bandwidth, find_peaks
from nsys_analyzer.configuration import CountedFlops
from nsys_analyzer.trace.columns import COPY_KINDS, MEMCPY, ON_DEVICE
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS

#: A rate counts as impossible if it exceeds a peak by more than this share.
PEAK_TOLERANCE = 0.02
#: The precisions with fewer than 16 bits.
_NARROW_PRECISIONS = ("fp8", "fp4")
#: The peak of a precision is reported if at least this share of the matmul time is in this precision.
_SMALLEST_PEAK_SHARE = 0.05
#: The class of the rates of unfused attention's matmuls, which the class matmul includes as well.
ATTENTION_MATMUL = "attention matmul"

#: The classes of copies, in the order of ``COPY_KINDS``.
COPY_CLASSES = tuple("copy" if kind == "other" else f"copy, {kind}" for kind in COPY_KINDS)
#: The passes whose FLOPs are known.
_PASSES = ("forward", "backward")
#: The ID of the fact that reports skipped work, by the kernel class that may compute fewer FLOPs than are counted.
_SKIPPED_WORK: dict[str, FactId] = {FUSED_ATTENTION: "skipped_scores", "convolution": "skipped_convolution_work"}


def compare_with_peaks(capture: CaptureSummary) -> Limits | None:
    """Compares the rates of a capture with its GPU's peaks; returns None if nothing ran on a GPU."""
    return None if capture.on_cpu or capture.whole is None else _RatesOfCapture(capture).make_limits()


class _RatesOfCapture:
    """The rates of a capture with work on a GPU, with the shapes of its model and the peaks of its GPU."""

    def __init__(self, capture: CaptureSummary) -> None:
        self.capture = capture
        self.peaks: Peaks | None = find_peaks(capture.gpu)
        self.peak_bytes_per_s = find_memory_bandwidth(capture.device)
        configuration = capture.configuration or Configuration()
        self.shapes = configuration.shapes
        self.counted = capture.run.flops if capture.run and not self.shapes else None
        needed_figures = {
            "model": configuration.model,
            "context length": configuration.context_length,
            "batch size": configuration.batch_size,
        }
        needs_shapes = not self.counted and capture.holds_model
        self.missing = [name for name, value in needed_figures.items() if not value] if needs_shapes else []
        self.precision = next((name for name in capture.precisions if name != "unknown"), None)
        if self.precision and capture.precisions[self.precision] < capture.precisions.get("unknown", 0.0):
            self.precision = None
        self.peak_rates = peak_rates = dict(self.peaks.flops_per_s) if self.peaks else {}
        shares = {
            name: share
            for name, share in capture.precisions.items()
            if name in peak_rates and share >= _SMALLEST_PEAK_SHARE
        }
        self.roofs = tuple((name, peak_rates[name]) for name in shares)
        # The weighted mean assumes that the matmuls in each precision reach an equal share of the precision's peak.
        weighted_peaks = sum(share * peak_rates[name] for name, share in shares.items())
        self.peak_flops = weighted_peaks / sum(shares.values()) if self.precision in shares else None
        # Training in 16 bits is not compared with narrower precisions.
        is_narrow = self.precision in _NARROW_PRECISIONS
        comparable_precisions = [name for name in peak_rates if is_narrow or name not in _NARROW_PRECISIONS]
        self.best_precision = max(
            comparable_precisions, key=lambda name: (peak_rates[name], name == "bf16"), default=None
        )
        self.notes: list[Fact] = []

    def make_limits(self) -> Limits:
        """Returns the rates of phases and classes; no rates if any rate is impossible."""
        capture, best_precision = self.capture, self.best_precision
        phases, classes = tuple(self.phase_rates()), tuple(self.class_rates())
        doubt = self.find_doubt(phases, classes)
        if doubt:
            phases = classes = ()
        has_collectives = capture.whole and any(row.kernel_class == COMMUNICATION for row in capture.whole.classes)
        if phases and has_collectives:
            self.notes.append(Fact("flops_of_first_rank" if self.counted else "whole_model_on_each_gpu"))
        return Limits(
            gpu=capture.gpu or "GPU",
            precision=self.precision,
            peak_flops=self.peak_flops,
            best_precision=best_precision,
            best_peak_flops=self.peak_rates[best_precision] if best_precision else None,
            peak_bytes_per_s=self.peak_bytes_per_s,
            source=self.peaks.source if self.peaks else None,
            roofs=self.roofs,
            phases=phases,
            classes=(*classes, *self.copy_rates()),
            missing=(*self.missing, *(() if self.peaks else ("peaks",))),
            notes=tuple(dict.fromkeys(self.notes)),
            doubt=doubt,
        )

    def phase_rates(self) -> Iterator[PhaseRate]:
        """Yields the rates of forward, backward and the step, if they are measured and their FLOPs are known."""
        is_pass = self.capture.step is not None and self.capture.step.is_pass
        flops: dict[str, int | None] = self.counted_flops(self.counted) if self.counted else {}
        if self.shapes:
            forward = forward_flops(*self.shapes)
            flops = {
                "forward": forward,
                "backward": 2 * forward,
                STEP: self.step_flops(forward, self.shapes.batch_size),
            }
        best_peak = self.peak_rates.get(self.best_precision or "")
        for name, model_flops in flops.items():
            time = None if name == STEP and is_pass else self.find_time(name)
            if time and model_flops:
                ms, time_of = time
                rate = model_flops / (ms / MS_PER_S)
                mfu, mfu_of_best = (
                    rate / self.peak_flops if self.peak_flops else None,
                    rate / best_peak if best_peak else None,
                )
                yield PhaseRate(name, model_flops, ms, time_of, mfu, mfu_of_best)

    def counted_flops(self, counted_flops: CountedFlops) -> dict[str, int | None]:
        """Returns the FLOPs of each phase, as they were counted while the program ran one step."""
        if counted_flops.unknown:
            self.notes.append(Fact("uncounted_operators", operators=tuple(counted_flops.unknown)))
        # If a step of inference has several passes (of the prompt and of single tokens), they differ, and a mean would
        # describe none of them.
        has_backward = self.capture.phase("backward")
        similar_passes = [name for name in _PASSES if counted_flops.passes.get(name) == 1 or has_backward]
        flops: dict[str, int | None] = {
            name: round(sum(counted_flops.flops_per_pass(name).values())) for name in similar_passes
        }
        steps = self.capture.phase(STEP) or self.capture.phase(OTHER_STEP)
        instances = {name: phase.instances for name in _PASSES if (phase := self.capture.phase(name))}
        if steps and any(
            count != counted_flops.passes.get(name, 0) * steps.instances for name, count in instances.items()
        ):
            self.notes.append(Fact("no_whole_steps"))
            return flops
        return flops if self.capture.times_calls else {**flops, STEP: round(counted_flops.flops_per_step)}

    def step_flops(self, flops_of_forward: int, batch_size: int) -> int | None:
        """Computes the model's FLOPs in a step: three times the FLOPs of a forward pass for each backward pass.

        If there is no backward pass, as in inference, the FLOPs of the forward passes are used.
        """
        capture = self.capture
        forward, backward, optimizer = (capture.phase(name) for name in ("forward", "backward", "optimizer"))
        step = capture.phase(STEP) or capture.phase(OTHER_STEP)
        passes, flops_of_pass = (backward, 3 * flops_of_forward) if backward else (forward, flops_of_forward)
        steps = step or optimizer or (forward if capture.step else None)
        mode = capture.configuration.mode if capture.configuration else None
        if passes is None or steps is None:
            return None
        passes_per_step, remainder = divmod(passes.instances, steps.instances)
        lacks_backward = not backward and (optimizer or mode in ("train", "forward+backward"))
        if remainder or not passes_per_step or lacks_backward:
            self.notes.append(Fact("no_whole_steps"))
            return None
        if passes_per_step > 1:
            self.notes.append(Fact("several_passes_per_step", passes=passes_per_step, batch_size=batch_size))
        return passes_per_step * flops_of_pass

    def find_time(self, name: str) -> tuple[float, TimeOrigin] | None:
        """Returns the most accurate time of a phase, ms, and the origin of this time; None if no time is known.

        If there is no unprofiled time, the profiled wall time is used if the GPU is busy for almost all of it, because
        the GPU's work then hides the profiler's cost.
        """
        capture = self.capture
        phase = capture.phase(name) or (capture.phase(OTHER_STEP) if name == STEP else None)
        busy_ms = phase.gpu_busy_ms.typical or 0.0 if phase else 0.0
        unprofiled_ms = capture.unprofiled.trusted_ms(name) if capture.unprofiled else None
        if unprofiled_ms and busy_ms <= unprofiled_ms * (1 + PEAK_TOLERANCE):
            return unprofiled_ms, "unprofiled"
        diagnosis = capture.diagnosis if name == STEP else None
        estimated_ms = diagnosis.step_ms if diagnosis and not diagnosis.doubt else None
        wall_ms = phase.wall_ms.typical if phase and phase.synchronized else None
        # The estimate is of the time from the start of a step to the start of the next step, which may contain more
        # work than the range of the step.
        fits_range = not estimated_ms or wall_ms is None or estimated_ms <= wall_ms * (1 + PEAK_TOLERANCE)
        if estimated_ms and busy_ms <= estimated_ms * (1 + PEAK_TOLERANCE) and fits_range:
            return estimated_ms, "estimated"
        if phase is None or phase.uneven:
            return None
        if wall_ms and busy_ms < GPU_BOUND_SHARE * wall_ms:
            return (busy_ms, "gpu_busy") if busy_ms else (wall_ms, "wall")
        return (wall_ms, "wall") if wall_ms else (busy_ms, "gpu_busy") if busy_ms else None

    def class_rates(self) -> Iterator[ClassRate]:
        """Yields the rates of kernel classes with known FLOPs in forward and backward, and of unfused attention."""
        if not (self.shapes or self.counted) or (self.capture.coverage and self.capture.coverage.lost_launches):
            return
        for name, forward_multiple in zip(_PASSES, (1, 2), strict=True):
            phase = self.capture.phase(name)
            if phase is None or phase.uneven or phase.opaque or phase.share_of(MATMUL) is None:
                continue
            class_ms = {row.kernel_class: row.ms_per_instance for row in phase.classes}
            work = (
                self.work_of_shapes(phase, forward_multiple, self.shapes) if self.shapes else self.counted_work(phase)
            )
            for kernel_class, flops, elements in work:
                if kernel_class in class_ms and flops:
                    kernels = [row for row in phase.kernels if row.kernel_class == kernel_class]
                    precision = next((key for key in find_precision_shares(kernels) if key != "unknown"), None)
                    ms = class_ms[kernel_class]
                    rate = self.matmul_rate(kernel_class, phase.phase, ms, flops, elements, precision)
                    if not self.note_skipped_work(rate):
                        yield rate
        yield from self.attention_rates()

    def counted_work(self, phase: PhaseSummary) -> Iterator[tuple[str, int, int | None]]:
        """Yields each kernel class of a phase, its counted FLOPs, and None for the unknown number of elements.

        Nothing is yielded for a backward pass in which a forward pass is recomputed.
        """
        if self.counted and not (phase.phase == "backward" and self.counted.flops_of_phase("recomputed")):
            for kernel_class, flops in self.counted.flops_per_pass(phase.phase).items():
                yield kernel_class, round(flops), None

    def work_of_shapes(
        self, phase: PhaseSummary, forward_multiple: int, shapes: Shapes
    ) -> Iterator[tuple[str, int, int | None]]:
        """Yields matmul and fused attention with the FLOPs and elements that follow from the shapes.

        If only some layers use fused attention, nothing is yielded, because the FLOPs of both classes are unknown.

        Args:
            phase: the phase.
            forward_multiple: the work of the phase as a multiple of the work of a forward pass.
            shapes: the shapes.
        """
        attention, flops = attention_matmul_flops(*shapes), forward_flops(*shapes)
        fused_launches = phase.launches_of(FUSED_ATTENTION)
        if not fused_launches:
            elements = count_linear_elements(*shapes) + attention_matmul_elements(*shapes)
            yield MATMUL, forward_multiple * flops, forward_multiple * elements
        elif fused_launches >= shapes.model.num_layers:
            yield MATMUL, forward_multiple * (flops - attention), forward_multiple * count_linear_elements(*shapes)
            yield FUSED_ATTENTION, forward_multiple * attention, forward_multiple * fused_attention_elements(*shapes)

    def note_skipped_work(self, rate: ClassRate) -> bool:
        """Returns whether the kernels must have skipped work to reach this FLOP rate, which is above the GPU's peak.

        If so, the method adds a note.
        """
        peak = rate.peak_flops_per_s or self.peak_rates.get(self.best_precision or "")
        is_impossible = peak and (rate.flops_per_s or 0.0) > peak * (1 + PEAK_TOLERANCE)
        skipped_work = _SKIPPED_WORK.get(rate.kernel_class) if is_impossible else None
        if skipped_work:
            self.notes.append(Fact(skipped_work, kernel_class=rate.kernel_class, phase=rate.phase))
        return skipped_work is not None

    def attention_rates(self) -> Iterator[ClassRate]:
        """Yields the rates of the matmuls and of the softmax of unfused attention."""
        attention, shapes = self.capture.attention, self.shapes
        if attention is None or shapes is None:
            return
        if attention.matmul_flops and attention.matmul_ms:
            passes = attention.matmul_flops // attention_matmul_flops(*shapes)
            elements = passes * attention_matmul_elements(*shapes)
            flops, ms = attention.matmul_flops, attention.matmul_ms
            yield self.matmul_rate(ATTENTION_MATMUL, attention.per, ms, flops, elements, self.precision)
        traffic = attention.softmax_traffic
        if attention.softmax_flops and attention.softmax_ms and traffic:
            bytes_per_s = self.possible_bytes_per_s(traffic.bytes_per_s)
            flops, ms = attention.softmax_flops, attention.softmax_ms
            yield ClassRate("softmax", attention.per, ms, flops, traffic.bytes, bytes_per_s)

    def matmul_rate(
        self, kernel_class: str, phase: str, ms: float, flops: int, elements: int | None, precision: str | None
    ) -> ClassRate:
        """Returns the rate of matmuls.

        Args:
            kernel_class: the class.
            phase: the phase of the matmuls.
            ms: the time of the matmuls, ms.
            flops: their FLOPs.
            elements: the number of elements that they move; None if it is unknown, so that the bytes are unknown, too.
            precision: their precision. If it is None, the precision of the capture is assumed.
        """
        precision = precision or self.precision
        element_bytes, peak = ELEMENT_BYTES.get(precision or ""), self.peak_rates.get(precision or "")
        moved_bytes = elements * element_bytes if element_bytes and elements else None
        bytes_per_s = self.possible_bytes_per_s(moved_bytes / (ms / MS_PER_S)) if moved_bytes else None
        return ClassRate(kernel_class, phase, ms, flops, moved_bytes, bytes_per_s, precision, peak)

    def possible_bytes_per_s(self, bytes_per_s: float) -> float | None:
        """Returns the rate, or None if it exceeds the memory's peak, because the L2 cache then served some bytes."""
        peak = self.peak_bytes_per_s
        return None if peak and bytes_per_s > peak * (1 + PEAK_TOLERANCE) else bytes_per_s

    def copy_rates(self) -> Iterator[ClassRate]:
        """Yields the rates of a step's copies by kind. A copy on the device both reads and writes each byte."""
        study = self.capture.study
        if study is None:
            return
        for kind, kernel_class in enumerate(COPY_CLASSES):
            is_of_kind = (
                (study.operations.kind == MEMCPY) & (study.operations.copy == kind) & (study.operations.size > 0)
            )
            duration_ns = int(study.operations.duration_ns[is_of_kind].sum())
            if duration_ns:
                moved_bytes = (
                    float(np.sum(study.operations.size[is_of_kind])) * (2 if kind == ON_DEVICE else 1) / study.steps
                )
                ms = duration_ns / study.steps / NS_PER_MS
                bytes_per_s = self.possible_bytes_per_s(moved_bytes / (ms / MS_PER_S))
                yield ClassRate(kernel_class, STEP, ms, None, moved_bytes, bytes_per_s)

    def find_doubt(self, phases: Sequence[PhaseRate], classes: Sequence[ClassRate]) -> Fact | None:
        """Returns the reason why the rates are impossible; None if every rate is possible."""
        configuration = None
        if self.shapes:
            model, batch_size, context_length = self.shapes
            configuration = model.name, context_length, batch_size
            forward = self.capture.phase("forward")
            matmuls = forward.launches_of(MATMUL) if forward and not forward.opaque else 0
            if 0 < matmuls < model.min_matmuls:
                return Fact(
                    "too_few_matmuls", model=model.name, context_length=context_length, batch_size=batch_size,
                    needed=model.min_matmuls, launched=matmuls,
                )  # fmt: skip
        shares = [(rate.phase, rate.mfu, self.precision) for rate in phases]
        shares += [(rate.phase, rate.mfu_of_best, self.best_precision) for rate in phases]
        shares += [(f"{rate.kernel_class} in {rate.phase}", rate.share_of_peak, rate.precision) for rate in classes]
        work, share, precision = max(shares, key=lambda row: row[1] or 0.0, default=("", None, None))
        if share is None or share <= 1 + PEAK_TOLERANCE:
            return None
        return Fact(
            "rate_above_peak", work=work, factor=share, precision=precision, configuration=configuration,
            has_fused=any(rate.kernel_class == FUSED_ATTENTION for rate in classes),
        )  # fmt: skip
