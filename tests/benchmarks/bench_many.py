"""Time of ``nsys-analyze report`` over hundreds of captures: in turn, on two workers, and on this machine's cores.

The committed captures are copied, under names of their own, until there are as many as asked, and a file that cannot
be read beside them. Every figure comes from this one run on this one machine, and the reports must be the same to the
last byte, or this ends with an error.

    python -m tests.benchmarks.bench_many
    python -m tests.benchmarks.bench_many --captures 40
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.bench_report import ROOT, TOOL, unpacked

SOURCES = ("tests/data/*.sqlite.xz", "examples/*/captures/*.sqlite.xz")
FORMATS = ("markdown", "json")
WORKERS = 2


@dataclass(frozen=True)
class Report:
    """One report that was made: its text, the seconds that it took, and those of CPU time, the workers' too."""

    text: bytes
    seconds: float
    cpu_s: float


def make_captures(folder: Path, count: int) -> None:
    """So many captures, and one file that is none."""
    with tempfile.TemporaryDirectory() as unpacking:
        packed = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))[:count]
        plain = [unpacked(path, Path(unpacking)) for path in packed]
        for number in range(count):
            source = plain[number % len(plain)]
            shutil.copyfile(source, folder / f"{source.stem}_{number:03d}.sqlite")
    (folder / "damaged.sqlite").write_bytes(b"no database")


@contextmanager
def two_workers() -> Iterator[str]:
    """The address of a scheduler with two workers that come back when they are killed."""
    import dask
    from distributed import LocalCluster

    with tempfile.TemporaryDirectory() as folder, dask.config.set({"temporary-directory": folder}), LocalCluster(
        n_workers=WORKERS, threads_per_worker=1, dashboard_address=None, silence_logs=50,
        scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
    ) as cluster:  # fmt: skip
        yield cluster.scheduler_address


def worker_processes() -> list[psutil.Process]:
    """The workers that this process has started."""
    return [one for one in psutil.Process().children() if "multiprocessing.spawn" in " ".join(one.cmdline())]


def report(captures: Path, output_format: str, scheduler: str | None) -> Report:
    """The report of the captures; without a scheduler, as the command makes it by itself."""
    output = captures.with_name("report")
    where = () if scheduler is None else ("--scheduler", scheduler)
    before = {one.pid: sum(one.cpu_times()[:2]) for one in worker_processes()}
    began = time.perf_counter()
    process = subprocess.Popen(
        [*TOOL, "report", captures, "--no-figures", "--force", "--format", output_format, "-o", output, *where],
        cwd=ROOT, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"The report failed ({process.returncode}), with --scheduler {scheduler}")
    used = sum(sum(one.cpu_times()[:2]) - before.get(one.pid, 0.0) for one in worker_processes())
    text = output.read_bytes()
    output.unlink()
    return Report(text, seconds, usage.ru_utime + usage.ru_stime + used)


def measure(captures: Path, output_format: str) -> None:
    """Prints the figures of one format, each beside those of the report in turn."""
    in_turn = report(captures, output_format, "none")
    rows = {"in turn": in_turn}
    with two_workers() as scheduler:
        rows["two workers"] = report(captures, output_format, scheduler)
    rows["this machine's cores"] = report(captures, output_format, None)
    for name, row in rows.items():
        same = "the same" if row.text == in_turn.text else "ANOTHER REPORT"
        ratio = f"{row.seconds / in_turn.seconds:>6.2f}x"
        print(
            f"{output_format:<9} {name:<24} {row.seconds:>8.2f} s {ratio} {row.cpu_s:>8.2f} s of CPU  {same}",
            flush=True,
        )
    if any(row.text != in_turn.text for row in rows.values()):
        raise SystemExit("The reports differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--captures", type=int, default=200, help="how many [%(default)s]")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {options.captures} captures")
    with tempfile.TemporaryDirectory(prefix="bench-many-") as folder:
        captures = Path(folder) / "many"
        captures.mkdir()
        make_captures(captures, options.captures)
        for output_format in FORMATS:
            measure(captures, output_format)


if __name__ == "__main__":
    main()
