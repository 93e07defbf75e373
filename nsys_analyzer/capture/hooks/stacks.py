"""Samples the program's Python stack about 200 times per second during a recording, so that a report can name lines.

A sample is taken when Python's global lock (GIL) is free. If the program holds the lock, for example during a garbage
collection, the sample is late, but the stack has not changed since the sample was due. So each sample also records when
it was due. All times are of the monotonic clock. Ranges whose names contain a time of the monotonic clock relate it to
the clock of the capture.
"""

from __future__ import annotations

import contextlib
import dis
import gzip
import inspect
import itertools
import json
import linecache
import os
import sys
import sysconfig
import threading
import time
import warnings
from array import array
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

from .ranges import RANK_PLACEHOLDER, Ranges

#: The time between two samples, ns. A sample takes about 50 µs of CPU time, so 200 samples per second take about 1 %.
#: Programs took 6 to 12 % more CPU time with 1,000 samples per second, and 11 to 20 % more with 2,000.
PERIOD_NS = 5_000_000
#: The switch interval of Python's global lock (GIL) during the sampling. With the default of 5 ms, a program would
#: usually first reach a line that releases the lock, and this line would get the samples of all other lines.
_SWITCH_INTERVAL_S = 0.0005
#: The shortest time between two comparisons of the monotonic clock with the clock of the capture. A comparison writes
#: several marks, because the thread may be descheduled during one of them.
_CLOCK_MARK_PERIOD_NS, _MARKS_PER_COMPARISON = 20_000_000, 3
_SUFFIX = ".stacks.gz"
#: The text of PyTorch's warning about a call that waits for the GPU.
_SYNC_WARNING_TEXT = "called a synchronizing CUDA operation"
#: The number of source lines that are kept before and after each sampled line.
_CONTEXT_LINES = 5
#: The prefixes of paths that do not belong to the program: Python's library, this package, PyTorch, and generated code.
_FOREIGN_PATHS = (
    "<",
    sysconfig.get_path("stdlib"),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),  # noqa: PTH100, PTH120 - the hooks import little
    os.path.dirname(str(getattr(sys.modules.get("torch"), "__file__", "<"))) or "<",  # noqa: PTH120
    os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "<",
)
_INSTALLED_FOLDERS = ("site-packages", "dist-packages", "torchinductor_")
#: The folder of this package's own targets, which are programs although they are installed.
_TARGETS_FOLDER = f"{os.sep}profiling_targets{os.sep}"


class Sampler:
    """Samples the stacks of one thread from ``open`` to ``close``, which writes the samples to a file.

    Without a path, nothing is sampled. In a process of a data loader, ``loop`` is the code object of the loop of that
    process, and the samples leave out the callers of ``loop``.
    """

    def __init__(self, path: str | None, ranges: Ranges, loop: Any = None) -> None:
        self._path = Path(path.replace(RANK_PLACEHOLDER, os.environ.get("RANK", "0"))) if path else None
        self._ranges, self._loop = ranges, loop
        self._sampling: threading.Thread | None = None
        self._is_sampling = False
        self._last_mark_ns = 0
        self._code_of_id: dict[int, Any] = {}
        self._stack_indices: dict[tuple[int, ...], int] = {}
        self._samples = array("q")  # for each sample: when it was due, when it was taken, and the index of its stack

    def open(self) -> None:
        """Starts to sample the calling thread."""
        if self._path and not self._sampling:
            self._is_sampling, self._pid, self._original_switch_interval_s = True, os.getpid(), sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            self._sampling = threading.Thread(
                target=self._sample, args=(threading.get_ident(),), name="nsys-analyze", daemon=True
            )
            self._sampling.start()

    def mark_clock(self) -> None:
        """Writes the monotonic clock's time into the capture if the last such mark is too old to follow the drift."""
        if self._is_sampling and (now := time.monotonic_ns()) - self._last_mark_ns >= _CLOCK_MARK_PERIOD_NS:
            self._last_mark_ns = now
            for _ in range(_MARKS_PER_COMPARISON):
                self._ranges.write_mark(f"nsys-analyze clock {os.getpid()} {time.monotonic_ns()}")

    def close(self) -> None:
        """Ends the sampling and writes the samples. The file is written completely or not at all."""
        if not self._is_sampling or not self._path or not self._sampling:
            return
        if self._pid != os.getpid():  # a fork copied this sampler
            return
        self._is_sampling = False
        self._sampling.join()
        sys.setswitchinterval(self._original_switch_interval_s)
        write_compressed(self._path, self._make_contents())

    def make_loader_sampler(self, loop: Any) -> Sampler:
        """Returns a sampler for this process of a data loader, whose code object is ``loop``."""
        suffix = f"_loader{os.getpid()}{_SUFFIX}"
        return Sampler(str(self._path).replace(_SUFFIX, suffix) if self._path else None, self._ranges, loop)

    def _sample(self, thread: int) -> None:
        clock, codes, numbers = time.monotonic_ns, self._code_of_id, self._stack_indices
        due_ns = clock()
        while self._is_sampling:
            due_ns += PERIOD_NS
            time.sleep(max(due_ns - clock(), 0) / 1e9)
            taken_ns = clock()
            frame, key = sys._current_frames().get(thread), []
            while frame is not None and (code := frame.f_code) is not self._loop:
                codes[id(code)] = code  # a reference keeps the ID valid
                key += [id(code), frame.f_lasti]
                frame = frame.f_back
            self._samples.extend((due_ns, taken_ns, numbers.setdefault(tuple(key), len(numbers))))
            due_ns = taken_ns

    def _make_contents(self) -> dict[str, Any]:
        """Returns the contents of the file: the samples, and for each stack the program's lines, innermost first."""
        lines = {name: list(dis.findlinestarts(code)) for name, code in self._code_of_id.items() if is_of_program(code)}
        frames: dict[tuple[str, int, str], int] = {}
        stacks, source = list[list[int]](), dict[str, dict[int, str]]()
        for key in self._stack_indices:
            stack: list[int] = []
            for name, offset in itertools.zip_longest(*[iter(key)] * 2):
                if name not in lines:
                    continue
                code = self._code_of_id[name]
                at = bisect_right([start for start, _ in lines[name]], offset) - 1
                line = lines[name][at][1] or code.co_firstlineno
                # Before Python 3.11, code has no qualified name.
                function = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
                frame = (relative_path(code.co_filename), line, function)
                if not stack:
                    text, first = linecache.getlines(code.co_filename), max(line - _CONTEXT_LINES, 1)
                    context = enumerate(text[first - 1 : line + _CONTEXT_LINES], first)
                    source.setdefault(frame[0], {}).update((number, code.rstrip("\n")) for number, code in context)
                stack.append(frames.setdefault(frame, len(frames)))
            stacks.append(stack)
        return {
            "pid": os.getppid() if self._loop else os.getpid(),
            "loads": self._loop is not None,
            "period_ns": PERIOD_NS,
            "asked_ns": self._samples[0::3].tolist(),
            "taken_ns": self._samples[1::3].tolist(),
            "stack": self._samples[2::3].tolist(),
            "stacks": stacks,
            "frames": list(frames),
            "source": source,
        }


