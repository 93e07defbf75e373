"""One figure of a capture by its name, and the most valuable ones in so many bytes: what a program or an agent asks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from nsys_analyzer.errors import CannotAnswerError, ConfigurationError
from nsys_analyzer.questions.named_figures import FIGURES, Case, take, unit_of
from nsys_analyzer.report.renderers.json_report import GENERATOR, SCHEMA_VERSION, in_json, to_plain_data
from nsys_analyzer.text import plain

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun
    from nsys_analyzer.analysis.summary.summary import CaptureSummary
    from nsys_analyzer.report.evidence import Evidence

#: What tells the processes of several captures apart, in every question.
_CHOOSING = ("capture", "process", "rank")
#: The questions of a capture, the most valuable first; of a key with several values each one.
_RANKED = (
    "step_unprofiled_ms", "step_estimated_ms", "step_profiled_ms", "saves_ms finding", "step_idle_share",
    "step_compute_ms", "step_idle_ms", "idle_cause_ms cause", "gpu", "step_class_ms class", "busy_share phase",
    "unprofiled_ms phase", "wall_ms phase", "gpu_busy_ms phase", "top_kernel phase", "step_kernels", "step_copy_ms",
    "step_communication_ms", "mfu phase", "softmax_ms", "peak_memory_bytes", "module_ms module",
)  # fmt: skip


class CannotAnswer(msgspec.Struct, frozen=True):
    """Why a capture does not answer a question, and the command that would record what the answer needs."""

    why: str
    needs: str


class RestsOn(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rows that an answer rests on: of a table of nsys, or of a category of a trace's events."""

    capture: str
    process: str | None = None
    table: str = ""
    rows: int = 0


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one question: a value, or why there is none.

    Attributes:
        figure: the question.
        value: a number, two bounds, or a name.
        unit: ms, us, count, fraction, ratio, bytes, flop, tokens/s or text.
        of: what the value is of: "median of 5 instances of forward".
        title: the name of a finding, or whether the slowest rank is late.
        remedy: lines of PyTorch that may fix a finding.
    """

    figure: str
    evidence: RestsOn
    value: float | int | str | tuple[float, float] | None = None
    unit: str = ""
    of: str = ""
    title: str = ""
    remedy: tuple[str, ...] = ()
    cannot_answer: CannotAnswer | None = None


class Answers(msgspec.Struct, frozen=True):
    """What ``ask`` and ``explain --budget`` write: answers, and how many more had no room."""

    answers: tuple[Answer, ...]
    left_out: int = 0
    schema_version: int = SCHEMA_VERSION
    generator: str = GENERATOR


def ask(evidence: Evidence, question: str) -> Answer:
    """Returns the figure that a question names, as in ``gpu_busy_ms phase=forward``; or why there is none.

    Raises:
        ConfigurationError: there is no such figure, or the question lacks a word, or has one too many.
    """
    try:
        name, *pairs = shlex.split(question) or [""]
    except ValueError as error:
        raise ConfigurationError(f"{question} is no question ({error})", "Close the quotation marks") from error
    words = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
    if name not in FIGURES:
        near = get_close_matches(name, FIGURES, 1)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise ConfigurationError(f"There is no figure {name!r}", f"{meant}nsys-analyze ask --list names them")
    keys = keys_of(name)
    if not {key for key in keys if key[0] != "["} <= words.keys() <= {key.strip("[]") for key in keys}:
        raise ConfigurationError(f"{question!r} has a word too few or too many", f"Ask for {usage(name)}")
    if name == "saves_ms" and [*words] == ["finding"]:
        figure = f"saves_ms finding={words['finding']}"
        answers = [answer for run in evidence.runs for answer in _of_run(evidence, run) if answer.figure == figure]
        if len(answers) == 1:
            return answers[0]
    captures = [one for one in evidence.captures if _is_meant(one, words)]
    if len(captures) != 1:
        titles = ", ".join(one.title for one in captures or evidence.captures)
        why = f"{len(captures)} processes are meant, of: {titles}"
        needed = CannotAnswer(why, f"nsys-analyze ask CAPTURE '{question} capture=NAME process=NAME'")
        return Answer(question, RestsOn(", ".join(dict.fromkeys(one.source for one in captures))), cannot_answer=needed)
    return _answer(evidence, captures[0], words, name, question)


def in_words(answer: Answer) -> str:
    """Returns an answer as a line."""
    if answer.cannot_answer:
        needs = f". It needs: {answer.cannot_answer.needs}" if answer.cannot_answer.needs else "."
        return f"{answer.figure}: cannot be told. {answer.cannot_answer.why}{needs}"
    value = answer.value if not isinstance(answer.value, tuple) else " to ".join(map(str, answer.value))
    unit = f" {answer.unit}" if answer.unit != "text" else ""
    source = f"{answer.evidence.rows:,} rows of {answer.evidence.table} in {answer.evidence.capture}"
    return f"{answer.figure} = {value}{unit}, {answer.of} ({source})"


def _answer(evidence: Evidence, capture: CaptureSummary, words: Mapping[str, str], name: str, question: str) -> Answer:
    case, named = Case(capture, evidence.runs, words), FIGURES[name]
    is_alone = sum(one.source == capture.source and one.process == capture.process for one in evidence.captures) == 1
    source = capture.source if is_alone else f"{capture.name}/{capture.source}"
    try:
        value, of, table, rows = take(named, case)
    except CannotAnswerError as error:
        cannot = CannotAnswer(error.message, error.hint)
        return Answer(question, RestsOn(source, capture.process), unit=unit_of(name), cannot_answer=cannot)
    finding = next((one for one in capture.findings or () if one.id == case.words.get("finding")), None)
    more = (finding.title, finding.remedy) if finding else ("", ())
    short: float | str | tuple[float, float]
    short = (_rounded(value[0]), _rounded(value[1])) if isinstance(value, tuple) else value
    short = short if isinstance(short, str | tuple) else _rounded(short)
    return Answer(question, RestsOn(source, capture.process, table, rows), short, unit_of(name), of, *more)


def _rounded(value: float) -> float:
    """A number in six digits: no measurement has more."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() else rounded


