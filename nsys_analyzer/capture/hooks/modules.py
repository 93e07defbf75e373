"""Tracks which module the program is in: by calls in forward, and by the nodes of autograd's graph in backward.

A call of a module makes the nodes of the graph with the next sequence numbers of its thread. Autograd runs the nodes of
a thread from the highest number to the lowest, so the nodes of one module follow each other. A hook on the first node
of each such group tells which module backward is in.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .ranges import Ranges

#: The prefix of a module's path in the name of its range.
PREFIX = "nn.Module: "
#: The attributes in which wrappers store their module.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
#: The sequence number of nodes that only accumulate a gradient. They run as soon as possible.
_ACCUMULATES = 2**64 - 1


class _Thread:
    """The position of one thread among the modules.

    Attributes:
        stack: the modules that the thread is calling, the innermost last. Each entry also says whether the module has a
            range.
        backward: the module whose nodes the thread runs in backward, or None.
        range: the range of that module.
        numbers: for each module in ``labels``, the sequence number of the first node that it makes, in ascending order.
        labels: the module for each entry of ``numbers``, or None outside of all modules.
    """

    __slots__ = ("backward", "labels", "numbers", "range", "stack")

    def __init__(self) -> None:
        self.stack: list[tuple[str, bool]] = []
        self.backward: str | None = None
        self.range: Any = None
        self.numbers: list[int] = []
        self.labels: list[str | None] = []


class Backward(NamedTuple):
    """The hooks of a backward pass, and the module in which the enclosing backward pass was."""

    handles: list[Any]
    enclosing: str | None


class Modules:
    """The modules of the program by their paths, and the position of each thread.

    Attributes:
        active: whether calls of modules are tracked.
        written: whether modules get ranges.
    """

    def __init__(self, torch: Any, ranges: Ranges) -> None:
        self.active = self.written = self._replicated = False
        self._torch, self._ranges = torch, ranges
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._threads: dict[int, _Thread] = {}
        # Returns the number of the next node. With a PyTorch that lacks it, modules are tracked in forward only.
        self._next_number = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)

    def current(self) -> str | None:
        """Returns the module that this thread is in, or None outside of all modules."""
        thread = self._this_thread()
        return thread.stack[-1][0] if thread.stack else thread.backward

    def next_node(self) -> int:
        """Returns the sequence number that the next node of autograd on this thread will get."""
        return int(self._next_number())

    def enter(self, module: Any) -> None:
        """Notes the start of a module's call on this thread."""
        thread = self._this_thread()
        name = self._names.get(module) or self._name_module(module, thread)
        is_wrapper = bool(thread.stack) and thread.stack[-1][0] == name
        written = self.written and not is_wrapper
        thread.stack.append((name, written))
        self._mark(thread, name)
        if written:
            self._ranges.push(f"{PREFIX}{name}")

    def leave(self) -> None:
        """Notes the end of the innermost call on this thread."""
        thread = self._this_thread()
        _, written = thread.stack.pop()
        self._mark(thread, thread.stack[-1][0] if thread.stack else None)
        if written:
            self._ranges.pop()

    def forget(self) -> None:
        """Discards the sequence numbers of a step that has ended."""
        for thread in list(self._threads.values()):
            thread.numbers, thread.labels = thread.numbers[-1:], thread.labels[-1:]

    def backward_begins(self, roots: Iterable[Any], *, some: bool) -> Backward:
        """Hooks the graph of some tensors: the first node of each module, or all nodes if only ``some`` nodes will run.

        The graph of a step is visited once, in Python.
        """
        thread = self._this_thread()
        if self._replicated:
            return Backward([], thread.backward)
        nodes = sorted(self._nodes(roots), key=lambda pair: -pair[0])
        handles, before = [], thread.backward
        for number, node in nodes:
            at = bisect_right(thread.numbers, number) - 1
            label = thread.labels[at] if at >= 0 else None
            if label != before or some:
                handles.append(node.register_prehook(self._switch(label)))
                before = label
        return Backward(handles, thread.backward)

    def backward_ended(self, backward: Backward, *, outermost: bool) -> None:
        """Removes the hooks of a backward pass. ``outermost`` is True if no other backward pass is running."""
        for handle in backward.handles:
            handle.remove()
        if not outermost:  # this backward pass is a checkpoint's, inside a node of another pass
            self._move(backward.enclosing)
        for thread in list(self._threads.values()) if outermost else ():
            self._ranges.end(thread.range)
            thread.backward = thread.range = None

    def _this_thread(self) -> _Thread:
        ident = threading.get_ident()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = _Thread()
        return thread

    def _mark(self, thread: _Thread, label: str | None) -> None:
        number = self._next_number()
        if thread.numbers and thread.numbers[-1] == number:  # no node was made since the last entry
            thread.labels[-1] = label
        else:
            thread.numbers.append(number)
            thread.labels.append(label)

    def _switch(self, label: str | None) -> Any:
        """Returns a hook that moves the thread that runs it into a module."""
        is_compiling = self._torch.compiler.is_compiling

        def switch(_: Any) -> None:
            """Moves the thread into the module, or ends the tracking after an error."""
            if self.active and not is_compiling():
                try:
                    self._move(label)
                except Exception:  # noqa: BLE001 - the program must not see the error, so tracking ends
                    self.active = False

        return switch

    def _move(self, label: str | None) -> None:
        thread = self._this_thread()
        if thread.backward != label:
            self._ranges.end(thread.range)
            thread.backward = label
            thread.range = self._ranges.start(f"{PREFIX}{label}") if label and self.written else None

    def _nodes(self, roots: Iterable[Any]) -> Iterable[tuple[int, Any]]:
        """Yields the nodes of the graph of some tensors and their sequence numbers, without nodes that accumulate."""
        pending = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
        visited = set(pending)
        while pending:
            node = pending.pop()
            number = node._sequence_nr()
            if number != _ACCUMULATES:
                yield number, node
            for before, _ in node.next_functions:
                if before is not None and before not in visited:
                    visited.add(before)
                    pending.append(before)

    def _name_module(self, module: Any, thread: _Thread) -> str:
        """Gives a name to a module without one: below the module that calls it, or as a root."""
        if thread.stack:
            path, _, _ = thread.stack[-1][0].rpartition(": ")
            name = self._names[module] = _full_name(path, type(module).__name__, module)
            return name
        # DataParallel makes new replicas for each call, and their nodes are numbered on other threads.
        self._replicated |= type(module).__name__ == "DataParallel"
        wrappers = list(_unwrapped(module))
        inner = wrappers[-1]
        root = kind = type(inner).__name__
        while root in self._roots:
            root = f"{kind}#{int(root.partition('#')[2] or 1) + 1}"
        self._roots[root] = inner
        for path, child in inner.named_modules():
            if "/" not in self._names.get(child, ""):  # a module that was called before as a root is renamed
                self._names[child] = _full_name(root, path, child)
        for child in wrappers:
            self._names[child] = self._names[inner]
        return self._names[module]


def _unwrapped(module: Any) -> Iterator[Any]:
    """Yields a module, and the modules that it wraps, such as those inside a compiled or a distributed module."""
    yield module
    while len(children := list(module.named_children())) == 1 and children[0][0] in (*_WRAPPED, "module"):
        module = children[0][1]
        yield module


def _full_name(root: str, path: str, module: Any) -> str:
    """Returns the name of a module at a path below another one: ``GPT/h.0.attn: Attention``."""
    words = [word for word in path.split(".") if word and word not in _WRAPPED]
    joint = "." if "/" in root else "/"
    return f"{joint.join([root, '.'.join(words)]) if words else root}: {type(module).__name__}"
