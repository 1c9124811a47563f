"""Names of kernels as profilers write them: whole, short, family."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.base.torch_compat import demangle
from piecegraph.provenance.names import family, short

FILE = Path(__file__).parents[1] / "cases" / "kernel_names.txt"


def read_cases() -> list[tuple[str, str, str]]:
    cases = []
    for block in FILE.read_text().split("\n\n")[1:]:
        whole, short_name, family_name = block.strip().split("\n")
        short_name = whole if short_name == "=" else short_name
        cases.append((whole, short_name, short_name if family_name == "=" else family_name))
    return cases


@pytest.mark.parametrize(("whole", "short_name", "family_name"), read_cases())
def test_short_and_family(whole: str, short_name: str, family_name: str) -> None:
    assert (short(whole), family(whole)) == (short_name, family_name)


@pytest.mark.parametrize(("whole", "short_name", "_family_name"), read_cases())
def test_a_short_name_is_its_own_short_name(whole: str, short_name: str, _family_name: str) -> None:
    assert short(short_name) == short_name
    assert family(family(whole)) == family(whole)


ADD = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"
COPY = (
    "_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastIZZZNS0_23direct_copy_kernel_cudaERNS_18"
    "TensorIteratorBaseEENKUlvE0_clEvENKUlvE5_clEvEUlfE_EEvS4_RKT_EUliE_EEviT1_"
)
MANGLED = {
    ADD: "vectorized_elementwise_kernel[CUDAFunctor_add]",
    COPY: "elementwise_kernel[direct_copy_kernel_cuda]",
    "_ZN5aiter37bf16gemm_fp32bf16_tn_32x64_pf3_splitkE.kd": "aiter::bf16gemm_fp32bf16_tn_32x64_pf3_splitk",
    "_ZN12_GLOBAL__N_14copyEv": "copy",
    # The type of its argument is younger than many demanglers: the name is read as far as it is spelled out.
    "_ZN5flash6reduceIDF16bEEvT_": "flash::reduce",
    "_Z4copyIDF16bEvT_": "copy",
    "_Zbroken": "_Zbroken",
}


@pytest.mark.parametrize(("mangled", "expected"), list(MANGLED.items()))
def test_mangled_names(mangled: str, expected: str) -> None:
    assert short(demangle(mangled)) == expected


@given(st.text(alphabet="<>(){}[],:-_aZ0 ", max_size=60))
def test_any_text_has_a_name(text: str) -> None:
    assert bool(short(text)) == bool(text)
    assert bool(family(text)) == bool(text)
