"""Checks the statements of a text against captures: each is true, false with the right figure, or not judged.

Two kinds of lines are judged. A line of ``ask`` (``gpu_busy_ms phase=forward = 9.04 ms``) is compared with the answer
to its question. A sentence or a table row of the report is compared with the report of these captures: its words must
equal the report's words letter by letter, and each of its numbers is judged. Other English is not understood. So a line
that contains other words is not judged, and neither is a sentence that continues in other words on the line above or
below.
"""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Literal, NamedTuple

import msgspec

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.inputs.saved_reports import GENERATOR
from nsys_analyzer.questions.ask import Answer, CannotAnswer, ask, format_answer
from nsys_analyzer.questions.named_figures import FIGURES
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Answer as AnswerBlock
from nsys_analyzer.report.model import Block, Details, Listing, Paragraph, Report, StepBars, Table, TimelineLink
from nsys_analyzer.report.renderers.json_report import SCHEMA_VERSION
from nsys_analyzer.report.renderers.step_bar import bar_lines, legend_entries, part_letter
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.report.units import format_cell
from nsys_analyzer.text import StrOrText, plain, spans, visible

_DIGITS = r"[−+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
_NUMBER = re.compile(rf"(?<![\w.]){_DIGITS}(?!\w|[.,][0-9])")
#: The markup that markdown adds to the words of a report: links and pictures, marks and folds, bullets, headings.
_LINK = re.compile(r"(?<!\\)!?\[([^\]]{1,500})\]\([^)\s]{1,500}\)")
_MARKUP = re.compile(r"[`*\\]|</?(?:details|summary)>")
_BULLET, _HEADING = re.compile(r"^\s*[-*•]\s+(?![\d\s≈])"), re.compile(r"^\s*#{1,6}\s")
_COMMENT, _FENCE_OF_CODE = re.compile(r"\s*<!--.*-->\s*"), re.compile(r"\s*```+\s*\w")
#: Matches the space between two sentences of a paragraph. The number in "1. The GPU …" does not end a sentence.
_SENTENCE_BREAK = re.compile(r"(?<=[^\d\s][.!?])\s+(?=[A-Z0-9\"'≈(])")
#: The separators of cells in markdown, in text copied from a page, and on a terminal.
_CELL_BREAK = re.compile(r"\s*(?<!\\)\|\s*|\t|\s{2,}")
#: The endings of a line that announces the text below it, and of a line that completes a sentence.
_LEAD_IN_ENDS, _SENTENCE_ENDS = tuple(":：,;，；(“\"«„'"), (".", "!", "?", "…")
#: The limits of the search for a sentence that a terminal broke over several lines: the lines of one paragraph, and the
#: joins of lines in one text. Without these limits, a hostile text would take too long.
_MAX_PARAGRAPH_LINES, _MAX_LINE_JOINS = 60, 20_000
#: The number of characters at the start of a line that are looked up first among the starts of all report sentences.
_PREFIX_LENGTH = 8
_MAX_SENTENCES_SHOWN, _MAX_BAR_WIDTH = 5, 1000
_ASK_LINE = re.compile(r"((\w+)(?: \w+=(?:'[^']*'|\"[^\"]*\"|\S+?))*)(?: =|:) (.+)")
_VALUE_WITH_UNIT = re.compile(rf"({_DIGITS}(?:e-?[0-9]{{1,2}})?)(?: to ({_DIGITS}(?:e-?[0-9]{{1,2}})?))? (\S+)")
_NOT_IN_REPORT = CannotAnswer(
    "The text is neither a line of ask nor a sentence of the report of these captures",
    "a line NAME = VALUE UNIT, as nsys-analyze ask prints it, or a sentence in the report's own words",
)
_SEVERAL_SUBJECTS = CannotAnswer(
    "The report makes this statement about several subjects", "the name of the capture or finding above it"
)
_OTHER_DIGITS_OR_UNIT = CannotAnswer("A figure has too few digits or another unit", "nsys-analyze ask")
_CONTINUED_BY_OTHER_TEXT = CannotAnswer("The sentence is part of a text that is not judged", "a paragraph of its own")


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line or sentence of a text, with its verdict.

    Attributes:
        text: the words of the line or sentence.
        holds: whether the text is true of the captures; null if the text is not judged.
        answers: the answer to the question of a line of ``ask``.
        report: the report's sentences or rows in these words, if the figures of the text are false.
        cannot_answer: why the text is not judged.
    """

    text: str
    holds: bool | None
    answers: tuple[Answer, ...] = ()
    report: tuple[str, ...] = ()
    cannot_answer: CannotAnswer | None = None


class Claims(msgspec.Struct, frozen=True):
    """The claims of a text in order, in the form that ``check`` writes."""

    claims: tuple[Claim, ...]
    schema_version: int = SCHEMA_VERSION
    generator: str = GENERATOR


_SentenceKind = Literal["sentence", "title", "heading"]


class _ReportSentence(NamedTuple):
    """A sentence of the report.

    Attributes:
        capture: the capture that the sentence is about, or empty.
        title_id: the number of the title above the sentence, if the sentence needs the title to be understood, else 0.
        kind: "title" for a title with a number, and "heading" for a line that makes no statement.
    """

    text: str
    capture: str
    title_id: int
    kind: _SentenceKind


class _ReportTable(NamedTuple):
    """A table of the report, with the sentence before the table and the number of the title above the table."""

    table: Table
    preceding_sentence: str
    title_id: int


class _TextPart(NamedTuple):
    """Lines of the text that belong together. A part of the kind "other" is not in the words of ask or the report."""

    text: str
    kind: Literal["other", "blank", "heading", "sentences", "line"] = "other"
    claims: tuple[Claim, ...] = ()


def check(evidence: Evidence, text: str) -> Claims:
    """Returns each line or sentence of a text with the verdict on whether it is true of the captures."""
    parts = [_TextPart("", "blank"), *_TextReader(evidence).parts(text), _TextPart("", "blank")]
    claims: list[Claim] = []
    follows_lead_in = False
    for part_above, part, part_below in zip(parts, parts[1:], parts[2:], strict=False):
        if part.kind == "other" or _HEADING.match(part.text):
            follows_lead_in = part.kind == "other" and _remove_markup(part.text).endswith(_LEAD_IN_ENDS)
        if part.kind == "other" and re.search(r"\w", part.text):
            claims.append(Claim(" ".join(part.text.split()), None, cannot_answer=_NOT_IN_REPORT))
        elif follows_lead_in or _continues_in_other_text(part_above, part, part_below):
            claims += [Claim(claim.text, None, cannot_answer=_CONTINUED_BY_OTHER_TEXT) for claim in part.claims]
        else:
            claims += part.claims
    return Claims(tuple(claims))


def _continues_in_other_text(part_above: _TextPart, part: _TextPart, part_below: _TextPart) -> bool:
    """Tells whether a sentence of a part begins in unrecognized words above the part, or continues in those below."""
    words_above, words_below = map(_unrecognized_words, (part_above, part_below))
    next_character = "" if _BULLET.match(part_below.text) else words_below[:1]
    if next_character and not next_character.isalnum():
        return True
    if part.kind != "sentences":
        return False
    if words_above and not words_above.endswith(_SENTENCE_ENDS) and not _BULLET.match(part.text):
        return True
    is_complete = _remove_markup(part.text).endswith(_SENTENCE_ENDS)
    return bool(next_character) and not is_complete and not next_character.isupper() and not next_character.isdigit()


def _unrecognized_words(part: _TextPart) -> str:
    """Returns the words of a part that is not recognized, unless it is a heading or a table row."""
    is_separate_text = part.kind != "other" or _HEADING.match(part.text) or len(_CELL_BREAK.split(part.text)) > 2
    return "" if is_separate_text else _remove_markup(part.text)


class _ReportIndex:
    """An index of the report of captures: the sentences by their words without numbers, the tables, and the bars."""

    def __init__(self, report: Report, captures: Collection[str]) -> None:
        self.captures = captures
        self.sentences: dict[str, list[_ReportSentence]] = defaultdict(list)
        self.tables: list[_ReportTable] = []
        self.bars: list[StepBars] = []
        self.prefixes: set[str] = set()
        self._title_count, self._last_sentence = 0, ""
        self._add_title(report.title, report.title if report.title in captures else "", 0)
        for section in report.sections:
            self._add_title(section.title, "", 0)
            self._add_blocks(section.blocks, "", 0)

    def find_sentences(self, text: str) -> Sequence[_ReportSentence]:
        """Returns the report's sentences that equal a text except for their numbers."""
        return self.sentences.get(_remove_numbers(text)) or self.sentences.get(_remove_spaces(text)) or ()

    def _add_blocks(self, blocks: Sequence[Block], capture: str, title_id: int) -> None:
        """Adds the words of blocks that are about a capture, below a title."""
        for block in blocks:
            subject = getattr(block, "capture", "") or capture
            match block:
                case Paragraph(text) if [span.kind for span in spans(text)] == ["strong"]:
                    title_id = self._add_title(plain(text), subject, 0)
                case Paragraph(text) | AnswerBlock(text):
                    self._add_sentences(text, subject, title_id)
                case Listing(texts, kind):
                    for text in texts:
                        self._add_sentences(text, subject, title_id, "sentence" if kind == "bullets" else "heading")
                case Details(title, inner):
                    self._add_blocks(inner, subject, self._add_title(title, subject, title_id))
                case Table(caption=caption):
                    if caption:
                        self._add_sentences(caption, subject, title_id)
                    self.tables.append(_ReportTable(block, self._last_sentence, title_id))
                case StepBars(parts, rows, title, note):
                    self.bars.append(block)
                    for row in rows:  # a browser copies the names of a bar's parts without spaces
                        part_names = "".join(part for part, ms in zip(parts, row.ms, strict=True) if ms)
                        self._add_sentences(part_names, subject, title_id, "heading")
                    legend = list(legend_entries(block, [sum(row.ms) for row in rows]))
                    terminal_line = " ".join([title, *(f"{part_letter(part)} {entry}" for part, entry in legend)])
                    # On a terminal, the title and the legend share one line; on a page, they are separate.
                    for text in (terminal_line, title, *(entry for _, entry in legend), note):
                        self._add_sentences(text, subject, title_id)
                case TimelineLink():
                    pass
                case _:
                    self._add_sentences(block.title, subject, title_id, "heading")

    def _add_title(self, title: str, capture: str, title_id: int) -> int:
        """Adds a title, and returns the title's number for the blocks below: a new number if the title has a figure."""
        if title in self.captures or not _NUMBER.search(title):
            title_id = 0 if title in self.captures else title_id
            self._add_sentences(title, capture, title_id, "heading")
            return title_id
        self._title_count += 1
        self._add_sentences(title, capture, self._title_count, "title")
        return self._title_count

    def _add_sentences(self, text: StrOrText, capture: str, title_id: int, kind: _SentenceKind = "sentence") -> None:
        """Adds the sentences of a text by their words, with and without their numbers."""
        words = _remove_markup(
            _HEADING.sub("", visible(plain(text)))
        )  # a Python comment looks like a heading of markdown
        for sentence in _SENTENCE_BREAK.split(words) if kind == "sentence" else [words]:
            self._last_sentence = _remove_spaces(sentence)
            # A terminal may break a long name anywhere, even between two digits.
            without_numbers = self._last_sentence if kind == "heading" else _remove_numbers(sentence)
            for key in {self._last_sentence, without_numbers}:
                self.sentences[key].append(_ReportSentence(sentence, capture, title_id, kind))
                self.prefixes.add(key[:_PREFIX_LENGTH])


