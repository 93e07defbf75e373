"""Reads and checks case files: what a program launches, and the figures that follow from it.

A file of ``tests/cases`` holds cases. A line that starts at the margin is the name of a case; what is indented below it
builds a trace row by row, and says with ``=`` which figures are expected of the rows so far::

    The launch decides, not the time on the GPU
        range forward 0 100
        range backward 100 300
        kernel GEMM 90 150 200              # is launched in forward, and runs while backward is open
        = kernels.phase: forward

A row is a method of ``Export`` with its arguments, and times are ns. An argument is a number, with ``us``, ``ms`` or
``s`` for other units, ``-`` for nothing, or a text. ``pid=200`` means the thread 200 of that process, unless a ``tid``
is given. ``launched`` is the correlation ID of the last call. These rows have a meaning of their own:

- ``torch NAME=VALUE``: the rows below are methods of ``Kineto``, and times are µs; its properties may be given.
- ``program``: the rows ``api``, ``work``, ``copy``, ``open`` and ``step`` are methods of ``Program``. Their times are
  µs, and ``30..34`` is the time from 30 to 34.
- ``at 0 1000``: repeats the rows that are indented below it, each time later by so much; ``repeat 20 every 50`` does so
  20 times. ``{n}`` is the number of the repetition.
- ``define NAME argument …``, at the margin: names rows, in which ``{argument}`` stands for an argument.
  ``NAME 500 …`` then writes them, 500 later.
- ``sql STATEMENT``: changes the written file.
- ``phase NAME=RANGE``: names the ranges of a phase.
- ``model WIDTH FEED_FORWARD_WIDTH LAYERS HEADS CONTEXT_LENGTH BATCH_SIZE``: gives the configuration.
- ``process PID``: chooses the process that the figures after it are of.
- ``start over``: begins another trace.

An expected value is an expression, in which a word is a text, and ``ns`` is 1e-6, since figures are ms. The test file
says in a table of functions what the names of figures mean. Other names are attributes, as in ``coverage.kernels``, and
the name of a phase stands for its figures. ``NAME has VALUE`` and ``NAME lacks VALUE`` look into a text, or into each
text of several. ``NAME includes VALUE`` wants a text of several to be the value. ``NAME matches VALUE`` takes a regular
expression.
"""

from __future__ import annotations

import inspect
import re
import shlex
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize
from nsys_analyzer.cli.main import cli
from nsys_analyzer.report.facts import say_all
from nsys_analyzer.text import plain
from nsys_analyzer.trace.phase_names import PhaseNames
from tests.support import export as exports
from tests.support import kineto
from tests.support import program as programs

