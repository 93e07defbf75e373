"""Kills sweeps at random moments and resumes them: what is left must be what an undisturbed sweep leaves.

``python -m tests.fuzz.durability --seconds 600`` kills the tool, the target or nsys, or cuts the power:
everything is stopped, the folder is copied, and the sweep goes on in the copy. Before the resume every visible result
must be whole and no process of the killed sweep be left; after it, files, manifests, timings and report must be those
of a sweep that nobody disturbed, and no two targets may have run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.sweeping import Desk, make_recording_nsys

MODELS = ("small", "medium", "large")
WORDS = ("--mode", "forward", "--context-length", "16", "--profiler", "nsys")
_TAG = "NSYS_ANALYZE_DURABILITY"
_END_S = 60.0
#: The commands of a sweep: a resume has one more, in the report and in the manifests of what it ran.
_COMMANDS = re.compile(r"^(?:\n# this report\n)?nsys-analyze run(?:.*\\\n)*.*\n| --resume(?=\")", re.MULTILINE)
#: A target listens to no signal and takes a moment, but never ends by itself once its parent or the tool, whose number
#: the lock holds, has gone. It says where an earlier one still runs beside it.
_TARGET = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for line in open("ran").read().splitlines():
    pid = int(line.split()[-1])
    try:
        other = open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        continue
    if pid != os.getpid() and b"profiling_targets" in other:
        open("beside", "a").write(f"{model}: {pid} was still running\\n")
def gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
parent, tool = os.getppid(), int(open("runs/.lock").read())
for _ in range(20):
    time.sleep(0.01)
    if os.getppid() != parent or gone(tool):
        time.sleep(600)
"""
_BEHAVIOUR = json.dumps(dict.fromkeys(MODELS, _TARGET))


@dataclass(frozen=True)
class Bed:
    """A folder to disturb sweeps in: a fake nsys, and what an undisturbed sweep leaves, and after how many seconds."""

    folder: Path
    nsys: Path
    models: Sequence[str]
    left: dict[str, str]
    seconds: float

    @classmethod
    def make(cls, folder: Path, models: Sequence[str] = MODELS) -> Bed:
        nsys = make_recording_nsys(folder)
        sweep = Sweep.start(Desk.make(folder / "undisturbed"), nsys, models)
        before = time.monotonic()
        _, said = sweep.tool.communicate(timeout=120)
        assert sweep.tool.returncode == 0, said
        return cls(folder, nsys, models, _left(sweep.desk.runs), time.monotonic() - before)


@dataclass(frozen=True)
class Sweep:
    """A running sweep, and the variable that all of its processes carry."""

    desk: Desk
    tool: subprocess.Popen[str]
    tag: str

    @classmethod
    def start(cls, desk: Desk, nsys: Path, models: Sequence[str], *words: str) -> Sweep:
        tag = uuid.uuid4().hex
        environment = {"BEHAVIOUR": _BEHAVIOUR, "NSYS": str(nsys), _TAG: tag}
        return cls(desk, desk.start("--model", ",".join(models), *WORDS, *words, **environment), tag)

    def processes(self, named: Callable[[list[str]], bool] = lambda _: True) -> set[int]:
        """What the sweep has running, the tool with it, that is called so."""
        return {
            process.pid
            for process in psutil.process_iter(["cmdline", "environ"])
            if (process.info["environ"] or {}).get(_TAG) == self.tag and named(process.info["cmdline"] or [])
        }

    def is_over(self) -> bool:
        return self.tool.poll() is not None

    def outlived(self) -> list[list[str]]:
        """The command lines of what has not ended a while later, and is ended here."""
        deadline = time.monotonic() + _END_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        lines = sorted(map(_words, left))
        _kill(left)
        return lines


