"""Records one step in which each call of an operator has a range, and describes these calls in a file.

The recorded step follows the measured steps. It runs inside a range of its own, so that a report can leave it out of
all figures. A report finds the kernels of each operator by the range of the operator's call, and then finds the same
kernels in the measured steps by their order. The file describes the tensors of each call, the module and the line of
the program that made the call, and the memory that the call reads and writes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .modules import Modules
from .padding import find_tokens_of_rows
from .ranges import RANK_PLACEHOLDER, Ranges
from .stacks import is_of_program, relative_path, write_compressed

#: The environment variable with the file that a target of this package writes, because it uses the step without hooks.
FILE_VARIABLE = "NSYS_ANALYZE_OPERATORS"
#: The name of the range around the step, and the beginning of the names of the ranges around the operators.
_STEP_RANGE, _OPERATOR_RANGE = "nsys-analyze operators", "nsys-analyze operator "
_SUFFIX = ".operators.gz"
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
        is_done: whether the step has ended, or is not recorded at all.
        calls: the calls of the running step, or None if no further call is described.
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
        self._path = _insert_rank(path) if path else None
        self.is_open, self.is_done = False, path is None
        self.calls: _Calls | None = None
        #: The thread and the line on which the program called each running backward pass, the innermost last.
        self._backward_passes: list[tuple[int, str | None]] = []

    def open(self) -> None:
        """Starts the step: from now on, each call of an operator on this thread and on autograd's threads is described.

        Raises:
            ImportError: this PyTorch is too old.
            RuntimeError: the program is inside a dispatch mode of its own. When the program leaves its mode, PyTorch
                would remove the mode of this step instead.
        """
        from torch.utils import _python_dispatch as dispatch

        if dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("the program uses a TorchDispatchMode, such as FlopCounterMode")
        mode: Any = _make_dispatch_mode(self, self._torch)
        thread = threading.get_ident()

        def leave_mode() -> None:
            """Leaves the mode, unless the program is inside a mode of its own. Without calls, the mode does nothing."""
            if threading.get_ident() == thread and dispatch._get_current_dispatch_mode() == mode:
                mode.__exit__(None, None, None)

        with contextlib.ExitStack() as stack:
            stack.callback(self._ranges.end, self._ranges.start(_STEP_RANGE))
            stack.callback(setattr, self._modules, "is_tracking", self._modules.is_tracking)
            self._modules.is_tracking = True
            _patch_compiled_kernels(self, stack)
            self.calls = _Calls(self._torch, self._modules, self._ranges, self._find_phase, self._backward_passes)
            mode.__enter__()
            stack.callback(leave_mode)
            self._undo = stack.pop_all()
        self.is_open = True

    def close(self, *, succeeded: bool = True) -> None:
        """Ends the step, and writes the file unless the step was interrupted.

        Raises:
            Exception: a call could not be described, or the file cannot be written. The step has ended nevertheless.
        """
        if not self.is_open:
            return
        self.is_open, self.is_done = False, True
        calls, self.calls = self.calls, None
        self._undo.close()
        if not (succeeded and calls and self._path):
            return
        if calls.failure:
            raise calls.failure
        write_compressed(self._path, calls.make_contents())

    def count_phase(self, name: str) -> None:
        """Notes that an instance of a phase begins."""
        if self.calls:
            self.calls.passes[name] += 1

    def note_model_call(self, module: Any, arguments: Any, keywords: Any) -> None:
        """Notes the padding in the batch of a model's call. What is done to find it is not described.

        The batch is not read while a CUDA graph is captured, because a wait for the GPU would break the capture.
        """
        cuda = self._torch.cuda
        if self.calls is None or (cuda.is_initialized() and cuda.is_current_stream_capturing()):
            return
        calls, self.calls = self.calls, None
        try:
            line = _find_line() or ""
            batches = find_tokens_of_rows(self._torch, module, arguments, keywords)
            calls.batches += [(length, tokens, line) for length, tokens in batches]
        except Exception as error:  # noqa: BLE001 - an error of the description must not reach the program
            calls.failure = error.with_traceback(None)
        self.calls = calls

    def note_backward_pass(self, *, begins: bool) -> None:
        """Notes that a backward pass begins on this thread, or that the innermost backward pass ends."""
        if begins:
            line = _find_line() if self.calls and not self.calls.is_full() else None
            self._backward_passes.append((threading.get_ident(), line))
        else:
            self._backward_passes.pop()


def _insert_rank(path: str) -> Path:
    """Returns the path with the rank of this process, which also other launchers than ``--nproc`` tell it."""
    rank = os.environ.get("RANK")
    if rank and RANK_PLACEHOLDER not in path:
        path = path.replace(_SUFFIX, f"_rank{rank}{_SUFFIX}")
    return Path(path.replace(RANK_PLACEHOLDER, rank or "0"))


class _Call(NamedTuple):
    """A call that is running: its position in the list of calls, its operator, and its arguments."""

    position: int
    operator: str
    inputs: list[Any]
    described: tuple[Any, ...]
    texts: tuple[str, ...]
    written: Sequence[int]


class _Calls:
    """The calls of operators in a step. It refers to no tensor of the program after the tensor's call.

    Attributes:
        failure: the error that prevents the description of further calls, or None.
        passes: the number of instances of each phase.
        batches: the length of the rows of each batch, the number of tokens of each row, and the line that calls the
            model.
    """

    def __init__(
        self,
        torch: Any,
        modules: Modules,
        ranges: Ranges,
        find_phase: Callable[[], str],
        backward_passes: list[tuple[int, str | None]],
    ) -> None:
        self.failure: Exception | None = None
        self.passes: Counter[str] = Counter()
        self.batches: list[tuple[int, list[int], str]] = []
        self._torch, self._modules, self._ranges, self._find_phase = torch, modules, ranges, find_phase
        self._backward_passes = backward_passes
        self._tensors, self._signatures = _ValueIndices(), _ValueIndices()
        self._module_names, self._lines, self._phases = _ValueIndices(), _ValueIndices(), _ValueIndices()
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._values = _Values()
        #: The module and the line of each call.
        self._callers: list[tuple[str | None, str | None]] = []
        #: For each thread: the sequence number of autograd's next node at each call that may make nodes, and the call.
        self._nodes: dict[int, tuple[list[int], list[int]]] = {}
        self._lock = threading.RLock()  # autograd's threads call operators, too

    def is_full(self) -> bool:
        """Returns whether no further call is described."""
        return self.failure is not None or len(self._callers) >= _MAX_CALLS

    def make_contents(self) -> dict[str, Any]:
        """Returns the contents of the file."""
        return {
            "pid": os.getpid(),
            "tensors": list(self._tensors),
            "signatures": list(self._signatures),
            "modules": list(self._module_names),
            "lines": list(self._lines),
            "phases": list(self._phases),
            "lasting": self._values.find_lasting(),
            "batches": self.batches,
            **self._columns,
        }

    def run(
        self, operator: str, arguments: Sequence[Any], written: Sequence[int], function: Callable[[], Any],
        *, returns: bool = True, unread: Collection[int] = (),
    ) -> Any:  # fmt: skip
        """Runs an operator inside the range of its call, and returns its result.

        Args:
            operator: the name of the operator.
            arguments: the argument at each position.
            written: the positions of the arguments whose memory the operator writes.
            function: runs the operator.
            returns: whether the operator returns tensors. Otherwise, its outputs are the arguments that it writes.
            unread: the positions of the arguments that the operator writes without reading them. They are no inputs.
        """
        call = self._begin(operator, arguments, written, unread)
        result: Any = ()
        try:
            result = function()
        finally:
            if call:
                self._end(call, result, returns=returns)
        return result

    def _begin(
        self, operator: str, arguments: Sequence[Any], written: Sequence[int], unread: Collection[int]
    ) -> _Call | None:
        """Describes the arguments and the caller of an operator, and opens its range."""
        try:
            inputs = [self._as_tensors(value) for value in arguments]
            texts = tuple(
                "" if tensors is not None else _format_argument(value)
                for tensors, value in zip(inputs, arguments, strict=True)
            )
            read_arguments = [None if position in unread else argument for position, argument in enumerate(inputs)]
            stored = [tensor for argument in read_arguments for tensor in self._stored(argument)]
            phase = self._find_phase()
            node = self._torch._C._current_autograd_node()
            if phase == "recomputed" and node is None:
                phase = "backward"  # the gradient of the loss itself
            with self._lock:
                index = len(self._callers)
                described = tuple(self._index_tensors(argument) for argument in read_arguments)
                module, line = self._find_caller(index, phase, node)
                row = {
                    "signature": _UNKNOWN,
                    "module": self._module_names[module] if module else _UNKNOWN,
                    "line": self._lines[line] if line else _UNKNOWN,
                    "phase": self._phases[phase],
                    "passes": self.passes[phase],
                    "keeps_graph": int(self._torch.is_grad_enabled()),
                    "reads": sorted({self._values.read(tensor) for tensor in stored}),
                    "offsets": [tensor.storage_offset() for tensor in stored],
                    "writes": [],
                }
                self._callers.append((module, line))
                for name, value in row.items():
                    self._columns[name].append(value)
            self._ranges.push(f"{_OPERATOR_RANGE}{index}")
        except Exception as error:  # noqa: BLE001 - an error of the description must not reach the program
            self.failure = error.with_traceback(None)  # a traceback would refer to the tensors
            return None
        return _Call(index, operator, inputs, described, texts, written)

    def _end(self, call: _Call, result: Any, *, returns: bool) -> None:
        """Closes the range of a call, and completes its description with the tensors that it returns or writes."""
        try:
            self._ranges.pop()
            with self._lock:
                changed = [tensor for position in call.written for tensor in self._tensors_of(call.inputs[position])]
                outputs = self._tensors_of(result) if returns else changed
                read_storages = {_storage_key(tensor) for argument in call.inputs for tensor in self._stored(argument)}
                new_tensors = [tensor for tensor in self._stored(outputs) if _storage_key(tensor) not in read_storages]
                writes = {self._values.write(tensor) for tensor in (*self._stored(changed), *new_tensors)}
                signature = (
                    call.operator,
                    call.described,
                    tuple(self._index_tensors(tensor) for tensor in outputs),
                    call.texts,
                )
                self._columns["writes"][call.position] = sorted(writes)
                self._columns["signature"][call.position] = self._signatures[signature]
        except Exception as error:  # noqa: BLE001 - an error of the description must not reach the program
            self.failure = error.with_traceback(None)  # a traceback would refer to the tensors

    def _find_caller(self, index: int, phase: str, node: Any) -> tuple[str | None, str | None]:
        """Returns the module and the line of the program that call an operator.

        In a backward pass, they are those of the call that created autograd's node.
        """
        module, line = self._modules.current_module(), _find_line()
        if node is not None and self._backward_passes:
            # Each thread numbers the nodes that it makes, and the thread that calls backward made the nodes.
            thread, backward_line = self._backward_passes[-1]
            numbers, calls = self._nodes.get(thread, ((), ()))
            position = bisect_right(numbers, node._sequence_nr())
            if position == len(numbers):  # no call of the step created the node
                line = line or backward_line
            elif phase == "recomputed":
                line = line or self._callers[calls[position]][1]
            else:
                module, line = self._callers[calls[position]]
        if node is None or self._torch.is_grad_enabled():
            numbers, calls = self._nodes.setdefault(threading.get_ident(), ([], []))
            numbers.append(self._modules.next_node())
            calls.append(index)
        return module, line

    def _index_tensors(self, argument: Any) -> Any:
        """Returns the index of a tensor's properties, the indices for a list of tensors, or -1 for another argument."""
        if isinstance(argument, (list, tuple)):
            return tuple(self._index_tensors(tensor) for tensor in argument)
        if argument is None:
            return _UNKNOWN
        strides = tuple(argument.stride()) if argument.layout is self._torch.strided else None
        dtype = str(argument.dtype).removeprefix("torch.")
        return self._tensors[tuple(argument.shape), dtype, strides, argument.device.type]

    def _as_tensors(self, value: Any) -> Any:
        """Returns a tensor, a list of tensors, or None for another argument."""
        return value if isinstance(value, self._torch.Tensor) else self._tensors_of(value) or None

    def _tensors_of(self, value: Any) -> list[Any]:
        """Returns the tensors in an argument or a result, which may be nested lists."""
        if isinstance(value, self._torch.Tensor):
            return [value]
        return (
            [tensor for part in value for tensor in self._tensors_of(part)] if isinstance(value, (list, tuple)) else []
        )

    def _stored(self, argument: Any) -> list[Any]:
        """Returns the tensors of an argument that have a memory of their own, unlike sparse tensors."""
        return [tensor for tensor in self._tensors_of(argument) if self._torch._C._has_storage(tensor)]


