"""What the hooks leave for the report: the times of steps and phases, one JSON file, and a line for the user.

Nothing here waits for the GPU inside a step.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

#: Is replaced by the rank of the process in the name of a file that is each rank's own.
_OF_RANK = "%q{RANK}"


class Results:
    """The results of this process; those of the first rank are written, or each rank's where the file is its own.

    Attributes:
        is_measured: whether the time of the hooks is added up.
    """

    def __init__(self, path: str | None) -> None:
        self.is_measured = self._is_written = False
        rank = os.environ.get("RANK", "0")
        is_written = path is not None and (rank == "0" or _OF_RANK in path)
        self._path = Path(str(path).replace(_OF_RANK, rank)) if is_written else None
        self._notes: list[str] = []
        self._cost_ns = 0

    def say(self, message: str) -> None:
        """Says what could not be annotated, now and in the report."""
        print(f"nsys-analyze: {message}", file=sys.stderr)
        self._notes.append(message)

    def cost_begins(self) -> int:
        """The hooks begin to work; the result is for ``cost_ends``, 0 where that is not measured."""
        begun = time.perf_counter_ns() if self.is_measured else 0
        self.is_measured = False  # what is called inside is part of it
        return begun

    def cost_ends(self, begun: int) -> None:
        """The program goes on."""
        if begun:
            self._cost_ns += time.perf_counter_ns() - begun
            self.is_measured = True

    def write(self, steps: int, values: dict[str, Any]) -> None:
        """Writes what was found in so many steps; the file is complete or absent."""
        self._is_written = True
        if self._path is None:
            return
        notes: dict[str, Any] = {"not_annotated": "; ".join(self._notes)} if self._notes else {}
        if steps:
            notes["hooks_ms"] = self._cost_ns / steps / 1e6
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps({"timed_by": "hooks", **values, **notes}), encoding="utf-8")
        unfinished.replace(self._path)

    def write_notes(self) -> None:
        """Writes what was said, where nothing was written."""
        if self._notes and not self._is_written:
            self.write(0, {})


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
        current = self._torch._C._cuda_getCurrentStream(self._torch._C._cuda_getDevice())
        stream = self._streams.get(current)
        if stream is None:
            stream = self._streams[current] = self._torch.cuda.current_stream()
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
            return {name: [begin.elapsed_time(end) for begin, end in spans] for name, spans in self._spans.items()}
        return {name: [(end - begin) / 1e6 for begin, end in spans] for name, spans in self._spans.items()}

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
