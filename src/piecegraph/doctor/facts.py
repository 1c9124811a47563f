"""What fits what: tables of facts, each with its source. Beyond a table's end the checks say so and do not guess.

Where the machine itself knows better (a toolkit's own header, a package's own requirements), the checks ask that first.
"""

from __future__ import annotations

UNKNOWN = "unknown to this version of piecegraph"

# pyproject.toml, ``requires-python`` and ``dependencies``; a test holds them together.
PYTHON = ((3, 11), (3, 13))
TORCH = ((2, 11), (2, 14))
"""First supported version, first unsupported version."""

# https://github.com/pytorch/vision (README, "Installation")
TORCHVISION = {"2.8": "0.23", "2.9": "0.24", "2.10": "0.25", "2.11": "0.26", "2.12": "0.27", "2.13": "0.28"}

# https://docs.pytorch.org/audio/2.11.0/installation.html: one release for each torch until 2.10; torchaudio 2.11 is
# built on torch's stable ABI and serves torch 2.11 and every later one.
TORCHAUDIO = {"2.8": "2.8", "2.9": "2.9", "2.10": "2.10", "2.11": "2.11", "2.12": "2.11", "2.13": "2.11"}

# .ci/docker/triton_version.txt on pytorch's release branches; https://github.com/pytorch/pytorch/pull/174896 (2.12),
# https://github.com/intel/intel-xpu-backend-for-triton/issues/7363 (2.13)
TRITON = {"2.8": "3.4", "2.9": "3.5", "2.10": "3.6", "2.11": "3.6", "2.12": "3.7", "2.13": "3.7"}

# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, and the toolkit's release notes
# for the full numbers. Within a major version a newer toolkit runs on an older driver, with fewer features.
MINIMUM_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}

# https://github.com/pytorch/pytorch/blob/main/RELEASE.md ("PyTorch CUDA Support Matrix"), torch 2.11 to 2.13
BUILT_MAJORS = (12, 13)
"""Major versions of CUDA that wheels of the supported torch versions are built for."""

# https://docs.nvidia.com/cuda/archive/ (installation guide, "Host Compiler Support Policy"); the check is on the major
# version. 12.3 and 12.4: https://github.com/rigaya/NVEnc/issues/533, 12.6: conda-forge-pinning-feedstock#6736,
# 13.4: https://github.com/cms-sw/cmsdist/pull/10844. 13.0 was read from its own header.
HIGHEST_GCC = {
    "11.8": 11,
    "12.0": 12,
    "12.1": 12,
    "12.2": 12,
    "12.3": 12,
    "12.4": 13,
    "12.5": 13,
    "12.6": 13,
    "12.8": 14,
    "12.9": 14,
    "13.0": 15,
    "13.1": 15,
    "13.2": 15,
    "13.3": 15,
    "13.4": 16,
}

# https://docs.nvidia.com/cuda/cuda-features-archive/ and the "What's new" of each release's notes
FIRST_TOOLKIT = {
    70: "9.0",
    75: "10.0",
    80: "11.0",
    86: "11.1",
    87: "11.4",
    89: "11.8",
    90: "11.8",
    100: "12.8",
    103: "12.9",
    110: "13.0",
    120: "12.8",
    121: "12.9",
}

# CUDA 13 dropped Maxwell, Pascal and Volta (its release notes; ``nvcc --list-gpu-arch`` of 13.0 begins at 75).
LOWEST_ARCHITECTURE = {13: 75}

# Hopper compiles from 11.8 on, but what is built for it asks for more: FlashAttention 3 wants 12.3
# (https://github.com/Dao-AILab/flash-attention, "FlashAttention-3"), and H200 machines are set up from 12.4 on.
PRACTICAL_TOOLKIT = {90: "12.4"}

# Inductor's GPU code is Triton's, which starts at Volta (torch/_inductor: "too old to be supported by the triton GPU
# compiler").
LOWEST_TRITON_ARCHITECTURE = 70

# https://github.com/flashinfer-ai/flashinfer/issues/1511 and pull/1160: the distribution for each CUDA major version.
NVSHMEM = {12: "nvidia-nvshmem-cu12", 13: "nvidia-nvshmem-cu13"}

# https://docs.docker.com/engine/containers/run/ (``--shm-size``)
DOCKER_SHM_BYTES = 64 * 2**20
ENOUGH_SHM_BYTES = 2**30

# Compiling a model runs one process for each core, about half a GiB each; weights pass through host memory.
ENOUGH_MEMORY_BYTES = 8 * 2**30
ENOUGH_OPEN_FILES = 1024

# Caches of one compiled model are some hundred MiB; a download is the size of the model.
TIGHT_DISK_BYTES = 10 * 2**30
FULL_DISK_BYTES = 2**30

RUST_PACKAGES = ("outlines-core", "safetensors", "tiktoken", "tokenizers")
"""Packages with a Rust part: without a wheel for this Python, pip builds them
(https://github.com/dottxt-ai/outlines/issues/1259, https://github.com/huggingface/tokenizers/issues/1393)."""
