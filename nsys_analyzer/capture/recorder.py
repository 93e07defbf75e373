"""Runs a Python program under ``torch.profiler`` and writes the trace, for machines without nsys or without a GPU.

    python -m nsys_analyzer.capture.recorder --output trace.json.gz -- train.py --steps 3

The program runs in this process. The recording starts when the program calls ``torch.cuda.profiler.start()``, ends when
it calls ``torch.cuda.profiler.stop()``, and includes the NVTX ranges of the program. For this, the recorder replaces
these functions, the functions for ranges in PyTorch, and those of the ``nvtx`` package. PyTorch is imported before the
program starts, so PyTorch does not see environment variables that the program sets.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import gzip
import itertools
import json
import os
import platform
import re
import runpy
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from nsys_analyzer.errors import ExportError, NoSpaceError, NsysAnalyzerError
from nsys_analyzer.system.atomic_write import atomic_write
from nsys_analyzer.system.machine import cpu_model, driver_module_version

Function = TypeVar("Function", bound=Callable[..., Any])

#: The exit code if the program succeeded but no trace was written. It differs from the exit code 3 of the package's
#: targets, which means that they ran out of memory.
NOTHING_RECORDED = 4
_TERMINATED_EXIT_CODE = 128 + signal.SIGTERM
#: The name of a file beside the trace. If another process makes this file, the recording of a server begins at once,
#: before its delay is over.
BEGIN_FILE = "record-now"
_RANK_VARIABLE = re.compile(r"%q\{(\w+)\}")
_POLL_INTERVAL_S = 0.05
#: The level of gzip's compression. It takes a third of the time of gzip's default level, and the file is a few per cent
#: larger.
_COMPRESSION_LEVEL = 4


class Recorder:
    """Records a program from the first ``start()`` to the next ``stop()`` into ``output``, a ``.json.gz`` file.

    With ``memory``, allocations and releases are recorded, too. Ranges and operators are then recorded only on the
    thread that calls ``start()`` and on the threads of autograd.
    """

    def __init__(self, output: Path, *, memory: bool = False) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.autograd import profiler
        from torch.profiler import ProfilerActivity, profile

        self.output = output
        self.is_recording = False
        self.has_recorded = False
        self.is_forked = False
        self._profiler_functions = {name: getattr(profiler, name) for name in _PROFILER_FUNCTIONS}
        os.register_at_fork(after_in_child=self._stop_in_forked_child)
        self.failure: NsysAnalyzerError | None = None
        self.ranges = Ranges(self)
        threads = None
        if not memory:  # if PyTorch profiles all threads, it records no memory
            with suppress(TypeError):  # an older PyTorch does not have this argument
                threads = _ExperimentalConfig(profile_all_threads=True)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(
            activities=activities, profile_memory=memory, record_shapes=True, experimental_config=threads
        )
        with warnings.catch_warnings(), self._restored_profiler_functions():
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            self._profile.prepare_trace()  # CUPTI takes a second to start, which must not count as the program's time

    def start(self) -> None:
        """Starts the recording. If there was a recording before, it prints a message instead."""
        if self.has_recorded:
            _print_message("only the first range between cudaProfilerStart and cudaProfilerStop is recorded")
        elif not self.is_recording:
            with self._restored_profiler_functions():
                self._profile.start_trace()
            self.is_recording = True

    def stop(self) -> None:
        """Stops the recording and writes the trace. An error is stored in ``failure``."""
        if not self.is_recording:
            return
        import torch

        # 580.159.04 in "NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
        driver = next(
            (word for word in (driver_module_version() or "").split() if word[0].isdigit() and "." in word), None
        )
        metadata = {  # Kineto does not write these values into its trace
            "torch_version": torch.__version__,
            "python_version": platform.python_version(),
            "cuda_version": torch.version.cuda,
            "driver_version": driver,
            "cpu": cpu_model(),
        }
        for key, value in metadata.items():
            if value:
                self._profile.add_metadata_json(key, json.dumps(str(value)))
        self._stop_profiler()
        self.has_recorded = True
        try:
            self._write_trace()
        except NoSpaceError as error:
            self.failure = error
        except (OSError, RuntimeError, NsysAnalyzerError) as error:  # not an error of the program, which continues
            problem = f"{self.output} cannot be written: {error}"
            self.failure = ExportError(problem, "Free some space, or choose another --output")

    def discard(self) -> None:
        """Stops the recording and writes no trace. PyTorch crashes if a process ends while its profiler runs."""
        if self.is_recording:
            try:
                self._stop_profiler()
            except RuntimeError as error:  # after an error of the GPU, stopping fails as well
                _print_message(f"the profiler did not stop: {error}")

    def _stop_profiler(self) -> None:
        self.ranges.close_all()
        self.is_recording = False
        with self._restored_profiler_functions():
            self._profile.stop_trace()

    def _stop_in_forked_child(self) -> None:
        """Notes in a child of ``os.fork()`` that nothing is recorded there, because the parent has the recording."""
        self.has_recorded |= self.is_recording
        self.is_recording, self.is_forked = False, True

    @contextmanager
    def _restored_profiler_functions(self) -> Iterator[None]:
        """Restores PyTorch's own profiler functions inside the block. Elsewhere the program sees the replacements."""
        from torch.autograd import profiler

        replaced = {name: getattr(profiler, name) for name in self._profiler_functions}
        _set_functions(profiler, **self._profiler_functions)
        try:
            yield
        finally:
            _set_functions(profiler, **replaced)

    def _write_trace(self) -> None:
        with atomic_write(self.output) as unfinished:
            plain = unfinished.with_name("plain.json")
            self._profile.export_chrome_trace(str(plain))
            with plain.open("ab+") as trace, gzip.open(unfinished, "wb", _COMPRESSION_LEVEL) as packed:
                trace.seek(max(0, trace.tell() - 16))
                if not trace.read().rstrip().endswith(b"}"):  # Kineto does not report a full disk
                    raise ExportError("torch.profiler wrote no trace, or only a part of one")
                trace.seek(0)
                shutil.copyfileobj(trace, packed, 1 << 20)
            plain.unlink()


