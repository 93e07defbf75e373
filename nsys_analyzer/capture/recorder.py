"""Runs a Python program under ``torch.profiler`` and writes the trace: for a machine without nsys, or without GPU.

    python -m nsys_analyzer.capture.recorder --output trace.json.gz -- train.py --steps 3

The program runs in this process. What lies between its ``torch.cuda.profiler.start()`` and ``stop()`` is recorded, its
NVTX ranges with it: these functions, and those of the ``nvtx`` package, are replaced by calls of the recorder. PyTorch
is imported before the program starts, and reads its environment variables then.
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
from types import ModuleType, TracebackType
from typing import Any, NoReturn, TypeVar

from nsys_analyzer.errors import ExportError, NoSpaceError, NsysAnalyzerError
from nsys_analyzer.system.atomic_write import atomic_write
from nsys_analyzer.system.machine import cpu_model, driver_module_version

Function = TypeVar("Function", bound=Callable[..., Any])

NOTHING_RECORDED = 4
"""The exit code where the program ended well and no trace was written; 3 is what our targets say of memory."""

_TERMINATED = 128 + signal.SIGTERM
#: The file beside the trace that begins the recording of a server before its delay is over.
BEGIN = "record-now"
_VARIABLE = re.compile(r"%q\{(\w+)\}")
_LOOK_S = 0.05
_COMPRESSION = 4  # of a trace's size it takes all but a few per cent, in a third of the time of gzip's default


class Recorder:
    """Records a program from the first ``start()`` to the next ``stop()``, into ``output``, a ``.json.gz``.

    With ``memory`` the allocator is recorded too, and ranges and operators of the starting thread and of autograd's
    alone.
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
        self._functions = {name: getattr(profiler, name) for name in _PROFILER_FUNCTIONS}
        os.register_at_fork(after_in_child=self._fork)
        self.failure: NsysAnalyzerError | None = None
        self.ranges = Ranges(self)
        threads = None
        if not memory:  # PyTorch's profiler of all threads, not only the first and autograd's, sees no memory
            with suppress(TypeError):  # an argument that an older PyTorch does not know
                threads = _ExperimentalConfig(profile_all_threads=True)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=activities, profile_memory=memory, experimental_config=threads)
        with warnings.catch_warnings(), self._own_profiler():  # of several recordings; the program's log is its own
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            self._profile.prepare_trace()  # CUPTI's own start takes a second, which is not the program's

    def start(self) -> None:
        """Starts the recording; a second one is refused with a message."""
        if self.has_recorded:
            _say("only the first range between cudaProfilerStart and cudaProfilerStop is recorded")
        elif not self.is_recording:
            with self._own_profiler():
                self._profile.start_trace()
            self.is_recording = True

    def stop(self) -> None:
        """Stops a recording and writes the trace; an error is kept in ``failure``."""
        if not self.is_recording:
            return
        for key, value in _conditions().items():
            self._profile.add_metadata_json(key, json.dumps(value))
        self._end()
        self.has_recorded = True
        try:
            self._write()
        except NoSpaceError as error:
            self.failure = error
        except (OSError, RuntimeError, NsysAnalyzerError) as error:  # the program goes on, it is none of its faults
            problem = f"{self.output} cannot be written: {error}"
            self.failure = ExportError(problem, "Free some space, or name another --output")

    def discard(self) -> None:
        """Stops a recording and writes nothing: PyTorch crashes where a process ends under its profiler."""
        if self.is_recording:
            try:
                self._end()
            except RuntimeError as error:  # a GPU that failed fails to stop, too
                _say(f"the profiler did not stop: {error}")

    def _end(self) -> None:
        self.ranges.close_all()
        self.is_recording = False
        with self._own_profiler():
            self._profile.stop_trace()

    def _fork(self) -> None:
        """This is a child of ``os.fork()`` now: what is recorded is its parent's."""
        self.has_recorded |= self.is_recording
        self.is_recording, self.is_forked = False, True

    @contextmanager
    def _own_profiler(self) -> Iterator[None]:
        """For the block, PyTorch's profiler is as it was before its functions were taken from the program."""
        from torch.autograd import profiler

        replaced = {name: getattr(profiler, name) for name in self._functions}
        _replace(profiler, **self._functions)
        try:
            yield
        finally:
            _replace(profiler, **replaced)

    def _write(self) -> None:
        with atomic_write(self.output) as unfinished:
            plain = unfinished.with_name("plain.json")
            self._profile.export_chrome_trace(str(plain))
            with plain.open("ab+") as trace, gzip.open(unfinished, "wb", _COMPRESSION) as packed:
                trace.seek(max(0, trace.tell() - 16))
                if not trace.read().rstrip().endswith(b"}"):  # Kineto says nothing of a disk that is full
                    raise ExportError("torch.profiler wrote no trace, or only a part of one")
                trace.seek(0)
                shutil.copyfileobj(trace, packed, 1 << 20)
            plain.unlink()


