"""Times of steps and phases without a profiler, and without a wait for the GPU inside a step."""

from __future__ import annotations

import platform
import time
from typing import Any


class Clock:
    """The times since the capture range opened: on a GPU by CUDA events, read in the end; else by the CPU's clock.

    A phase's time on the GPU is from where its work may begin to where that ends. A step's is from the end of the work
    of the step before it, so that a program that runs ahead of the GPU is timed as the GPU sees it.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._spans: dict[str, list[tuple[Any, Any]]] = {}
        self._step: Any = None
        self._streams: dict[object, Any] = {}
        self.begin()  # CUDA prepares its first event for half a millisecond, which is no step's

    def begin(self) -> Any:
        """A moment, for ``end``."""
        if not self._on_gpu:
            return time.perf_counter_ns()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._stream())
        return event

    def _stream(self) -> Any:
        """The stream that the program uses now; PyTorch takes longer to make an object for it than to record on it."""
        known = self._torch._C._cuda_getCurrentStream(self._torch._C._cuda_getDevice())
        stream = self._streams.get(known)
        if stream is None:
            stream = self._streams[known] = self._torch.cuda.current_stream()
        return stream

    def end(self, name: str, begun: Any) -> None:
        """A phase that began at that moment ends now."""
        self._spans.setdefault(name, []).append((begun, self.begin()))

    def step_begins(self) -> None:
        """A step begins now."""
        self._step = self.begin()

    def step_ends(self) -> None:
        """The step ends now."""
        if self._step is not None:
            self.end("step", self._step)

    def times_ms(self) -> dict[str, list[float]]:
        """Milliseconds by phase, a value for each instance; the GPU has done all of it."""
        if self._on_gpu:
            self._torch.cuda.synchronize()
            return {name: [one.elapsed_time(two) for one, two in spans] for name, spans in self._spans.items()}
        return {name: [(two - one) / 1e6 for one, two in spans] for name, spans in self._spans.items()}

    def machine(self) -> dict[str, Any]:
        """The device and the versions, by the keys of a manifest; what is not known is None."""
        cuda, on_gpu = self._torch.cuda, self._on_gpu
        return {
            "device": "cuda" if on_gpu else "cpu",
            "gpu": cuda.get_device_name() if on_gpu else None,
            "python": platform.python_version(),
            "torch": str(self._torch.__version__),
            "cuda": self._torch.version.cuda,
            "peak_memory_bytes": cuda.max_memory_allocated() if on_gpu else None,
        }
