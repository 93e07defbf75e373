"""Answers questions about single figures, and ranks the most valuable answers for a budget of bytes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from nsys_analyzer.errors import CannotAnswerError, ConfigurationError
from nsys_analyzer.inputs.saved_reports import GENERATOR
from nsys_analyzer.questions.figure import Subject, evaluate
from nsys_analyzer.questions.named_figures import FIGURES
from nsys_analyzer.report.renderers.json_report import SCHEMA_VERSION, format_json, to_plain_data
from nsys_analyzer.text import plain

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun
    from nsys_analyzer.analysis.summary.summary import CaptureSummary
    from nsys_analyzer.report.evidence import Evidence

#: The arguments that select one process of several captures. Every question may have these arguments.
_SELECTING_ARGUMENTS = ("capture", "process", "rank")
#: The figures of a capture, the most valuable first. A figure with an argument is asked for each value of the argument.
_RANKED_FIGURES: tuple[tuple[str, str | None], ...] = (
    ("step_unprofiled_ms", None), ("step_estimated_ms", None), ("step_profiled_ms", None), ("attainable_ms", None),
    ("saves_ms", "finding"), ("step_idle_share", None), ("step_compute_ms", None), ("step_idle_ms", None),
    ("idle_cause_ms", "cause"), ("gpu", None), ("step_class_ms", "class"), ("busy_share", "phase"),
    ("unprofiled_ms", "phase"), ("wall_ms", "phase"), ("gpu_busy_ms", "phase"), ("top_kernel", "phase"),
    ("step_kernels", None), ("step_copy_ms", None), ("step_communication_ms", None), ("mfu", "phase"),
    ("softmax_ms", None), ("peak_memory_bytes", None), ("module_ms", "module"),
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A question: the name of a figure, and the arguments that select what the figure describes.

    Attributes:
        text: the question in the form in which a user types it.
    """

    name: str
    arguments: Mapping[str, str]
    text: str

    @classmethod
    def about(cls, name: str, **arguments: str) -> Question:
        """Returns the question about a figure with the given arguments."""
        return cls(name, arguments, " ".join((name, *(f"{key}={shlex.quote(arguments[key])}" for key in arguments))))


class CannotAnswer(msgspec.Struct, frozen=True):
    """The reason why a capture does not answer a question, and the command that would record the answer."""

    why: str
    needs: str


class AnswerSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rows that an answer rests on: rows of a table of nsys, or events of a category in a trace of PyTorch."""

    capture: str
    process: str | None = None
    table: str = ""
    rows: int = 0


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one question: a value, or the reason why there is none.

    Attributes:
        figure: the question that is answered.
        value: a number, the two bounds of a number, or a name.
        unit: ms, us, count, fraction, bytes, flop, tokens/s, J, W or text.
        of: a description of the value, such as "median of 5 instances of forward".
        title: the title of a finding, or the sentence on the slowest rank.
        remedy: lines of PyTorch that may fix a finding.
    """

    figure: str
    evidence: AnswerSource
    value: float | int | str | tuple[float, float] | None = None
    unit: str = ""
    of: str = ""
    title: str = ""
    remedy: tuple[str, ...] = ()
    cannot_answer: CannotAnswer | None = None


class Answers(msgspec.Struct, frozen=True):
    """The answers that ``ask`` and ``explain --budget`` write, and the number of answers that did not fit."""

    answers: tuple[Answer, ...]
    left_out: int = 0
    schema_version: int = SCHEMA_VERSION
    generator: str = GENERATOR