# --- the program's own profiler ---


class _EmptyResult:
    """The result without events that the program's own ``torch.profiler`` gets, because it is disabled."""

    def events(self) -> list[Any]:
        """Returns no events."""
        return []

    experimental_event_tree = events

    def trace_start_ns(self) -> int:
        """Returns 0 as the start of the trace."""
        return 0

    def save(self, path: str) -> None:
        """Writes a trace without events."""
        Path(path).write_text('{"traceEvents": []}')


#: The functions of ``torch.autograd.profiler`` that ``torch.profiler`` calls.
_PROFILER_FUNCTIONS = (
    "_prepare_profiler", "_enable_profiler", "_disable_profiler", "_run_on_profiler_start", "_run_on_profiler_stop",
)  # fmt: skip


@functools.cache
def _warn_of_disabled_profiler() -> None:
    _print_message("the program's own torch.profiler is disabled while this recorder runs, and its result is empty")


# --- ranges ---


class Ranges:
    """Records NVTX ranges as ``record_function`` ranges while the recorder records.

    A range that is open when the recording starts is not recorded, and a range that is open when the recording ends is
    closed at that time. nsys does the same. The argument with the name of a range is ``msg`` in PyTorch and ``message``
    in the ``nvtx`` package.
    """

    def __init__(self, recorder: Recorder) -> None:
        import torch
        from torch.profiler import record_function

        self._recorder = recorder
        # torch.compile must not trace into a range, or it would recompile when the recording starts.
        self._is_compiling: Callable[[], bool] = torch.compiler.is_compiling
        self._record_function: Callable[[str], AbstractContextManager[Any]] = record_function
        self._local = threading.local()
        self._started: dict[int, AbstractContextManager[Any] | None] = {}
        self._handles = itertools.count(1)  # threads share the counter, and next() is atomic

    @property
    def _stack(self) -> list[AbstractContextManager[Any] | None]:
        stack: list[AbstractContextManager[Any] | None] = self._local.__dict__.setdefault("stack", [])
        return stack

    def push(self, message: object = "", *_: object, msg: object = None, **__: object) -> int:
        """Opens a range on this thread. Returns its depth as NVTX does: 0 for an outermost range."""
        if self._is_compiling():
            return 0
        stack = self._stack
        stack.append(self._open(msg or message) if self._recorder.is_recording else None)
        return len(stack) - 1

    def pop(self, *_: object, **__: object) -> int:
        """Closes the innermost range of this thread. Returns the depth of the range, or -1 if no range was open."""
        stack = self._stack if not self._is_compiling() else []
        if not stack:
            return -1
        _close(stack.pop())
        return len(stack)

    def start(self, message: object = "", *_: object, msg: object = None, **__: object) -> int:
        """Opens a range that may overlap others, and returns the handle that closes it."""
        handle = next(self._handles)
        self._started[handle] = self._open(msg or message) if self._recorder.is_recording else None
        return handle

    def end(self, range_id: int) -> None:
        """Closes the range of a handle. A second call has no effect."""
        _close(self._started.pop(range_id, None))

    def mark(self, message: object = "", *_: object, msg: object = None, **__: object) -> None:
        """Records the current time as an empty range."""
        if self._recorder.is_recording:
            _close(self._open(msg or message))

    def close_all(self) -> None:
        """Closes the open ranges at the end of the recording, and keeps the depth of the stack for later pops."""
        stack = self._stack
        for opened in reversed(stack):
            _close(opened)
        stack[:] = [None] * len(stack)
        for handle, opened in list(self._started.items()):  # other threads may change the dictionary
            _close(opened)
            self._started[handle] = None

    def _open(self, message: object) -> AbstractContextManager[Any]:
        opened = self._record_function(str(message))
        opened.__enter__()
        return opened


