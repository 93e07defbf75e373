"""Whether captures hold what a text says: true, false with the right figure, or not judged.

Two kinds of lines are judged, and nothing else. A line of ``ask`` (``gpu_busy_ms phase=forward = 9.04 ms``) is compared
with the answer to its question. A sentence or a row of a table that the report of these captures writes is compared
with the report: its words must be the report's, letter by letter, and its numbers are judged one by one. English is
not understood. So a line that holds anything besides is not judged, nor a sentence that goes on in words beside it.
"""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from typing import Literal, NamedTuple

import msgspec

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.report.ask import Answer, CannotAnswer, ask, in_words
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Answer as Quotable
from nsys_analyzer.report.model import Block, Details, Listing, Paragraph, Report, Seen, StepBars, Table
from nsys_analyzer.report.named_figures import FIGURES
from nsys_analyzer.report.renderers.json_report import GENERATOR, SCHEMA_VERSION
from nsys_analyzer.report.renderers.step_bar import legend, letter_of, lines
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.report.units import format_cell
from nsys_analyzer.text import Words, plain, spans, visible

_DIGITS = r"[−+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
_NUMBER = re.compile(rf"(?<![\w.]){_DIGITS}(?!\w|[.,][0-9])")
#: What markdown puts around the words of a report: links and pictures, marks and folds, an item's bullet.
_LINK = re.compile(r"(?<!\\)!?\[([^\]]{1,500})\]\([^)\s]{1,500}\)")
_MARKS = re.compile(r"[`*\\]|</?(?:details|summary)>")
_BULLET, _HEADING = re.compile(r"^\s*[-*•]\s+(?![\d\s≈])"), re.compile(r"^\s*#{1,6}\s")
_COMMENT, _FENCE_OF_CODE = re.compile(r"\s*<!--.*-->\s*"), re.compile(r"\s*```+\s*\w")
#: Between two sentences of a paragraph; behind a number at its start ("1. The GPU …") there are none.
_BETWEEN = re.compile(r"(?<=[^\d\s][.!?])\s+(?=[A-Z0-9\"'≈(])")
#: Between the cells of a row, in markdown, copied from a page, and on a terminal.
_CELLS = re.compile(r"\s*(?<!\\)\|\s*|\t|\s{2,}")
#: How a line ends whose words lead to what comes below it, and how one ends that is whole.
_LEADS, _WHOLE = tuple(":：,;，；(“\"«„'"), (".", "!", "?", "…")
#: Lines over which a terminal breaks a paragraph at most, letters of one, and letters that tell how a sentence starts.
_MOST_LINES, _WIDEST, _START = 60, 1000, 8
#: How often lines of one text are joined to find a sentence that is broken over them.
_MOST_JOINS = 20_000
#: Sentences of the report that a false one is shown with at most.
_MOST_SHOWN = 5
_ASKED = re.compile(r"((\w+)(?: \w+=(?:'[^']*'|\"[^\"]*\"|\S+?))*)(?: =|:) (.+)")
_VALUE = re.compile(rf"({_DIGITS}(?:e-?[0-9]{{1,2}})?)(?: to ({_DIGITS}(?:e-?[0-9]{{1,2}})?))? (\S+)")
_UNKNOWN_WORDS = CannotAnswer(
    "It is neither a line of ask nor a sentence that the report of these captures writes",
    "a line NAME = VALUE UNIT, as nsys-analyze ask prints it, or a sentence in the report's own words",
)
_AMBIGUOUS = CannotAnswer("The report says this of several things", "the name of the capture or finding above it")
_OTHER_DIGITS = CannotAnswer("It is not written as closely as it is known, or in another unit", "nsys-analyze ask")
_GOES_ON = CannotAnswer("It is a part of words that are not judged", "a paragraph of its own")


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a text, or a sentence of one.

    Attributes:
        text: its words.
        holds: whether the captures hold it; null where that is not judged.
        answers: the answer to the question of a line of ``ask``.
        report: what the report says in these words, where the figures of the text are others.
    """

    text: str
    holds: bool | None
    answers: tuple[Answer, ...] = ()
    report: tuple[str, ...] = ()
    cannot_answer: CannotAnswer | None = None


class Claims(msgspec.Struct, frozen=True):
    """What ``check`` writes: the claims of a text in order."""

    claims: tuple[Claim, ...]
    schema_version: int = SCHEMA_VERSION
    generator: str = GENERATOR


class _Sentence(NamedTuple):
    """A sentence of the report.

    Attributes:
        capture: the one that it tells of, or empty.
        below: the number of the title that it stands below and needs to be understood, or 0.
        kind: whether it is such a title, or claims nothing.
    """

    text: str
    capture: str
    below: int
    kind: Literal["sentence", "title", "heading"]


class _Table(NamedTuple):
    """A table of the report: what stands above it, the number of the title that it stands below, its titles."""

    table: Table
    above: str
    below: int
    titles: tuple[str, ...]


class _Part(NamedTuple):
    """Lines of the text that belong together; "other" are those that are not recognised."""

    text: str
    kind: Literal["other", "blank", "heading", "sentences", "line"] = "other"
    claims: tuple[Claim, ...] = ()


def check(evidence: Evidence, text: str) -> Claims:
    """Returns each line or sentence of a text, with whether the captures hold it."""
    parts = [_Part("", "blank"), *_Reader(evidence).parts(text), _Part("", "blank")]
    claims: list[Claim] = []
    is_led = False
    for before, part, after in zip(parts, parts[1:], parts[2:], strict=False):
        if part.kind == "other" or _HEADING.match(part.text):
            is_led = part.kind == "other" and _bare(part.text).endswith(_LEADS)
        if part.kind == "other" and re.search(r"\w", part.text):
            claims.append(Claim(" ".join(part.text.split()), None, cannot_answer=_UNKNOWN_WORDS))
        elif is_led or _goes_on(before, part, after):
            claims += [Claim(claim.text, None, cannot_answer=_GOES_ON) for claim in part.claims]
        else:
            claims += part.claims
    return Claims(tuple(claims))


def _goes_on(before: _Part, part: _Part, after: _Part) -> bool:
    """Tells whether a part goes on in lines beside it that are not recognised."""
    beside = []
    for line in (before, after):
        is_apart = line.kind != "other" or _HEADING.match(line.text) or len(_CELLS.split(line.text)) > 2
        beside.append("" if is_apart else _bare(line.text))
    above, below = beside[0], "" if _BULLET.match(after.text) else beside[1]
    if part.kind != "sentences" or (below and not below[0].isalnum()):
        return bool(below) and not below[0].isalnum()
    is_whole = _bare(part.text).endswith(_WHOLE)
    starts_above = bool(above) and not above.endswith(_WHOLE) and not _BULLET.match(part.text)
    return starts_above or (bool(below) and not is_whole and not below[0].isupper() and not below[0].isdigit())


class _Written:
    """What the report of captures says: its sentences by their words without numbers, its tables and bars."""

    def __init__(self, report: Report, captures: Collection[str]) -> None:
        self.captures = captures
        self.sentences: dict[str, list[_Sentence]] = defaultdict(list)
        self.tables: list[_Table] = []
        self.bars: list[StepBars] = []
        self.starts: set[str] = set()
        self._count_of_titles, self._last = 0, ""
        self._add_title(report.title, report.title if report.title in captures else "", 0)
        for section in report.sections:
            self._add_title(section.title, "", 0)
            self._add_blocks(section.blocks, "", 0)

    def same(self, text: str) -> Sequence[_Sentence]:
        """Returns the sentences that have the words of a text, whatever their numbers are."""
        return self.sentences.get(_words(text)) or self.sentences.get(_letters(text)) or ()

    def _add_blocks(self, blocks: Sequence[Block], capture: str, below: int) -> None:
        """Keeps what blocks say, of a capture, below a title."""
        for block in blocks:
            of = getattr(block, "capture", "") or capture
            match block:
                case Paragraph(text) if [span.kind for span in spans(text)] == ["strong"]:
                    below = self._add_title(plain(text), of, 0)
                case Paragraph(text) | Quotable(text):
                    self._add(text, of, below)
                case Listing(texts, kind):
                    for text in texts:
                        self._add(text, of, below, "sentence" if kind == "bullets" else "heading")
                case Details(title, inner):
                    self._add_blocks(inner, of, self._add_title(title, of, below))
                case Table(columns, caption=caption):
                    if caption:
                        self._add(caption, of, below)
                    self.tables.append(_Table(block, self._last, below, tuple(column.title for column in columns)))
                case StepBars(parts, rows, title, note):
                    self.bars.append(block)
                    keys = list(legend(block, [sum(row.ms) for row in rows]))
                    drawn = (f"{letter_of(part)} {key}" for part, key in keys)
                    for key in (" ".join([title, *drawn]), title, *(key for _, key in keys), note):  # a page has each
                        self._add(key, of, below)
                    for row in rows:
                        names = (part for part, ms in zip(parts, row.ms, strict=True) if ms)
                        self._add("".join(names), of, below, "heading")
                case Seen():
                    pass
                case _:
                    self._add(block.title, of, below, "heading")

    def _add_title(self, title: str, capture: str, below: int) -> int:
        """Keeps a title, and returns the number of what stands below it: a new one if it holds a figure."""
        if title in self.captures or not _NUMBER.search(title):
            below = 0 if title in self.captures else below
            self._add(title, capture, below, "heading")
            return below
        self._count_of_titles += 1
        self._add(title, capture, self._count_of_titles, "title")
        return self._count_of_titles

    def _add(
        self, text: Words, capture: str, below: int, kind: Literal["sentence", "title", "heading"] = "sentence"
    ) -> None:
        words = _bare(_HEADING.sub("", visible(plain(text))))  # a comment in code looks like a heading
        for sentence in _BETWEEN.split(words) if kind == "sentence" else [words]:
            self._last = _letters(sentence)
            # A terminal may break a long name anywhere, also between two digits.
            for key in {self._last} if kind == "heading" else {self._last, _words(sentence)}:
                self.sentences[key].append(_Sentence(sentence, capture, below, kind))
                self.starts.add(key[:_START])


class _Reader:
    """Reads a text beside the report of captures, and keeps which capture, title and table it was last about."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._report = _Written(build_report(evidence), {capture.title for capture in evidence.captures})
        self._capture, self._last, self._joins = "", "", 0
        self._titles: Collection[int] = ()
        self._tables: Sequence[Table] = ()

    def parts(self, text: str) -> Iterator[_Part]:
        """Yields the parts of a text in order."""
        lines_of_text = text.splitlines()
        place, in_code = 0, False
        while place < len(lines_of_text):
            line = lines_of_text[place]
            is_fence = _FENCE_OF_CODE.match(line) or (in_code and line.strip().startswith("```"))
            if in_code or is_fence or not _bare(line).strip("|:- ") or _COMMENT.fullmatch(line):
                in_code = in_code != bool(is_fence)
                self._tables = self._tables if "-" in line else ()
                part, count = _Part("", "blank"), 1
            else:
                part, count = self._recognised(lines_of_text[place : place + _MOST_LINES])
            place += count
            yield part

    def _recognised(self, below: Sequence[str]) -> tuple[_Part, int]:
        """Returns the part that begins with a line, and its number of lines; it may go on in those below."""
        line = below[0]
        if part := self._asked(line) or self._row(line) or self._bar(line):
            return part, 1
        words = _words(_bare(_HEADING.sub("", _BULLET.sub("", line))))
        is_unknown = self._joins > _MOST_JOINS or (len(words) >= _START and words[:_START] not in self._report.starts)
        for end in range(1, len(below) + 1):
            if end > 1 and (is_unknown or not _bare(below[end - 1]) or _BULLET.match(below[end - 1])):
                break
            self._joins += end > 1
            if part := self._sentences("\n".join(below[:end])):
                return part, end
        self._titles = () if _HEADING.match(line) else self._titles
        return _Part(line), 1

    def _asked(self, line: str) -> _Part | None:
        """Returns the claim of a line of ``ask``."""
        words = _bare(_BULLET.sub("", line))
        asked = _ASKED.fullmatch(words)
        if asked is None or asked[2] not in FIGURES:
            return None
        try:
            answer = ask(self._evidence, asked[1])
        except ConfigurationError as error:
            return _Part(line, "line", (Claim(words, None, cannot_answer=CannotAnswer(error.message, error.hint)),))
        right = _bare(in_words(answer))
        of = right.partition(f" {answer.unit}")[2]  # ", median of 5 instances of forward (…)", which may be left out
        value = asked[3].removesuffix(".").removesuffix(of)
        holds = (
            True
            if right in (words, words.removesuffix("."))
            else None
            if answer.cannot_answer
            else _has_value(value, answer)
        )
        why = (answer.cannot_answer or _OTHER_DIGITS) if holds is None else None
        return _Part(line, "line", (Claim(words, holds, (answer,), cannot_answer=why),))

    def _row(self, line: str) -> _Part | None:
        """Returns the claim of a row of a table, below the titles of its columns."""
        cells = [_bare(cell) for cell in _CELLS.split(line.strip(" ").removeprefix("|").removesuffix("|").strip(" "))]
        if len(cells) < 2:
            return None
        headed = [
            table
            for table in self._report.tables
            if _is_start(cells, table.titles) and self._is_meant(table.table.capture, table.below)
        ]
        if headed:
            below_last = [table for table in headed if table.above == self._last]
            self._tables = [table.table for table in below_last or headed]
            return _Part(line, "heading")
        verdicts: dict[bool | None, list[str]] = defaultdict(list)
        for table in self._tables:
            for row in table.rows:
                pairs = zip(row, table.columns, strict=True)
                shown = [_bare(visible(plain(format_cell(cell, column.unit)))) for cell, column in pairs]
                if len(cells) <= len(shown) and _is_start(cells[: table.names], shown):
                    holds = _all(_cell_holds(*pair) for pair in zip(cells, shown, strict=False))
                    verdicts[holds].append(" | ".join(shown))
        claim = _judged(" ".join(line.split()), verdicts, is_clear=len(self._tables) == 1)
        return _Part(line, "line", (claim,)) if verdicts else None

    def _bar(self, line: str) -> _Part | None:
        """Returns a bar as it is drawn in the width of its line; its legend has its figures."""
        for bars in self._report.bars if len(line) <= _WIDEST else ():
            for strokes in islice(lines(bars, len(line)), len(bars.rows)):
                if "".join(stroke.text for stroke in strokes).rstrip() == line.rstrip():
                    return _Part(line, "heading")
        return None

    def _sentences(self, text: str) -> _Part | None:
        """Returns the claims of lines that hold sentences of the report and nothing else."""
        pieces = _BETWEEN.split(_bare(_HEADING.sub("", _BULLET.sub("", text))))
        sentences: list[tuple[str, Sequence[_Sentence]]] = []
        while pieces:
            for count in range(len(pieces), 0, -1):
                words = " ".join(pieces[:count])
                if same := self._report.same(words):
                    sentences.append((words, same))
                    pieces = pieces[count:]
                    break
            else:
                return None
        self._last = _letters(sentences[-1][0])
        claims = tuple(claim for words, same in sentences if (claim := self._claim(words, same)))
        return _Part(text, "sentences" if claims else "heading", claims)

    def _claim(self, words: str, same: Sequence[_Sentence]) -> Claim | None:
        """Returns the claim of words that these sentences of the report have; None of a heading."""
        if all(sentence.kind == "heading" for sentence in same):
            is_of_capture = any(sentence.capture for sentence in same)
            self._capture = words if words in self._report.captures else self._capture if is_of_capture else ""
            self._titles = self._titles if any(sentence.below for sentence in same) else ()
            return None
        verdicts: dict[bool | None, list[str]] = defaultdict(list)
        places, titles = set(), []
        for text, capture, below, kind in same:
            needs = 0 if kind == "title" else below
            if self._is_meant(capture, needs):
                holds = _same_numbers(words, text)
                verdicts[holds].append(text)
                places.add((capture, needs))
                titles += [below if holds else -1] if kind == "title" else []
        self._titles = titles or self._titles
        return _judged(words, verdicts, is_clear=len(places) == 1)

    def _is_meant(self, capture: str, below: int) -> bool:
        """Tells whether the text may be about a capture and a title; what needs neither may stand anywhere."""
        is_of_capture = not self._capture or capture in ("", self._capture)
        return is_of_capture and (not self._titles or below in (0, *self._titles))


