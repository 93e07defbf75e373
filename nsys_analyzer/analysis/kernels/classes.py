"""What the name of a kernel tells: its class, with the operator that launched it, and a matmul's precision.

The rules of classes are a table, ``class_rules``: one row each, the first match wins. Without a rule a kernel is
``other``.

Names of matmuls say which type is multiplied, not which is stored: ``s1688gemm`` on fp32 matrices multiplies in TF32.
The precision is None where the name does not say: cuDNN writes ``f16`` on its attention kernels for either 16-bit type.

In a shared copy, ``alias b`` stands for a name that no rule knows, ``alias b (matmul or convolution in bf16)`` for one
whose class, the classes that its operator may make of it, and precision were known. ``forward 3, alias b`` is a range
of that phase, and ``alias b 17`` one of several names that differ in the number at their end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain

from nsys_analyzer.analysis.kernels.class_rules import CLASSES, OTHER, RULES, UNKNOWN, Rule
from nsys_analyzer.analysis.kernels.own_classes import OwnClass, OwnClasses, compile_bounded_search, read_plugin_classes
from nsys_analyzer.trace.columns import UNNAMED_KERNEL
from nsys_analyzer.trace.phase_names import DEFAULT_NAMES

#: Stands behind the alias of a range around the input pipeline.
LOADING_MARK = "loading"
_SPELLINGS = "|".join((*chain(*DEFAULT_NAMES.values()), UNNAMED_KERNEL))
_WORD = "alias "
_ALIAS = (
    rf"(?:(?:{_SPELLINGS})(?: \d{{1,6}})?, |aten::)?{_WORD}[b-z]{{1,6}}"
    r"(?: \((?P<classes>[a-z/ ]+?)(?: in (?P<precision>(?:bf|tf|fp|int)\d{1,2}))?\))?"
    rf"(?: {LOADING_MARK})?(?: #?\d{{1,6}}(?:(?:/| of )\d{{1,6}})?)?(?: \(\d{{1,6}}\))*"
)


@dataclass(frozen=True)
class Alias:
    """The class of a kernel as in its ``Rule``, empty where no rule knew the name, and the precision of its matmuls."""

    kernel_class: str = ""
    part_of: tuple[str, ...] = ()
    precision: str | None = None

    def text(self, code: str) -> str:
        """Returns the alias as it is written, without what stands before it; ``code`` is a few small letters."""
        classes = " or ".join((self.kernel_class, *self.part_of))
        facts = f"{classes} in {self.precision}" if self.precision else classes
        return f"{_WORD}{code} ({facts})" if facts else f"{_WORD}{code}"


def read_alias(name: str) -> Alias | None:
    """Returns the facts in a name that is an alias, None for any other name."""
    found = re.fullmatch(_ALIAS, name) if _WORD in name else None  # compiled when first needed
    if found is None:
        return None
    kernel_class, *part_of = (found["classes"] or "").split(" or ")
    return Alias(kernel_class, tuple(part_of), found["precision"])


#: Characters of a kernel's name that are looked at: C++ templates make names of ten thousand.
LONGEST_NAME = 20_000

_MANGLED = re.compile(r"_ZL?(?=N?K?L?\d)N?K?L?")
#: Of the Itanium ABI's mangled names: a number as a template argument, an identifier behind its length; and, to be
#: passed over, types and back references with digits of their own.
_ARGUMENT = re.compile(
    r"L[a-z](?P<number>\d+)E|(?P<enum>LNS[\dA-Z]*_)?(?P<length>[1-9]\d{0,3})(?=[A-Za-z_])|DF\d+[b_]|[ST][\dA-Z]*_"
)
_ENUMERATOR = re.compile(r"E\d+E")


def demangle(name: str) -> str:
    """The qualified name of a mangled kernel name, with the names and numbers among its template arguments.

    ``_ZN2at6native13reduce_kernelILi512ENS0_8ReduceOpIf…`` becomes ``at::native::reduce_kernel<512, ReduceOp, …>``.
    Python's demanglers read only some of the names that HIP's compiler writes.
    """
    prefix = _MANGLED.match(name)
    if prefix is None:
        return name
    parts, position = [], prefix.end()
    while length := re.match(r"L?([1-9]\d{0,3})", name[position : position + 5]):
        start = position + length.end()
        position = start + int(length.group(1))
        parts.append(name[start:position].replace("_GLOBAL__N_1", "(anonymous namespace)"))
    is_template = name[position : position + 1] == "I"
    return "::".join(parts) + (f"<{', '.join(_arguments(name, position))}>" if is_template else "")


def _arguments(name: str, position: int) -> Iterator[str]:
    """The numbers and the identifiers of a mangled name from ``position`` on."""
    while found := _ARGUMENT.search(name, position):
        position = found.end() + int(found["length"] or 0)
        if argument := found["number"] or name[found.end() : position]:
            yield argument
        if found["enum"] and (value := _ENUMERATOR.match(name, position)):
            position = value.end()


#: The classes of the person who reads the captures, as ``use_classes`` was given them.
given_classes: dict[str, OwnClass] = {}


def use_classes(classes: OwnClasses) -> None:
    """Takes these classes beside those of the package and of plugins, in place of those that were given before."""
    if classes != given_classes:
        given_classes.clear()
        given_classes.update(classes)
        find_rule.cache_clear()
        classify.cache_clear()


def known_classes() -> Mapping[str, str]:
    """Returns every class with its line of the glossary, as ``CLASSES`` has those of the package."""
    own = {name: one.meaning for name, one in {**read_plugin_classes(), **given_classes}.items()}
    return {**CLASSES, **own, **CLASSES}  # the order and the words of the package


@cache
def find_rule(name: str) -> Rule | None:
    """The rule that decides the class of the kernel ``name``, or None; people's own classes come before the others."""
    text = demangle(name[:LONGEST_NAME])
    for kernel_class, own_class in (*given_classes.items(), *read_plugin_classes().items()):
        if any(compile_bounded_search(pattern)(text) for pattern in own_class.kernels):
            return Rule(kernel_class, "", name)
    return find_package_rule(name)


