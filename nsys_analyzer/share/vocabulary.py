"""The words that everybody uses: those of settings, of this field, and of the names of kernels and layers."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_LISTS = Path(__file__).with_name("lists")
#: Words of settings that many machines share; those of phases and kernels come to them.
_SETTINGS = "settings.txt"
#: Words of names that people and frameworks give to ranges, and of the profiler's messages.
_FIELD = "field.txt"
#: Operators of ONNX that layers are called after, as in ``/layer1/layer1.0/conv1/Conv_output_0``.
_OPERATORS = "onnx_operators.txt"

#: The words of a name in CamelCase, and its numbers.
CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_WORD = re.compile(r"[A-Za-z0-9]+")
_ORDINARY_MARKS = re.compile(r"[A-Za-z0-9\s_.,:;+/()-]*")
#: A number, a letter, or the short name of a GPU, an architecture or a type: ``9.0a``, ``sm90``, ``H200``.
_CODE = re.compile(r"\d+[A-Za-z]?|[A-Za-z]|[A-Za-z]{1,2}\d{2,4}")


@cache
def ordinary_words() -> frozenset[str]:
    """The words that say nothing of a machine's owner, in small letters.

    Phases and kernel rules add theirs, so that a variable ``MODE=forward`` takes no phase away.
    """
    from nsys_analyzer.analysis.kernels.class_rules import RULES
    from nsys_analyzer.trace.phase_names import DEFAULT_NAMES

    rules = (text for rule in RULES for text in (rule.pattern, rule.example, rule.kernel_class))
    phases = (text for spellings in DEFAULT_NAMES.values() for text in spellings)
    parts = re.compile(r"[A-Za-z]+\d*|[A-Z]?[a-z]{2,}")
    known = (word.lower() for text in (*rules, *phases, *DEFAULT_NAMES) for word in parts.findall(text))
    return frozenset(_listed(_SETTINGS)).union(known)


def is_ordinary(value: str) -> bool:
    """Whether a value is made of numbers and of words that everybody uses: ``1``, ``C.UTF-8``, ``forward``."""
    words = _WORD.findall(value)
    return bool(words) and bool(_ORDINARY_MARKS.fullmatch(value)) and all(map(_is_ordinary_word, words))


def _is_ordinary_word(word: str) -> bool:
    spellings = (word.lower(), word.lower().rstrip("0123456789"))
    return bool(_CODE.fullmatch(word)) or not ordinary_words().isdisjoint(spellings)


@cache
def field_words() -> frozenset[str]:
    """The words that names of ranges, kernels and layers are made of, in small letters."""
    operators = (part.lower() for name in layer_operators() for part in CAMEL.findall(name))
    return ordinary_words().union(_listed(_FIELD), operators)


def layer_operators() -> list[str]:
    """The operators of ONNX."""
    return _listed(_OPERATORS)


def _listed(name: str) -> list[str]:
    """The words of one of the lists beside this module."""
    return (_LISTS / name).read_text(encoding="utf-8").split()


def is_field_word(word: str) -> bool:
    """Whether a word, or each word of a name in CamelCase, is of this field: ``matmuls``, ``LayerNorm``, ``conv1``."""
    if not word.isalnum():
        return False
    parts = CAMEL.findall(word)
    in_camel_case = len(parts) > 1 and len(parts[0]) > 1 and parts[0].isalpha() and all(map(_is_known_part, parts))
    return _is_known(word.lower()) or in_camel_case


def _is_known_part(part: str) -> bool:
    return part.isdigit() or part == "d" or (len(part) > 1 and _is_known(part.lower()))


def _is_known(word: str) -> bool:
    """Whether a word is in the list, or a form of one that is: ``steps``, ``computed``, ``loading``."""
    words = field_words()
    if word in words or word.rstrip("0123456789") in words:
        return True
    stems = [word[: -len(ending)] for ending in ("s", "es", "d", "ed", "ing", "er", "r") if word.endswith(ending)]
    return any(len(stem) > 2 and not words.isdisjoint((stem, f"{stem}e")) for stem in stems)


def is_layer_name(path: str) -> bool:
    """Whether what looks like a path is the name of a layer: ONNX ends it with its operator, ``/conv1/Conv``."""
    return bool(_layer_name().fullmatch(path))


@cache
def _layer_name() -> re.Pattern[str]:
    return re.compile(rf"(?:/[\w.-]+)+/(?:{'|'.join(layer_operators())})(?:_[\w.]*)?")
