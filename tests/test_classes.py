"""Kernel classes: every rule by its example, and names from captures and from public profiles."""

from __future__ import annotations

import re

import pytest

from nsys_analyzer.analysis.kernels.class_rules import CLASSES, OTHER, RULES, UNKNOWN, Rule
from nsys_analyzer.analysis.kernels.classes import classify, demangle, find_rule

#: Names as profilers stored them, of captures of a transformer in fp32 and bf16, eager and compiled, and of public
#: profiles, and as the sources of libraries define them. Each shows a part of a pattern that no rule's example needs.
NAMES: dict[str, list[str]] = {
    "fused attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        (
            "void cudnn::fusion::convert_dq_to_16bits<(bool)1>(const void *, void *, unsigned int, unsigned int, un"
            "signed int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsign"
            "ed int, const float *, const float *, const float *, float *, const void *, void *, void *, bool, bool"
            ")"
        ),
        "_attn_bwd_dkdv",
        "_fwd_kernel",
        "_bwd_kernel",
        "void flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64>>()",
        "void flash_fwd_splitkv_combine_kernel<x>()",
        "void vllm::paged_attention_v1_kernel<x>()",
        "bwd_kernel_fuse",
        (
            "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_40BlockFmhaBatchPrefillPipelineQ"
            "RKSVSAsync"
        ),
        (
            "fmha_cutlassB_f32_aligned_64x64_k32_dropout_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<float"
            ">::Params)"
        ),
    ],
    "communication": [
        "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        "void deep_ep::internode_ll::combine<3, 10, 7168, 9>(void*)",
        "userbuffers_allgather",
        "mscclKernel_Sum_float_LL_false(ncclDevComm*, mscclAlgo*, mscclWork*)",
        "void dpsk::ep::internode::cached_notify<false>(int, int, int, int, int*, int)",
        "void dpsk::ep::internode::notify_dispatch<false, 8>(int const*, long*, int, int const*)",
        "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)",
        "void hybrid_ep::combine_kernel<hybrid_ep::warp_group<1, 0>>()",
        "void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8>(int const*)",
        "mori::moe::EpCombineInterNodeV1Kernel",
        "a2a_combine_recv_kernel",
        "void quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half, CodecQ4<__half, 4>, true>, __half>()",
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(flashinfer::"
            "trtllm_allreduce_fusion::AllReduceFusionPattern)1, __nv_bfloat16, 2, true, true>()"
        ),
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>(c10::BFloat16**)",
        "(anonymous namespace)::barrier_kernel(unsigned int**, unsigned long)",
        "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
    ],
    "compiled": [
        "triton__0d1d2d3d4d5d6d7d8d9d10d",
        "triton__0d1d2",
        "CudaCodeGen::kernel1(CudaCodeGen::Tensor<float>)",
    ],
    "matmul": [
        "aiter_fused_moe_kernel_bf16",
        "void gemmSN_NN_kernel<float, 256, 4, 2, 8, 4, 4, false>(int)",
        "std::enable_if<true, void>::type internal::gemvx::kernel<int>(int)",
        "cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32_64x64x16_1x1x1_3_tnn_align1_bias_f32_relu",
        "triton_mm",
        (
            "_Z17gemv2T_kernel_valIiiffffLi128ELi16ELi4ELi4ELb0ELb1E18cublasGemvParamsExIi30cublasGemvTensorStrided"
            "BatchedIKfES3_S1_IfEfEEvT11_T4_S7_"
        ),
        "_ZN7cutlass7Kernel2I50cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4EEvNT_6ParamsE",
        "aten::mm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::_scaled_mm",
        "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN_transOut",
        "void epilogue::impl::globalKernel<float, float, float, true, true>(int, int, long, float*)",
        "void cutlass::device_kernel<fbgemm_gpu::f8f8bf16<cutlass::gemm::kernel::GemmUniversal<x>>>(x)",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu",
    ],
    "elementwise": [
        (
            "void <unnamed>::elementwise_kernel_with_index<int, at::native::arange_cuda_out(const c10::Scalar &, co"
            "nst c10::Scalar &, const c10::Scalar &, at::Tensor &)::[lambda() (instance 1)]::operator ()() const::["
            "lambda() (instance 4)]::operator ()() const::[lambda(long) (instance 1)]>(T1, T2, function_traits<T2>:"
            ":result_type *)"
        ),
        "wrapped_add",
        "aten::mul",
        "aten::native_dropout_backward",
        "void transformer_engine::gated_act_kernel<silu>",
        "_swiglu_forward_kernel",
        "void vllm::rotary_embedding_kernel<x>()",
        "void kernelPointwiseApply1<TensorFillOp<float>, float, unsigned int, 1>(OffsetInfo<float, unsigned int, 1>)",
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13AUnaryFunctorIllbNS0_51_GLOBAL__N__28ce311f_18_"
            "CompareEQKernel_cu_d8008c9616CompareEqFunctorIlEEEENS_6detail5ArrayIPcLi2EEEEEviT0_T1_"
        ),
        "aten::zero_",
        "aten::exp",
        "aten::masked_fill",
        "void fbgemm_gpu::(anonymous namespace)::_compute_FP8_quantize_cuda_kernel<float>(float const*)",
        "void fbgemm_gpu::(anonymous namespace)::_FP8rowwise_to_float_cuda_kernel<float>(unsigned char const*)",
        "void at::native::(anonymous namespace)::upsample_nearest2d_out_frame<float>(float const*)",
        "_ZN7sgl_hip10activation18act_and_mul_kernelI14__hip_bfloat16TnPFT_RKS3_EXadL_Z4siluIS2_ES3_S5_EEEEvPS3_PS4_i",
    ],
    "copy/layout": [
        (
            "void <unnamed>::indexing_backward_kernel<float, (int)4>(const long *, const long *, const T1 *, T1 *, "
            "long, long, long, long, bool)"
        ),
        (
            "void at::native::_scatter_gather_elementwise_kernel<(int)128, (int)8, void at::native::_cuda_scatter_g"
            "ather_internal_kernel<(bool)1, at::native::OpaqueType<(int)4>, long>::operator ()<at::native::TensorAs"
            "sign>(at::TensorIterator &, long, long, long, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
        ),
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>()",
        "loop_broadcast_fusion",
        "loop_convert_fusion",
        "wrapped_concatenate",
        "wrapped_transpose",
        "input_scatter_fusion",
        "wrapped_slice",
        "aten::cat",
        "triton_poi_fused_clone_6",
        "triton_poi_fused__to_copy_transpose_view_12",
        "at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char **, char **)",
        "void permute_pooled_embs_kernel<float>(float const*, long const*)",
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::T"
            "ensorListMetadata<2>, at::native::(anonymous namespace)::CopyFunctor<int, long, 2, 1, 1>, at::native::"
            "Copy<int, long> >()"
        ),
        "aten::_foreach_copy_",
        "void tensorTransformGeneric<__nv_bfloat16, __nv_bfloat16, float, true, false, false>(int)",
        "void (anonymous namespace)::store_kvcache<2048l, 4, false, long>((anonymous namespace)::StoreKVCacheParams)",
    ],
    "softmax": [
        (
            "void at::native::<unnamed>::cunn_SoftMaxForwardSmem<(int)4, float, float, float, at::native::<unnamed>"
            "::LogSoftMaxForwardEpilogue, long>(T4 *, const T2 *, T6)"
        ),
        "_ZN43_GLOBAL__N__b6de9c8c_10_SoftMax_cu_9f978f6320softmax_warp_forwardIfffLi4ELb1ELb0EEEvPT0_PKT_iiiPKbib",
        "triton_per_fused__softmax_add_3",
        "triton_poi_fused__softmax__to_copy_11",
    ],
    "optimizer": [
        (
            "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadata<(int)2"
            ">, at::native::<unnamed>::UnaryOpFunctor<float, (int)2, (int)1, (int)1>, at::native::Sqrt<float>>(T1, "
            "T2, T3...)"
        ),
        "aten::_foreach_add_",
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::F"
            "usedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>"
            "()"
        ),
    ],
    "reduction": [
        (
            "void at::native::<unnamed>::nll_loss_backward_reduce_cuda_kernel_2d<float, long>(T1 *, const T1 *, con"
            "st T2 *, const T1 *, const T1 *, bool, int, int, long, long)"
        ),
        "void cunn_ClassNLLCriterion_updateOutput_kernel<float, float>(float*)",
        "input_pad_reduce_fusion",
        "wrapped_reduce",
        "liger_cross_entropy_kernel",
        "aten::mean",
        "void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int)",
        "void moe::dev::finalize::finalizeKernelVecLoad<moe::dev::finalize::KernelParams<x>>(x)",
        "void fbgemm_gpu::(anonymous namespace)::_get_FP8_qparam_cuda_kernel<float>(float const*)",
    ],
    "sort/scan": [
        "void at_cuda_detail::cub::DeviceScanKernel<x>()",
        "void at::native::sbtopk::gatherTopK<float>()",
        "void at::native::tensor_kernel_scan_innermost_dim<float>()",
        "void at::native::(anonymous namespace)::write_indices<int>(long*, int)",
        "void at::native::(anonymous namespace)::gatherMedian<float, unsigned int, 2>(x)",
        "void cub::DeviceReduceByKeyKernel<cub::DispatchReduceByKey<long*, long*>>(x)",
        "triton_per_fused_cumsum_2",
        "_combined_routing_compute",
        "void ck_tile::kentry<2, ck_tile::MoeSortingKernel<ck_tile::MoeSortingProblemEx<int, float, 2>>>(x)",
    ],
    "normalization": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 32u>(long)",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(cudnnTensorStruct)",
        "void vllm::fused_add_rms_norm_kernel<x>()",
        "void (anonymous namespace)::fused_qknorm_warp<128l, true, __nv_bfloat16>(x)",
        "triton_red_fused__to_copy_add_mul_native_layer_norm_split_t_view_1",
        "triton_per_fused_native_group_norm_native_group_norm_backward_0",
        (
            "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type vllm::fused_add_rms"
            "_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)"
        ),
        (
            "void at::native::elementwise_kernel_manual_unroll<128, 4, at::native::gpu_kernel_impl_nocast<at::nativ"
            "e::(anonymous namespace)::GroupNormKernelImplInternal<float>(x)::{lambda(float)#1}>>(int)"
        ),
        "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256ELi16ELb0ELb0ELb1ELi1EEEvPT0_PT_PfS4_S4_S4_diiiiiiib",
        "MIOpenBatchNormFwdTrainSpatial",
    ],
    "embedding": [
        "void at::native::(anonymous namespace)::compute_grad_weight<float>()",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>()",
        "void at::native::krn_partials_per_segment<long>()",
    ],
    "random": [
        "aten::native_dropout",
        "aten::randint",
    ],
    "convolution": [
        (
            "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_warpsize2x2x"
            "1_g1_tensor16x8x8"
        ),
        "maxwell_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v0",
        "void cudnn::winograd::generateWinogradTilesKernel<(int)0, float, float>(x)",
        "void cudnn::ops::nchwToNhwcKernel<float>()",
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1_wr2x2_ta1x8x2x1_1x4x1x64",
        (
            "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_28GridwiseGe"
            "mm_xdl_cshuffle_v3INS_13tensor_layout4gemm8RowMajorE"
        ),
        "Im2d2Col_v2",
        "void cudnn::ops::scalePackedTensor_kernel<float, float>(cudnnTensor4dStruct, float*, float)",
        "volta_gcgemm_32x32_nt",
    ],
    "memset/memcpy": [
        "[CUDA memset]",
        "MemcpyD2D",
        "aten::_local_scalar_dense",
        "__amd_rocclr_fillBufferAligned",
        "__amd_rocclr_copyBuffer",
        "_combined_routing_memset",
    ],
    "input pipeline": [
        "void dali::kernels::normalize_impl::NormalizeInvStdDevKernel<dali::kernels::Normalize<4, float, float>>(T1)",
        "void dali::kernels::transpose_impl::TransposeDeinterleaveBatch<int>(const dali::DeinterleaveDesc<T1> *)",
        "void dali::kernels::detail::SliceKernelImpl<float, float, false, false, 2>(float*, float const*)",
    ],
    "other": [
        "_chunk_scan_fwd_kernel",
    ],
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
    # A shape's tokens are counted on one rank alone.
    ("void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*, int*)", "sort/scan"),
    # torch._foreach_copy_ of integers, too, as either profiler writes it, is no optimizer.
    (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "TensorListMetadata<2>, at::native::(anonymous namespace)::UnaryOpFunctor<long, 2, 1, 1>, "
        "at::native::(anonymous namespace)::Copy<long, long> >()",
        "copy/layout",
    ),
    (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "TensorListMetadata<2>, at::native::(anonymous namespace)::CopyFunctor<float, c10::BFloat16, 2, 1, 1> >()",
        "copy/layout",
    ),
    ("foldedNhwcToNhwcKernel", "convolution"),
    ("void compute_cuda_kernel<long>(long*, long*, long*, long, long)", "copy/layout"),
    ("nvfuser_inner_outer_persistent_f0_c1_r0_g0", "normalization"),
    ("void cudnn::ops::setTensor5d_kernel<float, float, (int)8>(cudnnTensorStruct, T1 *, T2)", "memset/memcpy"),
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


