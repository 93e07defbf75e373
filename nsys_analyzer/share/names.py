"""Finds texts of a trace that may leave the machine as they are: those that read as names, and nothing else.

A name is code (C++ as it is demangled or mangled, an identifier, a dotted module path, an operator, a call of CUDA),
or a phrase of this field's words ("scaled dot product attention", "step 3"). All checks take linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from nsys_analyzer.analysis.kernels.aliases import read_alias
from nsys_analyzer.analysis.kernels.classes import CLASSES
from nsys_analyzer.share.private import is_telling
from nsys_analyzer.share.secrets import has_joined_digits, is_owned, may_be_secret, may_hide_secret, without_numbers
from nsys_analyzer.share.vocabulary import is_field_word, is_layer_name
from nsys_analyzer.trace.phase_names import DEFAULT_NAMES, normalized_name

#: Stands where something was taken out.
MARK = "…"

#: A name that was cut in the middle of a letter ends with the character that stands for one that cannot be read.
_LETTER = rf"A-Za-z_$~{MARK}\ufffd"
_TOKEN = re.compile(
    rf"(?P<space> +)|(?P<word>auto:\d+|[{_LETTER}][0-9{_LETTER}]*)"
    r"|(?P<number>[0-9]+[eE][+-]?[0-9]{1,3}[fFlL]?(?![0-9A-Za-z])|[0-9][0-9A-Za-z]*)|(?P<scope>::)"
    r"|(?P<open>[(\[{<])|(?P<close>[)\]}>])|(?P<mark>->|\.\.\.|[.,*&#!=-])"
)
_WORD = re.compile(rf"[{_LETTER}][0-9{_LETTER}]*")
_NUMBER = re.compile(
    r"\d+[eE][+-]?\d{1,3}[fFlL]?|\d{1,10}(?:[uUlLfF]{0,3}|x[0-9a-fA-F]{1,8})|\d{11,20}[uU]?[lL]{1,2}|\d{1,4}[dD]"
)
#: Words of C++ that stand beside another word, and how compilers call what has no name.
_OF_CPP = """
    void const volatile unsigned signed int long short char float double bool half operator anonymous namespace unnamed
    instance lambda clone typename class struct enum union auto decltype static inline new delete restrict __restrict__
