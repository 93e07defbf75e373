"""Samples the program's stack about 200 times per second while it is recorded, for the lines that a report names.

A sample is taken when Python's global lock is free. If the program holds the lock for longer, for example during a
garbage collection, the sample is late, but the stack has not changed since the sample was due. So each sample also
records when it was due. All times are times of the monotonic clock. Ranges with such a time in their name relate the
monotonic clock to the clock of the capture.
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

from .ranges import RANK_SUFFIX, Ranges

PERIOD_NS = 5_000_000
#: The switch interval of Python's global lock while sampling, in seconds. With the default of 5 ms, a program would
#: usually reach a line that releases the lock first, and that line would get the samples of all other lines.
_SWITCH_INTERVAL_S = 0.0005
#: The shortest time between two comparisons of the clocks. Each comparison writes three marks, because the thread may
#: lose its core during one of them.
_CLOCK_MARK_PERIOD_NS, _MARKS_PER_COMPARISON = 20_000_000, 3
_SUFFIX = ".stacks.gz"
#: The text of PyTorch's warning on a call that waits for the GPU.
_SYNCHRONIZING = "called a synchronizing CUDA operation"
#: The number of source lines that are kept before and after each sampled line.
_CONTEXT_LINES = 5
#: The beginnings of paths that are not the program's own: Python's library, this package, PyTorch, and generated code.
_FOREIGN_PATHS = (
    "<",
    sysconfig.get_path("stdlib"),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),  # noqa: PTH100, PTH120 - the hooks import little
    os.path.dirname(str(getattr(sys.modules.get("torch"), "__file__", "<"))) or "<",  # noqa: PTH120
    os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "<",
)
_INSTALLED_FOLDERS = ("site-packages", "dist-packages", "torchinductor_")


class Sampler:
    """Samples the stacks of one thread from ``open`` to ``close``, which writes them. Without a path it does nothing.

    ``loop`` is the code of a data loader's process for its sampler. The callers of ``loop`` are left out of the
    samples.
    """

    def __init__(self, path: str | None, ranges: Ranges, loop: Any = None) -> None:
        self._path = Path(path.replace(RANK_SUFFIX, os.environ.get("RANK", "0"))) if path else None
        self._ranges, self._loop = ranges, loop
        self._sampling: threading.Thread | None = None
        self._goes_on = False
        self._marked_ns = 0
        self._codes: dict[int, Any] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._samples = array("q")  # for each sample: when it was due, when it was taken, and the index of its stack

    def open(self) -> None:
        """Starts to sample this thread."""
        if self._path and not self._sampling:
            self._goes_on, self._pid, self._patience_s = True, os.getpid(), sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            self._sampling = threading.Thread(
                target=self._sample, args=(threading.get_ident(),), name="nsys-analyze", daemon=True
            )
            self._sampling.start()

    def mark(self) -> None:
        """Writes the time of the monotonic clock into the capture, often enough to follow the drift of the clocks."""
        if self._goes_on and (now := time.monotonic_ns()) - self._marked_ns >= _CLOCK_MARK_PERIOD_NS:
            self._marked_ns = now
            for _ in range(_MARKS_PER_COMPARISON):
                self._ranges.note(f"nsys-analyze clock {os.getpid()} {time.monotonic_ns()}")

    def close(self) -> None:
        """Writes the samples, once. The file is written completely or not at all."""
        if not self._goes_on or not self._path or not self._sampling or self._pid != os.getpid():  # a copy of it
            return
        self._goes_on = False
        self._sampling.join()
        sys.setswitchinterval(self._patience_s)
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with gzip.open(unfinished, "wt", encoding="utf-8") as file:
            json.dump(self._contents(), file, separators=(",", ":"))
        unfinished.replace(self._path)

    def of_loader(self, loop: Any) -> Sampler:
        """Returns a sampler for a process of a data loader, which may be forked or started anew."""
        suffix = f"_loader{os.getpid()}{_SUFFIX}"
        return Sampler(str(self._path).replace(_SUFFIX, suffix) if self._path else None, self._ranges, loop)

    def _sample(self, thread: int) -> None:
        clock, codes, numbers = time.monotonic_ns, self._codes, self._numbers
        due_ns = clock()
        while self._goes_on:
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

    def _contents(self) -> dict[str, Any]:
        """Returns the contents of the file: the samples, and the program's lines of each stack, innermost first."""
        lines = {name: list(dis.findlinestarts(code)) for name, code in self._codes.items() if is_of_program(code)}
        frames: dict[tuple[str, int, str], int] = {}
        stacks, source = list[list[int]](), dict[str, dict[int, str]]()
        for key in self._numbers:
            stack: list[int] = []
            for name, offset in itertools.zip_longest(*[iter(key)] * 2):
                if name not in lines:
                    continue
                code = self._codes[name]
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


