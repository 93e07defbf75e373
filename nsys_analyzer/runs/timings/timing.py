"""One unprofiled timing: a phase of a run, and how long it took."""

from __future__ import annotations

import msgspec

from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize

UNKNOWN_PHASE = "unknown"
"""The phase of a time where no column says what was timed; it matches no phase of a capture."""


class Timing(msgspec.Struct, frozen=True, gc=False):  # there may be one for each of very many rows
    """One phase of one unprofiled configuration, times in milliseconds; ``None`` is unknown.

    ``phase`` is one of ours, such as ``forward+backward``, a word of the file's own, or ``UNKNOWN_PHASE``. ``status``
    is ``ok``, ``oom``, ``failed``, ``timeout``, ``missing`` (no time and no reason given) or a word of the file's own;
    only with ``ok`` there are times. ``capture`` is the name of a capture of this run. ``condition_cells`` are header
    and cell of every column that says a condition; ``conditions`` those of columns without a meaning here.
    """

    model: ModelSize | None
    model_name: str
    context_length: int | None = None
    batch_size: int | None = None
    precision: str | None = None
    mode: str | None = None
    phase: str = UNKNOWN_PHASE
    warmup_steps: int | None = None
    steps: int | None = None
    mean_ms: float | None = None
    std_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    median_ms: float | None = None
    peak_memory_bytes: int | None = None
    status: str = "missing"
    line: int = 0
    file: str = ""
    time_stamp_s: float | None = None
    capture: str | None = None
    attention: str | None = None
    compile: bool | None = None
    cuda_graph: bool | None = None
    optimizer: str | None = None
    device: str | None = None
    gpu: str | None = None
    message: str | None = None
    iteration: int | None = None
    condition_cells: tuple[tuple[str, str], ...] = ()
    conditions: tuple[tuple[str, str], ...] = ()

    @property
    def setup(self) -> tuple[object, ...]:
        """Equal for two timings of one run: the model's dimensions (or its name), and every condition."""
        return *self.known_setup, self.conditions

    @property
    def known_setup(self) -> tuple[object, ...]:
        """The setup without the conditions whose meaning is not known."""
        model = self.model.dimensions if self.model else self.model_name
        known = (self.attention, self.compile, self.cuda_graph, self.optimizer, self.device, self.gpu)
        return model, self.context_length, self.batch_size, self.precision, *known

    @property
    def center_ms(self) -> float | None:
        """The mean, or the median where the file gives that alone."""
        return self.mean_ms if self.mean_ms is not None else self.median_ms

    @property
    def configuration(self) -> Configuration:
        """The configuration that was timed."""
        described = (self.context_length, self.batch_size, self.precision, self.mode, self.attention)
        return Configuration(self.model, *described, source="timings")