def ask(evidence: Evidence, text: str) -> Answer:
    """Returns the answer to a question as it is typed, such as ``gpu_busy_ms phase=forward``.

    Raises:
        ConfigurationError: there is no such figure, or the question lacks an argument or has an unknown one.
    """
    try:
        name, *pairs = shlex.split(text) or [""]
    except ValueError as error:
        raise ConfigurationError(f"{text} is not a question ({error})", "Close the quotation marks") from error
    if name not in FIGURES:
        nearest_names = get_close_matches(name, FIGURES, 1)
        suggestion = f"Did you mean {nearest_names[0]}? " if nearest_names else ""
        raise ConfigurationError(f"There is no figure {name!r}", f"{suggestion}nsys-analyze ask --list names them")
    arguments = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
    keys = (*FIGURES[name].keys, *_SELECTING_ARGUMENTS)
    if not {*FIGURES[name].needs} <= arguments.keys() <= {key.strip("[]") for key in keys}:
        raise ConfigurationError(f"{text!r} lacks an argument, or has an unknown one", f"Ask for {format_usage(name)}")
    return _answer_question(evidence, Question(name, arguments, text))


def _answer_question(evidence: Evidence, question: Question) -> Answer:
    """Returns the answer to a question about the run, or about the process that its arguments select."""
    if question.name == "saves_ms" and [*question.arguments] == ["finding"]:
        answers = [answer for run in evidence.runs for answer in _answers_of_run(evidence, run)]
        figure = f"saves_ms finding={question.arguments['finding']}"
        answers = [answer for answer in answers if answer.figure == figure]
        if len(answers) == 1:
            return answers[0]
    captures = []
    for capture in evidence.captures:
        capture_names = {
            "capture": (capture.name, capture.source),
            "process": (capture.process,),
            "rank": (str(capture.rank),),
        }
        if all(question.arguments.get(key) in (None, *capture_names[key]) for key in _SELECTING_ARGUMENTS):
            captures.append(capture)
    if len(captures) != 1:
        titles = ", ".join(capture.title for capture in captures or evidence.captures)
        why = f"The question matches {len(captures)} processes. There are: {titles}"
        needs = f"nsys-analyze ask CAPTURE '{question.text} capture=NAME process=NAME'"
        sources = ", ".join(dict.fromkeys(capture.source for capture in captures))
        return Answer(question.text, AnswerSource(sources), cannot_answer=CannotAnswer(why, needs))
    return _answer_for(captures[0], evidence, question)


def _answer_for(capture: CaptureSummary, evidence: Evidence, question: Question) -> Answer:
    """Returns the answer to a question about one process."""
    figure = FIGURES[question.name]
    sources = [(summary.source, summary.process) for summary in evidence.captures]
    is_unique = sources.count((capture.source, capture.process)) == 1
    source = capture.source if is_unique else f"{capture.name}/{capture.source}"
    try:
        value, reference, table, rows = evaluate(figure, Subject(capture, evidence.runs, question.arguments))
    except CannotAnswerError as error:
        reason = CannotAnswer(error.message, error.hint)
        return Answer(question.text, AnswerSource(source, capture.process), unit=figure.unit, cannot_answer=reason)
    rounded_value: float | str | tuple[float, float]
    if isinstance(value, tuple):
        rounded_value = (_round(value[0]), _round(value[1]))
    else:
        rounded_value = value if isinstance(value, str) else _round(value)
    answer_source = AnswerSource(source, capture.process, table, rows)
    for finding in capture.findings or ():
        if finding.id == question.arguments.get("finding"):
            return Answer(
                question.text, answer_source, rounded_value, figure.unit, reference, finding.title, finding.remedy
            )
    return Answer(question.text, answer_source, rounded_value, figure.unit, reference)


def _round(value: float) -> float:
    """Returns a number rounded to six digits, which is more than any measurement has."""
    rounded_value = float(f"{value:.6g}")
    return int(rounded_value) if rounded_value.is_integer() else rounded_value


def format_answer(answer: Answer) -> str:
    """Returns an answer as a line of text."""
    if answer.cannot_answer:
        needs = f". It needs: {answer.cannot_answer.needs}" if answer.cannot_answer.needs else "."
        return f"{answer.figure}: not known. {answer.cannot_answer.why}{needs}"
    value = answer.value if not isinstance(answer.value, tuple) else " to ".join(map(str, answer.value))
    unit = f" {answer.unit}" if answer.unit != "text" else ""
    source = f"{answer.evidence.rows:,} rows of {answer.evidence.table} in {answer.evidence.capture}"
    return f"{answer.figure} = {value}{unit}, {answer.of} ({source})"


