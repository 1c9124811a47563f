"""Compilers: the CUDA toolkit and its host compiler, and what Inductor and Triton call."""

from __future__ import annotations

from pathlib import Path

from piecegraph.doctor import facts
from piecegraph.doctor.check_gpu import architectures
from piecegraph.doctor.finding import Finding, broken, joined, not_applicable, ok, warn
from piecegraph.doctor.machine import InstalledProgram, Machine, Toolkit, minor, numbers

NO_NVCC = "packages that build CUDA kernels; piecegraph, Inductor and Triton need none"


def toolkit(machine: Machine) -> Finding:
    """Whether nvcc can compile for these GPUs, and fits the CUDA of torch."""
    name, seen = "CUDA toolkit", machine.toolkit
    if seen is None:
        return not_applicable(name, "no nvcc", NO_NVCC)
    if not seen.nvcc.version:
        lost = "no package can build CUDA kernels"
        return warn(name, f"{seen.nvcc.path} {seen.nvcc.trouble or 'tells no version'}", lost, "install it afresh")
    evidence = f"nvcc {seen.nvcc.version}"
    findings = [_compiles(name, evidence, seen, sm) for sm in architectures(machine)]
    built_for = machine.torch.cuda
    if built_for and numbers(built_for)[0] != numbers(seen.nvcc.version)[0]:
        lost = (
            "torch refuses to build extensions: the detected CUDA version mismatches the version it was compiled with"
        )
        mend = f"install toolkit {minor(built_for)} and export CUDA_HOME=/usr/local/cuda-{minor(built_for)}"
        findings.append(warn(name, f"{evidence}, torch is built for CUDA {built_for}", lost, mend))
    return joined(name, findings or [ok(name, evidence)])


def host_gcc(machine: Machine) -> Finding:
    """Whether nvcc accepts the gcc it would call."""
    name, seen = "gcc for nvcc", machine.toolkit
    if seen is None or not seen.nvcc.version:
        return not_applicable(name, "no nvcc", NO_NVCC)
    host = seen.host_compiler
    if host is None:
        evidence = f"nvcc {seen.nvcc.version} finds no host compiler"
        return warn(name, evidence, "no package can build CUDA kernels", "sudo apt install gcc g++")
    if host.family != "gcc" or not host.version:
        return not_applicable(name, f"{host.path} {host.version}: not a gcc whose version is known")
    evidence = f"nvcc {seen.nvcc.version} calls gcc {host.version} ({host.path})"
    highest = seen.highest_gcc or facts.HIGHEST_GCC.get(minor(seen.nvcc.version))
    if highest is None:
        lost = "nvcc may refuse this gcc"
        return warn(name, f"{evidence}: {facts.UNKNOWN}", lost, "see the toolkit's include/crt/host_config.h")
    if numbers(host.version)[0] <= highest:
        return ok(name, f"{evidence}, accepts up to {highest}")
    lost = f"unsupported GNU version! gcc versions later than {highest} are not supported: CUDA kernels do not build"
    return broken(name, f"{evidence}, accepts up to {highest}", lost, _link_older_gcc(machine, highest))


def compilers(machine: Machine) -> Finding:
    """The C and C++ compilers that Inductor and Triton call at run time."""
    name = "C compilers"
    findings = [
        _called(name, machine.c_compiler, "gcc", "Triton cannot build the launcher of any kernel"),
        _called(name, machine.cxx_compiler, "g++", "Inductor cannot compile what runs on the CPU"),
    ]
    return joined(name, findings)


def python_headers(machine: Machine) -> Finding:
    """``Python.h``, which Triton's launchers and Inductor's C++ include."""
    name = "Python.h"
    if machine.has_python_headers:
        return ok(name, "found")
    lost = "fatal error: Python.h: No such file or directory, at the first compiled kernel"
    package = f"python{minor(machine.python)}-dev"
    return broken(
        name, "not found", lost, f"sudo apt install {package} (or python3-devel, or a Python from uv or conda)"
    )


