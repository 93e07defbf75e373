"""Makes short labels for kernels, whose full names have up to a thousand characters.

A label consists of the operation and the element type, such as ``elementwise mul float``. If several kernels would have
the same label, the label also contains the kind of the loop (``vectorized 4``) or a word of the template arguments. If
the labels are still equal, a number such as ``#2`` at the end distinguishes them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, takewhile

from nsys_analyzer.analysis.kernels.classes import demangle

_TYPE_LABELS = {
    **{name: name for name in ("float", "double", "long", "int", "short", "bool")},
    **dict.fromkeys(("c10::BFloat16", "__nv_bfloat16", "cutlass::bfloat16_t"), "bf16"),
    **dict.fromkeys(("c10::Half", "__half", "cutlass::half_t"), "half"),
    "c10::Float8_e4m3fn": "e4m3",
    "unsigned char": "uchar",
}
_TYPE_PATTERN = re.compile("|".join(rf"(?<![\w:]){re.escape(name)}(?![\w:])" for name in _TYPE_LABELS))
#: Matches types that are not the element type of a tensor: a type before a number, as in ``(int)4``, and index types.
_NON_ELEMENT_TYPE = re.compile(r"\((?:unsigned )?\w+\)\d+|unsigned (?:int|long|short)")
#: The operator that each of these functors computes. The names of ATen's functors match ``_OPERATOR_PATTERNS``.
_OPERATOR_OF_FUNCTOR = {"plus": "add", "minus": "sub", "multiplies": "mul", "divides": "div", "Sqrt": "sqrt"}
_OPERATOR_PATTERNS = (
    re.compile(r"(?!gpu_|TensorI)(\w+?)_kernel(?:_cuda|_impl|_cuda_impl)?"),
    re.compile(r"CUDAFunctor(?:OnSelf|OnOther)?_(\w+)"),
    re.compile(r"launch_(\w+)"),
    re.compile(r"(\w+)_(?:cuda_out|functor)"),
    re.compile(r"(\w+?)CUDAKernel(?:Impl)?"),
    re.compile(r"(?![AB]?Unary|Binary|Ternary|Pointwise)(\w+?)(?:Math)?(?:Functor\w*|Ops)"),
)
_LOOP_KIND_PATTERN = re.compile(r"vectorized|unrolled|legacy|Smem|warp|persistent")
_WRAPPER_PATTERN = re.compile(
    r"((?<!\w)(?:[AB]?Unary|Binary|Ternary|Pointwise)\w*?(?=Functor)|(?<=CUDAFunctor)On(?:Self|Other))"
)
#: Function names that do not identify a kernel without the namespace or class before them.
_UNSPECIFIC_NAMES = ("kernel", "Kernel", "kernel2", "Kernel2")
#: If the distinguishing words of all kernels start with more than this number of equal characters, labels omit these.
_MAX_COMMON_PREFIX_LENGTH = 16
#: Replacements for characters that end a cell of a Markdown table or start code in Markdown.
_REPLACED_CHARACTERS = str.maketrans({"|": "/", "`": "'"})


def make_short_labels(names: Sequence[str], limit: int = 60) -> dict[str, str]:
    """Returns a short label for each full kernel name.

    Labels are unique, and do not depend on the order of ``names``. A label contains no character that ends a cell of a
    Markdown table. Kernels with equal labels are numbered in the order of their full names.

    Args:
        names: full names of kernels.
        limit: the maximum number of characters of a label, at least 20. A number such as ``#2`` at the end of the label
            does not count.
    """
    kernels = [_Kernel.parse(name) for name in sorted(set(names))]
    base_labels = {kernel.name: kernel.make_base_label() for kernel in kernels}
    distinguishing_words: dict[str, list[str]] = {kernel.name: [] for kernel in kernels}
    find_loop_kinds, find_wrappers = partial(map, _Kernel.find_loop_kind), partial(map, _Kernel.find_wrapper)
    for find_words in (find_loop_kinds, find_wrappers, _find_differing_words):
        names_by_base_label = defaultdict(list)
        for kernel in kernels:
            names_by_base_label[_fit_label(base_labels[kernel.name], distinguishing_words[kernel.name], limit)].append(
                kernel
            )
        for group in names_by_base_label.values():
            words_of_kernel = dict(zip((kernel.name for kernel in group), find_words(group), strict=True))
            if len(set(words_of_kernel.values())) > 1:
                for name, value in words_of_kernel.items():
                    distinguishing_words[name] += [value] if value else []
    name_of_label: dict[str, str] = {}
    for name, base in base_labels.items():
        label = _fit_label(base, distinguishing_words[name], limit)
        numbered_labels = (f"{label} #{number}" for number in count(2))
        unused_label = next(
            candidate for candidate in chain([label], numbered_labels) if candidate not in name_of_label
        )
        name_of_label[unused_label] = name
    return {name: label for label, name in name_of_label.items()}


@dataclass(frozen=True)
class _Kernel:
    """The full name of a kernel, and two parts of this name: the function, and the text of the template arguments."""

    name: str
    function: str
    arguments: str

    @classmethod
    def parse(cls, name: str) -> _Kernel:
        """Parses the full name of a kernel. An unspecific function name keeps the namespace or class in front of it."""
        text = re.sub(r"<unnamed>|\(anonymous namespace\)|\{anonymous\}", "_anonymous", demangle(name))
        text = re.sub(r"^(?:void |static )*(?:std::enable_if<.*?, void>::type )?", "", text)
        match = re.match(r"[\w:]+", text)
        qualified = match.group(0).rstrip(":") if match else text
        *_, scope, last = ("", *qualified.split("::"))
        word = last.rpartition(":")[2]
        if scope and word == last and (word in _UNSPECIFIC_NAMES or scope.endswith("aten")):
            word = f"{scope.rpartition(':')[2]}::{word}"
        return cls(name, word or qualified, text[len(qualified) :])

    def find_operator(self) -> str:
        """Returns the operator of the first functor among the template arguments, or an empty text."""
        for word in re.findall(r"\w+", self.arguments):
            if word in _OPERATOR_OF_FUNCTOR:
                return _OPERATOR_OF_FUNCTOR[word]
            if match := next(filter(None, (pattern.fullmatch(word) for pattern in _OPERATOR_PATTERNS)), None):
                return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", match[1]).lower()
        return ""

    def find_type(self) -> str:
        """Returns the first type of the template arguments other than int and bool, else the first type, else ''."""
        types = [_TYPE_LABELS[name] for name in _TYPE_PATTERN.findall(_NON_ELEMENT_TYPE.sub("", self.arguments))]
        return next((name for name in types if name not in ("int", "bool")), types[0] if types else "")

    def find_loop_kind(self) -> str:
        """Returns the kind of the kernel's loop and the first number of the template arguments: ``vectorized 4``."""
        match = _LOOP_KIND_PATTERN.search(self.function)
        if match is None and "elementwise" in self.function:
            return "strided"
        width = re.match(r"<(?:\(int\))?(\d+)", self.arguments)
        return _join_words(match[0].lower() if match else "", width[1] if width else "")

    def find_wrapper(self) -> str:
        """Returns the functor around the operator, or ''. It shows whether operands are tensors, scalars or lists."""
        match = _WRAPPER_PATTERN.search(self.arguments)
        return match[0] if match else ""

    def make_base_label(self) -> str:
        """Returns a label that may not be unique: the label of the name's family, or the function without a family."""
        text = self.function + self.arguments
        for pattern, make_label in _KERNEL_FAMILIES:
            if match := re.search(pattern, text):
                return make_label(self, match)
        return self.function if self.function.strip() else "unnamed"


