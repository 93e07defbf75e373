"""Maps a function over files: in this process in turn, or on the processes of a Dask cluster.

Nothing else knows of Dask, which is an extra (``cluster``) and imported where a cluster is used alone. A cluster costs
4 s of wall time and of CPU time (import, two workers and their imports, the end), measured on two cores.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from nsys_analyzer.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

#: Work of fewer seconds is done in turn: on two cores a cluster has won its 4 s back after 8 s.
WORTH_A_CLUSTER_S = 10
#: The address that stands for no cluster.
NO_SCHEDULER = "none"

_PACKAGE = "nsys-analyze"
_INSTALL = f"pip install '{_PACKAGE}[cluster]'"
_ANSWER_TIMEOUT_S = 20
#: How often it is looked whether there are workers at all, and for how long there may be none.
_LOOK_S, _LOOKS = 10, 6
_GONE_HINT = "Start it again and repeat the command, or read the captures here: --scheduler none"
_NOT_SEEN_HINT = "Start workers where the captures have the same paths as here, as on a shared file system"
#: Of a local cluster: how many workers a task may end before it is tried alone.
_ENDED_WORKERS = 2
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
        scheduler: the address of a Dask scheduler; "none" is this process, in turn. None: a cluster on this machine
            where the tasks take ``WORTH_A_CLUSTER_S`` or more and Dask is installed, else in turn. It has as many
            workers as cores, but no more than hold the largest files at once in the memory that is free.
        shown: shows the progress of so many tasks while it is open.
        tell: takes a line for the user.
    """

    scheduler: str | None = None
    shown: Callable[[int], AbstractContextManager[Done]] = lambda _: nullcontext(lambda: None)
    tell: Callable[[str], None] = lambda _: None

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task], lost: Callable[[_Task], _Result]
    ) -> list[_Result]:
        """The result of each task, in their order.

        Args:
            function: of a module, so that it travels by its name.
            tasks: what it is called with.
            lost: the result of a task that ended every process in which it was tried, as where memory runs out.

        Raises:
            ClusterError: there is no such scheduler, or its workers cannot do this.
            Exception: what the function raises, as if it were called here.
        """
        cluster: AbstractContextManager[Client] | None = None
        if self.scheduler not in (None, NO_SCHEDULER):
            cluster = _remote(str(self.scheduler))
        elif self.scheduler is None and len(tasks) > 1 and sum(task.seconds for task in tasks) >= WORTH_A_CLUSTER_S:
            if not _is_installed():
                self.tell(f"{len(tasks)} files are read one after another. On all cores: {_INSTALL}")
            elif (count := _local_workers(tasks)) > 1:
                cluster = _local(count)
        with self.shown(len(tasks)) as done:
            if cluster is not None:
                with cluster as client:
                    return _map_on(client, function, tasks, lost, done)
            results = []
            for task in tasks:
                results.append(function(task))
                done()
            return results


IN_TURN = Workers(NO_SCHEDULER)
"""This process does one task after another."""


# --- clusters ---


def _is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("distributed", "cryptography"))


def _local_workers(tasks: Sequence[Task]) -> int:
    """Returns how many workers of this machine's cores and memory are worth starting."""
    import psutil
    from dask.system import CPU_COUNT
    from distributed.system import MEMORY_LIMIT  # of the control group, where there is one

    free = min(psutil.virtual_memory().available, MEMORY_LIMIT - psutil.Process().memory_info().rss)
    return workers_within(free, CPU_COUNT, [task.memory_bytes for task in tasks])


def workers_within(free_bytes: int, cores: int, memory_bytes: Sequence[int]) -> int:
    """Returns how many workers, each at the largest task that is left, fit in memory and cores."""
    largest = sorted(memory_bytes, reverse=True)[:cores]
    return sum(together <= free_bytes for together in itertools.accumulate(largest))


