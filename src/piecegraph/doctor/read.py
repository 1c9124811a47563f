"""Reading this machine. Comes in: the environment. Goes out: a :class:`~piecegraph.doctor.machine.Machine`.

Never raises for what it finds, sets nothing, and ends: every other program has a time limit.
"""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from piecegraph.base.progress import Progress
from piecegraph.doctor import read_host, read_packages, read_programs
from piecegraph.doctor.commands import Shell, refused_preloads
from piecegraph.doctor.machine import Machine

TOOL_LIMIT_S = 30.0
"""nvidia-smi wakes every GPU when the driver is not kept loaded: some seconds each."""

VARIABLES = (
    "CC",
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NVCC_CCBIN",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TMPDIR",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TORCH_COMPILE_DISABLE",
    "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
    "TRITON_PTXAS_PATH",
)

T = TypeVar("T")


def read_machine(
    environ: Mapping[str, str] = os.environ,
    progress: Progress | None = None,
    *,
    limit_s: float = TOOL_LIMIT_S,
    import_limit_s: float = read_packages.IMPORT_LIMIT_S,
) -> Machine:
    """Read everything the checks look at. The programs run side by side; importing torch takes the longest."""
    shell = Shell(environ, limit_s)
    packages = read_packages.read_packages()
    with (progress or Progress(False)).bar("reading the machine", 10) as bar, ThreadPoolExecutor(10) as pool:

        def start(what: str, read: Callable[..., T], *arguments: Any) -> Future[T]:
            future = pool.submit(read, shell, *arguments)
            future.add_done_callback(lambda _: bar.advance(what))
            return future

        torch = start("torch", read_packages.read_torch, import_limit_s)
        bindings = start("cuda-bindings", read_packages.read_bindings, import_limit_s)
        driver_cuda = start("driver", read_packages.read_driver_cuda)
        gpus = start("GPUs", read_host.read_gpus)
        toolkit = start("nvcc", read_programs.read_toolkit)
        c_compiler = start("C compiler", read_programs.read_c_compiler)
        cxx_compiler = start("C++ compiler", read_programs.read_cxx_compiler)
        triton_ptxas = start("Triton's ptxas", read_programs.read_triton_ptxas)
        ptxas = start("ptxas", read_programs.read_program, "ptxas")
        rustc = start("rustc", read_programs.read_program, "rustc")

        seen_torch, torch_gpus = torch.result()
        seen_gpus, driver, gpu_trouble = gpus.result()
        return Machine(
            system=platform.system(),
            python=platform.python_version(),
            has_python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
            is_free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
            packages=packages,
            pins=read_packages.read_pins(),
            torch=seen_torch,
            cuda_bindings=bindings.result(),
            driver=driver,
            driver_cuda=driver_cuda.result(),
            gpus=seen_gpus or torch_gpus,
            gpu_trouble="" if torch_gpus and not seen_gpus else gpu_trouble,
            toolkit=toolkit.result(),
            c_compiler=c_compiler.result(),
            cxx_compiler=cxx_compiler.result(),
            older_gccs=read_programs.read_older_gccs(shell),
            triton_ptxas=triton_ptxas.result(),
            ptxas=ptxas.result(),
            rustc=rustc.result(),
            shm_bytes=read_host.read_shm_bytes(),
            memory_bytes=read_host.read_memory_bytes(),
            open_files=read_host.read_open_files(),
            folders=read_host.read_folders(environ, packages),
            refused_preloads=refused_preloads(shell),
            variables={name: environ[name] for name in VARIABLES if environ.get(name) is not None},
            scripts_folder=str(Path(sys.executable).parent),
        )
