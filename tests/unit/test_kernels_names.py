"""Names of kernels as profilers write them: whole, short, family."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.kernels.names import demangle, family, short

NATIVE = "at::native::"
COPY = f"{NATIVE}direct_copy_kernel_cuda(at::TensorIteratorBase&)"
COPIES = f"{COPY}::{{lambda()#3}}::operator()() const::{{lambda()#12}}::operator()() const::{{lambda(c10::BFloat16)#1}}"
FLASH = (
    "flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, 128, "
    "cutlass::bfloat16_t, float, cutlass::arch::Sm90, true, false>, flash::CollectiveEpilogueFwd<cute::C<128> > >"
)
SCAN = "cub::policy_hub<long, long, long, unsigned int, std::plus<long> >::Policy900, long const*, long*"

# (whole, short, family); "=" stands for the one before it.
CASES = [
    ("nvjet_sm90_tst_64x16_64x16_2x1_v_bz_splitK_TNT", "=", "nvjet_sm90_tst_splitK"),
    ("nvjet_tst_256x160_64x4_1x2_h_bz_coopA_TNT", "=", "nvjet_tst"),
    ("nvjet_sm100_tst_32x64_64x16_4x1_v_bz_splitK_bias_TNN", "=", "nvjet_sm100_tst_splitK_bias"),
    ("nvjet_sm100_tst_128x256_64x6_2x1_2cta_v_bz_TNT", "=", "nvjet_sm100_tst_2cta"),
    ("nvjet_sm121_tst_mma_128x128x64_3_64x32x64_tmaAB_splitK_TNNN", "=", "nvjet_sm121_tst_mma_splitK"),
    (
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false, false>"
        "(cublasLt::cublasSplitKParams<float>, float const*, __nv_bfloat16 const*, __nv_bfloat16*, int*)",
        "cublasLt::splitKreduce_kernel",
        "=",
    ),
    (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "=",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32",
    ),
    (
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16_execute_split_k_kernel__5x_cublas",
        "=",
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_splitK",
    ),
    ("ampere_sgemm_128x32_sliced1x4_tn", "=", "ampere_sgemm"),
    ("ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_tn", "=", "ampere_bf16_s16816gemm_bf16"),
    (
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>"
        "(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8::Params)",
        "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8",
        "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16",
    ),
    (
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(T1::Params)",
        "cutlass_80_simt_sgemm_128x256_8x4_nt_align1",
        "cutlass_80_simt_sgemm",
    ),
    (
        "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_bf16_bf16_128x128x64_1x1x1_0_tnn_align8_warpspecialized",
        "=",
        "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_bf16_bf16",
    ),
    (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "=",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16",
    ),
    (
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_CMS_SN_LDSB1",
        "=",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs",
    ),
    ("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 6, 7, false>(cublasGemmParams<float>)", "gemmSN_TN_kernel", "="),
    (
        f"void cutlass::device_kernel<flash::enable_sm90_or_later<{FLASH} > >({FLASH}::Params)",
        "flash::FlashAttnFwdSm90",
        "=",
    ),
    (f"void cutlass::device_kernel<{FLASH} >({FLASH}::Params)", "flash::FlashAttnFwdSm90", "="),
    (
        "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>, cute::C<128> >, 4, 256, 1, true>"
        " >(flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>, cute::C<128> >, 4, 256, 1, true>::Params)",
        "flash::FlashAttnFwdCombine",
        "=",
    ),
    (
        "flash::prepare_varlen_num_blocks_kernel(int, int, int const*, cutlass::FastDivmod, int*, bool)",
        "flash::prepare_varlen_num_blocks_kernel",
        "=",
    ),
    (
        "void pytorch_flash::flash_fwd_splitkv_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 64, 128, 4, false, "
        "cutlass::bfloat16_t>, true, false>(pytorch_flash::Flash_fwd_params)",
        "pytorch_flash::flash_fwd_splitkv_kernel",
        "=",
    ),
    (
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
        "fmha_cutlassF_bf16_aligned",
    ),
    (
        f"void cub::CUB_200200_800_900_NS::DeviceScanKernel<{SCAN}>(long const*, long*, int)",
        "cub::DeviceScanKernel",
        "=",
    ),
    (
        f"void at_cuda_detail::cub::detail::scan::DeviceScanInitKernel<at_cuda_detail::{SCAN}>(long, int)",
        "cub::DeviceScanInitKernel",
        "=",
    ),
    (
        f"void {NATIVE}vectorized_elementwise_kernel<4, {NATIVE}CUDAFunctor_add<float>, std::array<char*, 3ul> >"
        f"(int, {NATIVE}CUDAFunctor_add<float>, std::array<char*, 3ul>)",
        "vectorized_elementwise_kernel[CUDAFunctor_add]",
        "=",
    ),
    (
        f"void {NATIVE}vectorized_elementwise_kernel<(int)4, {NATIVE}FillFunctor<int>, std::array<char *, (unsigned long)1>>"
        "(int, T2, T3)",
        "vectorized_elementwise_kernel[FillFunctor]",
        "=",
    ),
    (
        f"void {NATIVE}elementwise_kernel<128, 4, {NATIVE}gpu_kernel_impl<{NATIVE}BinaryFunctor<float, float, float, "
        f"{NATIVE}binary_internal::MulFunctor<float> > >(at::TensorIteratorBase&, {NATIVE}BinaryFunctor<float, float, "
        f"float, {NATIVE}binary_internal::MulFunctor<float> > const&)::{{lambda(int)#1}}>(int, int)",
        "elementwise_kernel[MulFunctor]",
        "=",
    ),
    (
        f"void {NATIVE}elementwise_kernel<128, 4, {NATIVE}gpu_kernel_impl_nocast<{COPIES}>(at::TensorIteratorBase&, {COPIES}"
        f" const&)::{{lambda(int)#1}}>(int, {NATIVE}gpu_kernel_impl_nocast<{COPIES}>)",
        "elementwise_kernel[direct_copy_kernel_cuda]",
        "=",
    ),
    (
        f"void {NATIVE}vectorized_elementwise_kernel<(int)4, {NATIVE}<unnamed>::where_kernel_impl(at::TensorIterator &)::"
        "[lambda() (instance 1)]::operator ()() const::[lambda(bool, float) (instance 1)], std::array<char *, 4>>(int)",
        "vectorized_elementwise_kernel[where_kernel_impl]",
        "=",
    ),
    (
        f"void {NATIVE}index_elementwise_kernel<128, 4, {NATIVE}gpu_index_kernel<{NATIVE}index_kernel_impl<"
        f"{NATIVE}OpaqueType<4> >(at::TensorIteratorBase&, c10::ArrayRef<long>)::{{lambda(char*, char const*, long)#1}}>"
        "(at::TensorIteratorBase&, bool)::{lambda(int)#1}>(long)",
        "index_elementwise_kernel[index_kernel_impl]",
        "=",
    ),
    (
        f"void {NATIVE}reduce_kernel<512, 1, {NATIVE}ReduceOp<float, {NATIVE}func_wrapper_t<float, {NATIVE}sum_functor<float,"
        " float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4, 4> >(int)"
        " [clone .kd]",
        "reduce_kernel[sum_functor]",
        "=",
    ),
    (
        f"void {NATIVE}reduce_kernel<512, 1, {NATIVE}ReduceOp<float, {NATIVE}MeanOps<float, float, float, float>, unsigned"
        " int, float, 4, 4> >(int)",
        "reduce_kernel[MeanOps]",
        "=",
    ),
    (
        f"void {NATIVE}(anonymous namespace)::multi_tensor_apply_kernel<{NATIVE}(anonymous namespace)::TensorListMetadata<2>,"
        f" {NATIVE}(anonymous namespace)::CopyFunctor<float, float, 2, 1, 1>, {NATIVE}Copy<float, float> >(int)",
        "multi_tensor_apply_kernel[CopyFunctor]",
        "=",
    ),
    ("void mine::scaled_elementwise<float, mine::Swish<2> >(float*)", "scaled_elementwise[Swish]", "="),
    (
        f"void {NATIVE}(anonymous namespace)::CatArrayBatchedCopy_vectorized<{NATIVE}(anonymous namespace)::OpaqueType<2u>,"
        " unsigned int, 2, 128, 1, 16, 8>(char*)",
        "CatArrayBatchedCopy_vectorized",
        "=",
    ),
    (
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 5, false, false>(float*)",
        "softmax_warp_forward",
        "=",
    ),
    (
        "std::enable_if<T2>(int)0&&vllm::_typeConvert<T1>::exists, void>::type vllm::fused_add_rms_norm_kernel<c10::Half, "
        "(int)8>(T1 *)",
        "vllm::fused_add_rms_norm_kernel",
        "=",
    ),
    (
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>(c10::BFloat16*, int)",
        "vllm::act_and_mul_kernel",
        "=",
    ),
    ("void deep<(Mode)1, (a->b > 2), 3>::gemm<(4 < 5)>(int)", "deep::gemm", "="),
    (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "=",
    ),
    ("triton_poi_fused_add_mul_0", "=", "triton_poi_fused_add_mul"),
    ("triton_red_fused__to_copy_mean_3", "=", "triton_red_fused__to_copy_mean"),
    ("triton_per_fused_1.kd", "triton_per_fused_1", "="),
    ("triton_tem_fused_mm_t_0", "=", "triton_tem_fused_mm_t"),
    ("cpp_fused_add_relu_12", "=", "cpp_fused_add_relu"),
    ("_paged_decode_kernel", "=", "="),
    ("matmul_ogs_NNT_bf16xbf16_16x128x256x1", "=", "="),
    ("triton_flash_decode_64", "=", "="),
    ("Memset (Device)", "=", "Memset"),
    ("Memcpy HtoD (Pageable -> Device)", "=", "Memcpy HtoD"),
    ("", "=", "="),
]


def spelled_out(case: tuple[str, str, str]) -> tuple[str, str, str]:
    whole, short_name, family_name = case
    short_name = whole if short_name == "=" else short_name
    return whole, short_name, short_name if family_name == "=" else family_name


@pytest.mark.parametrize(("whole", "short_name", "family_name"), [spelled_out(case) for case in CASES])
def test_short_and_family(whole: str, short_name: str, family_name: str) -> None:
    assert (short(whole), family(whole)) == (short_name, family_name)


@pytest.mark.parametrize(("whole", "short_name", "_family_name"), [spelled_out(case) for case in CASES])
def test_a_short_name_is_its_own_short_name(whole: str, short_name: str, _family_name: str) -> None:
    assert short(short_name) == short_name
    assert family(family(whole)) == family(whole)


MANGLED = {
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_": (
        "vectorized_elementwise_kernel[CUDAFunctor_add]"
    ),
    "_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastIZZZNS0_23direct_copy_kernel_cudaERNS_18Tens"
    "orIteratorBaseEENKUlvE0_clEvENKUlvE5_clEvEUlfE_EEvS4_RKT_EUliE_EEviT1_": "elementwise_kernel[direct_copy_kernel_cuda]",
    "_ZN5aiter37bf16gemm_fp32bf16_tn_32x64_pf3_splitkE.kd": "aiter::bf16gemm_fp32bf16_tn_32x64_pf3_splitk",
    "_ZN12_GLOBAL__N_14copyEv": "copy",
    # The type of its argument is younger than many demanglers: the name is read as far as it is spelled out.
    "_ZN5flash6reduceIDF16bEEvT_": "flash::reduce",
    "_Z4copyIDF16bEvT_": "copy",
    "_Zbroken": "_Zbroken",
}


@pytest.mark.parametrize(("mangled", "expected"), list(MANGLED.items()))
def test_mangled_names(mangled: str, expected: str) -> None:
    assert short(demangle([mangled])[mangled]) == expected


def test_names_that_are_not_mangled_need_no_torch() -> None:
    code = "import sys; from piecegraph.kernels.names import demangle; demangle(['a', 'b(int)']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@given(st.text(alphabet="<>(){}[],:-_aZ0 ", max_size=60))
def test_any_text_has_a_name(text: str) -> None:
    assert bool(short(text)) == bool(text)
    assert bool(family(text)) == bool(text)
