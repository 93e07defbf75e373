"""The runner of case files: what it builds, and that a wrong expectation fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import cases

STEPS = "define forward name us\n    range {name} 0 {us}us\n    kernel GEMM 10 20 {us}us-1us\n\nA case\n"
ROWS = "    gpu\n    at 0 1ms\n        forward 500 fwd 100\n"


def run(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the only case of a file."""
    (folder / "file.txt").write_text(text)
    monkeypatch.setattr(cases, "CASES", folder)
    test = cases.make_case_test("file", {"starts": lambda capture: capture.trace.ranges.start})
    ((case,),) = (mark.args[1] for mark in test.pytestmark)  # type: ignore[attr-defined]
    test(case, folder)


@pytest.mark.parametrize(
    ("expected", "error"),
    [
        ("phases: {forward: (2, 1)}", None),
        ("starts: 500, 1_000_500  # two forwards", None),
        ("forward.wall_ms.mean: 100 * us", None),
        ("whole.classes.0.kernel_class: matmul", None),
        ("warnings lacks incomplete", None),
        ("starts: 500, 1_000_501", r"file\.txt:9: starts is \[500, 1000500\], and 500, 1_000_501 is expected"),
        ("starts: 500", "is expected"),
        ("phases: {}", "is expected"),
        ("phases: {forward: (2, 1), backward: (2, 1)}", "is expected"),
        ("forward.wall_ms.mean: 101 * us", "is expected"),
        ("forward.synchronized: 1", "is expected"),  # is True, which is not a number
        ("warnings has incomplete", "is expected"),
        ("forward.wall: 1", "has no attribute"),
    ],
)
def test_an_expectation_holds_or_fails(
    expected: str, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{STEPS}{ROWS}    = {expected}\n"
    if error is None:
        run(text, tmp_path, monkeypatch)
    else:
        with pytest.raises((AssertionError, AttributeError), match=error):
            run(text, tmp_path, monkeypatch)


def test_a_case_without_an_expectation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"file\.txt:5 expects nothing"):
        run(STEPS + ROWS, tmp_path, monkeypatch)
