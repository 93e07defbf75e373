"""Fixtures: tiny exports and the real captures."""

from __future__ import annotations

import lzma
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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
            example = ROOT / "examples" / path.name
            if example.exists():
                shutil.copy(example, path)
            else:
                with lzma.open(DATA / f"{path.name}.xz") as packed, path.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
        return path

    return path_of