def _words(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []


def _is_target(words: list[str]) -> bool:
    return words[1:3] == ["-m", "profiling_targets.transformer"]


def _is_nsys(words: list[str]) -> bool:
    return any(word.endswith("/nsys") for word in words[:2])


# --- disturbances: each returns the desk in which the sweep is to be resumed ---


def _kill_the_tool(number: signal.Signals, sweep: Sweep) -> Desk:
    sweep.tool.send_signal(number)
    return sweep.desk


def _kill_one(named: Callable[[list[str]], bool], sweep: Sweep, chance: random.Random) -> Desk:
    """The next process that is called so, some time after it has begun; the tool goes on to its end."""
    while not sweep.is_over() and not sweep.processes(named):
        time.sleep(0.002)
    _sleep(sweep, chance.uniform(0, 0.3))
    _kill(sweep.processes(named))
    return sweep.desk


def _cut_the_power(sweep: Sweep, bed: Bed, *_: object) -> Desk:
    """A copy of the folder at one moment, all processes stopped; the original goes on, and is none of the copy's."""
    stopped: set[int] = set()
    while new := sweep.processes() - stopped:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    copy = bed.folder / f"copy-{uuid.uuid4().hex}"
    shutil.copytree(sweep.desk.folder, copy, symlinks=True)
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    (copy / "ran").unlink(missing_ok=True)  # the original's targets run beside the copy's by design
    return Desk(copy)


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


DISTURBANCES: dict[str, Callable[[Sweep, Bed, random.Random], Desk]] = {
    "the power": _cut_the_power,
    "the tool, SIGKILL": lambda sweep, *_: _kill_the_tool(signal.SIGKILL, sweep),
    "the tool, SIGQUIT": lambda sweep, *_: _kill_the_tool(signal.SIGQUIT, sweep),
    "the tool, SIGTERM": lambda sweep, *_: _kill_the_tool(signal.SIGTERM, sweep),
    "the target, SIGKILL": lambda sweep, _, chance: _kill_one(_is_target, sweep, chance),
    "nsys, SIGKILL": lambda sweep, _, chance: _kill_one(_is_nsys, sweep, chance),
}


# --- moments ---


def _wait(sweep: Sweep, bed: Bed, chance: random.Random) -> None:
    """Waits for any moment, for one while a target runs, or for one just behind a change of names in the output."""
    kind = chance.choice(("time", "change", "result", "target", "target"))
    if kind == "time":
        _sleep(sweep, chance.uniform(0, bed.seconds))
        return
    if kind == "target":
        number = len(sweep.desk.ran()) + chance.randint(1, 2 * len(bed.models))
        while not sweep.is_over() and len(sweep.desk.ran()) < number:
            time.sleep(0.002)
        _sleep(sweep, chance.uniform(0, 0.2))
        return
    hidden = kind == "change"
    for _ in range(chance.randint(1, 20 if hidden else len(bed.models) + 2)):
        before = _names(sweep.desk.runs, hidden=hidden)
        while not sweep.is_over() and _names(sweep.desk.runs, hidden=hidden) == before:
            time.sleep(0.0002)
    _sleep(sweep, chance.uniform(0, 0.005))


def _sleep(sweep: Sweep, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not sweep.is_over() and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.01))


def _names(folder: Path, *, hidden: bool) -> set[str]:
    with suppress(FileNotFoundError):
        return {name for name in os.listdir(folder) if hidden or name[0] != "."}  # noqa: PTH208 - as fast as it can be
    return set()


# --- what is left ---


def _left(runs: Path) -> dict[str, str]:
    """Every file of an output folder and what it says, but for process numbers and the word that resumed it."""
    said = {}
    for path in sorted(path for path in runs.rglob("*") if not path.is_dir()):
        text = "" if path.name == ".lock" else path.read_bytes().decode("latin-1")
        said[str(path.relative_to(runs))] = _COMMANDS.sub("", text)
    return said | {f"{path.relative_to(runs)}/": "" for path in runs.rglob("*") if path.is_dir()}


def _halves(runs: Path) -> list[str]:
    """What can be seen in an output folder and is not whole."""
    found = []
    for folder in (path for path in runs.glob("[!.]*_fp32") if path.is_dir()):
        try:
            status = json.loads((folder / "manifest.json").read_text())["status"]
            if status == "ok":
                with closing(sqlite3.connect(folder / "capture.sqlite")) as capture:
                    (result,) = capture.execute("PRAGMA integrity_check").fetchone()
                    assert result == "ok", result
        except (OSError, ValueError, KeyError, AssertionError, sqlite3.Error) as error:
            found.append(f"{folder.name} is not whole: {error!r}")
    for name, end in (("timings.csv", "\n"), ("report.md", "-->\n")):
        if (runs / name).exists() and not (runs / name).read_text().endswith(end):
            found.append(f"{name} is cut off")
    return found


