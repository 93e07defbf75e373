"""Maps a function over files: in this process in turn, on processes of this machine, or on the workers of Dask.

Nothing else knows of Dask, which is an extra (``cluster``) and imported for the address of a scheduler alone.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from nsys_analyzer.errors import ClusterError
from nsys_analyzer.system.process import signal_when_parent_dies

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

    from distributed import Client

#: Work of fewer seconds is done in turn: a process and its imports cost a second of a core.
WORTH_PROCESSES_S = 10
#: The address that stands for no cluster.
NO_SCHEDULER = "none"

_PACKAGE = "nsys-analyze"
_ANSWER_TIMEOUT_S = 20
#: How often it is looked whether there are workers at all, and for how long there may be none.
_LOOK_S, _LOOKS = 10, 6
#: A worker reads one file at a time, whatever its threads: for its memory, and for the folder that it is in.
_ONE_AT_A_TIME = threading.Lock()


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
Done = Callable[[], None]
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
    shown: Callable[[int], AbstractContextManager[Done]] = lambda _: nullcontext(lambda: None)

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task], lost: Callable[[_Task], _Result]
    ) -> list[_Result]:
        """Returns the result of each task, in their order.

        Args:
            function: of a module, so that it travels by its name.
            tasks: what it is called with.
            lost: the result of a task that ended every process in which it was tried, as where memory runs out.

        Raises:
            ClusterError: there is no such scheduler, or its workers cannot do this.
            Exception: what the function raises, as if it were called here.
        """
        with self.shown(len(tasks)) as done:
            if self.scheduler not in (None, NO_SCHEDULER):
                do = partial(_do, str(Path.cwd()), function)
                with _client(str(self.scheduler)) as client:
                    if all(os.path.lexists(task.path) for task in tasks):  # else the function says what is missing
                        return _map_on(partial(_dask_pool, client), do, tasks, lost, done)
            elif self.scheduler is None and (count := _local_workers(tasks)) > 1:
                return _map_on(partial(_local_pool, count), function, tasks, lost, done)
            results = []
            for task in tasks:
                results.append(function(task))
                done()
            return results


IN_TURN = Workers(NO_SCHEDULER)
"""This process does one task after another."""


class _Pool(NamedTuple):
    """Processes: what gives them tasks, the error of a task that ended them, and who is told of each wait."""

    executor: Executor
    killed_error: type[Exception]
    waited: Callable[[bool], None]


def _map_on(
    open_pool: Callable[[bool], AbstractContextManager[_Pool]], do: Callable[[_Task], _Result],
    tasks: Sequence[_Task], lost: Callable[[_Task], _Result], done: Done,
) -> list[_Result]:  # fmt: skip
    """Does each task in a pool, the longest first.

    A task that ends its process takes others along: these are tried again, one after the other. What ends its process
    there as well is lost.
    """
    from concurrent.futures import FIRST_COMPLETED, wait  # one capture needs none of it

    results: dict[int, _Result] = {}

    def run(indices: Sequence[int], *, alone: bool) -> list[int]:
        """Runs tasks, ``alone`` one at a time until a process ends; returns those whose process ended."""
        killed: list[int] = []
        left: dict[Future[_Result], int] = {}
        waiting = deque(indices)
        with open_pool(alone) as (executor, killed_error, waited):
            while (waiting or left) and not (alone and killed):
                # Processes inherit which signals are blocked: an interrupt of the terminal is this one's alone.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                while waiting and not (alone and left):
                    index = waiting.popleft()
                    left[executor.submit(do, tasks[index])] = index
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                ended = wait(left, _LOOK_S, FIRST_COMPLETED).done
                waited(bool(ended))
                for future in ended:
                    index = left.pop(future)
                    try:
                        results[index] = future.result()
                    except killed_error:
                        killed.append(index)
                    else:
                        done()
        return killed

    left = run(sorted(range(len(tasks)), key=lambda index: -tasks[index].seconds), alone=False)
    while left:
        for index in run(left, alone=True):
            results[index] = lost(tasks[index])
            done()
        left = [index for index in left if index not in results]
    return [results[index] for index in range(len(tasks))]


# --- processes of this machine ---


def _local_workers(tasks: Sequence[Task]) -> int:
    """Returns how many processes are worth starting for tasks, 1 for none."""
    if len(tasks) < 2 or sum(task.seconds for task in tasks) < WORTH_PROCESSES_S:
        return 1
    import psutil

    free = min(psutil.virtual_memory().available, _granted("memory.max") - psutil.Process().memory_info().rss)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return workers_within(free, math.ceil(min(cores, _granted("cpu.max"))), [task.memory_bytes for task in tasks])


def _granted(name: str) -> float:
    """Returns the bytes or the cores that a container grants its processes, infinity without a limit."""
    with suppress(OSError, ValueError):  # there is no control group, or its limit is called "max"
        most, *period = Path("/sys/fs/cgroup", name).read_text().split()
        return float(most) / float(period[0] if period else 1)
    return math.inf


def workers_within(free_bytes: float, cores: int, memory_bytes: Sequence[int]) -> int:
    """Returns how many workers, each at the largest task that is left, fit in memory and cores."""
    largest = sorted(memory_bytes, reverse=True)[:cores]
    return sum(together <= free_bytes for together in itertools.accumulate(largest))


@contextmanager
def _local_pool(count: int, alone: bool) -> Iterator[_Pool]:
    """Opens a pool of processes, which end where the block fails."""
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import active_children, get_context, resource_tracker

    resource_tracker.ensure_running()  # its start lets through the signals that are blocked
    threads = (os.cpu_count() or 1) // count
    with ProcessPoolExecutor(1 if alone else count, get_context("spawn"), _prepare_process, (threads,)) as executor:
        try:
            yield _Pool(executor, BrokenProcessPool, lambda _: None)
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

    from distributed import Client, TimeoutError
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
                raise _no_workers(address) from error
            ours = _version()
            for worker, versions in client.get_versions(packages=[_PACKAGE])["workers"].items():
                if (theirs := versions["packages"][_PACKAGE]) != ours:
                    has = f"nsys-analyze {theirs}" if theirs else "no nsys-analyze"
                    hint = f"Install the same version there: pip install {_PACKAGE}=={ours}"
                    raise ClusterError(f"The worker {worker} has {has}, and this command is {ours}", hint)
            yield client


def _no_workers(address: str) -> ClusterError:
    hint = f"Start some where the captures are seen: dask worker {address} --no-dashboard --nthreads 1 --nworkers auto"
    return ClusterError(f"The Dask scheduler at {address} has no workers", hint)


def _version() -> str | None:
    """Returns the version of this package as it is installed, None where it is not: as Dask asks for it."""
    from importlib import metadata  # takes a thirtieth of a second, and only clusters need it

    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return None


class _NotSeenError(Exception):
    """A worker, on the host of the first argument, does not see the path of the second, or the command's folder."""


