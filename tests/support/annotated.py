"""Runs programs with the hooks, and reads the case files of such programs.

A file of ``tests/cases`` holds programs. A line that starts at the margin is the name of a case; what is indented below
it is a Python program, and lines that begin with ``=`` say what is expected of it::

    A step has its phases
        options steps=2
        include model
        train()
        = instances["forward"]: 2
        = flops["classes"]: {"forward": {"matmul": 2*4*8*8}}     # 2·m·k·n

Both sides of an expectation are Python expressions, and the right one may go on in the next line, further in.
``code``, ``out`` and ``err`` are those of the program: 0 and nothing where a case does not name them. ``instances`` is
the number of times that each phase was timed. Other names are what the hooks wrote, None if they wrote no such thing.

``options`` are those of ``Annotation``; ``afresh`` starts a Python for the program, and ``recorded`` writes no times.
``define NAME argument …`` names lines of a program, in which ``{argument}`` stands for an argument, and
``include NAME VALUE …`` puts them into a program. ``file PATH`` is a file beside the program, and ``needs MODULE``
skips the case without that module.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nsys_analyzer.capture.profilers import make_hook_variables
from nsys_analyzer.capture.targets import Annotation
from tests.support.prepared import run_prepared

#: The sides of an expectation, around the first colon and space that are in no text.
_SIDES = re.compile(r'((?:"[^"]*"|[^":]|:(?! ))+): (.*)')
CASES = Path(__file__).parents[1] / "cases"
ASKED = Annotation(warmup_steps=3, steps=4)
LONGEST_S = 240


class Ran(NamedTuple):
    """How a program ended, and what the hooks wrote."""

    code: int
    out: str
    err: str
    results: dict[str, Any]

    def instances(self) -> dict[str, int]:
        """Returns how often each phase was timed."""
        return {phase: len(times) for phase, times in self.results.get("times_ms", {}).items()}


def run(folder: Path, text: str, asked: Annotation | None = ASKED, *, afresh: bool = False, **variables: str) -> Ran:
    """Runs a program with the hooks, without a profiler; ``afresh`` in a Python of its own."""
    program, results = folder / "program.py", folder / "results.json"
    program.write_text(text)
    results.unlink(missing_ok=True)
    environment = {**os.environ, **make_hook_variables(asked, results), **variables}
    if afresh:
        words = [sys.executable, str(program)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_S, env=environment, cwd=folder)
    else:
        ended = run_prepared(program, environment)
    written = json.loads(results.read_text()) if results.exists() else {}
    return Ran(ended.returncode, ended.stdout, ended.stderr, written)


@dataclass
class ProgramCase:
    """A program of a case file, the files beside it, and what is expected of it."""

    name: str
    text: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)

    def check(self, folder: Path) -> None:
        """Runs the program with the hooks, and compares each value with the expected one."""
        for module in self.needs:
            pytest.importorskip(module)
        self.write_files(folder)
        options = {**self.options}
        afresh, recorded = options.pop("afresh", False), options.pop("recorded", False)
        asked = replace(ASKED, **options)
        ran = run(folder, self.text, asked, afresh=afresh, **(make_hook_variables(asked) if recorded else {}))
        self.compare(ran.code, ran.out, ran.err, {**ran.results, "instances": ran.instances()})

    def write_files(self, folder: Path) -> None:
        """Writes the files beside the program."""
        for name, lines in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("\n".join(lines))

    def compare(self, code: int, out: str, err: str, results: Mapping[str, Any]) -> None:
        """Compares what a program left with the expected values: it ends well and in silence by default."""
        names = _Results(results, code=code, out=out, err=err)
        expected = dict(_SIDES.fullmatch(line).groups() for line in self.expected)  # type: ignore[union-attr]
        for name, value in {"code": "0", "out": "''", "err": "''"}.items():
            if not any(re.search(rf"\b{name}\b", left) for left in expected):
                expected[name] = value
        for left, right in expected.items():
            actual, wanted = (eval(expression, {}, names) for expression in (left, right))
            assert actual == wanted, f"{left} is {actual!r}, and {right} is expected: {err}"


class _Results(dict[str, Any]):
    """What is known of a program by name; what the hooks did not write is None."""

    def __missing__(self, name: str) -> None:
        if hasattr(builtins, name):
            raise KeyError(name)


def read_programs(file: str) -> tuple[list[ProgramCase], dict[str, str]]:
    """Returns the cases of a file, and the programs that it defines by name."""
    blocks: list[tuple[str, list[str]]] = []
    for line in (CASES / f"{file}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            blocks[-1][1].append(line.removeprefix("    "))
        elif line and not line.startswith("#"):
            blocks.append((line, []))
    definitions: dict[str, str] = {}
    arguments: dict[str, list[str]] = {}
    cases = []
    for head, lines in blocks:
        if head.startswith("define "):
            _, name, *arguments[name] = head.split()
            definitions[name] = "".join(f"{line}\n" for line in lines)
        else:
            cases.append(_read_case(ProgramCase(head), lines, definitions, arguments))
    return cases, definitions


def _read_case(
    case: ProgramCase, lines: list[str], definitions: dict[str, str], arguments: dict[str, list[str]]
) -> ProgramCase:
    block: list[str] | None = None
    for line in _expand(lines, definitions, arguments):
        word, _, rest = line.partition(" ")
        if not word and block is case.expected:
            block[-1] += line
        elif not word and block is not None:
            block.append(line.removeprefix("    "))
        else:
            block = None
            if word == "options":
                case.options = eval(f"dict({rest})")
            elif word == "needs":
                case.needs.append(rest)
            elif word == "file":
                block = case.files.setdefault(rest, [])
            elif line == "= ranges":
                block = case.ranges
            elif word == "=":
                block = case.expected
                block.append(rest)
            else:
                case.text += f"{line}\n"
    assert case.expected or case.ranges, f"{case.name}: nothing is expected"
    return case


def _expand(lines: list[str], definitions: dict[str, str], arguments: dict[str, list[str]]) -> Iterator[str]:
    """Yields the lines of a case with those of the definitions that it includes."""
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word != "include":
            yield line
            continue
        name, *values = shlex.split(rest)
        text = definitions[name]
        for argument, value in zip(arguments[name], values, strict=True):
            text = text.replace(f"{{{argument}}}", value)
        margin = line[: len(line) - len(line.lstrip())]
        yield from (margin + included for included in text.splitlines())
