"""What the hooks leave: ranges through whatever ``torch.cuda.nvtx`` is, NVTX or a recorder in its place, and times.

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

_NVTX, _PACKAGE = ("range_push", "range_start"), ("push_range", "start_range", "annotate")
_OURS = "_of_nsys_analyze"
#: Is replaced by the rank of the process in the name of a file that is each rank's own.
RANK_SUFFIX = "%q{RANK}"
_COUNTER = re.compile(r"\d+(\s*(/|of)\s*\d+)?\W*$")
_EPOCH = re.compile(r"^epoch (\d+ )((of )?\d+ )?")


class Ranges:
    """Ranges of the hooks, beside those of the program: of two with one meaning the program's own is kept.

    Attributes:
        open_window, close_window: open and close the capture range, without a word of it.
    """

    def __init__(
        self, torch: Any, spellings: Mapping[str, Sequence[str]], opens: Callable[[], None], closes: Callable[[], None]
    ) -> None:
        """``opens`` and ``closes`` are called where the program opens or closes a capture range."""
        self._torch, self._opens, self._closes = torch, opens, closes
        self._phases = {spelling: phase for phase, names in spellings.items() for spelling in names}
        self._known: dict[str, str | None] = {}
        self._own: set[str] = set()
        self.watch()

    def watch(self) -> None:
        """Looks at the program's ranges, and at its capture range; call it again where a recorder replaced them."""
        cuda = self._torch.cuda
        if hasattr(cuda.profiler.start, _OURS):
            return
        self._push, self._pop, self._start, self._end = self._functions()
        for module, names in ((cuda.nvtx, _NVTX), (sys.modules.get("nvtx"), _PACKAGE)):
            for name in names if module else ():
                setattr(module, name, self._noting(getattr(module, name)))
        self.open_window, self.close_window = cuda.profiler.start, cuda.profiler.stop
        cuda.profiler.start = _told(cuda.profiler.start, after=self._opens)
        cuda.profiler.stop = _told(cuda.profiler.stop, before=self._closes)
        cuda.cudart = functools.partial(_Cudart, cuda.cudart, self._opens, self._closes)

    def push(self, name: str) -> bool:
        """Opens a range of a phase on this thread; False where the program has its own for that."""
        if name in self._own:
            return False
        self._push(name)
        return True

    def pop(self) -> None:
        """Closes this thread's innermost range."""
        self._pop()

    def start(self, name: str) -> Any:
        """Opens a range that need not nest in the program's; the handle is for ``end``, None where there is none."""
        return None if name in self._own else self._start(name)

    def note(self, text: str) -> None:
        """Writes a text into the capture, as a range that ends at once."""
        self._push(text)
        self._pop()

    def end(self, handle: Any) -> None:
        """Closes the range of a handle."""
        if handle is not None:
            self._end(handle)

    def _functions(self) -> tuple[Function, Function, Function, Function]:
        """Push, pop, start and end; a PyTorch without CUDA has none, and takes those of ``nvtx``, if it is there."""
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
        """The function, which notes the phase that a range of the program's is called after."""

        @functools.wraps(function)
        def noting(*arguments: Any, **keywords: Any) -> Any:
            if not self._torch.compiler.is_compiling():
                name = arguments[0] if arguments else keywords.get("msg", keywords.get("message"))
                self._note(name)
            return function(*arguments, **keywords)

        return noting

    def _note(self, name: object) -> None:
        if not isinstance(name, str):
            return
        if name not in self._known:
            self._known[name] = self._phases.get(_normalized(name))
        if phase := self._known[name]:
            self._own.add(phase)


def _nothing(*_: object) -> None:
    """No range."""


class _Cudart:
    """The CUDA runtime's functions, with a word beside those that open and close a capture range."""

    def __init__(self, cudart: Function, opens: Callable[[], None], closes: Callable[[], None]) -> None:
        self._cudart = cudart()
        self._opens, self._closes = opens, closes

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._cudart, name)
        if name == "cudaProfilerStart":
            return _told(function, after=self._opens)
        return _told(function, before=self._closes) if name == "cudaProfilerStop" else function


def _told(function: Function, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None) -> Any:
    """The function, with a word before or behind it, also where it fails: a PyTorch without CUDA opens no range.

    What is said of an open capture range lies inside.
    """

    @functools.wraps(function)
    def saying(*arguments: Any, **keywords: Any) -> Any:
        if before:
            before()
        try:
            return function(*arguments, **keywords)
        finally:
            if after:
                after()

    setattr(saying, _OURS, True)
    return saying


def _normalized(name: str) -> str:
    """A name without case, punctuation and counters, as the report reads it."""
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", _COUNTER.sub("", name.split(",", 1)[0])).lower()
    return _EPOCH.sub("", re.sub(r"[\W_]+", " ", text)).strip()


# --- times ---


class Results:
    """The results of this process; those of the first rank are written, or each rank's where the file is its own.

    Attributes:
        is_measured: whether the time of the hooks is added up.
    """

    def __init__(self, path: str | None) -> None:
        self.is_measured = self._is_written = False
        rank = os.environ.get("RANK", "0")
        is_written = path is not None and (rank == "0" or RANK_SUFFIX in path)
        self._path = Path(str(path).replace(RANK_SUFFIX, rank)) if is_written else None
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


class Work:
    """What the steps of the warm-up compute, by which ``nsys-analyze verify`` tells whether two programs do the same.

    Attributes:
        losses: of each backward pass, in order; the GPU is waited for.
        rows: of each step, the rows of the largest batch that a model was called with × its backward passes.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.losses: list[float] = []
        self.rows: list[int] = []
        self._rows = self._passes = 0

    def call_model(self, arguments: Any) -> None:
        """A model is called with these values."""
        rows = [len(value) for value in arguments if getattr(value, "shape", None)]
        self._rows = max([self._rows, *rows])

    def begin_backward(self, root: Any) -> None:
        """A backward pass begins at this tensor; inside of a CUDA graph that is captured, nothing may wait."""
        self._passes += 1
        cuda = self._torch.cuda
        if getattr(root, "numel", int)() == 1 and not (cuda.is_initialized() and cuda.is_current_stream_capturing()):
            self.losses.append(float(root.detach()))

    def end_step(self) -> None:
        """The step ends."""
        self.rows.append(self._rows * max(self._passes, 1))
        self._rows = self._passes = 0