class Lines:
    """The source lines of each module class's ``forward``, and of the first call of each phase.

    Attributes:
        places: file and line by the name of the class or phase, or None if several classes have the name.
    """

    def __init__(self) -> None:
        self.places: dict[str, str | None] = {}

    def add_call(self, phase: str) -> None:
        """Notes the line at which the program starts a phase for the first time."""
        frame = sys._getframe() if phase not in self.places else None
        while frame is not None and not is_of_program(frame.f_code):
            frame = frame.f_back
        if frame is not None:
            self.places[phase] = f"{relative_path(frame.f_code.co_filename)}:{frame.f_lineno}"

    def add_classes(self, model: Any) -> None:
        """Notes the lines of the classes of a model's modules, for classes that belong to the program."""
        for kind in {type(module) for module in model.modules()}:
            forward: Any = getattr(kind, "forward", None)
            code = getattr(inspect.unwrap(forward), "__code__", None)
            if code is not None and is_of_program(code):
                place = f"{relative_path(code.co_filename)}:{code.co_firstlineno}"
                same = self.places.setdefault(kind.__name__, place) == place
                self.places[kind.__name__] = place if same else None


class Waits:
    """The lines at which the program waits for the GPU. PyTorch warns of each wait between ``open`` and ``close``.

    Attributes:
        counts: how often the program waits at each line.
    """

    def __init__(self, torch: Any) -> None:
        self.counts: Counter[str] = Counter()
        self._cuda = torch.cuda
        self._open = contextlib.ExitStack()

    def open(self) -> None:
        """Turns PyTorch's warnings on. All other warnings are shown as before."""
        self._open.enter_context(warnings.catch_warnings())
        show = warnings.showwarning
        warnings.filterwarnings("always", message=f".*{_SYNCHRONIZING}")

        def note(message: Any, *arguments: Any, **keywords: Any) -> None:
            """Counts a warning on a wait, and shows every other warning."""
            if _SYNCHRONIZING in str(message):
                self._note(sys._getframe())
            else:
                show(message, *arguments, **keywords)

        warnings.showwarning = note
        self._open.callback(self._cuda.set_sync_debug_mode, self._cuda.get_sync_debug_mode())
        self._cuda.set_sync_debug_mode("warn")

    def close(self) -> None:
        """Turns PyTorch's warnings off again."""
        self._open.close()

    def _note(self, frame: Any) -> None:
        places = []
        while frame is not None:
            if is_of_program(frame.f_code):
                places.append((f"{relative_path(frame.f_code.co_filename)}:{frame.f_lineno}", frame.f_code.co_name))
            frame = frame.f_back
        if places:
            called = next((f", called from {place}" for place, name in places[1:] if name != places[0][1]), "")
            self.counts[f"{' in '.join(places[0])}{called}"] += 1


def is_of_program(code: Any) -> bool:
    """Returns whether code belongs to the program, and not to Python, this package or an installed package."""
    file = code.co_filename
    return not (file.startswith(_FOREIGN_PATHS) or any(part in file for part in _INSTALLED_FOLDERS))


def relative_path(file: str) -> str:
    """Returns a path relative to the working folder if it lies inside it, else the absolute path."""
    path, folder = os.path.abspath(file), os.getcwd() + os.sep  # noqa: PTH100, PTH109
    return path[len(folder) :] if path.startswith(folder) else path
