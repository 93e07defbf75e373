"""One step of the warm-up, without a profiler, in which the FLOPs of the program are counted."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from .dimensions import of_batch, of_model
from .flops import Flops
from .modules import Modules

#: The phases that operations are counted by; what lies in none of them is ``other``.
_PHASES = ("forward", "loss", "evaluation", "optimizer")
_NOWHERE = ""
_NOT_COUNTING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class CountedStep:
    """The FLOPs of one step, and the dimensions of what it calls.

    Attributes:
        is_open: whether counting is on.
        found: the keys of a manifest that were found, empty before the step has ended.
    """

    def __init__(self, torch: Any, modules: Modules, is_active: Callable[[str], bool]) -> None:
        self.is_open = False
        self.found: dict[str, Any] = {}
        self._torch, self._modules, self._is_active = torch, modules, is_active
        self._backward = 0
        self._creating = 0
        self._passes: Counter[str] = Counter()
        self._flops: Flops | None = None
        self._batch: dict[str, int] = {}

    def open(self) -> None:
        """The step begins."""
        self._flops = Flops(self._torch, self._place)
        self._passes.clear()
        self.is_open = self._modules.active = True

    def close(self, *, well: bool = True) -> None:
        """The step has ended; what was counted of one that was cut short is worth nothing."""
        if not self.is_open or self._flops is None:
            return
        self.is_open = self._modules.active = False
        if well:
            batch = self._batch if self._passes["forward"] == 1 else {}
            if "vocab_size" not in self.found:  # two dimensions of integers need not be tokens
                batch.pop("context_length", None)
            self.found = {**self.found, **batch, "flops": self._flops.counted(self._passes)}

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        """Counts the FLOPs of what is called until the result is left, if counting is on."""
        return self._flops.counting() if self.is_open and self._flops else _NOT_COUNTING

    def phase_begins(self, name: str) -> None:
        """An instance of a phase begins."""
        if self.is_open:
            self._passes[name] += 1

    def backward_passes(self, more: int, *, creates_graph: bool) -> None:
        """So many more backward passes are running; one that creates a graph computes with gradients on."""
        self._backward += more
        self._creating += more if creates_graph else 0

    def called(self, module: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """A model is called."""
        if not (self.is_open and self._is_active("forward")):
            return
        with contextlib.suppress(Exception):  # whatever a program's attributes and tensors do when they are asked
            self._batch = of_batch(arguments, keywords)
            self.found = {**of_model(module), **self.found}

    def _place(self) -> tuple[str, str]:
        """The phase and the module of what this thread does."""
        module = self._modules.current() or _NOWHERE
        if self._backward:
            recomputes = self._torch.is_grad_enabled() and not self._creating
            return "recomputed" if recomputes else "backward", module
        return next((name for name in _PHASES if self._is_active(name)), "other"), module
