"""Short labels for kernels, whose full names have up to a thousand characters.

A label names the operation and its type, ``elementwise mul float``. Kernels that would share one differ by
how they are built (``vectorized 4``), a word of their template arguments, or at last ``#2``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, takewhile

from nsys_analyzer.analysis.kernels.classes import demangle

_TYPES = {
    **{name: name for name in ("float", "double", "long", "int", "short", "bool")},
    **dict.fromkeys(("c10::BFloat16", "__nv_bfloat16", "cutlass::bfloat16_t"), "bf16"),
    **dict.fromkeys(("c10::Half", "__half", "cutlass::half_t"), "half"),
    "c10::Float8_e4m3fn": "e4m3",
    "unsigned char": "uchar",
}
_TYPE = re.compile("|".join(rf"(?<![\w:]){re.escape(name)}(?![\w:])" for name in _TYPES))
#: Numbers with their type before them, and index types: no element of a tensor.
_NOT_DATA = re.compile(r"\((?:unsigned )?\w+\)\d+|unsigned (?:int|long|short)")
#: Standard functors by the operator they stand for; ATen's own names follow a pattern, ``_OPERATORS``.
_STANDARD = {"plus": "add", "minus": "sub", "multiplies": "mul", "divides": "div", "Sqrt": "sqrt"}
_OPERATORS = (
    re.compile(r"(?!gpu_|TensorI)(\w+?)_kernel(?:_cuda|_impl|_cuda_impl)?"),
    re.compile(r"CUDAFunctor(?:OnSelf|OnOther)?_(\w+)"),
    re.compile(r"launch_(\w+)"),
    re.compile(r"(\w+)_(?:cuda_out|functor)"),
    re.compile(r"(\w+?)CUDAKernel(?:Impl)?"),
    re.compile(r"(?![AB]?Unary|Binary|Ternary|Pointwise)(\w+?)(?:Math)?(?:Functor\w*|Ops)"),
)
_BUILD = re.compile(r"vectorized|unrolled|legacy|Smem|warp|persistent")
_WRAPPER = re.compile(
    r"((?<!\w)(?:[AB]?Unary|Binary|Ternary|Pointwise)\w*?(?=Functor)|(?<=CUDAFunctor)On(?:Self|Other))"
)
_TOO_SHORT = ("kernel", "Kernel", "kernel2", "Kernel2")
#: Characters that words of several kernels start with, which are left out.
_LONG = 16
_FORBIDDEN = str.maketrans({"|": "/", "`": "'"})


@dataclass(frozen=True)
class _Kernel:
    """A kernel's name taken apart: its function, the text of its template arguments, and the full name."""

    name: str
    function: str
    arguments: str

    @classmethod
    def parse(cls, name: str) -> _Kernel:
        text = re.sub(r"<unnamed>|\(anonymous namespace\)|\{anonymous\}", "_anonymous", demangle(name))
        text = re.sub(r"^(?:void |static )*(?:std::enable_if<.*?, void>::type )?", "", text)
        match = re.match(r"[\w:]+", text)
        function = match.group(0).rstrip(":") if match else text
        return cls(name, _last_part(function) or function, text[len(function) :])

    def operator(self) -> str:
        """The operator that a functor among the template arguments stands for, or nothing."""
        for word in re.findall(r"\w+", self.arguments):
            if word in _STANDARD:
                return _STANDARD[word]
            if match := next(filter(None, (pattern.fullmatch(word) for pattern in _OPERATORS)), None):
                return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", match[1]).lower()
        return ""

    def type(self) -> str:
        """The first type among the template arguments that is no index and no mask, or nothing."""
        found = [_TYPES[name] for name in _TYPE.findall(_NOT_DATA.sub("", self.arguments))]
        return next((name for name in found if name not in ("int", "bool")), found[0] if found else "")


