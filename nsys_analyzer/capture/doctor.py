"""What this machine has for a capture: each thing that ``run`` relies on, checked, with the command that mends it.

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nsys_analyzer.capture.installation import find_importer, library_remedy, missing_libraries, start_fault
from nsys_analyzer.capture.machine import command_output, gpu_count
from nsys_analyzer.capture.nsys import Nsys, find_every_nsys, nsys_version
from nsys_analyzer.capture.profile import ProfileOptions, profile_command
from nsys_analyzer.errors import NsysAnalyzerError

Status = Literal["ok", "missing", "broken", "unknown"]

_TORCH_TIMEOUT_S = 120  # a first import from a cold network disk takes a minute
_NEEDED_BYTES = 1 << 30  # captures take megabytes each, a sweep with memory events and autograd ranges hundreds
_INSTALL_NSYS = "apt-get install nsight-systems (Debian non-free), or https://developer.nvidia.com/nsight-systems"
_ASK_TORCH = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        status: ``ok``; ``missing`` or ``broken``; ``unknown`` where it cannot be found out.
        found: what is there.
        remedy: the command that mends it; empty where there is nothing to mend.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def checks(output: Path) -> Iterator[Check]:
    """Everything that is looked at, each as it is known; no question takes longer than its time-out.

    Args:
        output: the folder where captures would go; it need not exist.
    """
    yield from _nsys()
    gpus = gpu_count()
    yield _driver()
    yield _cuda()
    yield from _gpus(gpus)
    yield from _device_files()
    yield _torch(gpus)
    yield from _folder("output folder", output, "--output-dir")
    yield from _folder("temporary files", Path(tempfile.gettempdir()), "TMPDIR")  # where nsys records


def _nsys() -> Iterator[Check]:
    try:
        found = find_every_nsys()
    except NsysAnalyzerError as error:  # NSYS names no command
        yield Check("nsys", "broken", error.message, error.hint)
        return
    if not found:
        yield Check("nsys", "missing", "not on the PATH, nor where installers put it", _INSTALL_NSYS)
        return
    used, *others = found
    try:
        yield from _used_nsys(Nsys(used, nsys_version(used)))
    except NsysAnalyzerError as error:
        yield Check("nsys", "broken", error.message, error.hint)
    for path in others:
        yield _other_nsys(path)


def _used_nsys(nsys: Nsys) -> Iterator[Check]:
    profile_command(nsys, Path("capture.nsys-rep"), ["true"], ProfileOptions())  # it raises where one is too old
    yield Check("nsys", "ok", f"{nsys.version} at {nsys.path} (the one used)")
    yield importer_check(nsys)


def _other_nsys(path: Path) -> Check:
    try:
        return Check("other nsys", "ok", f"{nsys_version(path)} at {path}, with NSYS={path}")
    except NsysAnalyzerError as error:
        return Check("other nsys", "broken", error.message)


def importer_check(nsys: Nsys) -> Check:
    """Whether what an nsys records can become a report here."""
    importer = find_importer(nsys.path)
    if importer is None and not _is_binary(nsys.path):
        return Check("importer", "unknown", f"{nsys.path} is a script, and only it knows")
    if importer is None:
        return Check("importer", "missing", f"no QdstrmImporter belongs to {nsys.path}", _INSTALL_NSYS)
    fault = start_fault(importer)
    if fault is None:
        return Check("importer", "ok", f"starts: {importer}")
    missing = missing_libraries(importer)
    if missing:
        return Check("importer", "broken", f"{importer} lacks {', '.join(missing)}", library_remedy(missing))
    return Check("importer", "broken", f"{importer} does not start: {fault}", _INSTALL_NSYS)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _driver() -> Check:
    version = _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if version:
        return Check("driver", "ok", version[0])
    kernel_module = Path("/proc/driver/nvidia/version")
    if kernel_module.is_file():
        return Check("driver", "ok", kernel_module.read_text(errors="replace").splitlines()[0])
    remedy = "On a machine with a GPU install NVIDIA's driver; start a container with --gpus all"
    return Check("driver", "missing", "neither nvidia-smi nor the driver's module answers", remedy)


def _cuda() -> Check:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
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
    for line in _answer("nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader"):
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
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("torch", "unknown", str(error))
    if "No module named 'torch'" in answer.stderr:
        return Check("torch", "missing", f"not installed for {sys.executable}", "pip install torch")
    if answer.returncode != 0:
        said = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
        return Check("torch", "broken", f"does not import: {said}", "pip install --force-reinstall torch")
    return _judged_torch(json.loads(answer.stdout.splitlines()[-1]), gpus)


def _judged_torch(torch: dict[str, Any], gpus: int) -> Check:
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "no CUDA"
    found = f"{torch['version']} (built with {build}), sees {torch['gpus']} GPUs"
    if not gpus or torch["gpus"]:
        return Check("torch", "ok", found)
    remedy = "Choose a build at https://pytorch.org/get-started/locally"
    if torch["cuda"]:
        return Check("torch", "broken", f"{found}: the driver may be older than this CUDA", remedy)
    return Check("torch", "ok", f"{found}: its targets run on the CPU", remedy)


def _folder(name: str, folder: Path, setting: str) -> Iterator[Check]:
    """Whether files can be made in a folder, or where it would be made, and how much space is left."""
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        remedy = f'Choose another with {setting}, or make it yours: chown "$USER" {place}'
        yield Check(name, "broken", f"{place} cannot be written: {error.strerror}", remedy)
        return
    free = shutil.disk_usage(place).free
    status: Status = "ok" if free >= _NEEDED_BYTES else "broken"
    remedy = "" if status == "ok" else f"Free some space, or choose another place with {setting}: df -h {place}"
    yield Check(name, status, f"{place} can be written, {free / 2**30:.1f} GiB free", remedy)


def _answer(*command: str) -> list[str]:
    """The lines a command prints; none where it is not there, fails or takes too long."""
    return (command_output(*command) or "").splitlines()
