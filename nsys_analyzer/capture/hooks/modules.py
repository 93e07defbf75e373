"""Tracks which module the program runs: by calls in forward, and by the nodes of autograd's graph in backward.

A call of a module makes graph nodes with the next sequence numbers of its thread. Autograd runs the nodes that a thread
made from the highest number to the lowest, so the nodes of a module run one after the other. A hook on the first node
of each module shows which module backward runs.
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
#: The sequence number of each node that only accumulates a gradient. Such nodes run as soon as possible.
_ACCUMULATING_NODE = 2**64 - 1


class _Thread:
    """The modules that a thread runs, by name.

    Attributes:
        stack: the modules whose calls the thread is in, the innermost last. Each entry also says whether the call has
            a range.
        backward: the module whose nodes the thread runs in backward, or None.
        range: the open range of the module ``backward``.
        numbers: the sequence numbers of nodes at which the module in forward changed, in ascending order.
        labels: the module that makes the nodes from each entry of ``numbers`` on, or None outside of all modules.
    """

    __slots__ = ("backward", "labels", "numbers", "range", "stack")

    def __init__(self) -> None:
        self.stack: list[tuple[str, bool]] = []
        self.backward: str | None = None
        self.range: Any = None
        self.numbers: list[int] = []
        self.labels: list[str | None] = []


class Backward(NamedTuple):
    """The hooks of a backward pass, and the module that the enclosing backward pass ran when this pass began."""

    handles: list[Any]
    enclosing: str | None


class Modules:
    """Names the modules of the program by their paths, and tracks which module each thread runs.

    Attributes:
        is_tracking: whether calls of modules are tracked.
        writes_ranges: whether calls of modules get ranges.
    """

    def __init__(self, torch: Any, ranges: Ranges) -> None:
        self.is_tracking = self.writes_ranges = self._replicated = False
        self._torch, self._ranges = torch, ranges
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._threads: dict[int, _Thread] = {}
        # Returns the sequence number of the next node. Without this function, modules are tracked in forward only.
        self._next_number = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)

    def current_module(self) -> str | None:
        """Returns the name of the module that this thread runs, or None outside of all modules."""
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
        writes_ranges = self.writes_ranges and not is_wrapper
        thread.stack.append((name, writes_ranges))
        self._note_next_number(thread, name)
        if writes_ranges:
            self._ranges.push(f"{PREFIX}{name}")

    def leave(self) -> None:
        """Notes the end of the innermost call of a module on this thread."""
        thread = self._this_thread()
        _, writes_ranges = thread.stack.pop()
        self._note_next_number(thread, thread.stack[-1][0] if thread.stack else None)
        if writes_ranges:
            self._ranges.pop()

    def forget_sequence_numbers(self) -> None:
        """Discards the sequence numbers of a step that has ended."""
        for thread in list(self._threads.values()):
            thread.numbers, thread.labels = thread.numbers[-1:], thread.labels[-1:]

    def hook_backward_graph(self, roots: Iterable[Any], *, runs_some_nodes: bool) -> Backward:
        """Hooks the graph of the root tensors of a backward pass: the first node of each module.

        If the pass runs only some nodes of the graph, all nodes are hooked.
        """
        thread = self._this_thread()
        if self._replicated:
            return Backward([], thread.backward)
        nodes = sorted(self._visit_nodes(roots), key=lambda pair: -pair[0])
        handles, previous_label = [], thread.backward
        for number, node in nodes:
            at = bisect_right(thread.numbers, number) - 1
            label = thread.labels[at] if at >= 0 else None
            if label != previous_label or runs_some_nodes:
                handles.append(node.register_prehook(self._make_switch_hook(label)))
                previous_label = label
        return Backward(handles, thread.backward)

    def unhook_backward_graph(self, backward: Backward, *, outermost: bool) -> None:
        """Removes the hooks of a backward pass. ``outermost`` is True if no other backward pass is running."""
        for handle in backward.handles:
            handle.remove()
        if not outermost:  # this pass belongs to an activation checkpoint, inside a node of another pass
            self._move_backward_to(backward.enclosing)
        for thread in list(self._threads.values()) if outermost else ():
            self._ranges.end(thread.range)
            thread.backward = thread.range = None

    def _this_thread(self) -> _Thread:
        ident = threading.get_ident()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = _Thread()
        return thread

    def _note_next_number(self, thread: _Thread, label: str | None) -> None:
        number = self._next_number()
        if thread.numbers and thread.numbers[-1] == number:  # no node was made since the last entry
            thread.labels[-1] = label
        else:
            thread.numbers.append(number)
            thread.labels.append(label)

    def _make_switch_hook(self, label: str | None) -> Any:
        """Returns a node's hook, which notes that the thread now runs the backward of a module."""
        is_compiling = self._torch.compiler.is_compiling

        def switch(_: Any) -> None:
            """Notes that the thread now runs the module. An error ends the tracking."""
            if self.is_tracking and not is_compiling():
                try:
                    self._move_backward_to(label)
                except Exception:  # noqa: BLE001 - the program must not see the error, so tracking ends
                    self.is_tracking = False

        return switch

    def _move_backward_to(self, label: str | None) -> None:
        thread = self._this_thread()
        if thread.backward != label:
            self._ranges.end(thread.range)
            thread.backward = label
            thread.range = self._ranges.start(f"{PREFIX}{label}") if label and self.writes_ranges else None

    def _visit_nodes(self, roots: Iterable[Any]) -> Iterable[tuple[int, Any]]:
        """Yields the sequence number and the node for each node of the roots' graph that does more than accumulate."""
        pending = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
        visited = set(pending)
        while pending:
            node = pending.pop()
            number = node._sequence_nr()
            if number != _ACCUMULATING_NODE:
                yield number, node
            for next_node, _ in node.next_functions:
                if next_node is not None and next_node not in visited:
                    visited.add(next_node)
                    pending.append(next_node)

    def _name_module(self, module: Any, thread: _Thread) -> str:
        """Names a module that has no name: below the module that calls it, or as a root without a caller."""
        if thread.stack:
            path, _, _ = thread.stack[-1][0].rpartition(": ")
            name = self._names[module] = _full_name(path, type(module).__name__, module)
            return name
        # DataParallel makes new replicas of the module for each call, and other threads number their nodes.
        self._replicated |= type(module).__name__ == "DataParallel"
        wrappers = list(_unwrap(module))
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


def _unwrap(module: Any) -> Iterator[Any]:
    """Yields a module, and the modules that it wraps, as a compiled or a distributed module wraps another module."""
    yield module
    while len(children := list(module.named_children())) == 1 and children[0][0] in (*_WRAPPED, "module"):
        module = children[0][1]
        yield module


def _full_name(root: str, path: str, module: Any) -> str:
    """Returns the name of a module at a path below a root: ``GPT/h.0.attn: Attention``."""
    words = [word for word in path.split(".") if word and word not in _WRAPPED]
    joint = "." if "/" in root else "/"
    return f"{joint.join([root, '.'.join(words)]) if words else root}: {type(module).__name__}"