class _Values:
    """The values of memory: each write to a storage makes a new value, which all views of the storage share."""

    def __init__(self) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._refer: Any = StorageWeakRef
        #: Maps the address of each storage to a weak reference to the storage and its current value. The reference
        #: prevents that another storage gets the same address.
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
            kwargs, schema, calls = kwargs or {}, getattr(func, "_schema", None), step.calls
            if calls is None or calls.is_full():
                return func(*args, **kwargs)
            if any("FakeTensor" in kind.__name__ or "FunctionalTensor" in kind.__name__ for kind in types):
                return func(*args, **kwargs)  # torch.compile is tracing
            if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
                return NotImplemented  # the operators that a DTensor runs on its local tensors are described instead
            if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
                with self:  # in inference mode, PyTorch passes composite operators to the mode
                    parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
            if schema is None or _does_no_work(schema):
                return func(*args, **kwargs)
            arguments = [*args, *(kwargs.get(entry.name) for entry in schema.arguments[len(args) :])]
            written = [
                position
                for position, entry in enumerate(schema.arguments)
                if entry.alias_info is not None and entry.alias_info.is_write
            ]
            unread = [position for position in written if schema.arguments[position].kwarg_only]  # of out=…
            return calls.run(schema.name, arguments, written, lambda: func(*args, **kwargs), unread=unread)

    return Describing()  # type: ignore[no-untyped-call]