def _conditions() -> dict[str, str]:
    """Versions and machine, which Kineto's trace lacks; unknown values are left out."""
    import torch

    # 580.159.04 in "NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
    driver = next((word for word in (driver_module_version() or "").split() if word[0].isdigit() and "." in word), None)
    conditions = {
        "torch_version": torch.__version__,
        "python_version": platform.python_version(),
        "cuda_version": torch.version.cuda,
        "driver_version": driver,
        "cpu": cpu_model(),
    }
    return {key: str(value) for key, value in conditions.items() if value}


# --- the program's own profiler ---


class _NoResult:
    """What a program's own ``torch.profiler`` finds: nothing."""

    def events(self) -> list[Any]:
        """No events."""
        return []

    experimental_event_tree = events

    def trace_start_ns(self) -> int:
        """No moment."""
        return 0

    def save(self, path: str) -> None:
        """Writes a trace without events."""
        Path(path).write_text('{"traceEvents": []}')


#: What PyTorch's profiler calls.
_PROFILER_FUNCTIONS = (
    "_prepare_profiler", "_enable_profiler", "_disable_profiler", "_run_on_profiler_start", "_run_on_profiler_stop",
)  # fmt: skip


@functools.cache
def _say_that_it_is_off() -> None:
    _say("the program's own torch.profiler stays off while this one records: it finds nothing")


# --- ranges ---


class Ranges:
    """NVTX ranges as ``record_function`` ranges while the recorder records.

    As under nsys, a range that is open when the recording starts is not recorded; one that is open when it ends is
    closed then. PyTorch calls a range's name ``msg``, the ``nvtx`` package ``message``.
    """

    def __init__(self, recorder: Recorder) -> None:
        import torch
        from torch.profiler import record_function

        self._recorder = recorder
        # torch.compile must not see into a range: it would compile once more when the recording starts.
        self._is_compiling: Callable[[], bool] = torch.compiler.is_compiling
        self._record_function: Callable[[str], AbstractContextManager[Any]] = record_function
        self._local = threading.local()
        self._started: dict[int, AbstractContextManager[Any] | None] = {}
        self._handles = itertools.count(1)  # threads share it, and its next is atomic

    @property
    def _stack(self) -> list[AbstractContextManager[Any] | None]:
        stack: list[AbstractContextManager[Any] | None] = self._local.__dict__.setdefault("stack", [])
        return stack

    def push(self, message: object = "", *_: object, msg: object = None, **__: object) -> int:
        """Open a range on this thread; returns its depth from 0, as NVTX does."""
        if self._is_compiling():
            return 0
        stack = self._stack
        stack.append(self._opened(msg or message) if self._recorder.is_recording else None)
        return len(stack) - 1

    def pop(self, *_: object, **__: object) -> int:
        """Close this thread's innermost range; returns its depth, -1 where none is open."""
        stack = self._stack if not self._is_compiling() else []
        if not stack:
            return -1
        _close(stack.pop())
        return len(stack)

    def start(self, message: object = "", *_: object, msg: object = None, **__: object) -> int:
        """Open a range that need not nest; returns the handle that closes it."""
        handle = next(self._handles)
        self._started[handle] = self._opened(msg or message) if self._recorder.is_recording else None
        return handle

    def end(self, range_id: int) -> None:
        """Close the range of a handle; a second time is none."""
        _close(self._started.pop(range_id, None))

    def mark(self, message: object = "", *_: object, msg: object = None, **__: object) -> None:
        """Mark a moment, as a range that ends at once."""
        if self._recorder.is_recording:
            _close(self._opened(msg or message))

    def close_all(self) -> None:
        """Close what is open on this thread, for the recording ends; a later ``pop`` still finds its range."""
        stack = self._stack
        for opened in reversed(stack):
            _close(opened)
        stack[:] = [None] * len(stack)
        for handle, opened in list(self._started.items()):  # other threads may be at it
            _close(opened)
            self._started[handle] = None

    def _opened(self, message: object) -> AbstractContextManager[Any]:
        opened = self._record_function(str(message))
        opened.__enter__()
        return opened


