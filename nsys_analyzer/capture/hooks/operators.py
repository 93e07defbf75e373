"""Records one step in which each call of an operator has a range, and describes these calls in a file.

The recorded step follows the measured steps. It runs inside a range of its own, so that a report can leave it out of
all figures. A report finds the kernels of each operator by the range of the operator's call, and then finds the same
kernels in the measured steps by their order. The file describes the tensors of each call, the module and the line of
the program that made the call, and the memory that the call reads and writes.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .modules import Modules
from .ranges import RANK_PLACEHOLDER, Ranges
from .stacks import is_of_program, relative_path

#: The name of the range around the step, and the beginning of the names of the ranges around the operators.
_STEP_RANGE, _OPERATOR_RANGE = "nsys-analyze operators", "nsys-analyze operator "
#: A step with more calls of operators is not described completely.
_MAX_CALLS = 300_000
#: The longest text of an argument that is not a tensor, in characters.
_MAX_ARGUMENT_LENGTH = 60
_UNKNOWN = -1
_COLUMNS = ("signature", "module", "line", "phase", "passes", "keeps_graph", "reads", "offsets", "writes")
#: The namespaces of operators that are not part of the program's work, such as those of ``record_function``.
_IGNORED_NAMESPACES = ("profiler::",)


class _ValueIndices(dict[Any, int]):
    """The indices of distinct values, in the order in which the values occur."""

    def __missing__(self, value: Any) -> int:
        self[value] = index = len(self)
        return index


class OperatorStep:
    """The step in which each call of an operator has a range.

    Attributes:
        is_open: whether the step is running.
        is_done: whether the step has ended, or cannot be recorded.
    """

    def __init__(
        self, torch: Any, modules: Modules, ranges: Ranges, path: str | None, find_phase: Callable[[], str]
    ) -> None:
        """Prepares the step.

        Args:
            torch: the module ``torch``.
            modules: tracks which module the program is in.
            ranges: writes the ranges.
            path: the file to write; None if no step is recorded.
            find_phase: returns the phase of the program, as ``CountedStep.find_phase`` does.
        """
        self._torch, self._modules, self._ranges, self._find_phase = torch, modules, ranges, find_phase
        self._path = Path(path.replace(RANK_PLACEHOLDER, os.environ.get("RANK", "0"))) if path else None
        self.is_open, self.is_done = False, path is None
        self._lock = threading.RLock()

    def open(self) -> None:
        """Starts the step: from now on, each call of an operator on this thread and on autograd's threads is described.

        Raises:
            ImportError: this PyTorch is too old.
        """
        self._tensors, self._signatures = _ValueIndices(), _ValueIndices()
        self._module_names, self._lines, self._phases = _ValueIndices(), _ValueIndices(), _ValueIndices()
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._passes: Counter[str] = Counter()
        #: The module and the line of each call.
        self._callers: list[tuple[str | None, str | None]] = []
        self._values = _Values()
        #: For each call outside of backward passes: the sequence number of autograd's next node, and the call.
        self._next_nodes: list[int] = []
        self._calls_of_nodes: list[int] = []
        self._mode = _make_dispatch_mode(self, self._torch)
        self._compiled = _patch_compiled_kernels(self)
        self._was_tracking, self._modules.is_tracking = self._modules.is_tracking, True
        self._range = self._ranges.start(_STEP_RANGE)
        self._mode.__enter__()
        self.is_open = True

    def close(self, *, succeeded: bool = True) -> None:
        """Ends the step, and writes the file unless the step was interrupted."""
        if not self.is_open:
            return
        self.is_open, self.is_done = False, True
        modes = self._torch.utils._python_dispatch
        if modes._get_current_dispatch_mode() is self._mode:  # else the program is inside a mode that it has entered
            self._mode.__exit__(None, None, None)
        self._compiled.close()
        self._modules.is_tracking = self._was_tracking
        self._ranges.end(self._range)
        if succeeded and self._path:
            unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            with gzip.open(unfinished, "wt", encoding="utf-8", compresslevel=6) as file:
                json.dump(self._make_contents(), file, separators=(",", ":"))
            unfinished.replace(self._path)

    def _make_contents(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "tensors": list(self._tensors),
            "signatures": list(self._signatures),
            "modules": list(self._module_names),
            "lines": list(self._lines),
            "phases": list(self._phases),
            "lasting": self._values.find_lasting(),
            **self._columns,
        }

    def count_phase(self, name: str) -> None:
        """Notes that an instance of a phase begins."""
        if self.is_open:
            self._passes[name] += 1

    # --- one call

    @contextlib.contextmanager
    def call(
        self, name: str, inputs: list[Any], arguments: list[str], written: list[int]
    ) -> Iterator[Callable[[Any], None]]:
        """Puts a range around the call of an operator, and describes it.

        Args:
            name: the name of the operator.
            inputs: the argument at each position: a tensor, a list of tensors, or None.
            arguments: the text of each argument that is not a tensor; empty for tensors.
            written: the positions of the arguments whose memory the operator writes.

        Yields:
            A function that takes the result of the call.
        """
        with self._lock:  # autograd's threads call operators, too
            index = len(self._columns["signature"])
            module, line = self._find_caller(index)
            self._callers.append((module, line))
            phase = self._find_phase()
            if phase == "recomputed" and self._torch._C._current_autograd_node() is None:
                phase = "backward"  # the gradient of the loss itself
            described = [self._index_tensors(argument) for argument in inputs]
            reads = sorted({self._values.read(tensor) for argument in inputs for tensor in _tensors_of(argument)})
            columns = self._columns
            for column, value in (
                ("signature", _UNKNOWN),
                ("module", self._module_names[module] if module else _UNKNOWN),
                ("line", self._lines[line] if line else _UNKNOWN),
                ("phase", self._phases[phase]),
                ("passes", self._passes[phase]),
                ("keeps_graph", int(self._torch.is_grad_enabled())),
                ("reads", reads),
                ("offsets", [tensor.storage_offset() for argument in inputs for tensor in _tensors_of(argument)]),
                ("writes", []),
            ):
                columns[column].append(value)

        def take_result(result: Any) -> None:
            """Completes the description with the tensors that the operator returns or writes."""
            with self._lock:
                outputs = _tensors_of(result)
                read_storages = {_storage_key(tensor) for argument in inputs for tensor in _tensors_of(argument)}
                changed = [tensor for position in written for tensor in _tensors_of(inputs[position])]
                made = [tensor for tensor in outputs if _storage_key(tensor) not in read_storages]
                columns["writes"][index] = sorted({self._values.write(tensor) for tensor in (*changed, *made)})
                signature = (
                    name,
                    tuple(described),
                    tuple(self._index_tensors(tensor) for tensor in outputs),
                    tuple(arguments),
                )
                columns["signature"][index] = self._signatures[signature]

        self._ranges.push(f"{_OPERATOR_RANGE}{index}")
        try:
            yield take_result
        finally:
            self._ranges.pop()

    def is_full(self) -> bool:
        """Returns whether no further call is described."""
        return not self.is_open or len(self._columns["signature"]) >= _MAX_CALLS

    def _index_tensors(self, argument: Any) -> Any:
        """Returns the index of a tensor's properties, the indices for a list of tensors, or -1 for another argument."""
        if isinstance(argument, (list, tuple)):
            return tuple(self._index_tensors(tensor) for tensor in argument)
        if argument is None:
            return _UNKNOWN
        strides = tuple(argument.stride()) if argument.layout is self._torch.strided else None
        dtype = str(argument.dtype).removeprefix("torch.")
        return self._tensors[tuple(argument.shape), dtype, strides, argument.device.type]

    def _find_caller(self, index: int) -> tuple[str | None, str | None]:
        """Returns the module and the line of the program that call an operator.

        In a backward pass, they are those of the call that created autograd's node.
        """
        node, line = self._torch._C._current_autograd_node(), _find_line()
        if node is None or self._find_phase() == "recomputed":
            self._next_nodes.append(self._modules.next_node())
            self._calls_of_nodes.append(index)
            return self._modules.current_module(), line
        position = bisect_right(self._next_nodes, node._sequence_nr())
        if position == len(self._next_nodes):  # no call of the step created the node
            return self._modules.current_module(), line
        return self._callers[self._calls_of_nodes[position]]


