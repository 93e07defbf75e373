"""Starts a program once for each rank of a run, as torchrun does on one machine. If a rank fails, all ranks end.

    python -m nsys_analyzer.capture.launcher --nproc 2 -- python train.py

Each process has its own ``RANK`` and ``LOCAL_RANK``. The processes write to the output of the launcher. With a folder
for logs, each process writes its own log there instead, and the launcher writes a file with the process IDs there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from nsys_analyzer.system.atomic_write import write_text
from nsys_analyzer.system.process import CANNOT_RUN, find_failure_line

#: The time that a rank has to end after another rank failed. A profiler needs the time to write its recording.
_TIME_TO_END_S = 10
_PROCESS_IDS_FILE = "process_ids.json"


def make_launch_command(program: Sequence[str], count: int, logs: Path | None = None) -> list[str]:
    """Returns the command line that starts a program as ``count`` ranks, with a log for each in the folder ``logs``."""
    launcher = [sys.executable, "-m", "nsys_analyzer.capture.launcher", "--nproc", str(count)]
    return [*launcher, *(["--logs", str(logs)] if logs else []), "--", *program]


def rank_log(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's log in the folder for logs."""
    return folder / f"target_rank{rank}.log"


def take_process_ids(folder: Path) -> tuple[int, ...]:
    """Returns the process IDs of the ranks that last logged into a folder, and removes the file with these IDs."""
    path = folder / _PROCESS_IDS_FILE
    ids = tuple(json.loads(path.read_bytes())) if path.is_file() else ()
    path.unlink(missing_ok=True)
    return ids


def run_ranks(program: Sequence[str], count: int, logs: Path | None) -> int:
    """Runs the ranks to their end. Returns 0, or prints why the first failing rank failed and returns its exit code."""
    with socket.socket() as port_finder:
        port_finder.bind(("127.0.0.1", 0))
        port = port_finder.getsockname()[1]
    # The default is 1 thread, as for torchrun. By default, OpenMP would start a thread on every core for each rank.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    shared_variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(end_processes, processes)
        log_offsets = []
        for rank in range(count):
            output = stack.enter_context(rank_log(logs, rank).open("ab")) if logs else None
            log_offsets.append(output.tell() if output else 0)
            variables = {**shared_variables, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": threads}
            environment = {**os.environ, **{key: str(value) for key, value in variables.items()}}
            processes.append(subprocess.Popen(program, env=environment, stdout=output, stderr=output))
        if logs:
            write_text(logs / _PROCESS_IDS_FILE, json.dumps([process.pid for process in processes]))
        running = {process.pid: rank for rank, process in enumerate(processes)}
        while running:
            # Only the rank that fails first is reported, because its failure may make other ranks fail.
            rank = running.pop(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid)  # type: ignore[union-attr]
            if code := processes[rank].wait():
                reason = (
                    find_failure_line(rank_log(logs, rank), log_offsets[rank]) if logs else f"it ended with code {code}"
                )
                print(f"rank {rank}: {reason}", flush=True)
                # The exit code of a killed program is 128 + the signal's number, as in a shell.
                return 128 - code if code < 0 else code
    return 0


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminates all running processes, and kills each process that does not end in time."""
    for process in processes:
        process.terminate()  # this has no effect on a process that has ended
    deadline = time.monotonic() + _TIME_TO_END_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()


def main(arguments: Sequence[str]) -> int:
    """Runs the launcher with the arguments of the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nsys_analyzer.capture.launcher")
    parser.add_argument("--nproc", type=int, required=True, metavar="N", help="number of processes to start")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="write a log of each process into this folder")
    parser.add_argument("program", nargs="+", metavar="-- PROGRAM ARGUMENTS", help="the program that each process runs")
    options = parser.parse_args(arguments)
    if options.nproc < 1:
        parser.error("--nproc must be at least 1")
    try:
        return run_ranks(options.program, options.nproc, options.logs)
    except OSError as error:
        print(f"{shlex.join(options.program)} cannot be run ({error.strerror})")
        return CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
