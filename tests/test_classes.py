"""Kernel classes: every rule by its example, and names from captures and from public profiles."""

from __future__ import annotations

import re

import pytest

from nsys_analyzer.analysis.kernels.class_rules import CLASSES, OTHER, RULES, UNKNOWN, Rule
from nsys_analyzer.analysis.kernels.classes import classify, first_rule, readable

# Names as nsys stored them: captures of a transformer in fp32 and bf16, eager, compiled into CUDA graphs, and on
# two GPUs.
CAPTURED: dict[str, list[str]] = {
    "fused attention": [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"),
        (
            "void cudnn::fusion::compute_dot_do_o_specialized<(bool)1, (int)64>(const void *, const void *,"
            " void *, void *, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigne"
            "d int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, uns"
            "igned int, unsigned int, unsigned int, unsigned int, unsigned int, float, const void *, const "
            "void *, const void *, const void *, const void *, bool, const void *, void *, const void *, in"
            "t, int, int, int, int, int, int, int, int)"
        ),
        (
            "void cudnn::fusion::convert_dq_to_16bits<(bool)1>(const void *, void *, unsigned int, unsigned"
            " int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsi"
            "gned int, unsigned int, const float *, const float *, const float *, float *, const void *, vo"
            "id *, void *, bool, bool)"
        ),
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
    ],
    "matmul": [
        "nvjet_sm90_tst_128x160_64x5_2x4_h_bz_NTT",
        "nvjet_sm90_tst_128x160_64x5_4x1_v_bz_NTT",
        "nvjet_sm90_tst_160x192_64x3_1x2_h_bz_coopB_NTN",
        "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT",
        "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_TNT",
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
        "nvjet_sm90_tst_304x128_64x3_1x2_h_bz_coopA_TNN",
        "nvjet_sm90_tst_96x64_64x8_2x4_h_bz_NTN",
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma_aligna4_alig"
            "nc4_execute_kernel__5x_cublas"
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma_aligna4_alig"
            "nc4_execute_split_k_kernel__5x_cublas"
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc"
            "4_execute_kernel__5x_cublas"
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x128x8_stage3_warpsize1x4x1_ffma_aligna4_align"
            "c4_execute_kernel__5x_cublas"
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alig"
            "nc4_execute_kernel__5x_cublas"
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alig"
            "nc4_execute_split_k_kernel__5x_cublas"
        ),
        (
            "void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float, float, float, float, (bool)0,"
            " float, float, float, (bool)1, (bool)0, (bool)0, (bool)0>(cublasLt::cublasSplitKParams<T6>, co"
            "nst T4 *, const T10 *, T9 *, T5 *, const T6 *, const T6 *, const T11 *, const T4 *, T11 *, voi"
            "d *, long, T6 *, int *, T6 *, T6 *, const T6 *, const T6 *, const T6 *, const T6 *, const T6 *"
            ")"
        ),
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(T1::Params)",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(T1::Params)",
    ],
    "elementwise": [
        (
            "void <unnamed>::elementwise_kernel_with_index<int, at::native::arange_cuda_out(const c10::Scal"
            "ar &, const c10::Scalar &, const c10::Scalar &, at::Tensor &)::[lambda() (instance 1)]::operat"
            "or ()() const::[lambda() (instance 4)]::operator ()() const::[lambda(long) (instance 1)]>(T1, "
            "T2, function_traits<T2>::result_type *)"
        ),
        (
            "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<"
            "at::native::<unnamed>::where_kernel_impl(at::TensorIterator &)::[lambda() (instance 1)]::opera"
            "tor ()() const::[lambda() (instance 11)]::operator ()() const::[lambda(bool, float, float) (in"
            "stance 1)]>(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
        ),
        (
            "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<"
            "at::native::BUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>"
            ">(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
        ),
        (
            "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<"
            "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::DivFunctor<float>>"
            ">(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
        ),
        (
            "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<"
            "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>"
            ">(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
        ),
        (
            "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<"
            "at::native::CUDAFunctor_add<float>>(at::TensorIteratorBase &, const T1 &)::[lambda(int) (insta"
            "nce 1)]>(int, T3)"
        ),
        (
            "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<"
            "at::native::neg_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 2)]::operator ()() "
            "const::[lambda() (instance 7)]::operator ()() const::[lambda(float) (instance 1)]>(at::TensorI"
            "teratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
        ),
        (
            "void at::native::elementwise_kernel<(int)128, (int)4, void at::native::gpu_kernel_impl<at::nat"
            "ive::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>>(at::T"
            "ensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
        ),
        (
            "void at::native::elementwise_kernel<(int)128, (int)4, void at::native::gpu_kernel_impl_nocast<"
            "at::native::<unnamed>::CompareFunctor<long>>(at::TensorIteratorBase &, const T1 &)::[lambda(in"
            "t) (instance 1)]>(int, T3)"
        ),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<ch"
            "ar *, (unsigned long)3>, (int)4, TrivialOffsetCalculator<(int)2, unsigned int>, TrivialOffsetC"
            "alculator<(int)1, unsigned int>, at::native::memory::LoadWithCast<(int)2>, at::native::memory:"
            ":StoreWithCast<(int)1>>(int, T1, T2, T4, T5, T6, T7)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)2, at::native::AUnaryFunctor<long, long, l"
            "ong, at::native::binary_internal::MulFunctor<long>>, std::array<char *, (unsigned long)2>>(int"
            ", T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)2, at::native::BUnaryFunctor<long, long, l"
            "ong, at::native::binary_internal::div_trunc_kernel_cuda(at::TensorIteratorBase &)::[lambda() ("
            "instance 1)]::operator ()() const::[lambda() (instance 4)]::operator ()() const::[lambda(long,"
            " long) (instance 1)]>, std::array<char *, (unsigned long)2>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)2, at::native::BUnaryFunctor<long, long, l"
            "ong, at::native::remainder_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 1)]::ope"
            "rator ()() const::[lambda() (instance 4)]::operator ()() const::[lambda(long, long) (instance "
            "1)]>, std::array<char *, (unsigned long)2>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::AUnaryFunctor<float, float,"
            " float, at::native::binary_internal::MulFunctor<float>>, std::array<char *, (unsigned long)2>>"
            "(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::BUnaryFunctor<float, float,"
            " float, at::native::binary_internal::MulFunctor<float>>, std::array<char *, (unsigned long)2>>"
            "(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::BinaryFunctor<float, float,"
            " float, at::native::binary_internal::DivFunctor<float>>, std::array<char *, (unsigned long)3>>"
            "(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::BinaryFunctor<float, float,"
            " float, at::native::binary_internal::MulFunctor<float>>, std::array<char *, (unsigned long)3>>"
            "(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctorOnSelf_add<float"
            ">, std::array<char *, (unsigned long)2>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>, std"
            "::array<char *, (unsigned long)3>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>, std::ar"
            "ray<char *, (unsigned long)1>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::exp_kernel_cuda(at::TensorI"
            "teratorBase &)::[lambda() (instance 2)]::operator ()() const::[lambda() (instance 2)]::operato"
            "r ()() const::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::neg_kernel_cuda(at::TensorI"
            "teratorBase &)::[lambda() (instance 2)]::operator ()() const::[lambda() (instance 7)]::operato"
            "r ()() const::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::rsqrt_kernel_cuda(at::Tenso"
            "rIteratorBase &)::[lambda() (instance 2)]::operator ()() const::[lambda() (instance 2)]::opera"
            "tor ()() const::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2, T"
            "3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::sigmoid_backward_kernel_cud"
            "a(at::TensorIteratorBase &)::[lambda() (instance 2)]::operator ()() const::[lambda() (instance"
            " 2)]::operator ()() const::[lambda(float, float) (instance 1)], std::array<char *, (unsigned l"
            "ong)3>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::sigmoid_kernel_cuda(at::Ten"
            "sorIteratorBase &)::[lambda() (instance 2)]::operator ()() const::[lambda() (instance 2)]::ope"
            "rator ()() const::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2,"
            " T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::sqrt_kernel_cuda(at::Tensor"
            "IteratorBase &)::[lambda() (instance 2)]::operator ()() const::[lambda() (instance 2)]::operat"
            "or ()() const::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2, T3"
            ")"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, void at::native::<unnamed>::pow_tensor_"
            "scalar_kernel_impl<float, float>(at::TensorIteratorBase &, T2)::[lambda(float) (instance 1)], "
            "std::array<char *, (unsigned long)2>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, void at::native::<unnamed>::pow_tensor_"
            "scalar_kernel_impl<float, float>(at::TensorIteratorBase &, T2)::[lambda(float) (instance 2)], "
            "std::array<char *, (unsigned long)2>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)8, at::native::BinaryFunctor<c10::BFloat16"
            ", c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float>>, std::array<ch"
            "ar *, (unsigned long)3>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)8, at::native::CUDAFunctor_add<c10::BFloat"
            "16>, std::array<char *, (unsigned long)3>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)8, at::native::sigmoid_backward_kernel_cud"
            "a(at::TensorIteratorBase &)::[lambda() (instance 2)]::operator ()() const::[lambda() (instance"
            " 4)]::operator ()() const::[lambda(c10::BFloat16, c10::BFloat16) (instance 1)], std::array<cha"
            "r *, (unsigned long)3>>(int, T2, T3)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)8, at::native::sigmoid_kernel_cuda(at::Ten"
            "sorIteratorBase &)::[lambda() (instance 2)]::operator ()() const::[lambda() (instance 4)]::ope"
            "rator ()() const::[lambda(c10::BFloat16) (instance 1)], std::array<char *, (unsigned long)2>>("
            "int, T2, T3)"
        ),
    ],
    "copy/layout": [
        (
            "void <unnamed>::indexing_backward_kernel<float, (int)4>(const long *, const long *, const T1 *"
            ", T1 *, long, long, long, long, bool)"
        ),
        (
            "void at::native::<unnamed>::CatArrayBatchedCopy<at::native::<unnamed>::OpaqueType<(unsigned in"
            "t)4>, unsigned int, (int)4, (int)64, (int)64>(T1 *, at::native::<unnamed>::CatArrInputTensorMe"
            "tadata<T1, T2, T4, T5>, at::native::<unnamed>::TensorSizeStride<T2, (unsigned int)4>, int, T2)"
        ),
        (
            "void at::native::<unnamed>::CatArrayBatchedCopy_vectorized<at::native::<unnamed>::OpaqueType<("
            "unsigned int)2>, unsigned int, (int)1, (int)128, (int)1, (int)16, (int)8>(char *, at::native::"
            "<unnamed>::CatArrInputTensorMetadata<T1, T2, T4, T5>, at::native::<unnamed>::TensorSizeStride<"
            "T2, (unsigned int)4>, int, T2)"
        ),
        (
            "void at::native::<unnamed>::CatArrayBatchedCopy_vectorized<at::native::<unnamed>::OpaqueType<("
            "unsigned int)4>, unsigned int, (int)1, (int)128, (int)1, (int)16, (int)4>(char *, at::native::"
            "<unnamed>::CatArrInputTensorMetadata<T1, T2, T4, T5>, at::native::<unnamed>::TensorSizeStride<"
            "T2, (unsigned int)4>, int, T2)"
        ),
        (
            "void at::native::_scatter_gather_elementwise_kernel<(int)128, (int)8, void at::native::_cuda_s"
            "catter_gather_internal_kernel<(bool)1, at::native::OpaqueType<(int)4>, long>::operator ()<at::"
            "native::TensorAssign>(at::TensorIterator &, long, long, long, const T1 &)::[lambda(int) (insta"
            "nce 1)]>(int, T3)"
        ),
        (
            "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<"
            "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 3)]::operat"
            "or ()() const::[lambda() (instance 7)]::operator ()() const::[lambda(float) (instance 1)]>(at:"
            ":TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
        ),
        (
            "void at::native::elementwise_kernel<(int)128, (int)4, void at::native::gpu_kernel_impl_nocast<"
            "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 3)]::operat"
            "or ()() const::[lambda() (instance 12)]::operator ()() const::[lambda(c10::BFloat16) (instance"
            " 1)]>(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
        ),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIte"
            "ratorBase &)::[lambda() (instance 3)]::operator ()() const::[lambda() (instance 7)]::operator "
            "()() const::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>, (int)4, Trivia"
            "lOffsetCalculator<(int)1, unsigned int>, TrivialOffsetCalculator<(int)1, unsigned int>, at::na"
            "tive::memory::LoadWithCast<(int)1>, at::native::memory::StoreWithCast<(int)1>>(int, T1, T2, T4"
            ", T5, T6, T7)"
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)8, at::native::bfloat16_copy_kernel_cuda(a"
            "t::TensorIteratorBase &)::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>("
            "int, T2, T3)"
        ),
        (
            "void at::native::vectorized_gather_kernel<(int)16, long>(char *, char *, T2 *, int, long, long"
            ", long, long, bool)"
        ),
    ],
    "softmax": [
        (
            "void at::native::<unnamed>::cunn_SoftMaxBackwardSmem<(int)4, float, float, float, at::native::"
            "<unnamed>::LogSoftMaxBackwardEpilogue>(T2 *, const T4 *, const T4 *, long)"
        ),
        (
            "void at::native::<unnamed>::cunn_SoftMaxBackwardSmem<(int)8, c10::BFloat16, float, c10::BFloat"
            "16, at::native::<unnamed>::LogSoftMaxBackwardEpilogue>(T2 *, const T4 *, const T4 *, long)"
        ),
        (
            "void at::native::<unnamed>::cunn_SoftMaxForwardSmem<(int)4, float, float, float, at::native::<"
            "unnamed>::LogSoftMaxForwardEpilogue, long>(T4 *, const T2 *, T6)"
        ),
        (
            "void at::native::<unnamed>::cunn_SoftMaxForwardSmem<(int)8, c10::BFloat16, float, c10::BFloat1"
            "6, at::native::<unnamed>::LogSoftMaxForwardEpilogue, long>(T4 *, const T2 *, T6)"
        ),
    ],
    "optimizer": [
        (
            "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadat"
            "a<(int)1>, at::native::<unnamed>::BinaryOpScalarFunctor<float, (int)1, (int)1, (int)0>, std::m"
            "ultiplies<float>, float>(T1, T2, T3...)"
        ),
        (
            "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadat"
            "a<(int)1>, at::native::<unnamed>::BinaryOpScalarFunctor<float, (int)1, (int)1, (int)0>, std::p"
            "lus<float>, float>(T1, T2, T3...)"
        ),
        (
            "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadat"
            "a<(int)2>, at::native::<unnamed>::TernaryOpScalarFunctor<float, (int)2, (int)2, (int)0>, at::n"
            "ative::LerpFunctor<float>, float>(T1, T2, T3...)"
        ),
        (
            "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadat"
            "a<(int)2>, at::native::<unnamed>::UnaryOpFunctor<float, (int)2, (int)1, (int)1>, at::native::S"
            "qrt<float>>(T1, T2, T3...)"
        ),
        (
            "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadat"
            "a<(int)3>, at::native::<unnamed>::PointwiseOpScalarFunctor<float, (int)3, (int)3, (int)0>, std"
            "::multiplies<float>, float>(T1, T2, T3...)"
        ),
        (
            "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListScalarL"
            "istMetadata<float, (int)1>, at::native::<unnamed>::BinaryOpScalarListFunctor<float, (int)1, (i"
            "nt)1, (int)0>, std::divides<float>>(T1, T2, T3...)"
        ),
        (
            "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListScalarL"
            "istMetadata<float, (int)3>, at::native::<unnamed>::PointwiseOpScalarListFunctor<float, (int)3,"
            " (int)3, (int)0>, std::divides<float>>(T1, T2, T3...)"
        ),
    ],
    "reduction": [
        (
            "void at::native::<unnamed>::nll_loss_backward_reduce_cuda_kernel_2d<float, long>(T1 *, const T"
            "1 *, const T2 *, const T1 *, const T1 *, bool, int, int, long, long)"
        ),
        (
            "void at::native::<unnamed>::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(T1 *, T"
            "1 *, const T1 *, const T3 *, const T1 *, bool, long, long, long, long)"
        ),
        (
            "void at::native::reduce_kernel<(int)128, (int)4, at::native::ReduceOp<float, at::native::func_"
            "wrapper_t<float, at::native::sum_functor<float, float, float>::operator ()(at::TensorIterator "
            "&)::[lambda(float, float) (instance 1)]>, unsigned int, float, (int)4, (int)4>>(T3)"
        ),
        (
            "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::MaxOp"
            "s<float>, unsigned int, float, (int)4, (int)4>>(T3)"
        ),
        (
            "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::MeanO"
            "ps<float, float, float, float>, unsigned int, float, (int)4, (int)4>>(T3)"
        ),
        (
            "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::func_"
            "wrapper_t<float, at::native::sum_functor<float, float, float>::operator ()(at::TensorIterator "
            "&)::[lambda(float, float) (instance 1)]>, unsigned int, float, (int)4, (int)4>>(T3)"
        ),
    ],
    "sort/scan": [
        (
            "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortExclusiveSumKernel<at_cuda_detail"
            "::cub::detail::radix::policy_hub<long, at::cuda::cub::detail::OpaqueType<(int)8>, unsigned lon"
            "g long>::Policy1000, unsigned long long>(T2 *)"
        ),
        (
            "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortHistogramKernel<at_cuda_detail::c"
            "ub::detail::radix::policy_hub<long, at::cuda::cub::detail::OpaqueType<(int)8>, unsigned long l"
            "ong>::Policy1000, (at_cuda_detail::cub::SortOrder)0, long, unsigned long long, at_cuda_detail:"
            ":cub::detail::identity_decomposer_t>(T4 *, const T3 *, T4, int, int, T5)"
        ),
        (
            "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<at_cuda_detail::cu"
            "b::detail::radix::policy_hub<long, at::cuda::cub::detail::OpaqueType<(int)8>, unsigned long lo"
            "ng>::Policy1000, (at_cuda_detail::cub::SortOrder)0, long, at::cuda::cub::detail::OpaqueType<(i"
            "nt)8>, unsigned long long, int, int, at_cuda_detail::cub::detail::identity_decomposer_t>(T7 *,"
            " T7 *, T5 *, const T5 *, T3 *, const T3 *, T4 *, const T4 *, T6, int, int, T8)"
        ),
        (
            "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortSingleTileKernel<at_cuda_detail::"
            "cub::detail::radix::policy_hub<long, at::cuda::cub::detail::OpaqueType<(int)8>, unsigned long "
            "long>::Policy1000, (at_cuda_detail::cub::SortOrder)0, long, at::cuda::cub::detail::OpaqueType<"
            "(int)8>, unsigned long long, at_cuda_detail::cub::detail::identity_decomposer_t>(const T3 *, T"
            "3 *, const T4 *, T4 *, T5, int, int, T6)"
        ),
    ],
}