def _close(opened: AbstractContextManager[Any] | None) -> None:
    if opened is not None:
        opened.__exit__(None, None, None)


def install(ranges: Ranges, start: Callable[[], None], stop: Callable[[], None]) -> None:
    """Puts these in the place of the CUDA profiler's start and stop, and ranges in that of NVTX.

    A process has one profiler of PyTorch, and that is the recorder's: the program's own is off.
    """
    import torch
    from torch.autograd import profiler

    _replace(profiler, **dict.fromkeys(_PROFILER_FUNCTIONS, lambda *_, **__: None))
    _replace(profiler, _enable_profiler=lambda *_, **__: _say_that_it_is_off(), _disable_profiler=_NoResult)
    _replace(torch.cuda.profiler, start=start, stop=stop)
    _replace(torch.cuda, cudart=functools.partial(_Cudart, start, stop, torch.cuda.cudart))
    _replace(torch.cuda.nvtx, range_push=ranges.push, range_pop=ranges.pop, mark=ranges.mark)
    _replace(torch.cuda.nvtx, range_start=ranges.start, range_end=ranges.end)
    if find_spec("nvtx") is not None:
        nvtx = import_module("nvtx")
        _replace(nvtx, push_range=ranges.push, pop_range=ranges.pop, mark=ranges.mark)
        _replace(nvtx, start_range=ranges.start, end_range=ranges.end, annotate=functools.partial(Annotation, ranges))


