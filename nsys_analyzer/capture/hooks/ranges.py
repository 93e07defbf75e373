"""Writes the results of the hooks: ranges through ``torch.cuda.nvtx`` or its replacement, and a JSON file with times.

The file contains the times of the program's steps and phases. Nothing here waits for the GPU inside a measured step.
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
#: In the name of a file that each rank writes, this text stands for the rank.
RANK_PLACEHOLDER = "%q{RANK}"
_COUNTER = re.compile(r"\d+(\s*(/|of)\s*\d+)?\W*$")
_EPOCH = re.compile(r"^epoch (\d+ )((of )?\d+ )?")


def find_rank_file(path: str | None) -> Path | None:
    """Returns the file that this rank writes; None without a path, or if rank 0 writes the file for all ranks."""
    rank = os.environ.get("RANK", "0")
    if not path or (rank != "0" and RANK_PLACEHOLDER not in path):
        return None
    return Path(path.replace(RANK_PLACEHOLDER, rank))


class Ranges:
    """Writes the ranges of the hooks, except for phases for which the program has its own ranges.

    Attributes:
        open_window, close_window: the functions that open and close the capture range without a call of the hooks.
    """

    def __init__(
        self,
        torch: Any,
        spellings: Mapping[str, Sequence[str]],
        on_window_open: Callable[[], None],
        on_window_close: Callable[[], None],
    ) -> None:
        """Wraps the functions for ranges and for the capture range.

        Args:
            torch: the module.
            spellings: for each phase, the names that the program's own ranges of the phase may have.
            on_window_open: is called when the program opens its own capture range.
            on_window_close: is called when the program closes its own capture range.
        """
        self._torch, self._on_window_open, self._on_window_close = torch, on_window_open, on_window_close
        self._phase_of_spelling = {spelling: phase for phase, names in spellings.items() for spelling in names}
        self._phase_of_name: dict[str, str | None] = {}
        self._phases_of_program: set[str] = set()
        self.wrap_range_functions()

    def wrap_range_functions(self) -> None:
        """Wraps the functions for ranges and for the capture range. It is called again if a recorder replaced them."""
        cuda = self._torch.cuda
        if hasattr(cuda.profiler.start, _WRAPPER_MARK):
            return
        self._push, self._pop, self._start, self._end = self._find_range_functions()
        for module, names in ((cuda.nvtx, _TORCH_FUNCTIONS), (sys.modules.get("nvtx"), _PACKAGE_FUNCTIONS)):
            for name in names if module else ():
                setattr(module, name, self._wrap_range_function(getattr(module, name)))
        self.open_window, self.close_window = cuda.profiler.start, cuda.profiler.stop
        cuda.profiler.start = _with_callbacks(cuda.profiler.start, after=self._on_window_open)
        cuda.profiler.stop = _with_callbacks(cuda.profiler.stop, before=self._on_window_close)
        cuda.cudart = functools.partial(_Cudart, cuda.cudart, self._on_window_open, self._on_window_close)

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

    def write_mark(self, text: str) -> None:
        """Writes a text into the capture as an empty range."""
        self._push(text)
        self._pop()

    def end(self, handle: Any) -> None:
        """Closes the range of a handle."""
        if handle is not None:
            self._end(handle)

    def _find_range_functions(self) -> tuple[Function, Function, Function, Function]:
        """Returns the functions push, pop, start and end of PyTorch, or of the package ``nvtx`` without CUDA."""
        nvtx = self._torch.cuda.nvtx
        try:
            nvtx.mark("nsys-analyze")
        except RuntimeError:
            try:
                import nvtx as package
            except ImportError:
                return _do_nothing, _do_nothing, _do_nothing, _do_nothing
            return package.push_range, package.pop_range, package.start_range, package.end_range
        return nvtx.range_push, nvtx.range_pop, nvtx.range_start, nvtx.range_end

    def _wrap_range_function(self, function: Function) -> Function:
        """Wraps a function that opens ranges, so that the phases for which the program has its own ranges are noted."""

        @functools.wraps(function)
        def noting(*arguments: Any, **keywords: Any) -> Any:
            """Notes the phase to which the range's name belongs, and runs the function."""
            if not self._torch.compiler.is_compiling():
                name = arguments[0] if arguments else keywords.get("msg", keywords.get("message"))
                self._note_range_name(name)
            return function(*arguments, **keywords)

        return noting

    def _note_range_name(self, name: object) -> None:
        if not isinstance(name, str):
            return
        if name not in self._phase_of_name:
            self._phase_of_name[name] = self._phase_of_spelling.get(_normalize(name))
        if phase := self._phase_of_name[name]:
            self._phases_of_program.add(phase)


def _do_nothing(*_: object) -> None:
    """Does nothing. It stands for a function for ranges if neither PyTorch nor the package ``nvtx`` has it."""


class _Cudart:
    """The module that ``torch.cuda.cudart()`` returns, with callbacks when a capture range is opened or closed."""

    def __init__(
        self, cudart: Function, on_window_open: Callable[[], None], on_window_close: Callable[[], None]
    ) -> None:
        self._cudart = cudart()
        self._on_window_open, self._on_window_close = on_window_open, on_window_close

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._cudart, name)
        if name == "cudaProfilerStart":
            return _with_callbacks(function, after=self._on_window_open)
        return _with_callbacks(function, before=self._on_window_close) if name == "cudaProfilerStop" else function


