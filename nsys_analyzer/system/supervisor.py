"""Runs a program, and ends all that it has started once it fails, is asked to end, or whoever started this is gone.

    python supervisor.py PROCESS_ID PROGRAM ARGUMENTS...

``PROCESS_ID`` is that of the caller. The kernel signals this process when the caller dies, even by SIGKILL, and hands
it every descendant that loses its own parent (it is their subreaper): a target to which a profiler gave a session of
its own is found, and one that wrote over its environment. SIGTERM asks the program to end, a second one ends all.
What goes on behind a program that ended well, as a compiler's server does, is left alone.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

_CANNOT_RUN = 127  # what a shell says
_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36  # of prctl(2), which Linux alone has
_TICK_S = 0.02


def signal_when_parent_dies(number: signal.Signals) -> None:
    """Has the kernel send this process a signal when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)


def kill_descendants(*_: object) -> None:
    """Kills every process below this one, again and again: one that is being started is seen the next time."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    signal.signal(signal.SIGALRM, kill_descendants)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S)


def supervise(parent: int, command: list[str]) -> int:
    """Runs a command to its end; returns its exit code, negative for a signal."""
    requests, program = 0, None

    def end(*_: object) -> None:
        nonlocal requests
        requests += 1
        if requests > 1 or os.getppid() != parent:
            kill_descendants()
        elif program:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    signal_when_parent_dies(signal.SIGTERM)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)
    try:
        program = subprocess.Popen(
            command, start_new_session=True, preexec_fn=lambda: signal_when_parent_dies(signal.SIGKILL)
        )
    except OSError as error:
        print(f"{command[0]} cannot be run ({error.strerror})", file=sys.stderr)
        return _CANNOT_RUN
    if requests or os.getppid() != parent:  # before there was a program to ask, or the kernel knew of the parent
        kill_descendants()
    code = 0
    with suppress(ChildProcessError):  # until no child is left
        while True:
            ended, status = os.wait()
            if ended == program.pid:
                code = os.waitstatus_to_exitcode(status)
                if code == 0 and not requests:
                    break
                kill_descendants()  # a profiler that was killed leaves its target behind
    signal.setitimer(signal.ITIMER_REAL, 0)
    return code


if __name__ == "__main__":
    exit_code = supervise(int(sys.argv[1]), sys.argv[2:])
    if exit_code < 0:  # ends as the program did
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # nobody handles SIGKILL
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    sys.exit(exit_code)
