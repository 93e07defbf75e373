"""Where the program is while it is recorded: its stack, some 200 times a second, for the lines that a report names.

A sample is taken when Python's lock is free. Where the program holds it longer, as in a collection of garbage, the
stack is the same until then, so each sample says when it was asked for, too. Times are those of the monotonic clock;
ranges that have a time in their name tell what the capture's clock said then.
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
#: How long Python's lock is waited for, s. In its 5 ms a program comes to a line that releases the lock by itself, and
#: such lines would have the samples of all others.
_PATIENCE_S = 0.0005
#: The clocks are compared so often at most, and so many times in a row: the thread may lose its core meanwhile.
_BETWEEN_MARKS_NS, _MARKS = 20_000_000, 3
_SUFFIX = ".stacks.gz"
#: What PyTorch says of a call that waits.
_SYNCHRONIZING = "called a synchronizing CUDA operation"
#: Lines of the source that are kept before and behind each line.
_AROUND = 5
#: The folders of what is none of the program's: Python's, ours, and whatever was installed or generated.
_OTHERS = (
    "<",
    sysconfig.get_path("stdlib"),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),  # noqa: PTH100, PTH120 - the hooks import little
    os.path.dirname(str(getattr(sys.modules.get("torch"), "__file__", "<"))) or "<",  # noqa: PTH120
    os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "<",
)
_INSTALLED = ("site-packages", "dist-packages", "torchinductor_")


class Sampler:
    """The stacks of one thread, from ``open`` to ``close``, which writes them; nothing is done without a path.

    ``loop``: the code in which a process of a data loader works, for its sampler; what called that is none of its own.
    """

    def __init__(self, path: str | None, ranges: Ranges, loop: Any = None) -> None:
        self._path = Path(path.replace(RANK_SUFFIX, os.environ.get("RANK", "0"))) if path else None
        self._ranges, self._loop = ranges, loop
        self._sampling: threading.Thread | None = None
        self._goes_on = False
        self._marked_ns = 0
        self._codes: dict[int, Any] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._samples = array("q")  # when each was asked for and taken, and its stack

    def open(self) -> None:
        """Samples this thread from now on."""
        if self._path and not self._sampling:
            self._goes_on, self._pid, self._patience_s = True, os.getpid(), sys.getswitchinterval()
            sys.setswitchinterval(_PATIENCE_S)
            self._sampling = threading.Thread(
                target=self._sample, args=(threading.get_ident(),), name="nsys-analyze", daemon=True
            )
            self._sampling.start()

    def mark(self) -> None:
        """Says in the capture what the clock is; often enough, for clocks drift apart."""
        if self._goes_on and (now := time.monotonic_ns()) - self._marked_ns >= _BETWEEN_MARKS_NS:
            self._marked_ns = now
            for _ in range(_MARKS):
                self._ranges.note(f"nsys-analyze clock {os.getpid()} {time.monotonic_ns()}")

    def close(self) -> None:
        """Writes the samples, once; the file is complete or absent."""
        if not self._goes_on or not self._path or not self._sampling or self._pid != os.getpid():  # a copy of it
            return
        self._goes_on = False
        self._sampling.join()
        sys.setswitchinterval(self._patience_s)
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with gzip.open(unfinished, "wt", encoding="utf-8") as file:
            json.dump(self._written(), file, separators=(",", ":"))
        unfinished.replace(self._path)

    def of_loader(self, loop: Any) -> Sampler:
        """A sampler for a process of a data loader, which began as a copy of this one's, or anew."""
        own = f"_loader{os.getpid()}{_SUFFIX}"
        return Sampler(str(self._path).replace(_SUFFIX, own) if self._path else None, self._ranges, loop)

    def _sample(self, thread: int) -> None:
        clock, codes, numbers = time.monotonic_ns, self._codes, self._numbers
        asked = clock()
        while self._goes_on:
            asked += PERIOD_NS
            time.sleep(max(asked - clock(), 0) / 1e9)
            taken = clock()
            frame, key = sys._current_frames().get(thread), []
            while frame is not None and (code := frame.f_code) is not self._loop:
                codes[id(code)] = code  # which keeps it, and so its ID
                key += [id(code), frame.f_lasti]
                frame = frame.f_back
            self._samples.extend((asked, taken, numbers.setdefault(tuple(key), len(numbers))))
            asked = taken

    def _written(self) -> dict[str, Any]:
        """The samples, and of each stack the lines of the program, the innermost first."""
        lines = {name: list(dis.findlinestarts(code)) for name, code in self._codes.items() if _is_of_program(code)}
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
                # Before Python 3.11 a code has no qualified name.
                function = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
                frame = (_relative(code.co_filename), line, function)
                if not stack:
                    text, first = linecache.getlines(code.co_filename), max(line - _AROUND, 1)
                    kept = enumerate(text[first - 1 : line + _AROUND], first)
                    source.setdefault(frame[0], {}).update((number, one.rstrip("\n")) for number, one in kept)
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
    """Where in the program the ``forward`` of its modules' classes is, and the first call of each phase.

    Attributes:
        known: file and line by the name of the class or phase; None for classes of one name in different places.
    """

    def __init__(self) -> None:
        self.known: dict[str, str | None] = {}

    def add_call(self, phase: str) -> None:
        """A phase begins, which the program calls at the innermost of its lines."""
        frame = sys._getframe() if phase not in self.known else None
        while frame is not None and not _is_of_program(frame.f_code):
            frame = frame.f_back
        if frame is not None:
            self.known[phase] = f"{_relative(frame.f_code.co_filename)}:{frame.f_lineno}"

    def add_classes(self, model: Any) -> None:
        """The classes of a model's modules, as far as the program's author wrote them."""
        for kind in {type(module) for module in model.modules()}:
            forward: Any = getattr(kind, "forward", None)
            code = getattr(inspect.unwrap(forward), "__code__", None)
            if code is not None and _is_of_program(code):
                place = f"{_relative(code.co_filename)}:{code.co_firstlineno}"
                same = self.known.setdefault(kind.__name__, place) == place
                self.known[kind.__name__] = place if same else None


