"""All checks, in the order they are shown: each a pure function of the machine."""

from __future__ import annotations

from collections.abc import Callable

from piecegraph.doctor import check_compilers, check_gpu, check_packages, check_system
from piecegraph.doctor.finding import Finding
from piecegraph.doctor.machine import Machine

CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    check_system.system,
    check_packages.python,
    check_packages.torch,
    check_gpu.gpu,
    check_gpu.cuda_build,
    check_gpu.driver,
    check_gpu.architecture,
    check_gpu.clocks,
    check_compilers.toolkit,
    check_compilers.host_gcc,
    check_compilers.compilers,
    check_compilers.python_headers,
    check_packages.triton,
    check_compilers.ptxas,
    check_packages.cuda_bindings,
    check_packages.torchvision,
    check_packages.torchaudio,
    check_packages.flashinfer,
    check_packages.rust,
    check_system.memory,
    check_system.shared_memory,
    check_system.open_files,
    check_system.cache_folders,
    check_system.disk_space,
    check_system.variables,
)


def examine(machine: Machine) -> tuple[Finding, ...]:
    """Every check's finding, in order."""
    return tuple(check(machine) for check in CHECKS)
