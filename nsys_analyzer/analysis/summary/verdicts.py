"""Whether the GPU is busy in a phase, or waits for the CPU."""

from __future__ import annotations

from typing import Literal

#: The help of `bench` imports this module, which must not wait for numpy.
#: From this share of the wall on, busy, a phase is GPU-bound; from this share on, idle, the GPU waits for the CPU.
GPU_BOUND, IDLE = 0.9, 0.3

Verdict = Literal["GPU-bound", "GPU waits", "neither", "undecided"]


def verdict_of(share: float) -> Verdict:
    """Whether a share is that of a GPU with work, of one that waits, or of neither."""
    if share >= GPU_BOUND:
        return "GPU-bound"
    return "GPU waits" if 1 - share >= IDLE else "neither"