def _is_meant(capture: CaptureSummary, words: Mapping[str, str]) -> bool:
    said = {"capture": (capture.name, capture.source), "process": (capture.process,), "rank": (str(capture.rank),)}
    return all(words[key] in said[key] for key in _CHOOSING if key in words)


def keys_of(name: str) -> tuple[str, ...]:
    """Returns the words of a question that follow a figure's name; in brackets those that it may do without."""
    return (*FIGURES[name].keys, *(f"[{key}]" for key in _CHOOSING))


def usage(name: str) -> str:
    """Returns how a question after a figure is written: ``class_ms class=… [phase=…]``."""
    keys = (f"[{key[1:-1]}=…]" if key[0] == "[" else f"{key}=…" for key in keys_of(name)[: -len(_CHOOSING)])
    return " ".join((name, *keys))


def values_of(capture: CaptureSummary, key: str) -> tuple[str, ...]:
    """Returns what a key may be in the questions of a capture: its phases, classes, causes, findings or modules."""
    if key == "phase":
        return tuple(one.phase for one in capture.phases if one.instances)
    if key == "class":
        return tuple(row.kernel_class for row in capture.whole.classes) if capture.whole else ()
    if key == "cause":
        return tuple(row.cause for row in capture.step.causes) if capture.step else ()
    if key == "module":
        return tuple(one.path for one in capture.modules.modules) if capture.modules else ("MODULE",)
    return tuple(one.id for one in capture.findings or ()) if key == "finding" else ()


def _of_run(evidence: Evidence, run: ParallelRun) -> Iterator[Answer]:
    """Yields which rank of a run is late, and what findings about all its ranks save."""
    from nsys_analyzer.report.sections.ranks import describe_late_rank  # captures of one rank need none of it

    late = RestsOn(run.name)
    if rank := run.slowest_rank:
        words = {"capture": rank.capture, "process": rank.label} | ({} if rank.rank is None else {"rank": rank.rank})
        conditions = (f"{key}={shlex.quote(str(word))}" for key, word in words.items())
        answer = ask(evidence, " ".join(("late_ms", *conditions)))
        if answer.cannot_answer is None:
            late = replace(answer.evidence, capture=run.name)
            yield replace(answer, title=plain(describe_late_rank(run)))
    for finding in run.findings:
        saves, of = (_rounded(finding.saves_ms_low), _rounded(finding.saves_ms_high)), "a step of all ranks, replayed"
        title = ". ".join((finding.title, *map(plain, finding.evidence[:1])))
        yield Answer(f"saves_ms finding={finding.id}", late, saves, "ms", of, title, finding.remedy)


def answers(evidence: Evidence) -> Iterator[Answer]:
    """Yields the answers of runs of ranks and captures, the most valuable first, then each unknown figure once."""
    for run in evidence.runs:
        yield from _of_run(evidence, run)
    by_capture = (list(_ranked(evidence, capture)) for capture in evidence.captures)
    in_turn = [answer for ranked in zip_longest(*by_capture) for answer in ranked if answer]
    yield from (answer for answer in in_turn if answer.cannot_answer is None)
    missing = {(a.evidence, a.cannot_answer.why): a for a in reversed(in_turn) if a.cannot_answer}
    yield from reversed(missing.values())


def _ranked(evidence: Evidence, capture: CaptureSummary) -> Iterator[Answer]:
    for question in _RANKED:
        name, _, key = question.partition(" ")
        for value in values_of(capture, key) if key else ("",):
            words = {key: value} if key else {}
            figure = " ".join((name, *(f"{key}={shlex.quote(value)}" for key, value in words.items())))
            yield _answer(evidence, capture, words, name, figure)


def brief(evidence: Evidence, budget: int) -> str:
    """Returns as many answers as fit into this many bytes of JSON; it stops at the first that does not fit."""
    ranked, count = list(answers(evidence)), 0
    while count < len(ranked) and len(_written(ranked, count + 1)) <= budget:
        count += 1
    return _written(ranked, count)


def _written(answers: list[Answer], count: int) -> str:
    return in_json(to_plain_data(Answers(tuple(answers[:count]), len(answers) - count)), indent=None)