def _judged(text: str, verdicts: Mapping[bool | None, Sequence[str]], *, is_clear: bool) -> Claim:
    """Returns the claim of words that the report has in these sentences or rows, by whether the numbers agree."""
    if set(verdicts) == {True} or (True in verdicts and is_clear):
        return Claim(text, True)
    if set(verdicts) == {False}:
        return Claim(text, False, report=tuple(dict.fromkeys(verdicts[False]))[:_MOST_SHOWN])
    why = _AMBIGUOUS if True in verdicts else _OTHER_DIGITS if verdicts else _GOES_ON
    return Claim(text, None, cannot_answer=why)


def _has_value(value: str, answer: Answer) -> bool | None:
    """Tells whether a value is that of an answer, in its unit; None where it is written otherwise."""
    if isinstance(answer.value, str):
        name = _bare(answer.value)
        return True if value == name else None if name in value else False
    known = answer.value if isinstance(answer.value, tuple) else (answer.value,)
    written = _VALUE.fullmatch(value)
    numbers = [number for number in written.groups()[:2] if number] if written else []
    if written is None or written[3] != answer.unit or len(numbers) != len(known):
        return None
    return _all(_agrees(*pair) for pair in zip(numbers, map(str, known), strict=True))


def _cell_holds(cell: str, known: str) -> bool | None:
    """Tells whether a cell is that of a row; a bar is no claim, and a terminal cuts long names."""
    if not known.strip("\N{DARK SHADE}") or _is_start([cell], [known]):
        return True
    return _same_numbers(cell, known) if _words(cell) == _words(known) else None