def _last_part(function: str) -> str:
    """The last word of a qualified name, and the one before it where the last says too little."""
    *_, before, last = ("", *function.split("::"))
    word = last.rpartition(":")[2]
    needs_more = word in _TOO_SHORT or before.endswith("aten")
    return f"{before.rpartition(':')[2]}::{word}" if before and needs_more and word == last else word


def _join(*words: str) -> str:
    return " ".join(word for word in words if word)


def _elementwise(kernel: _Kernel, _: re.Match[str]) -> str:
    operator = kernel.operator()
    source = re.search(r"lambda\((?:bool, )?([^)]+)\)", kernel.arguments) if "copy" in operator else None
    types = _TYPES.get(source.group(1), "") if source else kernel.type()
    target = {"bfloat16_copy": "to bf16", "float16_copy": "to half", "direct_copy": ""}.get(operator)
    return _join("elementwise", operator, types) if target is None else _join("elementwise copy", types, target)


def _operation(kernel: _Kernel, match: re.Match[str]) -> str:
    family = {"distribution": "random"}.get(match[1], match[1])
    return _join(family, kernel.operator().removeprefix("random_"), kernel.type())


def _softmax(kernel: _Kernel, match: re.Match[str]) -> str:
    warp_flag = re.match(r"<[^()<>]*(?:\(int\))?\d+, (?:\(bool\)1|true)", kernel.arguments)
    is_log = "LogSoftMax" in kernel.arguments or ("warp" in kernel.function and warp_flag is not None)
    return _join("log_softmax" if is_log else "softmax", match["direction"].lower(), kernel.type())


def _xmma(_: _Kernel, match: re.Match[str]) -> str:
    split = " split_k" if "split_k" in match["rest"] else ""
    return f"xmma {match['kind'].replace('_', ' ')} {match['type']} {match['layout']} {match['tile']}{split}"


def _spaced(_: _Kernel, match: re.Match[str]) -> str:
    return _join(*(group.replace("_", " ").strip() for group in match.groups()))


def _typed(kernel: _Kernel, match: re.Match[str]) -> str:
    return _join(match[1], kernel.type())


#: Families of names: the first pattern found in ``function + arguments`` makes the label.
_FAMILIES: tuple[tuple[str, Callable[[_Kernel, re.Match[str]], str]], ...] = (
    (r"^\[?((?:CUDA )?[Mm]em(?:cpy|set) ?[^\]]*)", lambda _, match: match[1]),
    (r"^(distribution)_elementwise", _operation),
    (r"^(?!_scatter|index_)\w*elementwise_kernel", _elementwise),
    (r"^(reduce|multi_tensor)(?:_apply)?_kernel<", _operation),
    (r"^(?:\w*SoftMax|softmax_warp_)(?P<direction>[Ff]orward|[Bb]ackward)", _softmax),
    (
        r"xmma_(?P<kind>(?:\w+_)?gemm)_[^_]+_(?P<type>tf32|bf16|[fi]\d\d?|e4m3|e5m2)\w*?_[^_]+_"
        r"(?P<layout>[nt]{2}_[nt])_tilesize(?P<tile>[\dx]+)(?P<rest>\w*)",
        _xmma,
    ),
    (
        r"cutlass_(?:\d+_)?([a-z]\w*?)_(\d+x\d+_\d+x\d+_[a-z]+)(?:_align\d+)?\b",
        lambda _, match: f"cutlass {match[1].replace('_', ' ')} {match[2]}",
    ),
    (r"^nvjet_(?:sm\d+_)?([a-z]+)_(\w+)", lambda _, match: f"nvjet {match[1]} {match[2]}"),
    (r"^(cudnn)_generated_fort_native_(sdpa_\w+?)(?:_knob_\d+)?(_\d+x\d+x\d+)", _spaced),
    (r"^(nccl)(?:Dev)?Kernel_(\w+)", _spaced),
    (r"^(splitKreduce|gemv2T|gemv2N|gemvNSP|gemmSN_\w\w|gemmk1|dot|reduce_1Block)_kernel\w*<", _typed),
    (r"^\w+<.*?(FlashAttn(?:Fwd|Bwd)\w*)<", _typed),
    (r"^(gemvx)::kernel<", _typed),
    (r"^kentry<\d+, (\w+)", lambda _, match: match[1]),
    (r"^device_kernel<.*(?i:gemm)", lambda kernel, _: _join("cutlass gemm", kernel.type())),
)


