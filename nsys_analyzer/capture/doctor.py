"""Checks this machine for captures: each thing that ``run`` relies on, checked, with the command that fixes it.

Sampling the CPU would need ``perf_event_paranoid`` and, in containers, more capabilities; GPU counters would need the
driver's leave. A trace of ``cuda,nvtx`` with ``--sample=none`` needs none of them, so none is checked.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from nsys_analyzer.capture.nsys import INSTALL_NSYS, Check, ProfileOptions, importer_check, profile_command
from nsys_analyzer.capture.plan import make_plan
from nsys_analyzer.capture.profilers import NsysProfiler
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.runs.machine import answer, cuda_driver, driver_module, driver_version, gpu_count
from nsys_analyzer.system.nsys import Nsys, find_every_nsys, nsys_version

_TORCH_TIMEOUT_S = 120  # a first import from a cold network disk takes a minute
_NEEDED_BYTES = 1 << 30  # captures take megabytes each, a sweep with memory events and autograd ranges hundreds
#: What a run cannot do without, whatever records it, and what it needs of nsys.
_NEEDED = ("torch", "output folder", "temporary files")
_NEEDED_OF_NSYS = ("nsys", "importer", "device files")
_ASK_TORCH = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


def checks(output: Path) -> Iterator[Check]:
    """Every check, one after the other; ``output`` is the folder for captures, which need not exist."""
    yield from _nsys()
    gpus = gpu_count()
    yield _driver()
    yield _cuda()
    yield from _gpus(gpus)
    yield from _device_files()
    yield _torch(gpus)
    yield _folder("output folder", output, "--output-dir")
    yield _folder("temporary files", Path(tempfile.gettempdir()), "TMPDIR")  # where nsys records


def _nsys() -> Iterator[Check]:
    paths: tuple[Path, ...] = ()
    try:
        paths = find_every_nsys()  # it raises where NSYS names no command
        if not paths:
            yield Check("nsys", "missing", "not on the PATH, nor where installers put it", INSTALL_NSYS)
            return
        nsys = Nsys(paths[0], nsys_version(paths[0]))
        profile_command(nsys, Path("capture.nsys-rep"), ["true"], ProfileOptions())  # it raises where one is too old
        yield Check("nsys", "ok", f"{nsys.version} at {nsys.path} (the one used)")
        yield importer_check(nsys)
    except NsysAnalyzerError as error:
        yield Check("nsys", "broken", error.message, error.hint)
    for path in paths[1:]:
        try:
            yield Check("other nsys", "ok", f"{nsys_version(path)} at {path}, with NSYS={path}")
        except NsysAnalyzerError as error:
            yield Check("other nsys", "broken", error.message)


def _driver() -> Check:
    if version := driver_version() or driver_module():
        return Check("driver", "ok", version)
    remedy = "On a machine with a GPU install NVIDIA's driver; start a container with --gpus all"
    return Check("driver", "missing", "neither nvidia-smi nor the driver's module answers", remedy)


def _cuda() -> Check:
    driver = cuda_driver()
    if driver is None:
        remedy = "It comes with the driver; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Check("CUDA", "missing", "libcuda.so.1 is not here", remedy)
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return Check("CUDA", "unknown", "the driver does not tell its version")
    major, minor = divmod(version.value // 10, 100)  # 12040 is 12.4
    return Check("CUDA", "ok", f"{major}.{minor} is the newest that this driver runs")


def _gpus(count: int) -> Iterator[Check]:
    if not count:
        yield Check("GPU", "missing", "CUDA sees none: targets run on the CPU")
        return
    yield Check("GPU", "ok", f"CUDA sees {count}")
    query = "--query-gpu=index,name,memory.total,memory.free"
    for line in answer("nvidia-smi", query, "--format=csv,noheader") or ():
        index, name, total, free = (part.strip() for part in line.split(","))
        yield Check(f"GPU {index}", "ok", f"{name}, {total} of memory, {free} free")


def _device_files(folder: Path = Path("/dev")) -> Iterator[Check]:
    """Whether this user may use the driver's files; nothing where there is no driver."""
    files = [folder / "nvidiactl", folder / "nvidia-uvm", *sorted(folder.glob("nvidia[0-9]*"))]
    closed = [str(file) for file in files if file.exists() and not os.access(file, os.R_OK | os.W_OK)]
    if closed:
        remedy = 'Join their group (usermod -aG video "$USER"), or start the container with --gpus all'
        yield Check("device files", "broken", f"no right to read and write {', '.join(closed)}", remedy)


def _torch(gpus: int) -> Check:
    """Whether torch imports and sees the GPUs, in a process of its own, for the import may crash."""
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TORCH_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("torch", "unknown", str(error))
    if "No module named 'torch'" in done.stderr:
        return Check("torch", "missing", f"not installed for {sys.executable}", "pip install torch")
    if done.returncode != 0:
        message = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Check("torch", "broken", f"does not import: {message}", "pip install --force-reinstall torch")
    torch = json.loads(done.stdout.splitlines()[-1])
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "no CUDA"
    description = f"{torch['version']} (built with {build}), sees {torch['gpus']} GPUs"
    if not gpus or torch["gpus"]:
        return Check("torch", "ok", description)
    remedy = "Choose a build at https://pytorch.org/get-started/locally"
    if torch["cuda"]:
        return Check("torch", "broken", f"{description}: the driver may be older than this CUDA", remedy)
    return Check("torch", "ok", f"{description}: its targets run on the CPU", remedy)


def _folder(name: str, folder: Path, setting: str) -> Check:
    """Whether files can be made in a folder, or where it would be made, and how much space is left."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as error:
        remedy = f'Choose another with {setting}, or make it yours: chown "$USER" {place}'
        return Check(name, "broken", f"{place} cannot be written: {error.strerror}", remedy)
    description = f"{place} can be written, {free / 2**30:.1f} GiB free"
    if free >= _NEEDED_BYTES:
        return Check(name, "ok", description)
    return Check(name, "broken", description, f"Free some space, or choose another place with {setting}: df -h {place}")


def run_check(checks: Collection[Check]) -> Check:
    """Says how ``nsys-analyze run`` records here, and which of the checks keep it from running."""
    try:
        plan = make_plan()
    except NsysAnalyzerError as error:
        return Check("run", "broken", error.message, error.hint)
    profiler = plan.profiler
    needed = (*_NEEDED, *_NEEDED_OF_NSYS) if isinstance(profiler, NsysProfiler) else _NEEDED
    faults = [check.name for check in checks if check.name in needed and check.status in ("missing", "broken")]
    if faults:
        return Check("run", "broken", f"would fail: {', '.join(faults)}", "Fix the lines above")
    with_nsys = f"profiles with nsys {profiler.nsys.version}" if isinstance(profiler, NsysProfiler) else ""
    return Check("run", "ok", " ".join([f"{with_nsys or 'records with torch.profiler'}.", *plan.notices]))