class _Values:
    """The values of memory: each write to a storage makes a new value, which all views of the storage share."""

    def __init__(self) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._refer: Any = StorageWeakRef
        #: For each storage by its address: a weak reference, so that no other storage gets the address, and the value.
        self._storages: dict[int, tuple[Any, int]] = {}
        self._is_older: list[bool] = []

    def read(self, tensor: Any) -> int:
        """Returns the value of a tensor's memory."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:  # the memory existed before the step
            self._storages[storage._cdata] = self._refer(storage), len(self._is_older)
            self._is_older.append(True)
        return self._storages[storage._cdata][1]

    def write(self, tensor: Any) -> int:
        """Returns a new value for a tensor's memory."""
        storage = tensor.untyped_storage()
        reference, before = self._storages.get(storage._cdata) or (self._refer(storage), None)
        value = len(self._is_older)
        self._storages[storage._cdata] = reference, value
        self._is_older.append(before is not None and self._is_older[before])
        return value

    def find_lasting(self) -> list[int]:
        """Returns the values whose memory existed before the step, and the latest values whose memory is in use."""
        in_use = {value for reference, value in self._storages.values() if not reference.expired()}
        return [value for value, is_older in enumerate(self._is_older) if is_older or value in in_use]


def _storage_key(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors_of(argument: Any) -> list[Any]:
    """Returns the tensors in an argument or a result, which may be nested lists."""
    if hasattr(argument, "untyped_storage"):
        return [argument]
    return [tensor for part in argument for tensor in _tensors_of(part)] if isinstance(argument, (list, tuple)) else []


def _find_line() -> str | None:
    """Returns the innermost line of the program that is running on this thread, ``train.py:12 in step``."""
    frame: Any = sys._getframe()
    while frame is not None and not is_of_program(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return None
    return f"{relative_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _make_dispatch_mode(step: OperatorStep, torch: Any) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Describing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Describes each operator that PyTorch dispatches."""

        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Returns that compiled code runs as it does outside of the mode."""
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            distributed = sys.modules.get("torch.distributed.tensor")
            if distributed is not None and any(issubclass(kind, distributed.DTensor) for kind in types):
                return NotImplemented  # the operators on the local tensors are described instead
            schema = getattr(func, "_schema", None)
            if step.is_full() or schema is None or _has_fake_tensor(types) or _does_no_work(schema):
                return func(*args, **kwargs)
            if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
                with self:
                    parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
            values = [*args, *(kwargs.get(entry.name) for entry in schema.arguments[len(args) :])]
            written = [
                position
                for position, entry in enumerate(schema.arguments)
                if entry.alias_info is not None and entry.alias_info.is_write
            ]
            inputs = [_as_tensors(value) for value in values]
            texts = ["" if given is not None else _format_argument(value) for given, value in zip(inputs, values)]  # noqa: B905
            with step.call(schema.name, inputs, texts, written) as take_result:
                result = func(*args, **kwargs)
                take_result(result)
            return result

    return Describing()  # type: ignore[no-untyped-call]


def _does_no_work(schema: Any) -> bool:
    """Returns whether an operator only returns views of its arguments, or is not part of the program's work."""
    returns = [entry.alias_info for entry in schema.returns]
    is_view = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    return is_view or schema.name.startswith(_IGNORED_NAMESPACES)


def _has_fake_tensor(types: Any) -> bool:
    """Returns whether the operator runs on tensors without data, as while torch.compile traces."""
    return any("FakeTensor" in kind.__name__ or "FunctionalTensor" in kind.__name__ for kind in types)


def _as_tensors(value: Any) -> Any:
    """Returns a tensor, a list of tensors, or None for another argument."""
    if hasattr(value, "untyped_storage"):
        return value
    tensors = _tensors_of(value)
    return tensors or None


def _format_argument(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_ARGUMENT_LENGTH else ""


def _patch_compiled_kernels(step: OperatorStep) -> contextlib.ExitStack:
    """Describes the Triton kernels of torch.compile as operators until the returned stack is closed.

    The name of such a kernel contains the operators that it fuses, and its pointers are the buffers that it reads and
    writes.
    """
    stack = contextlib.ExitStack()
    heuristics = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    autotuner = getattr(heuristics, "CachingAutotuner", None)
    if autotuner is None:
        return stack
    original = autotuner.run

    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        """Runs a kernel of torch.compile inside the range of its call."""
        if step.is_full():
            return original(self, *arguments, **keywords)
        names = [*getattr(self.fn, "arg_names", ())]
        inputs = [_as_tensors(value) for value in arguments]
        written = [
            position
            for position, given in enumerate(inputs)
            if given is not None and position < len(names) and "out" in names[position]
        ]
        texts = ["" if given is not None else _format_argument(value) for given, value in zip(inputs, arguments)]  # noqa: B905
        with step.call(f"triton::{self.fn.__name__}", inputs, texts, written) as take_result:
            result = original(self, *arguments, **keywords)
            take_result([inputs[position] for position in written])
        return result

    autotuner.run = run
    stack.callback(setattr, autotuner, "run", original)
    return stack