@contextmanager
def _dask_pool(client: Client, alone: bool) -> Iterator[_Pool]:
    """Opens the workers of a scheduler as a pool; Dask does a task again whose worker ended, on another one.

    Raises:
        ClusterError: the scheduler is gone, has no workers any more, or these do not see a file.
    """
    del alone  # what is sent alone runs alone
    from concurrent.futures import CancelledError

    from distributed import KilledWorker

    looks = 0

    def waited(something_ended: bool) -> None:
        nonlocal looks
        has_workers = something_ended or client.scheduler_info(n_workers=1)["workers"]
        looks = 0 if has_workers else looks + 1
        if looks == _LOOKS:
            raise _no_workers(client.scheduler.address)

    try:
        yield _Pool(client.get_executor(pure=False), KilledWorker, waited)
    except CancelledError as error:
        hint = "Start it again and repeat the command, or read the captures here: --scheduler none"
        raise ClusterError("The Dask scheduler is gone", hint) from error
    except _NotSeenError as error:
        host, path = error.args
        hint = "Start workers where the captures have the same paths as here, as on a shared file system"
        raise ClusterError(f"The worker on {host} does not see {path}", hint) from error


def _do(folder: str, function: Callable[[_Task], _Result], task: _Task) -> _Result:
    """Does a task on a worker, in the folder of the command: a relative path means the same file, in messages too."""
    with _ONE_AT_A_TIME:
        before = Path.cwd()
        try:
            os.chdir(folder)
        except OSError as error:
            raise _NotSeenError(socket.gethostname(), task.path) from error
        try:
            if not os.path.lexists(task.path):
                raise _NotSeenError(socket.gethostname(), task.path)
            return function(task)
        finally:
            os.chdir(before)