@contextmanager
def _local(count: int) -> Iterator[Client]:
    """A cluster of processes on this machine, reached from this machine by this process and its workers alone.

    A port of a scheduler runs what it is sent: a certificate of one run keeps other users of the machine out. No
    worker is ended for what it has of the memory while all of it is there: a capture that can be read in turn can be
    read here.
    """
    import dask
    import psutil
    from dask.system import CPU_COUNT
    from distributed import Client, LocalCluster, Security
    from distributed.utils import silence_logging_cmgr

    settings = {
        "distributed.scheduler.worker-saturation": 1.0,  # a worker holds no second task, which would end with it
        "distributed.deploy.lost-worker-timeout": "1 day",  # a worker that was ended comes back, again and again
        "distributed.worker.profile.enabled": False,
        "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": None,  # gives back what the next file takes again
        **{f"distributed.worker.memory.{action}": False for action in ("target", "spill", "pause")},
    }
    with ExitStack() as stack:
        stack.enter_context(silence_logging_cmgr(logging.CRITICAL))  # what matters is raised
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{_PACKAGE}-"))
        stack.enter_context(dask.config.set({**settings, "temporary-directory": folder}))
        with _uninterrupted():
            cluster = LocalCluster(
                n_workers=count,
                threads_per_worker=1,
                memory_limit=psutil.virtual_memory().available,
                dashboard_address=None,
                scheduler_kwargs={"dashboard_address": "127.0.0.1:0", "allowed_failures": _ENDED_WORKERS - 1},
                env={"OMP_NUM_THREADS": str(max(CPU_COUNT // count, 1))},  # Arrow's, too
                silence_logs=logging.CRITICAL,
                security=Security.temporary(),
            )
            client = stack.enter_context(Client(stack.enter_context(cluster)))
        yield client


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Puts an interrupt off until the block has ended, and starts processes that no interrupt of the terminal reaches.

    They are ended by this one; a thread and a process inherit which signals are blocked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # multiprocessing's, whose start takes the block away
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def _remote(address: str) -> Iterator[Client]:
    """A client of a scheduler that has workers, all of this version.

    Raises:
        ClusterError: Dask is not installed here, nothing answers, there are no workers, or they are of another version.
    """
    if not _is_installed():
        raise ClusterError("--scheduler needs dask.distributed, which is not installed", f"Install it: {_INSTALL}")
    from distributed import Client, TimeoutError
    from distributed.utils import silence_logging_cmgr

    with silence_logging_cmgr(logging.CRITICAL):  # what matters is raised
        try:
            client = Client(address, timeout=_ANSWER_TIMEOUT_S)
        except (OSError, TimeoutError, ValueError) as error:
            hint = "See whether it runs there, or start one: dask scheduler"
            raise ClusterError(f"No Dask scheduler answers at {address}", hint) from error
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
    hint = f"Start some where the captures are seen: dask worker {address} --nthreads 1 --nworkers auto"
    return ClusterError(f"The Dask scheduler at {address} has no workers", hint)


def _version() -> str | None:
    """Returns the version of this package as it is installed, None where it is not: as Dask asks for it."""
    from importlib import metadata  # takes a thirtieth of a second, and only clusters need it

    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return None


# --- tasks on a cluster ---


class _NotSeenError(Exception):
    """A worker does not see the file, or the folder of the command; its argument is the worker's host."""


def _map_on(
    client: Client, function: Callable[[_Task], _Result], tasks: Sequence[_Task], lost: Callable[[_Task], _Result],
    done: Done,
) -> list[_Result]:  # fmt: skip
    """Does each task on a worker, the longest first; results are fetched as they come, for a worker may lose its own.

    Dask does a task again whose worker ended, on another worker. It gives a task up that ended several, and with it
    those that waited on the same workers: each of these is tried once more with no other beside it.
    """
    from distributed import CancelledError, KilledWorker, TimeoutError, wait

    do = partial(_do, str(Path.cwd()), function)
    results: dict[int, _Result] = {}

    def run(indices: Sequence[int]) -> Iterator[int]:
        """Runs tasks, and yields those that ended every process in which they were tried."""
        started = client.map(do, [tasks[index] for index in indices], pure=False, key="read")
        index_of = dict(zip(started, indices, strict=True))
        del started  # each is let go of when it has ended, and Dask forgets its result
        looks = 0
        while index_of:
            try:
                ended = wait(list(index_of), timeout=_LOOK_S, return_when="FIRST_COMPLETED").done
            except TimeoutError:
                looks = 0 if client.scheduler_info(n_workers=1)["workers"] else looks + 1
                if looks == _LOOKS:
                    raise _no_workers(client.scheduler.address) from None
                continue
            except CancelledError as error:
                raise ClusterError("The Dask scheduler is gone", _GONE_HINT) from error
            for future in ended:
                index = index_of.pop(future)
                try:
                    results[index] = future.result()
                except KilledWorker:
                    yield index
                    continue
                except CancelledError as error:
                    raise ClusterError("The Dask scheduler is gone", _GONE_HINT) from error
                except _NotSeenError as error:
                    path = tasks[index].path
                    if os.path.lexists(path):
                        raise ClusterError(f"The worker on {error} does not see {path}", _NOT_SEEN_HINT) from error
                    results[index] = function(tasks[index])  # nobody sees it, and the function says so
                done()

    for index in list(run(sorted(range(len(tasks)), key=lambda index: -tasks[index].seconds))):
        for lost_again in run([index]):
            results[lost_again] = lost(tasks[lost_again])
            done()
    return [results[index] for index in range(len(tasks))]


def _do(folder: str, function: Callable[[_Task], _Result], task: _Task) -> _Result:
    """Does a task on a worker, in the folder of the command: a relative path means the same file, in messages too."""
    with _ONE_AT_A_TIME:
        before = Path.cwd()
        try:
            os.chdir(folder)
        except OSError as error:
            raise _NotSeenError(socket.gethostname()) from error
        try:
            if not os.path.lexists(task.path):
                raise _NotSeenError(socket.gethostname())
            return function(task)
        finally:
            os.chdir(before)