"""
_BESIDE = frozenset(_OF_CPP.split())
#: A type as the last word: ``unary_kernel<identity bf16>``.
_TYPE = re.compile(r"(?:bf|tf|fp|f|u?int|float)\d{1,2}|e\dm\d")
#: What frameworks write before a name: ``autograd::engine::evaluate_function: AddBackward0``, ``nccl:all_reduce``.
_LABEL = re.compile(r"(?:(?:autograd|torch|c10d|c10|at)(?:::\w+)+: |nn\.Module: |(?:nccl|gloo|mpi|ucc|xccl):)")
#: JAX's annotations: ``XlaModule:#hlo_module=jit_f,program_id=9#``.
_XLA = re.compile(r"(?P<name>\w+):#(?P<values>\w+=[\w.-]*(?:,\w+=[\w.-]*)*)#")
#: A name that looks up an address: ``db.hyrule.org``; of the modules of Python none ends so. No such name has longer
#: parts, or more of them.
_DOMAIN = re.compile(
    r"(?i)(?:^|[^\w.])[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63}){0,126}\.(?:com|org|net|edu|gov|mil|int|io|ai|dev|cloud|local|lan|internal|intranet|intra|corp"
    r"|home|arpa|info|biz|me|co|app|xyz|site|online|tech|eu|de|uk|fr|ch|at|nl|be|it|es|pl|se|no|fi|dk|cz|ru|ua|tr|il|in|cn|jp|kr|tw|hk"
    r"|sg|au|nz|ca|us|mx|br|ar|za)\.?(?!\w)"
)
#: Where a layer's name of ONNX begins and ends.
_LAYER = re.compile(r"(?<![\w/~.:])/[\w./-]+")
#: Folders that a path starts with on many machines, with the number that some of them bear: ``/data2``.
_ROOT = re.compile(
    r"/*(?:app|bin|code|content|data|datasets?|dev|etc|export|homes?|kaggle|lib64|lib|lustre|media|mnt|net|nfs|opt"
    r"|private|proc|projects?|root|run|sbin|scratch|shared|srv|storage|sys|tmp|usr|Users|var|Volumes|work|workspaces?)"
    r"\d*/"
)

#: Four numbers with points between them.
_ADDRESS = re.compile(r"(?<![0-9])([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})(?![0-9])")
_SPELLINGS = frozenset(text for spellings in DEFAULT_NAMES.values() for text in spellings)
_LONGEST_PHRASE = 200
#: Characters of a number that stands anywhere in code, of the longest of C++, and of all longer ones in a name's <>.
_LONGEST_ARGUMENT, _LONGEST_LONG, _MOST_DIGITS = 8, 20, 80
#: Digits of a phrase, and of a message with its versions and counts.
_MOST_PHRASE_DIGITS, _MOST_MESSAGE_DIGITS = 12, 32
_MOST_NUMBERS = 6
_JOINS = {"->", "=>", "-", "/", "+", "&", "|", "=", MARK}
#: A size, a type, a GPU: ``ctx1024``, ``bf16``, ``A100``, ``80GB``, ``7b``.
_CODE = re.compile(r"[A-Za-z]{1,4}\d{1,5}[A-Za-z]{0,3}|\d{1,5}[A-Za-z]{1,3}|[A-Za-z]")
_FIGURE = re.compile(r"[0-9]{1,8}")
_OPENING, _CLOSING = "([{\"'<`", ")]}\"'>`,.;!?:%"
_API = re.compile(r"(?:cuda|cu|cupti|CUPTI|nvtx|nccl|hip|cublas|cudnn)[A-Z_]\w*(?:/[A-Z]\w*)?(?:\(\))?")


def is_name(text: str) -> bool:
    """Whether a text reads as a name of a range, a kernel, a function or a thread."""
    if not text or _is_alias(text):
        return True
    if is_owned(text):
        return False
    plain = _LAYER.sub(_layer_word, text)
    return _is_mangled(plain) or _is_annotation(plain) or _is_code(plain) or _is_phrase(plain)


def _is_alias(text: str) -> bool:
    alias = read_alias(text)
    return alias is not None and (not alias.kernel_class or {alias.kernel_class, *alias.part_of} <= CLASSES.keys())


def readable_words(text: str) -> str:
    """A message without the words that are not of this field, each a mark instead; marks beside another are one."""
    plain = without_numbers(text, MARK)
    if sum(map(str.isdigit, plain)) > _MOST_MESSAGE_DIGITS:
        plain = re.sub(r"[0-9]+", MARK, plain)
    words = plain.split(" ")
    shown = [word if not word or _is_message_word(word) else MARK for word in words]
    return " ".join(word for i, word in enumerate(shown) if word != MARK or i == 0 or shown[i - 1] != MARK)


def is_harmless_word(word: str) -> bool:
    """Whether a word of a command line looks like an option, a number, a file or a module: ``train.py``, ``1e-4``."""
    plain = re.fullmatch(r"[\w .,:=+%-]{0,80}", word, re.ASCII) and not re.search(r"\d{11}", word)
    return bool(plain) and not _is_address(word) and _are_plain(re.findall(r"\w+", word))


def _layer_word(match: re.Match[str]) -> str:
    """``/conv1/Conv`` is a layer of ONNX, ``/data/Conv`` a file: a word that is known, or what it was."""
    parts = [part for part in re.split(r"[/._-]", match[0]) if part]
    is_layer = is_layer_name(match[0]) or (len(parts) < 3 and match[0].count("/") == 1)
    known = all(part.isdigit() or is_field_word(part) or (len(part) < 2 and part.isalpha()) for part in parts)
    return "Conv" if is_layer and known and not _ROOT.match(match[0]) else match[0]


def _is_mangled(text: str) -> bool:
    """Whether a name is mangled as the Itanium ABI has it: each name in it behind its length, ``_Z3addPfi``."""
    if not text.startswith("_Z"):
        return False
    at, letters, names = 2, 0, list[str]()
    while at < len(text):
        if code := _MANGLED_CODE.match(text, at):
            at = code.end()
            letters = letters + 1 if len(code[0]) == 1 else 0
            if letters > _MOST_LETTERS:
                return False
            continue
        length = _LENGTH.match(text, at)
        if not length:
            return False
        at = length.end() + int(length[0])
        name = text[length.end() : at]
        if len(name) < int(length[0]) or not _WORD.fullmatch(name) or may_be_secret(name):
            return False
        letters = 0
        names.append(name)
    return bool(names) and not may_hide_secret(text, names)


#: Types, operators and scopes between two names; a kernel of cuDNN has 14.
_MOST_LETTERS = 18
_LENGTH = re.compile(r"[1-9]\d{0,3}")
#: What stands between the names: substitutions, literals, and one or two letters for types, operators and scopes.
_MANGLED_CODE = re.compile(
    r"S[0-9A-Z]{0,3}_|T\d{0,3}_|L(?:[lmxy]n?\d{1,20}|[a-z]n?\d{1,10})E|U[lt]\d{0,3}_|E\d{0,3}_|0E|\d{1,2}(?=E(?:L[a-zN_]|NS|DF|E|S[0-9A-Z]?_))|D[vF]\d{1,4}[_bx]?|f[pL]\d{0,3}_|A\d{1,9}_"
    rf"|[A-Za-z_{MARK}]|\.\w{{1,20}}$"
)


def _is_annotation(text: str) -> bool:
    match = _XLA.fullmatch(text)
    if not match or _is_address(text) or has_joined_digits(text):
        return False
    pairs = [pair.partition("=") for pair in match["values"].split(",")]
    return not any(is_telling(name) for name, _, _ in pairs) and _are_plain(re.findall(r"\w+", text))


def _are_plain(identifiers: Iterable[str]) -> bool:
    return not any(map(may_be_secret, identifiers))


def _is_code(text: str) -> bool:
    """Whether a text is made of identifiers as C++ and Python put them together."""
    label = _LABEL.match(text)
    tokens = list(_tokens(text[label.end() :] if label else text))
    if not any(kind == "word" for kind, _ in tokens) or _DOMAIN.search(text) or _ADDRESS.search(text):
        return False
    opened = False
    angles = digits = 0  # how many of < are open, and the digits of long numbers in them
    for i, (kind, token) in enumerate(tokens):
        opened = opened or kind == "open"
        angles += (token == "<") - (token == ">")
        before = tokens[i - 1][0] if i else ""
        if kind == "word" and may_be_secret(token):
            return False
        if kind == "number" and not (i and (_NUMBER.fullmatch(token) or (_is_cast(tokens, i) and token.isdigit()))):
            return False
        if kind == "number" and len(token) > _LONGEST_ARGUMENT:
            digits += len(token)
            if angles < 1 or digits > _MOST_DIGITS:
                return False
        if token == "," and not opened:
            return False
        if token == "=" and not (_at(tokens, i - 1)[1] in _BESIDE and _at(tokens, i + 1)[0] == "number"):
            return False
        may_be_minus = before in ("open", "space") or _is_cast(tokens, i)
        if token == "-" and not (may_be_minus and _at(tokens, i + 1)[0] == "number"):
            return False
        if kind == "bad" or (kind == "space" and not _may_part(tokens, i)):
            return False
    return not may_hide_secret(text, [token for kind, token in tokens if kind == "word"])


def _is_cast(tokens: list[tuple[str, str]], i: int) -> bool:
    """Whether a type in brackets stands before an index: ``(long)1125899906909960``."""
    return _at(tokens, i - 1)[1] == ")" and _at(tokens, i - 2)[1] in _BESIDE and len(_at(tokens, i)[1]) <= _LONGEST_LONG


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """The tokens of a text with their kinds; ``bad`` and nothing more where one cannot be read."""
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            yield "bad", text[at]
            return
        yield str(match.lastgroup), match[0]
        at = match.end()


def _at(tokens: list[tuple[str, str]], i: int) -> tuple[str, str]:
    """The kind and the text of a token; empty before the first and behind the last."""
    return tokens[i] if 0 <= i < len(tokens) else ("", "")


def _may_part(tokens: list[tuple[str, str]], i: int) -> bool:
    """Whether the blank at an index stands where code has one."""
    if not 0 < i < len(tokens) - 1:
        return False
    (before, left), (after, right) = tokens[i - 1], tokens[i + 1]
    named = ("word", "number")
    if before in named and after in named:
        is_result = _at(tokens, i - 2)[0] == "scope" and _at(tokens, i + 2)[0] in ("scope", "open")
        return left in _BESIDE or right in _BESIDE or bool(_TYPE.fullmatch(right)) or is_result
    if before == "close" and after in named:
        return right in _BESIDE or left == ">"
    return True


def _is_phrase(text: str) -> bool:
    """Whether a text is words of this field, at least one of them longer than a letter, and a few numbers."""
    if len(text) > _LONGEST_PHRASE or text != text.strip():
        return False
    words = text.split(" ")
    numbers = len(re.findall(r"\d+", text))
    if not all(map(_is_phrase_word, words)) or numbers > _MOST_NUMBERS:
        return False
    if has_joined_digits(text) or sum(map(str.isdigit, text)) > _MOST_PHRASE_DIGITS:
        return False
    if text.isdigit() or normalized_name(text) in _SPELLINGS:
        return True
    return any(len(part) > 1 and is_field_word(part) and not part.isdigit() for part in re.findall(r"[A-Za-z]+", text))


def _is_phrase_word(word: str) -> bool:
    if word in _JOINS or not word:
        return True
    core = word.lstrip(_OPENING).rstrip(_CLOSING)
    closing = word[len(word.rstrip(_CLOSING)) :]
    if not core or (":" in closing and is_telling(core)):
        return False
    name, is_set, value = core.partition("=")
    if is_set:
        return not is_telling(name) and _are_words(name) and _is_small(value)
    return _are_words(core)


def _is_small(value: str) -> bool:
    return bool(re.fullmatch(r"\d{1,7}(?:\.\d{1,6})?", value)) or is_field_word(value) or bool(_CODE.fullmatch(value))


def _are_words(core: str) -> bool:
    """Whether what one writes together is words, numbers and codes: ``forward/backward``, ``layer1.0``, ``bf16``."""
    if core[:1] in ("", "/", "~") or "//" in core or _is_address(core):
        return False
    parts = [part for part in re.split(r"[-_/+.#&()\[\]{}…]", core) if part]
    return all(_FIGURE.fullmatch(part) or is_field_word(part) or _CODE.fullmatch(part) for part in parts)


def _is_address(core: str) -> bool:
    """Whether four numbers with points between them may be an address of the network: a version has others."""
    numbers = _ADDRESS.search(core)
    return bool(numbers and all(int(number) < 256 for number in numbers.groups())) or bool(_DOMAIN.search(core))


def _is_message_word(word: str) -> bool:
    core = word.strip(f"\t\n\r{_OPENING}{_CLOSING}")
    if not core or _API.fullmatch(core):
        return _are_plain(re.findall(r"\w+", core))
    if core.startswith("--"):
        core = core[2:]
    return bool(core) and _is_phrase_word(core) and not is_owned(core) and not has_joined_digits(core)