class SourceLines:
    """The source lines of the ``forward`` of each module class, and of the first call of each phase.

    Attributes:
        line_of_name: file and line by the name of a class or a phase, or None if several classes share the name.
    """

    def __init__(self) -> None:
        self.line_of_name: dict[str, str | None] = {}

    def note_phase_call(self, phase: str) -> None:
        """Notes the line at which the program starts a phase for the first time."""
        frame = sys._getframe() if phase not in self.line_of_name else None
        while frame is not None and not is_of_program(frame.f_code):
            frame = frame.f_back
        if frame is not None:
            self.line_of_name[phase] = f"{relative_path(frame.f_code.co_filename)}:{frame.f_lineno}"

    def note_classes(self, model: Any) -> None:
        """Notes the line of each class of the model's modules that belongs to the program."""
        for kind in {type(module) for module in model.modules()}:
            forward: Any = getattr(kind, "forward", None)
            code = getattr(inspect.unwrap(forward), "__code__", None)
            if code is not None and is_of_program(code):
                line = f"{relative_path(code.co_filename)}:{code.co_firstlineno}"
                is_same_line = self.line_of_name.setdefault(kind.__name__, line) == line
                self.line_of_name[kind.__name__] = line if is_same_line else None


class Waits:
    """Counts the program's waits for the GPU by line. PyTorch warns of each wait between ``open`` and ``close``.

    Attributes:
        counts_by_line: the number of waits at each line.
    """

    def __init__(self, torch: Any) -> None:
        self.counts_by_line: Counter[str] = Counter()
        self._cuda = torch.cuda
        self._exit_stack = contextlib.ExitStack()

    def open(self) -> None:
        """Turns on PyTorch's warnings about waits for the GPU. All other warnings are shown as before."""
        self._exit_stack.enter_context(warnings.catch_warnings())
        show = warnings.showwarning
        warnings.filterwarnings("always", message=f".*{_SYNC_WARNING_TEXT}")

        def show_unless_wait(message: Any, *arguments: Any, **keywords: Any) -> None:
            """Counts a warning about a wait, and shows every other warning."""
            if _SYNC_WARNING_TEXT in str(message):
                self._count_wait(sys._getframe())
            else:
                show(message, *arguments, **keywords)

        warnings.showwarning = show_unless_wait
        self._exit_stack.callback(self._cuda.set_sync_debug_mode, self._cuda.get_sync_debug_mode())
        self._cuda.set_sync_debug_mode("warn")

    def close(self) -> None:
        """Turns off PyTorch's warnings about waits for the GPU."""
        self._exit_stack.close()

    def _count_wait(self, frame: Any) -> None:
        lines = []
        while frame is not None:
            code = frame.f_code
            if is_of_program(code):
                lines.append((f"{relative_path(code.co_filename)}:{frame.f_lineno}", code.co_name))
            frame = frame.f_back
        if lines:
            called = next((f", called from {line}" for line, name in lines[1:] if name != lines[0][1]), "")
            self.counts_by_line[f"{' in '.join(lines[0])}{called}"] += 1


def write_compressed(path: Path, contents: dict[str, Any]) -> None:
    """Writes contents as compressed JSON. The file is written completely or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with gzip.open(unfinished, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(contents, file, separators=(",", ":"))
    unfinished.replace(path)


def is_of_program(code: Any) -> bool:
    """Returns whether a code object belongs to the program, and not to Python, this package or an installed package."""
    file = code.co_filename
    is_installed = any(part in file for part in _INSTALLED_FOLDERS) and _TARGETS_FOLDER not in file
    return not (file.startswith(_FOREIGN_PATHS) or is_installed)


def relative_path(file: str) -> str:
    """Returns a path relative to the working folder if it lies inside it, else the absolute path."""
    path, folder = os.path.abspath(file), os.getcwd() + os.sep  # noqa: PTH100, PTH109
    return path[len(folder) :] if path.startswith(folder) else path