CASES = Path(__file__).parents[1] / "cases"
_NAMES: dict[str, Any] = {
    "-": None, "GEMM": exports.GEMM, "ADD": exports.ADD, "SOFTMAX": exports.SOFTMAX, "AUTOGRAD": exports.AUTOGRAD,
    "CALL": "torch.nn.modules.Module.__call__", "ENGINE": "autograd::engine::evaluate_function: MmBackward0",
    "ADAM": "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>()",
    "NCCL": programs.NCCL, "SYNC": programs.SYNC, "COPY": programs.COPY, "MALLOC": programs.MALLOC,
    "FREE": programs.FREE, "GRAPH": programs.GRAPH, "RECORD": programs.RECORD, "WAIT": programs.WAIT,
    "NEXT_BATCH": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
}  # fmt: skip
_TORCH_NAMES = {**_NAMES, "AUTOGRAD": kineto.AUTOGRAD}
_NS_PER_UNIT = {"": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
_SPAN = re.compile(r"(-?\d+)\.\.(-?\d+)")
_NUMBER = re.compile(r"-?\d+(?:us|ms|s)?(?:[+-]\d+(?:us|ms|s)?)*")
#: Arguments that are times, which ``at`` and a definition move.
_TIMES = {"start", "end", "launch", "at", "called", "ran"}
#: Arguments that are times in the methods of ``Kineto``, whose others are durations.
_TORCH_TIMES = {"ts"}


@dataclass(frozen=True)
class Line:
    """A line of a case file: its number, its words, and the lines that are indented below it."""

    number: int
    text: str
    below: tuple[Line, ...] = ()


@dataclass(frozen=True)
class Case:
    """A case with its name, and the definitions of its file."""

    file: str
    name: str
    lines: tuple[Line, ...]
    definitions: Mapping[str, tuple[list[str], tuple[Line, ...]]]


class Capture:
    """A trace that was written, and what the analysis makes of it; each part is computed on first use."""

    def __init__(
        self, path: Path, names: PhaseNames | None, pid: int | None, configuration: Configuration | None
    ) -> None:
        self.path, self.names, self.pid, self.configuration = path, names, pid, configuration

    @cached_property
    def trace(self) -> Trace:
        """The trace."""
        return Trace.load(self.path)

    @cached_property
    def attributed(self) -> AttributedTrace:
        """The trace with its attribution."""
        return AttributedTrace(self.trace)

    @cached_property
    def summaries(self) -> tuple[CaptureSummary, ...]:
        """The summary of each process."""
        return tuple(summarize(self.trace, "t", self.names, configuration=self.configuration))

    @cached_property
    def summary(self) -> CaptureSummary:
        """The summary of the chosen process, or of the only one."""
        (summary,) = (one for one in self.summaries if self.pid in (None, one.pid))
        return summary

    @property
    def warnings(self) -> list[str]:
        """The warnings of the summary, with names in backticks."""
        return [plain(warning, "`") for warning in say_all(self.summary.warnings)]

    def report(self, *options: str) -> str:
        """The report as ``nsys-analyze report`` prints it, with plain spaces and without alignment."""
        done = CliRunner().invoke(cli, ["report", str(self.path), "-o", "-", *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return re.sub(" +", " ", done.stdout.replace("\N{NO-BREAK SPACE}", " "))


Figure = Callable[[Capture], Any]
_FIGURES: dict[str, Figure] = {
    "warnings": lambda capture: capture.warnings,
    "report": Capture.report,
    "summary": lambda capture: capture.summary,
    "phases": lambda capture: {one.phase: (one.instances, one.kernels_per_instance) for one in capture.summary.phases},
    "instances": lambda capture: {
        one.phase: (one.instances, one.warmup_instances, one.incomplete_instances) for one in capture.summary.phases
    },
}


def make_case_test(
    file: str, figures: Mapping[str, Figure] | None = None, values: Mapping[str, Any] | None = None,
    builders: Mapping[str, Callable[..., Any]] | None = None,
) -> Callable[..., None]:  # fmt: skip
    """Returns the test of each case in ``tests/cases/FILE.txt``.

    ``figures`` says what the names of figures mean, ``values`` what words stand for, and ``builders`` which rows begin
    a trace by another builder.
    """
    cases = read_cases(CASES / f"{file}.txt")

    @pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])
    def test_case(case: Case, tmp_path: Path) -> None:
        Check(case, tmp_path, {**_FIGURES, **(figures or {})}, values or {}, builders or {}).run()

    return test_case


def read_cases(path: Path) -> list[Case]:
    """Returns the cases in a file."""
    cases: list[Case] = []
    definitions: dict[str, tuple[list[str], tuple[Line, ...]]] = {}
    lines = [(number, line) for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]
    for line in _nest([(number, line) for number, line in lines if line.split("#")[0].strip()]):
        if line.text.startswith("define "):
            _, name, *arguments = line.text.split()
            definitions[name] = arguments, line.below
        else:
            expecting = [name for name, (_, rows) in definitions.items() if _expects(rows, ())]
            assert _expects(line.below, expecting), f"{path}:{line.number} expects nothing"
            cases.append(Case(path.name, line.text, line.below, definitions))
    return cases


def read_names(file: str) -> list[tuple[str, str]]:
    """Returns the names in ``tests/cases/FILE.txt``, each behind the line at the margin that it is indented below."""
    lines = (CASES / f"{file}.txt").read_text(encoding="utf-8").splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"]
    return [(head.text, name.text) for head in _nest(numbered) for name in head.below]


def _expects(rows: Sequence[Line], expecting: Sequence[str]) -> bool:
    """Checks that rows expect a figure, by themselves or by a definition that does."""
    return any(row.text.startswith("=") or row.text.split()[0] in expecting for row in rows)


def _nest(lines: Sequence[tuple[int, str]]) -> tuple[Line, ...]:
    """Returns lines with those that are indented below each."""
    if not lines:
        return ()
    margin = len(lines[0][1]) - len(lines[0][1].lstrip())
    heads = [i for i, (_, text) in enumerate(lines) if len(text) - len(text.lstrip()) == margin]
    ends = [*heads[1:], len(lines)]
    return tuple(
        Line(lines[head][0], lines[head][1].strip(), _nest(lines[head + 1 : end]))
        for head, end in zip(heads, ends, strict=True)
    )


class _Words(dict[str, Any]):
    """Names of an expected value: a word that nothing defines is a text."""

    def __missing__(self, name: str) -> str:
        return name


@dataclass
class Check:
    """Builds the trace of a case row by row, and compares its figures with the expected ones."""

    case: Case
    folder: Path
    figures: Mapping[str, Figure]
    values: Mapping[str, Any]
    builders: Mapping[str, Callable[..., Any]]
    trace: Any = field(default_factory=exports.Export)
    correlation: int | None = None
    changes: list[str] = field(default_factory=list)
    names: PhaseNames | None = None
    pid: int | None = None
    configuration: Configuration | None = None
    capture: Capture | None = None

    def run(self) -> None:
        for line in self.case.lines:
            self.build(line, 0, {}, {})

    def build(self, line: Line, later: int, arguments: Mapping[str, str], options: Mapping[str, Any]) -> None:
        """Carries out a row, whose times are moved by ``later``, or checks what it expects."""
        text = fill(line.text, arguments)
        if text.startswith("="):
            self.compare(line.number, text)
            return
        verb, *words = shlex.split(text, comments=True)
        if verb not in self.case.definitions:
            self.capture = None
        if verb in ("at", "repeat"):
            values = [_value(word, self.known) for word in words]
            times = values if verb == "at" else [number * values[2] for number in range(values[0])]
            for number, time in enumerate(times):
                for row in line.below:
                    self.build(row, later + time, {**arguments, "n": str(number)}, options)
        elif verb in self.case.definitions:
            names, rows = self.case.definitions[verb]
            given, more = self.parse(words[1:])
            moved = later + _value(words[0], self.known)
            texts = dict(zip(names, (word for word in words[1:] if not _is_option(word)), strict=True))
            assert len(texts) == len(given)
            for row in rows:
                self.build(row, moved, {"n": arguments.get("n", "{n}"), **texts}, {**options, **more})
        elif verb == "torch":
            self.trace = kineto.Kineto(**self.parse(words)[1])
        elif verb == "program":
            self.trace = programs.Program()
        elif verb in self.builders:
            self.trace = self.builders[verb](*self.parse(words)[0])
        elif verb == "start":
            self.trace, self.changes, self.names, self.pid = exports.Export(), [], None, None
            self.configuration = None
        elif verb == "sql":
            self.changes.append(text.removeprefix("sql "))
        elif verb == "phase":
            self.names = PhaseNames.parse(words)
        elif verb == "process":
            self.pid = int(words[0])
        elif verb == "model":
            *size, context_length, batch_size = map(int, words)
            self.configuration = Configuration(ModelSize("tiny", *size), context_length, batch_size)
        elif verb == "training_step":
            given, more = self.parse(words)
            exports.training_step(self.trace, later + given[0], **more)
        else:
            self.call(verb, words, later, options)

    def call(self, verb: str, words: Sequence[str], later: int, options: Mapping[str, Any]) -> None:
        """Calls the method of the trace that a row names."""
        method = getattr(self.trace, verb)
        signature = inspect.signature(method)
        given, more = self.parse(words)
        values = dict(signature.bind(*given, **more).arguments)
        more = {**values.pop("args", {}), **values.pop("row", {})}
        values = {**{name: value for name, value in options.items() if name in signature.parameters}, **values}
        if "pid" in values and "tid" in signature.parameters and isinstance(self.trace, exports.Export):
            values.setdefault("tid", values["pid"])
        if isinstance(self.trace, programs.Program) and verb not in vars(programs.Program):
            later *= programs.US
        for name in (_TORCH_TIMES if isinstance(self.trace, kineto.Kineto) else _TIMES) & values.keys():
            if isinstance(values[name], tuple):
                values[name] = tuple(time + later for time in values[name])
            elif values[name] is not None:
                values[name] += later
        result = method(**values, **more)
        self.correlation = result if isinstance(result, int) else self.correlation

    @property
    def known(self) -> dict[str, Any]:
        """What the words of a row stand for."""
        names = _TORCH_NAMES if isinstance(self.trace, kineto.Kineto) else _NAMES
        return {**names, **self.values, "launched": self.correlation}

    def parse(self, words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments in words, and those that have a name."""
        given = [_value(word, self.known) for word in words if not _is_option(word)]
        options = (word.partition("=") for word in words if _is_option(word))
        return given, {name: _value(word, self.known) for name, _, word in options}

    def compare(self, number: int, line: str) -> None:
        """Compares a figure with the expected value."""
        match = re.fullmatch(r"= *(.+?)(:| has| lacks| includes| matches) (.+)", line)
        assert match, f"{self.case.file}:{number}: {line}"
        name, relation, text = match.groups()
        words = _Words(
            ns=1e-6,
            us=1e-3,
            inf=float("inf"),
            approx=pytest.approx,
            **{k: v for k, v in self.known.items() if v is not None},
        )
        expected, actual = eval(text, {}, words), self.figure(name)
        where = f"{self.case.file}:{number}: {name} is {actual!r:.2000}, and {text} is expected"
        if relation == ":":
            assert _matches(actual, expected), where
        elif relation == " includes":
            assert expected in actual, where
        elif relation == " matches":
            assert re.search(expected, actual), where
        else:
            texts = [actual] if isinstance(actual, str) else list(actual)
            found = any(expected in one for one in texts)
            assert found == (relation == " has"), where

    def figure(self, name: str) -> Any:
        """Returns a figure of the trace, which is written first."""
        if self.capture is None:
            path = self.trace.write(self.folder / ("t.json" if isinstance(self.trace, kineto.Kineto) else "t.sqlite"))
            if self.changes:
                with sqlite3.connect(path) as connection:
                    for change in self.changes:
                        connection.execute(change)
                connection.close()
            self.capture = Capture(path, self.names, self.pid, self.configuration)
        return figure_of(self.capture, name, self.figures)


def fill(text: str, arguments: Mapping[str, str]) -> str:
    """Returns the text of a row, in which arguments of a definition take the places of their names."""
    text = re.sub(r"\{(\w+)\}", lambda name: arguments.get(name[1], name[0]), text)
    return text.replace("{n}", arguments.get("n", "{n}"))  # an argument may hold it


def _is_option(word: str) -> bool:
    return re.match(r"[A-Za-z_]+=", word) is not None


def _value(word: str, names: Mapping[str, Any]) -> Any:
    """Returns the number that a word states, what it stands for, or the word itself."""
    if word in names:
        return names[word]
    if span := _SPAN.fullmatch(word):
        return tuple(map(int, span.groups()))
    if not _NUMBER.fullmatch(word):
        return word[1:-1] if word[:1] == word[-1:] == "'" else word
    return sum(int(number) * _NS_PER_UNIT[unit] for number, unit in re.findall(r"([+-]?\d+)(us|ms|s|)", word))


def figure_of(source: Any, name: str, figures: Mapping[str, Callable[..., Any]]) -> Any:
    """Returns a figure of a capture by its name, which may go on with attributes; ``*`` is each item of a list."""
    head, *rest = [name] if name in figures else name.split(".")
    value = figures.get(head, lambda capture: capture.summary.phase(head) or getattr(capture.summary, head))(source)
    return _attribute(value, rest)


def _attribute(value: Any, parts: Sequence[str]) -> Any:
    """Returns the attribute, or the attribute of the attribute, of a value."""
    for place, part in enumerate(parts):
        if part == "*":
            return [_attribute(item, parts[place + 1 :]) for item in value]
        if isinstance(value, Mapping):
            value = value[part]
        else:
            value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value.tolist() if isinstance(value, np.ndarray) else value


def _matches(actual: Any, expected: Any) -> bool:
    """Checks that a value is the expected one; decimal numbers may differ by rounding."""
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(_matches(actual[key], expected[key]) for key in expected)
    if isinstance(actual, list | tuple):
        wanted = expected if isinstance(expected, list | tuple) else (expected,)
        return len(actual) == len(wanted) and all(map(_matches, actual, wanted))
    if isinstance(expected, float):
        return bool(actual == pytest.approx(expected))
    return bool(actual == expected) and isinstance(actual, bool) == isinstance(expected, bool)
