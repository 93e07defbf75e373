"""Runs a Python program under ``torch.profiler`` and writes the trace: for a machine without nsys, or without GPU.

    python -m nsys_analyzer.capture.recorder --output trace.json.gz -- train.py --steps 3

The program runs in this process. What lies between its ``torch.cuda.profiler.start()`` and ``stop()`` is recorded, its
NVTX ranges with it. PyTorch is imported before the program starts, and reads its environment variables then.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import runpy
import shutil
import sys
import warnings
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from nsys_analyzer.capture.recorder.hooks import Ranges, install
from nsys_analyzer.errors import ExportError, NoSpaceError, NsysAnalyzerError
from nsys_analyzer.runs.machine import cpu_model, driver_module
from nsys_analyzer.system.atomic_write import atomic_write

if TYPE_CHECKING:
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import profile

NOTHING_RECORDED = 4
"""The exit code where the program ended well and no trace was written; 3 is what our targets say of memory."""

_VARIABLE = re.compile(r"%q\{(\w+)\}")
_COMPRESSION = 4  # of a trace's size it takes all but a few per cent, in a third of the time of gzip's default


class Recorder:
    """Records a program from the first ``start()`` to the next ``stop()``, into ``output``, a ``.json.gz``.

    With ``memory`` the allocator is recorded too, and ranges and operators of the starting thread and of autograd's
    alone.
    """

    def __init__(self, output: Path, *, memory: bool = False) -> None:
        self.output = output
        self.is_recording = False
        self.has_recorded = False
        self.failure: NsysAnalyzerError | None = None
        self.ranges = Ranges(self)
        self._profile = _prepared(memory=memory)

    def start(self) -> None:
        """Starts the recording; a second one is refused with a message."""
        if self.has_recorded:
            _say("only the first range between cudaProfilerStart and cudaProfilerStop is recorded")
        elif not self.is_recording:
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
        self._profile.stop_trace()

    def _write(self) -> None:
        with atomic_write(self.output) as unfinished:
            plain = unfinished.with_name("plain.json")
            self._profile.export_chrome_trace(str(plain))
            if not plain.is_file() or not _ends(plain):
                raise ExportError("torch.profiler wrote no trace, or only a part of one")
            with plain.open("rb") as trace, gzip.open(unfinished, "wb", _COMPRESSION) as packed:
                shutil.copyfileobj(trace, packed, 1 << 20)
            plain.unlink()


def _prepared(*, memory: bool) -> profile:
    """A profiler that has only to be started: CUPTI's own start takes a second, which is not the program's."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    threads = None if memory else _all_threads()  # PyTorch's profiler of all threads sees no memory
    prepared = profile(activities=activities, profile_memory=memory, experimental_config=threads)
    with warnings.catch_warnings():  # of several recordings, of which there is one; the program's log is its own
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        prepared.prepare_trace()
    return prepared


def _all_threads() -> _ExperimentalConfig | None:
    """The setting to record every thread, not only the first and autograd's; None in an older PyTorch."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:  # an argument that it does not know
        return None


def _conditions() -> dict[str, str]:
    """Versions and machine, which Kineto's trace lacks; unknown values are left out."""
    import torch

    try:
        os_name = platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        os_name = None
    # 580.159.04 in "NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
    driver = next((word for word in (driver_module() or "").split() if word[0].isdigit() and "." in word), None)
    known = {
        "torch_version": torch.__version__,
        "python_version": platform.python_version(),
        "cuda_version": torch.version.cuda,
        "driver_version": driver,
        "cpu": cpu_model(),
        "os": os_name,
    }
    return {key: str(value) for key, value in known.items() if value}


def _ends(trace: Path) -> bool:
    """Whether a trace has its end: Kineto says nothing of a disk that is full."""
    with trace.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16))
        return file.read().rstrip().endswith(b"}")


def record(program: list[str], recorder: Recorder, *, whole_program: bool) -> int:
    """Runs a program, ``-m MODULE ARGS…`` or ``SCRIPT ARGS…``, and returns its exit code.

    An open recording is written where the program ends well, and thrown away where it fails.
    """
    if whole_program:  # the program's own starts and stops are ignored
        install(recorder.ranges, lambda: None, lambda: None)
        recorder.start()
    else:
        install(recorder.ranges, recorder.start, recorder.stop)
    if annotating := sys.modules.get("_nsys_analyze_hooks"):
        annotating.watch()
    try:
        _run(program)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the program's own
        error.__traceback__ = _of_the_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    except BaseException:  # Ctrl-C
        recorder.discard()
        raise
    if code == 0 or whole_program:
        recorder.stop()
    recorder.discard()
    if recorder.failure:
        _say(str(recorder.failure))
    elif not recorder.has_recorded and code == 0:
        _say("the program never called cudaProfilerStart; --whole-program records all of it")
    return code or (0 if recorder.has_recorded and not recorder.failure else NOTHING_RECORDED)


def _run(program: list[str]) -> None:
    """Runs it as ``__main__``, with the arguments and the first import path that python gives it."""
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


def _exit_code(error: SystemExit) -> int:
    """The code that python exits with; a message is printed, and means 1."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


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
    parser.add_argument("program", nargs="+", metavar="-- (-m MODULE | SCRIPT) ARGS", help="the Python program to run")
    given = parser.parse_args(arguments)
    if given.program == ["-m"]:
        parser.error("-m needs the name of a module")
    if not given.output.parent.is_dir():
        parser.error(f"{given.output.parent} is no folder")
    output = given.output.with_name(_VARIABLE.sub(lambda found: os.environ.get(found[1], ""), given.output.name))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before PyTorch is imported: Kineto reads it once
    if given.memory:  # PyTorch warns of each block that it gets back and did not see going
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return record(given.program, Recorder(output, memory=given.memory), whole_program=given.whole_program)
