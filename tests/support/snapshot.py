"""Builds tiny memory snapshots of PyTorch, event by event."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsys_analyzer.trace.memory_snapshot import MemorySnapshot, read_snapshot

CALL = ("_call_impl", "site-packages/torch/nn/modules/module.py", 1790)
TRAIN = ("<module>", "train.py", 7)
#: Stacks of a forward pass at a line of a model, of a program outside of the model, of an optimizer, and of autograd,
#: which has no frames.
OUTSIDE = (TRAIN,)
OPTIMIZER = (("step", "site-packages/torch/optim/adamw.py", 220), TRAIN)
BACKWARD: tuple[Any, ...] = ()


def forward(line: int) -> tuple[Any, ...]:
    """Returns the stack of a line in a module's forward."""
    return ("linear", "site-packages/torch/nn/functional.py", 5), ("forward", "model.py", line), CALL, TRAIN


class Snapshot:
    """A snapshot of one GPU. Times are in µs, and each event takes one."""

    def __init__(self, **settings: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.segments: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.settings = settings
        self._frames: dict[Any, dict[str, Any]] = {}

    def add(self, action: str, address: int, size: int, stack: Sequence[Any] = BACKWARD) -> Snapshot:
        """Adds an event. The address of ``oom`` is the free memory of the GPU."""
        key = "device_free" if action == "oom" else "addr"
        event = {"action": action, key: address, "size": size, "stream": 0, "time_us": 1_000 + len(self.events)}
        self.events.append(event | {"frames": self.frames(stack)})
        return self

    def alloc(self, address: int, size: int, stack: Sequence[Any] = BACKWARD) -> Snapshot:
        return self.add("alloc", address, size, stack)

    def free(self, address: int, size: int) -> Snapshot:
        return self.add("free_requested", address, size).add("free_completed", address, size)

    def segment(self, address: int, size: int, *blocks: tuple[int, int, str]) -> Snapshot:
        """Adds a segment with blocks of a size, a requested size and a state."""
        rows, at = [], address
        for block_size, requested, state in blocks:
            rows.append({"address": at, "size": block_size, "requested_size": requested, "state": state, "frames": []})
            at += block_size
        self.segments.append(
            {"device": 0, "address": address, "total_size": size, "stream": 0, "is_expandable": False, "blocks": rows}
        )
        return self

    def optimizer_step(self) -> Snapshot:
        """Marks the last event as part of a step of the optimizer, as PyTorch's profiler does."""
        for stage, time in (("START", 999), ("END", 1_000)):
            mark = {"stage": stage, "name": "Optimizer.step#SGD.step", "time_us": time + len(self.events), "device": 0}
            self.annotations.append(mark)
        return self

    def frames(self, stack: Sequence[Any]) -> list[dict[str, Any]]:
        """Returns the frames of a stack; equal frames are one object, as PyTorch writes them."""
        names = ("name", "filename", "line")
        return [self._frames.setdefault(frame, dict(zip(names, frame, strict=True))) for frame in stack]

    @property
    def document(self) -> dict[str, Any]:
        return {
            "segments": self.segments,
            "device_traces": [self.events],
            "allocator_settings": self.settings,
            "external_annotations": self.annotations,
        }

    def write(self, path: Path, protocol: int = 4) -> Path:
        path.write_bytes(pickle.dumps(self.document, protocol))
        return path

    def read(self, folder: Path) -> MemorySnapshot:
        return read_snapshot(self.write(folder / "snapshot.pickle"))
