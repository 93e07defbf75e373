"""The lock, the log and the ends that sweeps and experiments share as they run programs into a folder.

Both start programs with ``system.process.run_logged``, keep each result as soon as it is there, and resume where an
earlier run ended. They loop apart: a process of an experiment measures many cases and adds a row for each, a target of
a sweep takes two processes and fills a folder.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.system.atomic_write import check_regular
from nsys_analyzer.system.process import end_earlier_run

#: The output of the programs.
LOG = "target.log"
#: Ends after which nothing is run again: more memory is not going to appear.
FINAL = ("ok", "oom")
ELSEWHERE = "Move it away, or name another --output-dir"
_LOCK = ".lock"


def already_there(path: Path) -> ConfigurationError:
    """The error where results exist, and no option says whether to keep or to replace them."""
    hint = "--resume keeps what is finished, --rerun replaces it, --output-dir puts the results elsewhere"
    return ConfigurationError(f"{path} is there already", hint)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps other sweeps out of it; what an earlier one has left running there is ended.

    Raises:
        ConfigurationError: another sweep is at work there, or its lock is somebody else's file.
        CaptureError: what an earlier sweep has left running does not end.
        OSError: it cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_lock(folder / _LOCK)
    with (folder / _LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ConfigurationError(
                f"Another sweep is at work in {folder} (process {lock.read().strip() or 'unknown'})",
                "Wait for it, or name another --output-dir",
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        end_earlier_run(folder)
        yield


def _check_lock(path: Path) -> None:
    """Makes sure that a lock's file holds the number of a process at most, for it is written over."""
    check_regular(path)
    if path.exists() and path.read_bytes().strip(b"0123456789"):
        raise ConfigurationError(f"{path} was not written by a sweep, and would be replaced", ELSEWHERE)
