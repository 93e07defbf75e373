"""Which words are everybody's, and which values are a person's or a machine's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

#: The shortest value of a variable that is looked for. A shorter one is found in half of all names.
_SHORTEST = 6
_SHORTEST_SECRET = 4
_SHORTEST_PERSON = 3
_SHORTEST_PART = 8

#: Variables that hold a secret, and those that name a person or a machine, by their own names.
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|SIGNATURE|_PWD", re.I)
_HOST = re.compile(r"HOST(?!TYPE|CC|CXX)|NODE_?(?:NAME|LIST)|CLUSTER", re.I)
_PERSON = re.compile(rf"USER|LOGNAME|{_HOST.pattern}|MAIL|AUTHOR|OWNER|ACCOUNT", re.I)

#: Words of settings that many machines share; those of phases and kernels come to them.
_COMMON_WORDS = """
    256color admin all amd auto boolean build capabilities color compute config container cpython cublas cuda debian
    default display docker driver en epyc float16 float64 fp16 fp32 fp8 generic gnome gnu graphics info intel iteration
    kernel latin linux loaded localhost lts model network nobody node none nvidia off on only process profile profiler
    pytest python query rank release rocm root runner self session shell spawn standard system terminal test text thread
    torch train truecolor ubuntu unknown us user utf utility value verbose version video warn warning x86 xeon xterm yes
"""
#: Operators of ONNX that layers are called after, as in ``/layer1/layer1.0/conv1/Conv_output_0``.
_LAYER_OPERATORS = """
    Abs Add And ArgMax ArgMin AveragePool BatchNormalization BiasGelu Cast Ceil Clip Concat Constant
    ConstantOfShape Conv ConvTranspose Cos CumSum DepthToSpace DequantizeLinear Div Dropout Einsum Elu Equal Erf
    Exp Expand FastGelu Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool
    GlobalMaxPool Greater GridSample GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization
    LSTM LayerNormalization LeakyRelu Less Log LogSoftmax MatMul Max MaxPool Mean Min Mod Mul Neg NonZero Not
    OneHot Or PRelu Pad Pow QuantizeLinear Range Reciprocal ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    Relu Reshape Resize Round ScatterElements ScatterND Shape Sigmoid Sign Sin Slice Softmax Softplus
    SpaceToDepth Split Sqrt Squeeze Sub Sum Tanh Tile TopK Transpose Trilu Unsqueeze Upsample Where
"""
_LAYER_NAME = re.compile(rf"(?:/[\w.-]+)+/(?:{'|'.join(_LAYER_OPERATORS.split())})(?:_[\w.]*)?")
_WORD = re.compile(r"[A-Za-z0-9]+")
_ORDINARY_MARKS = re.compile(r"[A-Za-z0-9\s_.,:;+/()-]*")
#: A number, a letter, or the short name of a GPU, an architecture or a type: ``9.0a``, ``sm90``, ``H200``.
_CODE = re.compile(r"\d+[A-Za-z]?|[A-Za-z]|[A-Za-z]{1,2}\d{2,4}")

_PATH_NAME = r"[^\s/\\:;,\"'<>|()\[\]{}]+"
#: Paths are not looked for: wherever one stands, its last name alone is left of it.
_PATHS = re.compile(rf"~?(?:/{_PATH_NAME}){{2,}}/?(?::~?(?:/{_PATH_NAME}){{2,}}/?)*")


@dataclass(frozen=True)
class PrivateValues:
    """What is looked for in every text: ``values`` wherever they stand, ``words`` where they stand alone.

    ``hosts`` are those of both that name a machine: with them goes the domain behind them. ``variables`` counts the
    environment variables they all come from.
    """

    values: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    hosts: frozenset[str] = frozenset()
    variables: int = 0

    @staticmethod
    def of(found: set[str], hosts: set[str], variables: int) -> PrivateValues:
        """Sorts what was found, longest first, so that a part does not hide the whole."""
        order = sorted(found, key=lambda value: (-len(value), value))
        words = tuple(value for value in order if _stands_alone(value))
        values = tuple(value for value in order if not _stands_alone(value))
        return PrivateValues(values, words, frozenset(hosts), variables)


def _stands_alone(value: str) -> bool:
    """Plain letters, or a few characters: part of many a longer word."""
    return value.isalpha() or len(value) < _SHORTEST


@cache
def ordinary_words() -> frozenset[str]:
    """The words that say nothing of a machine's owner, in small letters.

    Those that the package itself knows among them, from the spellings of phases and from the rules that tell
    kernels apart, so that a variable ``MODE=forward`` takes no phase away and ``BACKEND=cutlass`` no kernel.
    """
    from nsys_analyzer.analysis.class_rules import RULES
    from nsys_analyzer.analysis.phases import DEFAULT_NAMES

    rules = (text for rule in RULES for text in (rule.pattern, rule.example, rule.kernel_class))
    phases = (text for spellings in DEFAULT_NAMES.values() for text in spellings)
    parts = re.compile(r"[A-Za-z]+\d*|[A-Z]?[a-z]{2,}")
    known = (word.lower() for text in (*rules, *phases, *DEFAULT_NAMES) for word in parts.findall(text))
    return frozenset(_COMMON_WORDS.split()).union(known)


def is_ordinary(value: str) -> bool:
    """Whether a value is made of numbers and of words that everybody uses: ``1``, ``C.UTF-8``, ``forward``."""
    words = _WORD.findall(value)
    return bool(words) and bool(_ORDINARY_MARKS.fullmatch(value)) and all(map(_is_ordinary_word, words))


def _is_ordinary_word(word: str) -> bool:
    spellings = (word.lower(), word.lower().rstrip("0123456789"))
    return bool(_CODE.fullmatch(word)) or not ordinary_words().isdisjoint(spellings)


def is_layer_name(path: str) -> bool:
    """Whether what looks like a path is the name of a layer: ONNX ends it with its operator, ``/conv1/Conv``."""
    return bool(_LAYER_NAME.fullmatch(path))


def is_telling(name: str) -> bool:
    """Whether the name of a variable or an option speaks of a secret, a person or a machine."""
    return bool(_SECRET.search(name) or _PERSON.search(name))


def is_host(name: str) -> bool:
    """Whether the name of a variable says that it names a machine."""
    return bool(_HOST.search(name))


def private_parts(name: str, value: str) -> Iterator[str]:
    """What of a variable's value is private: the value, and those parts of a list that hold letters and numbers.

    A value of six characters or more; of four where the variable's name speaks of a secret, of three where it
    speaks of a person or a machine; and none that everybody has.
    """
    secret, person = bool(_SECRET.search(name)), bool(_PERSON.search(name))
    shortest = _SHORTEST_SECRET if secret else _SHORTEST_PERSON if person else _SHORTEST
    value = value.strip()
    if len(value) >= shortest and _is_private(value, telling=secret or person):
        yield value
    for part in re.split(r"[\s:;,|@/]+" if "://" in value else r"[\s:;,|]+", value):
        mixed = re.search(r"\d", part) and re.search(r"[A-Za-z]", part)
        if mixed and len(part) >= min(shortest + 2, _SHORTEST_PART) and _is_private(part, telling=secret or person):
            yield part


def _is_private(value: str, *, telling: bool) -> bool:
    if telling:  # its numbers are no version, and its words no list of settings: gpu-node-17
        return value.lower() not in ordinary_words() and not (value.isdigit() and len(value) < _SHORTEST)
    return not is_ordinary(value) and not _PATHS.fullmatch(value)