def _close(opened: AbstractContextManager[Any] | None) -> None:
    if opened is not None:
        opened.__exit__(None, None, None)


def replace_functions(ranges: Ranges, start: Callable[[], None], stop: Callable[[], None]) -> None:
    """Replaces the functions that start and stop the CUDA profiler, and the functions for NVTX ranges.

    Only one ``torch.profiler`` can run in a process, so the program's own ``torch.profiler`` is disabled.
    """
    import torch
    from torch.autograd import profiler

    _set_functions(profiler, **dict.fromkeys(_PROFILER_FUNCTIONS, lambda *_, **__: None))
    _set_functions(
        profiler, _enable_profiler=lambda *_, **__: _warn_of_disabled_profiler(), _disable_profiler=_EmptyResult
    )
    _set_functions(torch.cuda.profiler, start=start, stop=stop)
    _set_functions(torch.cuda, cudart=functools.partial(_Cudart, start, stop, torch.cuda.cudart))
    _set_functions(torch.cuda.nvtx, range_push=ranges.push, range_pop=ranges.pop, mark=ranges.mark)
    _set_functions(torch.cuda.nvtx, range_start=ranges.start, range_end=ranges.end)
    if find_spec("nvtx") is not None:
        nvtx = import_module("nvtx")
        _set_functions(nvtx, push_range=ranges.push, pop_range=ranges.pop, mark=ranges.mark)
        _set_functions(
            nvtx, start_range=ranges.start, end_range=ranges.end, annotate=functools.partial(Annotation, ranges)
        )


def _set_functions(module: Any, **functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        setattr(module, name, function)


class Annotation(ContextDecorator):
    """The replacement of ``nvtx.annotate``: a context manager, and a decorator that names the range by its function."""

    def __init__(self, ranges: Ranges, message: object = None, *_: object, **__: object) -> None:
        self._ranges, self._message = ranges, message

    def __enter__(self) -> Annotation:
        self._ranges.push("" if self._message is None else self._message)
        return self

    def __exit__(self, *_: object) -> None:
        self._ranges.pop()

    def __call__(self, function: Function) -> Function:
        """Wraps a function in a range. Without a message, the range has the name of the function."""
        message = function.__name__ if self._message is None else self._message
        return ContextDecorator.__call__(Annotation(self._ranges, message), function)


class _Cudart:
    """The module that ``torch.cuda.cudart()`` returns, with other functions to start and stop the profiler."""

    def __init__(self, start: Callable[[], None], stop: Callable[[], None], cudart: Callable[[], Any]) -> None:
        self._start, self._stop, self._cudart = start, stop, cudart

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cudart(), name)

    def cudaProfilerStart(self) -> object:  # noqa: N802 - CUDA's name
        """Starts the recording, and returns CUDA's success code."""
        self._start()
        return self._success()

    def cudaProfilerStop(self) -> object:  # noqa: N802 - CUDA's name
        """Stops the recording, and returns CUDA's success code."""
        self._stop()
        return self._success()

    def _success(self) -> object:
        import torch

        return self._cudart().cudaError.success if torch.cuda.is_available() else 0


# --- the program ---


