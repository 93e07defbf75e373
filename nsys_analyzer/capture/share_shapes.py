"""What stands in the names of machines, people and accounts, and in no name of a range or a kernel.

Shapes of a few kinds: addresses, machines that are numbered, homes with other marks for their slashes, a telling word
with a number behind it, and digits that are joined to more than a counter has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from nsys_analyzer.capture.share_tokens import excess_of_runs, is_of_triton

_BEGINS, _ENDS = r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])"
#: Words that say whose the number behind them is.
_TELLING = r"(?:key|user|account|code|pass(?:word|wd|code)?|pw|token|pin|otp|login|phone|call|card|iban|ssn|secret)s?"
_OWNED = re.compile(
    rf"(?i){_BEGINS}(?:(?:node|nid|login|host|server|machine|dgx|hgx)-?\[?\d"  # node17, login1, node[3-39]
    r"|ip[-_.]?(?:\d{1,3}[-_.]){3}\d"  # ip-10-22-3-22
    r"|(?:10|127|172|192)([-_])\d{1,3}\1\d{1,3}\1\d{1,3}(?![\w-])"
    r"|(?:home|users)(?:[._]{1,2}|::)[a-z]|https?::"  # _home_ann_train
    r"|(?:[0-9a-f]{2}[-:]){5}[0-9a-f]{2}"  # a network card
    r"|(?-i:[A-Z0-9]{5}(?:-[A-Z0-9]{5}){2,})"  # a licence
    rf"|{_TELLING}[\s_:#=-]{{0,3}}\d{{4}})"
)
_TOLD = re.compile(rf"(?i)({_BEGINS}{_TELLING}:? )(?=[^ ]*\d[^ ]*\d)[\w-]{{4,}}")
#: With two colons beside each other; ``c10::d`` is C++.
_IPV6 = re.compile(
    r"(?i)(?<![\w:])(?!c10:)(?=[0-9a-f:]*\d)[0-9a-f]{2,4}(?::[0-9a-f]{1,4}){0,6}::[0-9a-f]{1,4}(?![\w:])"
)
#: Bits by which a whole text may exceed a name's, and how much further for each doubling beyond the length.
_EXCESS, _EXCESS_PER_DOUBLING, _LENGTH = 40.0, 2.0, 64
#: Names that are abbreviations with numbers, from generators of kernels.
_ABBREVIATED = ("Cijk_", "bmm_")
_MOST_LONE_LETTERS = 8
_LONE_LETTER = re.compile(rf"{_BEGINS}[A-Za-z]{_ENDS}")
#: Digits that are joined as those of a card, a phone or an account are: 682-39-1259, 4111 1111.
_JOINED_DIGITS = re.compile(r"\d(?:[-_ ]?\d){5,}")
_PARTED_DIGITS = re.compile(rf"{_BEGINS}\d{{3,}}(?:_\d{{3,}}){{2,}}{_ENDS}")
#: The name of a run, or a long number; of source files nvcc writes it, too, into what has no name.
_RUN = re.compile(rf"{_BEGINS}(?:(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{{8,11}}|\d{{7,}}){_ENDS}")
_OF_FILES = re.compile(r"_(?:INTERNAL|GLOBAL__N_)_[0-9a-f]{8}_\d{1,4}_\w{1,100}?_cu_[0-9a-f]{8}|(?:bf16|cf32|f16){2}")
#: Libraries that write the architectures they were built for into their namespaces.
_ARCHITECTURES = re.compile(r"(?:CUB|THRUST|HIPCUB|ROCPRIM)_\d{6}_(?:SM_)?(?:\d{3,4}_?)+")


def is_owned(text: str) -> bool:
    """Whether a text holds an address, a machine, a home, or a telling word with a number behind it."""
    return bool(_OWNED.search(text) or _IPV6.search(text))


def has_joined_digits(words: str) -> bool:
    """Whether words hold more digits in a row than a counter has, blanks and hyphens between them or none."""
    return bool(_JOINED_DIGITS.search(words))


def without_numbers(message: str, mark: str) -> str:
    """A message with a mark for digits that are joined, and for a value with digits behind a telling word."""
    return _TOLD.sub(rf"\1{mark}", _JOINED_DIGITS.sub(mark, message))


def may_hide_secret(code: str, identifiers: Sequence[str]) -> bool:
    """Whether the identifiers of a name, each of them harmless, are together as random as a key that was cut."""
    if len(set(_LONE_LETTER.findall(code))) > _MOST_LONE_LETTERS:
        return True
    if "_" in code and _PARTED_DIGITS.search(_ARCHITECTURES.sub("", code)):
        return True
    if code.startswith(_ABBREVIATED):
        return False
    runs = _RUN.findall(_OF_FILES.sub("", " ".join(identifiers)))
    if not all(map(is_of_triton, runs)):
        return True
    allowed = _EXCESS + _EXCESS_PER_DOUBLING * max(0.0, math.log2(max(len(code), 1) / _LENGTH))
    return excess_of_runs(identifiers) > allowed
