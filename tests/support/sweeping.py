"""Provides a target and an nsys that do as they are told at once, for tests of ``nsys-analyze run``."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.export import Export, training_step
from tests.test_nsys import make_command

#: Takes the place of the real transformer. $BEHAVIOUR holds, by model, Python code that it runs first, in which
#: ``timed`` says whether this is the run without a profiler; ``ran`` keeps a line for each run.
TARGET = """
import json, os, pathlib, sys, time
model = sys.argv[sys.argv.index("--model") + 1]
timed = "--results" in sys.argv
with open("ran", "a") as ran:
    print(model, "timed" if timed else "profiled", os.getpid(), file=ran)
print("at work", flush=True)
times = {"forward": [1.0, 3.0], "step": [2.0, 4.0]}
results = {"d_model": 64, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 100, "times_ms": times}
def write():
    if timed:
        path = pathlib.Path(sys.argv[sys.argv.index("--results") + 1])
        unfinished = path.with_name("unfinished")
        unfinished.write_text(json.dumps({"status": "ok", "message": None, **results}))
        unfinished.replace(path)
exec(json.loads(os.environ.get("BEHAVIOUR", "{}")).get(model, ""))
write()
"""

#: ``nsys profile`` runs the program behind its options and leaves a report; its export is $EXPORT.
NSYS = """
case "$1" in
--version) echo "NVIDIA Nsight Systems version {version}-df9881f";;
profile)
  shift
  while case "$1" in --output=*) output="${{1#--output=}}";; -*) ;; *) false;; esac; do shift; done
  output=$(echo "$output" | sed "s/%q{{RANK}}/$RANK/; s/%%/%/g")
  "$@"
  code=$?
  {after}
  exit $code;;
export)
  while [ $# -gt 0 ]; do
    case "$1" in -o|--output) output="$2";; --output=*) output="${{1#--output=}}";; esac
    shift
  done
  {export};;
esac
"""


def make_recording_nsys(
    folder: Path, *, after: str = 'echo report > "$output.nsys-rep"',
    export: str = 'cp "$EXPORT" "$output"',
) -> Path:  # fmt: skip
    """An nsys that records nothing and exports one training step; ``after`` and ``export`` are shell code."""
    training_step(Export().gpu()).write(folder / "export.sqlite")
    script = NSYS.format(version="2022.4.2.1", after=after, export=export)
    return make_command(folder / "target-linux-x64/nsys", script.replace("$EXPORT", str(folder / "export.sqlite")))


@dataclass(frozen=True)
class Desk:
    """A folder to run the command in, where the fake target takes the real one's place."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Desk:
        package = folder / "profiling_targets"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "transformer.py").write_text(TARGET)
        return cls(folder)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def ran(self) -> list[str]:
        """The model and kind of each run, in order: ``small timed``."""
        return [line.rpartition(" ")[0] for line in self._lines()]

    def pids(self) -> list[int]:
        return [int(line.split()[-1]) for line in self._lines()]

    def _lines(self) -> list[str]:
        path = self.folder / "ran"
        return path.read_text().splitlines() if path.is_file() else []

    def manifest(self, name: str) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.runs / name / "manifest.json").read_text())
        return read

    def timings(self) -> list[tuple[str, str, str]]:
        """Capture, phase and status of each row."""
        with (self.runs / "timings.csv").open() as file:
            return [(row["capture"], row["phase"], row["status"]) for row in csv.DictReader(file)]

    def left(self) -> set[str]:
        """What is in the output folder, hidden files with it."""
        return {path.name for path in self.runs.iterdir()}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """The command in a process of its own, started here."""
        code = (
            "import os, sys; sys.argv[0] = 'nsys-analyze'\n"
            "from nsys_analyzer.cli.main import main\n"
            "from nsys_analyzer.capture import plan as run_plan\n"
            "run_plan.torch_version = lambda: '2.13.0'  # the fake target needs none\n"
            "run_plan.count_gpus = lambda: 0\n"
            "from nsys_analyzer.system import process\n"
            "process._GRACE_S = float(os.environ.get('GRACE_S', process._GRACE_S))\n"
            "main()"
        )
        return subprocess.Popen(
            [sys.executable, "-I", "-c", code, "run", *arguments], cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment},
            preexec_fn=default_signals,
        )  # fmt: skip


def default_signals() -> None:
    """Has a new process end where it is interrupted, also where the tests themselves run behind ``nohup``."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def let_time_pass(monkeypatch: pytest.MonkeyPatch, passed_s: Callable[[], float]) -> None:
    """Has the time limits of jobs count these seconds alone, so that a busy machine changes nothing."""
    monkeypatch.setattr("nsys_analyzer.system.process.time", SimpleNamespace(monotonic=passed_s))


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Waits until a condition holds, and fails where it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