def _base(kernel: _Kernel) -> str:
    """The label of a kernel before it is compared with others: by its family, else by its function."""
    text = kernel.function + kernel.arguments
    for pattern, write in _FAMILIES:
        if match := re.search(pattern, text):
            return write(kernel, match)
    return kernel.function if kernel.function.strip() else "unnamed"


def _differing(group: Sequence[_Kernel]) -> list[str]:
    """The first words of each kernel's name that not every kernel of its group has, without a long start of all."""
    words = [re.findall(r"\w+", demangle(kernel.name)) for kernel in group]
    common = set.intersection(*map(set, words))
    values = [" ".join(dict.fromkeys([word for word in one if word not in common][:3])) for one in words]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*values, strict=False))
    start = "".join(letters[0] for letters in alike).rpartition("_")[0]
    return [value[len(start) + 1 :] if len(start) > _LONG else value for value in values]


def _build(kernel: _Kernel) -> str:
    """The kind of loop, and the first number of the template arguments."""
    match = _BUILD.search(kernel.function)
    if match is None and "elementwise" in kernel.function:
        return "strided"
    width = re.match(r"<(?:\(int\))?(\d+)", kernel.arguments)
    return _join(match[0].lower() if match else "", width[1] if width else "")


def _wrapper(kernel: _Kernel) -> str:
    """The functor around the operator: which operands are tensors, scalars, lists of scalars."""
    match = _WRAPPER.search(kernel.arguments)
    return match[0] if match else ""


def _fit(base: str, facets: Sequence[str], limit: int) -> str:
    """``base (facet, …)`` in at most ``limit`` characters: what is too long loses its end."""
    extra = _shorten(", ".join(facets), max(limit // 2, limit - len(base) - 3))
    tail = f" ({extra})" if extra else ""
    return _shorten(base, max(limit - len(tail), 4)) + tail


def _shorten(text: str, limit: int) -> str:
    text = " ".join(text.translate(_FORBIDDEN).split())
    return text if len(text) <= limit else f"{text[: limit - 1].rstrip()}…"


def make_short_labels(names: Sequence[str], limit: int = 60) -> dict[str, str]:
    """A short label for each full kernel name, unique among ``names``, whose order does not matter.

    None is longer than ``limit`` (at least 20) but for a closing ``#2`` that numbers, in the order of their full names,
    kernels that nothing else distinguishes; none holds a character that ends a cell of a Markdown table.
    """
    kernels = [_Kernel.parse(name) for name in sorted(set(names))]
    bases = {kernel.name: _base(kernel) for kernel in kernels}
    facets: dict[str, list[str]] = {kernel.name: [] for kernel in kernels}
    for facet in (partial(map, _build), partial(map, _wrapper), _differing):
        groups = defaultdict(list)
        for kernel in kernels:
            groups[_fit(bases[kernel.name], facets[kernel.name], limit)].append(kernel)
        for group in groups.values():
            values = dict(zip((kernel.name for kernel in group), facet(group), strict=True))
            if len(set(values.values())) > 1:
                for name, value in values.items():
                    facets[name] += [value] if value else []
    owner: dict[str, str] = {}  # of each label the kernel
    for name, base in bases.items():
        label = _fit(base, facets[name], limit)
        numbered = (f"{label} #{number}" for number in count(2))
        owner[next(one for one in chain([label], numbered) if one not in owner)] = name
    return {name: label for label, name in owner.items()}
