"""Checks this machine for captures: each thing that ``run`` relies on, checked, with the command that fixes it.

Sampling the CPU would need ``perf_event_paranoid`` and, in containers, more capabilities; GPU counters would need the
driver's leave. A trace of ``cuda,nvtx`` with ``--sample=none`` needs none of them, so none is checked.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from nsys_analyzer.capture.nsys import INSTALL_NSYS, Check, importer_check
from nsys_analyzer.capture.plan import make_plan
from nsys_analyzer.capture.profilers import NsysProfiler
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.system.machine import driver_module_version, driver_version, gpu_count
from nsys_analyzer.system.nsys import Nsys, find_nsys, nsys_version

_TORCH_TIMEOUT_S = 120  # a first import from a cold network disk takes a minute
_NEEDED_BYTES = 1 << 30  # captures take megabytes each, a sweep with memory events and autograd ranges hundreds
#: What a run cannot do without, whatever records it, and what it needs of nsys.
_NEEDED = ("torch", "output folder", "temporary files")
_NEEDED_OF_NSYS = ("nsys", "importer")
_ASK_TORCH = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


def checks(output: Path) -> Iterator[Check]:
    """Every check, one after the other; ``output`` is the folder for captures, which need not exist."""
    yield from _nsys()
    gpus = gpu_count()
    yield _gpu(gpus)
    yield _torch(gpus)
    yield _folder("output folder", output, "--output-dir")
    yield _folder("temporary files", Path(tempfile.gettempdir()), "TMPDIR")  # where nsys records


def _nsys() -> Iterator[Check]:
    try:
        path = find_nsys()  # it raises where NSYS names no command
        if path is None:
            yield Check("nsys", "missing", "not on the PATH, nor where installers put it", INSTALL_NSYS)
            return
        nsys = Nsys(path, nsys_version(path))
        yield Check("nsys", "ok", f"{nsys.version} at {nsys.path}")
        yield importer_check(nsys)
    except NsysAnalyzerError as error:
        yield Check("nsys", "broken", error.message, error.hint)


def _gpu(count: int) -> Check:
    driver = driver_version() or driver_module_version()
    if count:
        return Check("GPU", "ok", f"CUDA sees {count}, driver {driver or 'unknown'}")
    if driver:
        remedy = "A container needs --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Check("GPU", "missing", f"CUDA sees none, although driver {driver} is here", remedy)
    remedy = "On a machine with a GPU install NVIDIA's driver; start a container with --gpus all"
    return Check("GPU", "missing", "CUDA sees none: targets run on the CPU", remedy)


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