def _join_words(*words: str) -> str:
    return " ".join(word for word in words if word)


def _label_elementwise(kernel: _Kernel, _: re.Match[str]) -> str:
    operator = kernel.find_operator()
    source_type = re.search(r"lambda\((?:bool, )?([^)]+)\)", kernel.arguments) if "copy" in operator else None
    type_label = _TYPE_LABELS.get(source_type.group(1), "") if source_type else kernel.find_type()
    target_label = {"bfloat16_copy": "to bf16", "float16_copy": "to half", "direct_copy": ""}.get(operator)
    if target_label is None:
        return _join_words("elementwise", operator, type_label)
    return _join_words("elementwise copy", type_label, target_label)


def _label_operation(kernel: _Kernel, match: re.Match[str]) -> str:
    family = {"distribution": "random"}.get(match[1], match[1])
    return _join_words(family, kernel.find_operator().removeprefix("random_"), kernel.find_type())


def _label_softmax(kernel: _Kernel, match: re.Match[str]) -> str:
    warp_flag = re.match(r"<[^()<>]*(?:\(int\))?\d+, (?:\(bool\)1|true)", kernel.arguments)
    is_log = "LogSoftMax" in kernel.arguments or ("warp" in kernel.function and warp_flag is not None)
    return _join_words("log_softmax" if is_log else "softmax", match["direction"].lower(), kernel.find_type())


