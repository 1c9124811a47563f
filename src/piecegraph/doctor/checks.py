"""All checks, in the order they are shown: each a pure function of the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from piecegraph.doctor import check_compilers, check_gpu, check_packages, check_system, check_torch
from piecegraph.doctor.finding import STATES, Finding, State
from piecegraph.doctor.machine import Machine

CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    check_system.system,
    check_torch.python,
    check_torch.torch,
    check_gpu.gpu,
    check_gpu.cuda_build,
    check_gpu.driver,
    check_gpu.architecture,
    check_gpu.clocks,
    check_compilers.toolkit,
    check_compilers.host_gcc,
    check_compilers.compilers,
    check_compilers.python_headers,
    check_torch.triton,
    check_compilers.ptxas,
    check_packages.cuda_bindings,
    check_torch.torchvision,
    check_torch.torchaudio,
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


def counts(findings: tuple[Finding, ...]) -> dict[State, int]:
    """How many findings are in each state, the worst first."""
    counted = Counter(finding.state for finding in findings)
    return {state: counted[state] for state in STATES}