def find_package_rule(name: str) -> Rule | None:
    """The rule of this package that decides the class of a kernel, or None; an alias in a shared copy holds its own."""
    if alias := read_alias(name):
        known = alias.kernel_class in CLASSES
        return Rule(alias.kernel_class, re.escape(name), name, alias.part_of) if known else None
    text = demangle(name[:LONGEST_NAME])
    return next((rule for rule in RULES if re.search(rule.pattern, text)), None)  # compiled when first needed


#: Names of ranges and operators around collectives: by libraries, where they hold nothing else, and by programs.
LIBRARY_COLLECTIVE = re.compile(r"(?:^| )(?:[nr]?ccl[:A-Z]|_?c10d(?:_functional)?::|symm_mem::|record_param_comms)")
_COLLECTIVE = re.compile(r"(?i)all[-_ ]?(?:reduce|gather)|reduce[-_ ]?scatter|all[-_ ]?to[-_ ]?all")


def is_collective(annotation: str) -> bool:
    """Tells whether a range or an operator of this name is a collective, or an exchange between two ranks."""
    text = annotation[:LONGEST_NAME]
    return bool(LIBRARY_COLLECTIVE.search(text) or _COLLECTIVE.search(text)) and "copy" not in text.lower()


def find_possible_classes(name: str) -> frozenset[str]:
    """The classes that the launching operator may make of the kernel ``name``: any where no rule knows it."""
    rule = find_rule(name)
    return frozenset(known_classes() if rule is None else rule.part_of)


@cache
def classify(name: str, operator: str = "") -> str:
    """The class of a kernel, a key of ``known_classes()``.

    Args:
        name: its full (demangled or mangled) name.
        operator: PyTorch's operator that launched it, where that is known. It decides where no rule knows the name,
            and where the name's rule leaves it open (``Rule.part_of``).
    """
    rule = find_rule(name)
    by_name = rule.kernel_class if rule else UNKNOWN if name.startswith(UNNAMED_KERNEL) else OTHER
    if not operator:
        return by_name
    by_operator = classify(operator)
    return by_operator if by_operator in find_possible_classes(name) else by_name