class Waits:
    """The lines at which the program waits for the GPU: PyTorch warns of each, from ``open`` to ``close``.

    Attributes:
        found: how often each waits, by its words.
    """

    def __init__(self, torch: Any) -> None:
        self.found: Counter[str] = Counter()
        self._cuda = torch.cuda
        self._open = contextlib.ExitStack()

    def open(self) -> None:
        """Has PyTorch warn; its other warnings, and the program's, are shown as before."""
        self._open.enter_context(warnings.catch_warnings())
        show = warnings.showwarning
        warnings.filterwarnings("always", message=f".*{_SYNCHRONIZING}")

        def note(message: Any, *rest: Any, **more: Any) -> None:
            if _SYNCHRONIZING in str(message):
                self._note(sys._getframe())
            else:
                show(message, *rest, **more)

        warnings.showwarning = note
        self._open.callback(self._cuda.set_sync_debug_mode, self._cuda.get_sync_debug_mode())
        self._cuda.set_sync_debug_mode("warn")

    def close(self) -> None:
        """PyTorch warns as it did before."""
        self._open.close()

    def _note(self, frame: Any) -> None:
        places = []
        while frame is not None:
            if _is_of_program(frame.f_code):
                places.append((f"{_relative(frame.f_code.co_filename)}:{frame.f_lineno}", frame.f_code.co_name))
            frame = frame.f_back
        if places:
            called = next((f", called from {place}" for place, name in places[1:] if name != places[0][1]), "")
            self.found[f"{' in '.join(places[0])}{called}"] += 1


def _is_of_program(code: Any) -> bool:
    """Whether the program's author wrote it: it is no code of Python's, of ours or of an installed package."""
    file = code.co_filename
    return not (file.startswith(_OTHERS) or any(part in file for part in _INSTALLED))


def _relative(file: str) -> str:
    """The path as seen from the working folder, where it lies in that."""
    path, folder = os.path.abspath(file), os.getcwd() + os.sep  # noqa: PTH100, PTH109
    return path[len(folder) :] if path.startswith(folder) else path
