"""Writes the results of the hooks: ranges through ``torch.cuda.nvtx`` or its replacement, and times.

The times of steps and phases are one JSON file for the report. Nothing here waits for the GPU inside a measured step.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Function = Callable[..., Any]

_TORCH_FUNCTIONS, _PACKAGE_FUNCTIONS = ("range_push", "range_start"), ("push_range", "start_range", "annotate")
_WRAPPER_MARK = "_of_nsys_analyze"
#: The text that stands for the rank of the process in the name of a file that each rank writes.
RANK_SUFFIX = "%q{RANK}"
_COUNTER = re.compile(r"\d+(\s*(/|of)\s*\d+)?\W*$")
_EPOCH = re.compile(r"^epoch (\d+ )((of )?\d+ )?")


class Ranges:
    """Writes the ranges of the hooks, except for phases for which the program has its own ranges.

    Attributes:
        open_window, close_window: open and close the capture range without notifying the hooks.
    """

    def __init__(
        self, torch: Any, spellings: Mapping[str, Sequence[str]], opens: Callable[[], None], closes: Callable[[], None]
    ) -> None:
        """Wraps the functions of the program. ``opens`` and ``closes`` are called with the program's capture range."""
        self._torch, self._opens, self._closes = torch, opens, closes
        self._phases = {spelling: phase for phase, names in spellings.items() for spelling in names}
        self._phase_of_name: dict[str, str | None] = {}
        self._phases_of_program: set[str] = set()
        self.watch()

    def watch(self) -> None:
        """Wraps the functions for ranges and for the capture range. Call it again after a recorder replaced them."""
        cuda = self._torch.cuda
        if hasattr(cuda.profiler.start, _WRAPPER_MARK):
            return
        self._push, self._pop, self._start, self._end = self._functions()
        for module, names in ((cuda.nvtx, _TORCH_FUNCTIONS), (sys.modules.get("nvtx"), _PACKAGE_FUNCTIONS)):
            for name in names if module else ():
                setattr(module, name, self._noting(getattr(module, name)))
        self.open_window, self.close_window = cuda.profiler.start, cuda.profiler.stop
        cuda.profiler.start = _with_callbacks(cuda.profiler.start, after=self._opens)
        cuda.profiler.stop = _with_callbacks(cuda.profiler.stop, before=self._closes)
        cuda.cudart = functools.partial(_Cudart, cuda.cudart, self._opens, self._closes)

    def push(self, name: str) -> bool:
        """Opens the range of a phase on this thread. Returns False if the program has its own range for the phase."""
        if name in self._phases_of_program:
            return False
        self._push(name)
        return True

    def pop(self) -> None:
        """Closes this thread's innermost range."""
        self._pop()

    def start(self, name: str) -> Any:
        """Opens a range that may overlap the program's ranges.

        Returns:
            The handle for ``end``, or None if the program has its own range for the phase.
        """
        return None if name in self._phases_of_program else self._start(name)

    def note(self, text: str) -> None:
        """Writes a text into the capture as an empty range."""
        self._push(text)
        self._pop()

    def end(self, handle: Any) -> None:
        """Closes the range of a handle."""
        if handle is not None:
            self._end(handle)

    def _functions(self) -> tuple[Function, Function, Function, Function]:
        """Returns the functions push, pop, start and end of PyTorch, or of the package ``nvtx`` without CUDA."""
        nvtx = self._torch.cuda.nvtx
        try:
            nvtx.mark("nsys-analyze")
        except RuntimeError:
            try:
                import nvtx as package
            except ImportError:
                return _nothing, _nothing, _nothing, _nothing
            return package.push_range, package.pop_range, package.start_range, package.end_range
        return nvtx.range_push, nvtx.range_pop, nvtx.range_start, nvtx.range_end

    def _noting(self, function: Function) -> Function:
        """Wraps a function for ranges, to note the phases for which the program has its own ranges."""

        @functools.wraps(function)
        def noting(*arguments: Any, **keywords: Any) -> Any:
            """Notes the phase of the range's name, and runs the function."""
            if not self._torch.compiler.is_compiling():
                name = arguments[0] if arguments else keywords.get("msg", keywords.get("message"))
                self._note(name)
            return function(*arguments, **keywords)

        return noting

    def _note(self, name: object) -> None:
        if not isinstance(name, str):
            return
        if name not in self._phase_of_name:
            self._phase_of_name[name] = self._phases.get(_normalize(name))
        if phase := self._phase_of_name[name]:
            self._phases_of_program.add(phase)


def _nothing(*_: object) -> None:
    """Does nothing. It replaces a function for ranges that is missing."""


class _Cudart:
    """The functions of the CUDA runtime, with callbacks for those that open and close a capture range."""

    def __init__(self, cudart: Function, opens: Callable[[], None], closes: Callable[[], None]) -> None:
        self._cudart = cudart()
        self._opens, self._closes = opens, closes

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._cudart, name)
        if name == "cudaProfilerStart":
            return _with_callbacks(function, after=self._opens)
        return _with_callbacks(function, before=self._closes) if name == "cudaProfilerStop" else function


