"""The ranges that the hooks write, through whatever ``torch.cuda.nvtx`` is: NVTX, or a recorder in its place."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Function = Callable[..., Any]

_NVTX, _PACKAGE = ("range_push", "range_start"), ("push_range", "start_range", "annotate")
_OURS = "_of_nsys_analyze"
_COUNTER = re.compile(r"\d+(\s*(/|of)\s*\d+)?\W*$")


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
        cuda.profiler.start = _followed(cuda.profiler.start, self._opens)
        cuda.profiler.stop = _preceded(cuda.profiler.stop, self._closes)
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
            return _followed(function, self._opens)
        return _preceded(function, self._closes) if name == "cudaProfilerStop" else function


def _followed(function: Function, tell: Callable[[], None]) -> Function:
    """The function, with a word behind it, also where it fails: a PyTorch without CUDA cannot open the range.

    What is said of an open capture range lies inside.
    """

    @functools.wraps(function)
    def saying(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        finally:
            tell()

    setattr(saying, _OURS, True)
    return saying


def _preceded(function: Function, tell: Callable[[], None]) -> Function:
    """The function, with a word before it."""

    @functools.wraps(function)
    def saying(*arguments: Any, **keywords: Any) -> Any:
        tell()
        return function(*arguments, **keywords)

    return saying


def _normalized(name: str) -> str:
    """A name without case, punctuation and counters, as the report reads it."""
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", _COUNTER.sub("", name.split(",", 1)[0])).lower()
    return re.sub(r"[\W_]+", " ", text).strip()