@dataclass(frozen=True)
class PrecisionRule:
    """A matmul or attention kernel whose name ``pattern`` finds runs in ``precision``; None: the name does not say.

    ``example`` is such a name, or the start of one.
    """

    pattern: str
    precision: str | None
    example: str


def _xmma(first: str) -> str:
    """A pattern of ``xmma_gemm_<a><c>_<compute><accumulate>_<scale>`` with the compute type ``first``."""
    return rf"xmma_\w*gemm_[a-z0-9]+_(?:{first})[a-z]+\d"


#: A Tensile or hipBLASLt GEMM's name up to the type that it multiplies in: the names of the indices; the types of A
#: and B, where they are others; then that type, followed by those of output and accumulation (``BBS``, ``HSS``,
#: ``F8B8S``; ``B_BS`` and a bare ``S`` with a flag ``B``, too), as Tensile's ``ProblemType`` writes itself.
_OPERANDS = r"(?:F8|B8|I8|[HBS])+_(?=[A-Z0-9]+S_B)"
_TENSILE = rf"^Cijk_A[a-z]+C?_B[a-z]+C?_(?:{_OPERANDS}|(?!{_OPERANDS}))"

#: The first match wins. nvjet's three letters are input, accumulation and output, as public profiles of known
#: matmuls show them: t bf16, h fp16, s fp32, q and r fp8. fp32 inputs (``sss``) run in TF32 only where it is written.
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
    PrecisionRule(_xmma("tf32"), "tf32", "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x64x16"),
    PrecisionRule(_xmma("bf16"), "bf16", "sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n_tilesize128x256x64"),
    PrecisionRule(_xmma("f16"), "fp16", "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64"),
    PrecisionRule(_xmma("e4m3|e5m2"), "fp8", "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64"),
    PrecisionRule(_xmma("f32"), "fp32", "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8"),
    PrecisionRule(_xmma("f64"), "fp64", "sm90_xmma_gemm_f64f64_f64f64_f64_nt_n_tilesize128x64x32"),
    PrecisionRule(_xmma("i8"), "int8", "sm80_xmma_gemm_i8i8_i8i32_f32_tn_n_tilesize256x128x64"),
    PrecisionRule(_TENSILE + r"[FB]8", "fp8", "Cijk_Alik_Bljk_F8B8S_BH_Bias_HA_S_SAB_SAV_UserArgs_MT256x256x128"),
    PrecisionRule(_TENSILE + r"(?:I8|4xi8)", "int8", "Cijk_Alik_Bljk_I8II_BH_MT128x128x64_MI32x32x1_SN_LDSB0"),
    PrecisionRule(_TENSILE + r"S[BHI]*_MX_", "tf32", "Cijk_Ailk_Bljk_S_MX_B_Bias_HA_S_SAV_UserArgs_MT128x128x32"),
    PrecisionRule(_TENSILE + "B", "bf16", "Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64_MI16x16x1"),
    PrecisionRule(_TENSILE + "H", "fp16", "Cijk_Ailk_Bljk_HHS_BH_MT64x128x32_MI16x16x16x1_SN_1LDSB0_APM1_ABV0"),
    PrecisionRule(_TENSILE + "[SC]", "fp32", "Cijk_Ailk_Bjlk_SB_Bias_AS_SAV_UserArgs_MT64x16x16_MI16x16x1_SN_LDSB0"),
    PrecisionRule(_TENSILE + "[DZ]", "fp64", "Cijk_Ailk_Bljk_DB_MT64x32x16_SN_1LDSB0_APM1_AF0EM1_AF1EM1"),
    PrecisionRule(  # 16-bit storage, but the FFMA pipe: fp16_sgemm multiplies in fp32.
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
    """The rule that decides the precision of the matmul or attention kernel ``name``, or None."""
    text = name[:LONGEST_NAME]
    return next((rule for rule in PRECISION_RULES if re.search(rule.pattern, text)), None)


@cache
def find_precision(name: str) -> str | None:
    """The precision that the matmul or fused attention kernel ``name`` multiplied in, None for any other kernel."""
    if classify(name) not in ("matmul", "fused attention"):
        return None
    if alias := read_alias(name):
        return alias.precision
    rule = find_precision_rule(name)
    return rule.precision if rule else None
