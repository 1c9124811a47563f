"""Every rule of the doctor, against faked machines, for every outcome."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from piecegraph.doctor import check_compilers, check_gpu, check_packages, check_system, facts
from piecegraph.doctor.checks import CHECKS, examine
from piecegraph.doctor.finding import Finding, counts, joined
from piecegraph.doctor.machine import MODELS, Bindings, InstalledProgram, Machine, Torch
from tests.cases.machines import (
    BROKEN,
    CPU,
    GCC,
    H200,
    H200_GPU,
    with_folder,
    with_gpu,
    with_packages,
    with_toolkit,
    with_torch,
)

Check = Callable[[Machine], Finding]

NO_TORCH = replace(CPU, packages={}, torch=Torch(state="missing", error="No module named 'torch'"))
CRASHING = replace(CPU, torch=Torch(state="crashed", error="died of SIGABRT"))
HANGING = replace(CPU, torch=Torch(state="timed out", error="did not end within 120 s"))
OWN_TORCH = with_torch(CPU, version="2.11.0a0+gitba56102", location="/src/pytorch/torch", is_checkout=True)
NO_TRITON = with_packages(H200, triton="")
ONE_GPU = with_gpu(H200)
HIDDEN = replace(with_torch(H200, can_use_cuda=False), variables={"CUDA_VISIBLE_DEVICES": "-1"})

# check, machine, state, what the row says
CASES: list[tuple[Check, Machine, str, str]] = [
    (check_system.system, H200, "ok", "Linux"),
    (check_system.system, replace(H200, system="Windows"), "warn", "Windows: unknown to this version"),
    (check_packages.python, H200, "ok", "Python 3.12.11"),
    (check_packages.python, replace(H200, python="3.11.0"), "ok", ""),
    (check_packages.python, replace(H200, python="3.10.14"), "broken", "cannot be installed"),
    (check_packages.python, replace(H200, python="3.13.1"), "broken", "missing Rust compiler"),
    (check_packages.python, replace(H200, is_free_threaded=True), "broken", "free-threaded"),
    (check_packages.torch, H200, "ok", "torch 2.11.0+cu130"),
    (check_packages.torch, NO_TORCH, "broken", "not installed"),
    (check_packages.torch, CRASHING, "broken", "torch 2.13.0+cpu: import crashed: died of SIGABRT"),
    (check_packages.torch, HANGING, "broken", "import timed out: did not end within 120 s"),
    (check_packages.torch, with_torch(with_packages(H200, torch="2.10.0"), version="2.10.0"), "broken", "2.11,<2.14"),
    (
        check_packages.torch,
        with_torch(with_packages(H200, torch="2.14.0"), version="2.14.0"),
        "warn",
        "unknown to this",
    ),
    (check_packages.torch, with_packages(H200, torch="2.13.0"), "warn", "but 2.13.0 is installed"),
    (check_packages.torch, with_torch(H200, cxx11_abi=False), "warn", "undefined symbol"),
    (check_packages.torch, with_packages(OWN_TORCH, torch=""), "ok", "built in /src/pytorch/torch"),
    (check_gpu.gpu, H200, "ok", "8 x NVIDIA H200, sm_90, 140 GiB"),
    (check_gpu.gpu, ONE_GPU, "ok", "NVIDIA H200, sm_90"),
    (check_gpu.gpu, CPU, "not applicable", "no GPU: nvidia-smi is not installed"),
    (check_gpu.gpu, replace(CPU, driver="580.95.05", gpu_trouble="nvidia-smi failed"), "broken", "is loaded, but"),
    (check_gpu.gpu, with_gpu(H200, compute_mode="Prohibited"), "broken", "nvidia-smi -c DEFAULT"),
    (check_gpu.gpu, with_gpu(H200, compute_mode="Exclusive_Process"), "warn", "second process"),
    (check_gpu.cuda_build, H200, "ok", "CUDA 13.0"),
    (check_gpu.cuda_build, CPU, "not applicable", "CUDA none"),
    (check_gpu.cuda_build, CRASHING, "not applicable", "cannot be imported"),
    (check_gpu.cuda_build, HIDDEN, "not applicable", "CUDA_VISIBLE_DEVICES='-1' hides every GPU"),
    (check_gpu.cuda_build, with_torch(H200, cuda="", version="2.11.0+cpu"), "broken", "GPU is not used at all"),
    (check_gpu.cuda_build, with_torch(H200, can_use_cuda=False, cuda_error="no driver"), "broken", "no driver"),
    (check_gpu.cuda_build, with_torch(H200, cuda="", hip="7.2"), "warn", "unknown to this version"),
    (check_gpu.driver, H200, "ok", "driver 580.159.04, up to CUDA 13.0"),
    (check_gpu.driver, CPU, "not applicable", "no GPU"),
    (check_gpu.driver, with_torch(H200, cuda=""), "not applicable", "driver 580.159.04"),
    (check_gpu.driver, replace(H200, driver="580.65.06"), "ok", ""),
    (check_gpu.driver, replace(H200, driver="580.65.05"), "broken", "580.65.06 or later, or a torch built for CUDA 12"),
    (check_gpu.driver, replace(with_torch(H200, cuda="12.9"), driver="525.60.13", driver_cuda="12.0"), "warn", "PTX"),
    (check_gpu.driver, replace(with_torch(H200, cuda="12.9"), driver="525.60.12"), "broken", "525.60.13"),
    (check_gpu.driver, with_torch(H200, cuda="12.6"), "ok", "torch is built for CUDA 12.6"),
    (check_gpu.driver, with_torch(H200, cuda="14.0"), "warn", "unknown to this version"),
    (check_gpu.driver, replace(H200, driver=""), "warn", "driver unknown"),
    (check_gpu.architecture, H200, "ok", "sm_90; torch has sm_75"),
    (check_gpu.architecture, CPU, "not applicable", "no GPU"),
    (check_gpu.architecture, with_torch(H200, architectures=()), "not applicable", "only where it can use a GPU"),
    (check_gpu.architecture, with_torch(H200, architectures=("sm_80", "sm_86")), "broken", "no kernel image"),
    (check_gpu.architecture, with_torch(H200, architectures=("sm_80", "compute_80")), "ok", ""),
    (check_gpu.architecture, with_torch(H200, architectures=("sm_100", "compute_100")), "broken", "lists sm_90"),
    (check_gpu.architecture, with_torch(H200, architectures=("sm_90a",)), "ok", ""),
    (check_gpu.architecture, with_torch(with_gpu(H200, architecture=86), architectures=("sm_80",)), "ok", ""),
    (check_gpu.architecture, with_torch(with_gpu(H200, architecture=103), architectures=("sm_100a",)), "broken", ""),
    (check_gpu.architecture, with_gpu(H200, architecture=61), "broken", "Inductor refuses"),
    (check_gpu.architecture, with_gpu(H200, architecture=None), "not applicable", ""),
    (check_gpu.clocks, H200, "ok", "1980 of 1980 MHz now; persistence mode on"),
    (check_gpu.clocks, CPU, "not applicable", ""),
    (check_gpu.clocks, with_gpu(H200, persistence=False), "warn", "sudo nvidia-smi -pm 1"),
    (check_gpu.clocks, with_gpu(H200, persistence=None, max_clock_mhz=None), "ok", "1980 of ? MHz now"),
    (check_compilers.toolkit, H200, "ok", "nvcc 13.0, GPU sm_90"),
    (check_compilers.toolkit, CPU, "not applicable", "no nvcc"),
    (check_compilers.toolkit, with_toolkit(with_torch(H200, cuda="12.4"), "12.4"), "ok", ""),
    (check_compilers.toolkit, with_toolkit(with_torch(H200, cuda="12.4"), "12.3"), "warn", "12.4 or later"),
    (check_compilers.toolkit, with_toolkit(H200, "11.7"), "broken", "Unsupported gpu architecture 'compute_90'"),
    (check_compilers.toolkit, with_toolkit(with_gpu(H200, architecture=70), "13.0"), "broken", "12.9"),
    (check_compilers.toolkit, with_toolkit(with_gpu(H200, architecture=130), "13.0"), "warn", "unknown to this"),
    (check_compilers.toolkit, with_toolkit(H200, "13.0", architectures=(75, 80)), "broken", "Unsupported gpu"),
    (check_compilers.toolkit, with_toolkit(H200, "12.9"), "warn", "CUDA_HOME=/usr/local/cuda-13.0"),
    (check_compilers.toolkit, with_toolkit(H200, ""), "warn", "tells no version"),
    (check_compilers.host_gcc, H200, "ok", "calls gcc 13.3.0 (/usr/bin/gcc), accepts up to 15"),
    (check_compilers.host_gcc, CPU, "not applicable", "no nvcc"),
    (check_compilers.host_gcc, with_toolkit(H200, "12.3", gcc="12.4.0"), "ok", "accepts up to 12"),
    (check_compilers.host_gcc, with_toolkit(H200, "12.3", gcc="13.1.0"), "broken", "later than 12 are not supported"),
    (check_compilers.host_gcc, with_toolkit(H200, "12.4", gcc="13.3.0"), "ok", ""),
    (check_compilers.host_gcc, with_toolkit(H200, "12.4", gcc="13.3.0", highest_gcc=12), "broken", ""),
    (check_compilers.host_gcc, with_toolkit(H200, "14.0"), "warn", "unknown to this version"),
    (check_compilers.host_gcc, with_toolkit(H200, "14.0", highest_gcc=17), "ok", "accepts up to 17"),
    (check_compilers.compilers, H200, "ok", "gcc 13.3.0; g++ 13.3.0"),
    (check_compilers.compilers, replace(H200, c_compiler=None), "broken", "Triton cannot build"),
    (check_compilers.compilers, replace(CPU, cxx_compiler=None), "broken", "no g++"),
    (
        check_compilers.compilers,
        replace(H200, cxx_compiler=InstalledProgram(path="icpx", trouble="is not there, but CXX names it")),
        "broken",
        "icpx is not there, but CXX names it",
    ),
    (check_compilers.python_headers, H200, "ok", "found"),
    (check_compilers.python_headers, replace(H200, has_python_headers=False), "broken", "apt install python3.12-dev"),
    (check_compilers.ptxas, H200, "ok", "ptxas 12.8 (Triton's own)"),
    (check_compilers.ptxas, CPU, "not applicable", ""),
    (check_compilers.ptxas, replace(NO_TRITON, triton_ptxas=None), "not applicable", "Triton is not installed"),
    (check_compilers.ptxas, replace(H200, triton_ptxas=None), "broken", "reinstall triton"),
    (
        check_compilers.ptxas,
        replace(H200, triton_ptxas=None, ptxas=InstalledProgram(path="/opt/bin/ptxas", version="13.0")),
        "broken",
        "export TRITON_PTXAS_PATH=/opt/bin/ptxas",
    ),
    (
        check_compilers.ptxas,
        replace(
            H200,
            triton_ptxas=InstalledProgram(path="/no/ptxas", trouble="is not there"),
            variables={"TRITON_PTXAS_PATH": "/no/ptxas"},
        ),
        "broken",
        "unset TRITON_PTXAS_PATH",
    ),
    (
        check_compilers.ptxas,
        replace(H200, triton_ptxas=InstalledProgram(path="/x/ptxas")),
        "broken",
        "tells no version",
    ),
    (check_compilers.ptxas, with_gpu(H200, architecture=103), "broken", "sm_103 is known from CUDA 12.9 on"),
    (check_packages.triton, H200, "ok", "Triton 3.6.0"),
    (check_packages.triton, CPU, "not applicable", "writes C++"),
    (check_packages.triton, NO_TRITON, "broken", "pip install triton==3.6.*"),
    (check_packages.triton, with_packages(H200, triton="3.5.1"), "broken", "which wants 3.6"),
    (check_packages.triton, with_packages(H200, triton="3.6.9"), "ok", ""),
    (check_packages.triton, replace(with_packages(H200, triton="3.6.9"), pins=H200.pins), "warn", "which wants 3.6.0"),
    (check_packages.triton, with_torch(with_packages(H200), version="2.14.0"), "warn", "unknown to this version"),
    (check_packages.triton, with_packages(H200, triton="", pytorch_triton="3.6.0"), "ok", ""),
    (check_packages.cuda_bindings, H200, "ok", "13.0.3"),
    (check_packages.cuda_bindings, CPU, "not applicable", "not installed"),
    (check_packages.cuda_bindings, replace(H200, cuda_bindings=Bindings(state="missing")), "warn", "bindings==13.*"),
    (
        check_packages.cuda_bindings,
        replace(H200, cuda_bindings=Bindings(state="crashed", error="died of SIGSEGV")),
        "warn",
        "import crashed: died of SIGSEGV",
    ),
    (
        check_packages.cuda_bindings,
        replace(H200, cuda_bindings=Bindings(state="ok", missing=("cudaGraphGetNodes",))),
        "warn",
        "lacks cudaGraphGetNodes",
    ),
    (check_packages.cuda_bindings, replace(H200, driver_cuda="12.9"), "warn", "bindings==12.*"),
    (check_packages.cuda_bindings, with_packages(H200, cuda_bindings="12.9.2"), "ok", ""),
    (check_packages.torchvision, H200, "ok", "torchvision 0.26.0+cu130"),
    (check_packages.torchvision, CPU, "not applicable", "not installed"),
    (check_packages.torchvision, OWN_TORCH, "not applicable", "pip install torchvision==0.26.0 --no-deps"),
    (
        check_packages.torchvision,
        with_packages(H200, torchvision="0.25.0"),
        "broken",
        "0.25.0 is not 0.26, the one for this",
    ),
    (
        check_packages.torchvision,
        replace(H200, pins={"torchvision>torch": "2.12.0"}),
        "broken",
        "asks for torch 2.12.0",
    ),
    (check_packages.torchvision, with_packages(H200, torchvision="0.26.0+cpu"), "broken", "another CUDA"),
    (check_packages.torchvision, with_packages(H200, torchvision="0.26.0"), "ok", ""),
    (check_packages.torchvision, with_packages(OWN_TORCH, torchvision="0.24.0"), "broken", "--no-deps (without"),
    (check_packages.torchvision, with_packages(OWN_TORCH, torchvision="0.26.0"), "ok", ""),
    (check_packages.torchvision, with_torch(with_packages(H200), version="2.14.0"), "warn", "unknown to this version"),
    (
        check_packages.torchvision,
        replace(with_torch(with_packages(H200), version="2.14.0"), pins={"torchvision>torch": "2.14.0"}),
        "ok",
        "",
    ),
    (check_packages.torchaudio, H200, "ok", "torchaudio 2.11.0"),
    (check_packages.torchaudio, with_torch(H200, version="2.13.0+cu130"), "ok", ""),
    (check_packages.torchaudio, with_packages(H200, torchaudio="2.10.0"), "broken", "pip install torchaudio==2.11.0"),
    (check_packages.torchaudio, CPU, "not applicable", ""),
    (check_packages.flashinfer, H200, "ok", "nvidia-nvshmem-cu13 3.4.5"),
    (check_packages.flashinfer, CPU, "not applicable", ""),
    (
        check_packages.flashinfer,
        with_torch(with_packages(H200, nvidia_nvshmem_cu13="3.4.5"), cuda="12.8"),
        "warn",
        "pip install nvidia-nvshmem-cu12",
    ),
    (check_packages.flashinfer, replace(H200, toolkit=None), "warn", "without nvcc"),
    (check_packages.flashinfer, replace(with_packages(H200, flashinfer_jit_cache="0.6.3"), toolkit=None), "ok", ""),
    (check_packages.rust, H200, "ok", "rustc 1.90.0"),
    (check_packages.rust, CPU, "not applicable", "on this Python they have wheels"),
    (check_packages.rust, replace(CPU, python="3.13.1"), "warn", "can't find Rust compiler"),
    (
        check_packages.rust,
        replace(CPU, rustc=InstalledProgram(path="rustc", trouble="failed")),
        "not applicable",
        "rustc failed",
    ),
    (check_system.memory, replace(H200, memory_bytes=8 * 2**30), "ok", "8.0 GiB"),
    (check_system.memory, replace(H200, memory_bytes=8 * 2**30 - 1), "warn", "TORCHINDUCTOR_COMPILE_THREADS"),
    (check_system.memory, replace(H200, memory_bytes=None), "not applicable", ""),
    (check_system.shared_memory, replace(H200, shm_bytes=2**30), "ok", "1.0 GiB"),
    (check_system.shared_memory, replace(H200, shm_bytes=2**30 - 1), "warn", "--shm-size"),
    (check_system.shared_memory, replace(H200, shm_bytes=64 * 2**20), "broken", "64 MiB for 8 GPUs"),
    (check_system.shared_memory, replace(H200, shm_bytes=64 * 2**20 + 1), "warn", "64 MiB"),
    (check_system.shared_memory, replace(ONE_GPU, shm_bytes=64 * 2**20), "warn", "64 MiB"),
    (check_system.shared_memory, replace(H200, shm_bytes=None), "warn", "not mounted"),
    (check_system.open_files, replace(H200, open_files=1024), "ok", "at most 1024"),
    (check_system.open_files, replace(H200, open_files=1023), "warn", "ulimit -n"),
    (check_system.open_files, replace(H200, open_files=None), "ok", "no limit"),
    (check_system.cache_folders, H200, "ok", "2 writable: /tmp/torchinductor_me, /home/me"),
    (
        check_system.cache_folders,
        with_folder(H200, is_writable=False),
        "broken",
        "export TORCHINDUCTOR_CACHE_DIR=$HOME",
    ),
    (check_system.cache_folders, with_folder(H200, what=MODELS, is_writable=False), "warn", "cannot be fetched"),
    (check_system.cache_folders, with_folder(H200, is_mine=False), "warn", "belongs to another user"),
    (check_system.cache_folders, with_folder(H200, others_may_write=True), "warn", "chmod o-w /tmp/torchinductor_me"),
    (check_system.cache_folders, with_folder(H200, may_execute=False), "broken", "mounted noexec"),
    (check_system.cache_folders, with_folder(H200, what=MODELS, may_execute=False), "ok", ""),
    (check_system.cache_folders, replace(H200, folders=()), "not applicable", ""),
    (check_system.disk_space, with_folder(H200, free_bytes=10 * 2**30), "ok", "10.0 GiB free at /tmp/torch"),
    (check_system.disk_space, with_folder(H200, free_bytes=10 * 2**30 - 1), "warn", "does not fit"),
    (check_system.disk_space, with_folder(H200, free_bytes=2**30), "warn", "1.0 GiB free"),
    (check_system.disk_space, with_folder(H200, free_bytes=2**30 - 1), "broken", "No space left"),
    (check_system.disk_space, with_folder(H200, free_bytes=0), "broken", "0 MiB free"),
    (check_system.disk_space, with_folder(H200, free_bytes=0, is_writable=False), "ok", "/home/me"),
    (check_system.disk_space, replace(H200, folders=()), "not applicable", ""),
    (check_system.variables, H200, "ok", "HF_HOME=/home/me"),
    (check_system.variables, CPU, "ok", "none set that matter"),
    (check_system.variables, HIDDEN, "warn", "unset CUDA_VISIBLE_DEVICES"),
    (
        check_system.variables,
        replace(CPU, refused_preloads=("/no/a.so: cannot open shared object file",)),
        "warn",
        "LD_PRELOAD has /no/a.so",
    ),
    (check_system.cache_folders, with_folder(CPU, variable="TMPDIR", exists=False), "warn", "is not there"),
    *(
        (check_system.variables, replace(H200, variables={name: value}), state, "")
        for name, value, state in [
            ("CUDA_VISIBLE_DEVICES", "0,1", "ok"),
            ("CUDA_VISIBLE_DEVICES", "", "warn"),
            ("CUDA_LAUNCH_BLOCKING", "1", "warn"),
            ("CUDA_LAUNCH_BLOCKING", "0", "ok"),
            ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "broken"),
            ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0", "ok"),
            ("TRITON_INTERPRET", "1", "broken"),
            ("TORCHDYNAMO_DISABLE", "1", "warn"),
            ("TORCH_COMPILE_DISABLE", "True", "warn"),
            ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1", "warn"),
            ("LD_LIBRARY_PATH", "/usr/lib:/usr/local/cuda/lib64/stubs", "broken"),
            ("LD_LIBRARY_PATH", "/usr/local/cuda-12.4/lib64:/usr/lib", "warn"),
            ("LD_LIBRARY_PATH", "/usr/local/cuda-13.0/lib64", "ok"),
            ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "ok"),
        ]
    ),
    (
        check_system.variables,
        replace(H200, variables={"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}),
        "warn",
        "only one of the two is used",
    ),
]


@pytest.mark.parametrize(("check", "machine", "state", "says"), CASES)
def test_rule(check: Check, machine: Machine, state: str, says: str) -> None:
    found = check(machine)
    assert found.state == state, found
    assert says in "\n".join((found.evidence, found.consequence, found.mend))
    if state in ("warn", "broken"):
        assert found.evidence
        assert found.consequence
        assert found.mend
    elif state == "ok":
        assert not found.consequence
        assert not found.mend


def test_every_check_has_a_case_for_a_good_and_for_a_bad_outcome() -> None:
    seen: dict[Check, set[str]] = {check: set() for check in CHECKS}
    for check, _, state, _ in CASES:
        seen[check].add(state)
    for check, states in seen.items():
        assert "ok" in states, check
        assert states & {"warn", "broken"}, check


def test_every_check_is_registered_once_and_has_a_name_of_its_own() -> None:
    modules = (check_compilers, check_gpu, check_packages, check_system)
    public = {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_")
        and function.__module__ == module.__name__
        and function.__annotations__["return"] == "Finding"
    }
    assert set(CHECKS) == public
    assert len(CHECKS) == len(public)
    names = [finding.name for finding in examine(H200)]
    assert len(set(names)) == len(names)
    assert names == [finding.name for finding in examine(BROKEN)], "a row keeps its name whatever is found"


def test_whole_machines() -> None:
    assert counts(examine(H200)) == {"broken": 0, "warn": 0, "ok": len(CHECKS), "not applicable": 0}
    assert counts(examine(CPU))["broken"] == counts(examine(CPU))["warn"] == 0
    assert counts(examine(BROKEN))["broken"] >= 10


@pytest.mark.parametrize("machine", [NO_TORCH, CRASHING, HANGING])
def test_without_torch_every_other_check_still_answers(machine: Machine) -> None:
    assert [finding.name for finding in examine(machine) if finding.state == "broken"] == ["torch"]


def test_the_mend_for_gcc_links_an_installed_older_one_or_installs_one() -> None:
    linked = check_compilers.host_gcc(with_toolkit(H200, "12.1", gcc="13.3.0")).mend
    assert linked.startswith(
        "ln -s /usr/bin/gcc-12 /home/me/.venv/bin/gcc && ln -s /usr/bin/g++-12 /home/me/.venv/bin/g++"
    )
    without = replace(with_toolkit(H200, "12.1", gcc="13.3.0"), older_gccs={"13": "/usr/bin/gcc-13"})
    assert "sudo apt install gcc-12 g++-12 && ln -s /usr/bin/gcc-12" in check_compilers.host_gcc(without).mend


@pytest.mark.parametrize("host", [None, replace(GCC, family="clang")])
def test_a_host_compiler_that_is_no_gcc(host: InstalledProgram | None) -> None:
    assert H200.toolkit is not None
    machine = replace(H200, toolkit=replace(H200.toolkit, host_compiler=host))
    assert check_compilers.host_gcc(machine).state == ("warn" if host is None else "not applicable")


def test_gpus_of_two_kinds_are_both_named_and_the_older_decides() -> None:
    machine = replace(H200, gpus=(H200_GPU, replace(H200_GPU, name="Tesla P100", architecture=60)))
    assert "NVIDIA H200, sm_90, 140 GiB; Tesla P100, sm_60" in check_gpu.gpu(machine).evidence
    assert check_gpu.architecture(machine).state == "broken"


def test_joined_findings_keep_the_worst_and_say_each_thing_once() -> None:
    parts = [
        Finding("x", "warn", "a", "l", "m"),
        Finding("x", "broken", "b", "l", "m"),
        Finding("x", "broken", "c", "l"),
    ]
    assert joined("x", parts) == Finding("x", "broken", "b; c", "l", "m")


@pytest.mark.parametrize(
    ("version", "own"),
    [
        ("2.11.0", False),
        ("2.11.0+cu130", False),
        ("2.13.0+cpu", False),
        ("2.12.0.dev20260301+cu130", False),
        ("2.13.0+rocm7.2", False),
        ("2.8.0a0+gitba56102", True),
        ("2.5.0a0+872d972e41.nv24.08", True),
        ("", False),
    ],
)
def test_which_torch_is_self_built(version: str, own: bool) -> None:
    assert check_packages.is_self_built(replace(with_torch(CPU, version=version), packages={})) is own


def test_the_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    torch = next(one for one in project["dependencies"] if one.startswith("torch"))
    for requirement, (first, end) in ((project["requires-python"], facts.PYTHON), (torch, facts.TORCH)):
        assert re.search(r">=([\d.]+),<([\d.]+)", requirement).groups() == (  # type: ignore[union-attr]
            ".".join(map(str, first)),
            ".".join(map(str, end)),
        )


def test_tables_cover_every_torch_that_is_supported() -> None:
    (major, first), (_, end) = facts.TORCH
    wanted = {f"{major}.{minor}" for minor in range(first, end)}
    for table in (facts.TORCHVISION, facts.TORCHAUDIO, facts.TRITON):
        assert wanted <= table.keys()