def _label_xmma(_: _Kernel, match: re.Match[str]) -> str:
    split = " split_k" if "split_k" in match["rest"] else ""
    return f"xmma {match['kind'].replace('_', ' ')} {match['type']} {match['layout']} {match['tile']}{split}"


def _label_by_groups(_: _Kernel, match: re.Match[str]) -> str:
    return _join_words(*(group.replace("_", " ").strip() for group in match.groups()))


def _label_with_type(kernel: _Kernel, match: re.Match[str]) -> str:
    return _join_words(match[1], kernel.find_type())


#: Families of kernel names: a pattern, and the function that makes the label. The first pattern that matches the text
#: ``function + arguments`` decides the label.
_KERNEL_FAMILIES: tuple[tuple[str, Callable[[_Kernel, re.Match[str]], str]], ...] = (
    (r"^\[?((?:CUDA )?[Mm]em(?:cpy|set) ?[^\]]*)", lambda _, match: match[1]),
    (r"^(distribution)_elementwise", _label_operation),
    (r"^(?!_scatter|index_)\w*elementwise_kernel", _label_elementwise),
    (r"^(reduce|multi_tensor)(?:_apply)?_kernel<", _label_operation),
    (r"^(?:\w*SoftMax|softmax_warp_)(?P<direction>[Ff]orward|[Bb]ackward)", _label_softmax),
    (
        r"xmma_(?P<kind>(?:\w+_)?gemm)_[^_]+_(?P<type>tf32|bf16|[fi]\d\d?|e4m3|e5m2)\w*?_[^_]+_"
        r"(?P<layout>[nt]{2}_[nt])_tilesize(?P<tile>[\dx]+)(?P<rest>\w*)",
        _label_xmma,
    ),
    (
        r"cutlass_(?:\d+_)?([a-z]\w*?)_(\d+x\d+_\d+x\d+_[a-z]+)(?:_align\d+)?\b",
        lambda _, match: f"cutlass {match[1].replace('_', ' ')} {match[2]}",
    ),
    (r"^nvjet_(?:sm\d+_)?([a-z]+)_(\w+)", lambda _, match: f"nvjet {match[1]} {match[2]}"),
    (r"^(cudnn)_generated_fort_native_(sdpa_\w+?)(?:_knob_\d+)?(_\d+x\d+x\d+)", _label_by_groups),
    (r"^(nccl)(?:Dev)?Kernel_(\w+)", _label_by_groups),
    (r"^(splitKreduce|gemv2T|gemv2N|gemvNSP|gemmSN_\w\w|gemmk1|dot|reduce_1Block)_kernel\w*<", _label_with_type),
    (r"^\w+<.*?(FlashAttn(?:Fwd|Bwd)\w*)<", _label_with_type),
    (r"^(gemvx)::kernel<", _label_with_type),
    (r"^kentry<\d+, (\w+)", lambda _, match: match[1]),
    (r"^device_kernel<.*(?i:gemm)", lambda kernel, _: _join_words("cutlass gemm", kernel.find_type())),
)


def _find_differing_words(group: Sequence[_Kernel]) -> list[str]:
    """Returns the words that distinguish each kernel: the first three words of its name that not all names contain.

    If the words of all kernels start with the same long text, this text is left out.
    """
    words_of_names = [re.findall(r"\w+", demangle(kernel.name)) for kernel in group]
    common = set.intersection(*map(set, words_of_names))
    values = [" ".join(dict.fromkeys([word for word in words if word not in common][:3])) for words in words_of_names]
    same_letters = takewhile(lambda letters: len(set(letters)) == 1, zip(*values, strict=False))
    common_start = "".join(letters[0] for letters in same_letters).rpartition("_")[0]
    return [
        value[len(common_start) + 1 :] if len(common_start) > _MAX_COMMON_PREFIX_LENGTH else value for value in values
    ]


def _fit_label(base: str, distinguishing_words: Sequence[str], limit: int) -> str:
    """Returns ``base (word, …)`` in at most ``limit`` characters. The ends of long parts are cut off."""
    words_text = _shorten(", ".join(distinguishing_words), max(limit // 2, limit - len(base) - 3))
    words_in_parentheses = f" ({words_text})" if words_text else ""
    return _shorten(base, max(limit - len(words_in_parentheses), 4)) + words_in_parentheses


def _shorten(text: str, limit: int) -> str:
    text = " ".join(text.translate(_REPLACED_CHARACTERS).split())
    return text if len(text) <= limit else f"{text[: limit - 1].rstrip()}…"
