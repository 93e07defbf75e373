"""A short seeded round of ``make fuzz``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.fuzz import oracle
from tests.fuzz.cases import KINDS
from tests.fuzz.sandbox import Outcome

CASES = 60


ROUND = """
import json, sys
from pathlib import Path
from tests.fuzz.__main__ import fuzz
tried, found = fuzz(600, 20, Path(sys.argv[1]), most=int(sys.argv[2]))
print(json.dumps([tried, [str(finding) for finding in found]]))
"""


@pytest.mark.nightly
def test_a_short_round_finds_nothing(tmp_path: Path) -> None:
    """In a process of its own: a fork of one that has run PyTorch's threads may wait for a lock of theirs for ever."""
    done = subprocess.run(
        [sys.executable, "-c", ROUND, str(tmp_path), str(CASES)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tried, found = json.loads(done.stdout.splitlines()[-1])
    assert sum(tried.values()) == CASES
    assert set(tried) == set(KINDS)
    assert found == []


@pytest.mark.parametrize(
    ("code", "out", "err", "fault"),
    [
        (0, b"fine\n", b"", ""),
        (1, b"", b"Error: no such file. Check the path\n", ""),
        (2, b"", b"Usage: nsys-analyze\nError: No such option\n", ""),
        (70, b"", b"Traceback (most recent call last):\nValueError: x\n", "exit 70: ValueError: x"),
        (1, b"", b"", "exit 1 without its one line of error"),
        (1, b"", b"Error: a\nError: b\n", "exit 1 without its one line of error"),
        (-9, b"", b"", "killed by signal 9"),
        (0, b"a\x1b[31mb", b"", "a control character on stdout"),
        (0, b"", "\u202e".encode(), "a control character on stderr"),
        (0, b"", b"x.py:3: RuntimeWarning: overflow\n", "a warning of Python"),
    ],
)
def test_what_counts_as_a_fault(code: int, out: bytes, err: bytes, fault: str) -> None:
    said = oracle.fault(Outcome(("report",), code, out, err, 1.0))
    assert said.startswith(fault)
    assert bool(said) == bool(fault)
