"""Finds the line of the program to which a stack of a memory snapshot belongs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.memory.account import MemoryPlace
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.memory_snapshot import Frame, MemorySnapshot

#: Folders with code of PyTorch, and with the hooks that record a program.
_TORCH_FOLDERS = ("/torch/", "/torchgen/", "/nsys_analyzer/")
#: Folders with installed packages and with Python's own library.
_PACKAGE_FOLDERS = ("site-packages/", "dist-packages/", "/lib/python")
#: The functions that call a module. A stack without them is outside of the model.
_MODULE_CALLS = ("_call_impl", "_wrapped_call_impl")


class Places:
    """The place in the program to which each stack of a snapshot belongs.

    Attributes:
        places: the distinct places.
        of_stack: the index in ``places`` of the place of each stack.
    """

    def __init__(self, snapshot: MemorySnapshot) -> None:
        self._stacks = [list_python_frames(snapshot.list_frames(i)) for i in range(len(snapshot.stacks))]
        codes: dict[MemoryPlace, int] = {}
        self.of_stack: Ints = np.array([codes.setdefault(find_place(frames), len(codes)) for frames in self._stacks])
        self.places = tuple(codes)

    @cached_property
    def in_module(self) -> Bools:
        """For each stack, whether it is inside the call of a module of the model."""
        return np.array([any(frame.function in _MODULE_CALLS for frame in frames) for frames in self._stacks])

    def find(self, stack: int) -> MemoryPlace:
        """Returns the place of a stack."""
        return self.places[int(self.of_stack[stack])]


def list_python_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Returns the frames of Python. A snapshot with ``stacks="all"`` also contains frames of C++."""
    return [frame for frame in frames if frame.file.endswith(".py") or frame.file.startswith("<")]


def is_of_torch(frame: Frame) -> bool:
    """Returns whether a frame is code of PyTorch."""
    return any(folder in f"/{frame.file}" for folder in _TORCH_FOLDERS)


def find_place(frames: Sequence[Frame]) -> MemoryPlace:
    """Returns the innermost line outside of PyTorch, and the innermost line of the user's files that leads to it."""
    outside = [frame for frame in frames if not is_of_torch(frame) and not frame.file.startswith("<")]
    own = [frame for frame in outside if not any(folder in frame.file for folder in _PACKAGE_FOLDERS)]
    line = _format_frame(outside[0]) if outside else ""
    caller = _format_frame(own[0]) if own else ""
    return MemoryPlace(line, caller if caller != line else "")


def _format_frame(frame: Frame) -> str:
    """Returns a frame as ``models/llama.py:175 (forward)``, with at most two parts of the path."""
    name = "/".join(frame.file.split("/")[-2:]) if "/" in frame.file else frame.file
    function = "" if frame.function.startswith("<") else f" ({frame.function})"
    return f"{name}:{frame.line}{function}"