def _with_callbacks(
    function: Function, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> Any:
    """Wraps a function with callbacks. They also run if the function fails, as in a PyTorch without CUDA.

    Both callbacks run inside the capture range.
    """

    @functools.wraps(function)
    def notifying(*arguments: Any, **keywords: Any) -> Any:
        """Runs the callbacks around the function."""
        if before:
            before()
        try:
            return function(*arguments, **keywords)
        finally:
            if after:
                after()

    setattr(notifying, _WRAPPER_MARK, True)
    return notifying


def _normalize(name: str) -> str:
    """Returns a name without case, punctuation and counters, as the report reads it."""
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", _COUNTER.sub("", name.split(",", 1)[0])).lower()
    return _EPOCH.sub("", re.sub(r"[\W_]+", " ", text)).strip()


# --- times ---


class Results:
    """The results of this process. Only the first rank writes them, unless each rank has its own file.

    Attributes:
        is_measured: whether the time that the hooks take is measured.
    """

    def __init__(self, path: str | None) -> None:
        self.is_measured = self._is_written = False
        rank = os.environ.get("RANK", "0")
        is_written = path is not None and (rank == "0" or RANK_SUFFIX in path)
        self._path = Path(str(path).replace(RANK_SUFFIX, rank)) if is_written else None
        self._notes: list[str] = []
        self._cost_ns = 0

    def say(self, message: str) -> None:
        """Prints a message about a part that cannot be annotated, and keeps the message for the report."""
        print(f"nsys-analyze: {message}", file=sys.stderr)
        self._notes.append(message)

    def cost_begins(self) -> int:
        """Notes that the hooks start to work. Returns the time for ``cost_ends``, or 0 if it is not measured."""
        begun = time.perf_counter_ns() if self.is_measured else 0
        self.is_measured = False  # the time of a hook inside another hook must not count twice
        return begun

    def cost_ends(self, begun: int) -> None:
        """Notes that the hooks end and the program continues."""
        if begun:
            self._cost_ns += time.perf_counter_ns() - begun
            self.is_measured = True

    def write(self, steps: int, values: dict[str, Any]) -> None:
        """Writes the values of the measured steps. The file is written completely or not at all.

        Args:
            steps: the number of measured steps.
            values: the entries of the file.
        """
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
        """Writes the messages if no values were written."""
        if self._notes and not self._is_written:
            self.write(0, {})


class Clock:
    """Measures times in the capture range, on a GPU with CUDA events that are read at the end, else on the CPU's clock.

    The GPU time of a phase is from the moment when its work may begin to the end of its work. The GPU time of a step
    starts at the end of the previous step's work, so a program that runs ahead of the GPU gets the GPU's times.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._spans: dict[str, list[tuple[Any, Any]]] = {}
        self._step: Any = None
        self._streams: dict[object, Any] = {}
        self.begin()  # CUDA takes half a millisecond for its first event, which must not count as time of a step

    def begin(self) -> Any:
        """Returns the current moment, for ``end``."""
        if not self._on_gpu:
            return time.perf_counter_ns()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._stream())
        return event

    def _stream(self) -> Any:
        """Returns the current stream from a cache, because PyTorch takes long to make an object for it."""
        current = self._torch._C._cuda_getCurrentStream(self._torch._C._cuda_getDevice())
        stream = self._streams.get(current)
        if stream is None:
            stream = self._streams[current] = self._torch.cuda.current_stream()
        return stream

    def end(self, name: str, begun: Any) -> None:
        """Notes the end of a phase that began at the given moment."""
        self._spans.setdefault(name, []).append((begun, self.begin()))

    def step_begins(self) -> None:
        """Notes the start of a step."""
        self._step = self.begin()

    def step_ends(self) -> None:
        """Notes the end of a step."""
        if self._step is not None:
            self.end("step", self._step)

    def times_ms(self) -> dict[str, list[float]]:
        """Waits for the GPU, and returns the times in ms by phase, one for each instance."""
        if self._on_gpu:
            self._torch.cuda.synchronize()
            return {name: [begin.elapsed_time(end) for begin, end in spans] for name, spans in self._spans.items()}
        return {name: [(end - begin) / 1e6 for begin, end in spans] for name, spans in self._spans.items()}

    def machine(self) -> dict[str, Any]:
        """Returns the device and the versions by the keys of a manifest. Unknown values are None."""
        cuda, on_gpu = self._torch.cuda, self._on_gpu
        return {
            "device": "cuda" if on_gpu else "cpu",
            "gpu": cuda.get_device_name() if on_gpu else None,
            "python": platform.python_version(),
            "torch": str(self._torch.__version__),
            "cuda": self._torch.version.cuda,
            "peak_memory_bytes": cuda.max_memory_allocated() if on_gpu else None,
        }


class Work:
    """The work of the warm-up steps, by which ``nsys-analyze verify`` checks whether two programs do the same work.

    Attributes:
        losses: the loss of each backward pass, in order.
        rows: for each step, the rows of the largest batch of a model's call × the number of backward passes.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.losses: list[float] = []
        self.rows: list[int] = []
        self._rows = self._passes = 0

    def call_model(self, arguments: Any) -> None:
        """Notes the arguments of a model's call."""
        rows = [len(value) for value in arguments if getattr(value, "shape", None)]
        self._rows = max([self._rows, *rows])

    def begin_backward(self, root: Any) -> None:
        """Notes the loss from which a backward pass starts.

        It does nothing while a CUDA graph is captured, because a wait for the GPU would break the capture.
        """
        self._passes += 1
        cuda = self._torch.cuda
        if getattr(root, "numel", int)() == 1 and not (cuda.is_initialized() and cuda.is_current_stream_capturing()):
            self.losses.append(float(root.detach()))

    def end_step(self) -> None:
        """Notes the end of a step."""
        self.rows.append(self._rows * max(self._passes, 1))
        self._rows = self._passes = 0
