"""Takes out of a text what tells of a person, a machine or a key, and leaves names as they are."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath

from nsys_analyzer.analysis.kernels.aliases import Alias
from nsys_analyzer.analysis.kernels.classes import first_rule
from nsys_analyzer.analysis.kernels.precision import gemm_precision
from nsys_analyzer.analysis.ranges.phases import PhaseNames
from nsys_analyzer.share.names import MARK, is_harmless_word, is_name, readable_words
from nsys_analyzer.share.private import PrivateValues, is_telling
from nsys_analyzer.share.vocabulary import is_ordinary
from nsys_analyzer.trace.columns import UNNAMED
from nsys_analyzer.trace.phase_names import DEFAULT_NAMES, MODULE_CALL, MODULE_WITH_PATH

#: The numbers behind an autograd annotation: a trace has a million of them, and they tell nothing.
_ANNOTATION = r", *(?:seq|op_id|sizes|input_op_ids) *="
_NUMBERS = re.compile(rf"(?:{_ANNOTATION}[\d\[\](), -]*)+")
#: The sizes of an operator's inputs, which are such numbers, too: ``[[8192, 768], [768, 3072], []]``.
_SIZES = re.compile(r"\[(?:\[[\d\[\], ]*\])?\]")
#: Where a word begins and ends: beside what is no letter and no number, an underscore too, or behind ``%3D``.
_BEGINS, _ENDS = r"(?:(?<![^\W_])|(?<=%[0-9A-Fa-f]{2}))", r"(?![^\W_])"
#: The rest of a host's own name, and the domain behind it: ``node17-ib0.example.org``. No label has more letters.
_DOMAIN = r"(?:[\w-]{0,63}(?:\.[\w-]{1,63})+)?"
#: No phase has a longer name.
_LONGEST_PHASE = 100
_OPERATOR = "aten::"
#: A property that is a number alone, as the versions of drivers and runtimes are: HIP's has eight digits.
_VERSION = re.compile(r"\d{1,8}")
#: A name has no more digits in a row behind its annotation: no counter is as long, and keys and cards are.
_LONG_NUMBER = re.compile(r"\d(?:[ -]*\d){12,}")
#: The words of a module's path and class.
_WORD_OF_PATH = re.compile(r"[^/.]+")
#: The place of a layer, and how many digits it has where the whole path reads as no name.
_PLACE = re.compile(r"[0-9]{1,4}")
_MOST_ALONE = 2


@dataclass(frozen=True)
class Renamed:
    """A text that reads as no name: what it was, without private values that are known, and its alias."""

    text: str
    alias: str


class Scrubber:
    """Scrubs texts, and counts those it changed. Texts that differ stay different.

    Args:
        private: what the file itself says of its owner.
        keep: names that match one of these as a whole stay as they are, but for private values.

    Attributes:
        changed: the texts that lost a private value, or a word of a message, without their numbers.
        renamed: the names that have an alias now, in the order of the export.
    """

    def __init__(self, private: PrivateValues, keep: Sequence[re.Pattern[str]] = ()) -> None:
        patterns = {value: re.escape(value) for value in private.values}
        # A word stands alone: the user "ann" is not in "channel". An underscore ends one, as in "ann_step".
        patterns |= {word: f"{_BEGINS}{re.escape(word)}{_ENDS}" for word in private.words}
        patterns |= {host: patterns[host] + _DOMAIN for host in private.hosts}
        self._wanted = [(value.lower(), re.compile(pattern, re.I)) for value, pattern in patterns.items()]
        self._keep = keep
        self._known: dict[str, str] = {}
        self._used: set[str] = set()
        self._times: Counter[str] = Counter()
        self._words: dict[str, str] = {}
        self.changed: set[str] = set()
        self.renamed: list[Renamed] = []

    def name(self, raw: bytes | None) -> str | None:
        """A name, given as its bytes: as it is, without private values, or an alias. NULL stays NULL."""
        if raw is None:
            return None
        text = raw.decode("utf-8", errors="replace")
        numbers = re.search(_ANNOTATION, text)
        head = text[: numbers.start()] if numbers and _NUMBERS.fullmatch(text, numbers.start()) else text
        if _SIZES.fullmatch(text):
            head = ""
        clean = self._known.get(head)
        if clean is None:
            clean = self._known[head] = self._shown(head)
        return clean + _LONG_NUMBER.sub("0", text[len(head) :])

    def message(self, raw: bytes | None) -> str | None:
        """A message of the profiler or a property of the machine, given as its bytes: the words of this field."""
        if raw is None:
            return None
        text = raw.decode("utf-8", errors="replace")
        without = self._without_private(text)
        clean = without if _VERSION.fullmatch(without) else readable_words(without)
        if clean != text:
            self.changed.add(text)
        return clean

    def _shown(self, head: str) -> str:
        public = self._without_private(head)
        allowed = "\0" not in head and any(pattern.fullmatch(head) for pattern in self._keep)
        if allowed or (is_name(public) and (public == head or _meaning(public) == _meaning(head))):
            if public != head:
                self.changed.add(head)
            return self._distinct(public)
        module = MODULE_WITH_PATH.fullmatch(public)
        if module:
            return self._distinct(self._module(module["path"], module["kind"]))
        before, alias_kind = _meaning(head)
        return self._renamed(public, before + alias_kind.text(len(self.renamed) + 1))

    def _module(self, path: str, kind: str) -> str:
        """The name of a module's call word by word: without its place among the others it would tell nothing."""
        together = all(map(is_name, (path.replace("/", "."), kind)))  # a secret may be spread over words

        def shown(word: re.Match[str]) -> str:
            text = word[0]
            number = _PLACE.fullmatch(text) is not None and (together or len(text) <= _MOST_ALONE)
            if number or (together and not text.isdigit() and is_name(text)):
                return text
            if text not in self._words:
                told = "Attention" if text.endswith("Attention") else ""  # its kernels are told by this
                self._words[text] = self._renamed(text, f"module{len(self._words) + 1}{told}")
            return self._words[text]

        return f"{MODULE_CALL}{_WORD_OF_PATH.sub(shown, path)}: {_WORD_OF_PATH.sub(shown, kind)}"

    def _renamed(self, text: str, alias: str) -> str:
        alias = self._distinct(alias)
        self.renamed.append(Renamed(text, alias))
        return alias

    def _distinct(self, clean: str) -> str:
        """The clean text, numbered in the export's order where another text became the same: ``…_step (2)``."""
        alias = clean
        while alias in self._used:
            self._times[clean] += 1
            alias = f"{clean} ({self._times[clean] + 1})"
        self._used.add(alias)
        return alias

    def _without_private(self, text: str) -> str:
        """A text without the private values that are known; of a block of environment variables, nothing."""
        if "\0" in text:
            return MARK
        lower = text.lower()
        for needle, pattern in self._wanted:
            if needle in lower:
                text = pattern.sub(MARK, text)
        return text