@pytest.mark.parametrize(
    ("name", "kernel_class"),
    [*((name, kernel_class) for kernel_class, names in NAMES.items() for name in names), *TRAPS],
)
def test_name_is_of_its_class(name: str, kernel_class: str) -> None:
    assert classify(name) == kernel_class


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kernel_class}-{rule.example[:30]}")
def test_example_is_decided_by_its_own_rule(rule: Rule) -> None:
    assert find_rule(rule.example) is rule
    assert classify(rule.example) == rule.kernel_class


def test_every_class_has_a_line_in_the_glossary_and_a_rule() -> None:
    assert {rule.kernel_class for rule in RULES} | {OTHER, UNKNOWN} == set(CLASSES)
    assert all(row.meaning.endswith(".") and "\n" not in row.meaning for row in CLASSES.values())


def test_patterns_are_distinct_and_compile() -> None:
    assert len({rule.pattern for rule in RULES}) == len(RULES)
    assert all(re.compile(rule.pattern) for rule in RULES)


def test_mangled_name_is_written_out() -> None:
    assert demangle("_ZN2at6native13reduce_kernelILi512ELi1EEEvT1_") == "at::native::reduce_kernel<512, 1>"
    assert demangle("_ZN12_GLOBAL__N_14copyINS_3RowELb1EEEvPKf") == "(anonymous namespace)::copy<Row, 1>"
    # An enumerator's value is no length, and neither is the 16 of bfloat16 (DF16b) or of a back reference (S16_).
    assert demangle("_ZN1a1fILNS_4ModeE3EDF16bLi7ES16_3RowEvT_") == "a::f<Mode, 7, Row>"
    assert demangle("_Z9my_kernelPf") == "my_kernel"
    assert demangle("_attn_fwd") == "_attn_fwd"


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
