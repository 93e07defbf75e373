"""The tools that ``nsys-analyze mcp`` gives to an agent. Each tool does what the command of its name does."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from nsys_analyzer.analysis.comparison.comparison import DEFAULT_THRESHOLD
from nsys_analyzer.analysis.comparison.pairs import compare_runs
from nsys_analyzer.analysis.what_if import WhatIfQuestion, answer_all
from nsys_analyzer.cli.confined_reader import ConfinedReader
from nsys_analyzer.cli.kernels import list_kernels
from nsys_analyzer.cli.modules import NO_MODULES
from nsys_analyzer.cli.operators import list_operators, operators_data
from nsys_analyzer.experiments.evidence import load_runs, make_evidence
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.inputs.saved_reports import GENERATOR
from nsys_analyzer.questions.ask import Answers, list_figures, write_ranked_answers
from nsys_analyzer.questions.ask import ask as answer_text
from nsys_analyzer.questions.claims import check as check_claims
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.renderers import markdown
from nsys_analyzer.report.renderers.json_report import SCHEMA_VERSION, format_json, to_plain_data
from nsys_analyzer.report.sections.comparison import answer_comparison, require_comparisons
from nsys_analyzer.report.sections.modules import modules_section

#: The path of a capture or folder, or several paths.
_Paths = str | list[str]
#: The largest number of characters that an agent receives: of a program's output, of a line, and of a JSON string.
_MAX_OUTPUT_LENGTH, _MAX_LINE_LENGTH, _MAX_STRING_LENGTH = 2000, 1000, 300
#: One character of a string in JSON. Half of a surrogate pair is never cut off.
_CHARACTER = r'(?:[^"\\]|\\ud[89ab]..\\ud[c-f]..|\\u....|\\.)'
_LONG_STRING = re.compile(rf'"({_CHARACTER}{{{_MAX_STRING_LENGTH}}}){_CHARACTER}+"')
_LONG_LINE = re.compile(rf"(.{{{_MAX_LINE_LENGTH}}}).+")


class Tools:
    """The tools of an agent. The docstring of a tool is the description that the agent reads.

    Attributes:
        reading: the tools that only read captures.
        running: the tools that run programs.
    """

    def __init__(self, folders: Sequence[Path], error_type: type[Exception]) -> None:
        """Makes tools that read files only inside the given folders, and whose errors have the given type."""
        self._reader, self._error_type = ConfinedReader(folders, error_type), error_type
        self.reading = (
            self.explain, self.ask, self.figures, self.check, self.kernels, self.modules, self.operators, self.compare,
            self.what_if,
        )  # fmt: skip
        self.running = (self.capture, self.verify)

    def explain(self, path: _Paths, budget: int = 2000) -> str:
        """Explains in at most budget bytes why a step takes so long, which rank is late, and what would save time."""
        with self._load_evidence(path) as evidence:
            return _shorten_strings(write_ranked_answers(evidence, budget))

    def ask(self, path: _Paths, questions: list[str]) -> str:
        """Returns figures by their names, such as "gpu_busy_ms phase=forward", with the rows they are based on."""
        with self._load_evidence(path) as evidence:
            answers = Answers(tuple(answer_text(evidence, question) for question in questions))
        return _to_json(to_plain_data(answers))

    def figures(self) -> str:
        """Lists the figures that ask knows: the name and its arguments, the unit and the meaning."""
        return list_figures()

    def check(self, path: _Paths, text: str) -> str:
        """Checks whether lines in the words of ask or of a report are true. Other lines are not judged."""
        with self._load_evidence(path) as evidence:
            return _to_json(to_plain_data(check_claims(evidence, text)))

    def kernels(self, path: str, phase: str = "", kernel_class: str = "", top: int = 10) -> str:
        """Lists the kernels with the most time, of a phase or the whole capture, of one class or all."""
        with self._reader.open_copies(path) as (copy,):
            return _to_json(list_kernels(copy, phase or None, kernel_class or None, top))

    def modules(self, path: _Paths) -> str:
        """Lists the modules with the most time, in forward and backward. Layers of one kind share a row."""
        with self._load_evidence(path) as evidence:
            section = modules_section(evidence.captures)
        return _to_markdown(Report("The modules", (section,))) if section.blocks else str(NO_MODULES)

    def operators(self, path: _Paths, by: Literal["operator", "module", "line"] = "operator", top: int = 10) -> str:
        """Lists the operators, modules or lines of a step with the most kernel time above their attainable time."""
        with self._load_evidence(path) as evidence:
            return _to_json(operators_data(list_operators(evidence.captures, by, top)))

    def compare(self, before: str, after: str) -> str:
        """Compares two captures or folders of runs: what changed, whether by chance, and what explains the change."""
        with self._reader.open_copies([before, after]) as (copy_before, copy_after):
            comparisons = require_comparisons(compare_runs(load_runs(copy_before), load_runs(copy_after)))
            section = answer_comparison(comparisons, DEFAULT_THRESHOLD)
        return _to_markdown(Report(section.title, (replace(section, title=""),)))

    def what_if(
        self, path: _Paths, classes: dict[str, float] | None = None, ranges: dict[str, float] | None = None,
        launches: float | None = None, operators: dict[str, float | None] | None = None,
    ) -> str:  # fmt: skip
        """Predicts a step if kernel classes, ranges, launches or operators take a multiple of their time.

        The factor 0 removes them. The factor null shortens an operator to its attainable time.
        """
        question = WhatIfQuestion(classes or {}, ranges or {}, launches, operators=operators or {})
        if question == WhatIfQuestion():
            raise self._error_type("Give a change: classes, ranges, launches or operators")
        with self._load_evidence(path) as evidence:
            answers = to_plain_data(list(answer_all(evidence.captures, question)))
        return _to_json({"schema_version": SCHEMA_VERSION, "generator": GENERATOR, "what_if": answers})

    def capture(self, program: list[str], output_dir: str, modules: bool = False, timeout_s: float = 1800) -> str:
        """Runs a program, such as ["python", "train.py"], times it, records it into a folder, and reports."""
        options = [f"--output-dir={self._reader.resolve(output_dir)}", f"--timeout={timeout_s}", "--rerun"]
        return self._run_command("run", [*options, *["--modules"] * modules], program)

    def verify(
        self, before: str, program: list[str], old: str = "", finding: str = "", time_limit_s: float = 600
    ) -> str:  # fmt: skip
        """Measures whether a program is faster than the program captured in a folder, as a finding predicted."""
        options = [f"--before={old}"] * bool(old) + [f"--finding={finding}"] * bool(finding)
        words = [str(self._reader.resolve(before)), f"--time-limit={time_limit_s}", *options]
        return self._run_command("verify", words, program)

    @contextmanager
    def _load_evidence(self, path: _Paths) -> Iterator[Evidence]:
        """Yields the evidence, read from temporary copies of the captures at a path."""
        with self._reader.open_copies(path) as copies:
            yield make_evidence(gather(copies))

    def _run_command(self, command: str, words: list[str], program: list[str]) -> str:
        """Runs a command in a process of its own; returns the command's exit code and the end of its output."""
        if not program:
            raise self._error_type('There is no program: give its words, such as ["python", "train.py"]')
        line = [sys.executable, "-m", "nsys_analyzer", command, *words, "--", *program]
        process = subprocess.run(line, input="", capture_output=True, encoding="utf-8", errors="replace", check=False)
        return f"Exit code {process.returncode}\n{(process.stdout + process.stderr)[-_MAX_OUTPUT_LENGTH:]}"


def _to_json(data: Any) -> str:
    return _shorten_strings(format_json(data, indent=None))


def _shorten_strings(text: str) -> str:
    """Returns JSON whose long strings are shortened."""
    return _LONG_STRING.sub(r'"\1…"', text)


def _to_markdown(report: Report) -> str:
    """Returns a report as markdown whose long lines are shortened."""
    return _LONG_LINE.sub(r"\1…", markdown.render(report, {}))