def _differences(found: dict[str, str], due: dict[str, str]) -> list[str]:
    missing = [f"{name} is missing" for name in due.keys() - found.keys()]
    more = [f"{name} is left" for name in found.keys() - due.keys()]
    other = [f"{name} differs" for name in due.keys() & found.keys() if due[name] != found[name]]
    return sorted([*missing, *more, *other])


# --- rounds ---


@dataclass
class Report:
    """How many cases of each kind were tried, and what was found."""

    cases: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


def disturb(bed: Bed, kind: str, chance: random.Random) -> list[str]:
    """Disturbs one sweep, some of them a second time in the resume, and says what was wrong."""
    found: list[str] = []
    desk = Desk.make(bed.folder / f"desk-{uuid.uuid4().hex}")
    disturbed, words, places = kind, tuple[str, ...](), [desk]
    for _ in range(1 + (chance.random() < 0.3)):
        sweep = Sweep.start(desk, bed.nsys, bed.models, *words)
        _wait(sweep, bed, chance)
        desk = DISTURBANCES[disturbed](sweep, bed, chance)
        places.append(desk)
        found += _after(sweep, disturbed, bed)
        found += _halves(desk.runs)
        disturbed, words = chance.choice(sorted(DISTURBANCES)), ("--resume",)
    sweep = Sweep.start(desk, bed.nsys, bed.models, "--resume")
    _, said = sweep.tool.communicate(timeout=120)
    if sweep.tool.returncode:
        found.append(f"the resume ended with {sweep.tool.returncode}: {said.strip()}")
    if left := sweep.outlived():
        found.append(f"the resume left {left} running")
    found += _differences(_left(desk.runs), bed.left)
    for place in dict.fromkeys(places):
        if (place.folder / "beside").exists():
            found.append(f"measured beside another: {(place.folder / 'beside').read_text().strip()}")
        shutil.rmtree(place.folder)
    return found


def _after(sweep: Sweep, kind: str, bed: Bed) -> list[str]:
    """What was wrong at the end of a sweep that was disturbed."""
    sweep.tool.communicate(timeout=120)
    found = []
    if kind == "the power":
        found += [f"the original: {one}" for one in _differences(_left(sweep.desk.runs), bed.left)]
    if left := sweep.outlived():
        found.append(f"{left} outlived the tool")
    return found


def explore(seconds: float, seed: int, most: int | None = None, models: Sequence[str] = MODELS) -> Report:
    """Disturbs sweeps, every kind in turn, until the time is up or so many are done; the seed decides the moments."""
    deadline, report = time.monotonic() + seconds, Report()
    with tempfile.TemporaryDirectory(prefix="durability-") as folder:
        bed = Bed.make(Path(folder), models)
        number = 0
        while time.monotonic() < deadline and (most is None or number < most):
            kind = list(DISTURBANCES)[(seed + number) % len(DISTURBANCES)]
            for one in disturb(bed, kind, random.Random(f"{seed} {number}")):
                report.findings.append(f"case {number}, {kind}: {one}")
                print(f"finding: {report.findings[-1]}", flush=True)
            report.cases[kind] += 1
            number += 1
    return report


def main(seconds: float, seed: int, most: int | None = None) -> int:
    """Disturbs sweeps for so long; prints seed, findings and the number of cases by kind, and returns the findings."""
    print(f"durability: seed {seed}", flush=True)
    report = explore(seconds, seed, most)
    for kind, count in report.cases.items():
        print(f"durability: {count:5d} × {kind}")
    print(f"durability: {report.cases.total()} cases, {len(report.findings)} findings", flush=True)
    return len(report.findings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="how long to go on")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of the moments")
    parser.add_argument("--cases", type=int, help="how many at most")
    given = parser.parse_args()
    raise SystemExit(min(main(given.seconds, given.seed, given.cases), 1))