# Names from public profiles of other programs: torch.profiler's spelling, mangled names, cuBLAS,
# CUTLASS, cuDNN, FlashAttention, Triton, vLLM, SGLang, Apex, TransformerEngine, DeepEP, JAX, and ATen operators.
PUBLISHED: dict[str, list[str]] = {
    "matmul": [
        "ampere_sgemm_128x64_nn",
        "volta_sgemm_128x32_sliced1x4_nn",
        "void gemmSN_NN_kernel<float, 256, 4, 2, 8, 4, 4, false>(int)",
        (
            "std::enable_if<!T7, void>::type internal::gemvx::kernel<int, int, float, float, float, float, "
            "(bool)0, (bool)1>(T13)"
        ),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float, f"
            "loat>(cublasGemvParamsEx<int>)"
        ),
        "std::enable_if<true, void>::type internal::gemvx::kernel<int>(int)",
        "void gemmk1_kernel<float, 256, 5, false, false, true, false>(cublasGemmk1Params<float>)",
        (
            "void cublasLt::epilogue::impl::globalKernel<8, 32, float, float, float, true, true, 1>(int, in"
            "t, long, float*)"
        ),
        "void reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<float> >(float const*)",
        "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 160u>(__nv_bfloat16*, float*)",
        ("void cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c_outfmt_head::GemmKernel>(x::Params)"),
        (
            "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel:"
            ":GemmUniversal<int> > >()"
        ),
        "cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32_64x64x16_1x1x1_3_tnn_align1_bias_f32_relu",
        "matmul_kernel",
        "triton_mm",
        "gemm_fusion_dot_2",
        "cutlass_80_wmma_tensorop_f16_s161616gemm_f16_16x16_128x2_tn_align8",
        (
            "_Z17gemv2T_kernel_valIiiffffLi128ELi16ELi4ELi4ELb0ELb1E18cublasGemvParamsExIi30cublasGemvTenso"
            "rStridedBatchedIKfES3_S1_IfEfEEvT11_T4_S7_"
        ),
        "_ZN7cutlass7Kernel2I50cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4EEvNT_6ParamsE",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::_scaled_mm",
    ],
    "fused attention": [
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "_attn_bwd_dkdv",
        "_fwd_kernel",
        "_bwd_kernel",
        "_bwd_preprocess",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64>>(Flash_bwd_params)",
        "flash::prepare_varlen_num_blocks_kernel(int, int, int, int const*)",
        "void flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64>>()",
        "void flash_fwd_splitkv_combine_kernel<x>()",
        "kernel_unified_attention_2d",
        "void vllm::paged_attention_v1_kernel<x>()",
        "triton_tem_fused_flex_attention_0",
        (
            "fmha_cutlassB_f32_aligned_64x64_k32_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<cutla"
            "ss::arch::Sm80, float>)"
        ),
    ],
    "softmax": [
        "host_softmax",
        "void at::native::(anonymous namespace)::cunn_SpatialSoftMaxForward<float>()",
        ("_ZN43_GLOBAL__N__b6de9c8c_10_SoftMax_cu_9f978f6320softmax_warp_forwardIfffLi4ELb1ELb0EEEvPT0_PKT_iiiPKbib"),
        "triton_softmax",
        "triton_softmax_computation_3",
        "aten::softmax",
        "aten::_log_softmax_backward_data",
        "triton_per_fused__softmax_add_3",
        "triton_poi_fused__softmax__to_copy_11",
    ],
    "reduction": [
        "void at_cuda_detail::cub::DeviceReduceSingleTileKernel<x>()",
        "void cunn_ClassNLLCriterion_updateOutput_kernel<float, float>(float*)",
        "input_pad_reduce_fusion",
        "wrapped_reduce",
        "triton_red_fused__to_copy_pow_sum_view_1",
        "liger_cross_entropy_kernel",
        "aten::mean",
        "aten::argmax",
        "aten::nll_loss_backward",
        "void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int)",
    ],
    "elementwise": [
        "loop_add_fusion",
        "loop_multiply_fusion",
        "wrapped_add",
        "aten::mul",
        "aten::add_",
        "aten::silu_backward",
        "aten::native_dropout_backward",
        "triton_poi_fused_native_dropout_backward_0",
        "void transformer_engine::gated_act_kernel<silu>",
        "_swiglu_forward_kernel",
        "_rope_embedding",
        "void vllm::rotary_embedding_kernel<x>()",
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIte"
            "ratorBase&, at::native::GeluType)::{lambda()#2}, std::array<char*, 2ul> >(int)"
        ),
        ("void kernelPointwiseApply1<TensorFillOp<float>, float, unsigned int, 1>(OffsetInfo<float, unsigned int, 1>)"),
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13AUnaryFunctorIllbNS0_51_GLOBAL__N__28ce"
            "311f_18_CompareEQKernel_cu_d8008c9616CompareEqFunctorIlEEEENS_6detail5ArrayIPcLi2EEEEEviT0_T1_"
        ),
        ("void per_token_group_quant_8bit_kernel<__nv_bfloat16, c10::Float8_e4m3fn, false>(__nv_bfloat16 const*)"),
        "aten::fill_",
        "aten::zero_",
        "aten::exp",
        "aten::masked_fill",
    ],
    "copy/layout": [
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>()"),
        "input_concatenate_fusion",
        "loop_broadcast_fusion",
        "loop_transpose_fusion",
        "loop_convert_fusion",
        "copy_fusion",
        "wrapped_concatenate",
        "wrapped_transpose",
        "input_scatter_fusion",
        "wrapped_slice",
        "aten::copy_",
        "aten::cat",
        "aten::index_put_",
        "aten::_to_copy",
        "aten::gather",
        "triton_poi_fused_clone_6",
        "triton_poi_fused__to_copy_transpose_view_12",
        "at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char **, char **)",
        (
            "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::ind"
            "ex_kernel_impl<at::native::OpaqueType<4> >()>>()"
        ),
    ],
    "normalization": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int)",
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 32u>(long)"),
        "void at::native::(anonymous namespace)::cuComputePartGradGammaBeta<float>()",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(cudnnTensorStruct)",
        "void transformer_engine::normalization::rmsnorm_fwd_general_kernel<x>()",
        "void flashinfer::norm::RMSNormKernel<(unsigned int)8, __half>(T2 *)",
        "_rms_norm_forward_kernel",
        "_layer_norm_bwd_kernel",
        "void layer_norm::ln_fwd_kernel<layer_norm::Kernel_traits<x>>()",
        "void vllm::fused_add_rms_norm_kernel<x>()",
        "aten::native_layer_norm",
        "aten::native_layer_norm_backward",
        "triton_per_fused_add_mean_mul_pow_rsqrt_0",
        "triton_red_fused__to_copy_add_mul_native_layer_norm_split_t_view_1",
        "triton_per_fused_native_group_norm_native_group_norm_backward_0",
    ],
    "embedding": [
        "void at::native::(anonymous namespace)::compute_grad_weight<float>()",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>()",
        "void at::native::krn_partials_per_segment<long>()",
        "void at::native::(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<float>()",
        "aten::embedding",
        "triton_poi_fused_embedding_0",
        "triton_poi_fused_embedding_dense_backward_31",
    ],
    "optimizer": [
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>",
        "aten::_fused_adamw_",
        "aten::_foreach_add_",
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous names"
            "pace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFu"
            "nctor<float, 4>>()"
        ),
    ],
    "random": [
        "aten::normal_",
        "aten::bernoulli_",
        "aten::native_dropout",
        "aten::randint",
        "triton_poi_fused_native_dropout_0",
    ],
    "communication": [
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "ncclDevKernel_SendRecv(ncclDevComm *, unsigned long, ncclWork *)",
        "void sglang::cross_device_reduce_1stage<__half, 8>(sglang::RankData*)",
        "void deep_ep::internode_ll::combine<3, 10, 7168, 9>(void*)",
        "nvshmemi_init_array_kernel",
        "userbuffers_allgather",
        "multimem_all_reduce_kernel",
    ],
    "sort/scan": [
        "void at_cuda_detail::cub::DeviceScanKernel<x>()",
        "void at::native::sbtopk::gatherTopK<float>()",
        "aten::sort",
        "aten::topk",
        "void at::native::bitonicSortKVInPlace<x>()",
        "void at::native::tensor_kernel_scan_innermost_dim<float>()",
    ],
    "convolution": [
        (
            "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_warp"
            "size2x2x1_g1_tensor16x8x8"
        ),
        "maxwell_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v0",
        "void cudnn::winograd::generateWinogradTilesKernel<(int)0, float, float>(x)",
        "void cudnn::cnn::wgrad_alg0_engine<float, 512, 6, 5, 3, 3, 3, false, 512>(int)",
        "void cudnn::ops::nchwToNhwcKernel<float>()",
        "aten::mkldnn_convolution",
        "aten::conv2d",
        "void at::native::im2col_kernel<float>(long)",
    ],
    "memset/memcpy": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "[CUDA memset]",
        "MemcpyD2D",
        "RepeatBufferKernel",
        "aten::_local_scalar_dense",
    ],
    "other": [
        "fusion_922",
        "triton__0d1d2d3de",
        "_chunk_scan_fwd_kernel",
        "Kernel",
    ],
}

