"""Takes out of a text what tells of a person, a machine or a key, and leaves the rest as it was."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import PurePath

from nsys_analyzer.capture.share_words import PrivateValues, is_layer_name, is_ordinary, is_telling

#: Stands where something was taken out.
MARK = "…"

#: The numbers behind an autograd annotation: a trace has a million of them, and they tell nothing.
_ANNOTATION = r", *(?:seq|op_id|sizes|input_op_ids) *="
_NUMBERS = re.compile(rf"(?:{_ANNOTATION}[\d\[\](), ]*)+")
#: A text with none of these holds nothing that a rule below looks for.
_TELLING = re.compile(r"[@/\\=:.%-]|[A-Za-z0-9]{12}|(?i:bearer)")

_NAME = r"[^\s/\\:;,\"'<>|()\[\]{}]"  # a letter of a file's name
_SUFFIX = (
    r"(?:py|pyc|ipynb|c|cc|cpp|cu|cuh|h|hpp|so|sh|json|ya?ml|toml|pt|pth|ckpt|bin|safetensors|parquet|txt|csv|log"
    r"|sqlite|nsys-rep|qdrep)\b"
)
_FIRST = r"(?<![^\s\\:;,\"'<>|()\[\]{}])"  # the first letter of a path: looked for once in a word, however long
#: Two names or more, or what is below somebody's home; the latter behind a letter too, as in -I/home/ann/include.
_PATH_STARTS = rf"(?:(?<![\w./])(?:{_FIRST}~{_NAME}*(?=/)|(?=(?:/+{_NAME}+){{2}}))|(?=/(?:home|Users)/))"
_HOMES = ("home", "Users")
#: Folders that a path starts with on many machines, with the number that some of them bear: ``/data2``.
_ROOT = re.compile(
    r"/*(?:app|bin|code|content|data|datasets?|dev|etc|export|homes?|kaggle|lib64|lib|lustre|media|mnt|net|nfs|opt"
    r"|private|proc|projects?|root|run|sbin|scratch|shared|srv|storage|sys|tmp|usr|Users|var|Volumes|work|workspaces?)"
    r"\d*/"
)
_SECRET = r"(?:passw(?:or)?d|passphrase|pwd|secret|credentials?)"
_KEY = r"(?:key|token|auth|authorization|signature|key_?id)"
_IS = r"[\"']?\s*(?:=|%3D|:(?!:))\s*[\"']?"  # and not the :: of a C++ name
#: Where a word begins and ends: beside what is no letter and no number, an underscore too, or behind ``%3D``.
_BEGINS, _ENDS = r"(?:(?<![^\W_])|(?<=%[0-9A-Fa-f]{2}))", r"(?![^\W_])"
_DOMAIN = r"(?:[\w-]*(?:\.[\w-]+)+)?"  # and the rest of the host's own name before it: node17-ib0.example.org


def _base_name(match: re.Match[str]) -> str:
    return _last_name(match[0])


def _last_name(path: str) -> str:
    """The last name of a path; of a home folder, whose last name is its owner's, nothing."""
    parts = [part for part in re.split(r"[/\\]", path) if part]
    return MARK if len(parts) < 2 or parts[-2] in _HOMES else f"{MARK}/{parts[-1]}"


def _absolute(match: re.Match[str]) -> str:
    """``/conv1/Conv`` is a layer of ONNX, ``/data/Conv`` a file; what may be either is taken for a path."""
    is_layer = is_layer_name(match[0]) and not _ROOT.match(match[0])
    return match[0] if is_layer else _base_name(match)


def _relative(match: re.Match[str]) -> str:
    """The last name of a path; what it is the value of stays: ``--data=sets/a.bin``."""
    name, is_set, path = match[0].rpartition("=")
    return f"{name}={_last_name(path)}" if is_set and "/" in path and "/" not in name else _last_name(match[0])


def _ip_address(match: re.Match[str]) -> str:
    try:
        ipaddress.ip_address(match[0])
    except ValueError:  # a time, a version, a C++ name
        return match[0]
    return MARK


def _value(match: re.Match[str]) -> str:
    """``token=…``; but ``token=1048576`` and ``token: embedding`` are no secrets."""
    return match[0] if is_ordinary(match["value"]) else match["name"] + MARK


def _long_token(match: re.Match[str]) -> str:
    """Random letters and digits; a name in CamelCase has few digits and long runs of small letters."""
    text = match[0]
    hexadecimal = re.fullmatch(r"[0-9a-fA-F]+", text) and not text.isdigit()
    mixed = all(len(re.findall(kind, text)) >= 2 for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    return MARK if hexadecimal or (mixed and not re.search(r"[a-z]{7}", text)) else text


_Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]

