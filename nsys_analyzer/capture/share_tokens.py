"""Tells the random tokens of keys from the identifiers that people, compilers and code generators write.

An identifier is made of words: ``sm90_xmma_gemm_f32f32_tf32f32_tilesize64x64x32``. A key is made of letters drawn
from a hat: ``4eC39HqLyjWDarjtT1zdp7dc``. A small model of names says how many bits each letter costs where it stands,
and how many it costs that digits, small and capital letters take turns. The model learns from the names that this
package holds already: an example of each kernel rule, operators, and the words of this field. In a stretch of an
identifier that costs far more than a name's letters do, somebody drew letters from a hat.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from itertools import pairwise

from nsys_analyzer.capture.share_vocabulary import field_words, layer_operators

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

_PIECE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
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


@lru_cache(maxsize=65536)
def may_be_secret(identifier: str) -> bool:
    """Whether an identifier is, holds or names a key: by its beginning, by what it speaks of, or by its letters."""
    if _PREFIX.search(identifier) or _SPEAKS.search(identifier):
        return True
    runs = _RUN.findall(identifier)
    allowed = _EXCESS + _EXCESS_PER_DOUBLING * math.log2(len(identifier))
    return any(map(_is_number_or_hash, runs)) or excess(identifier) > allowed


def _is_number_or_hash(run: str) -> bool:
    if run.isdigit():
        return len(run) > _LONGEST_NUMBER
    return len(run) >= _SHORTEST_HEX and bool(_HEX.fullmatch(run)) and not is_of_triton(run)


def is_of_triton(run: str) -> bool:
    """Whether a run says what each argument of a kernel of an early Triton is: ``0d1d2d3de4``."""
    return bool(_TRITON_ARGUMENTS.fullmatch(run))


def excess(identifier: str) -> float:
    """Bits by which the most random stretch of an identifier costs more than that of a name; 0 or more.

    The stretch is the one with the largest sum, found in one pass. An underscore halves what came before it: the
    names of kernels are many short abbreviations.
    """
    if is_of_triton(identifier.rpartition("_")[2]):
        identifier = identifier.rpartition("_")[0]
    shortest = _SHORTEST_OF_TENSILE if identifier.startswith(_TENSILE) else _SHORTEST_RUN
    most = so_far = 0.0
    for run in _RUN.findall(_SIZES.sub("0", identifier)):
        so_far /= 2
        if len(run) < shortest or _HASH.fullmatch(run):
            continue
        for bits in _bits(run):
            so_far = max(0.0, so_far + bits)
            most = max(most, so_far)
    return most


def excess_of_runs(identifiers: Iterable[str]) -> float:
    """Bits by which the most random stretch of identifiers costs more than names do; 0 or more.

    Each run of letters and digits counts once, for code says a name again and again.
    """
    most = so_far = 0.0
    seen: set[str] = set()
    for identifier in identifiers:
        plain = identifier.rpartition("_") if "_" in identifier else ("", "", identifier)
        text = plain[0] if is_of_triton(plain[2]) else identifier
        for run in _RUN.findall(_SIZES.sub("0", text)):
            if len(run) < _SHORTEST_PART or run in seen or _HASH.fullmatch(run):
                continue
            seen.add(run)
            so_far = max(0.0, so_far + sum(_bits(run)))
            most = max(most, so_far)
    return most


def _bits(run: str) -> Iterator[float]:
    """Bits above a name's cost, for each piece of a run of letters and digits."""
    words, cost = _known_words(), _costs()
    before = "^"
    for piece in _PIECE.findall(run):
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
    """Digits, a word in small letters, one with a capital (or one capital alone), or capitals."""
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
    return frozenset(piece.lower() for run in _known_runs() for piece in _PIECE.findall(run))


@cache
def _costs() -> dict[tuple[str, str, str], float]:
    """Bits of each pair of letters, ``|`` for a word's ends, and of each turn from one kind of piece to another."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for run in _known_runs():
        kinds = ["^"]
        for piece in _PIECE.findall(run):
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
        bits |= {
            (what, first, second): -math.log2((counts[what, first, second] + unseen) / total) for second in seconds
        }
    return bits


def _names() -> Iterator[str]:
    from nsys_analyzer.analysis.class_rules import RULES

    yield from (rule.example for rule in RULES if not rule.example.startswith("_Z"))
    yield from field_words()
    yield from layer_operators()