# Names of libraries that mislead a reader: fbgemm is no GEMM, a tensor holds no sort, and types hide in conditions.
LIBRARIES: dict[str, list[str]] = {
    "copy/layout": [
        "void fbgemm_gpu::permute_2D_data_kernel<true, long, float, float>(int, int, int, int const*)",
        "void permute_pooled_embs_kernel<float>(float const*, long const*)",
        "void tensorTransformGeneric<__nv_bfloat16, __nv_bfloat16, float, true, false, false>(int)",
        "void (anonymous namespace)::store_kvcache<2048l, 4, false, long>((anonymous namespace)::StoreKVCacheParams)",
    ],
    "elementwise": [
        "void fbgemm_gpu::(anonymous namespace)::_compute_FP8_quantize_cuda_kernel<float>(float const*)",
        "void fbgemm_gpu::(anonymous namespace)::_FP8rowwise_to_float_cuda_kernel<float>(unsigned char const*)",
        "void at::native::(anonymous namespace)::upsample_nearest2d_out_frame<float>(float const*)",
        "void at::native::(anonymous namespace)::upsample_bilinear2d_backward_out_frame<float, float>(int)",
        "void tensorrt_llm::kernels::quantize_with_block_size<x>(int)",
        "_ZN7sgl_hip10activation18act_and_mul_kernelI14__hip_bfloat16TnPFT_RKS3_EXadL_Z4siluIS2_ES3_S5_EEEEvPS3_PS4_i",
    ],
    "matmul": [
        "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN_transOut",
        "void epilogue::impl::globalKernel<float, float, float, true, true>(int, int, long, float*)",
        "void cutlass::device_kernel<fbgemm_gpu::f8f8bf16<cutlass::gemm::kernel::GemmUniversal<x>>>(x)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float>(x)",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu",
    ],
    "convolution": [
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1_wr2x2_ta1x8x2x1_1x4x1x64",
        "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_28GridwiseGemm_xdl_"
        "cshuffle_v3INS_13tensor_layout4gemm8RowMajorE",
        "Im2d2Col_v2",
        "void cudnn::ops::scalePackedTensor_kernel<float, float>(cudnnTensor4dStruct, float*, float)",
        "cask_cudnn::computeOffsetsKernel(cask_cudnn::ComputeOffsetsParams)",
        "volta_gcgemm_32x32_nt",
    ],
    "fused attention": [
        "sage_fwd",
        "bwd_kernel_fuse",
        "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_40BlockFmhaBatchPrefillPipelineQRKSVSAsync",
        "fmha_cutlassB_f32_aligned_64x64_k32_dropout_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<float>::Params)",
    ],
    "normalization": [
        "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
        "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)",
        "void at::native::batch_norm_transform_input_kernel<c10::BFloat16, c10::BFloat16, float, true, int>(x)",
        "void at::native::elementwise_kernel_manual_unroll<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
        "(anonymous namespace)::GroupNormKernelImplInternal<float>(x)::{lambda(float)#1}>>(int)",
        "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256ELi16ELb0ELb0ELb1ELi1EEEvPT0_PT_PfS4_S4_S4_diiiiiiib",
        "MIOpenBatchNormFwdTrainSpatial",
    ],
    "sort/scan": [
        "void at::native::(anonymous namespace)::write_indices<int>(long*, int)",
        "void at::native::(anonymous namespace)::gatherMedian<float, unsigned int, 2>(x)",
        "void cub::DeviceReduceByKeyKernel<cub::DispatchReduceByKey<long*, long*>>(x)",
        "triton_per_fused_cumsum_2",
        "_combined_routing_compute",
    ],
    "reduction": [
        "void moe::dev::finalize::finalizeKernelVecLoad<moe::dev::finalize::KernelParams<x>>(x)",
        "void fbgemm_gpu::(anonymous namespace)::_get_FP8_qparam_cuda_kernel<float>(float const*)",
    ],
    "memset/memcpy": ["__amd_rocclr_fillBufferAligned", "__amd_rocclr_copyBuffer", "_combined_routing_memset"],
    "communication": ["mscclKernel_Sum_float_LL_false(ncclDevComm*, mscclAlgo*, mscclWork*)"],
}