def record(
    program: list[str], recorder: Recorder, *, whole_program: bool, delay_s: float = 0, duration_s: float = 0
) -> int:
    """Runs a program, ``-m MODULE ARGS…`` or ``SCRIPT ARGS…``, and returns its exit code.

    A recording that still runs when the program ends is written if the program succeeded, or if the hooks say that it
    contains all steps. Otherwise, the recording is discarded.
    """
    if whole_program:  # the program's own calls that start and stop a recording are ignored
        replace_functions(recorder.ranges, lambda: None, lambda: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED_EXIT_CODE))  # so that the recording is written
        if delay_s or duration_s:
            threading.Thread(target=_record_by_time, args=(recorder, delay_s, duration_s), daemon=True).start()
        else:
            recorder.start()
    else:
        replace_functions(recorder.ranges, recorder.start, recorder.stop)
    if hooks := sys.modules.get("_nsys_analyze_hooks"):
        hooks.wrap_range_functions()
    try:
        _run_as_main(program)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, int) or error.code is None:
            code = error.code or 0
        else:  # the code is a message, for which Python exits with 1
            print(error.code, file=sys.stderr)
            code = 1
    except Exception as error:  # noqa: BLE001 - the program may raise any error
        # The printed traceback begins at the first line of the program, without the lines of the recorder.
        recorder_files = (__file__, runpy.__file__, "<frozen runpy>")
        frame = error.__traceback__
        while frame and frame.tb_frame.f_code.co_filename in recorder_files:
            frame = frame.tb_next
        error.__traceback__ = frame or error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    except BaseException:  # Ctrl-C
        recorder.discard()
        raise
    threading._shutdown()  # type: ignore[attr-defined]  # like Python at a program's end, this waits for threads
    if recorder.is_forked:
        # At the end of a process, PyTorch's profiler waits for its threads, and a forked child does not have them.
        _end_process(code)
    if code == 0 or whole_program or (hooks and hooks.has_recorded_all()):
        recorder.stop()
    recorder.discard()
    if recorder.failure:
        _print_message(str(recorder.failure))
    elif not recorder.has_recorded and code == 0:
        _print_message("the program never called cudaProfilerStart; nsys-analyze run --whole-program records it whole")
    if code == _TERMINATED_EXIT_CODE:  # PyTorch may crash while threads of a server still use it
        _end_process(code)
    return code or (0 if recorder.has_recorded and not recorder.failure else NOTHING_RECORDED)


def _end_process(code: int) -> NoReturn:
    """Runs the functions of ``atexit``, and ends the process without the other steps of Python's shutdown."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _record_by_time(recorder: Recorder, delay_s: float, duration_s: float) -> None:
    """Starts the recording after a delay. If the duration is not 0, ends the program after that duration."""
    start_time, begin_file = time.monotonic() + delay_s, recorder.output.with_name(BEGIN_FILE)
    while (remaining_s := start_time - time.monotonic()) > 0 and not begin_file.exists():
        time.sleep(min(remaining_s, _POLL_INTERVAL_S))
    recorder.start()
    if duration_s:
        time.sleep(duration_s)
        os.kill(os.getpid(), signal.SIGTERM)


def _run_as_main(program: list[str]) -> None:
    """Runs the program as ``__main__``, with the ``sys.argv`` and the ``sys.path[0]`` that Python would give it."""
    path = Path(program[0])
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = program
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path[0] = str(Path.cwd())
        runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]  # what python -m does
    else:
        sys.path[0] = str(path.resolve().parent)
        main.__file__ = program[0]
        exec(compile(path.read_bytes(), program[0], "exec", dont_inherit=True), vars(main))


def _print_message(message: str) -> None:
    print(f"recorder: {message}", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Records the program after ``--``, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nsys_analyzer.capture.recorder")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json.gz",
                        help="the trace to write; %%q{RANK} in the name becomes the rank")  # fmt: skip
    parser.add_argument("--memory", action="store_true", help="record the allocations and releases of memory")
    parser.add_argument("--whole-program", action="store_true", help="record the whole program")
    parser.add_argument(
        "--delay", type=float, default=0, metavar="S", help="with --whole-program: start the recording after S seconds"
    )
    parser.add_argument(
        "--duration",
        type=float,
        default=0,
        metavar="S",
        help="with --whole-program: record S seconds, then send SIGTERM",
    )
    parser.add_argument("program", nargs="+", metavar="-- (-m MODULE | SCRIPT) ARGS", help="the Python program to run")
    options = parser.parse_args(arguments)
    if options.program == ["-m"]:
        parser.error("-m needs the name of a module")
    if not options.output.parent.is_dir():
        parser.error(f"{options.output.parent} is not a folder")
    output = options.output.with_name(
        _RANK_VARIABLE.sub(lambda match: os.environ.get(match[1], ""), options.output.name)
    )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto reads it once, when PyTorch is imported
    if options.memory:  # PyTorch would warn for each released block whose allocation it did not record
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return record(
        options.program, Recorder(output, memory=options.memory), whole_program=options.whole_program,
        delay_s=options.delay, duration_s=options.duration,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