def list_figures() -> str:
    """Returns the name of each figure with the arguments of a question, its unit and its meaning."""
    return "".join(f"{format_usage(name)}\n    {figure.unit}: {figure.doc}\n" for name, figure in FIGURES.items())


def format_usage(name: str) -> str:
    """Returns how a question about a figure is written: ``class_ms class=… [phase=…]``."""
    keys = (f"[{key[1:-1]}=…]" if key[0] == "[" else f"{key}=…" for key in FIGURES[name].keys)
    return " ".join((name, *keys))


def write_ranked_answers(evidence: Evidence, budget: int) -> str:
    """Returns the most valuable answers that fit into ``budget`` bytes of JSON, up to the first that does not fit."""
    ranked_answers = list(rank_answers(evidence))
    count = 0
    while count < len(ranked_answers) and len(_to_json(ranked_answers, count + 1)) <= budget:
        count += 1
    return _to_json(ranked_answers, count)


def _to_json(answers: list[Answer], count: int) -> str:
    """Returns JSON with the first ``count`` answers."""
    return format_json(to_plain_data(Answers(tuple(answers[:count]), len(answers) - count)), indent=None)


def rank_answers(evidence: Evidence) -> Iterator[Answer]:
    """Yields the answers about runs of ranks and about captures, the most valuable first.

    Questions without an answer follow, one for each capture and reason.
    """
    for run in evidence.runs:
        yield from _answers_of_run(evidence, run)
    answers_by_capture = (list(_answers_of_capture(evidence, capture)) for capture in evidence.captures)
    interleaved_answers = [answer for ranked in zip_longest(*answers_by_capture) for answer in ranked if answer]
    yield from (answer for answer in interleaved_answers if answer.cannot_answer is None)
    first_by_reason: dict[tuple[AnswerSource, str], Answer] = {}
    for answer in reversed(interleaved_answers):
        if answer.cannot_answer:
            first_by_reason[answer.evidence, answer.cannot_answer.why] = answer
    yield from reversed(first_by_reason.values())


def _answers_of_run(evidence: Evidence, run: ParallelRun) -> Iterator[Answer]:
    """Yields how late the slowest rank of a run is, and the savings of the findings about all ranks."""
    from nsys_analyzer.report.sections.ranks import (
        describe_late_rank,  # imported here, because only runs of several ranks need it
    )

    answer_source = AnswerSource(run.name)
    if rank := run.slowest_rank:
        arguments = {"capture": rank.capture, "process": rank.label}
        if rank.rank is not None:
            arguments["rank"] = str(rank.rank)
        answer = _answer_question(evidence, Question.about("late_ms", **arguments))
        if answer.cannot_answer is None:
            answer_source = replace(answer.evidence, capture=run.name)
            yield replace(answer, title=plain(describe_late_rank(run)))
    for finding in run.findings:
        saving = (_round(finding.saves_ms_low), _round(finding.saves_ms_high))
        title = ". ".join((finding.title, *map(plain, finding.evidence[:1])))
        figure = f"saves_ms finding={finding.id}"
        yield Answer(figure, answer_source, saving, "ms", "a step of all ranks, replayed", title, finding.remedy)


def _answers_of_capture(evidence: Evidence, capture: CaptureSummary) -> Iterator[Answer]:
    """Yields the answers about one process, the most valuable first."""
    values_of_arguments: dict[str, list[str]] = {
        "phase": [phase.phase for phase in capture.phases if phase.instances],
        "class": [row.kernel_class for row in capture.whole.classes] if capture.whole else [],
        "cause": [row.cause for row in capture.step.causes] if capture.step else [],
        "module": [module.path for module in capture.modules.modules] if capture.modules else ["MODULE"],
        "finding": [finding.id for finding in capture.findings or ()],
    }
    for name, argument in _RANKED_FIGURES:
        if argument is None:
            yield _answer_for(capture, evidence, Question.about(name))
            continue
        for value in values_of_arguments[argument]:
            yield _answer_for(capture, evidence, Question.about(name, **{argument: value}))
