"""Time and memory of ``nsys-analyze report`` on a long capture, beside what SQLite and ``nsys stats`` need.

A real export is repeated, end to end, until it holds about as many kernels as asked; every figure of the table
comes from this one run on this one machine. The floor is what a plain ``sqlite3`` aggregate takes over the
columns the report needs: nothing that reads them all is faster.

    python -m tests.benchmarks.bench_report
    python -m tests.benchmarks.bench_report --kernels 100000 --trace my.sqlite --runs 3
"""

from __future__ import annotations

import argparse
import lzma
import multiprocessing
import os
import platform
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nsys_analyzer.system.machine import find_nsys, nsys_version
from tests.benchmarks.long_capture import columns_of, enlarge

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests" / "data" / "train_small256.sqlite.xz"
TOOL = [sys.executable, "-m", "nsys_analyzer"]

GPU_COLUMNS = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
FLOOR_COLUMNS = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (*GPU_COLUMNS, "demangledName", "graphNodeId"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (*GPU_COLUMNS, "graphNodeId"),
    "CUPTI_ACTIVITY_KIND_MEMSET": (*GPU_COLUMNS, "graphNodeId"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "globalTid", "correlationId", "nameId", "returnValue"),
    "NVTX_EVENTS": ("start", "end", "eventType", "globalTid", "textId", "text"),
    "StringIds": ("id", "value"),
}
TEXT_COLUMNS = ("text", "value")

# Each report under its names, today's first; that of 2022 projects the ranges without the summary.
NSYS_REPORTS = (
    ("cuda_gpu_kern_sum", "gpukernsum"),
    ("nvtx_kern_sum", "nvtxkernsum"),
    ("nvtx_gpu_proj_sum", "nvtxgpuproj"),
)


@dataclass(frozen=True)
class Run:
    """One finished process."""

    seconds: float
    peak_gb: float
    returncode: int
    output: str


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure of every run, and what the median is held to."""

    name: str
    values: Sequence[float]
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    prefix: str = ""

    def __str__(self) -> str:
        median = statistics.median(self.values)
        low, high = min(self.values), max(self.values)
        figures = f"{self.prefix + f'{median:.3f}':>10} {low:>10.3f} {high:>10.3f}"
        return f"{self.name:<38} {figures} {self.unit:<3} {self._target(median)}".rstrip()

    def _target(self, median: float) -> str:
        if self.at_most is not None:
            return f"target <= {self.at_most:g}: {'met' if median <= self.at_most else 'MISSED'}"
        if self.at_least is not None:
            return f"target >= {self.at_least:g}: {'met' if median >= self.at_least else 'MISSED'}"
        return ""


def read_floor(trace: Path) -> None:
    """Read every column the report needs and keep one number of each: ``total``, since sums overflow."""
    with closing(sqlite3.connect(f"{trace.as_uri()}?mode=ro", uri=True)) as database:
        for table, wanted in FLOOR_COLUMNS.items():
            there = [column for column in wanted if column in columns_of(database, table)]
            totals = [f'total(length("{c}"))' if c in TEXT_COLUMNS else f'total("{c}")' for c in there]
            if totals:
                database.execute(f"SELECT count(*), {', '.join(totals)} FROM {table}").fetchall()


def run(command: Sequence[str | Path], timeout_s: float | None = None) -> Run:
    """Run a process to its end, or kill it and its children after ``timeout_s``."""
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        timer = threading.Timer(timeout_s or threading.TIMEOUT_MAX, os.killpg, (process.pid, signal.SIGKILL))
        timer.daemon = True
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            timer.cancel()
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        seconds = time.perf_counter() - began
        output.seek(0)
        said = output.read().decode(errors="replace")
    maxrss_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Run(seconds, maxrss_bytes / 1e9, process.returncode, said)


def run_well(command: Sequence[str | Path]) -> Run:
    """Run a process that must succeed."""
    finished = run(command)
    if finished.returncode != 0:
        last = (finished.output.strip().splitlines() or ["it said nothing"])[-1]
        raise SystemExit(f"{' '.join(map(str, command))} failed ({finished.returncode}): {last}")
    return finished


def report_command(trace: Path) -> list[str | Path]:
    return [*TOOL, "report", trace, "--no-figures", "-o", trace.with_name("report.md")]


def measure(trace: Path, small: Path, folders: Sequence[Path], runs: int) -> list[Row]:
    """Run floor, reports and help in turn, so that a slow minute of the machine is slow for all of them.

    Args:
        trace: the long capture.
        small: the capture that it was made from: what a report takes to start.
        folders: the long capture as Parquet and as Arrow files.
        runs: of each.
    """
    commands: dict[str, list[str | Path]] = {
        "floor": [sys.executable, "-m", "tests.benchmarks.bench_report", "--floor", trace],
        "report": report_command(trace),
        **{folder.name: report_command(folder) for folder in folders},
        "small": report_command(small),
        "help": [*TOOL, "--help"],
    }
    for command in commands.values():
        run_well(command)  # compiled modules and a warm page cache, for all alike
    rounds = [{name: run_well(command) for name, command in commands.items()} for _ in range(runs)]
    seconds = {name: [each[name].seconds for each in rounds] for name in commands}
    ratios = [report / floor for report, floor in zip(seconds["report"], seconds["floor"], strict=True)]
    return [
        Row("floor: sqlite3 aggregate", seconds["floor"], "s"),
        Row("nsys-analyze report --no-figures", seconds["report"], "s"),
        Row("report / floor", ratios, "x", at_most=3),
        Row("report: peak memory", [each["report"].peak_gb for each in rounds], "GB", at_most=1.2),
        *(row for folder in folders for row in _of_folder(folder, rounds)),
        Row("report of a small capture", seconds["small"], "s", at_most=0.3),
        Row("nsys-analyze --help", seconds["help"], "s", at_most=0.2),
    ]


def _of_folder(folder: Path, rounds: Sequence[dict[str, Run]]) -> list[Row]:
    """What the same report from a folder takes, against that from SQLite."""
    ratios = [each[folder.name].seconds / each["report"].seconds for each in rounds]
    return [
        Row(f"report from {folder.name} / from SQLite", ratios, "x", at_most=1),
        Row(f"report from {folder.name}: peak memory", [each[folder.name].peak_gb for each in rounds], "GB"),
    ]


def measure_nsys(trace: Path, report_s: float, timeout_s: float) -> list[Row | str]:
    """Time the three reports of ``nsys stats`` that the report's tables stand in for, once each."""
    nsys = find_nsys()
    if nsys is None:
        return ["nsys stats: no nsys on this machine, not compared"]
    known = run([nsys, "stats", "--help-reports"]).output.replace("[", " ").split()
    rows: list[Row | str] = [f"{nsys}: Nsight Systems {nsys_version(nsys)}, one run each"]
    seconds: list[float] = []
    bound = ""
    for names in NSYS_REPORTS:
        name = next((name for name in names if name in known), None)
        if name is None:
            rows.append(f"nsys stats {names[0]}: unknown to this nsys, not counted")
            continue
        finished = run([nsys, "stats", "--report", name, "--format", "csv", trace], timeout_s)
        killed = finished.returncode == -signal.SIGKILL
        # nsys exits with 0 after an error inside a report.
        if not killed and (finished.returncode != 0 or "ERROR" in finished.output):
            rows.append(f"nsys stats {name}: failed, not counted: {finished.output.strip()[-100:]}")
            continue
        seconds.append(finished.seconds)
        rows.append(Row(f"nsys stats {name}", seconds[-1:], "s", prefix="> " if killed else ""))
        bound = "> " if killed else bound
    if seconds:
        rows.append(Row("nsys stats / report", [sum(seconds) / report_s], "x", at_least=10, prefix=bound))
    return rows


