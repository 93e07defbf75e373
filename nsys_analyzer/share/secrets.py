"""Finds texts that may hold a secret: random tokens, and the names of machines, people and accounts.

Those names have shapes that no range and no kernel has: addresses, numbered machines, homes with other marks for their
slashes, a telling word with a number behind it, and more joined digits than a counter has.

An identifier is made of words: ``sm90_xmma_gemm_f32f32_tf32f32_tilesize64x64x32``; a key of random letters:
``4eC39HqLyjWDarjtT1zdp7dc``. A small model of names, learnt from the kernel rules, operators and words of this package,
says how many bits each letter costs, and each turn between digits, small and capital letters. A stretch of an
identifier that costs far more than a name's letters do is taken for random.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise

from nsys_analyzer.share.vocabulary import CAMEL, field_words, layer_operators

#: Bits that a letter of a name costs at most, on average. A letter drawn from 62 costs 6 and its surroundings more.
_BITS_OF_NAME = 4.3
_BITS_OF_DIGIT = 4.0
#: Bits of a word of this field, however long it is: one of about two thousand.
_BITS_OF_WORD = 9.0
#: How far a stretch may exceed a name's cost, and how much further for each doubling of the identifier: a long one
#: has more stretches.
_EXCESS, _EXCESS_PER_DOUBLING = 20.0, 2.0
_SHORTEST_PART = 4
_SHORTEST_HEX = 12
_LONGEST_NUMBER = 10

_RUN = re.compile(r"[A-Za-z0-9]+")
#: Sizes, types and architectures, which stand for one number: ``64x64x32``, ``bf16``, ``E4m3``, ``sm100a``.
_SIZES = re.compile(
    r"(?i)(?<!\d)\d+(?:x\d+)+|m\d+n\d+k\d+|(?:kv|[qhp])\d{2,3}(?!\d)|[1-5]d(?![a-z0-9])"
    r"|x?(?:mx)?(?:bf|tf|fp|f)(?:4|8|16|32|64)(?!\d)|e\dm\d|(?:sm|gfx)\d{2,4}(?-i:[af](?![a-z]))?"
)
#: What each argument of an early Triton kernel is: ``0d1d2d3de4``.
_TRITON_ARGUMENTS = re.compile(r"(?:\d{1,2}(?:de?|c))+\d{0,2}(?:\d{1,2}(?:de?|c)?){0,8}")
#: The names of rocBLAS and hipBLASLt are abbreviations with a number each: ``LBSPPA256_LRVW8``.
_TENSILE, _SHORTEST_OF_TENSILE, _SHORTEST_RUN = "Cijk_", 12, 7
#: Stands for a source file in what nvcc calls a namespace without a name.
_HASH = re.compile(r"[0-9a-f]{8}")
_HEX = re.compile(r"(?=[0-9]*[A-Fa-f])(?=[A-Fa-f]*[0-9])(?:[0-9a-f]+|[0-9A-F]+)")

#: How tokens of well-known services begin; what follows is a secret whatever it looks like.
_PREFIX = re.compile(
    r"(?:^|_)(?:(?:sk|pk|rk|whsec)_(?:live_|test_)?|gsk_|r8_|hf_|gh[pousr]_|github_pat_|npm_|xox[abeoprs]_|dop_v1_|shp(?:at|ss)_"
    r"|tskey_|pypi_|lin_api_|sbp_|ops_|rpa_)(?=\w*\d|\w*[A-Z])\w{12,}"
    r"|(?:^|_)(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|(?:^|_)AIza\w{20,}|(?:^|_)eyJ\w{10,}|(?:^|_)ya29\w{12,}"
)
#: An identifier that says what it holds: ``password_hunter2``.
_SPEAKS = re.compile(
    r"(?i)passw(?:or)?d|passphrase|passwd|secret|credential|(?:api|access|private|auth|account|signing)_?key|_pwd|pwd_"
    r"|(?:auth|access|bearer|bot|refresh|session)_?token|(?:^|_)(?:bearer|cookie)(?:_|$)"
)


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
#: Bits by which a whole text may exceed a name's, and from how many characters on each doubling allows more.
_EXCESS_OF_TEXT, _LENGTH_OF_TEXT = 40.0, 64
#: Names that are abbreviations with numbers, from generators of kernels.
_ABBREVIATED = ("Cijk_", "bmm_")
_MOST_LONE_LETTERS = 8
_LONE_LETTER = re.compile(rf"{_BEGINS}[A-Za-z]{_ENDS}")
#: Digits that are joined as those of a card, a phone or an account are: 682-39-1259, 4111 1111.
_JOINED_DIGITS = re.compile(r"\d(?:[-_ ]?\d){5,}")
_PARTED_DIGITS = re.compile(rf"{_BEGINS}\d{{3,}}(?:_\d{{3,}}){{2,}}{_ENDS}")
#: The name of a run, or a long number; of source files nvcc writes it, too, into what has no name.
_NAME_OF_RUN = re.compile(rf"{_BEGINS}(?:(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{{8,11}}|\d{{7,}}){_ENDS}")
_OF_FILES = re.compile(r"_(?:INTERNAL|GLOBAL__N_)_[0-9a-f]{8}_\d{1,4}_\w{1,100}?_cu_[0-9a-f]{8}|(?:bf16|cf32|f16){2}")
#: Libraries that write the architectures they were built for into their namespaces.
_ARCHITECTURES = re.compile(r"(?:CUB|THRUST|HIPCUB|ROCPRIM)_\d{6}_(?:SM_)?(?:\d{3,4}_?)+")


@lru_cache(maxsize=65536)
def may_be_secret(identifier: str) -> bool:
    """Whether an identifier is, holds or names a key: by its beginning, by what it speaks of, or by its letters."""
    if _PREFIX.search(identifier) or _SPEAKS.search(identifier):
        return True
    runs = _RUN.findall(identifier)
    allowed = _EXCESS + _EXCESS_PER_DOUBLING * math.log2(len(identifier))
    return any(map(_is_number_or_hash, runs)) or _excess(identifier) > allowed


def _is_number_or_hash(run: str) -> bool:
    if run.isdigit():
        return len(run) > _LONGEST_NUMBER
    return len(run) >= _SHORTEST_HEX and bool(_HEX.fullmatch(run)) and not _TRITON_ARGUMENTS.fullmatch(run)


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
    runs = _NAME_OF_RUN.findall(_OF_FILES.sub("", " ".join(identifiers)))
    if not all(map(_TRITON_ARGUMENTS.fullmatch, runs)):
        return True
    doublings = math.log2(max(len(code), _LENGTH_OF_TEXT) / _LENGTH_OF_TEXT)
    allowed = _EXCESS_OF_TEXT + _EXCESS_PER_DOUBLING * doublings
    return _excess_of_runs(identifiers) > allowed


def _runs(identifier: str) -> list[str]:
    """The runs of letters and digits of an identifier, without sizes and what Triton says of arguments."""
    head, _, last = identifier.rpartition("_")
    return _RUN.findall(_SIZES.sub("0", head if _TRITON_ARGUMENTS.fullmatch(last) else identifier))


def _excess(identifier: str) -> float:
    """Bits by which the most random stretch of an identifier costs more than that of a name; 0 or more.

    An underscore halves what came before it: the names of kernels are many short abbreviations.
    """
    shortest = _SHORTEST_OF_TENSILE if identifier.startswith(_TENSILE) else _SHORTEST_RUN
    most = so_far = 0.0
    for run in _runs(identifier):
        so_far /= 2
        if len(run) < shortest or _HASH.fullmatch(run):
            continue
        for bits in _bits(run):
            so_far = max(0.0, so_far + bits)
            most = max(most, so_far)
    return most


def _excess_of_runs(identifiers: Iterable[str]) -> float:
    """The same of several identifiers; each run of letters and digits counts once, for code repeats names."""
    most = so_far = 0.0
    for run in dict.fromkeys(run for identifier in identifiers for run in _runs(identifier)):
        if len(run) >= _SHORTEST_PART and not _HASH.fullmatch(run):
            so_far = max(0.0, so_far + sum(_bits(run)))
            most = max(most, so_far)
    return most


def _bits(run: str) -> Iterator[float]:
    """Bits above a name's cost, for each piece of a run of letters and digits."""
    words, cost = _known_words(), _costs()
    before = "^"
    for piece in CAMEL.findall(run):
        kind = _kind(piece)
        turn, before = cost["turn", before, kind], kind
        if kind == "0":
            yield turn + len(piece) * (_BITS_OF_DIGIT - _BITS_OF_NAME)
        else:
            word = piece.lower()
            letters = sum(cost["letter", a, b] for a, b in pairwise(f"|{word}|"))
            known = len(word) > 2 and word in words
            yield turn + (min(letters, _BITS_OF_WORD) if known else letters) - len(word) * _BITS_OF_NAME