TRAPS = [
    # A functor's name is no class: the kernel around it loops over elements.
    ("void at::native::vectorized_elementwise_kernel<4, at::native::softmax_gemm_functor<float>>(int)", "elementwise"),
    ("void at::native::elementwise_kernel<128, 2, at::native::reduce_like<nccl::x>>(int, T3)", "elementwise"),
    # ... unless the functor is a copy; an addition that casts as it loads is no copy.
    ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(int)>(int)", "copy/layout"),
    (
        "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, "
        "at::native::memory::LoadWithCast<(int)2>>(int)",
        "elementwise",
    ),
    # A reduction in the name of a collective or of a split-K product is neither.
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
    ("void splitKreduce_kernel<float, float, float, float>(cublasSplitKParams<float>)", "matmul"),
    # A rotary embedding looks nothing up.
    ("_rope_embedding", "elementwise"),
    # cuBLASLt's SGEMM of a convolution, and a GEMM.
    ("implicit_convolve_sgemm", "convolution"),
    ("ampere_sgemm_32x128_tn", "matmul"),
    # In torch.compile's names the list decides: pointwise work, moves only, a reduction, what it was made for.
    ("triton_poi_fused_clamp_mul_silu_slice_0", "elementwise"),
    ("triton_poi_fused__to_copy_1", "copy/layout"),
    ("triton_poi_fused_add_cat_mul_2", "elementwise"),
    ("triton_poi_fused_native_dropout_relu_5", "elementwise"),
    ("triton_red_fused__to_copy_mean_pow_3", "reduction"),
    ("triton_red_fused_fused_add_rms_norm_0", "normalization"),
    ("triton_red_fused__to_copy_embedding_mean_mul_pow_rsqrt_0", "normalization"),
    ("", OTHER),
]