def _is_start(cells: Sequence[str], known: Sequence[str]) -> bool:
    """Tells whether cells are the first ones of a row, where a terminal may have cut them."""
    pairs = zip(map(_letters, cells), map(_letters, known), strict=False)
    return len(cells) <= len(known) and all(
        cell == whole or (cell.endswith("…") and whole.startswith(cell[:-1])) for cell, whole in pairs
    )


def _same_numbers(text: str, known: str) -> bool | None:
    """Tells whether a text has the numbers of another one of the same words."""
    if _letters(text) == _letters(known):
        return True
    return _all(_agrees(*pair) for pair in zip(_NUMBER.findall(text), _NUMBER.findall(known), strict=True))


def _agrees(number: str, known: str) -> bool | None:
    """Tells whether a number is another one, or that one rounded to two digits or more; None where it may be."""
    value, known_value = (Decimal(text.replace(",", "").replace("−", "-")) for text in (number, known))
    places, known_places = (-int(one.as_tuple().exponent) for one in (value, known_value))
    if value == known_value:
        return True
    if abs(value - known_value) * 2 > Decimal(1).scaleb(-min(places, known_places)):
        return False
    return True if places < known_places and len(value.as_tuple().digits) > 1 else None


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    held = set(verdicts)
    return False if False in held else None if None in held else True


def _bare(text: str) -> str:
    """Returns a text on one line, without marks of markdown."""
    text = html.unescape(text) if "<summary>" in text else text
    return " ".join(_MARKS.sub("", _LINK.sub(r"\1", text)).split())


def _letters(text: str) -> str:
    return "".join(text.split())


def _words(text: str) -> str:
    """Returns the letters of a text with a stand-in for each number."""
    return _letters(_NUMBER.sub("\0", text))
