"""Fixtures: tiny exports and the real captures."""

from __future__ import annotations

import lzma
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nsys_analyzer.capture.installation import find_importer, start_fault
from nsys_analyzer.capture.nsys import Nsys
from tests.export import AUTOGRAD, Export, training_step

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


@pytest.fixture(scope="module")
def nsys() -> Nsys:
    """A real nsys whose importer starts; without one the test skips, with the reason."""
    found = Nsys.find()
    if found is None:
        pytest.skip("no nsys on this machine")
    importer = find_importer(found.path)
    fault = "it is not here" if importer is None else start_fault(importer)
    if fault:
        pytest.skip(f"the importer of {found.path} does not start: {fault}")
    return found
