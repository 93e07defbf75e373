"""Fixtures: tiny exports and the real captures."""

from __future__ import annotations

import fcntl
import lzma
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.capture.nsys import find_importer, find_start_fault
from nsys_analyzer.cli.main import main
from nsys_analyzer.system.machine import Nsys, find_nsys, nsys_version
from tests.support.export import AUTOGRAD, Export, training_step

# torch would start a thread for each core in every process of the tests, and all of them would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine is no failure. `pytest --hypothesis-profile=nightly` looks for longer.
settings.register_profile("ci", deadline=None, max_examples=20)
settings.register_profile("nightly", deadline=None, max_examples=200)
settings.load_profile("ci")

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"


@pytest.fixture
def step_trace(tmp_path: Path) -> Path:
    """An export of one training step, backward launched by autograd's thread."""
    return training_step(Export().thread(AUTOGRAD, "pt_autograd_0").gpu()).write(tmp_path / "step.sqlite")


@pytest.fixture(scope="session")
def real_capture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a real capture by name, uncompressed on first use."""
    folder = tmp_path_factory.mktemp("captures")

    def path_of(name: str) -> Path:
        path = folder / f"{name}.sqlite"
        if not path.exists():
            with lzma.open(DATA / f"{path.name}.xz") as packed, path.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
        return path

    return path_of


@pytest.fixture(scope="session")
def real_summary(real_capture: Callable[[str], Path]) -> Callable[[str], CaptureSummary]:
    """The summary of a real capture of one process, by the capture's name, made on first use."""

    @cache
    def summary_of(name: str) -> CaptureSummary:
        (summary,) = summarize(Trace.load(real_capture(name)), name)
        return summary

    return summary_of


@pytest.fixture(scope="module")
def nsys() -> Nsys:
    """A real nsys whose importer starts; without one the test skips, with the reason."""
    found = find_nsys()
    if found is None:
        pytest.skip("no nsys on this machine")
    importer = find_importer(found)
    fault = "it is not here" if importer is None else find_start_fault(importer)
    if fault:
        pytest.skip(f"the importer of {found} does not start: {fault}")
    return Nsys(found, nsys_version(found))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a real nsys are tried again where that did not start: on a busy machine its agent may come too late."""
    again = pytest.mark.flaky(reruns=2, only_rerun=["Local Endpoint is not available", "exit status 1"])
    for item in items:
        if item.get_closest_marker("nsys"):
            item.add_marker(again)


@pytest.fixture(autouse=True)
def _one_nsys_at_a_time(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests marked nsys take turns: of several nsys 2022.4 that start together, some end with "sem_open" failed."""
    if request.node.get_closest_marker("nsys") is None:
        yield
        return
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "nsys.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Outcome(NamedTuple):
    """How the program ended: its exit code, and what it printed."""

    code: int
    out: str
    err: str


Main = Callable[..., Outcome]


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """The program as it is installed, errors caught, in this process."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["nsys-analyze", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Outcome(code, *capsys.readouterr())

    return run