def _kind(piece: str) -> str:
    """``0`` for digits, ``l`` for small letters, ``c`` for a word with a capital or one alone, ``u`` for capitals."""
    if piece[0].isdigit():
        return "0"
    if piece[0].islower():
        return "l"
    return "u" if piece.isupper() and len(piece) > 1 else "c"


@cache
def _known_runs() -> list[str]:
    return sorted({run for name in _names() for run in _RUN.findall(_SIZES.sub("_", name))})


@cache
def _known_words() -> frozenset[str]:
    return frozenset(piece.lower() for run in _known_runs() for piece in CAMEL.findall(run))


@cache
def _costs() -> dict[tuple[str, str, str], float]:
    """Bits of each pair of letters, ``|`` for a word's ends, and of each turn from one kind of piece to another."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for run in _known_runs():
        kinds = ["^"]
        for piece in CAMEL.findall(run):
            kinds.append(_kind(piece))
            if kinds[-1] != "0":
                word = piece.lower()
                counts.update(("letter", *pair) for pair in pairwise(f"|{word}|"))
        counts.update(("turn", *pair) for pair in pairwise([*kinds, "$"]))
    letters = "abcdefghijklmnopqrstuvwxyz|"
    return _as_bits(counts, "letter", letters, letters) | _as_bits(counts, "turn", "^0lcu", "0lcu$")


def _as_bits(
    counts: Counter[tuple[str, str, str]], what: str, firsts: str, seconds: str
) -> dict[tuple[str, str, str], float]:
    """-log2 of how often each second follows a first; what was never seen counts as a third of a time."""
    unseen = 0.3
    bits: dict[tuple[str, str, str], float] = {}
    for first in firsts:
        total = sum(counts[what, first, second] + unseen for second in seconds)
        for second in seconds:
            bits[what, first, second] = -math.log2((counts[what, first, second] + unseen) / total)
    return bits


def _names() -> Iterator[str]:
    from nsys_analyzer.analysis.kernels.class_rules import RULES

    yield from (rule.example for rule in RULES if not rule.example.startswith("_Z"))
    yield from field_words()
    yield from layer_operators()
