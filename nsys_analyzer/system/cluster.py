"""Maps a function over files: in this process in turn, on processes of this machine, or on the workers of Dask.

Nothing else knows of Dask, which is an extra (``cluster``) and imported for the address of a scheduler alone.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from nsys_analyzer.errors import ClusterError
from nsys_analyzer.system.process import signal_when_parent_dies

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from distributed import Client

#: Work of fewer seconds is done in turn: a process and its imports cost a second of a core.
WORTH_PROCESSES_S = 10
#: The address that stands for no cluster.
NO_SCHEDULER = "none"

_PACKAGE = "nsys-analyze"
_ANSWER_TIMEOUT_S = 20
_KILLED = "A process that read captures was killed, as where memory runs out"
_ALONE = "Read one after another, here: --scheduler none"


class Task(Protocol):
    """Work on one file, which travels to a worker: the file, the seconds and the bytes of memory it takes, about."""

    @property
    def path(self) -> Path: ...  # noqa: D102

    @property
    def seconds(self) -> float: ...  # noqa: D102

    @property
    def memory_bytes(self) -> int: ...  # noqa: D102


_Task = TypeVar("_Task", bound=Task)
_Result = TypeVar("_Result")
OnTaskDone = Callable[[], None]
"""Is told that one more task is done."""


@dataclass(frozen=True)
class Workers:
    """Where tasks are done.

    Attributes:
        scheduler: the address of a Dask scheduler; "none" is this process, in turn. None: processes of this machine
            where the tasks take ``WORTH_PROCESSES_S`` or more, else in turn. There are as many as cores, but no more
            than hold the largest files at once in the memory that is free.
        shown: shows the progress of so many tasks while it is open.
    """

    scheduler: str | None = None
    shown: Callable[[int], AbstractContextManager[OnTaskDone]] = lambda _: nullcontext(lambda: None)

    def map(self, function: Callable[[_Task], _Result], tasks: Sequence[_Task]) -> list[_Result]:
        """Returns the result of each task, in their order.

        Args:
            function: of a module, so that it travels by its name.
            tasks: what it is called with.

        Raises:
            ClusterError: there is no such scheduler, its workers cannot do this, or a process was killed.
            Exception: what the function raises, as if it were called here.
        """
        with self.shown(len(tasks)) as done:
            if self.scheduler not in (None, NO_SCHEDULER):
                with _client(str(self.scheduler)) as client:
                    return _map_on(client.get_executor(pure=False), partial(_do, Path.cwd(), function), tasks, done)
            if self.scheduler is None and (count := _local_workers(tasks)) > 1:
                with _local_pool(count) as executor:
                    return _map_on(executor, function, tasks, done)
            results = []
            for task in tasks:
                results.append(function(task))
                done()
            return results


SEQUENTIAL = Workers(NO_SCHEDULER)
"""This process does one task after another."""


def _map_on(
    executor: Executor, do: Callable[[_Task], _Result], tasks: Sequence[_Task], done: OnTaskDone
) -> list[_Result]:
    """Does each task in processes, the longest first."""
    from concurrent.futures import as_completed  # one capture needs none of it

    # Processes inherit which signals are blocked: an interrupt of the terminal is this one's alone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    longest_first = sorted(range(len(tasks)), key=lambda index: -tasks[index].seconds)
    futures = {index: executor.submit(do, tasks[index]) for index in longest_first}
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for future in as_completed(futures.values()):
        future.result()
        done()
    return [futures[index].result() for index in range(len(tasks))]


# --- processes of this machine ---


def _local_workers(tasks: Sequence[Task]) -> int:
    """Returns how many processes are worth starting for tasks, 1 for none: each has memory for the largest of them."""
    if len(tasks) < 2 or sum(task.seconds for task in tasks) < WORTH_PROCESSES_S:
        return 1
    import psutil

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    fit = int(psutil.virtual_memory().available) // max(task.memory_bytes for task in tasks)
    return max(1, min(fit, len(tasks), cores))


@contextmanager
def _local_pool(count: int) -> Iterator[Executor]:
    """Opens a pool of processes, which end where the block fails."""
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import active_children, get_context, resource_tracker

    resource_tracker.ensure_running()  # its start lets through the signals that are blocked
    threads = (os.cpu_count() or 1) // count
    with ProcessPoolExecutor(count, get_context("spawn"), _prepare_process, (threads,)) as executor:
        try:
            yield executor
        except BrokenProcessPool as error:
            raise ClusterError(_KILLED, _ALONE) from error
        except BaseException:
            for process in active_children():
                process.kill()
            raise


def _prepare_process(threads: int) -> None:
    signal_when_parent_dies(signal.SIGKILL)
    os.environ["OMP_NUM_THREADS"] = str(max(threads, 1))  # Arrow's, too


# --- Dask ---


@contextmanager
def _client(address: str) -> Iterator[Client]:
    """Opens a client of a scheduler that has workers, all of this version.

    Raises:
        ClusterError: Dask is not installed here, nothing answers, there are no workers, or they are of another version.
    """
    if not importlib.util.find_spec("distributed"):
        hint = f"Install it: pip install '{_PACKAGE}[cluster]'"
        raise ClusterError("--scheduler needs dask.distributed, which is not installed", hint)
    import asyncio  # takes time, and only clusters need it
    from concurrent.futures import CancelledError

    from distributed import Client, KilledWorker, TimeoutError
    from distributed.comm import connect
    from distributed.utils import silence_logging_cmgr

    with silence_logging_cmgr(logging.CRITICAL):  # what matters is raised
        try:
            # A client would wait for ever for the first words of a program that accepts connections and is silent.
            asyncio.run(asyncio.wait_for(connect(address, _ANSWER_TIMEOUT_S), _ANSWER_TIMEOUT_S + 1)).abort()
            client = Client(address, timeout=_ANSWER_TIMEOUT_S)
        except (OSError, TimeoutError, ValueError, MemoryError, TypeError) as error:  # of another protocol, too
            hint = "See whether it runs there, or start one: dask scheduler --no-dashboard"
            why = str(error) or f"no word from there in {_ANSWER_TIMEOUT_S} s"
            raise ClusterError(f"No Dask scheduler answers at {address} ({why})", hint) from error
        with client:
            try:
                client.wait_for_workers(1, _ANSWER_TIMEOUT_S)
            except TimeoutError as error:
                hint = f"Start some where the captures are seen: dask worker {address} --no-dashboard --nthreads 1"
                raise ClusterError(f"The Dask scheduler at {address} has no workers", hint) from error
            ours = _version()
            for worker, versions in client.get_versions(packages=[_PACKAGE])["workers"].items():
                if (theirs := versions["packages"][_PACKAGE]) != ours:
                    has = f"nsys-analyze {theirs}" if theirs else "no nsys-analyze"
                    hint = f"Install the same version there: pip install {_PACKAGE}=={ours}"
                    raise ClusterError(f"The worker {worker} has {has}, and this command is {ours}", hint)
            try:
                yield client
            except KilledWorker as error:
                raise ClusterError(_KILLED, _ALONE) from error
            except CancelledError as error:
                raise ClusterError("The Dask scheduler is gone", _ALONE) from error


def _version() -> str | None:
    """Returns the version of this package as it is installed, None where it is not: as Dask asks for it."""
    from importlib import metadata  # takes a thirtieth of a second, and only clusters need it

    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def _do(folder: Path, function: Callable[[_Task], _Result], task: _Task) -> _Result:
    """Does a task on a worker, in the folder of the command: a relative path means the same file, in messages too.

    Raises:
        ClusterError: the worker does not see the file.
    """
    try:
        os.chdir(folder)
        os.lstat(task.path)
    except OSError as error:
        hint = "Start workers where the captures have the same paths as here, as on a shared file system"
        raise ClusterError(f"The worker on {socket.gethostname()} does not see {task.path}", hint) from error
    return function(task)