#: What is looked for, and what stands in its place, in this order.
_RULES: tuple[_Rule, ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY.*", re.DOTALL), MARK),
    (re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s\"'<>]+"), rf"\1{MARK}"),  # with its user and its host
    (re.compile(r"[\w.+%-]{1,64}@[\w-]+(?:\.[\w-]+)+"), MARK),
    (
        re.compile(
            r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2}))(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
            r"|(?:glpat|pypi|nvapi|xox[abeoprs])-[\w-]{16,}|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|npm_[A-Za-z0-9]{16,}"
            r"|AIza[\w-]{20,}|ya29\.[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
        ),
        MARK,
    ),
    (re.compile(rf"(?i)(?P<name>authorization{_IS}[a-z]+ +)(?P<value>[^\s\"',;]+)"), _value),  # Basic, Bearer, Token
    (re.compile(rf"(?i)(?P<name>{_SECRET}{_IS})(?P<value>[^\s\"',;&)]+)"), _value),
    (re.compile(rf"(?i)(?P<name>{_KEY}{_IS})(?P<value>[^\s\"',;&)]{{6,}})"), _value),
    (re.compile(r"(?i)(?P<name>--[\w-]{0,40}(?:key|token|secret|password)\s+[\"']?)(?P<value>[^\s\"']{3,})"), _value),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}"), rf"\1{MARK}"),
    (re.compile(r"(?i)(?:GPU-|MIG-)?(?<![0-9a-f])[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"), MARK),
    (re.compile(r"(?i)(?<![0-9a-f])[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"), MARK),  # a bus location
    (re.compile(r"(?i)(?<![\w:-])[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}(?![\w:-])"), MARK),  # a MAC address
    (re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)"), _ip_address),
    (re.compile(r"(?i)(?<![\w:.])(?=[0-9a-f:]*\d)[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,7}(?![\w:])"), _ip_address),
    (re.compile(rf"(?:(?<!\w)[A-Za-z]:|\\)(?:\\+{_NAME}+)+"), _base_name),
    (re.compile(rf"{_PATH_STARTS}(?:/+{_NAME}+)+/?"), _absolute),
    (re.compile(rf"{_FIRST}(?:{_NAME}+/)+{_NAME}*?\.{_SUFFIX}"), _relative),
    (re.compile(r"(?<![\w+/-])[A-Za-z0-9+/]{32,}={0,2}(?![\w+/-])"), _long_token),
)  # fmt: skip


class Scrubber:
    """Scrubs texts, and counts those it changed. Texts that differ stay different: see ``_distinct``.

    Args:
        private: what the file itself says of its owner: values of environment variables, names of hosts and users.

    Attributes:
        changed: the texts that were changed, without their numbers.
    """

    def __init__(self, private: PrivateValues) -> None:
        patterns = {value: re.escape(value) for value in private.values}
        # A word stands alone: the user "ann" is not in "channel". An underscore ends one, as in "ann_step".
        patterns |= {word: f"{_BEGINS}{re.escape(word)}{_ENDS}" for word in private.words}
        patterns |= {host: patterns[host] + _DOMAIN for host in private.hosts}
        self._wanted = [(value.lower(), re.compile(pattern, re.I)) for value, pattern in patterns.items()]
        self._known: dict[str, str] = {}
        self._given: set[str] = set()
        self._times: Counter[str] = Counter()
        self.changed: set[str] = set()

    def scrub(self, raw: bytes | None) -> str | None:
        """A text, given as its bytes, without what is private; NULL stays NULL.

        Bytes that are no UTF-8 become replacement characters, as they do where a trace is read.
        """
        if raw is None:
            return None
        text = raw.decode("utf-8", errors="replace")
        numbers = re.search(_ANNOTATION, text)
        head = text[: numbers.start()] if numbers and _NUMBERS.fullmatch(text, numbers.start()) else text
        clean = self._known.get(head)
        if clean is None:
            clean = self._known[head] = self._distinct(self.clean(head))
            if clean != head:
                self.changed.add(head)
        return clean + text[len(head) :]

    def _distinct(self, clean: str) -> str:
        """The clean text, numbered where another text became the same: ``…/train.py``, ``…/train.py (2)``.

        Two ranges stay two. The numbers follow the order of the export, so that a second copy of it has them too.
        """
        alias = clean
        while alias in self._given:
            self._times[clean] += 1
            alias = f"{clean} ({self._times[clean] + 1})"
        self._given.add(alias)
        return alias

    def clean(self, text: str) -> str:
        """A text without what is private, whatever else became the same."""
        if "\0" in text:  # a block of environment variables
            return MARK
        lower = text.lower()
        for needle, pattern in self._wanted:
            if needle in lower:
                text = pattern.sub(MARK, text)
        if _TELLING.search(text):
            for pattern, replacement in _RULES:
                text = pattern.sub(replacement, text)
        return text


def shown_command(words: Sequence[str]) -> str:
    """A command line as one would type it, without its paths and without what a telling option is given."""
    scrubber = Scrubber(PrivateValues())
    shown = [PurePath(words[0]).name]
    for before, word in pairwise(words):
        name, is_set, value = word.partition("=")
        if before.startswith("-") and "=" not in before and is_telling(before) and not is_ordinary(word):
            shown.append(MARK)
        elif word.startswith("-") and is_set and is_telling(name) and not is_ordinary(value):
            shown.append(f"{name}={MARK}")
        else:
            shown.append(scrubber.clean(word))
    return " ".join(word if _is_plain(word) else shlex.quote(word) for word in shown)


def _is_plain(word: str) -> bool:
    plain = word.replace(MARK, "x")
    return shlex.quote(plain) == plain