def _with_callbacks(
    function: Function, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> Any:
    """Wraps a function that opens or closes a capture range with callbacks, which run inside the capture range.

    The callbacks also run if the function raises an error, as it does in a PyTorch without CUDA.
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
    """Returns the name of a range in lower case, without punctuation and counters. The report does the same."""
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", _COUNTER.sub("", name.split(",", 1)[0])).lower()
    return _EPOCH.sub("", re.sub(r"[\W_]+", " ", text)).strip()


# --- times ---


class Results:
    """The results of this process. Only rank 0 writes a file, unless each rank has its own file.

    Attributes:
        is_measured: whether the time that the hooks need is measured.
    """

    def __init__(self, path: str | None) -> None:
        self.is_measured = self._is_written = False
        self._path = find_rank_file(path)
        self._notes: list[str] = []
        self._hook_time_ns = 0

    def note_message(self, message: str) -> None:
        """Prints a message about a part that cannot be annotated, and keeps the message for the report."""
        print(f"nsys-analyze: {message}", file=sys.stderr)
        self._notes.append(message)

    def begin_hook_time(self) -> int:
        """Notes that the hooks start to work. Returns the time for ``end_hook_time``, or 0 if it is not measured."""
        start_ns = time.perf_counter_ns() if self.is_measured else 0
        self.is_measured = False  # the time of a hook inside another hook must not count twice
        return start_ns

    def end_hook_time(self, start_ns: int) -> None:
        """Notes that the hooks end and the program continues."""
        if start_ns:
            self._hook_time_ns += time.perf_counter_ns() - start_ns
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
            notes["hooks_ms"] = self._hook_time_ns / steps / 1e6
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps({"timed_by": "hooks", **values, **notes}), encoding="utf-8")
        unfinished.replace(self._path)

    def write_notes(self) -> None:
        """Writes the messages if no values were written."""
        if self._notes and not self._is_written:
            self.write(0, {})


class Clock:
    """Measures the times of steps and phases, on a GPU with CUDA events that are read at the end, else on the CPU.

    A CUDA event has the time at which the GPU has finished all earlier work of its stream. So the times of a program
    whose CPU runs ahead of the GPU are those of the GPU's work.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._spans: dict[str, list[tuple[Any, Any]]] = {}
        self._step_start: Any = None
        self._streams: dict[object, Any] = {}
        self.mark_time()  # CUDA takes half a millisecond for its first event, which must not count as time of a step

    def mark_time(self) -> Any:
        """Returns the current time: a CUDA event that was recorded now, or a time of the CPU's clock in ns."""
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

    def add_span(self, name: str, start: Any) -> None:
        """Notes that a phase or a step, which began at ``start``, ends now."""
        self._spans.setdefault(name, []).append((start, self.mark_time()))

    def begin_step(self) -> None:
        """Notes the start of a step."""
        self._step_start = self.mark_time()

    def end_step(self) -> None:
        """Notes the end of a step."""
        if self._step_start is not None:
            self.add_span("step", self._step_start)

    def times_ms(self) -> dict[str, list[float]]:
        """Waits for the GPU, and returns the times in ms of all instances of each phase, and of all steps."""
        if self._on_gpu:
            self._torch.cuda.synchronize()
            return {name: [begin.elapsed_time(end) for begin, end in spans] for name, spans in self._spans.items()}
        return {name: [(end - begin) / 1e6 for begin, end in spans] for name, spans in self._spans.items()}

    def read_machine(self) -> dict[str, Any]:
        """Returns the device and the software versions by the keys of a manifest. An unknown value is None."""
        cuda, on_gpu = self._torch.cuda, self._on_gpu
        return {
            "device": "cuda" if on_gpu else "cpu",
            "gpu": cuda.get_device_name() if on_gpu else None,
            "python": platform.python_version(),
            "torch": str(self._torch.__version__),
            "cuda": self._torch.version.cuda,
            "peak_memory_bytes": cuda.max_memory_allocated() if on_gpu else None,
        }


class WarmupWork:
    """The work of the warm-up steps, by which ``nsys-analyze verify`` checks whether two programs do equal work.

    Attributes:
        losses: the loss of each backward pass, in order.
        rows: for each step, the largest batch size of a call of a model × the number of backward passes.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.losses: list[float] = []
        self.rows: list[int] = []
        self._batch_size = self._backward_passes = 0

    def note_model_call(self, arguments: Any) -> None:
        """Notes the batch size of a call of a model with these arguments."""
        batch_sizes = [len(value) for value in arguments if getattr(value, "shape", None)]
        self._batch_size = max([self._batch_size, *batch_sizes])

    def note_loss(self, root: Any) -> None:
        """Notes a backward pass and the loss from which it starts.

        The loss is not read while a CUDA graph is captured, because a wait for the GPU would break the capture.
        """
        self._backward_passes += 1
        cuda = self._torch.cuda
        if getattr(root, "numel", int)() == 1 and not (cuda.is_initialized() and cuda.is_current_stream_capturing()):
            self.losses.append(float(root.detach()))

    def finish_step(self) -> None:
        """Notes the end of a step."""
        self.rows.append(self._batch_size * max(self._backward_passes, 1))
        self._batch_size = self._backward_passes = 0
