"""Faked machines for the doctor: an H200 on which all is well, a laptop without a GPU, and one where much is broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from piecegraph.doctor.machine import Bindings, Folder, Gpu, InstalledProgram, Machine, Toolkit, Torch

H200_GPU = Gpu(
    name="NVIDIA H200",
    architecture=90,
    memory_bytes=143771 * 2**20,
    persistence=True,
    clock_mhz=1980,
    max_clock_mhz=1980,
    compute_mode="Default",
)
GCC = InstalledProgram(path="/usr/bin/gcc", version="13.3.0", family="gcc")
INDUCTOR = Folder(
    what="Inductor cache",
    path="/tmp/torchinductor_me",
    variable="TORCHINDUCTOR_CACHE_DIR",
    free_bytes=500 * 2**30,
)
HUGGING_FACE = Folder(
    what="Hugging Face", path="/home/me/.cache/huggingface", variable="HF_HOME", free_bytes=200 * 2**30
)

H200 = Machine(
    python="3.12.11",
    packages={
        "torch": "2.11.0+cu130",
        "triton": "3.6.0",
        "cuda-bindings": "13.0.3",
        "torchvision": "0.26.0+cu130",
        "torchaudio": "2.11.0+cu130",
        "flashinfer-python": "0.6.3",
        "nvidia-nvshmem-cu13": "3.4.5",
    },
    pins={"torch>triton": "3.6.0", "torchvision>torch": "2.11.0"},
    torch=Torch(
        state="ok",
        version="2.11.0+cu130",
        location="/home/me/.venv/lib/python3.12/site-packages/torch",
        cuda="13.0",
        cxx11_abi=True,
        architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
        can_use_cuda=True,
    ),
    cuda_bindings=Bindings(state="ok"),
    driver="580.159.04",
    driver_cuda="13.0",
    gpus=(H200_GPU,) * 8,
    toolkit=Toolkit(
        nvcc=InstalledProgram(path="/usr/local/cuda/bin/nvcc", version="13.0"),
        architectures=(75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121),
        host_compiler=GCC,
        highest_gcc=15,
    ),
    c_compiler=GCC,
    cxx_compiler=InstalledProgram(path="/usr/bin/g++", version="13.3.0", family="gcc"),
    older_gccs={"12": "/usr/bin/gcc-12"},
    triton_ptxas=InstalledProgram(path="/site-packages/triton/backends/nvidia/bin/ptxas", version="12.8"),
    rustc=InstalledProgram(path="/usr/bin/rustc", version="1.90.0"),
    shm_bytes=64 * 2**30,
    memory_bytes=2048 * 2**30,
    open_files=65536,
    folders=(INDUCTOR, HUGGING_FACE),
    variables={"HF_HOME": "/home/me/.cache/huggingface"},
    scripts_folder="/home/me/.venv/bin",
)

CPU = replace(
    H200,
    packages={"torch": "2.13.0+cpu"},
    pins={},
    torch=Torch(state="ok", version="2.13.0+cpu", location="/site-packages/torch", cxx11_abi=True),
    cuda_bindings=Bindings(state="missing", error="ModuleNotFoundError: No module named 'cuda'"),
    driver="",
    driver_cuda="",
    gpus=(),
    gpu_trouble="nvidia-smi is not installed",
    toolkit=None,
    triton_ptxas=None,
    rustc=None,
    variables={},
)

BROKEN = replace(
    H200,
    python="3.13.1",
    has_python_headers=False,
    packages={
        "torch": "2.8.0a0+gitba56102",
        "torchvision": "0.26.0",
        "flashinfer-python": "0.2.11",
        "cuda-bindings": "13.0.3",
        "triton": "3.4.0",
    },
    pins={"torchvision>torch": "2.11.0"},
    torch=Torch(
        state="ok",
        version="2.8.0a0+gitba56102",
        location="/home/me/rebuild/pytorch/torch",
        is_checkout=True,
        cuda="12.9",
        cuda_error="The NVIDIA driver on your system is too old (found version 11080).",
    ),
    cuda_bindings=Bindings(state="failed", error="ImportError: libcuda.so.1: [Errno 2] no such file"),
    driver="520.61.05",
    driver_cuda="11.8",
    gpus=(replace(H200_GPU, persistence=False, clock_mhz=345),) * 2,
    toolkit=Toolkit(nvcc=InstalledProgram(path="/usr/local/cuda-12.1/bin/nvcc", version="12.1"), host_compiler=GCC),
    c_compiler=None,
    rustc=None,
    shm_bytes=64 * 2**20,
    memory_bytes=4 * 2**30,
    open_files=256,
    folders=(replace(INDUCTOR, is_writable=False), replace(HUGGING_FACE, free_bytes=300 * 2**20)),
    variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "LD_LIBRARY_PATH": "/usr/local/cuda/lib64/stubs"},
)


def with_torch(machine: Machine, **changed: Any) -> Machine:
    """The same machine with another torch."""
    return replace(machine, torch=replace(machine.torch, **changed))


def with_packages(machine: Machine, **changed: str) -> Machine:
    """The same machine with other packages (``_`` for ``-``); an empty version takes one away. Pins are dropped."""
    packages = dict(machine.packages) | {name.replace("_", "-"): version for name, version in changed.items()}
    return replace(machine, packages={name: version for name, version in packages.items() if version}, pins={})


def with_gpu(machine: Machine, **changed: Any) -> Machine:
    """The same machine with one GPU of another kind."""
    return replace(machine, gpus=(replace(H200_GPU, **changed),))


def with_toolkit(machine: Machine, version: str, *, gcc: str = "12.2.0", **changed: Any) -> Machine:
    """The same machine with another nvcc, which tells nothing but its version, and another gcc for it."""
    found = Toolkit(
        nvcc=InstalledProgram(path="/usr/local/cuda/bin/nvcc", version=version),
        host_compiler=replace(GCC, version=gcc),
        **changed,
    )
    return replace(machine, toolkit=found)


def with_folder(machine: Machine, **changed: Any) -> Machine:
    """The same machine with another Inductor cache."""
    return replace(machine, folders=(replace(INDUCTOR, **changed), HUGGING_FACE))