def _replace(module: Any, **functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        setattr(module, name, function)


class Annotation(ContextDecorator):
    """``nvtx.annotate``: a context manager, or a decorator that names the range after the function."""

    def __init__(self, ranges: Ranges, message: object = None, *_: object, **__: object) -> None:
        self._ranges, self._message = ranges, message

    def __enter__(self) -> Annotation:
        self._ranges.push("" if self._message is None else self._message)
        return self

    def __exit__(self, *_: object) -> None:
        self._ranges.pop()

    def __call__(self, function: Function) -> Function:
        """The function within a range, which has its name where no message was given."""
        message = function.__name__ if self._message is None else self._message
        return ContextDecorator.__call__(Annotation(self._ranges, message), function)


class _Cudart:
    """The CUDA runtime's functions, except those that start and stop a profiler."""

    def __init__(self, start: Callable[[], None], stop: Callable[[], None], cudart: Callable[[], Any]) -> None:
        self._start, self._stop, self._cudart = start, stop, cudart

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cudart(), name)

    def cudaProfilerStart(self) -> object:  # noqa: N802 - CUDA's name
        """Starts the recording and returns CUDA's code of success."""
        self._start()
        return self._success()

    def cudaProfilerStop(self) -> object:  # noqa: N802 - CUDA's name
        """Stops the recording and returns CUDA's code of success."""
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

    An open recording is written where the program ends well, and thrown away where it fails.
    """
    if whole_program:  # the program's own starts and stops are ignored
        install(recorder.ranges, lambda: None, lambda: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # so that what was recorded is written
        if delay_s or duration_s:
            threading.Thread(target=_record_by_time, args=(recorder, delay_s, duration_s), daemon=True).start()
        else:
            recorder.start()
    else:
        install(recorder.ranges, recorder.start, recorder.stop)
    if annotating := sys.modules.get("_nsys_analyze_hooks"):
        annotating.watch()
    try:
        _run(program)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, int) or error.code is None:
            code = error.code or 0
        else:  # a message, and python ends with 1
            print(error.code, file=sys.stderr)
            code = 1
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the program's own
        error.__traceback__ = _of_the_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    except BaseException:  # Ctrl-C
        recorder.discard()
        raise
    threading._shutdown()  # type: ignore[attr-defined]  # as Python does at a program's end: it waits for threads
    if recorder.is_forked:
        # PyTorch's profiler waits at the process's end for threads that a child does not have.
        _leave(code)
    if code == 0 or whole_program:
        recorder.stop()
    recorder.discard()
    if recorder.failure:
        _say(str(recorder.failure))
    elif not recorder.has_recorded and code == 0:
        _say("the program never called cudaProfilerStart; nsys-analyze run --whole-program records all of it")
    if code == _TERMINATED:  # PyTorch may crash where threads of a server still use it
        _leave(code)
    return code or (0 if recorder.has_recorded and not recorder.failure else NOTHING_RECORDED)


def _leave(code: int) -> NoReturn:
    """Ends the process at once, behind the functions of ``atexit``."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _record_by_time(recorder: Recorder, delay_s: float, duration_s: float) -> None:
    """Records from one moment on, and has the program end at another; a duration of 0 is none."""
    until, begin = time.monotonic() + delay_s, recorder.output.with_name(BEGIN)
    while (left := until - time.monotonic()) > 0 and not begin.exists():
        time.sleep(min(left, _LOOK_S))
    recorder.start()
    if duration_s:
        time.sleep(duration_s)
        os.kill(os.getpid(), signal.SIGTERM)


def _run(program: list[str]) -> None:
    """Runs it as ``__main__``, to the end of the process, with the arguments and the first import path of python."""
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


def _of_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first line on, without the lines that ran it."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    here = traceback
    while here and here.tb_frame.f_code.co_filename in ours:
        here = here.tb_next
    return here or traceback


def _say(message: str) -> None:
    print(f"recorder: {message}", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Record the program behind ``--``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nsys_analyzer.capture.recorder")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json.gz",
                        help="the trace to write; %%q{RANK} in its name is that variable, as for nsys")  # fmt: skip
    parser.add_argument("--memory", action="store_true", help="record what the allocator gives out and takes back")
    parser.add_argument("--whole-program", action="store_true", help="record all, not from cudaProfilerStart to Stop")
    parser.add_argument(
        "--delay", type=float, default=0, metavar="S", help="with --whole-program, from so many seconds on"
    )
    parser.add_argument(
        "--duration", type=float, default=0, metavar="S", help="with --whole-program, for so long; then SIGTERM"
    )
    parser.add_argument("program", nargs="+", metavar="-- (-m MODULE | SCRIPT) ARGS", help="the Python program to run")
    options = parser.parse_args(arguments)
    if options.program == ["-m"]:
        parser.error("-m needs the name of a module")
    if not options.output.parent.is_dir():
        parser.error(f"{options.output.parent} is no folder")
    output = options.output.with_name(_VARIABLE.sub(lambda found: os.environ.get(found[1], ""), options.output.name))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before PyTorch is imported: Kineto reads it once
    if options.memory:  # PyTorch warns of each block that it gets back and did not see going
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    recorder, whole = Recorder(output, memory=options.memory), options.whole_program
    return record(options.program, recorder, whole_program=whole, delay_s=options.delay, duration_s=options.duration)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