def _meaning(name: str) -> tuple[str, Alias]:
    """The phase of a name, as it stands before the alias, and what the alias tells of a kernel.

    Without them the copy would have other figures.
    """
    begins = name.split(",", 1)[0]
    phase = PhaseNames().key_of(begins) if len(begins) <= _LONGEST_PHASE else None
    before = f"{DEFAULT_NAMES[phase][0]}, " if phase else f"{UNNAMED}, " if name.startswith(UNNAMED) else ""
    if name.startswith(_OPERATOR):
        before = _OPERATOR
    rule = first_rule(name)
    told = Alias(rule.kernel_class, rule.part_of, gemm_precision(name)) if rule else Alias()
    return before, told


def shown_command(words: Sequence[str]) -> str:
    """A command line as one would type it, without its paths and without what a telling option is given."""
    shown = [] if _VARIABLE.match(words[0]) else [PurePath(words[0]).name]
    for before, word in pairwise(words if shown else ("", *words)):
        name, is_set, value = word.partition("=")
        telling = before.startswith("-") and "=" not in before and _gives_private_value(before, word)
        if _VARIABLE.match(word) and not is_ordinary(value):
            shown.append(f"{name}={MARK}" if is_harmless_word(name) else MARK)
        elif telling and not (word.isdigit() if _SHORT_OPTION.fullmatch(before) else is_ordinary(word)):
            shown.append(MARK)
        elif (joined := _JOINED_OPTION.fullmatch(word)) and not is_ordinary(joined[2]):
            shown.append(f"{joined[1]}{MARK}")
        elif is_set and is_telling(name) and not is_ordinary(value):
            shown.append(f"{name}={MARK}" if is_harmless_word(name) else MARK)
        elif is_set and is_harmless_word(name):
            shown.append(f"{name}={_shown_word(value)}")
        else:
            shown.append(_shown_word(word))
    return " ".join(word if _is_plain(word) else shlex.quote(word) for word in shown)


#: A variable of the environment before its program; options of the program have names in small letters.
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")
_SHORT_OPTION = re.compile(r"-[puUP]|--?server")
_JOINED_OPTION = re.compile(r"(-[puUP])(.+)", re.DOTALL)


def _gives_private_value(option: str, value: str) -> bool:
    """Whether an option gives a person, a machine or a secret; ``python -u train.py`` gives a script."""
    return is_telling(option) or bool(
        _SHORT_OPTION.fullmatch(option) and not value.endswith(".py") and value[:1] != "-"
    )


def _shown_word(word: str) -> str:
    """A word of a command line; of a path its last name, which is a file's."""
    if address := re.match(r"[A-Za-z][A-Za-z0-9+.-]{0,20}://", word):
        return address[0] + MARK  # with its user and its host
    *folders, last = re.split(r"[/\\]", word)
    is_home = bool(folders) and folders[-1] in ("home", "Users")
    shown = last if is_harmless_word(last) and not is_home else MARK
    return f"{MARK}/{shown}" if folders and shown != MARK else shown


def _is_plain(word: str) -> bool:
    plain = word.replace(MARK, "x")
    return shlex.quote(plain) == plain
