"""Starts a program once for each rank of a run, as torchrun does on one machine, and ends all of them where one fails.

    python -m nsys_analyzer.capture.launcher --nproc 2 -- python train.py

Each process has its own ``RANK`` and ``LOCAL_RANK``; the output of each goes where ours does, or into a log of its own,
beside which their process IDs are kept.
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
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

from nsys_analyzer.system.atomic_write import write_text
from nsys_analyzer.system.process import final_words
from nsys_analyzer.system.strict_json import decode_json

_GRACE_S = 10
"""How long a rank may take to end when another has failed: a profiler writes what it has recorded."""
_CANNOT_RUN = 127  # what a shell says
_PROCESS_IDS = "process_ids.json"


def launched(program: Sequence[str], count: int, logs: Path | None = None, python: str = sys.executable) -> list[str]:
    """The command line that starts a program as so many ranks, with a log for each in the folder ``logs``."""
    kept = ["--logs", str(logs)] if logs else []
    return [python, "-m", "nsys_analyzer.capture.launcher", "--nproc", str(count), *kept, "--", *program]


def rank_log(folder: Path, rank: int) -> Path:
    """The log of a rank."""
    return folder / f"target_rank{rank}.log"


def take_process_ids(folder: Path) -> tuple[int, ...]:
    """The process ID of each rank that was started last with its log in a folder; their file is removed."""
    path = folder / _PROCESS_IDS
    found = tuple(decode_json(path.read_bytes())) if path.is_file() else ()
    path.unlink(missing_ok=True)
    return found


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """The variables by which a process knows its rank, and meets the others on this machine."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # as torchrun: every rank would take all cores
    return {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": threads, **{key: str(value) for key, value in own.items()}}


def run(program: Sequence[str], count: int, logs: Path | None) -> int:
    """Runs the ranks to their end; returns the exit code of the first that failed, which is named, or 0."""
    port, failed = _free_port(), 0
    before = [_size(rank_log(logs, rank)) if logs else 0 for rank in range(count)]
    with ExitStack() as files, ThreadPoolExecutor(count) as pool:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                output = files.enter_context(rank_log(logs, rank).open("ab")) if logs else None
                variables = {**os.environ, **environment_of(rank, count, port)}
                processes.append(subprocess.Popen(program, env=variables, stdout=output, stderr=output))
            if logs:
                write_text(logs / _PROCESS_IDS, json.dumps([process.pid for process in processes]))
            ranks = {pool.submit(process.wait): rank for rank, process in enumerate(processes)}
            for ended in as_completed(ranks):
                if ended.result() and not failed:
                    failed, rank = ended.result(), ranks[ended]
                    said = final_words(rank_log(logs, rank), before[rank]) if logs else f"it ended with code {failed}"
                    print(f"rank {rank}: {said}", flush=True)
                    _end(processes)
        finally:
            _end(processes)
    return 128 - failed if failed < 0 else failed  # a signal, as a shell says it


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminates those that still run, and kills what has not ended soon."""
    for process in processes:
        process.terminate()  # nothing happens to one that has ended
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nsys_analyzer.capture.launcher")
    parser.add_argument("--nproc", type=int, required=True, metavar="N", help="how many processes to start")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="a log for the output of each process, there")
    parser.add_argument("program", nargs="+", metavar="-- PROGRAM ARGUMENTS", help="what each of them runs")
    given = parser.parse_args(arguments)
    if given.nproc < 1:
        parser.error("--nproc must be at least 1")
    try:
        return run(given.program, given.nproc, given.logs)
    except OSError as error:
        print(f"{shlex.join(given.program)} cannot be run ({error.strerror})")
        return _CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
