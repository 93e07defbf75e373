"""Calls a function for many files: sequentially in this process, in processes of this machine, or on Dask workers.

Only this module uses Dask, which is an optional dependency (``cluster``). It is imported if the user names a scheduler.
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

#: Tasks that take less time than this in total run in this process, because starting another process takes about one
#: second of a core.
MIN_PARALLEL_WORK_S = 10
#: The scheduler address that means to run all tasks in this process, without a cluster or other processes.
NO_SCHEDULER = "none"

_PACKAGE = "nsys-analyze"
_ANSWER_TIMEOUT_S = 20
_WORKER_KILLED = "A process that read captures was killed. Memory may have run out"
_READ_HERE_HINT = "Read them one after another in this process: --scheduler none"


class Task(Protocol):
    """A task for a worker: work on one file."""

    @property
    def path(self) -> Path:
        """The file on which the worker works."""

    @property
    def seconds(self) -> float:
        """The estimated time of the work, in seconds."""

    @property
    def memory_bytes(self) -> int:
        """The estimated memory of the work, in bytes."""


_Task = TypeVar("_Task", bound=Task)
_Result = TypeVar("_Result")
#: A function that is called after each finished task.
OnTaskDone = Callable[[], None]


@dataclass(frozen=True)
class Workers:
    """The processes that run tasks.

    Attributes:
        scheduler: the address of a Dask scheduler. "none" runs the tasks one after another in this process. None does
            so only if the tasks take less than ``MIN_PARALLEL_WORK_S``, and otherwise starts processes on this machine:
            at most one per core, and at most as many as can each hold the largest file in the free memory.
        show_progress: a context manager that shows the progress of a number of tasks.
    """

    scheduler: str | None = None
    show_progress: Callable[[int], AbstractContextManager[OnTaskDone]] = lambda _: nullcontext(lambda: None)

    def map(self, function: Callable[[_Task], _Result], tasks: Sequence[_Task]) -> list[_Result]:
        """Returns the results of the tasks, in the order of the tasks.

        Args:
            function: a function of a module, so that it can be sent to other processes by name.
            tasks: its arguments.

        Raises:
            ClusterError: the scheduler does not answer, its workers are unsuitable, or a process was killed.
            Exception: any error of the function.
        """
        with self.show_progress(len(tasks)) as on_task_done:
            if self.scheduler not in (None, NO_SCHEDULER):
                with _open_client(str(self.scheduler)) as client:
                    run_on_worker = partial(_run_on_worker, Path.cwd(), function)
                    return _map_on_executor(client.get_executor(pure=False), run_on_worker, tasks, on_task_done)
            if self.scheduler is None and (count := _count_local_workers(tasks)) > 1:
                with _open_local_pool(count) as executor:
                    return _map_on_executor(executor, function, tasks, on_task_done)
            task_results = []
            for task in tasks:
                task_results.append(function(task))
                on_task_done()
            return task_results


#: Runs one task after another in this process.
SEQUENTIAL = Workers(NO_SCHEDULER)


def _map_on_executor(
    executor: Executor, function: Callable[[_Task], _Result], tasks: Sequence[_Task], on_task_done: OnTaskDone
) -> list[_Result]:
    """Runs the tasks on an executor, the longest first, and returns their results in the order of the tasks."""
    from concurrent.futures import as_completed  # imported here because most commands read one capture

    # The new processes inherit the blocked signal, so that only this process handles an interrupt from the terminal.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    longest_first = sorted(range(len(tasks)), key=lambda index: -tasks[index].seconds)
    futures = {index: executor.submit(function, tasks[index]) for index in longest_first}
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    for future in as_completed(futures.values()):
        future.result()
        on_task_done()
    return [futures[index].result() for index in range(len(tasks))]


# --- processes of this machine ---


def _count_local_workers(tasks: Sequence[Task]) -> int:
    """Returns the number of processes to use for the tasks. 1 means to use this process."""
    if len(tasks) < 2 or sum(task.seconds for task in tasks) < MIN_PARALLEL_WORK_S:
        return 1
    import psutil

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    tasks_in_memory = int(psutil.virtual_memory().available) // max(task.memory_bytes for task in tasks)
    return max(1, min(tasks_in_memory, len(tasks), cores))


@contextmanager
def _open_local_pool(count: int) -> Iterator[Executor]:
    """Opens a pool of processes for the block; an error in the block kills the processes."""
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import active_children, get_context, resource_tracker

    resource_tracker.ensure_running()  # started now, because its start would unblock the signals that are blocked next
    threads = (os.cpu_count() or 1) // count
    with ProcessPoolExecutor(count, get_context("spawn"), _prepare_worker_process, (threads,)) as executor:
        try:
            yield executor
        except BrokenProcessPool as error:
            raise ClusterError(_WORKER_KILLED, _READ_HERE_HINT) from error
        except BaseException:
            for process in active_children():
                process.kill()
            raise


def _prepare_worker_process(threads: int) -> None:
    """Makes a worker process end with its parent, and limits its threads."""
    signal_when_parent_dies(signal.SIGKILL)
    os.environ["OMP_NUM_THREADS"] = str(max(threads, 1))  # Arrow also reads its number of threads from this variable


# --- Dask ---


@contextmanager
def _open_client(address: str) -> Iterator[Client]:
    """Opens a client of a Dask scheduler for the block.

    Raises:
        ClusterError: Dask is not installed here, the scheduler does not answer, it has no workers, they have another
            version of this package, or a worker or the scheduler dies in the block.
    """
    if not importlib.util.find_spec("distributed"):
        hint = f"Install it: pip install '{_PACKAGE}[cluster]'"
        raise ClusterError("--scheduler needs dask.distributed, which is not installed", hint)
    import asyncio  # imported here because these imports are slow and only clusters need them
    from concurrent.futures import CancelledError
    from importlib import metadata

    from distributed import Client, KilledWorker, TimeoutError
    from distributed.comm import connect
    from distributed.utils import silence_logging_cmgr

    with silence_logging_cmgr(logging.CRITICAL):  # hides log messages, because important problems are raised as errors
        try:
            # A client would wait forever for a program that accepts connections but sends nothing.
            asyncio.run(asyncio.wait_for(connect(address, _ANSWER_TIMEOUT_S), _ANSWER_TIMEOUT_S + 1)).abort()
            client = Client(address, timeout=_ANSWER_TIMEOUT_S)
        # These errors also mean that the address is no Dask scheduler's.
        except (OSError, TimeoutError, ValueError, MemoryError, TypeError) as error:
            hint = "Check that it runs there, or start one: dask scheduler --no-dashboard"
            reason = str(error) or f"no answer within {_ANSWER_TIMEOUT_S} s"
            raise ClusterError(f"No Dask scheduler answers at {address} ({reason})", hint) from error
        with client:
            try:
                client.wait_for_workers(1, _ANSWER_TIMEOUT_S)
            except TimeoutError as error:
                hint = f"Start some on machines with the captures: dask worker {address} --no-dashboard --nthreads 1"
                raise ClusterError(f"The Dask scheduler at {address} has no workers", hint) from error
            try:
                version: str | None = metadata.version(_PACKAGE)
            except metadata.PackageNotFoundError:
                version = None  # workers without the package also answer None
            for worker, versions in client.get_versions(packages=[_PACKAGE])["workers"].items():
                if (worker_version := versions["packages"][_PACKAGE]) != version:
                    installed_version = f"nsys-analyze {worker_version}" if worker_version else "no nsys-analyze"
                    hint = f"Install the same version there: pip install {_PACKAGE}=={version}"
                    raise ClusterError(
                        f"The worker {worker} has {installed_version}, and this command is {version}", hint
                    )
            try:
                yield client
            except KilledWorker as error:
                raise ClusterError(_WORKER_KILLED, _READ_HERE_HINT) from error
            except CancelledError as error:
                raise ClusterError("The Dask scheduler is gone", _READ_HERE_HINT) from error


def _run_on_worker(folder: Path, function: Callable[[_Task], _Result], task: _Task) -> _Result:
    """Runs a task on a worker in the command's working folder, so that relative paths refer to the same files.

    Raises:
        ClusterError: the worker does not see the file.
    """
    try:
        os.chdir(folder)
        os.lstat(task.path)
    except OSError as error:
        hint = "Start workers on machines where the captures have the same paths as here, such as on a shared disk"
        raise ClusterError(f"The worker on {socket.gethostname()} does not see {task.path}", hint) from error
    return function(task)