def _does_no_work(schema: Any) -> bool:
    """Returns whether an operator only returns views of its arguments, or is not part of the program's work."""
    returns = [entry.alias_info for entry in schema.returns]
    is_view = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    return is_view or schema.name.startswith(_IGNORED_NAMESPACES)


def _format_argument(value: Any) -> str:
    """Returns the text of an argument; empty if it is long or contains the address of an object."""
    text = str(value)
    return text if len(text) <= _MAX_ARGUMENT_LENGTH and " at 0x" not in text else ""


def _patch_compiled_kernels(step: OperatorStep, stack: contextlib.ExitStack) -> None:
    """Describes the Triton kernels of torch.compile as operators until the stack is closed.

    The name of such a kernel contains the operators that it fuses, and its pointers are the buffers that it reads and
    writes.
    """
    heuristics = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    autotuner = getattr(heuristics, "CachingAutotuner", None)
    if autotuner is None:
        return
    original = autotuner.run

    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        """Runs a kernel of torch.compile inside the range of its call."""
        calls = step.calls
        if calls is None or calls.is_full():
            return original(self, *arguments, **keywords)
        names = getattr(self.fn, "arg_names", ())
        written = [position for position, name in enumerate(names[: len(arguments)]) if "out_ptr" in name]
        return calls.run(
            f"triton::{getattr(self.fn, '__name__', '')}", arguments, written,
            lambda: original(self, *arguments, **keywords), returns=False,
            unread=[position for position in written if not names[position].startswith("in_out_ptr")],
        )  # fmt: skip

    autotuner.run = run
    stack.callback(setattr, autotuner, "run", original)
