"""Records the history of PyTorch's allocator in a separate run, and writes it as a snapshot beside the capture.

Each allocation gets the stack of the program, which takes time. So neither the timed nor the profiled run records
memory, because it would make their steps longer. If the program runs out of memory, the snapshot is written at once.
The phases of the steps are part of the snapshot. Their times are on the clock of the allocator's events: ns since 1970.
"""

from __future__ import annotations

import gzip
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from .ranges import RANK_PLACEHOLDER

#: The environment variable with the file for the snapshot. Without it, no memory is recorded.
FILE_VARIABLE = "NSYS_ANALYZE_MEMORY"
#: The key of the phases in a snapshot: lists of the name, the number of the step, the start and the end in ns.
PHASES_KEY = "nsys_analyze_phases"
#: The largest number of recorded events. Older events are dropped. This number of events needs about 1 GB of memory.
_MOST_EVENTS = 1_000_000


class MemoryHistory:
    """The history of the allocator from the start of the program, so that the line of each weight is known.

    Attributes:
        is_recording: whether the history is recorded.
    """

    def __init__(self, torch: Any) -> None:
        """Records from the first use of the GPU, if the environment asks for it. The program chooses its GPU before."""
        path = os.environ.get(FILE_VARIABLE)
        self._torch, self.is_recording, self._step = torch, False, 0
        self._phases: list[tuple[str, int, int, int]] = []
        if path:
            self._path = Path(path.replace(RANK_PLACEHOLDER, os.environ.get("RANK", "0")))
            torch.cuda._lazy_call(self._start)

    def _start(self) -> None:
        try:
            record = self._torch.cuda.memory._record_memory_history
            record(context="alloc", stacks="python", max_entries=_MOST_EVENTS)
            self.is_recording = True
            self._torch._C._cuda_attach_out_of_memory_observer(self._note_out_of_memory)
        except Exception as error:  # noqa: BLE001 - an old PyTorch records no memory, and the program must not notice
            _print_failure(error)

    def add_phase(self, name: str, start_ns: int) -> None:
        """Notes a phase that ends now.

        Args:
            name: the name of the phase.
            start_ns: its start, by ``time.time_ns``.
        """
        if self.is_recording:
            self._phases.append((name, self._step, start_ns, time.time_ns()))

    def note_step_end(self) -> None:
        """Notes that the next phases belong to the next step."""
        if self.is_recording:
            self._step += 1

    def finish(self) -> None:
        """Writes the snapshot, and ends the recording."""
        if self.is_recording:
            self.is_recording = False
            self._torch.cuda.synchronize()
            self._write()
            self._torch.cuda.memory._record_memory_history(enabled=None)

    def _note_out_of_memory(self, *_: object) -> None:
        """Writes the snapshot when an allocation fails, because the program frees memory when it handles the error."""
        try:
            self._write()
        except Exception as error:  # noqa: BLE001 - the program must get its own error
            _print_failure(error)

    def _write(self) -> None:
        snapshot = self._torch.cuda.memory._snapshot()
        snapshot[PHASES_KEY] = [list(phase) for phase in self._phases]
        unfinished = self._path.with_name(f".{self._path.name}")
        with gzip.open(unfinished, "wb", compresslevel=1) as file:
            pickle.dump(snapshot, file)
        unfinished.replace(self._path)


def _print_failure(error: Exception) -> None:
    print(f"nsys-analyze: the memory is not recorded: {type(error).__name__}: {error}", file=sys.stderr)
