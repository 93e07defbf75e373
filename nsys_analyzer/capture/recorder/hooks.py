"""Replaces the calls by which a program talks to Nsight Systems with calls of the torch recorder.

They are ``torch.cuda.nvtx``, the ``nvtx`` package, and ``torch.cuda.profiler.start()`` and ``stop()``, which raise in a
PyTorch built without CUDA.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Switch(Protocol):
    """The recorder, as far as ranges need it."""

    is_recording: bool


class Ranges:
    """NVTX ranges as ``record_function`` ranges while the recorder records.

    As under nsys, a range that is open when the recording starts is not recorded; one that is open when it ends is
    closed then. PyTorch calls a range's name ``msg``, the ``nvtx`` package ``message``.
    """

    def __init__(self, recorder: Switch) -> None:
        import torch
        from torch.profiler import record_function

        self._recorder = recorder
        # torch.compile must not see into a range: it would compile once more when the recording starts.
        self._is_compiling: Callable[[], bool] = torch.compiler.is_compiling
        self._record_function: Callable[[str], AbstractContextManager[Any]] = record_function
        self._local = threading.local()
        self._started: dict[int, AbstractContextManager[Any] | None] = {}
        self._handles = itertools.count(1)  # threads share it, and its next is atomic

    @property
    def _stack(self) -> list[AbstractContextManager[Any] | None]:
        stack: list[AbstractContextManager[Any] | None] = self._local.__dict__.setdefault("stack", [])
        return stack

    def push(self, message: object = "", *_: object, msg: object = None, **__: object) -> int:
        """Open a range on this thread; returns its depth from 0, as NVTX does."""
        if self._is_compiling():
            return 0
        stack = self._stack
        stack.append(self._opened(msg or message) if self._recorder.is_recording else None)
        return len(stack) - 1

    def pop(self, *_: object, **__: object) -> int:
        """Close this thread's innermost range; returns its depth, -1 where none is open."""
        stack = self._stack if not self._is_compiling() else []
        if not stack:
            return -1
        _close(stack.pop())
        return len(stack)

    def start(self, message: object = "", *_: object, msg: object = None, **__: object) -> int:
        """Open a range that need not nest; returns the handle that closes it."""
        handle = next(self._handles)
        self._started[handle] = self._opened(msg or message) if self._recorder.is_recording else None
        return handle

    def end(self, range_id: int) -> None:
        """Close the range of a handle; a second time is none."""
        _close(self._started.pop(range_id, None))

    def mark(self, message: object = "", *_: object, msg: object = None, **__: object) -> None:
        """Mark a moment, as a range that ends at once."""
        if self._recorder.is_recording:
            _close(self._opened(msg or message))

    def close_all(self) -> None:
        """Close what is open on this thread, for the recording ends; a later ``pop`` still finds its range."""
        stack = self._stack
        for one in reversed(stack):
            _close(one)
        stack[:] = [None] * len(stack)
        for handle, one in list(self._started.items()):  # other threads may be at it
            _close(one)
            self._started[handle] = None

    def _opened(self, message: object) -> AbstractContextManager[Any]:
        opened = self._record_function(str(message))
        opened.__enter__()
        return opened


def _close(opened: AbstractContextManager[Any] | None) -> None:
    if opened is not None:
        opened.__exit__(None, None, None)


def install(ranges: Ranges, start: Callable[[], None], stop: Callable[[], None]) -> None:
    """Puts these in the place of the CUDA profiler's start and stop, and ranges in that of NVTX."""
    import torch

    _replace(torch.cuda.profiler, start=start, stop=stop)
    _replace(torch.cuda, cudart=functools.partial(_Cudart, start, stop, torch.cuda.cudart))
    _replace(torch.cuda.nvtx, range_push=ranges.push, range_pop=ranges.pop, mark=ranges.mark)
    _replace(torch.cuda.nvtx, range_start=ranges.start, range_end=ranges.end)
    if find_spec("nvtx") is not None:
        nvtx = import_module("nvtx")
        _replace(nvtx, push_range=ranges.push, pop_range=ranges.pop, mark=ranges.mark)
        _replace(nvtx, start_range=ranges.start, end_range=ranges.end, annotate=functools.partial(Annotation, ranges))


def _replace(module: ModuleType, **functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        setattr(module, name, function)


class Annotation(ContextDecorator):
    """``nvtx.annotate``: a context manager, or a decorator that names the range after the function."""

    def __init__(self, ranges: Ranges, message: object = None, *_: object, **__: object) -> None:
        self._ranges, self._message = ranges, message

    def __enter__(self) -> Annotation:
        self._ranges.push("" if self._message is None else self._message)
        return self

    def __exit__(self, *_: object) -> None:
        self._ranges.pop()

    def __call__(self, function: Function) -> Function:
        """The function within a range, which has its name where no message was given."""
        message = function.__name__ if self._message is None else self._message
        return ContextDecorator.__call__(Annotation(self._ranges, message), function)


class _Cudart:
    """The CUDA runtime's functions, except those that start and stop a profiler."""

    def __init__(self, start: Callable[[], None], stop: Callable[[], None], cudart: Callable[[], Any]) -> None:
        self._start, self._stop, self._cudart = start, stop, cudart

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cudart(), name)

    def cudaProfilerStart(self) -> object:  # noqa: N802 - CUDA's name
        """Starts the recording and returns CUDA's code of success."""
        self._start()
        return self._success()

    def cudaProfilerStop(self) -> object:  # noqa: N802 - CUDA's name
        """Stops the recording and returns CUDA's code of success."""
        self._stop()
        return self._success()

    def _success(self) -> object:
        import torch

        return self._cudart().cudaError.success if torch.cuda.is_available() else 0