def ptxas(machine: Machine) -> Finding:
    """The assembler that Triton calls, and whether it knows these GPUs."""
    name, seen = "ptxas", machine.triton_ptxas
    if not machine.torch.cuda:
        return not_applicable(name, "torch is no CUDA build", "Triton's kernels are assembled with it")
    lost = "Triton cannot assemble any kernel"
    found = machine.ptxas.path if machine.ptxas else ""
    mend = f"export TRITON_PTXAS_PATH={found}" if found else "pip install --force-reinstall triton"
    if seen is None:
        if not {"triton", "pytorch-triton"} & machine.packages.keys():
            return not_applicable(name, "Triton is not installed")
        return broken(name, "Triton's package has no ptxas", lost, mend)
    if not seen.version:
        mend = "unset TRITON_PTXAS_PATH" if "TRITON_PTXAS_PATH" in machine.variables else mend
        return broken(name, f"{seen.path} {seen.trouble or 'tells no version'}", lost, mend)
    evidence = f"ptxas {seen.version} ({_short(seen.path)})"
    young = [sm for sm in architectures(machine) if numbers(facts.FIRST_TOOLKIT.get(sm, "")) > numbers(seen.version)]
    if young:
        first = facts.FIRST_TOOLKIT[young[0]]
        mend = f"export TRITON_PTXAS_PATH to the ptxas of CUDA {first} or later"
        return broken(name, evidence, f"sm_{young[0]} is known from CUDA {first} on: {lost}", mend)
    return ok(name, evidence)


def _compiles(name: str, evidence: str, seen: Toolkit, sm: int) -> Finding:
    version, first = seen.nvcc.version, facts.FIRST_TOOLKIT.get(sm)
    evidence = f"{evidence}, GPU sm_{sm}"
    if seen.architectures:
        knows = sm in seen.architectures
    elif first is None:
        lost = "it is not known whether nvcc compiles for this GPU"
        return warn(name, f"{evidence}: {facts.UNKNOWN}", lost, "nvcc --list-gpu-arch lists what it can")
    else:
        knows = numbers(first) <= numbers(version) and sm >= facts.LOWEST_ARCHITECTURE.get(numbers(version)[0], 0)
    if not knows:
        too_new = first is None or numbers(version) < numbers(first)
        mend = f"install CUDA toolkit {first or 'of a later version'}" if too_new else "install CUDA toolkit 12.9"
        return broken(name, evidence, f"nvcc fatal: Unsupported gpu architecture 'compute_{sm}'", f"{mend} and use it")
    practical = facts.PRACTICAL_TOOLKIT.get(sm)
    if practical and numbers(version) < numbers(practical):
        lost = "what is built for Hopper asks for more (FlashAttention 3: CUDA 12.3)"
        return warn(name, evidence, lost, f"install CUDA toolkit {practical} or later")
    return ok(name, evidence)


def _link_older_gcc(machine: Machine, highest: int) -> str:
    """Put an older gcc before the new one on ``PATH``; the folder of this environment's Python is there already."""
    usable = [int(major) for major in machine.older_gccs if int(major) <= highest]
    if not usable:
        package, path = f"sudo apt install gcc-{highest} g++-{highest} && ", f"/usr/bin/gcc-{highest}"
    else:
        package, path = "", machine.older_gccs[str(max(usable))]
    other = str(Path(path).with_name(Path(path).name.replace("gcc", "g++")))
    folder = machine.scripts_folder
    return f"{package}ln -s {path} {folder}/gcc && ln -s {other} {folder}/g++ (or export NVCC_CCBIN={other})"


def _called(name: str, program: InstalledProgram | None, usual: str, lost: str) -> Finding:
    if program is None:
        return broken(name, f"no {usual}", lost, "sudo apt install gcc g++")
    if program.trouble:
        mend = "point CC and CXX at compilers that run, or unset them"
        return broken(name, f"{program.path} {program.trouble}", lost, mend)
    return ok(name, f"{Path(program.path).name} {program.version}")


def _short(path: str) -> str:
    return "Triton's own" if "/triton/backends/" in path else path
