"""Checks the software and hardware that ``run`` needs on this machine, and names the command that fixes each fault.

``run`` records a trace of ``cuda,nvtx`` with ``--sample=none``. So it needs neither the rights for CPU sampling
(``perf_event_paranoid``, and capabilities in containers) nor the driver's permission for GPU counters, and neither is
checked.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from nsys_analyzer.capture.energy import check_energy
from nsys_analyzer.capture.nsys import INSTALL_NSYS, Check, check_importer
from nsys_analyzer.capture.plan import make_plan
from nsys_analyzer.capture.profilers import NsysProfiler
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.system.machine import (
    Nsys,
    count_gpus,
    driver_module_version,
    driver_version,
    find_nsys,
    nsys_version,
)
from nsys_analyzer.text import format_bytes

#: The time limit of the query of PyTorch. The first import of PyTorch from a network disk may take a minute.
_TORCH_TIMEOUT_S = 120
#: The free space that the output folder needs. A capture takes megabytes, and a sweep with memory events takes hundreds
#: of megabytes.
_NEEDED_BYTES = 1 << 30
#: The checks that must pass for every run, and those that must also pass for a run with nsys.
_REQUIRED_CHECKS = ("torch", "output folder", "temporary files")
_REQUIRED_FOR_NSYS = ("nsys", "importer")
_TORCH_QUERY = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


def check_machine(output: Path) -> Iterator[Check]:
    """Yields the result of each check. ``output`` is the folder for captures, which need not exist."""
    yield from _check_nsys()
    gpus = count_gpus()
    yield _check_gpu(gpus)
    if gpus:
        yield check_energy()
    yield _check_torch(gpus)
    yield _check_folder("output folder", output, "--output-dir")
    # Nsys writes its recording into the folder for temporary files.
    yield _check_folder("temporary files", Path(tempfile.gettempdir()), "TMPDIR")


def _check_nsys() -> Iterator[Check]:
    try:
        path = find_nsys()  # raises an error if the environment variable NSYS names no command
        if path is None:
            yield Check("nsys", "missing", "not on the PATH, and not where installers put it", INSTALL_NSYS)
            return
        nsys = Nsys(path, nsys_version(path))
        yield Check("nsys", "ok", f"{nsys.version} at {nsys.path}")
        yield check_importer(nsys)
    except NsysAnalyzerError as error:
        yield Check("nsys", "broken", error.message, error.hint)


def _check_gpu(count: int) -> Check:
    driver = driver_version() or driver_module_version()
    if count:
        return Check("GPU", "ok", f"CUDA sees {count}, driver {driver or 'unknown'}")
    if driver:
        remedy = "A container needs --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Check("GPU", "missing", f"CUDA sees none, although driver {driver} is installed", remedy)
    remedy = "On a machine with a GPU, install NVIDIA's driver, or start the container with --gpus all"
    return Check("GPU", "missing", "CUDA sees none, so targets run on the CPU", remedy)


def _check_torch(gpus: int) -> Check:
    """Checks whether torch can be imported and sees the GPUs, in a separate process, because an import may crash."""
    command = [sys.executable, "-c", _TORCH_QUERY]
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TORCH_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("torch", "unknown", str(error))
    if "No module named 'torch'" in process.stderr:
        return Check("torch", "missing", f"not installed for {sys.executable}", "pip install torch")
    if process.returncode != 0:
        message = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        return Check("torch", "broken", f"cannot be imported: {message}", "pip install --force-reinstall torch")
    torch = json.loads(process.stdout.splitlines()[-1])
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "no CUDA"
    description = f"{torch['version']} (built with {build}), sees {torch['gpus']} GPUs"
    if not gpus or torch["gpus"]:
        return Check("torch", "ok", description)
    remedy = "Choose a build at https://pytorch.org/get-started/locally"
    if torch["cuda"]:
        return Check("torch", "broken", f"{description}: the driver may be older than this CUDA", remedy)
    return Check("torch", "ok", f"{description}, so its targets run on the CPU", remedy)


def _check_folder(name: str, folder: Path, setting: str) -> Check:
    """Checks whether a folder, or its nearest existing parent, can be written, and how much space is free there."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as error:
        remedy = f'Choose another folder with {setting}, or change its owner: chown "$USER" {place}'
        return Check(name, "broken", f"{place} cannot be written: {error.strerror}", remedy)
    description = f"{place} can be written, {format_bytes(free)} free"
    if free >= _NEEDED_BYTES:
        return Check(name, "ok", description)
    return Check(
        name, "broken", description, f"Free some space, or choose another folder with {setting}: df -h {place}"
    )


def check_run_command(checks: Collection[Check]) -> Check:
    """Returns how ``nsys-analyze run`` records on this machine, or which failed checks prevent it."""
    try:
        plan = make_plan()
    except NsysAnalyzerError as error:
        return Check("run", "broken", error.message, error.hint)
    profiler = plan.profiler
    required_checks = (
        (*_REQUIRED_CHECKS, *_REQUIRED_FOR_NSYS) if isinstance(profiler, NsysProfiler) else _REQUIRED_CHECKS
    )
    faults = [check.name for check in checks if check.name in required_checks and check.status in ("missing", "broken")]
    if faults:
        return Check("run", "broken", f"would fail because of: {', '.join(faults)}", "Fix the faults above")
    recording = "records with torch.profiler."
    if isinstance(profiler, NsysProfiler):
        recording = f"profiles with nsys {profiler.nsys.version}."
    return Check("run", "ok", " ".join([recording, *plan.notices]))