class _TextReader:
    """Compares a text with the report of captures; remembers the capture, title and table that the text is about."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._report = _ReportIndex(build_report(evidence), {capture.title for capture in evidence.captures})
        self._capture, self._last_sentence, self._joins = "", "", 0
        self._titles: Collection[int] = ()
        self._tables: Sequence[Table] = ()

    def parts(self, text: str) -> Iterator[_TextPart]:
        """Yields the parts of a text in order."""
        text_lines = text.splitlines()
        line_index, in_code = 0, False
        while line_index < len(text_lines):
            line = text_lines[line_index]
            is_fence = _FENCE_OF_CODE.match(line) or (in_code and line.strip().startswith("```"))
            if in_code or is_fence or not _remove_markup(line).strip("|:- ") or _COMMENT.fullmatch(line):
                in_code = in_code != bool(is_fence)
                self._tables = self._tables if "-" in line else ()
                part, count = _TextPart("", "blank"), 1
            else:
                part, count = self._recognize_part(text_lines[line_index : line_index + _MAX_PARAGRAPH_LINES])
            line_index += count
            yield part

    def _recognize_part(self, text_lines: Sequence[str]) -> tuple[_TextPart, int]:
        """Returns the part that begins with the first of these lines, and the number of lines in it."""
        line = text_lines[0]
        if part := self._read_ask_line(line) or self._read_table_row(line) or self._read_bar(line):
            return part, 1
        start = _remove_numbers(_remove_markup(_HEADING.sub("", _BULLET.sub("", line))))[:_PREFIX_LENGTH]
        is_unknown = len(start) == _PREFIX_LENGTH and start not in self._report.prefixes
        text_lines = text_lines[:1] if is_unknown or self._joins > _MAX_LINE_JOINS else text_lines
        for end in range(1, len(text_lines) + 1):
            if end > 1 and (not _remove_markup(text_lines[end - 1]) or _BULLET.match(text_lines[end - 1])):
                break
            self._joins += end > 1
            if part := self._read_sentences("\n".join(text_lines[:end])):
                return part, end
        self._titles = () if _HEADING.match(line) else self._titles
        return _TextPart(line), 1

    def _read_ask_line(self, line: str) -> _TextPart | None:
        """Returns the claim of a line of ``ask``."""
        words = _remove_markup(_BULLET.sub("", line))
        parts = _ASK_LINE.fullmatch(words)
        if parts is None or parts[2] not in FIGURES:
            return None
        try:
            answer = ask(self._evidence, parts[1])
        except ConfigurationError as error:
            return _TextPart(line, "line", (Claim(words, None, cannot_answer=CannotAnswer(error.message, error.hint)),))
        correct_line = _remove_markup(format_answer(answer))
        # ", median of 5 instances (…)", which a text may leave out
        source = correct_line.partition(f" {answer.unit}")[2]
        holds = None if answer.cannot_answer else _judge_value(parts[3].removesuffix(".").removesuffix(source), answer)
        if correct_line in (words, words.removesuffix(".")):
            holds = True
        why = (answer.cannot_answer or _OTHER_DIGITS_OR_UNIT) if holds is None else None
        return _TextPart(line, "line", (Claim(words, holds, (answer,), cannot_answer=why),))

    def _read_table_row(self, line: str) -> _TextPart | None:
        """Returns the claim of a table row below the titles of its columns; a heading for the row of titles."""
        stripped = line.strip(" ").removeprefix("|").removesuffix("|").strip(" ")
        cells = [*map(_remove_markup, _CELL_BREAK.split(stripped))]
        if len(cells) < 2:
            return None
        candidates = [table for table in self._report.tables if self._may_be_about(table.table.capture, table.title_id)]
        tables = [
            table for table in candidates if _begins_with(cells, [column.title for column in table.table.columns])
        ]
        if tables:
            tables_below_sentence = [table for table in tables if table.preceding_sentence == self._last_sentence]
            self._tables = [table.table for table in tables_below_sentence or tables]
            return _TextPart(line, "heading")
        verdicts: dict[bool | None, list[str]] = defaultdict(list)
        for table in self._tables:
            units = [column.unit for column in table.columns]
            for row in table.rows:
                reported_cells = [_remove_markup(visible(plain(text))) for text in map(format_cell, row, units)]
                if len(cells) <= len(reported_cells) and _begins_with(cells[: table.names], reported_cells):
                    verdicts[_combine_verdicts(map(_judge_cell, cells, reported_cells))].append(
                        " | ".join(reported_cells)
                    )
        claim = _make_claim(" ".join(line.split()), verdicts, has_one_subject=len(self._tables) == 1)
        return _TextPart(line, "line", (claim,)) if verdicts else None

    def _read_bar(self, line: str) -> _TextPart | None:
        """Returns a heading if the line is a bar that the report draws; the figures of a bar are in its legend."""
        for bars in self._report.bars if len(line) <= _MAX_BAR_WIDTH else ():
            for _, strokes in zip(bars.rows, bar_lines(bars, len(line)), strict=False):
                if "".join(stroke.text for stroke in strokes).rstrip() == line.rstrip():
                    return _TextPart(line, "heading")
        return None

    def _read_sentences(self, text: str) -> _TextPart | None:
        """Returns the claims of a text that consists only of sentences of the report; else None."""
        pieces = _SENTENCE_BREAK.split(_remove_markup(_HEADING.sub("", _BULLET.sub("", text))))
        sentences: list[tuple[str, Sequence[_ReportSentence]]] = []
        while pieces:
            for count in range(len(pieces), 0, -1):
                words = " ".join(pieces[:count])
                if matches := self._report.find_sentences(words):
                    sentences.append((words, matches))
                    pieces = pieces[count:]
                    break
            else:
                return None
        self._last_sentence = _remove_spaces(sentences[-1][0])
        claims = tuple(claim for words, matches in sentences if (claim := self._judge_sentence(words, matches)))
        return _TextPart(text, "sentences" if claims else "heading", claims)

    def _judge_sentence(self, words: str, matches: Sequence[_ReportSentence]) -> Claim | None:
        """Returns the claim that a sentence of an answer makes.

        Args:
            words: the sentence of the answer.
            matches: the sentences of the report that the words match. If all of them are headings, the words make no
                claim, and the result is None.
        """
        if all(sentence.kind == "heading" for sentence in matches):
            is_of_capture = any(sentence.capture for sentence in matches)
            self._capture = words if words in self._report.captures else self._capture if is_of_capture else ""
            self._titles = self._titles if any(sentence.title_id for sentence in matches) else ()
            return None
        verdicts: dict[bool | None, list[str]] = defaultdict(list)
        subjects, titles = set(), []
        for text, capture, title_id, kind in matches:
            needed_title = 0 if kind == "title" else title_id
            if self._may_be_about(capture, needed_title):
                holds = _judge_numbers(words, text)
                verdicts[holds].append(text)
                subjects.add((capture, needed_title))
                titles += [title_id if holds else -1] if kind == "title" else []
        self._titles = titles or self._titles
        return _make_claim(words, verdicts, has_one_subject=len(subjects) == 1)

    def _may_be_about(self, capture: str, title_id: int) -> bool:
        """Tells whether the text may be about this capture and title; an empty capture and a title of 0 always fit."""
        is_of_capture = not self._capture or capture in ("", self._capture)
        return is_of_capture and (not self._titles or title_id in (0, *self._titles))


def _make_claim(text: str, verdicts: Mapping[bool | None, Sequence[str]], *, has_one_subject: bool) -> Claim:
    """Returns the claim of a text from the verdicts on its numbers, each with its sentences or rows of the report."""
    if set(verdicts) == {True} or (True in verdicts and has_one_subject):
        return Claim(text, True)
    if set(verdicts) == {False}:
        return Claim(text, False, report=tuple(dict.fromkeys(verdicts[False]))[:_MAX_SENTENCES_SHOWN])
    why = _SEVERAL_SUBJECTS if True in verdicts else _OTHER_DIGITS_OR_UNIT if verdicts else _CONTINUED_BY_OTHER_TEXT
    return Claim(text, None, cannot_answer=why)


def _judge_value(value: str, answer: Answer) -> bool | None:
    """Tells whether a value equals the value of an answer; None if the unit, digits or number of values differ."""
    if isinstance(answer.value, str):
        name = _remove_markup(answer.value)
        return True if value == name else None if name in value else False
    answered = answer.value if isinstance(answer.value, tuple) else (answer.value,)
    match = _VALUE_WITH_UNIT.fullmatch(value)
    numbers = [number for number in match.groups()[:2] if number] if match else []
    if match is None or match[3] != answer.unit or len(numbers) != len(answered):
        return None
    return _combine_verdicts(map(_judge_number, numbers, map(str, answered)))


def _judge_cell(cell: str, reported: str) -> bool | None:
    """Tells whether a cell agrees with the report. A bar makes no statement; a terminal may shorten a long name."""
    if not reported.strip("\N{DARK SHADE}") or _is_same_or_shortened(cell, reported):
        return True
    return _judge_numbers(cell, reported) if _remove_numbers(cell) == _remove_numbers(reported) else None


def _begins_with(cells: Sequence[str], reported: Sequence[str]) -> bool:
    """Tells whether a row of the report begins with these cells, which a terminal may have shortened."""
    return len(cells) <= len(reported) and all(map(_is_same_or_shortened, cells, reported))


def _is_same_or_shortened(cell: str, reported: str) -> bool:
    """Tells whether a cell is the reported cell, its beginning, or the end of a path with a line number."""
    cell, full_cell = _remove_spaces(cell), _remove_spaces(reported)
    is_path_end = cell.startswith("…") and ":" in cell and full_cell.endswith(cell[1:])
    return cell == full_cell or is_path_end or (cell.endswith("…") and full_cell.startswith(cell[:-1]))


def _judge_numbers(text: str, reported: str) -> bool | None:
    """Tells whether the numbers of a text agree with those of a text of the report that has the same words."""
    if _remove_spaces(text) == _remove_spaces(reported):
        return True
    numbers, reported_numbers = _NUMBER.findall(text), _NUMBER.findall(reported)
    # The counts differ if the text itself contains the placeholder for a number.
    if len(numbers) != len(reported_numbers):
        return None
    return _combine_verdicts(map(_judge_number, numbers, reported_numbers))


def _judge_number(number: str, reported: str) -> bool | None:
    """Tells whether a number equals the reported number, exactly or rounded to two digits or more.

    Returns None if the number is the reported number rounded to a single digit.
    """
    value, reported_value = (Decimal(text.replace(",", "").replace("−", "-")) for text in (number, reported))
    places, reported_places = (-int(decimal.as_tuple().exponent) for decimal in (value, reported_value))
    if value == reported_value:
        return True
    if abs(value - reported_value) * 2 > Decimal(1).scaleb(-min(places, reported_places)):
        return False
    return True if places < reported_places and len(value.as_tuple().digits) > 1 else None


def _combine_verdicts(verdicts: Iterable[bool | None]) -> bool | None:
    """Returns False if any verdict is False, else None if any verdict is None, else True."""
    distinct_verdicts = set(verdicts)
    return False if False in distinct_verdicts else None if None in distinct_verdicts else True


def _remove_markup(text: str) -> str:
    """Returns a text on one line, without markup."""
    text = html.unescape(text) if "<summary>" in text else text
    return " ".join(_MARKUP.sub("", _LINK.sub(r"\1", text)).split())


def _remove_spaces(text: str) -> str:
    """Returns a text without its white space."""
    return "".join(text.split())


def _remove_numbers(text: str) -> str:
    """Returns the text without spaces, with a placeholder for each number."""
    return _remove_spaces(_NUMBER.sub("\0", text))
