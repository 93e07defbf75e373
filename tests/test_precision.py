"""The precision of matrix products: every rule by its example, and names from captures and public profiles."""

from __future__ import annotations

import pytest

from nsys_analyzer.analysis.kernels.classes import PRECISION_RULES, PrecisionRule, find_precision, find_precision_rule

NAMES = [
    # captured
    ("nvjet_sm90_tst_304x128_64x3_1x2_h_bz_coopA_TNN", "bf16"),
    (
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma_aligna4_alignc4_"
        "execute_split_k_kernel__5x_cublas",
        "fp32",
    ),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)", "fp32"),
    (
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0",
        None,
    ),
    ("void cudnn::fusion::convert_dq_to_16bits<(bool)1>(const void *, void *, unsigned int)", None),
    # published
    ("nvjet_tss_256x128_64x4_1x2_h_bz_coopA_TNT", "bf16"),
    ("nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT", "fp16"),
    ("nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_bias_TNT", "fp8"),
    ("nvjet_qqtst_128x256_128x6_2x2_2cta_h_bz_Avec32UE8M0_Bvec32UE8M0_TNT", "fp8"),
    ("nvjet_ootst_128x256_Avec16UE4M3_Bvec16UE4M3_TNT", "fp4"),
    ("bmm_Bfloat16_E2m1E2m1_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN", "fp4"),
    ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16", "fp8"),
    ("nvjet_sss_128x256_TNT", None),
    ("sm80_xmma_gemm_tf32tf32_tf32f32_f32_nt_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8", "tf32"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "bf16"),
    ("sm80_xmma_gemm_f16f16_f16f16_f16_nt_n_tilesize128x256x32_stage3_warpsize2x4x1_tensor16x8x16", "fp16"),
    ("sm90_xmma_gemm_i8i32_i8i32_f32_tn_n_tilesize256x128x128_stage4_gmmastage2_warpgroupsize2x1x1", "int8"),
    ("sm89_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n_tilesize64x64x64_stage4_warpsize2x2x1_tensor16x8x32", "fp8"),
    ("ampere_sgemm_128x64_nn", "fp32"),
    ("volta_dgemm_64x64_nn", "fp64"),
    ("volta_h884gemm_128x64_ldg8_nn", "fp16"),
    ("volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn", "fp16"),
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", "bf16"),
    ("cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1", "bf16"),
    ("void cutlass::Kernel<cutlass_80_tensorop_s16816gemm_bf16_128x64_64x4_tn_align8>(x::Params)", "bf16"),
    ("cutlass_80_wmma_tensorop_f16_s161616gemm_f16_16x16_128x2_tn_align8", "fp16"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(T1::Params)", "tf32"),
    ("_ZN7cutlass7Kernel2I50cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4EEvNT_6ParamsE", "tf32"),
    ("void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 2, 4, false, false>()", "fp16"),
    (
        "std::enable_if<!T7, void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float, float>(T13)",
        "bf16",
    ),
    ("std::enable_if<!T7, void>::type internal::gemvx::kernel<int, int, float, float, float>(T13)", "fp32"),
    ("void gemmSN_NN_kernel<double, 256, 4, 2, 8, 4, 4, false>()", "fp64"),
    (
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, false, false, cutlass::half_t>>()",
        "fp16",
    ),
    (
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, "
        "cutlass::arch::Sm80, (bool)1, (int)64, (int)64, (int)64, (bool)1, (bool)1>::Params)",
        "bf16",
    ),
    # What an enumerator is called says nothing of its value.
    ("paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16, __hip_bfloat16, (vllm::Fp8KVCacheDataType)0>", "bf16"),
    # Tensile and hipBLASLt: bf16 and fp32 operands seen beside the first four; the rest as Tensile writes its types.
    ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x64x128_MI16x16x1_SN_LDSB1_AFC0_AG0_AFEM1_AFEM1", "bf16"),
    ("Cijk_Ailk_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT16x448x64_MI16x16x1_SN_LDSB1_AFC1_AFEM1_AFEM1", "bf16"),
    ("Cijk_Ailk_Bljk_BBS_BH_MT128x64x64_MI32x32x8x1_SN_1LDSB0_APM1_ABV0_ACED0_AF0EM1_AF1EM1_AMAS3", "bf16"),
    ("Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x64_MI16x16x1_SN_LDSB0_MGRIPM1_MXLIBL_MXSFNS", "fp32"),
    ("Cijk_Alik_Bljk_BSS_BH_Bias_HAS_SAV_UserArgs_MT16x16x256_MI16x16x1_SN_LDSB1", "bf16"),
    ("Cijk_AlikC_Bljk_ZB_MT32x32x8_SN_1LDSB0", "fp64"),
    ("Cijk_Ailk_Bjlk_HSS_BH_Bias_HAS_SAV_UserArgs_MT64x64x32", "fp16"),
    ("Cijk_Ailk_Bjlk_HB_MT128x128x16_SE_K1", "fp16"),
    ("Cijk_Alik_Bljk_SB_MX_MT128x128x16_MI32x32x4x1", "tf32"),
    ("Cijk_Alik_Bljk_F8H_HHS_BH_Bias_SHB_HA_S_SAB_SAV_UserArgs_MT128x128x32", "fp16"),
    ("Cijk_Alik_Bljk_HH_F8HS_BH_Bias_HA_S_SAV_UserArgs_MT128x128x64", "fp8"),
    ("Cijk_Alik_Bljk_B8F8S_BH_Bias_HA_S_SAB_SAV_UserArgs_MT256x256x128", "fp8"),
    ("Cijk_SB_BiasS_HAS_ScaleAlphaVec_PostGSU8", None),
    # TensorRT-LLM multiplies 4-bit weights as fp8, what the other operand is in.
    ("bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN", "fp8"),
    ("nvjet_sm90_rqhsh_64x8_128x16_2x4_h_bz_algo2_TNT", "fp8"),
    # A name that does not say, and kernels that multiply no matrices whatever their types.
    ("triton_tem_fused_bmm_7", None),
    ("aten::addmm", None),
    ("void at::native::vectorized_elementwise_kernel<(int)8, at::native::CUDAFunctor_add<c10::BFloat16>>()", None),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", None),
]


@pytest.mark.parametrize(("name", "precision"), NAMES)
def test_name_tells_its_precision(name: str, precision: str | None) -> None:
    assert find_precision(name) == precision


@pytest.mark.parametrize("rule", PRECISION_RULES, ids=lambda rule: f"{rule.precision}-{rule.example[:40]}")
def test_example_is_decided_by_its_own_rule(rule: PrecisionRule) -> None:
    assert find_precision_rule(rule.example) is rule
    assert find_precision(rule.example) == rule.precision


def test_precisions_are_the_documented_ones() -> None:
    known = {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8"}
    assert {rule.precision for rule in PRECISION_RULES} - {None} == known