def _pairs(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(name, kernel_class) for kernel_class, names in table.items() for name in names]


@pytest.mark.parametrize(("name", "kernel_class"), _pairs(CAPTURED) + _pairs(PUBLISHED) + _pairs(LIBRARIES) + TRAPS)
def test_name_is_of_its_class(name: str, kernel_class: str) -> None:
    assert classify(name) == kernel_class


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kernel_class}-{rule.example[:30]}")
def test_example_is_decided_by_its_own_rule(rule: Rule) -> None:
    assert first_rule(rule.example) is rule
    assert classify(rule.example) == rule.kernel_class


def test_every_class_has_a_line_in_the_glossary_and_a_rule() -> None:
    assert {rule.kernel_class for rule in RULES} | {OTHER, UNKNOWN} == set(CLASSES)
    assert all(line.endswith(".") and "\n" not in line for line in CLASSES.values())


def test_patterns_are_distinct_and_compile() -> None:
    assert len({rule.pattern for rule in RULES}) == len(RULES)
    assert all(re.compile(rule.pattern) for rule in RULES)


def test_mangled_name_is_written_out() -> None:
    assert readable("_ZN2at6native13reduce_kernelILi512ELi1EEEvT1_") == "at::native::reduce_kernel<512, 1>"
    assert readable("_ZN12_GLOBAL__N_14copyINS_3RowELb1EEEvPKf") == "(anonymous namespace)::copy<Row, 1>"
    # An enumerator's value is no length, and neither is the 16 of bfloat16 (DF16b) or of a back reference (S16_).
    assert readable("_ZN1a1fILNS_4ModeE3EDF16bLi7ES16_3RowEvT_") == "a::f<Mode, 7, Row>"
    assert readable("_Z9my_kernelPf") == "my_kernel"
    assert readable("_attn_fwd") == "_attn_fwd"


@pytest.mark.parametrize(
    ("name", "kernel_class"),
    [
        ("triton_poi_fused" + "_slice_scatter_select_copy__to_copy_index_put" * 40 + "_zz_3", "elementwise"),
        ("triton_poi_fused" + "_native_layer_norm_view_native_batch_norm" * 40 + "_zz_3", "elementwise"),
        ("loop" + "_dynamic_slice_update_dynamic_update_slice" * 40 + "_fusion", "elementwise"),
        ("a::" * 2000 + "f<" + "x" * 20000, OTHER),
    ],
    ids=["moves", "norms", "xla", "namespaces"],
)
def test_long_names_are_read_without_backtracking(name: str, kernel_class: str) -> None:
    assert classify(name) == kernel_class