def print_figures(source: Path, folder: Path, options: argparse.Namespace) -> None:
    big = folder / "big.sqlite"
    kernels = enlarge(source, big, options.kernels)
    print(f"{source.name} repeated: {kernels:,} kernels, {big.stat().st_size / 1e6:,.0f} MB")
    print(f"{'':<38} {'median':>10} {'min':>10} {'max':>10}     of {options.runs} runs in turn")
    from tests.support.folders import as_folder  # not for the floor's process: it imports Arrow

    # In a process of its own: what it takes would count as the peak of every process that this one starts.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        made = {".parquet": folder / "pqtdir", ".arrow": folder / "arwdir"}
        folders = [pool.submit(as_folder, big, place, ending).result() for ending, place in made.items()]
    rows = measure(big, source, folders, options.runs)
    for row in rows:
        print(row)
    for line in measure_nsys(big, statistics.median(rows[1].values), options.nsys_timeout):
        print(line, flush=True)


def unpacked(trace: Path, folder: Path) -> Path:
    """The trace, or what a compressed one holds, in the folder."""
    if trace.suffix != ".xz":
        return trace
    target = folder / trace.stem
    with lzma.open(trace) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file)
    return target


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", type=int, default=1_200_000, help="about how many kernels [%(default)s]")
    parser.add_argument("--trace", type=Path, default=TRACE, help="the SQLite export that is repeated, .xz or not")
    parser.add_argument("--runs", type=int, default=5, help="runs of each command [%(default)s]")
    parser.add_argument("--nsys-timeout", type=float, default=300, metavar="S", help="seconds each [%(default)s]")
    parser.add_argument("--floor", type=Path, help=argparse.SUPPRESS)  # the floor's own process
    options = parser.parse_args()
    if options.floor is None and not options.trace.is_file():
        parser.error(f"no such file: {options.trace}; give --trace an export with kernels in it")
    return options


def main() -> None:
    options = parse_arguments()
    if options.floor is not None:
        read_floor(options.floor)
        return
    print(f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {os.cpu_count()} CPUs")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed modules are compiled once, not in every run
    with tempfile.TemporaryDirectory(prefix="bench-report-") as folder:
        source = unpacked(options.trace.resolve(), Path(folder))
        print_figures(source, Path(folder), options)


if __name__ == "__main__":
    main()
