"""Which module the program is in: by its calls in forward, and in backward by the nodes of autograd's graph.

A module's call makes the nodes of the graph with the next sequence numbers of its thread. Autograd runs the nodes of a
thread from the highest number to the lowest, so that those of one module follow each other, and a hook on the first of
each such run says where backward is.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .ranges import Ranges

#: What stands before the path of a module in the name of its range.
PREFIX = "nn.Module: "
#: What wrappers call the module that they hold.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
#: The number of nodes that only add up a gradient: they run as soon as they can.
_ACCUMULATES = 2**64 - 1


class _Thread:
    """Where one thread is.

    Attributes:
        stack: the modules that it calls, the innermost last, each with whether it has a range.
        backward: the module whose nodes it runs; ``range`` is the range of that.
        numbers, labels: from which sequence number on which module makes nodes, in order; None is outside of all.
    """

    __slots__ = ("backward", "labels", "numbers", "range", "stack")

    def __init__(self) -> None:
        self.stack: list[tuple[str, bool]] = []
        self.backward: str | None = None
        self.range: Any = None
        self.numbers: list[int] = []
        self.labels: list[str | None] = []


class Backward(NamedTuple):
    """The hooks of a backward pass, and the module of the backward pass that it lies in."""

    handles: list[Any]
    around: str | None


class Modules:
    """The modules of the program by their paths, and where each thread is.

    Attributes:
        active: whether anybody wants to know.
        written: whether the modules get ranges.
    """

    def __init__(self, torch: Any, ranges: Ranges) -> None:
        self.active = self.written = self._replicated = False
        self._torch, self._ranges = torch, ranges
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._threads: dict[int, _Thread] = {}
        # The number of the next node. Where PyTorch does not say it, modules are known in forward alone.
        self._next_number = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)

    def current(self) -> str | None:
        """The module that this thread is in, None outside of all."""
        here = self._here()
        return here.stack[-1][0] if here.stack else here.backward

    def enter(self, module: Any) -> None:
        """A call of a module begins on this thread."""
        here = self._here()
        name = self._names.get(module) or self._named(module, here)
        is_wrapper = bool(here.stack) and here.stack[-1][0] == name
        written = self.written and not is_wrapper
        here.stack.append((name, written))
        self._mark(here, name)
        if written:
            self._ranges.push(f"{PREFIX}{name}")

    def leave(self) -> None:
        """The innermost call of this thread ends."""
        here = self._here()
        _, written = here.stack.pop()
        self._mark(here, here.stack[-1][0] if here.stack else None)
        if written:
            self._ranges.pop()

    def forget(self) -> None:
        """A step ends: its graph is no longer needed."""
        for thread in list(self._threads.values()):
            thread.numbers, thread.labels = thread.numbers[-1:], thread.labels[-1:]

    def backward_begins(self, roots: Iterable[Any], *, some: bool) -> Backward:
        """Hooks the graph behind some tensors; of a pass that only runs ``some`` of its nodes every node.

        A step's graph is walked once, in Python.
        """
        here = self._here()
        if self._replicated:
            return Backward([], here.backward)
        nodes = sorted(self._nodes(roots), key=lambda pair: -pair[0])
        handles, before = [], here.backward
        for number, node in nodes:
            at = bisect_right(here.numbers, number) - 1
            label = here.labels[at] if at >= 0 else None
            if label != before or some:
                handles.append(node.register_prehook(self._switch(label)))
                before = label
        return Backward(handles, here.backward)

    def backward_ended(self, backward: Backward, *, outermost: bool) -> None:
        """The backward pass has ended; ``outermost`` where none is running any more."""
        for handle in backward.handles:
            handle.remove()
        if not outermost:  # that of a checkpoint, inside a node that goes on
            self._move(backward.around)
        for thread in list(self._threads.values()) if outermost else ():
            self._ranges.end(thread.range)
            thread.backward = thread.range = None

    def _here(self) -> _Thread:
        ident = threading.get_ident()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = _Thread()
        return thread

    def _mark(self, here: _Thread, label: str | None) -> None:
        number = self._next_number()
        if here.numbers and here.numbers[-1] == number:  # no node was made in between
            here.labels[-1] = label
        else:
            here.numbers.append(number)
            here.labels.append(label)

    def _switch(self, label: str | None) -> Any:
        """A hook that has the thread that runs it be in a module."""
        is_compiling = self._torch.compiler.is_compiling

        def switch(_: Any) -> None:
            if self.active and not is_compiling():
                try:
                    self._move(label)
                except Exception:  # noqa: BLE001 - it is none of the program's: modules are not known any more
                    self.active = False

        return switch

    def _move(self, label: str | None) -> None:
        here = self._here()
        if here.backward != label:
            self._ranges.end(here.range)
            here.backward = label
            here.range = self._ranges.start(f"{PREFIX}{label}") if label and self.written else None

    def _nodes(self, roots: Iterable[Any]) -> Iterable[tuple[int, Any]]:
        """The nodes behind some tensors that compute a gradient, with their sequence numbers."""
        left = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
        seen = set(left)
        while left:
            node = left.pop()
            number = node._sequence_nr()
            if number != _ACCUMULATES:
                yield number, node
            for before, _ in node.next_functions:
                if before is not None and before not in seen:
                    seen.add(before)
                    left.append(before)

    def _named(self, module: Any, here: _Thread) -> str:
        """The name of a module that has none yet: as a root or, called by another that does not hold it, below that."""
        if here.stack:
            path, _, _ = here.stack[-1][0].rpartition(": ")
            name = self._names[module] = _name(path, type(module).__name__, module)
            return name
        # Its replicas are made anew for each call, and number their nodes on threads of their own.
        self._replicated |= type(module).__name__ == "DataParallel"
        wrappers = list(_unwrapped(module))
        inner = wrappers[-1]
        root = kind = type(inner).__name__
        while root in self._roots:
            root = f"{kind}#{int(root.partition('#')[2] or 1) + 1}"
        self._roots[root] = inner
        for path, child in inner.named_modules():
            if "/" not in self._names.get(child, ""):  # one that was called alone before has its place now
                self._names[child] = _name(root, path, child)
        for child in wrappers:
            self._names[child] = self._names[inner]
        return self._names[module]


def _unwrapped(module: Any) -> Iterator[Any]:
    """A module, and inside it the ones that wrappers hold: those of compilers, and of training on several GPUs."""
    yield module
    while len(held := list(module.named_children())) == 1 and held[0][0] in (*_WRAPPED, "module"):
        module = held[0][1]
        yield module


def _name(root: str, path: str, module: Any) -> str:
    """The name of a module at a path below another: ``GPT/h.0.attn: Attention``."""
    words = [word for word in path.split(".") if word and word not in _WRAPPED]
    joint = "." if "/" in root else "/"
    return f"{joint.join([root, '.'.join(words)]) if words else root}: {type(module).__name__}"
