"""A short seeded round of ``make fuzz``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import oracle
from tests.fuzz.__main__ import fuzz
from tests.fuzz.cases import KINDS
from tests.fuzz.sandbox import Outcome

CASES = 60


@pytest.mark.slow
def test_a_short_round_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():  # the child writes to the file descriptors themselves
        tried, found = fuzz(600, 20, tmp_path, most=CASES)
    assert tried.total() == CASES
    assert set(tried) == set(KINDS)
    assert [str(finding) for finding in found] == []


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
