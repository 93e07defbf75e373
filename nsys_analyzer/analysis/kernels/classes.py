"""Finds the class of each kernel from its name and the operator that launched it, and the precision of each matmul.

``class_rules`` declares the rules of the classes. A kernel that no rule matches has the class ``other``. If kernels of
one name have two classes, depending on the operators that launch them, they count as two distinct kernels. For example,
cuDNN multiplies matrices with kernels of cuBLAS: ``volta_sgemm_64x64_nt`` is a matmul if ``aten::mm`` launches it, and
a convolution if ``aten::convolution_backward`` launches it.

The name of a matmul shows the type in which it multiplies, not the type in which matrices are stored: ``s1688gemm`` on
fp32 matrices multiplies in TF32. The precision is None if the name does not show it. For example, cuDNN uses ``f16`` in
the names of attention kernels for both 16-bit types.

A shared copy replaces names by aliases:

- ``alias b`` replaces a name that no rule matches.
- ``alias b (matmul or convolution in bf16)`` also contains the class by name, a class that the launching operator may
  give, and the precision.
- ``forward 3, alias b`` replaces the name of a range of the phase ``forward``.
- ``alias b 17`` replaces one of several names that differ only in a number at the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import Attribution
from nsys_analyzer.analysis.intervals import LONG_AGO, NONE, Timeline
from nsys_analyzer.analysis.kernels.class_rules import (
    CLASSES,
    COMMUNICATION,
    FUSED_ATTENTION,
    MATMUL,
    OTHER,
    RULES,
    UNKNOWN,
    Rule,
)
from nsys_analyzer.analysis.kernels.own_classes import OwnClass, OwnClasses, compile_bounded_search, read_plugin_classes
from nsys_analyzer.trace.arrays import Ints, SmallInts, distinct_rows, mask_by_name
from nsys_analyzer.trace.columns import BETWEEN_DEVICES, MEMCPY, ON_DEVICE, UNNAMED_KERNEL
from nsys_analyzer.trace.phase_names import DEFAULT_NAMES
from nsys_analyzer.trace.trace import Trace

#: The number of characters of a kernel name that are searched. Names of C++ templates may have ten thousand characters.
MAX_SEARCHED_CHARACTERS = 20_000


@cache
def classify(name: str, operator: str = "") -> str:
    """Returns the class of a kernel, a key of ``known_classes()``.

    Args:
        name: the full name of the kernel, demangled or mangled.
        operator: the operator of PyTorch that launched the kernel, or empty if it is unknown. The class is that of the
            operator if no rule matches the name, or if the rule allows this class in ``Rule.part_of``.
    """
    rule = find_rule(name)
    class_by_name = rule.kernel_class if rule else UNKNOWN if name.startswith(UNNAMED_KERNEL) else OTHER
    if not operator:
        return class_by_name
    class_by_operator = classify(operator)
    return class_by_operator if class_by_operator in find_possible_classes(name) else class_by_name


def find_possible_classes(name: str) -> frozenset[str]:
    """Returns the classes that the kernel ``name`` may have, depending on the operator that launches it.

    Every class is possible if no rule matches the name.
    """
    rule = find_rule(name)
    return frozenset(known_classes() if rule is None else rule.part_of)


@cache
def find_rule(name: str) -> Rule | None:
    """Returns the rule that decides the class of a kernel, or None. Rules of user-defined classes take precedence."""
    text = demangle(name[:MAX_SEARCHED_CHARACTERS])
    for kernel_class, own_class in (*user_classes.items(), *read_plugin_classes().items()):
        if any(compile_bounded_search(pattern)(text) for pattern in own_class.kernels):
            return Rule(kernel_class, "", name)
    return find_built_in_rule(name)


def find_built_in_rule(name: str) -> Rule | None:
    """Returns the built-in rule that decides the class of a kernel, or None.

    For an alias in a shared copy, the function returns a rule with the class that the alias contains.
    """
    if alias := read_alias(name):
        is_known = alias.kernel_class in CLASSES
        return Rule(alias.kernel_class, re.escape(name), name, alias.part_of) if is_known else None
    text = demangle(name[:MAX_SEARCHED_CHARACTERS])
    return next((rule for rule in RULES if re.search(rule.pattern, text)), None)  # compiles a pattern on first use


#: The user-defined classes that were passed to ``use_classes``.
user_classes: dict[str, OwnClass] = {}


def use_classes(classes: OwnClasses) -> None:
    """Adds user-defined classes to the built-in and plugin classes, in place of those of an earlier call."""
    if classes != user_classes:
        user_classes.clear()
        user_classes.update(classes)
        find_rule.cache_clear()
        classify.cache_clear()


def known_classes() -> Mapping[str, str]:
    """Returns the name and the glossary text of every class: built-in classes, and those of plugins and of the user."""
    meanings = {name: row.meaning for name, row in CLASSES.items()}
    own_meanings = {name: row.meaning for name, row in {**read_plugin_classes(), **user_classes}.items()}
    return {**meanings, **own_meanings, **meanings}  # built-in classes come first, and keep their descriptions


@dataclass(frozen=True)
class Kernels:
    """The distinct kernels of a trace.

    Attributes:
        code: shape (operations,), the index of the kernel of each operation; -1 for an operation that is not a kernel.
            A copy that is part of a collective has an index as well, because some collectives run on copy engines.
        names: shape (kernels,), the full name of each kernel. If kernels of one name have several classes, the name
            occurs once for each class.
        classes: shape (kernels,), the class of each kernel.
    """

    code: SmallInts
    names: tuple[str, ...]
    classes: tuple[str, ...]


def find_kernels(trace: Trace, attribution: Attribution) -> Kernels:
    """Finds the distinct kernels of a trace, each with its class. A copy of a collective counts as a kernel, too."""
    operations, operators = trace.operations, trace.operators
    classes = [classify(name) for name in operations.names]
    operator_classes = {classify(operators.names[i]) for i in np.flatnonzero(np.bincount(operators.name))} - {OTHER}
    may_change = [not operator_classes.isdisjoint(find_possible_classes(name)) for name in operations.names]
    undecided_operations = np.flatnonzero(np.array(may_change, np.bool_)[operations.name[operations.kernels]])
    operator = (
        find_launching_operators(trace, attribution, undecided_operations)
        if len(undecided_operations)
        else undecided_operations
    )
    # A distinct kernel is a pair of a name and a class.
    code_of_kernel: dict[tuple[str, str], int] = {}
    names_with_class = zip(operations.names, classes, strict=True)
    code_of_name = [code_of_kernel.setdefault(kernel, len(code_of_kernel)) for kernel in names_with_class]
    code = np.array([*code_of_name, NONE], np.int32)[operations.name]
    launched_operations, operator = undecided_operations[operator != NONE], operator[operator != NONE]
    first_of_pair, position = distinct_rows(operations.name[launched_operations], operator)
    pairs = zip(
        operations.name[launched_operations[first_of_pair]].tolist(), operator[first_of_pair].tolist(), strict=True
    )
    name_pairs = [(operations.names[name], operators.names[launcher]) for name, launcher in pairs]
    kernels = [(name, classify(name, launcher)) for name, launcher in name_pairs]
    decided_codes = [code_of_kernel.setdefault(kernel, len(code_of_kernel)) for kernel in kernels]
    code[launched_operations] = np.array(decided_codes, np.int32)[position]
    copies = np.flatnonzero((operations.kind == MEMCPY) & np.isin(operations.copy, (ON_DEVICE, BETWEEN_DEVICES)))
    if len(copies) and any(map(is_collective, (*trace.ranges.names, *operators.names))):
        collective_names = find_launching_collectives(trace, attribution, copies)
        for operation, name in zip(copies.tolist(), collective_names, strict=True):
            # A range of the program may also contain unrelated copies within one device.
            if name and (operations.copy[operation] == BETWEEN_DEVICES or LIBRARY_COLLECTIVE.search(name)):
                code[operation] = code_of_kernel.setdefault((f"{name} (copies)", COMMUNICATION), len(code_of_kernel))
    distinct_names = tuple(name for name, _ in code_of_kernel)
    return Kernels(code, distinct_names, tuple(kernel_class for _, kernel_class in code_of_kernel))


def find_launching_operators(trace: Trace, attribution: Attribution, operations: Ints) -> Ints:
    """Returns the name code of the innermost operator around the launch of each operation, or -1.

    Only operators of the launching thread count, since an operator runs on one thread. For a node of a CUDA graph, the
    function returns the operator around the capture of the node, if the trace records the capture.

    Returns:
        Indices into ``trace.operators.names``, in the order of ``operations``.
    """
    return np.append(trace.operators.name, NONE)[find_innermost_operators(trace, attribution, operations)]


def find_innermost_operators(
    trace: Trace, attribution: Attribution, operations: Ints, candidates: Ints | slice = slice(None)
) -> Ints:
    """Returns the index of the innermost operator around the launch of each operation, or -1.

    Args:
        trace: the trace.
        attribution: the launches of the trace's operations.
        operations: the indices of the operations.
        candidates: the indices of the operators to look for.
    """
    operators = trace.operators
    index = np.append(np.arange(len(operators))[candidates], NONE)
    thread, start, end = (column[candidates] for column in (operators.thread, operators.start, operators.end))
    timeline = Timeline(thread, start, end, innermost=True)
    thread, time = attribution.thread.copy(), attribution.time.copy()
    captures = attribution.captures
    thread[captures.operation], time[captures.operation] = captures.thread, captures.time
    innermost_operator: Ints = index[timeline.open_at(thread[operations], time[operations])]
    return innermost_operator


def find_launching_collectives(trace: Trace, attribution: Attribution, operations: Ints) -> list[str]:
    """Returns for each operation the name of the collective call that launched it, or an empty text if none did.

    The name joins the names of the innermost range and of the innermost operator around the launch, if these are
    collectives. The range does not count if another operator inside the range launches the operation, since such an
    operator only prepares the collective.
    """
    ranges, operators = trace.ranges, trace.operators
    range_around = attribution.find_innermost(mask_by_name(ranges, is_collective), operations)
    operator_around = find_innermost_operators(trace, attribution, operations)
    operator_start = np.append(operators.start, LONG_AGO)[operator_around]
    is_innermost = operator_start <= np.append(ranges.start, LONG_AGO)[range_around]
    is_collective_operator = np.append(mask_by_name(operators, is_collective), False)[operator_around]
    range_codes = np.append(ranges.name, NONE)[np.where(is_innermost, range_around, NONE)]
    operator_codes = np.append(operators.name, NONE)[np.where(is_collective_operator, operator_around, NONE)]
    range_names, operator_names = (*ranges.names, ""), (*operators.names, "")
    pairs = zip(range_codes.tolist(), operator_codes.tolist(), strict=True)
    return [f"{range_names[i]} {operator_names[j]}".strip() for i, j in pairs]


#: Matches the names of the ranges and operators that libraries write around collectives.
LIBRARY_COLLECTIVE = re.compile(r"(?:^| )(?:[nr]?ccl[:A-Z]|_?c10d(?:_functional)?::|symm_mem::|record_param_comms)")
_PROGRAM_COLLECTIVE = re.compile(r"(?i)all[-_ ]?(?:reduce|gather)|reduce[-_ ]?scatter|all[-_ ]?to[-_ ]?all")


def is_collective(annotation: str) -> bool:
    """Returns True if a range or operator with this name contains a collective, or an exchange between two ranks."""
    text = annotation[:MAX_SEARCHED_CHARACTERS]
    return bool(LIBRARY_COLLECTIVE.search(text) or _PROGRAM_COLLECTIVE.search(text)) and "copy" not in text.lower()


_MANGLED = re.compile(r"_ZL?(?=N?K?L?\d)N?K?L?")
#: Matches a template argument in a mangled name of the Itanium ABI: a number, or the length before an identifier. The
#: last two alternatives match types and back references, so that their digits are not read as a length.
_TEMPLATE_ARGUMENT = re.compile(
    r"L[a-z](?P<number>\d+)E|(?P<enum>LNS[\dA-Z]*_)?(?P<length>[1-9]\d{0,3})(?=[A-Za-z_])|DF\d+[b_]|[ST][\dA-Z]*_"
)
_ENUMERATOR = re.compile(r"E\d+E")


def demangle(name: str) -> str:
    """Returns the qualified name of a mangled kernel name, with the names and numbers among its template arguments.

    ``_ZN2at6native13reduce_kernelILi512ENS0_8ReduceOpIf…`` becomes ``at::native::reduce_kernel<512, ReduceOp, …>``. A
    name that is not mangled is returned unchanged. This function is needed because no demangler for Python reads all
    names that HIP's compiler writes.
    """
    prefix = _MANGLED.match(name)
    if prefix is None:
        return name
    name_parts, position = [], prefix.end()
    while length := re.match(r"L?([1-9]\d{0,3})", name[position : position + 5]):
        start = position + length.end()
        position = start + int(length.group(1))
        name_parts.append(name[start:position].replace("_GLOBAL__N_1", "(anonymous namespace)"))
    qualified_name, arguments = "::".join(name_parts), []
    if name[position : position + 1] != "I":
        return qualified_name
    while match := _TEMPLATE_ARGUMENT.search(name, position):
        position = match.end() + int(match["length"] or 0)
        arguments.append(match["number"] or name[match.end() : position])
        if match["enum"] and (value := _ENUMERATOR.match(name, position)):
            position = value.end()
    return f"{qualified_name}<{', '.join(filter(None, arguments))}>"


#: The word after the alias of a range that loads a batch.
LOADING_MARK = "loading"
_PHASE_SPELLINGS = "|".join((*chain(*DEFAULT_NAMES.values()), UNNAMED_KERNEL))
_ALIAS_WORD = "alias "
_ALIAS_PATTERN = (
    rf"(?:(?:{_PHASE_SPELLINGS})(?: \d{{1,6}})?, |aten::)?{_ALIAS_WORD}[b-z]{{1,6}}"
    r"(?: \((?P<classes>[a-z/ ]+?)(?: in (?P<precision>(?:bf|tf|fp|int)\d{1,2}))?\))?"
    rf"(?: {LOADING_MARK})?(?: #?\d{{1,6}}(?:(?:/| of )\d{{1,6}})?)?(?: \(\d{{1,6}}\))*"
)


@dataclass(frozen=True)
class Alias:
    """The properties of a kernel that its alias contains.

    Attributes:
        kernel_class, part_of: as in the kernel's ``Rule``; empty if no rule matches the kernel's name.
        precision: the precision in which a matmul multiplies; None if the kernel's name does not show it.
    """

    kernel_class: str = ""
    part_of: tuple[str, ...] = ()
    precision: str | None = None

    def make_name(self, code: str) -> str:
        """Returns the alias as a shared copy contains it, without a prefix. ``code`` is a few lowercase letters."""
        classes = " or ".join((self.kernel_class, *self.part_of))
        facts = f"{classes} in {self.precision}" if self.precision else classes
        return f"{_ALIAS_WORD}{code} ({facts})" if facts else f"{_ALIAS_WORD}{code}"


def read_alias(name: str) -> Alias | None:
    """Parses a name that is an alias of a kernel or range. Returns None for any other name."""
    match = re.fullmatch(_ALIAS_PATTERN, name) if _ALIAS_WORD in name else None  # compiles the pattern on first use
    if match is None:
        return None
    kernel_class, *part_of = (match["classes"] or "").split(" or ")
    return Alias(kernel_class, tuple(part_of), match["precision"])


@dataclass(frozen=True)
class PrecisionRule:
    """A rule that decides the precision of a matmul or attention kernel by its name.

    Attributes:
        pattern: a regular expression. The rule applies to kernels whose name contains a match.
        precision: the precision in which these kernels multiply; None if their names do not show it.
        example: the name of such a kernel, or the first part of the name.
    """

    pattern: str
    precision: str | None
    example: str


def _make_xmma_pattern(compute_type: str) -> str:
    """Returns a pattern for names like ``xmma_gemm_<a><c>_<compute><accumulate>_<scale>`` with a given compute type."""
    return rf"xmma_\w*gemm_[a-z0-9]+_(?:{compute_type})[a-z]+\d"


#: Matches the name of a GEMM of Tensile or hipBLASLt up to the type in which it multiplies: the names of the indices,
#: and the types of A and B if they differ from the type of the multiplication. The types of output and accumulation
#: follow the match. Examples of types in names are ``BBS``, ``HSS``, ``F8B8S``, ``B_BS``, and ``S`` with a flag ``B``.
#: Tensile's ``ProblemType`` defines this format.
_OPERAND_TYPES = r"(?:F8|B8|I8|[HBS])+_(?=[A-Z0-9]+S_B)"
_TENSILE = rf"^Cijk_A[a-z]+C?_B[a-z]+C?_(?:{_OPERAND_TYPES}|(?!{_OPERAND_TYPES}))"

#: All precision rules. The first rule that matches applies. The three letters after ``nvjet_`` are the types of
#: input, accumulation and output, as public profiles of known matmuls show: t is bf16, h is fp16, s is fp32, q and r
#: are fp8. A matmul of fp32 inputs (``sss``) multiplies in TF32 only if its name contains ``tf32``.
PRECISION_RULES: tuple[PrecisionRule, ...] = (
    PrecisionRule(
        r"(?i)split_?k_?reduce|epilogue::impl", None, "void cublasLt::splitKreduce_kernel<32, 16, int, float"
    ),
    PrecisionRule(r"^cudnn_generated\w*sdpa(?!\w*(?:fp8|e4m3|e5m2))", None, "cudnn_generated_fort_native_sdpa_sm90"),
    PrecisionRule(r"^nvjet_(?:sm\d+_)?[qr]{2}[a-z]{3}_", "fp8", "nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT"),
    PrecisionRule(r"^nvjet_(?:sm\d+_)?sss_tf32", "tf32", "nvjet_sss_tf32_128x256_TNT"),
    PrecisionRule(r"^nvjet_(?:sm\d+_)?t[a-z]{2}_", "bf16", "nvjet_sm90_tst_128x160_64x5_2x4_h_bz_NTT"),
    PrecisionRule(r"^nvjet_(?:sm\d+_)?h[a-z]{2}_", "fp16", "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT"),
    PrecisionRule(r"^nvjet_(?:sm\d+_)?oo[a-z]{3}_|^bmm_\w*?_E2m1E2m1_|nv_float4_t", "fp4", "nvjet_ootst_FP4"),
    PrecisionRule(r"^nvjet_", None, "nvjet_sm100_xyz_128x256"),
    PrecisionRule(_make_xmma_pattern("tf32"), "tf32", "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x64x16"),
    PrecisionRule(_make_xmma_pattern("bf16"), "bf16", "sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n_tilesize128x256x64"),
    PrecisionRule(_make_xmma_pattern("f16"), "fp16", "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64"),
    PrecisionRule(
        _make_xmma_pattern("e4m3|e5m2"), "fp8", "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64"
    ),
    PrecisionRule(_make_xmma_pattern("f32"), "fp32", "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8"),
    PrecisionRule(_make_xmma_pattern("f64"), "fp64", "sm90_xmma_gemm_f64f64_f64f64_f64_nt_n_tilesize128x64x32"),
    PrecisionRule(_make_xmma_pattern("i8"), "int8", "sm80_xmma_gemm_i8i8_i8i32_f32_tn_n_tilesize256x128x64"),
    PrecisionRule(_TENSILE + r"[FB]8", "fp8", "Cijk_Alik_Bljk_F8B8S_BH_Bias_HA_S_SAB_SAV_UserArgs_MT256x256x128"),
    PrecisionRule(_TENSILE + r"(?:I8|4xi8)", "int8", "Cijk_Alik_Bljk_I8II_BH_MT128x128x64_MI32x32x1_SN_LDSB0"),
    PrecisionRule(_TENSILE + r"S[BHI]*_MX_", "tf32", "Cijk_Ailk_Bljk_S_MX_B_Bias_HA_S_SAV_UserArgs_MT128x128x32"),
    PrecisionRule(_TENSILE + "B", "bf16", "Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64_MI16x16x1"),
    PrecisionRule(_TENSILE + "H", "fp16", "Cijk_Ailk_Bljk_HHS_BH_MT64x128x32_MI16x16x16x1_SN_1LDSB0_APM1_ABV0"),
    PrecisionRule(_TENSILE + "[SC]", "fp32", "Cijk_Ailk_Bjlk_SB_Bias_AS_SAV_UserArgs_MT64x16x16_MI16x16x1_SN_LDSB0"),
    PrecisionRule(_TENSILE + "[DZ]", "fp64", "Cijk_Ailk_Bljk_DB_MT64x32x16_SN_1LDSB0_APM1_AF0EM1_AF1EM1"),
    PrecisionRule(  # An fp16_sgemm stores matrices in 16 bits, but multiplies in fp32 with FFMA instructions.
        r"(?:fp16|bf16|f16)_sgemm|simt_sgemm", "fp32", "volta_fp16_sgemm_fp16_32x128_nn"
    ),
    PrecisionRule(
        r"(?i)e4m3|e5m2|fp8(?!kvcachedatatype)|float8", "fp8", "void deep_gemm::fp8_gemm_kernel<4096u, 7168u"
    ),
    PrecisionRule(r"(?i)tf32", "tf32", "cutlass_80_tensorop_s1688tf32gemm_256x128_16x3_nn_align4"),
    PrecisionRule(r"(?i)bf16|bfloat16", "bf16", "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8"),
    PrecisionRule(
        r"fp16|f16|__half|half_t|\bHalf\b|hgemm|[hs]\d*884(?:cu)?gemm|h1688\d*gemm", "fp16", "ampere_fp16_s16816gemm"
    ),
    PrecisionRule(r"s1688(?:cu)?gemm", "tf32", "cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align4"),
    PrecisionRule(r"(?i)imma|igemm|int8|i\d+gemm_s8|gemm_s8", "int8", "cutlass_tensorop_i16832gemm_s8_256x128_64x3"),
    PrecisionRule(r"dgemm|d884gemm|\bdouble\b", "fp64", "cutlass_80_tensorop_d884gemm_64x64_16x3_nn_align1"),
    PrecisionRule(
        r"sgemm|fmha_cutlass[FB]_f32|(?:gem[mv]\w*|gemvx::kernel|dot_kernel)<[^()]*\bfloat\b", "fp32", "volta_sgemm_32x"
    ),
)


def find_precision_rule(name: str) -> PrecisionRule | None:
    """Returns the first rule that matches the name of a matmul or attention kernel, or None."""
    text = name[:MAX_SEARCHED_CHARACTERS]
    return next((rule for rule in PRECISION_RULES if re.search(rule.pattern, text)), None)


@cache
def find_precision(name: str) -> str | None:
    """Returns the precision in which a matmul or fused attention kernel multiplies, or None if it is unknown.

    For kernels of other classes, the function returns None.
    """
    if classify(name) not in (MATMUL, FUSED_ATTENTION):
        return None
    if alias := read_alias(name):
        return alias.precision
    rule = find_precision_rule(name)
    return rule.precision if rule else None
