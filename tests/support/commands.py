"""Runs the commands of a case file of ``tests/cases``, and checks what they print and write.

Beside the rows that build a trace (see ``tests.support.cases``) there are these, in an empty working folder:

- ``write NAME``: writes the trace, and begins another one; ``file NAME``: writes the lines that are indented below it.
- ``folder NAME``: makes a folder, and those around it; ``cut NAME``: leaves half of a file; ``remove NAME``.
- ``real FILE``: unpacks a real capture of ``tests/data`` into the working folder.
- ``$ COMMAND``: runs ``nsys-analyze COMMAND``, which must succeed.
- ``fails COMMAND``: it must end with exit code 1 and an error of one line, and change no file.
- ``misuses COMMAND``: the same with exit code 2, where an error may have several lines.
- ``exits CODE COMMAND``: it must end with this exit code.

Figures are of the last command: ``out`` and ``err`` with a single space for any white space, ``lines`` of ``out``,
``json``, and ``csv``, the rows of a table. ``text NAME`` is a file, ``files`` are the names in the working folder, and
``files NAME`` those in another one. ``section TITLE`` is the part of a report below the first heading, or inside the
first fold, whose title holds these words.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DATA, Main, Outcome
from tests.support.cases import CASES, Case, Check, Line, figure_of, fill, read_cases
from tests.support.export import Export
from tests.support.packed import unpack

_FIGURES: dict[str, Callable[[Outcome], Any]] = {
    "out": lambda ended: _on_one_line(ended.out),
    "err": lambda ended: _on_one_line(ended.err),
    "lines": lambda ended: [_on_one_line(line) for line in ended.out.splitlines()],
    "json": lambda ended: json.loads(ended.out),
    "csv": lambda ended: list(csv.DictReader(ended.out.splitlines())),
}
#: Figures of a file or a folder, by the words in front of its name.
_FILE_FIGURES: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: _on_one_line(path.read_text(encoding="utf-8")),
    "files": lambda folder: sorted(path.name for path in folder.iterdir()),
}
_EXIT_CODES = {"$": 0, "fails": 1, "misuses": 2}


def make_command_test(
    file: str, values: Mapping[str, Any] | None = None, builders: Mapping[str, Callable[..., Any]] | None = None,
    figures: Mapping[str, Callable[[Outcome], Any]] | None = None,
    file_figures: Mapping[str, Callable[[Path], Any]] | None = None, prepare: Callable[[Path], None] = lambda _: None,
) -> Callable[..., None]:  # fmt: skip
    """Returns the test of each case in ``tests/cases/FILE.txt``; see ``make_case_test`` for the arguments.

    ``file_figures`` are those of a file, whose name follows theirs. ``prepare`` puts into the working folder what each
    case begins with.
    """
    cases = read_cases(CASES / f"{file}.txt")

    @pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])
    def test_commands(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_main: Main) -> None:
        monkeypatch.chdir(tmp_path)
        prepare(tmp_path)
        CommandCheck(
            case, tmp_path, {**_FIGURES, **(figures or {})}, values or {}, builders or {}, main=run_main,
            file_figures={**_FILE_FIGURES, **(file_figures or {})},
        ).run()  # fmt: skip

    return test_commands


@dataclass(kw_only=True)
class CommandCheck(Check):
    """Carries out the rows of a case, and checks how each command ends."""

    main: Main
    file_figures: Mapping[str, Callable[[Path], Any]]
    ended: Outcome | None = None

    def build(self, line: Line, later: int, arguments: Mapping[str, str], options: Mapping[str, Any]) -> None:
        verb, _, words = fill(line.text, arguments).partition(" ")
        place = self.folder / words
        if verb in _EXIT_CODES:
            self.carry_out(verb, _EXIT_CODES[verb], words, f"{self.case.file}:{line.number}")
        elif verb == "exits":
            code, _, words = words.partition(" ")
            self.carry_out(verb, int(code), words, f"{self.case.file}:{line.number}")
        elif verb == "write":
            place.parent.mkdir(parents=True, exist_ok=True)
            self.trace.write(place)
            self.trace = Export()
        elif verb == "file":
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("".join(f"{fill(row.text, arguments)}\n" for row in line.below), encoding="utf-8")
        elif verb == "folder":
            place.mkdir(parents=True)
        elif verb == "remove":
            place.unlink()
        elif verb == "cut":
            place.write_bytes(place.read_bytes()[: place.stat().st_size // 2])
        elif verb == "real":
            unpack(DATA / words, self.folder)
        else:
            super().build(line, later, arguments, options)

    def carry_out(self, verb: str, code: int, words: str, where: str) -> None:
        """Runs a command and checks its exit code, and that one that fails prints one error and changes nothing."""
        before = self.contents()
        self.ended = self.main(*shlex.split(words, comments=True))
        assert self.ended.code == code, f"{where} ends with {self.ended}"
        assert "Traceback" not in self.ended.err, where
        if verb in ("fails", "misuses"):
            assert (self.ended.out, self.contents()) == ("", before), where
        if verb == "fails":
            assert (self.ended.err.count("\n"), self.ended.err[:7]) == (1, "Error: "), f"{where} says {self.ended.err}"

    def contents(self) -> dict[Path, bytes | None]:
        """The content of each file below the working folder, and None for each folder."""
        return {path: path.read_bytes() if path.is_file() else None for path in self.folder.rglob("*")}

    def figure(self, name: str) -> Any:
        head, _, place = name.partition(" ")
        if head == "section":
            assert self.ended
            return _on_one_line(section(self.ended.out, place))
        if head in self.file_figures:
            return self.file_figures[head](self.folder / place)
        return figure_of(self.ended, name, self.figures)


def section(markdown: str, title: str) -> str:
    """Returns the text below the first heading, or inside the first fold, whose title holds these words."""
    start = re.search(rf"^(?:## |<details>)[^\n]*{re.escape(title)}[^\n]*\n", markdown, re.M)
    assert start, f"{title!r} is no title of: {re.findall('^(?:##|<details>).*', markdown, re.M)}"
    rest = markdown[start.end() :]
    if start[0].startswith("## "):
        return re.split(r"^## ", rest, maxsplit=1, flags=re.M)[0]
    depth = 1
    for mark in re.finditer("<(/?)details>", rest):
        depth += -1 if mark[1] else 1
        if depth == 0:
            return rest[: mark.start()]
    pytest.fail(f"{title} is not closed")


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
