"""Runs one command line in a child process with limits on time and memory, and says how it ended."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIME_S, MEMORY_BYTES = 60, 3 << 30


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code (negative: a signal), what it wrote, and seconds."""

    command: tuple[str, ...]
    code: int
    out: bytes
    err: bytes
    seconds: float


def warm_up() -> None:
    """Imports what the commands import, once: a forked child then starts at once."""
    import adbc_driver_manager  # noqa: F401
    import adbc_driver_sqlite  # noqa: F401
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import pandas  # noqa: F401
    import pyarrow.compute  # noqa: F401
    import rich.console
    import rich.table  # noqa: F401


def run(command: Sequence[str], folder: Path) -> Outcome:
    """Runs ``nsys-analyze`` with these arguments in a forked child, in a folder."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            _child(command, folder, out.fileno(), err.fileno())
        code = _wait(child, started)
        out.seek(0)
        err.seek(0)
        return Outcome(tuple(command), code, out.read(), err.read(), time.monotonic() - started)


def _wait(child: int, started: float) -> int:
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - started > TIME_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL
        time.sleep(0.005)


def _child(command: Sequence[str], folder: Path, out: int, err: int) -> None:
    code = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.chdir(folder)
        os.environ.update(HOME=str(folder), XDG_CACHE_HOME=str(folder / "cache"), COLUMNS="100", NO_COLOR="1")
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["nsys-analyze", *command]
        from nsys_analyzer.cli.main import main

        main()
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:  # noqa: BLE001  # a finding, whatever it is
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        os._exit(code)
