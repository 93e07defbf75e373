"""Labels of kernels: examples from captures, and what holds for any set of names."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsys_analyzer.analysis.kernels.class_rules import RULES
from nsys_analyzer.analysis.kernels.labels import make_short_labels

_VECTORIZED = "void at::native::vectorized_elementwise_kernel<(int)4, "
_MUL = "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>"
_MULTI = "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadata<(int)2>, "

EXAMPLES = [
    (f"{_VECTORIZED}{_MUL}, std::array<char *, (unsigned long)3>>(int, T2, T3)", "elementwise mul float"),
    (
        f"{_VECTORIZED}at::native::exp_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 2)]::operator ()() "
        "const::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2, T3)",
        "elementwise exp float",
    ),
    (
        f"{_VECTORIZED}at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda(float) (instance 1)], "
        "std::array<char *, (unsigned long)2>>(int, T2, T3)",
        "elementwise copy float to bf16",
    ),
    (
        f"{_VECTORIZED}at::native::CUDAFunctorOnOther_add<long>, std::array<char *, (unsigned long)2>>(int, T2, T3)",
        "elementwise add long",
    ),
    (
        "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<at::native::"
        "<unnamed>::where_kernel_impl(at::TensorIterator &)::[lambda() (instance 1)]::operator ()() const::[lambda("
        "bool, float, float) (instance 1)]>(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int)",
        "elementwise where float",
    ),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >("
        "int, at::native::FillFunctor<float>, std::array<char*, 1ul>)",
        "elementwise fill float",
    ),
    (
        "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::MaxOps<float>, "
        "unsigned int, float, (int)4, (int)4>>(T3)",
        "reduce max float",
    ),
    (
        "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::func_wrapper_t<"
        "float, at::native::sum_functor<float, float, float>::operator ()(at::TensorIterator &)::[lambda(float, "
        "float) (instance 1)]>, unsigned int, float, (int)4, (int)4>>(T3)",
        "reduce sum float",
    ),
    (
        f"{_MULTI}at::native::<unnamed>::TernaryOpScalarFunctor<float, (int)2, (int)2, (int)0>, "
        "at::native::LerpFunctor<float>, float>(T1, T2, T3...)",
        "multi_tensor lerp float",
    ),
    (
        f"{_MULTI}at::native::<unnamed>::BinaryOpScalarFunctor<float, (int)1, (int)1, (int)0>, "
        "std::multiplies<float>, float>(T1, T2, T3...)",
        "multi_tensor mul float",
    ),
    (
        "void at::native::<unnamed>::cunn_SoftMaxForwardSmem<(int)8, c10::BFloat16, float, c10::BFloat16, "
        "at::native::<unnamed>::LogSoftMaxForwardEpilogue, long>(T4 *, const T2 *, T6)",
        "log_softmax forward bf16",
    ),
    (
        "void <unnamed>::softmax_warp_backward<c10::BFloat16, c10::BFloat16, float, (int)9, (bool)1, (bool)0>(T2 *)",
        "log_softmax backward bf16",
    ),
    (
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 4, false, false>(float*, int)",
        "softmax forward float",
    ),
    (
        "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_"
        "execute_kernel__5x_cublas",
        "xmma gemm f32 nt_n 64x64x8",
    ),
    (
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_"
        "execute_split_k_kernel__5x_cublas",
        "xmma gemm f32 tn_n 128x128x8 split_k",
    ),
    (
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)",
        "cutlass simt sgemm 256x128_8x4_nn",
    ),
    ("nvjet_sm90_tst_96x64_64x8_2x4_h_bz_NTN", "nvjet tst 96x64_64x8_2x4_h_bz_NTN"),
    (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        "cudnn sdpa sm90 flash fprop wgmma f16 64x128x64",
    ),
    (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        "nccl AllReduce Sum f32 RING LL",
    ),
    ("std::enable_if<!T7, void>::type internal::gemvx::kernel<int, int, float, float>(T13)", "gemvx float"),
    (
        "void <unnamed>::indexing_backward_kernel<float, (int)4>(const long *, const long *, const T1 *, bool)",
        "indexing_backward_kernel",
    ),
    (
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13AUnaryFunctorIllbNS0_51_GLOBAL__N__28ce311f_18_"
        "CompareEQKernel_cu_d8008c9616CompareEqFunctorIlEEEENS_6detail5ArrayIPcLi2EEEEEviT0_T1_",
        "elementwise compare_eq",
    ),
    ("[CUDA memcpy Host-to-Device]", "CUDA memcpy Host-to-Device"),
    ("aten::addmm", "aten::addmm"),
    ("_attn_fwd", "_attn_fwd"),
]


@pytest.mark.parametrize(("name", "label"), EXAMPLES)
def test_label_alone(name: str, label: str) -> None:
    assert make_short_labels([name]) == {name: label}


def test_kernels_of_one_label_are_told_apart_by_how_they_are_built_and_by_their_operands() -> None:
    tail = ", std::array<char *, (unsigned long)3>>(int, T2, T3)"
    unary = "at::native::BUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>"
    strided = (
        f"void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<{_MUL}>>()"
    )
    names = [_VECTORIZED + _MUL + tail, _VECTORIZED + unary + tail, strided]
    assert make_short_labels(names) == {
        names[0]: "elementwise mul float (vectorized 4, Binary)",
        names[1]: "elementwise mul float (vectorized 4, BUnary)",
        names[2]: "elementwise mul float (strided)",
    }


def test_what_nothing_tells_apart_is_numbered_in_the_order_of_the_full_names() -> None:
    # The same words in another order: the second name in sorted order gets the number.
    names = ["void a::f<int, long>(x)", "void a::f<long, int>(x)"]
    assert make_short_labels(names[::-1]) == {names[0]: "f", names[1]: "f #2"}


def test_unknown_and_empty_names_keep_a_label() -> None:
    assert make_short_labels(["", "  "]) == {"": "unnamed", "  ": "unnamed #2"}
    assert make_short_labels([]) == {}


def test_long_names_lose_their_ends() -> None:
    """Never their middle; of words that start alike the rest tells kernels apart."""
    names = [f"triton_red_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_{number}" for number in (10, 11)]
    assert make_short_labels(names[:1], limit=40) == {names[0]: "triton_red_fused__to_copy_add_embedding…"}
    cut = "triton_red_fused__to_copy_add_embed…"
    assert make_short_labels(names, limit=41) == {names[0]: f"{cut} (10)", names[1]: f"{cut} (11)"}


_PIECES = [
    "void ",
    "at::native::",
    "<unnamed>::",
    "f",
    "reduce_kernel<",
    "elementwise_kernel<",
    "(int)4",
    "float",
    ", ",
]
_PIECES += [
    "MulFunctor<",
    ">",
    "(",
    ")",
    "|",
    "`",
    "\n",
    " #2",
    "_Z",
    "N2at",
    "6native",
    "cutlass_80_",
    "128x64_8x4_nn",
]


def test_an_endless_name_costs_no_time() -> None:
    """A look for its last word from each of its characters would take minutes."""
    (label,) = make_short_labels([f"/{'0' * 200_000}!"]).values()
    assert label == f"/{'0' * 58}…"


_NAMES = st.one_of(
    st.sampled_from([rule.example for rule in RULES] + [name for name, _ in EXAMPLES]),
    st.lists(st.sampled_from(_PIECES), max_size=12).map("".join),
    st.text(max_size=90),
)


@given(st.lists(_NAMES, max_size=25), st.integers(20, 80), st.randoms(use_true_random=False))
@example(["f", "f #2", "f<a, b>", "f<b, a>"], 60, None)
def test_labels_are_unique_short_printable_and_independent_of_order(
    names: list[str], limit: int, random: Random | None
) -> None:
    labels = make_short_labels(names, limit)
    assert set(labels) == set(names)
    assert len(set(labels.values())) == len(labels)
    for label in labels.values():
        assert label == label.strip() != ""
        assert not set(label) & set("|`\n\r")
        assert len(label.rpartition(" #")[0] or label) <= limit
    shuffled = list(names)
    if random:
        random.shuffle(shuffled)
    assert make_short_labels(shuffled, limit) == labels
