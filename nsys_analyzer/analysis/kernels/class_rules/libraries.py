"""Rules for kernels that people wrote: NCCL, ATen, attention, cuDNN, cuBLAS, CUB and many others.

Most patterns start with ``FN`` or ``IN``, which hold them to the kernel's own qualified name, left of its
template arguments, so that an elementwise kernel stays one though a functor in its arguments is called softmax. Rows go
from the most telling name to the least.
"""

from __future__ import annotations

from nsys_analyzer.analysis.kernels.class_rules import rule
from nsys_analyzer.analysis.kernels.class_rules.rule import FN, IN, Rule

#: Kernels that other classes have too, which are a convolution's where a convolution launches them.
_OF_CONVOLUTION = ("convolution",)

_COMMUNICATION_RULES = (
    rule.communication(FN + r"(?:nccl(?:Dev)?Kernel|mscclKernel)", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"),
    rule.communication(FN + r"(?:deep_ep|nvshmem\w*|nccl\w*|userbuffers\w*)", "nvshmemi_init_array_kernel"),
    rule.communication(
        IN + r"(?i:cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|multimem_)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>",
    ),
)

_ATEN_ELEMENTWISE_RULES = (
    rule.random(
        FN
        + r"(?!fmha_)\w*?(?i:distribution_|dropout|philox|curand|bernoulli|gen_sequenced|generate_seed|cupy_random)|"
        + IN
        + r"PointwiseApply\d<.*(?:Distributions|bernoulli)",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4>",
    ),
    rule.copy_layout(
        FN + r"(?:_scatter_gather_|index_|vectorized_index_)elementwise_kernel",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::"
        "index_kernel_impl<at::native::OpaqueType<4> >()>>",
    ),
    rule.copy_layout(
        IN + r"elementwise_kernel\w*<.*(?:copy_(?:kernel(?:_cuda|\b)|device_to_device)|(?:flip|take_put|masked_scatter"
        r"|unfold_backward_internal|conj)_kernel)",
        "void at::native::vectorized_elementwise_kernel<(int)8, at::native::bfloat16_copy_kernel_cuda("
        "at::TensorIteratorBase &)::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>()",
    ),
    rule.normalization(
        IN + r"elementwise_kernel\w*<.*(?:GroupNorm\w*KernelImpl|batch_norm_)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::batch_norm_calc_invstd("
        "at::Tensor const&, at::Tensor const&, double)::{lambda()#1}::operator()() const::{lambda()#2}::operator()() "
        "const::{lambda(float)#1}, std::array<char*, 2ul> >()",
    ),
    rule.elementwise(
        IN + r"(?:elementwise_kernel|PointwiseApply|triu_tril|fill_(?!Buffer)|upsample_|grid_sampler|_elemwise"
        r"|_vectorized\d_kernel|cross_kernel)",
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>, "
        "std::array<char *, (unsigned long)1>>(int, T2, T3)",
    ),
)

_NAMED_RULES = (
    rule.optimizer(
        IN + r"(?:multi_tensor|[Aa]dam|lamb_stage|lpnorm_cleanup|sgd_)",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>",
    ),
    # A rotary position embedding multiplies by sines and cosines: it looks nothing up.
    rule.elementwise(IN + r"(?i:rope|rotary)", "void rotary_embedding_kernel<c10::BFloat16, true>"),
    rule.elementwise(  # The cells of recurrent networks; their matmuls are kernels of their own.
        FN
        + r"(?:elemWiseRNNcell|(?:LSTM|GRU|RNN|GENERIC)_\w*(?:elementWise|combine|accum|init)|persistRNN_(?:add|init)"
        r"|kernel::(?:lstm|gru)_cell_)",
        "void LSTM_elementWise_bp1<float, float, float>",
    ),
    rule.softmax(IN + r"(?i:soft_?max)", "void at::native::(anonymous namespace)::cunn_SpatialSoftMaxForward<float>"),
    rule.embedding(
        IN + r"(?i:embedding|compute_grad_weight|krn_partial|num_of_partial_segments|sum_and_scatter|linearize_index)",
        "void at::native::(anonymous namespace)::sum_and_scatter<float, long>",
    ),
    rule.normalization(
        IN + r"(?i:(?:layer|rms|group|batch|instance|weight)_?norm|normalization|cuComputePart|cuComputeGrad)",
        "void cuApplyLayerNorm<float, float, float>",
    ),
    rule.normalization(
        FN + r"ck_tile::kentry<.*?(?:Layer|Rms)norm2d",
        "_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePassINS_27Rmsnorm2dFwdPipelineProblemI"
        "DF16bDF16bfDF16bDF16bDF16bff",
    ),
    rule.normalization(
        IN + r"(?:GammaBeta|RowwiseMoments|InternalGradients|FusedParams|ln_(?:fwd|bwd)|bn_(?:fw|bw))",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float, false>",
    ),
)

_ATTENTION_RULES = (
    rule.fused_attention(
        IN + r"(?:flash_?(?:fwd|bwd)|[Ff]lash_?[Aa]tt|fmha|_sdpa_|gemm_mha|attention|mha_(?:fwd|bwd)|_mla_)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80",
    ),
    rule.fused_attention(FN + r"(?:flash|pytorch_flash)::", "flash::prepare_varlen_num_blocks_kernel"),
    rule.fused_attention(
        IN + r"(?:Kernel2?|device_kernel|kentry)<.*(?:[Ff]lash|fmha|Fmha|FMHA|AttentionKernel)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
        "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, 128, "
        "cutlass::bfloat16_t, float, cutlass::arch::Sm90> > > >()",
    ),
    rule.fused_attention(
        FN + r"fusion::(?:compute_dot_do_o|convert_d[qkv]|lean_reduction)",
        "void cudnn::fusion::compute_dot_do_o_specialized<(bool)1, (int)64>",
    ),
    rule.fused_attention(  # Triton: the tutorial's names, FlashAttention's port, and vLLM's and SGLang's descendants.
        FN + r"(?:_?\w*attn_(?:fwd|bwd)|_(?:fwd|bwd)_(?:kernel|preprocess|grouped_kernel))",
        "_attn_fwd",
    ),
    rule.fused_attention(  # SageAttention, and the backward passes of AOTriton.
        FN + r"(?:sage_(?:fwd|attn)|_?bwd_(?:kernel_(?:fuse|dk_dv|dq)|preprocess)\b|reduce_segments$)",
        "sage_fwd",
    ),
    rule.fused_attention(
        FN + r"(?:Batch|Single)(?:Prefill|Decode)With|" + IN + r"(?:merge_attn|merge_state)",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(bool)0, (unsigned int)2>",
    ),
)

_CONVOLUTION_RULES = (
    rule.convolution(
        IN + r"(?i:implicit_|convol|fprop|dgrad|wgrad|winograd|conv\d?d|conv_depthwise)",
        "void implicit_convolve_sgemm<float, float, 128, 6, 7, 3, 3, 5, 1, false, true, true>",
    ),
    rule.convolution(  # F.unfold and F.fold are these alone.
        IN + r"(?i:im2col|col2im|vol2col|vol2im)",
        "void at::native::im2col_kernel<c10::BFloat16>",
        ("copy/layout",),
    ),
    rule.convolution(
        IN + r"(?:Kernel2?|device_kernel)<.*(?:fprop|dgrad|wgrad|ImplicitGemm|Conv2d)",
        "void cutlass_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x64_16x6_nhwc>",
    ),
    rule.convolution(
        IN + r"(?:scudnn|hcudnn|icudnn)|" + FN + r"(?:cudnn::cnn|cutlass\w*_cudnn\w*)::",
        "volta_scudnn_128x64_stridedB_splitK_small_nn_v1",
    ),
    rule.convolution(  # cuDNN's tables of offsets, scaled outputs and layouts.
        IN + r"(?:compute\w*OffsetsKernel|scalePackedTensor|nchwToNhwc|nhwcToNchw|nchwAddPadding|nhwcAddPadding)",
        "cask_cudnn::computeOffsetsKernel",
    ),
    rule.convolution(  # cuDNN's convolutions by Fourier transform; cuFFT has other names.
        FN + r"(?:fft[12]d_(?:r2c|c2r)_\d+|flip_filter|pointwise_mult_and_sum_complex)|" + IN + r"gcgemm",
        "void fft2d_r2c_32x32<float, false, 1u, true>",
    ),
    rule.convolution(
        IN
        + r"(?:igemm_(?:fwd|bwd|wrw)_gtc|grouped_conv|conv_(?:fwd|bwd)|gemm_xdlops_bwd_weight|[aA]smConv|naive_conv)",
        "igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1_bt256x128x16_wt32x32x8_ws2x1_wr2x2_ta1x4x1x4_1x4x1x64_tb1x4x1x2_1x4x1x64_gkgs",
    ),
    rule.convolution(  # MIOpen's transforms before and after a convolution.
        FN + r"(?:Im\dd2Col|Col2Im\dd|SubTensorOpWith|batched_transpose_\d+x|transpose_(?:CNHW2NCHW|NCHW2CNHW))",
        "batched_transpose_64x16_pack_4x1_ediv_2x1_half",
    ),
)

_MATMUL_RULES = (
    rule.matmul(FN + r"nvjet_", "nvjet_sm90_tst_128x160_64x5_2x4_h_bz_NTT", _OF_CONVOLUTION),
    rule.matmul(
        IN + r"(?i:split_?k_?reduce|execute_split_k)|" + FN + r"epilogue::impl::globalKernel",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, true, false>",
        _OF_CONVOLUTION,
    ),
    rule.matmul(  # fbgemm is a library, not a GEMM.
        IN + r"(?i:(?<!fb)gemm|gemv|trmv|addmm|sddmm|csrm[mv]|matmul|mul_mat|marlin|machete|Cijk_)",
        "volta_sgemm_64x64_nt",
        _OF_CONVOLUTION,
    ),
    rule.matmul(
        IN + r"(?:Kernel2?|device_kernel)<.*(?i:(?<!fb)gemm)",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>",
        _OF_CONVOLUTION,
    ),
    rule.matmul(
        FN + r"(?:dot_kernel|reduce_1Block_kernel)<.*[cC]ublas|" + FN + r"cublas",
        "void reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<float> >",
    ),
    rule.matmul(FN + r"(?:fused_moe_kernel|_?\w*_mm_kernel|_grouped_mm)", "fused_moe_kernel"),
    rule.matmul(  # TensorRT-LLM's, by the types of output and inputs.
        r"^bmm_(?:Mx)?(?:E\dm\d|Bfloat16|Fp16|Fp32)_",
        "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN_transOut_schedP2x1x2",
    ),
)

_DATA_RULES = (
    rule.sort_scan(
        IN + r"(?i:(?<!ten)sort|Device\w*(?:Scan|Select|Unique|RunLength|Partition|Histo|Compact|ReduceByKey)|topk"
        r"|kernel_scan|write_indices|bucketize|searchsorted|gather(?:KthValue|Median)|compute_mode|inclusive_?\w*scan"
        r"|\bnms_|keep_from_mask|cupy_(?:scan|bsum))",
        "void at::native::radixSortKVInPlace<2, -1, 32, 4, float, long, unsigned int>",
    ),
    rule.sort_scan(
        IN
        + r"(?:lookback_scan|onesweep_|trampoline_kernel<.*(?:scan|sort|partition|select|unique|histogram))|"
        + FN
        + r"rocprim::(?:\w+::)*partition",
        "void rocprim::ROCPRIM_400001_NS::detail::init_lookback_scan_state_kernel<rocprim::ROCPRIM_400001_NS::"
        "detail::lookback_scan_state<long, false, true> >",
    ),
    # Which expert takes which token: a top-k, counted and summed up.
    rule.sort_scan(IN + r"(?:[rR]outing(?!\w*memset)|_sum_bitmatrix_rows)", "_sum_bitmatrix_rows"),
    rule.sort_scan(
        FN + r"thrust::.*(?:__(?:unique|merge_sort|scan|copy_if|partition))",
        "void thrust::cuda_cub::core::_kernel_agent<thrust::cuda_cub::__scan::ScanAgent<int*, int*, "
        "thrust::plus<int>, int, int, thrust::detail::integral_constant<bool, bool=0>>>()",
    ),
    rule.reduction(
        IN + r"Device(?:Segmented)?Reduce",
        "void at_cuda_detail::cub::detail::reduce::DeviceReduceSingleTileKernel<at_cuda_detail::cub::detail::reduce::"
        "policy_hub<int, unsigned long long, cuda::std::__4::plus<void> >::Policy1000, int*, int*, int, cuda::std::__"
        "4::plus<void>, int, int, cuda::std::__4::__identity>()",
        ("sort/scan",),
    ),
    rule.reduction(
        IN + r"(?i:cross_?entropy|nll_?(?:loss|criterion)|reduce|reduction|argmax|argmin|_pool(?!ed)|vector_norm|qparam"
        r"|ctc_loss|margin_?loss|[cp]dist_|coalesceValues|roi_align|roi_pool|cupy_(?:sum|mean|any|all|prod|[an]?max|[an]?min))|"
        + FN
        + r"moe::(?:\w+::)*finalize",
        "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::MaxOps<"
        "float>, unsigned int, float, (int)4, (int)4>>(T3)",
    ),
    rule.memset_memcpy(
        IN + r"(?:RepeatBuffer|[Mm]emset|[Rr]edzone|__amd_rocclr_(?:fill|copy)Buffer)",
        "stream_executor::gpu::RepeatBufferKernelImpl",
    ),
    rule.copy_layout(
        IN + r"(?:tensorTransformGeneric|genericTranspose|transpose_readWrite|convertTensor)",
        "void cudnn::ops::convertTensor_kernel<float, float, float, (cudnnKernelDataType_t)2>",
        _OF_CONVOLUTION,
    ),
    rule.copy_layout(
        IN + r"(?i:copy|CatArray|chunk_cat|gather|scatter|index_?(?:select|func|ing|put|add)|transpose)",
        "void at::native::vectorized_gather_kernel<(int)16, long>",
    ),
    rule.copy_layout(
        IN + r"(?i:permut|reshape_and_cache|store_kv_?cache|kv_indices|to_dense|_pad\d?d?|roll_|flip_|unpool"
        r"|convert_indices|CooToCsr|lacpy|compressSparse|MetaDataReorder|matrix_to_|cupy_(?:take|getitem))",
        "void fbgemm_gpu::permute_2D_lengths_kernel<int>",
    ),
    rule.elementwise(
        IN + r"(?i:silu|swiglu|geglu|gelu|relu|sigmoid|tanh|d?act_(?:and|kernel)|activation|quant|cast_)",
        "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &(silu(float const&))>",
    ),
    rule.elementwise(
        IN + r"(?i:_(?:add|mul|sub|div|bias|residual)_|axpy|scal_kernel|clamp|unary_kernel|bounds_check|offsets_range"
        r"|rowwise_to_float|token_ids|position_kernel|detail::(?:transform::)?transform_kernel|for_each::static_kernel"
        r"|scalar_multiply|^cupy_)",
        "transformer_engine::unary_kernel<identity bf16>",
    ),
)

LIBRARY_RULES: tuple[Rule, ...] = (
    _COMMUNICATION_RULES
    + _ATEN_ELEMENTWISE_RULES
    + _NAMED_RULES
    + _ATTENTION_RULES
    + _CONVOLUTION_RULES
    + _MATMUL_RULES
    + _DATA_RULES
)
